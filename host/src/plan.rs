//! A configuration that was checked.

use std::fmt;
use std::time::Duration;

use ferry_layout::{
    AssignmentWords, CombineMode, MAX_EXPERTS, MAX_RANKS, MAX_TOP_K, Shape, Window, Workspace,
    scale_placement,
};

use crate::{Config, Error, Group};

/// Most elements of a token: its bytes, and the header behind them, count in 32 bits.
const MAX_HIDDEN: usize = 1 << 20;
/// Most rows that may arrive at a rank: positions count in 32 bits, and a few values are taken.
const MAX_ROWS: u128 = (u32::MAX / 2) as u128;
/// Longest deadline: a day.
const MAX_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);

/// Proof that a [`Config`] fits a [`Group`]: sizes were checked once, so nothing downstream
/// checks them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    config: Config,
    shape: Shape,
}

/// One field of a [`Config`] that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The field's name.
    pub field: &'static str,
    /// What it holds.
    pub value: String,
    /// What it must hold.
    pub rule: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, value, rule } = self;
        write!(f, "{field} is {value}, but {rule}")
    }
}

/// Everything that is wrong with a [`Config`], one line each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// In the order of the fields; never empty.
    pub problems: Vec<Problem>,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the configuration does not work:")?;
        self.problems
            .iter()
            .try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

impl std::error::Error for PlanError {}

/// Collects problems.
#[derive(Default)]
struct Problems(Vec<Problem>);

impl Problems {
    fn require(
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

impl Plan {
    /// Checks `config` for `group`. Not collective; does not synchronise.
    ///
    /// # Errors
    /// [`Error::Plan`] with every problem at once.
    pub fn new(group: &Group, config: Config) -> Result<Self, Error> {
        Ok(Self::check(
            group.ranks(),
            group.reaches_other_nodes(),
            config,
        )?)
    }

    pub(crate) fn check(
        ranks: u32,
        reaches_other_nodes: bool,
        config: Config,
    ) -> Result<Self, PlanError> {
        let mut problems = Problems::default();
        check_routing(&mut problems, ranks, &config);
        check_sizes(&mut problems, ranks, &config);
        check_nodes(&mut problems, ranks, reaches_other_nodes, &config);
        check_behaviour(&mut problems, &config);
        if !problems.0.is_empty() {
            return Err(PlanError {
                problems: problems.0,
            });
        }
        // Every number was found to fit above.
        let shape = Shape {
            ranks,
            p2p_world_size: config.p2p_world_size.map_or(ranks, |size| size as u32),
            experts: config.experts as u32,
            top_k: config.top_k as u32,
            hidden: config.hidden as u32,
            max_tokens_per_rank: config.max_tokens_per_rank as u32,
            combine_mode: match config.combine {
                CombineMode::Reduced => 0,
                CombineMode::Exact => 1,
            },
            token_format: config.format.number(),
        };
        Ok(Self { config, shape })
    }

    /// What was checked.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The sizes as kernels see them.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Experts that live on each rank.
    pub const fn local_experts(&self) -> usize {
        self.shape.local_experts() as usize
    }

    /// Most rows that a dispatch can give one rank: `ranks * max_tokens_per_rank * top_k`, and in
    /// blockwise FP8 up to 3 rows of padding for each local expert, rounded up to a multiple of 4, as its
    /// transposed scales want it. Output tensors with this capacity are never too small.
    pub const fn max_rows(&self) -> usize {
        let alignment = self.shape.row_alignment() as u64;
        self.shape.max_rows().next_multiple_of(alignment) as usize
    }

    /// Most blocks of 128 rows that tiled scales can take on one rank.
    pub const fn max_scale_blocks(&self) -> usize {
        scale_placement::max_blocks(self.shape.max_rows(), self.shape.local_experts()) as usize
    }

    /// Bytes of each rank's receive window.
    pub const fn window_bytes(&self) -> u64 {
        Window::of(&self.shape).bytes
    }

    /// Bytes of each rank's private workspace.
    pub const fn workspace_bytes(&self) -> u64 {
        Workspace::of(&self.shape).bytes
    }

    /// The deadline as kernels see it.
    pub(crate) fn deadline_ns(&self) -> u64 {
        // At most a day: `check_behaviour`.
        self.config.deadline.as_nanos() as u64
    }
}

fn check_routing(problems: &mut Problems, ranks: u32, config: &Config) {
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

fn check_sizes(problems: &mut Problems, ranks: u32, config: &Config) {
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
        format_args!("the scales of {name} are moved as words, of {word} elements each, so it must be a multiple of {word}"),
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
    let rows =
        u128::from(ranks) * max_tokens_per_rank as u128 * top_k.min(u32::MAX as usize) as u128;
    problems.require(
        rows <= MAX_ROWS,
        "max_tokens_per_rank",
        max_tokens_per_rank,
        format_args!("ranks * max_tokens_per_rank * top_k is {rows}, and at most {MAX_ROWS} rows can be counted"),
    );
    let entries = max_tokens_per_rank as u128 * top_k as u128;
    let most = AssignmentWords::of(experts.min(MAX_EXPERTS as usize) as u32).max_ranks_in_expert();
    problems.require(
        rows > MAX_ROWS || entries <= u128::from(most),
        "max_tokens_per_rank",
        max_tokens_per_rank,
        format_args!("max_tokens_per_rank * top_k is {entries}, and at most {most} entries of a rank can be told apart where there are {experts} experts"),
    );
}

fn check_nodes(problems: &mut Problems, ranks: u32, reaches_other_nodes: bool, config: &Config) {
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

fn check_behaviour(problems: &mut Problems, config: &Config) {
    let Config {
        deadline, max_sms, ..
    } = *config;
    problems.require(
        !deadline.is_zero() && deadline <= MAX_DEADLINE,
        "deadline",
        format_args!("{deadline:?}"),
        "it must be above zero and at most a day",
    );
    problems.require(
        max_sms != Some(0),
        "max_sms",
        "0",
        "it must be at least 1, or None for all",
    );
}

#[cfg(test)]
mod tests {
    use crate::TokenFormat;

    use super::*;

    const GOOD: Config = Config {
        experts: 256,
        top_k: 8,
        hidden: 7168,
        max_tokens_per_rank: 128,
        p2p_world_size: None,
        format: TokenFormat::Bf16,
        combine: CombineMode::Reduced,
        deadline: Duration::from_secs(1),
        debug_checks: false,
        max_sms: None,
        specialise: false,
    };

    fn problems(ranks: u32, config: Config) -> Vec<(&'static str, String)> {
        match Plan::check(ranks, true, config) {
            Ok(_) => Vec::new(),
            Err(error) => error
                .problems
                .into_iter()
                .map(|p| (p.field, p.value))
                .collect(),
        }
    }

    /// Asserts that on four ranks `change` breaks one rule.
    fn refused(field: &'static str, value: &str, change: impl Fn(&mut Config)) {
        let mut config = GOOD;
        change(&mut config);
        assert_eq!(problems(4, config), [(field, value.to_owned())]);
    }

    #[test]
    fn a_good_configuration_gives_its_sizes() {
        let plan = Plan::check(4, false, GOOD).unwrap();
        assert_eq!(plan.local_experts(), 64);
        assert_eq!(plan.max_rows(), 4 * 128 * 8);
        assert_eq!(plan.shape().p2p_world_size, 4);
        assert_eq!(plan.config(), &GOOD);
        assert!(plan.window_bytes() > 4 * 128 * 7168 * 2);
        assert!(plan.workspace_bytes() > 0);
        assert_eq!(plan.deadline_ns(), 1_000_000_000);
    }

    /// Regions are looked at in `ferry-layout`; here, that a plan passes all sizes on.
    #[test]
    fn plans_of_many_ranks_give_their_sizes() {
        let (tokens, row) = (4096, 7168 * 2);
        for (ranks, p2p_world_size) in [(8, 8), (16, 16), (16, 8), (64, 64), (64, 8)] {
            let config = Config {
                max_tokens_per_rank: tokens,
                p2p_world_size: Some(p2p_world_size),
                ..GOOD
            };
            let plan = Plan::check(ranks as u32, true, config).unwrap();
            assert_eq!(plan.local_experts(), 256 / ranks);
            assert_eq!(plan.max_rows(), ranks * tokens * 8);
            let blocks = 256 / ranks + (ranks * tokens * 8 - 256 / ranks) / 128;
            assert_eq!(plan.max_scale_blocks(), blocks);
            // A header has 8 bytes for each expert; rows are whole cache lines.
            let near = ranks * tokens * (row + 128) + tokens * 8 * row;
            let staged = tokens * (row + 128) + ranks * tokens * row;
            // On one node, rows of 1024 tokens of all ranks can be dispatched bare, with a header for each of 16
            // parts, and rows of 2048 be combined so.
            let bare = 1024 * (row + 16 * 64) + 2048 / ranks * 8 * row;
            let rows = near + if ranks > p2p_world_size { staged } else { bare };
            let counts = ranks * (256 / ranks + 1);
            let experts = [2 * 256 / ranks, 256];
            let (consumed, gave_up) = (ranks, ranks);
            let words = [
                counts,
                ranks * 128,
                ranks * tokens,
                consumed,
                gave_up,
                tokens * 8,
            ];
            let words = words.iter().chain(&experts);
            let signals: usize = words.map(|n| (8 * n).next_multiple_of(128)).sum();
            assert_eq!(
                plan.window_bytes(),
                (rows + signals) as u64,
                "{ranks} ranks"
            );
            let row_map = 4 * (ranks * tokens * 8) as u64;
            assert!(plan.workspace_bytes() > row_map);
        }
    }

    #[test]
    fn blockwise_fp8_has_whole_strides_of_scales() {
        let config = Config {
            experts: 64,
            max_tokens_per_rank: 4096,
            format: TokenFormat::BlockwiseFp8,
            ..GOOD
        };
        let plan = Plan::check(32, false, config).unwrap();
        // Two experts, each with up to 3 rows of padding: 6 rows, rounded up.
        assert_eq!(plan.max_rows(), 32 * 4096 * 8 + 8);
    }

    #[test]
    fn every_size_is_checked() {
        refused("hidden", "12", |c| c.hidden = 12);
        refused("hidden", "0", |c| c.hidden = 0);
        refused("hidden", "1048584", |c| c.hidden = MAX_HIDDEN + 8);
        refused("top_k", "0", |c| c.top_k = 0);
        refused("top_k", "33", |c| c.top_k = 33);
        refused("top_k", "8", |c| c.experts = 4);
        refused("experts", "255", |c| c.experts = 255);
        refused("experts", "65536", |c| c.experts = 65_536);
        refused("max_tokens_per_rank", "0", |c| c.max_tokens_per_rank = 0);
        let many = u32::MAX as usize / 2 / 32 + 1;
        refused("max_tokens_per_rank", &many.to_string(), |c| {
            c.max_tokens_per_rank = many;
        });
        // Where there are so many experts, a word has 16 bits for the ordinal.
        refused("max_tokens_per_rank", "8193", |c| {
            c.experts = 65_532;
            c.max_tokens_per_rank = 8193;
        });
        let all = usize::MAX;
        refused("max_tokens_per_rank", &all.to_string(), |c| {
            c.max_tokens_per_rank = all;
        });
    }

    #[test]
    fn ranks_nodes_and_behaviour_are_checked() {
        let experts = 650;
        let many = Config { experts, ..GOOD };
        assert_eq!(problems(65, many), [("ranks", "65".to_owned())]);
        assert_eq!(problems(0, GOOD), [("ranks", "0".to_owned())]);
        for size in [0, 3, 8] {
            refused("p2p_world_size", &size.to_string(), |c| {
                c.p2p_world_size = Some(size);
            });
        }
        refused("deadline", "0ns", |c| c.deadline = Duration::ZERO);
        let long = Duration::from_secs(100_000);
        refused("deadline", "100000s", |c| c.deadline = long);
        refused("max_sms", "0", |c| c.max_sms = Some(0));
    }

    #[test]
    fn no_experts_are_reported_once_for_the_count_and_once_for_top_k() {
        let fields: Vec<_> = problems(4, Config { experts: 0, ..GOOD });
        assert_eq!(
            fields,
            [("experts", "0".to_owned()), ("top_k", "8".to_owned())]
        );
    }

    #[test]
    fn other_nodes_need_a_fabric_that_reaches_them() {
        let config = Config {
            p2p_world_size: Some(2),
            ..GOOD
        };
        assert!(Plan::check(4, true, config).is_ok());
        let error = Plan::check(4, false, config).unwrap_err();
        assert_eq!(error.problems.len(), 1);
        assert_eq!(error.problems[0].field, "p2p_world_size");
        let whole = Config {
            p2p_world_size: Some(4),
            ..GOOD
        };
        assert!(Plan::check(4, false, whole).is_ok());
    }

    #[test]
    fn all_problems_come_together_with_one_line_each() {
        let config = Config {
            experts: 7,
            top_k: 40,
            hidden: 9,
            max_tokens_per_rank: 0,
            p2p_world_size: Some(3),
            deadline: Duration::ZERO,
            max_sms: Some(0),
            ..GOOD
        };
        let error = Plan::check(4, true, config).unwrap_err();
        let fields: Vec<_> = error.problems.iter().map(|p| p.field).collect();
        assert_eq!(
            fields,
            [
                "experts",
                "top_k",
                "top_k",
                "hidden",
                "max_tokens_per_rank",
                "p2p_world_size",
                "deadline",
                "max_sms"
            ]
        );
        let text = error.to_string();
        assert_eq!(text.lines().count(), 1 + error.problems.len());
        assert!(
            text.contains("hidden is 9, but it must be a multiple of 8 above 0"),
            "{text}"
        );
    }
}
