//! Shapes, routings, formats and modes, split and fused.

use anyhow::{Context, Result};
use ferry::ScaleLayout::{RowMajor, Tiled};
use ferry::{Capacity, CombineMode, Config, Group, TokenFormat};
use ferry_reference::workload::{Routing, WorkloadSpec, generate};

use super::{Outcome, Suite};
use crate::formats;
use crate::group::{GroupKind, open};
use crate::session::{Session, Settings};
use crate::verify::{Compared, Oracle, capacity_with};
use ferry_reference::Problem;

/// From this hidden size on, kernels are compiled for some of the shapes.
const SPECIALISED_HIDDEN: usize = 2048;

/// From more tokens a rank on, a problem keeps the oracle busy.
const MANY_TOKENS: usize = 512;

/// One problem.
struct Case {
    name: String,
    tokens: Vec<usize>,
    hidden: usize,
    experts: usize,
    top_k: usize,
    routing: Routing,
    format: TokenFormat,
    max_sms: Option<u32>,
    /// Whether dispatch is given the router's weights: without, all are 1.
    weights: bool,
    /// Whether there is a shared expert.
    shared: bool,
    /// Whether a call is of all local ranks.
    all_at_once: bool,
}

/// Tokens of the ranks.
enum Tokens {
    /// The same on each.
    Each(usize),
    /// The first ranks' tokens; the others have none.
    First([usize; 4]),
}

use Routing::{AllToOne, Duplicates, Holes, Uniform, Zipf};
use TokenFormat::{Bf16, BlockwiseFp8, Mxfp4, Mxfp8, Nvfp4, Nvfp4RowScaled};
use Tokens::{Each, First};

/// A row of a table.
struct Row {
    name: &'static str,
    tokens: Tokens,
    hidden: usize,
    experts: usize,
    top_k: usize,
    routing: Routing,
    format: TokenFormat,
}

const fn row(
    name: &'static str,
    tokens: Tokens,
    [hidden, experts, top_k]: [usize; 3],
    routing: Routing,
    format: TokenFormat,
) -> Row {
    Row {
        name,
        tokens,
        hidden,
        experts,
        top_k,
        routing,
        format,
    }
}

const SKEW: Routing = Zipf { exponent: 1.0 };
const HOLES: Routing = Holes { probability: 0.4 };

#[rustfmt::skip]
const CASES: [Row; 41] = [
    row("64 tokens, 64 experts", Each(64), [3584, 64, 8], Uniform, Bf16),
    row("128 tokens, 256 experts", Each(128), [7168, 256, 8], Uniform, Bf16),
    row("128 tokens, 128 experts", Each(128), [6144, 128, 8], Uniform, Bf16),
    row("64 tokens, 896 experts", Each(64), [3576, 896, 8], Uniform, Bf16),
    row("1 token", Each(1), [7168, 256, 8], Uniform, Bf16),
    row("1024 tokens, skewed", Each(1024), [3584, 256, 8], SKEW, Bf16),
    row("4096 tokens", Each(4096), [7168, 256, 8], Uniform, Bf16),
    row("one rank has all tokens", First([128, 0, 0, 0]), [7168, 64, 8], Uniform, Bf16),
    row("tokens halve from rank to rank", First([64, 32, 16, 8]), [3584, 64, 8], Uniform, Bf16),
    row("no tokens", Each(0), [3584, 64, 8], Uniform, Bf16),
    row("all tokens to one expert", Each(128), [3584, 64, 8], AllToOne { expert: 3 }, Bf16),
    row("entries that are not routed", Each(128), [3584, 64, 8], HOLES, Bf16),
    row("experts listed twice", Each(64), [3584, 64, 8], Duplicates, Bf16),
    row("top-1", Each(128), [3584, 64, 1], Uniform, Bf16),
    row("top-16", Each(64), [3584, 256, 16], Uniform, Bf16),
    row("FP8, 64 tokens", Each(64), [3584, 64, 8], Uniform, BlockwiseFp8),
    row("FP8, 128 tokens", Each(128), [7168, 256, 8], Uniform, BlockwiseFp8),
    row("FP8, 1 token", Each(1), [7168, 256, 8], Uniform, BlockwiseFp8),
    row("FP8, tokens halve", First([64, 32, 16, 8]), [7168, 896, 8], SKEW, BlockwiseFp8),
    row("FP8, 4096 tokens", Each(4096), [7168, 256, 8], Uniform, BlockwiseFp8),
    row("MXFP8, no tokens", Each(0), [3584, 64, 8], Uniform, Mxfp8(Tiled)),
    row("MXFP8, 1 token", Each(1), [7168, 256, 8], Uniform, Mxfp8(Tiled)),
    row("MXFP8, 64 tokens", Each(64), [3584, 64, 8], Uniform, Mxfp8(RowMajor)),
    row("MXFP8, 128 tokens", Each(128), [7168, 256, 8], Uniform, Mxfp8(Tiled)),
    row("MXFP8, tokens halve", First([64, 32, 16, 8]), [7168, 896, 8], SKEW, Mxfp8(Tiled)),
    row("MXFP8, 4096 tokens", Each(4096), [7168, 256, 8], Uniform, Mxfp8(Tiled)),
    row("MXFP4, no tokens", Each(0), [3584, 64, 8], Uniform, Mxfp4(Tiled)),
    row("MXFP4, 1 token", Each(1), [7168, 256, 8], Uniform, Mxfp4(Tiled)),
    row("MXFP4, 64 tokens", Each(64), [3584, 64, 8], Uniform, Mxfp4(RowMajor)),
    row("MXFP4, 128 tokens", Each(128), [7168, 256, 8], Uniform, Mxfp4(Tiled)),
    row("MXFP4, tokens halve", First([64, 32, 16, 8]), [7168, 896, 8], SKEW, Mxfp4(Tiled)),
    row("MXFP4, 4096 tokens", Each(4096), [7168, 256, 8], Uniform, Mxfp4(Tiled)),
    row("NVFP4, no tokens", Each(0), [3584, 64, 8], Uniform, Nvfp4(Tiled)),
    row("NVFP4, 1 token", Each(1), [7168, 256, 8], Uniform, Nvfp4(Tiled)),
    row("NVFP4, 64 tokens", Each(64), [3584, 64, 8], Uniform, Nvfp4(RowMajor)),
    row("NVFP4, 128 tokens", Each(128), [7168, 256, 8], Uniform, Nvfp4(Tiled)),
    row("NVFP4, tokens halve", First([64, 32, 16, 8]), [7168, 896, 8], SKEW, Nvfp4(Tiled)),
    row("NVFP4, 4096 tokens", Each(4096), [7168, 256, 8], Uniform, Nvfp4(Tiled)),
    row("NVFP4 by row, 128 tokens", Each(128), [2048, 64, 8], HOLES, Nvfp4RowScaled(Tiled)),
    row("NVFP4 by row, 1 token", Each(1), [7168, 256, 8], Uniform, Nvfp4RowScaled(RowMajor)),
    row("NVFP4 by row, 4096 tokens", Each(4096), [7168, 256, 8], Uniform, Nvfp4RowScaled(Tiled)),
];

/// With few multiprocessors. Of 4,096 tokens for 8 or 16 of them, a warp of combine sends several
/// rows back together.
#[rustfmt::skip]
const ON_FEW: [(u32, Row); 7] = [
    (8, row("4096 tokens", Each(4096), [7168, 256, 8], Uniform, Bf16)),
    (16, row("4096 tokens", Each(4096), [7168, 256, 8], SKEW, Bf16)),
    (16, row("NVFP4, 4096 tokens", Each(4096), [7168, 256, 8], Uniform, Nvfp4(Tiled))),
    (8, row("128 tokens", Each(128), [7168, 256, 8], Uniform, Bf16)),
    (8, row("1 token", Each(1), [7168, 256, 8], Uniform, Bf16)),
    (16, row("FP8, 128 tokens", Each(128), [7168, 256, 8], HOLES, BlockwiseFp8)),
    (66, row("1024 tokens, skewed", Each(1024), [3584, 256, 8], SKEW, Bf16)),
];

/// Whose dispatch is given no weights.
#[rustfmt::skip]
const WITHOUT_WEIGHTS: [Row; 3] = [
    row("128 tokens", Each(128), [7168, 256, 8], Uniform, Bf16),
    row("FP8, 1 token", Each(1), [7168, 256, 8], Uniform, BlockwiseFp8),
    row("NVFP4, 1024 tokens", Each(1024), [3584, 256, 8], HOLES, Nvfp4(Tiled)),
];

/// Whose rounds are made in calls of all local ranks.
#[rustfmt::skip]
const AT_ONCE: [Row; 4] = [
    row("128 tokens", Each(128), [7168, 256, 8], Uniform, Bf16),
    row("FP8, tokens halve", First([64, 32, 16, 8]), [7168, 896, 8], SKEW, BlockwiseFp8),
    row("MXFP4, no tokens", Each(0), [3584, 64, 8], Uniform, Mxfp4(Tiled)),
    row("NVFP4, 1024 tokens", Each(1024), [3584, 256, 8], HOLES, Nvfp4(Tiled)),
];

impl Case {
    fn of_row(row: Row, ranks: usize) -> Self {
        Self {
            name: row.name.to_owned(),
            tokens: match row.tokens {
                Each(tokens) => vec![tokens; ranks],
                First(tokens) => (0..ranks)
                    .map(|rank| tokens.get(rank).copied().unwrap_or(0))
                    .collect(),
            },
            hidden: row.hidden,
            experts: row.experts,
            top_k: row.top_k,
            routing: row.routing,
            format: row.format,
            max_sms: None,
            weights: true,
            shared: false,
            all_at_once: false,
        }
    }
}

/// With a shared expert: every format, from no tokens to many.
fn with_shared_expert(ranks: usize) -> impl Iterator<Item = Case> {
    let formats = [
        Bf16,
        BlockwiseFp8,
        Mxfp8(Tiled),
        Mxfp4(Tiled),
        Nvfp4(Tiled),
        Nvfp4RowScaled(RowMajor),
    ];
    let each = formats.into_iter().flat_map(|format| {
        [0, 1, 128, 4096].map(|tokens| row("", Each(tokens), [7168, 256, 8], Uniform, format))
    });
    // Ranks with other numbers of tokens, and blocks of scales that are not full.
    let uneven = |hidden, format| {
        let tokens = First([130, 0, 3, 127]);
        row("", tokens, [hidden, 64, 8], SKEW, format)
    };
    let uneven = [
        uneven(7168, Bf16),
        uneven(3584, Nvfp4(Tiled)),
        uneven(3584, BlockwiseFp8),
    ];
    each.chain(uneven).map(move |row| {
        let case = Case::of_row(row, ranks);
        Case {
            name: format!("shared expert, {:?}, {:?} tokens", case.format, case.tokens),
            shared: true,
            ..case
        }
    })
}

fn cases(ranks: usize) -> impl Iterator<Item = Case> {
    let plain = CASES.into_iter().map(move |row| Case::of_row(row, ranks));
    let on_few = ON_FEW.into_iter().map(move |(sms, row)| Case {
        name: format!("{}, {sms} multiprocessors", row.name),
        max_sms: Some(sms),
        ..Case::of_row(row, ranks)
    });
    let without_weights = WITHOUT_WEIGHTS.into_iter().map(move |row| Case {
        name: format!("{}, no weights", row.name),
        weights: false,
        ..Case::of_row(row, ranks)
    });
    let at_once = AT_ONCE.into_iter().map(move |row| Case {
        name: format!("{}, all ranks at once", row.name),
        all_at_once: true,
        ..Case::of_row(row, ranks)
    });
    plain
        .chain(on_few)
        .chain(without_weights)
        .chain(with_shared_expert(ranks))
        .chain(at_once)
}

/// What each expert multiplies by.
pub(super) fn scale(experts: usize) -> Vec<f32> {
    (0..experts)
        .map(|expert| 0.75 + (expert % 13) as f32 / 8.0)
        .collect()
}

/// A round's problem. All weights are 1 where dispatch is given none.
fn problem(suite: &Suite<'_>, case: &Case, round: u64) -> Problem {
    let mut problem = generate(WorkloadSpec {
        ranks: case.tokens.len(),
        experts: case.experts,
        top_k: case.top_k,
        hidden: case.hidden,
        tokens: case.tokens.clone(),
        routing: case.routing.clone(),
        seed: suite.args.seed * 100 + round,
    });
    if !case.weights {
        for input in &mut problem.inputs {
            input.topk_weights.fill(1.0);
        }
    }
    problem
}

/// The same with fewer and shorter tokens, for the simulator.
fn shrink(mut case: Case) -> Case {
    case.tokens
        .iter_mut()
        .for_each(|tokens| *tokens = tokens.div_ceil(32));
    case.hidden = match case.format {
        TokenFormat::Bf16 => (case.hidden / 64).next_multiple_of(8),
        _ => 256,
    };
    case
}

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let ranks = suite.ranks();
    run_on(suite, None, ranks)?;
    if suite.args.group == GroupKind::Local && ranks > 2 {
        // A second group, of two ranks.
        let two = open(&suite.args.group_options(2))?.group;
        run_on(suite, Some(two), 2)?;
    }
    Ok(())
}

fn run_on(suite: &mut Suite<'_>, other: Option<Group>, ranks: usize) -> Result<()> {
    let group = other.unwrap_or_else(|| suite.group().clone());
    let nodes: Vec<usize> = match group.reaches_other_nodes() {
        true => [ranks, 4, 2, 1]
            .into_iter()
            .filter(|&size| ranks.is_multiple_of(size))
            .collect(),
        false => vec![ranks],
    };
    for (index, &p2p_world_size) in nodes
        .iter()
        .enumerate()
        .filter(|&(i, size)| i == 0 || *size < ranks)
    {
        for case in cases(ranks) {
            if !case.experts.is_multiple_of(ranks) {
                continue;
            }
            let case = if suite.args.quick { shrink(case) } else { case };
            // Across nodes, what matters is the way a row travels, not every shape.
            let far = index > 0;
            let is_large = case.tokens.iter().any(|&tokens| tokens > MANY_TOKENS);
            if far && case.max_sms.is_some() && is_large {
                continue;
            }
            let name = format!(
                "{}, hidden {}, {ranks} ranks, {p2p_world_size} a node",
                case.name, case.hidden
            );
            let group = group.clone();
            suite.check(&name, |suite| {
                run_case(suite, &group, &case, p2p_world_size, far)
            })?;
        }
    }
    Ok(())
}

fn run_case(
    suite: &mut Suite<'_>,
    group: &Group,
    case: &Case,
    p2p_world_size: usize,
    far: bool,
) -> Result<Outcome> {
    let most = case.tokens.iter().copied().max().unwrap_or(0).max(1);
    // Large problems keep the oracle busy: fewer ways, one round.
    let large = most > MANY_TOKENS;
    let rounds = if large { 1 } else { 2 };
    let problems: Vec<_> = (0..rounds)
        .map(|round| problem(suite, case, round))
        .collect();
    let scale = scale(case.experts);
    let oracles: Vec<_> = problems
        .iter()
        .map(|problem| {
            let compared = Compared::with_shared(case.shared);
            Oracle::of(problem, &scale, case.format, compared)
        })
        .collect();
    let capacity = problems
        .iter()
        .map(|p| capacity_with(p, case.format, case.shared))
        .fold(Capacity::default(), formats::larger);
    let capacity = Capacity {
        scale_blocks: capacity.scale_blocks + 1,
        ..formats::with_spare_rows(capacity, case.format, 3)
    };
    let all = [
        (CombineMode::Reduced, true, false),
        (CombineMode::Exact, true, true),
        (CombineMode::Exact, false, false),
        (CombineMode::Reduced, true, true),
        (CombineMode::Exact, true, false),
        (CombineMode::Exact, false, true),
    ];
    let ways = if large || far { &all[..2] } else { &all[..] };
    for &(combine, weights, split) in ways {
        if case.shared && !weights {
            // Rows that stay apart are not added to.
            continue;
        }
        // Kernels compiled for one case serve others, with fewer tokens than planned.
        let planned = match case.hidden >= SPECIALISED_HIDDEN {
            true => most.next_multiple_of(128),
            false => most,
        };
        let config = Config {
            p2p_world_size: Some(p2p_world_size),
            format: case.format,
            combine,
            deadline: suite.deadline(),
            max_sms: case.max_sms,
            shared_expert: case.shared,
            // Both kinds of kernels; compiling some for every small shape would take minutes.
            specialise: weights && case.hidden >= SPECIALISED_HIDDEN && !suite.args.general,
            ..Config::new(case.experts, case.top_k, case.hidden, planned)
        };
        let settings = Settings {
            config,
            capacity,
            split,
        };
        let mut session = suite.session(group, &settings, 1)?;
        session.give_weights(case.weights);
        session.call_all_at_once(case.all_at_once);
        let result = problems
            .iter()
            .zip(&oracles)
            .try_for_each(|(problem, oracle)| {
                verify_round(&mut session, &settings, problem, oracle, &scale, weights)
            })
            .with_context(|| format!("{combine:?}, weights {weights}, split {split}"));
        suite.conclude(session, result)?;
    }
    Ok(Outcome::Passed)
}

fn verify_round(
    session: &mut Session,
    settings: &Settings,
    problem: &Problem,
    oracle: &Oracle,
    scale: &[f32],
    weights: bool,
) -> Result<()> {
    let outputs = session.round(problem, scale, weights)?;
    Ok(oracle.verify(settings.config.combine, weights, &outputs)?)
}
