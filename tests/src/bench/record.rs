//! Results of the benchmark: JSON lines and tables.

use serde::Serialize;

use super::statistics::Summary;

/// Limits of the machine.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Limits {
    /// Highest rate of an all-to-all copy, per GPU and direction, in GB/s.
    pub wire_gb_per_s: f64,
    /// Rate of a copy in device memory, reads and writes counted, on a call's multiprocessors, in GB/s.
    pub hbm_gb_per_s: f64,
    /// Time of a signal there and back.
    pub round_trip_us: f64,
    /// Period of empty kernels in a row.
    pub launch_us: f64,
    /// Time of an empty kernel with the blocks and threads of a call, measured as calls are.
    pub empty_call: EmptyCall,
    /// Copies of as many rows as dispatch and combine send.
    pub copies: Vec<CopyLimit>,
}

/// Time between the events of a call that does nothing, in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct EmptyCall {
    /// Time after a flush of the L2 cache.
    pub cold_us: f64,
    /// Time without a flush.
    pub warm_us: f64,
}

/// An all-to-all copy.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CopyLimit {
    /// Tokens per rank; the copy has as many rows as uniform routing sends for them.
    pub tokens: usize,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// Bytes that each GPU sends.
    pub bytes: u64,
    /// Time with stores.
    pub stores_us: f64,
    /// Time with bulk copies; 0 if a GPU has none.
    pub bulk_us: f64,
}

impl CopyLimit {
    /// The shorter of the two times.
    pub fn best_us(&self) -> f64 {
        if self.bulk_us > 0.0 {
            self.bulk_us.min(self.stores_us)
        } else {
            self.stores_us
        }
    }
}

impl Limits {
    /// Copy of rows of `row_bytes` for `tokens`.
    pub fn copy(&self, tokens: usize, row_bytes: u32) -> Option<&CopyLimit> {
        self.copies
            .iter()
            .find(|copy| copy.tokens == tokens && copy.row_bytes == row_bytes)
    }
}

/// Dispatch or combine. Times in microseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Phase {
    /// GPU time, slowest rank.
    pub gpu_us: Summary,
    /// Host time of the call.
    pub host_us: Summary,
    /// GPU time of the halves: sending, waiting.
    pub halves_us: Option<[f64; 2]>,
    /// Payload that the busiest rank sends or receives.
    pub payload_bytes: u64,
    /// Same with headers and scales.
    pub wire_bytes: u64,
    /// `wire_bytes` over the median.
    pub gb_per_s: f64,
    /// Time of `wire_bytes` at the wire's limit.
    pub floor_us: Option<f64>,
    /// Time of a copy of as many rows.
    pub copy_us: Option<f64>,
    /// Bytes that the busiest rank reads and writes in device memory, if ranks share a GPU.
    pub memory_bytes: Option<u64>,
    /// Time of `memory_bytes` at the rate of a copy in device memory.
    pub memory_us: Option<f64>,
    /// Time of NCCL's all-gather or reduce-scatter of the same tokens.
    pub nccl_us: Option<f64>,
}

impl Phase {
    /// Ratio of the median to the floor.
    pub fn times_floor(&self) -> Option<f64> {
        self.floor_us
            .filter(|&floor| floor > 0.0)
            .map(|floor| self.gpu_us.median / floor)
    }

    /// Ratio of the median to NCCL's time.
    pub fn times_nccl(&self) -> Option<f64> {
        self.nccl_us
            .filter(|&nccl| nccl > 0.0)
            .map(|nccl| self.gpu_us.median / nccl)
    }
}

/// A line of the results.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Record {
    /// "local" (one process), "node" or "nvshmem" (one process per rank).
    pub group: &'static str,
    /// Number of ranks.
    pub ranks: usize,
    /// Most ranks on one GPU: 1 if none is shared.
    pub ranks_per_gpu: usize,
    /// Tokens per rank.
    pub tokens: usize,
    /// Most tokens of the plan.
    pub plan_tokens: usize,
    /// Layout of received rows.
    pub receive: &'static str,
    /// Alignment of experts.
    pub alignment: usize,
    /// Whether rows that pad an expert are zeros.
    pub clear_padding: bool,
    /// Whether dispatch gets rows that are encoded already.
    pub pass_through: bool,
    /// Elements of a token.
    pub hidden: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts of all ranks.
    pub experts: usize,
    /// "uniform", "zipf:0.5", ..
    pub routing: String,
    /// Microseconds by which the last rank began later than the others, which waited for it; not in pairs.
    pub late_us: u32,
    /// Name of the dispatch format.
    pub format: &'static str,
    /// "reduced" or "exact".
    pub mode: &'static str,
    /// Whether the L2 cache was flushed before each call.
    pub l2_flushed: bool,
    /// Whether kernels were compiled for the shape.
    pub specialised: bool,
    /// Most multiprocessors that a kernel occupies.
    pub max_sms: Option<u32>,
    /// Dispatch.
    pub dispatch: Phase,
    /// Combine.
    pub combine: Phase,
    /// Period of pairs in a graph; the cache is not flushed there.
    pub pair_us: Option<f64>,
    /// The 99th percentile of replays of that graph: of each replay the mean of its pairs.
    pub pair_p99_us: Option<f64>,
    /// Extent of the comparison with the oracle.
    pub verified: &'static str,
}

/// The head of a table.
pub const HEAD: &str = concat!(
    "                   |  dispatch, µs                                        ",
    "|  combine, µs                                         |  pair, µs    | host, µs\n",
    "tokens  L2 kernels | median    p99   GB/s  floor (x)     copy   NCCL (x)  ",
    "| median    p99   GB/s  floor (x)     copy   NCCL (x)  |  p50    p99  | disp comb",
);

impl Record {
    /// State of the L2 cache, in a word.
    pub const fn cache(&self) -> &'static str {
        if self.l2_flushed { "cold" } else { "warm" }
    }

    /// Kind of the kernels, in a word.
    pub const fn kernels(&self) -> &'static str {
        if self.specialised {
            "special"
        } else {
            "general"
        }
    }

    /// A line of the table.
    pub fn row(&self) -> String {
        let [l2, kernels] = [self.cache(), self.kernels()];
        format!(
            "{:>5} {l2} {kernels} | {} | {} | {:>6} {:>6} | {:>4.1} {:>4.1}",
            self.tokens,
            cells(&self.dispatch),
            cells(&self.combine),
            number(self.pair_us),
            number(self.pair_p99_us),
            self.dispatch.host_us.median,
            self.combine.host_us.median,
        )
    }

    /// A line about the halves of the calls, if they were timed.
    pub fn halves(&self) -> Option<String> {
        let [send, receive] = self.dispatch.halves_us?;
        let [back, sum] = self.combine.halves_us?;
        Some(format!(
            "           split: dispatch sends {send:.1}, waits {receive:.1}; \
             combine sends {back:.1}, waits {sum:.1}"
        ))
    }

    /// A line about the limit of device memory, if ranks share a GPU.
    pub fn memory(&self) -> Option<String> {
        let of = |phase: &Phase| {
            let limit = phase.memory_us?;
            Some(format!("{limit:.1} ({:.2})", phase.gpu_us.median / limit))
        };
        let (dispatch, combine) = (of(&self.dispatch)?, of(&self.combine)?);
        Some(format!(
            "           device memory: dispatch {dispatch}, combine {combine}"
        ))
    }

    /// Title of the record's table.
    pub fn title(&self) -> String {
        let sms = self
            .max_sms
            .map_or("all SMs".to_owned(), |sms| format!("{sms} SMs"));
        let on_gpus = match self.ranks_per_gpu {
            0 | 1 => "GPUs".to_owned(),
            shared => format!("ranks, {shared} on a GPU"),
        };
        let Self {
            format,
            mode,
            receive,
            ranks,
            hidden,
            top_k,
            experts,
            routing,
            late_us,
            ..
        } = self;
        let late = match late_us {
            0 => String::new(),
            us => format!(", the last rank {us} µs late"),
        };
        let given = if self.pass_through {
            " (encoded before)"
        } else {
            ""
        };
        let aligned = match (self.alignment, self.clear_padding) {
            (1, _) => String::new(),
            (rows, false) => format!(" aligned to {rows}"),
            (rows, true) => format!(" aligned to {rows} with zeros"),
        };
        format!(
            "{format} dispatch{given}, {receive}{aligned}, {mode} combine: {ranks} {on_gpus}, \
             hidden {hidden}, top-{top_k} of {experts}, {routing} routing, {sms}{late}"
        )
    }
}

fn cells(phase: &Phase) -> String {
    format!(
        "{:>6.1} {:>6.1} {:>6.1} {:>6} {:<6} {:>6} {:>6} {:<6}",
        phase.gpu_us.median,
        phase.gpu_us.p99,
        phase.gb_per_s,
        number(phase.floor_us),
        ratio(phase.times_floor()),
        number(phase.copy_us),
        number(phase.nccl_us),
        ratio(phase.times_nccl()),
    )
}

fn number(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.1}"))
}

fn ratio(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("({value:.2})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_gpu_are_set_beside_its_memory() {
        let phase = |median: f64, memory_us| Phase {
            gpu_us: Summary {
                median,
                ..Summary::default()
            },
            memory_us,
            ..Phase::default()
        };
        let record = |ranks_per_gpu, limits: [Option<f64>; 2]| Record {
            ranks: 4,
            ranks_per_gpu,
            dispatch: phase(30.0, limits[0]),
            combine: phase(8.0, limits[1]),
            ..Record::default()
        };
        let shared = record(4, [Some(20.0), Some(10.0)]);
        let line = "           device memory: dispatch 20.0 (1.50), combine 10.0 (0.80)";
        assert_eq!(shared.memory().as_deref(), Some(line));
        assert!(shared.title().contains(": 4 ranks, 4 on a GPU, hidden"));
        let own = record(1, [None, None]);
        assert_eq!(own.memory(), None);
        assert!(own.title().contains(": 4 GPUs, hidden"));
    }
}
