//! Shapes, routings, formats and modes, split and fused.

mod described;
mod encoded;

use anyhow::{Context, Result};
use ferry::ScaleLayout::{RowMajor, Tiled};
use ferry::{CombineMode, Config, Group, Receive, ReceiveFields, ReceiveLayout, TokenFormat};
use ferry_reference::workload::Routing;

use super::{Outcome, Suite};
use crate::group::{GroupKind, open};
use ferry_reference::Problem;
use ferry_rig::formats::given::{Given, Strides};
use ferry_rig::verify::{Compared, Groups, Oracle};
use ferry_rig::{ROW_LAYOUTS, Settings, factors};

/// Least hidden size for which kernels are compiled for some of the shapes.
const SPECIALISED_HIDDEN: usize = 2048;

/// Most tokens of a rank that do not keep the oracle busy.
const MANY_TOKENS: usize = 512;

/// A problem, and how its rounds are made.
#[derive(Clone)]
struct Case {
    name: &'static str,
    /// The rest of the name.
    note: String,
    tokens: Tokens,
    /// Elements of a token, experts, experts of a token.
    sizes: [usize; 3],
    routing: Routing,
    format: TokenFormat,
    max_sms: Option<u32>,
    /// Whether dispatch is given the router's weights: without, all are 1.
    weights: bool,
    /// Whether there is a shared expert.
    shared: bool,
    /// Whether a call is of all local ranks.
    all_at_once: bool,
    /// Layout of received rows.
    receive: ReceiveLayout,
    /// Whether the scales of received rows are transposed.
    transposed: bool,
    /// Form of the tokens that dispatch is given.
    given: Given,
    /// Places of their scales, if they are encoded.
    strides: Strides,
    /// Padding and tables of rows by expert.
    groups: Groups,
}

/// Tokens of the ranks.
#[derive(Clone, Copy)]
enum Tokens {
    /// The same on each.
    Each(usize),
    /// The first ranks' tokens; the others have none.
    First([usize; 4]),
}

impl Tokens {
    fn of(self, ranks: usize) -> Vec<usize> {
        let of_rank = |rank| match self {
            Each(tokens) => tokens,
            First(tokens) => tokens.get(rank).copied().unwrap_or(0),
        };
        (0..ranks).map(of_rank).collect()
    }
}

use Routing::{AllToOne, Duplicates, Holes, Uniform, Zipf};
use TokenFormat::{Bf16, BlockwiseFp8, Mxfp4, Mxfp8, Nvfp4, Nvfp4RowScaled};
use Tokens::{Each, First};

/// A row of a table.
const fn row(
    name: &'static str,
    tokens: Tokens,
    sizes: [usize; 3],
    routing: Routing,
    format: TokenFormat,
) -> Case {
    Case {
        name,
        note: String::new(),
        tokens,
        sizes,
        routing,
        format,
        max_sms: None,
        weights: true,
        shared: false,
        all_at_once: false,
        receive: ReceiveLayout::ByExpert,
        transposed: false,
        given: Given::Bf16,
        strides: Strides::RowMajor,
        groups: Groups::NONE,
    }
}

const SKEW: Routing = Zipf { exponent: 1.0 };
const HOLES: Routing = Holes { probability: 0.4 };

#[rustfmt::skip]
const CASES: [Case; 41] = [
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

/// Cases with few multiprocessors. Of 4,096 tokens for 8 or 16 of them, a warp of combine sends several
/// rows back together.
#[rustfmt::skip]
const ON_FEW: [(u32, Case); 7] = [
    (8, row("4096 tokens", Each(4096), [7168, 256, 8], Uniform, Bf16)),
    (16, row("4096 tokens", Each(4096), [7168, 256, 8], SKEW, Bf16)),
    (16, row("NVFP4, 4096 tokens", Each(4096), [7168, 256, 8], Uniform, Nvfp4(Tiled))),
    (8, row("128 tokens", Each(128), [7168, 256, 8], Uniform, Bf16)),
    (8, row("1 token", Each(1), [7168, 256, 8], Uniform, Bf16)),
    (16, row("FP8, 128 tokens", Each(128), [7168, 256, 8], HOLES, BlockwiseFp8)),
    (66, row("1024 tokens, skewed", Each(1024), [3584, 256, 8], SKEW, Bf16)),
];

/// Cases whose dispatch is given no weights.
#[rustfmt::skip]
const WITHOUT_WEIGHTS: [Case; 3] = [
    row("128 tokens", Each(128), [7168, 256, 8], Uniform, Bf16),
    row("FP8, 1 token", Each(1), [7168, 256, 8], Uniform, BlockwiseFp8),
    row("NVFP4, 1024 tokens", Each(1024), [3584, 256, 8], HOLES, Nvfp4(Tiled)),
];

/// Cases whose rounds are made in calls of all local ranks.
#[rustfmt::skip]
const AT_ONCE: [Case; 4] = [
    row("128 tokens", Each(128), [7168, 256, 8], Uniform, Bf16),
    row("FP8, tokens halve", First([64, 32, 16, 8]), [7168, 896, 8], SKEW, BlockwiseFp8),
    row("MXFP4, no tokens", Each(0), [3584, 64, 8], Uniform, Mxfp4(Tiled)),
    row("NVFP4, 1024 tokens", Each(1024), [3584, 256, 8], HOLES, Nvfp4(Tiled)),
];

/// Cases with a shared expert: every format, from no tokens to many.
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
    each.chain(uneven).map(move |case| Case {
        note: format!(
            "shared expert, {:?}, {:?} tokens",
            case.format,
            case.tokens.of(ranks)
        ),
        shared: true,
        ..case
    })
}

/// Cases of rows that stay as they came, in each layout.
#[rustfmt::skip]
const ROWS: [Case; 13] = [
    row("1 token", Each(1), [7168, 256, 8], Uniform, Bf16),
    row("128 tokens", Each(128), [7168, 256, 8], Uniform, Bf16),
    row("1024 tokens, skewed", Each(1024), [3584, 256, 8], SKEW, Bf16),
    row("4096 tokens", Each(4096), [7168, 256, 8], Uniform, Bf16),
    row("no tokens", Each(0), [3584, 64, 8], Uniform, Bf16),
    row("tokens halve", First([64, 32, 16, 8]), [3584, 64, 8], Duplicates, Bf16),
    row("FP8, 1 token", Each(1), [7168, 256, 8], Uniform, BlockwiseFp8),
    row("FP8, uneven", First([130, 0, 3, 127]), [3584, 64, 8], SKEW, BlockwiseFp8),
    row("FP8, 4096 tokens", Each(4096), [7168, 256, 8], Uniform, BlockwiseFp8),
    row("MXFP8, 128 tokens", Each(128), [7168, 256, 8], HOLES, Mxfp8(RowMajor)),
    row("MXFP4, uneven", First([130, 0, 3, 127]), [3584, 64, 8], SKEW, Mxfp4(RowMajor)),
    row("NVFP4, 128 tokens", Each(128), [7168, 256, 8], Uniform, Nvfp4(RowMajor)),
    row("NVFP4 by row, 1024 tokens", Each(1024), [3584, 256, 8], HOLES, Nvfp4RowScaled(RowMajor)),
];

/// The same with few multiprocessors, or in calls of all local ranks, in every layout; and scales of FP8 also
/// transposed.
fn of_rows() -> impl Iterator<Item = Case> {
    let few = ON_FEW.into_iter().filter(|(_, case)| case.format == Bf16);
    let few = few.map(|(sms, case)| Case {
        max_sms: Some(sms),
        ..case
    });
    let at_once = AT_ONCE[..2].to_vec().into_iter().map(|case| Case {
        all_at_once: true,
        ..case
    });
    let all: Vec<_> = ROWS.into_iter().chain(few).chain(at_once).collect();
    ROW_LAYOUTS.into_iter().flat_map(move |receive| {
        let all = all.clone().into_iter();
        all.flat_map(move |case| {
            let of = |transposed: bool| Case {
                note: format!(
                    ", {receive} rows{}{}{}",
                    if transposed {
                        ", transposed scales"
                    } else {
                        ""
                    },
                    if case.all_at_once {
                        ", all ranks at once"
                    } else {
                        ""
                    },
                    case.max_sms
                        .map_or(String::new(), |sms| format!(", {sms} multiprocessors")),
                ),
                receive,
                transposed,
                ..case.clone()
            };
            let is_fp8 = case.format == BlockwiseFp8;
            std::iter::once(of(false)).chain(is_fp8.then(|| of(true)))
        })
    })
}

fn cases(ranks: usize) -> impl Iterator<Item = Case> {
    let on_few = ON_FEW.into_iter().map(|(sms, case)| Case {
        note: format!(", {sms} multiprocessors"),
        max_sms: Some(sms),
        ..case
    });
    let without_weights = WITHOUT_WEIGHTS.into_iter().map(|case| Case {
        note: ", no weights".into(),
        weights: false,
        ..case
    });
    let at_once = AT_ONCE.into_iter().map(|case| Case {
        note: ", all ranks at once".into(),
        all_at_once: true,
        ..case
    });
    let plain = CASES.into_iter().chain(on_few).chain(without_weights);
    let by_expert = plain.chain(with_shared_expert(ranks)).chain(at_once);
    let described = described::aligned_cases().chain(described::padded_cases());
    by_expert
        .chain(of_rows())
        .chain(described)
        .chain(encoded::cases())
}

/// A round's problem. All weights are 1 if dispatch is given none.
fn problem(suite: &Suite<'_>, case: &Case, ranks: usize, round: u64) -> Problem {
    let ([hidden, experts, top_k], routing) = (case.sizes, case.routing.clone());
    let (tokens, seed) = (case.tokens.of(ranks), suite.args.seed * 100 + round);
    let mut problem = ferry_rig::problem(tokens, [experts, top_k, hidden], routing, seed);
    if !case.weights {
        for input in &mut problem.inputs {
            input.topk_weights.fill(1.0);
        }
    }
    problem
}

/// The same with fewer and shorter tokens, for the simulator.
fn shrink(mut case: Case) -> Case {
    case.tokens = match case.tokens {
        Each(tokens) => Each(tokens.div_ceil(32)),
        First(tokens) => First(tokens.map(|tokens| tokens.div_ceil(32))),
    };
    case.sizes[0] = match case.format {
        TokenFormat::Bf16 => (case.sizes[0] / 64).next_multiple_of(8),
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
    let nodes: Vec<usize> = if group.reaches_other_nodes() {
        [ranks, 4, 2, 1]
            .into_iter()
            .filter(|&size| ranks.is_multiple_of(size))
            .collect()
    } else {
        vec![ranks]
    };
    for (index, &p2p_world_size) in nodes
        .iter()
        .enumerate()
        .filter(|&(i, size)| i == 0 || *size < ranks)
    {
        for case in cases(ranks) {
            if !case.sizes[1].is_multiple_of(ranks) {
                continue;
            }
            let case = if suite.args.quick { shrink(case) } else { case };
            // Across nodes, what matters is the way a row travels, not every shape.
            let far = index > 0;
            let most = case.tokens.of(ranks).into_iter().max();
            let is_large = most > Some(MANY_TOKENS);
            if far && case.max_sms.is_some() && is_large {
                continue;
            }
            let name = format!(
                "{}{}, hidden {}, {ranks} ranks, {p2p_world_size} a node",
                case.name, case.note, case.sizes[0]
            );
            let group = group.clone();
            suite.check(&name, |suite| {
                run_case(suite, &group, &case, p2p_world_size, far)
            })?;
        }
    }
    Ok(())
}

/// Modes, whether the router's weights sum the rows of a token, and whether calls are split.
fn ways(case: &Case, is_short: bool) -> Vec<(CombineMode, bool, bool)> {
    let all = [
        (CombineMode::Reduced, true, false),
        (CombineMode::Exact, true, true),
        (CombineMode::Exact, false, false),
        (CombineMode::Reduced, true, true),
        (CombineMode::Exact, true, false),
        (CombineMode::Exact, false, true),
    ];
    let mut ways = all.to_vec();
    if case.receive.keeps_rows() {
        ways.retain(|(combine, ..)| *combine == CombineMode::Reduced);
    } else if is_short {
        ways.truncate(2);
    }
    // Rows that stay apart are not added to.
    let is_padded = case.receive == ReceiveLayout::Padded;
    ways.retain(|&(_, weights, _)| weights || !(case.shared || is_padded));
    ways
}

/// The configuration of a case's plans without the ways of its calls.
fn sizes_of(case: &Case, most_tokens: usize) -> Result<Config> {
    let [hidden, experts, top_k] = case.sizes;
    Ok(case.groups.put(Config {
        format: case.format,
        shared_expert: case.shared,
        receive: Receive::try_from(ReceiveFields {
            transposed_scales: case.transposed,
            ..ReceiveFields::new(case.receive)
        })?,
        options: case.given.is_encoded() && !case.receive.keeps_rows(),
        ..Config::new(experts, top_k, hidden, most_tokens)
    }))
}

fn run_case(
    suite: &mut Suite<'_>,
    group: &Group,
    case: &Case,
    p2p_world_size: usize,
    far: bool,
) -> Result<Outcome> {
    let ranks = group.ranks() as usize;
    let ([hidden, experts, _], tokens) = (case.sizes, case.tokens.of(ranks));
    let most = tokens.into_iter().max().unwrap_or(0).max(1);
    // Large problems keep the oracle busy: fewer ways, one round.
    let large = most > MANY_TOKENS;
    let rounds = if large { 1 } else { 2 };
    let problems: Vec<_> = (0..rounds)
        .map(|round| problem(suite, case, ranks, round))
        .collect();
    let scale = factors(experts, 0);
    let sizes = sizes_of(case, most)?;
    let compared = Compared {
        given: case.given,
        ..Compared::of(&sizes)
    };
    let oracle = |problem| Oracle::of(problem, &scale, case.format, compared);
    let oracles: Vec<_> = problems.iter().map(oracle).collect();
    let room = Settings::of(sizes, &problems).with_spare(3, 1);
    let keeps_rows = case.receive.keeps_rows();
    for (combine, weights, split) in ways(case, large || far) {
        let is_padded = case.receive == ReceiveLayout::Padded;
        let is_staged = combine == CombineMode::Exact && p2p_world_size < ranks;
        if is_staged && (is_padded || sizes.receive.fields().expert_alignment > 1) {
            // Rows between nodes are staged by number.
            continue;
        }
        // Kernels compiled for one case serve others, with fewer tokens than planned.
        let planned = if hidden >= SPECIALISED_HIDDEN && !is_padded {
            most.next_multiple_of(128)
        } else {
            most
        };
        let config = Config {
            p2p_world_size: Some(p2p_world_size),
            combine,
            deadline: suite.deadline(),
            max_sms: case.max_sms,
            max_tokens_per_rank: planned,
            // Both kinds of kernels; compiling some for every small shape would take minutes.
            specialise: weights && hidden >= SPECIALISED_HIDDEN && !suite.args.general,
            receive: described::with_calls(sizes.receive, split)?,
            debug_checks: keeps_rows && split && case.routing != Duplicates,
            ..sizes
        };
        // Views and strided rows have a place for each token that is planned.
        let room = match keeps_rows {
            true => Settings::of(config, &problems).with_spare(3, 0),
            false => room,
        };
        let settings = Settings {
            split,
            wide_ids: keeps_rows && split,
            keeps_ids: split && p2p_world_size == ranks,
            apart: !weights,
            weights: case.weights,
            given: case.given,
            strides: case.strides,
            config,
            ..room
        };
        let mut session = suite.session(group, &settings, 1)?;
        session.call_all_at_once(case.all_at_once);
        session.count_on_host(split);
        let result = (problems.iter().zip(&oracles).enumerate())
            .try_for_each(|(round, (problem, oracle))| {
                session.give_up_before_rounds(round % 2 == 1);
                let outputs = session.round(problem, &scale)?;
                anyhow::Ok(oracle.verify(combine, weights, &outputs)?)
            })
            .with_context(|| format!("{combine:?}, weights {weights}, split {split}"));
        suite.conclude(session, result)?;
    }
    Ok(Outcome::Passed)
}
