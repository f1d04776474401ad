//! Reads the JSON lines of `ferry-tests bench --json`.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

/// Numbers of tokens and of GPUs that the page is about.
pub(super) const TOKENS: [usize; 6] = [1, 8, 32, 128, 512, 4096];
pub(super) const RANKS: [usize; 3] = [2, 4, 8];

/// Characters of `2026-11-22`.
const DATE_LENGTH: usize = 10;

/// A committed file.
pub(super) struct RecordFile {
    name: String,
    date: String,
    hardware: String,
    commit: String,
    /// The same for all rounds.
    gpus: Gpus,
    limits: Option<Limits>,
    rounds: Vec<RoundLine>,
    silu: Vec<SiluTime>,
}

/// Numbers of ranks, and of ranks per GPU. Results of different ones are never merged: if ranks share a GPU,
/// its memory is their wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Gpus {
    /// Most ranks that share one GPU.
    pub(super) ranks_per_gpu: usize,
    pub(super) ranks: usize,
}

impl Gpus {
    /// Ranks with a GPU each.
    pub(super) fn own(ranks: usize) -> Self {
        Self {
            ranks_per_gpu: 1,
            ranks,
        }
    }
}

impl std::fmt::Display for Gpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            ranks_per_gpu,
            ranks,
        } = *self;
        match (ranks_per_gpu, ranks.div_ceil(ranks_per_gpu)) {
            (1, gpus) => write!(f, "{gpus} GPUs"),
            (_, 1) => write!(f, "{ranks} ranks that share a GPU"),
            (_, gpus) => write!(f, "{ranks} ranks that share {gpus} GPUs"),
        }
    }
}

/// A fused SiLU kernel's time.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct SiluTime {
    pub(super) format: String,
    pub(super) interleaved: bool,
    pub(super) clamped: bool,
    pub(super) us: f64,
    pub(super) floor_us: f64,
}

/// Limits of the machine, measured on all multiprocessors.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Limits {
    pub(super) wire_gb_per_s: f64,
    pub(super) hbm_gb_per_s: f64,
    pub(super) round_trip_us: f64,
    pub(super) empty_call: EmptyCall,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct EmptyCall {
    cold_us: f64,
    warm_us: f64,
}

impl EmptyCall {
    pub(super) fn of(&self, flushed: bool) -> f64 {
        if flushed { self.cold_us } else { self.warm_us }
    }
}

/// A line. Other objects and fields are ignored.
#[derive(Deserialize)]
struct Line {
    limits: Option<Limits>,
    round: Option<RoundLine>,
    silu: Option<Vec<SiluTime>>,
}

#[derive(Clone, Debug, Deserialize)]
struct RoundLine {
    group: String,
    ranks: usize,
    /// Older records lack it: their ranks have a GPU each.
    #[serde(default = "one")]
    ranks_per_gpu: usize,
    tokens: usize,
    hidden: usize,
    top_k: usize,
    experts: usize,
    routing: String,
    format: String,
    mode: String,
    /// Older records lack it.
    #[serde(default = "by_expert")]
    receive: String,
    l2_flushed: bool,
    max_sms: Option<u32>,
    /// Older records lack it: all their kernels were compiled for the shape.
    #[serde(default = "yes")]
    specialised: bool,
    #[serde(default)]
    late_us: u32,
    /// Older records lack these three.
    plan_tokens: Option<usize>,
    #[serde(default = "one")]
    alignment: usize,
    #[serde(default)]
    pass_through: bool,
    dispatch: PhaseLine,
    combine: PhaseLine,
    pair_us: Option<f64>,
    /// Older records lack it.
    pair_p99_us: Option<f64>,
    verified: String,
}

fn one() -> usize {
    1
}

fn by_expert() -> String {
    "by-expert".into()
}

fn yes() -> bool {
    true
}

impl RoundLine {
    fn gpus(&self) -> Gpus {
        Gpus {
            ranks_per_gpu: self.ranks_per_gpu.max(1),
            ranks: self.ranks,
        }
    }

    /// Whether the round has the sizes that the template names, and nothing that no table says.
    fn is_shown(&self) -> bool {
        let sizes = [self.hidden, self.top_k, self.experts];
        let is_plain = self.alignment == 1
            && !self.pass_through
            && self.plan_tokens.is_none_or(|tokens| tokens == self.tokens);
        sizes == [7168, 8, 256] && self.group == "local" && is_plain
    }

    fn kind(&self) -> Kind {
        Kind {
            late_us: self.late_us,
            receive: self.receive.clone(),
            mode: self.mode.clone(),
            routing: self.routing.clone(),
        }
    }

    fn key(&self) -> Key {
        Key {
            gpus: self.gpus(),
            format: self.format.clone(),
            tokens: self.tokens,
            max_sms: self.max_sms,
            specialised: self.specialised,
            flushed: self.l2_flushed,
            kind: self.kind(),
        }
    }

    /// A call's limit in device memory, if all ranks share one GPU: with several, the wire limits, too.
    fn memory_us(&self, phase: &PhaseLine) -> Option<f64> {
        let on_one_gpu = self.ranks_per_gpu == self.ranks;
        phase.memory_us.filter(|_| on_one_gpu)
    }
}

#[derive(Clone, Debug, Deserialize)]
struct PhaseLine {
    gpu_us: Summary,
    host_us: Summary,
    floor_us: Option<f64>,
    /// The limit in device memory, if all ranks share one GPU.
    memory_us: Option<f64>,
    nccl_us: Option<f64>,
}

#[derive(Clone, Debug, Deserialize)]
struct Summary {
    median: f64,
    p99: f64,
}

impl RecordFile {
    /// Reads `<date>-<gpus>-<commit>.jsonl`.
    pub(super) fn parse(name: &str, text: &str) -> Result<RecordFile> {
        let stem = name.strip_suffix(".jsonl").unwrap_or(name);
        let date = stem.get(..DATE_LENGTH).filter(|date| {
            let is_right = |(index, c): (usize, char)| match index {
                4 | 7 => c == '-',
                _ => c.is_ascii_digit(),
            };
            date.chars().enumerate().all(is_right)
        });
        let commit = stem
            .rsplit('-')
            .next()
            .filter(|commit| commit.len() >= 7 && commit.chars().all(|c| c.is_ascii_hexdigit()));
        let (Some(date), Some(commit)) = (date, commit) else {
            bail!("{name}: a record is named <date>-<gpus>-<commit>.jsonl");
        };
        let middle = stem.get(DATE_LENGTH + 1..stem.len() - commit.len() - 1);
        let middle = middle.unwrap_or_default();
        let mut file = RecordFile {
            name: name.into(),
            date: date.into(),
            hardware: middle.into(),
            commit: commit.into(),
            gpus: Gpus::own(0),
            limits: None,
            rounds: Vec::new(),
            silu: Vec::new(),
        };
        let mut latest_limits = None;
        for (index, line) in text.lines().enumerate() {
            let line: Line = serde_json::from_str(line)
                .with_context(|| format!("{name}:{}: not a line of the benchmark", index + 1))?;
            latest_limits = line.limits.or(latest_limits);
            file.silu = line.silu.unwrap_or(file.silu);
            let Some(round) = line.round else { continue };
            let [of_file, of_round] = [file.gpus, round.gpus()];
            ensure!(
                of_file.ranks == 0 || of_file == of_round,
                "{name}:{}: {of_round} in a file of {of_file}",
                index + 1,
            );
            file.gpus = of_round;
            if round.max_sms.is_none() {
                file.limits = file.limits.or(latest_limits.take());
            }
            file.rounds.push(round);
        }
        ensure!(!file.rounds.is_empty(), "{name}: it has no round");
        Ok(file)
    }
}

/// Routing, layout and mode of a round.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub(super) late_us: u32,
    pub(super) receive: String,
    pub(super) mode: String,
    pub(super) routing: String,
}

impl Kind {
    /// The one of the page's first tables.
    pub(super) fn usual() -> Self {
        Self {
            late_us: 0,
            receive: by_expert(),
            mode: "reduced".into(),
            routing: "uniform".into(),
        }
    }
}

/// The configuration of a round, by which runs are merged.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) gpus: Gpus,
    pub(super) format: String,
    pub(super) tokens: usize,
    pub(super) max_sms: Option<u32>,
    pub(super) specialised: bool,
    pub(super) flushed: bool,
    pub(super) kind: Kind,
}

impl Key {
    /// Usual rounds of kernels that were compiled for the shape, on all multiprocessors, with a warm cache.
    pub(super) fn of(gpus: Gpus, format: &str, tokens: usize) -> Self {
        Self {
            gpus,
            format: format.into(),
            tokens,
            max_sms: None,
            specialised: true,
            flushed: false,
            kind: Kind::usual(),
        }
    }
}

/// A round: medians of all runs.
#[derive(Clone, Debug)]
pub(super) struct Round {
    pub(super) dispatch: Phase,
    pub(super) combine: Phase,
    pub(super) pair_us: Option<f64>,
    pub(super) pair_p99_us: Option<f64>,
}

/// A call.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    pub(super) us: f64,
    pub(super) p99_us: f64,
    pub(super) host_us: f64,
    pub(super) nccl_us: Option<f64>,
    floor_us: Option<f64>,
}

impl Phase {
    /// The limit over the time: 1 is as fast as the wire, or as the memory of the GPU that all ranks share.
    pub(super) fn share(&self) -> Option<f64> {
        self.floor_us.map(|floor| floor / self.us)
    }
}

/// Newest record of some ranks.
pub(super) struct Source {
    pub(super) file: String,
    /// Number and name of its GPUs, such as `2xH200`.
    pub(super) hardware: String,
    pub(super) commit: String,
    pub(super) date: String,
    /// Whether the L2 cache was flushed. Warm rounds are shown if there are any.
    pub(super) flushed: bool,
    pub(super) limits: Option<Limits>,
}

/// Newest records of each number of ranks.
pub(super) struct Results {
    /// Sources by ranks, those with a GPU each first.
    pub(super) sources: BTreeMap<Gpus, Source>,
    /// Times of the newest file that has any, of ranks with a GPU each, and its name.
    pub(super) silu: Option<(String, Vec<SiluTime>)>,
    rounds: BTreeMap<Key, Round>,
}

impl Results {
    /// Takes the newest file of each number of ranks. Two of one day are refused.
    pub(super) fn of(files: Vec<RecordFile>) -> Result<Results> {
        let own = files.iter().filter(|file| file.gpus.ranks_per_gpu == 1);
        let silu = own.filter(|file| !file.silu.is_empty());
        let silu = silu.max_by_key(|file| (&file.date, Reverse(file.gpus)));
        let silu = silu.map(|file| (file.name.clone(), file.silu.clone()));
        let mut newest: BTreeMap<Gpus, RecordFile> = BTreeMap::new();
        for file in files {
            if let Some(other) = newest.get(&file.gpus) {
                let days = [&other.date, &file.date];
                let (name, other) = (&file.name, &other.name);
                ensure!(
                    days[0] != days[1],
                    "{name} and {other} are of one day: remove one"
                );
                if days[0] > days[1] {
                    continue;
                }
            }
            newest.insert(file.gpus, file);
        }
        let (mut sources, mut rounds) = (BTreeMap::new(), BTreeMap::new());
        for (gpus, file) in newest {
            let mut lines = file.rounds;
            lines.retain(RoundLine::is_shown);
            let usual = Kind::usual();
            let mut shown_first = lines.iter().filter(|round| round.kind() == usual);
            let flushed = shown_first.all(|round| round.l2_flushed);
            rounds.extend(Round::all(lines)?);
            let source = Source {
                file: file.name,
                hardware: file.hardware,
                commit: file.commit,
                date: file.date,
                flushed,
                limits: file.limits,
            };
            sources.insert(gpus, source);
        }
        Ok(Results {
            sources,
            silu,
            rounds,
        })
    }

    /// The round of kernels that were compiled for the shape, with the cache as the section says.
    pub(super) fn round(
        &self,
        gpus: Gpus,
        format: &str,
        tokens: usize,
        max_sms: Option<u32>,
    ) -> Option<&Round> {
        let flushed = self.sources.get(&gpus)?.flushed;
        self.get(&Key {
            max_sms,
            flushed,
            ..Key::of(gpus, format, tokens)
        })
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Round> {
        self.rounds.get(key)
    }

    /// Configurations of the ranks' rounds, in order.
    pub(super) fn keys(&self, gpus: Gpus) -> impl Iterator<Item = &Key> {
        self.rounds.keys().filter(move |key| key.gpus == gpus)
    }
}

impl Round {
    /// Medians of the runs of each round, one of which must be verified.
    fn all(lines: Vec<RoundLine>) -> Result<BTreeMap<Key, Round>> {
        let mut groups: BTreeMap<Key, Vec<RoundLine>> = BTreeMap::new();
        for round in lines {
            groups.entry(round.key()).or_default().push(round);
        }
        let medians = groups.into_iter().map(|(key, runs)| {
            ensure!(
                runs.iter().any(|run| run.verified != "no"),
                "{} with {} tokens on {}: no run's results were verified",
                key.format,
                key.tokens,
                key.gpus
            );
            Ok((key, Round::of(&runs)))
        });
        medians.collect()
    }

    fn of(runs: &[RoundLine]) -> Round {
        let phase = |pick: fn(&RoundLine) -> &PhaseLine| Phase {
            us: median(runs.iter().map(|run| pick(run).gpu_us.median)).unwrap_or(0.0),
            p99_us: median(runs.iter().map(|run| pick(run).gpu_us.p99)).unwrap_or(0.0),
            host_us: median(runs.iter().map(|run| pick(run).host_us.median)).unwrap_or(0.0),
            nccl_us: median(runs.iter().filter_map(|run| pick(run).nccl_us)),
            floor_us: median(
                runs.iter()
                    .filter_map(|run| run.memory_us(pick(run)).or(pick(run).floor_us)),
            ),
        };
        Round {
            dispatch: phase(|run| &run.dispatch),
            combine: phase(|run| &run.combine),
            pair_us: median(runs.iter().filter_map(|run| run.pair_us)),
            pair_p99_us: median(runs.iter().filter_map(|run| run.pair_p99_us)),
        }
    }
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    Some(f64::midpoint(values[last / 2], values[values.len() / 2]))
}
