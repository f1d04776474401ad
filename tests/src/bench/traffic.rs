//! Bytes that must cross the wire, and that device memory must read and write, counted from the routing.

use ferry::layout::Shape;
use ferry::{CombineMode, Config, Plan, ReceiveLayout, TokenFormat};
use ferry_reference::Problem;

use ferry_rig::formats::given::Given;

/// Bytes of the busiest rank: the larger of what one sends and what one receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Payload of dispatch.
    pub dispatch_payload: u64,
    /// Dispatch with headers and scales.
    pub dispatch_wire: u64,
    /// Combine, which is payload alone.
    pub combine_wire: u64,
}

impl Traffic {
    /// Counts those of the first `tokens` tokens of every rank.
    pub fn of(problem: &Problem, shape: &Shape, tokens: usize) -> Self {
        let (once, each) = pairs(problem, tokens);
        let rows = busiest(&once);
        let answers = match shape.mode() {
            CombineMode::Reduced => rows,
            CombineMode::Exact => busiest(&each),
        };
        Self {
            dispatch_payload: rows * u64::from(shape.payload_bytes()),
            dispatch_wire: rows * u64::from(shape.dispatch_row_bytes()),
            combine_wire: answers * u64::from(shape.combine_row_bytes()),
        }
    }
}

/// Bytes that the busiest rank reads and writes in device memory, where all windows are in that of one GPU:
/// tokens, rows on their way, the own ones included, and outputs. Ids, weights and counts are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTraffic {
    /// Bytes of dispatch: a token is read once and written for every rank that it goes to, where it is read
    /// and written for every expert.
    pub dispatch: u64,
    /// Bytes of combine: rows are read, written for their sources, and read there; sums are written.
    pub combine: u64,
}

impl MemoryTraffic {
    /// Counts those of the first `tokens` tokens of every rank, which dispatch gets in this form.
    pub fn of(problem: &Problem, plan: &Plan, given: Given, tokens: usize) -> Self {
        let ranks = 0..problem.ranks;
        let ranks = ranks.map(|rank| Self::of_rank(problem, plan, given, tokens, rank));
        ranks.fold(Self::default(), |most, rank| Self {
            dispatch: most.dispatch.max(rank.dispatch),
            combine: most.combine.max(rank.combine),
        })
    }

    fn of_rank(problem: &Problem, plan: &Plan, given: Given, tokens: usize, rank: usize) -> Self {
        let (shape, config) = (plan.shape(), plan.config());
        let (once, each) = pairs(problem, tokens);
        let sent = |counts: &Counts| counts[rank].iter().sum::<u64>();
        let received = |counts: &Counts| counts.iter().map(|row| row[rank]).sum::<u64>();
        let of_rank = problem.inputs[rank].topk_ids.chunks(problem.top_k);
        let routed = of_rank
            .clone()
            .take(tokens)
            .filter(|ids| ids.iter().any(|&id| id >= 0));
        let answers = match shape.mode() {
            CombineMode::Reduced => &once,
            CombineMode::Exact => &each,
        };
        let (token, row) = (bytes_of_token(shape), u64::from(shape.dispatch_row_bytes()));
        let output = bytes_of_output_row(shape);
        // Rows that are read where they came, and rows of the outputs, which are expert rows of combine.
        let (read, rows) = match config.receive.layout() {
            ReceiveLayout::ByExpert | ReceiveLayout::Padded => (received(&once), received(&each)),
            ReceiveLayout::View => (0, 0),
            ReceiveLayout::Strided | ReceiveLayout::Compact => (received(&once), received(&once)),
        };
        let returned = match config.receive.layout() {
            ReceiveLayout::ByExpert | ReceiveLayout::Padded => received(&each),
            _ => received(&once),
        };
        Self {
            dispatch: routed.count() as u64 * bytes_of_input(shape, given)
                + (sent(&once) + read) * row
                + rows * output
                + padding(problem, config, tokens, rank) * bytes_of_encoded(shape),
            combine: token
                * (returned
                    + received(answers)
                    + sent(answers)
                    + of_rank.take(tokens).count() as u64),
        }
    }
}

/// Bytes of a row in BF16, as dispatch gets it and combine gives it.
pub(super) fn bytes_of_token(shape: &Shape) -> u64 {
    2 * u64::from(shape.hidden)
}

/// A token as dispatch gets it.
fn bytes_of_input(shape: &Shape, given: Given) -> u64 {
    match given {
        Given::Bf16 => bytes_of_token(shape),
        _ => bytes_of_encoded(shape),
    }
}

/// A token in the format in which it travels: its elements and its scales.
pub(super) fn bytes_of_encoded(shape: &Shape) -> u64 {
    let row_scale = match shape.format() {
        TokenFormat::Nvfp4RowScaled(_) => 2,
        _ => 0,
    };
    u64::from(shape.payload_bytes() + 4 * shape.scale_words() + row_scale)
}

/// A row of dispatch's outputs: the token, and where it came from.
fn bytes_of_output_row(shape: &Shape) -> u64 {
    bytes_of_encoded(shape) + SRC_INFO_BYTES
}

/// Rows of zeros behind the experts of a rank, if there are any.
fn padding(problem: &Problem, config: &Config, tokens: usize, rank: usize) -> u64 {
    let receive = config.receive.fields();
    if !receive.clear_padding {
        return 0;
    }
    let local = problem.local_experts();
    let mut rows = vec![0_usize; local];
    for input in &problem.inputs {
        for &id in input.topk_ids.iter().take(tokens * problem.top_k) {
            if let Some(expert) = usize::try_from(id).ok().filter(|id| id / local == rank) {
                rows[expert % local] += 1;
            }
        }
    }
    let alignment = receive.expert_alignment;
    let padding = rows
        .iter()
        .map(|rows| rows.next_multiple_of(alignment) - rows);
    padding.sum::<usize>() as u64
}

/// Rank and token of a row.
const SRC_INFO_BYTES: u64 = 8;

/// Counts by source and target rank.
type Counts = Vec<Vec<u64>>;

/// Tokens that go from rank to rank, and entries that do.
fn pairs(problem: &Problem, tokens: usize) -> (Counts, Counts) {
    let zeros = vec![vec![0; problem.ranks]; problem.ranks];
    let (mut once, mut each) = (zeros.clone(), zeros);
    for (source, input) in problem.inputs.iter().enumerate() {
        for ids in input.topk_ids.chunks(problem.top_k).take(tokens) {
            let mut here = vec![0; problem.ranks];
            for &id in ids {
                if let Ok(expert) = usize::try_from(id) {
                    here[expert / problem.local_experts()] += 1;
                }
            }
            for (target, entries) in here.into_iter().enumerate() {
                if entries > 0 {
                    once[source][target] += 1;
                    each[source][target] += entries;
                }
            }
        }
    }
    (once, each)
}

/// The most that any rank sends to others, or receives from them.
fn busiest(counts: &Counts) -> u64 {
    let others = |rank: usize| (0..counts.len()).filter(move |&other| other != rank);
    let sent = |rank: usize| others(rank).map(|target| counts[rank][target]).sum();
    let received = |rank: usize| others(rank).map(|source| counts[source][rank]).sum::<u64>();
    let ranks = 0..counts.len();
    let most = ranks.map(|rank| received(rank).max(sent(rank)));
    most.max().unwrap_or(0)
}

/// Probability that a token with uniform routing touches a given rank: one minus that of drawing
/// `top_k` of `experts` without any of that rank's.
pub fn touch_probability(ranks: usize, experts: usize, top_k: usize) -> f64 {
    let local = experts / ranks;
    let missed: f64 = (0..top_k)
        .map(|drawn| (experts - local).saturating_sub(drawn) as f64 / (experts - drawn) as f64)
        .product();
    1.0 - missed
}

#[cfg(test)]
mod tests {
    use ferry::{ByExpert, Config, Group, Plan, Receive};
    use ferry_reference::workload::Routing;

    use super::*;

    fn problem(routing: Routing, tokens: usize) -> Problem {
        ferry_rig::problem(vec![tokens; 4], [256, 8, 1], routing, 3)
    }

    #[test]
    fn uniform_routing_touches_the_known_number_of_ranks() {
        assert!((4.0 * touch_probability(4, 256, 8) - 3.61).abs() < 0.01);
        assert!((7.0 * touch_probability(8, 256, 8) - 4.63).abs() < 0.02);
        assert_eq!(touch_probability(1, 8, 2), 1.0);
    }

    #[test]
    fn counting_agrees_with_the_formula() {
        let (once, each) = pairs(&problem(Routing::Uniform, 4000), 2000);
        let expected = 3.0 * touch_probability(4, 256, 8) * 2000.0;
        for (rank, row) in once.iter().enumerate() {
            let sent = (row.iter().sum::<u64>() - row[rank]) as f64;
            assert!(
                (sent - expected).abs() < 0.03 * expected,
                "{sent} {expected}"
            );
        }
        let entries: u64 = each.iter().flatten().sum();
        assert_eq!(entries, 4 * 2000 * 8);
        let own: u64 = (0..4).map(|rank| each[rank][rank]).sum();
        assert!((own as f64 - 4.0 * 2000.0 * 2.0).abs() < 1000.0, "{own}");
    }

    #[test]
    fn a_popular_rank_is_the_busiest() {
        let (once, _) = pairs(&problem(Routing::AllToOne { expert: 70 }, 10), 10);
        assert_eq!(busiest(&once), 30);
    }

    fn config(format: TokenFormat, combine: CombineMode) -> Config {
        Config {
            format,
            combine,
            ..Config::new(256, 8, 7168, 4096)
        }
    }

    fn plan(config: Config) -> Plan {
        Plan::new(&Group::simulated(4, 0).unwrap(), config).unwrap()
    }

    /// 4 ranks with 4,096 tokens of 7,168 elements, at 981 GB/s: as was counted by hand.
    #[test]
    fn device_memory_reads_and_writes_own_rows_too() {
        let problem = problem(Routing::Uniform, 4096);
        let us = |bytes: u64| bytes as f64 / 981e3;
        let of = |format, mode| {
            MemoryTraffic::of(&problem, &plan(config(format, mode)), Given::Bf16, 4096)
        };
        let bf16 = of(TokenFormat::Bf16, CombineMode::Reduced);
        assert!((us(bf16.dispatch) - 970.0).abs() < 15.0, "{bf16:?}");
        assert!((us(bf16.combine) - 971.0).abs() < 15.0, "{bf16:?}");
        let fp8 = of(TokenFormat::BlockwiseFp8, CombineMode::Reduced);
        assert!((us(fp8.dispatch) - 534.0).abs() < 10.0, "{fp8:?}");
        assert_eq!(fp8.combine, bf16.combine);
        // Every row is written and read once more, and no sums of a rank are.
        let exact = of(TokenFormat::Bf16, CombineMode::Exact);
        let rows = 14_336.0 * 4096.0;
        let more = (exact.combine - bf16.combine) as f64 / rows;
        assert!((more - 2.0 * (8.0 - 3.61)).abs() < 0.3, "{more}");
    }

    #[test]
    fn the_rank_of_a_popular_expert_reads_and_writes_most() {
        let problem = problem(Routing::AllToOne { expert: 70 }, 10);
        let bf16 = config(TokenFormat::Bf16, CombineMode::Reduced);
        let by_expert = plan(bf16);
        let (_, each) = pairs(&problem, 4);
        let here: u64 = each.iter().map(|row| row[1]).sum();
        let (token, row) = (14_336, u64::from(by_expert.shape().dispatch_row_bytes()));
        let wanted = MemoryTraffic {
            dispatch: 4 * token + (4 + 16) * row + here * (token + 8),
            combine: (here + 16 + 4 + 4) * token,
        };
        let of = |plan: &Plan| MemoryTraffic::of(&problem, plan, Given::Bf16, 4);
        assert_eq!(of(&by_expert), wanted);
        let view = of(&plan(Config {
            receive: Receive::of(ReceiveLayout::View),
            ..bf16
        }));
        assert_eq!(view.dispatch, 4 * token + 4 * row);
        assert_eq!(view.combine, (16 + 16 + 4 + 4) * token);
    }

    /// Experts of rank 1 have less than 64 rows each, and are aligned to 64.
    #[test]
    fn rows_of_zeros_are_written() {
        let problem = problem(Routing::AllToOne { expert: 70 }, 10);
        let aligned = |clear_padding| Config {
            receive: Receive::ByExpert(ByExpert {
                alignment: 64,
                clear_padding,
                ..ByExpert::PLAIN
            }),
            ..config(TokenFormat::BlockwiseFp8, CombineMode::Reduced)
        };
        let inputs = problem.inputs.iter();
        let ids = inputs.flat_map(|input| &input.topk_ids[..4 * problem.top_k]);
        let mut here: Vec<_> = ids.filter(|id| (64..128).contains(*id)).collect();
        let rows = here.len();
        here.sort_unstable();
        here.dedup();
        let zeros = (64 * here.len() - rows) as u64;
        assert_eq!(padding(&problem, &aligned(true), 4, 1), zeros);
        assert_eq!(padding(&problem, &aligned(false), 4, 1), 0);
        let of = |given, clears| {
            MemoryTraffic::of_rank(&problem, &plan(aligned(clears)), given, 4, 1).dispatch
        };
        let encoded = 7168 + 4 * 56;
        let (without, with) = (of(Given::Bf16, false), of(Given::Bf16, true));
        assert_eq!(with - without, zeros * encoded);
        assert_eq!(
            without - of(Given::Encoded, false),
            4 * (2 * 7168 - encoded)
        );
    }
}
