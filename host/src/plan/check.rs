//! Checks of a configuration.

use std::time::Duration;

use ferry_layout::{
    AssignmentWords, CombineMode, MAX_EXPERTS, MAX_RANKS, MAX_TOP_K, ReceiveLayout, ScaleLayout,
    TokenFormat,
};

use crate::error::Problem;
use crate::plan::config::Config;
use crate::plan::receive::ReceiveFields;

/// Most elements of a token: its bytes, and the header after them, count in 32 bits.
pub(super) const MAX_HIDDEN: usize = 1 << 20;
/// Most rows that may arrive at a rank: positions count in 32 bits, and a few values are reserved.
pub(crate) const MAX_ROWS: u128 = (u32::MAX / 2) as u128;
/// Largest [`ByExpert::alignment`](crate::ByExpert::alignment).
pub const MAX_EXPERT_ALIGNMENT: usize = 256;
/// Longest deadline: a day.
const MAX_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);

/// Nanoseconds of a deadline, a plan's or a call's.
pub(crate) fn deadline_ns(deadline: Duration) -> Result<u64, Problem> {
    if deadline.is_zero() || deadline > MAX_DEADLINE {
        return Err(Problem {
            field: "deadline",
            value: format!("{} s", deadline.as_secs_f64()),
            rule: "it must be above zero and at most a day".to_owned(),
        });
    }
    Ok(deadline.as_nanos() as u64)
}

/// Collects problems.
#[derive(Default)]
pub(super) struct Problems(pub(super) Vec<Problem>);

impl Problems {
    pub(super) fn require(
        &mut self,
        holds: bool,
        field: &'static str,
        value: impl ToString,
        rule: impl ToString,
    ) {
        if !holds {
            self.0.push(Problem {
                field,
                value: value.to_string(),
                rule: rule.to_string(),
            });
        }
    }
}

pub(super) fn check_routing(problems: &mut Problems, ranks: u32, config: &Config) {
    let Config { experts, top_k, .. } = *config;
    problems.require(
        (1..=MAX_RANKS).contains(&ranks),
        "ranks",
        ranks,
        format_args!("a group has 1 to {MAX_RANKS} ranks"),
    );
    problems.require(
        (1..=MAX_EXPERTS as usize).contains(&experts),
        "experts",
        experts,
        format_args!("it must be 1 to {MAX_EXPERTS}"),
    );
    problems.require(
        ranks == 0 || experts.is_multiple_of(ranks as usize),
        "experts",
        experts,
        format_args!("it must be divisible by the {ranks} ranks"),
    );
    problems.require(
        (1..=MAX_TOP_K as usize).contains(&top_k),
        "top_k",
        top_k,
        format_args!("it must be 1 to {MAX_TOP_K}"),
    );
    problems.require(
        top_k <= experts,
        "top_k",
        top_k,
        format_args!("a token cannot name more than the {experts} experts"),
    );
}

pub(super) fn check_sizes(
    problems: &mut Problems,
    ranks: u32,
    local_experts: usize,
    config: &Config,
) {
    let Config {
        experts,
        top_k,
        hidden,
        max_tokens_per_rank,
        ..
    } = *config;
    problems.require(
        hidden > 0 && hidden.is_multiple_of(8),
        "hidden",
        hidden,
        "it must be a multiple of 8 above 0",
    );
    let (name, word) = (
        config.format.name(),
        config.format.sizes().elements_of_word(),
    );
    problems.require(
        word == 0 || hidden.is_multiple_of(word as usize),
        "hidden",
        hidden,
        format_args!(
            "the scales of {name} are moved as words, of {word} elements each, so it must be a multiple of \
             {word}"
        ),
    );
    problems.require(
        hidden <= MAX_HIDDEN,
        "hidden",
        hidden,
        format_args!("it must be at most {MAX_HIDDEN}"),
    );
    problems.require(
        max_tokens_per_rank > 0,
        "max_tokens_per_rank",
        max_tokens_per_rank,
        "it must be at least 1",
    );
    let tokens = u128::from(ranks) * max_tokens_per_rank as u128;
    let rows = tokens * top_k.min(u32::MAX as usize) as u128;
    check_blocks(problems, tokens * local_experts as u128, config);
    let (all, of) = most_rows(rows, local_experts, config);
    problems.require(
        all <= MAX_ROWS,
        "max_tokens_per_rank",
        max_tokens_per_rank,
        format_args!(
            "ranks * max_tokens_per_rank * top_k{of} is {all}, and at most {MAX_ROWS} rows can be counted"
        ),
    );
    let entries = max_tokens_per_rank as u128 * top_k as u128;
    let most = AssignmentWords::of(experts.min(MAX_EXPERTS as usize) as u32).max_ranks_in_expert();
    problems.require(
        rows > MAX_ROWS || entries <= u128::from(most),
        "max_tokens_per_rank",
        max_tokens_per_rank,
        format_args!(
            "max_tokens_per_rank * top_k is {entries}, and at most {most} entries of a rank can be told \
             apart where there are {experts} experts"
        ),
    );
}

/// Checks that the `all` rows of padded blocks can be counted.
fn check_blocks(problems: &mut Problems, all: u128, config: &Config) {
    problems.require(
        config.receive.layout() != ReceiveLayout::Padded || all <= MAX_ROWS,
        "max_tokens_per_rank",
        config.max_tokens_per_rank,
        format_args!(
            "local experts * ranks * max_tokens_per_rank is {all}, and at most {MAX_ROWS} rows can be counted"
        ),
    );
}

/// Most rows of a dispatch's outputs if `routed` rows may arrive, and the added rows in words.
fn most_rows(routed: u128, local_experts: usize, config: &Config) -> (u128, &'static str) {
    let alignment = match config.receive.layout() {
        ReceiveLayout::View | ReceiveLayout::Strided | ReceiveLayout::Compact => 1,
        ReceiveLayout::ByExpert | ReceiveLayout::Padded => {
            let wanted = config.receive.fields().expert_alignment;
            u128::from(config.format.sizes().row_alignment)
                .max(wanted.min(MAX_EXPERT_ALIGNMENT) as u128)
        }
    };
    let padding = local_experts as u128 * (alignment - 1);
    let routed = (routed + padding).next_multiple_of(alignment);
    let tokens = config.max_tokens_per_rank as u128;
    match (config.shared_expert, alignment) {
        (false, 1) => (routed, ""),
        (false, _) => (routed, ", with padding,"),
        (true, 1) => (routed + tokens, " + max_tokens_per_rank"),
        (true, _) => (
            routed + tokens.next_multiple_of(alignment),
            " + max_tokens_per_rank, with padding,",
        ),
    }
}

pub(super) fn check_nodes(
    problems: &mut Problems,
    ranks: u32,
    reaches_other_nodes: bool,
    config: &Config,
) {
    let Some(size) = config.p2p_world_size else {
        return;
    };
    let divides = size > 0 && (ranks as usize).is_multiple_of(size);
    problems.require(
        divides,
        "p2p_world_size",
        size,
        format_args!("it must divide the {ranks} ranks"),
    );
    problems.require(
        !divides || size >= ranks as usize || reaches_other_nodes,
        "p2p_world_size",
        size,
        format_args!("this group cannot reach ranks of other nodes, so it must be {ranks}"),
    );
}

/// Checks that the layout of received rows goes with the other fields.
pub(super) fn check_receive(problems: &mut Problems, config: &Config) {
    let (receive, format) = (config.receive.layout(), config.format);
    let keeps_rows = receive.keeps_rows();
    let tiled = format.scale_layout() == Some(ScaleLayout::Tiled);
    let excluded = [
        (
            tiled,
            format!("format is {format}, and only rows by expert have tiled scales"),
        ),
        (
            config.combine == CombineMode::Exact,
            "combine is exact, which takes rows by expert".to_owned(),
        ),
        (
            config.shared_expert,
            "shared_expert is true, and its rows are a group of rows by expert".to_owned(),
        ),
        (
            config.skip_a2a,
            "skip_a2a is true, and rows that do not travel are by expert".to_owned(),
        ),
    ];
    for (is_set, rule) in excluded {
        problems.require(!(keeps_rows && is_set), "receive", receive, rule);
    }
    let padded = receive == ReceiveLayout::Padded;
    for (is_set, field) in [
        (config.shared_expert, "shared_expert"),
        (config.skip_a2a, "skip_a2a"),
    ] {
        let rule =
            format!("{field} is true, and a padded block is of a local expert whose rows travel");
        problems.require(!(padded && is_set), "receive", receive, rule);
    }
    let fp8 = TokenFormat::BlockwiseFp8;
    problems.require(
        !config.receive.fields().transposed_scales || format == fp8,
        "transposed_scales",
        true,
        format_args!("format is {format}, and only scales of {fp8} can be transposed"),
    );
}

/// Checks the alignment of experts, and padding.
pub(super) fn check_alignment(problems: &mut Problems, ranks: u32, config: &Config) {
    let receive = config.receive.layout();
    let ReceiveFields {
        expert_alignment: given,
        clear_padding,
        ..
    } = config.receive.fields();
    let is_valid = given.is_power_of_two() && given <= MAX_EXPERT_ALIGNMENT;
    problems.require(
        is_valid,
        "expert_alignment",
        given,
        format_args!("it must be a power of two, 1 to {MAX_EXPERT_ALIGNMENT}"),
    );
    let of_format = config.format.sizes().row_alignment as usize;
    let by_expert = receive == ReceiveLayout::ByExpert;
    problems.require(
        !(by_expert && clear_padding && given.max(of_format) <= 1),
        "clear_padding",
        true,
        "expert_alignment is 1, so that no row pads an expert",
    );
    let spans_nodes = !config.skip_a2a
        && config
            .p2p_world_size
            .is_some_and(|size| size < ranks as usize);
    let is_staged = spans_nodes && config.combine == CombineMode::Exact;
    problems.require(
        !(receive == ReceiveLayout::Padded && is_staged),
        "receive",
        receive,
        format_args!(
            "combine is exact and p2p_world_size below the {ranks} ranks: rows between nodes are then staged \
             by their number, for which blocks leave no room"
        ),
    );
    problems.require(
        !(is_valid && given > of_format && is_staged),
        "expert_alignment",
        given,
        format_args!(
            "combine is exact and p2p_world_size below the {ranks} ranks: rows between nodes are then staged \
             by their number, which may be at most that of an alignment of {of_format}"
        ),
    );
}

pub(super) fn check_behaviour(problems: &mut Problems, config: &Config) {
    let Config {
        deadline, max_sms, ..
    } = *config;
    problems.0.extend(deadline_ns(deadline).err());
    problems.require(
        max_sms != Some(0),
        "max_sms",
        "0",
        "it must be at least 1, or None for all",
    );
}
