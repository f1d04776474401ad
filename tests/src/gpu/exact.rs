//! Exact mode: given the same rows of the experts, a token's result is the same bits on any
//! number of ranks, and wherever the experts live: rows are summed in top-k order, whichever way
//! they came.

use std::time::Duration;

use anyhow::{Context, Result};
use ferry::{Capacity, CombineMode, Config, Group, ScaleLayout, TokenFormat};
use ferry_reference::workload::{Routing, WorkloadSpec, generate};
use ferry_reference::{Problem, RankInput, bf16};

use super::{Outcome, Suite};
use crate::group::{GroupKind, open};
use ferry_rig::verify::{Oracle, compare_rows};
use ferry_rig::{Dice, Session, Settings};

/// Tokens, experts and what they answer, to be spread over ranks in many ways.
pub struct Spreadable {
    /// All tokens on one rank.
    whole: Problem,
    /// Factor of each expert.
    scale: Vec<f32>,
    format: TokenFormat,
    /// Whether the rows of a token are summed.
    weights: bool,
    /// `[tokens, hidden]`, or `[tokens, top_k, hidden]` if they are not.
    wanted: Vec<bf16>,
}

/// One way to spread them.
struct Spread {
    problem: Problem,
    scale: Vec<f32>,
    /// The first token of each rank.
    starts: Vec<usize>,
}

impl Spreadable {
    /// `spec` is of one rank. `weights`: whether rows are summed, or kept apart.
    ///
    /// Most orders of f32s give the same BF16. So that another order shows, some experts' rows are
    /// so large that little is left of the others', and they cancel out: all slots of a token weigh
    /// the same.
    pub fn new(spec: WorkloadSpec, format: TokenFormat, weights: bool) -> Self {
        let scale = (0..spec.experts).map(|expert| match expert % 4 {
            0 => 4096.0,
            1 => -4096.0,
            _ => 0.7 + expert as f32 / 7.0,
        });
        let scale: Vec<f32> = scale.collect();
        let mut whole = generate(spec);
        let (input, top_k) = (&mut whole.inputs[0], whole.top_k);
        for weights in input.topk_weights.chunks_mut(top_k) {
            weights.fill(weights[0]);
        }
        let oracle = Oracle::new(&whole, &scale, format);
        let wanted = oracle.combined(CombineMode::Exact, weights);
        Self {
            wanted: wanted.concat(),
            whole,
            scale,
            format,
            weights,
        }
    }

    /// Settings of a session for any spread.
    pub fn settings(&self, p2p_world_size: usize, split: bool) -> Settings {
        let tokens = self.whole.inputs[0].tokens;
        let Problem {
            experts,
            top_k,
            hidden,
            ..
        } = self.whole;
        let config = Config {
            p2p_world_size: Some(p2p_world_size),
            format: self.format,
            combine: CombineMode::Exact,
            deadline: Duration::from_secs(20),
            ..Config::new(experts, top_k, hidden, tokens.max(1))
        };
        let settings = Settings {
            capacity: Capacity {
                rows: tokens * top_k,
                scale_blocks: tokens * top_k / 128 + experts,
                ..Capacity::default()
            },
            split,
            apart: !self.weights,
            ..Settings::of(config, &[])
        };
        // All may come to one rank, and every expert's rows be padded.
        settings.with_spare(3 * experts, 0)
    }

    /// The tokens in order, but cut anywhere, and the experts under other numbers.
    fn spread(&self, ranks: usize, seed: u64) -> Spread {
        let mut dice = Dice::new(seed);
        let (whole, input) = (&self.whole, &self.whole.inputs[0]);
        let mut ids: Vec<usize> = (0..whole.experts).collect();
        dice.shuffle(&mut ids);
        let mut starts = vec![0];
        starts.extend((1..ranks).map(|_| dice.below(input.tokens + 1)));
        starts.sort_unstable();
        let ends = starts.iter().skip(1).copied().chain([input.tokens]);
        let inputs = starts.iter().zip(ends).map(|(&start, end)| {
            let (entries, elements) = (
                start * whole.top_k..end * whole.top_k,
                start * whole.hidden..end * whole.hidden,
            );
            let renumbered = |&id: &i32| usize::try_from(id).map_or(-1, |id| ids[id] as i32);
            RankInput {
                tokens: end - start,
                x: input.x[elements].to_vec(),
                topk_ids: input.topk_ids[entries.clone()]
                    .iter()
                    .map(renumbered)
                    .collect(),
                topk_weights: input.topk_weights[entries].to_vec(),
            }
        });
        let problem = Problem {
            ranks,
            inputs: inputs.collect(),
            ..*whole
        };
        let mut scale = vec![0.0; whole.experts];
        for (&id, &factor) in ids.iter().zip(&self.scale) {
            scale[id] = factor;
        }
        Spread {
            problem,
            scale,
            starts,
        }
    }

    /// Runs a round of one spread on the session's ranks and compares all bits. Collective.
    pub fn run(&self, session: &mut Session, ranks: usize, seed: u64) -> Result<()> {
        let spread = self.spread(ranks, seed);
        let outputs = session.round(&spread.problem, &spread.scale)?;
        let hidden = self.whole.hidden;
        let token = hidden * if self.weights { 1 } else { self.whole.top_k };
        for output in outputs {
            let start = spread.starts[output.rank];
            let tokens = spread.problem.inputs[output.rank].tokens;
            let wanted = &self.wanted[start * token..(start + tokens) * token];
            compare_rows(output.rank, "combined", wanted, &output.combined, hidden)?;
        }
        Ok(())
    }
}

/// The ways of the test on GPUs: tokens, hidden, format, weights, split.
const WAYS: [(usize, usize, TokenFormat, bool, bool); 5] = [
    (3, 7168, TokenFormat::Bf16, true, false),
    (64, 7168, TokenFormat::Bf16, true, true),
    (
        64,
        3584,
        TokenFormat::Mxfp8(ScaleLayout::Tiled),
        true,
        false,
    ),
    (64, 3584, TokenFormat::Bf16, false, false),
    (1500, 1024, TokenFormat::BlockwiseFp8, true, false),
];

pub(super) fn run(suite: &mut Suite<'_>) -> Result<()> {
    let own = suite.ranks();
    let fewer = [1, 2, 4].into_iter().filter(|&ranks| ranks < own);
    for ranks in fewer.chain([own]) {
        let Some(group) = group_of(suite, ranks)? else {
            continue;
        };
        let name = format!("exact mode gives the same bits wherever experts live, {ranks} ranks");
        suite.check(&name, |suite| everywhere(suite, &group))?;
    }
    Ok(())
}

/// A group of the first ranks, where this process can make one.
fn group_of(suite: &Suite<'_>, ranks: usize) -> Result<Option<Group>> {
    Ok(match suite.args.group {
        _ if ranks == suite.ranks() => Some(suite.group().clone()),
        GroupKind::Simulated => Some(Group::simulated(ranks as u32, suite.args.seed)?),
        GroupKind::Local => Some(open(&suite.args.group_options(ranks))?.group),
        _ => None,
    })
}

fn everywhere(suite: &mut Suite<'_>, group: &Group) -> Result<Outcome> {
    let ranks = group.ranks() as usize;
    let nodes: &[usize] = if group.reaches_other_nodes() && ranks > 1 {
        &[ranks, 1]
    } else {
        &[ranks]
    };
    let seed = suite.args.seed;
    for (tokens, hidden, format, weights, split) in WAYS {
        let (tokens, hidden) = if suite.args.quick {
            (tokens.div_ceil(32), 256)
        } else {
            (tokens, hidden)
        };
        let spec = WorkloadSpec {
            ranks: 1,
            experts: 64,
            top_k: 8,
            hidden,
            tokens: vec![tokens],
            routing: Routing::Holes { probability: 0.1 },
            seed,
        };
        let problem = Spreadable::new(spec, format, weights);
        for &p2p_world_size in nodes {
            let mut settings = problem.settings(p2p_world_size, split);
            settings.config.deadline = suite.deadline();
            let mut session = suite.session(group, &settings, 1)?;
            let result = (0..4)
                .try_for_each(|place| problem.run(&mut session, ranks, seed * 100 + place))
                .with_context(|| format!("{tokens} tokens in {format:?}, {p2p_world_size} a node"));
            suite.conclude(session, result)?;
        }
    }
    Ok(Outcome::Passed)
}
