//! Cases: everything that decides the rounds of a run.

use std::time::Duration;

use ferry::ReceiveLayout;
use ferry::simulator::{Lost, Options as Machine, Stalled};
use ferry::*;
use ferry_reference::workload::Routing;
use ferry_reference::{Problem, part_of};

use super::dice::Dice;
use super::inputs::{Return, problem};
use super::options::Options;
use super::settings::Settings;
use super::specials;
use super::tensors::HALVES;
use crate::formats;
use crate::formats::given::{Given, Strides};
use crate::verify::{Compared, Groups};

/// Everything that decides a run. Its `Debug` text is what a failing test prints.
#[derive(Clone, Debug)]
pub struct Case {
    /// Seed of the scheduler and of the workloads.
    pub seed: u64,
    /// Number of ranks.
    pub ranks: usize,
    /// Ranks of a node.
    pub p2p_world_size: usize,
    /// Experts of all ranks.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Elements of a token.
    pub hidden: usize,
    /// `[round][rank]`.
    pub tokens: Vec<Vec<usize>>,
    /// Most tokens of a rank for the plan, if no round has more.
    pub most_tokens: usize,
    /// Way of the tokens to their experts.
    pub routing: Routing,
    /// Format of the tokens.
    pub format: TokenFormat,
    /// Way back of the rows.
    pub how: Return,
    /// Bit `r`: rank `r` makes the split calls.
    pub split: u64,
    /// Value of the simulator's option.
    pub warps: u32,
    /// Value of the simulator's option.
    pub stall_one_in: u32,
    /// Whether the host waits after every call; if not, all rounds are enqueued at once.
    pub synchronize: bool,
    /// Rows of the outputs that are not needed.
    pub spare_rows: usize,
    /// Value of the plan's configuration.
    pub debug_checks: bool,
    /// Value of the plan's configuration.
    pub shared_expert: bool,
    /// Value of the plan's configuration. Every rank has the tokens of the first, and makes fused calls.
    pub skip_a2a: bool,
    /// Value of the plan's configuration.
    pub specialise: bool,
    /// The device says how many tokens there are, and the inputs have so many rows more.
    pub counted: Option<usize>,
    /// Value of the simulator's option.
    pub lost: Option<Lost>,
    /// Value of the simulator's option.
    pub stalled: Option<Stalled>,
    /// A rank that never launches anything.
    pub absent: Option<usize>,
    /// Value of the plan's configuration.
    pub options: bool,
    /// Arguments of combines beside the rows.
    pub finish: Option<Options>,
    /// Outputs hold fewer rows, or blocks of scales, than come: the seed says how many.
    pub short: bool,
    /// Value of the plan's configuration.
    pub receive: ReceiveLayout,
    /// Value of the plan's configuration.
    pub transposed_scales: bool,
    /// Value of the plan's configuration.
    pub clear_absent: bool,
    /// Value of the plan's configuration.
    pub combine_weights: bool,
    /// Tensors that the sums of rows that stayed as they came begin with.
    pub initial: [bool; 2],
    /// Bit `r`: the expert ids of rank `r` are i64, if the plan's kernels take these.
    pub wide_ids: u64,
    /// Bit `r`: rank `r` gives no weights, so that all are 1.
    pub unweighted: u64,
    /// Tokens and weights have values that are not numbers, or mean something on the way.
    pub specials: bool,
    /// Whether the host waits after each dispatch to read the view.
    pub reads_views: bool,
    /// Whether each call has a limit of multiprocessors of its own.
    pub limits: bool,
    /// Whether split dispatches tell the host of their counts, which it waits for.
    pub counts: bool,
    /// Bit `n`: all ranks give up round `n`, counted from 0, instead of combining it.
    pub given_up: u64,
    /// Form of the tokens that dispatch is given, in formats that have it.
    pub given: Given,
    /// Places of their scales, if they are encoded.
    pub strides: Strides,
    /// Values of the plan's configuration about padding and rows by expert.
    pub groups: Groups,
}

impl Case {
    /// Two ranks of one node, a few tokens, one round.
    pub fn small(seed: u64) -> Self {
        Self {
            seed,
            ranks: 2,
            p2p_world_size: 2,
            experts: 4,
            top_k: 2,
            hidden: 16,
            tokens: vec![vec![3, 2]],
            most_tokens: 0,
            routing: Routing::Uniform,
            format: TokenFormat::Bf16,
            how: Return::Reduced,
            split: 0,
            warps: 4,
            stall_one_in: 64,
            synchronize: false,
            spare_rows: 2,
            debug_checks: false,
            shared_expert: false,
            skip_a2a: false,
            specialise: false,
            counted: None,
            lost: None,
            stalled: None,
            absent: None,
            options: false,
            finish: None,
            short: false,
            receive: ReceiveLayout::ByExpert,
            transposed_scales: false,
            clear_absent: false,
            combine_weights: false,
            initial: [false; 2],
            wide_ids: 0,
            unweighted: 0,
            specials: false,
            reads_views: false,
            limits: false,
            counts: false,
            given_up: 0,
            given: Given::Bf16,
            strides: Strides::RowMajor,
            groups: Groups::NONE,
        }
    }

    /// The same on so many ranks, all of one node.
    #[must_use]
    pub fn on_one_node(mut self, ranks: usize) -> Self {
        self.experts = ranks * (self.experts / self.ranks);
        self.top_k = self.top_k.min(self.experts);
        for tokens in &mut self.tokens {
            *tokens = tokens.iter().copied().cycle().take(ranks).collect();
        }
        (self.ranks, self.p2p_world_size) = (ranks, ranks);
        self
    }

    /// The inputs of a round.
    pub fn problem(&self, round: usize) -> Problem {
        let given = if self.skip_a2a { 1 } else { self.ranks };
        let mut problem = problem(
            self.tokens[round][..given].to_vec(),
            [self.experts, self.top_k, self.hidden],
            self.routing.clone(),
            self.seed.wrapping_mul(16).wrapping_add(round as u64),
        );
        problem.ranks = self.ranks;
        problem.inputs = problem
            .inputs
            .into_iter()
            .cycle()
            .take(self.ranks)
            .collect();
        for (rank, input) in problem.inputs.iter_mut().enumerate() {
            if self.specials {
                let mut dice = Dice::new(self.seed ^ (round * 64 + rank) as u64);
                let rows = input.x.chunks_mut(self.hidden);
                rows.for_each(|row| specials::put_numbers(&mut dice, row));
                specials::put_weights(&mut dice, &mut input.topk_weights);
            }
            if self.is_unweighted(rank) {
                input.topk_weights.fill(1.0);
            }
        }
        problem
    }

    /// The inputs of all rounds.
    pub fn problems(&self) -> Vec<Problem> {
        (0..self.tokens.len())
            .map(|round| self.problem(round))
            .collect()
    }

    /// Most multiprocessors of a call of rank `rank`; `None` for all.
    pub(super) fn limit_of(&self, rank: usize, round: usize, half: usize) -> Option<u32> {
        let call = (round * HALVES + half) * self.ranks + rank;
        let mut dice = Dice::new(self.seed ^ 0x736d_7300 ^ (call as u64) << 32);
        dice.pick(&[None, None, Some(1), Some(2), Some(3)])
    }

    /// Deadline of a call of rank `rank`; `None` for the plan's. If a rank is missing, that of all calls, as
    /// the rank that gives up first names the culprit.
    pub(super) fn deadline_of(&self, rank: usize, round: usize, half: usize) -> Option<Duration> {
        let is_missing = self.lost.is_some() || self.stalled.is_some() || self.absent.is_some();
        let call = ((round * HALVES + half) * self.ranks + rank) * usize::from(!is_missing);
        let mut dice = Dice::new(self.seed ^ 0x6465_6164 ^ (call as u64) << 32);
        dice.pick(&[None, Some(60), Some(24 * 3600)])
            .map(Duration::from_secs)
    }

    /// Whether all ranks give up a round.
    pub const fn gives_up(&self, round: usize) -> bool {
        self.given_up >> round & 1 != 0
    }

    /// Round of a fault's epoch: a round that is given up has two.
    pub fn round_of(&self, epoch: u64) -> usize {
        let mut last = 0;
        let ends = (0..).map(|round| {
            last += 1 + u64::from(self.gives_up(round));
            last
        });
        ends.take_while(|&last| last < epoch).count()
    }

    /// Rows of the tensors of a rank that has so many tokens.
    pub fn rows(&self, tokens: usize) -> usize {
        tokens + self.counted.unwrap_or(0)
    }

    /// Capacity of the outputs of rank `rank`, which has `tokens` tokens and receives `needed`.
    pub fn capacity(
        &self,
        mut needed: Capacity,
        rank: usize,
        tokens: usize,
        dice: &mut Dice,
    ) -> Capacity {
        let alignment = Groups::of(&self.config()).alignment_in(self.format);
        let mut shared = 0;
        if self.shared_expert {
            // The host asks for room for all rows of `x`.
            let rows = self.rows(tokens);
            let rows = if self.skip_a2a {
                part_of(rows, rank, self.ranks).len()
            } else {
                rows
            };
            shared = rows.next_multiple_of(alignment);
            let more = self.counted.unwrap_or(0);
            needed.rows += more.next_multiple_of(alignment);
            needed.scale_blocks += more.next_multiple_of(alignment).div_ceil(128);
        }
        if self.receive == ReceiveLayout::Padded {
            // Blocks have all their rows.
            return needed;
        }
        if self.short {
            return short_of(needed, shared, alignment, dice);
        }
        let rows = formats::with_spare_rows(needed, alignment, self.spare_rows);
        Capacity {
            scale_blocks: needed.scale_blocks + self.spare_rows,
            ..rows
        }
    }

    /// Rows of the outputs of a rank that needs room for `needed` rows, which stay as they came.
    pub fn received_rows(&self, needed: usize, dice: &mut Dice) -> usize {
        match self.receive {
            ReceiveLayout::Compact if self.short => dice.below(needed + 1),
            ReceiveLayout::Compact => needed + self.spare_rows,
            _ => needed,
        }
    }

    /// The plan's configuration.
    pub fn config(&self) -> Config {
        let most = self.tokens.iter().flatten().max().copied().unwrap_or(0);
        let needs_options = self.counted.is_some() || self.gives_encoded();
        self.with_groups(Config {
            p2p_world_size: (!self.skip_a2a).then_some(self.p2p_world_size),
            format: self.format,
            combine: self.how.mode(),
            deadline: Duration::from_secs(3600),
            debug_checks: self.debug_checks,
            shared_expert: self.shared_expert,
            skip_a2a: self.skip_a2a,
            specialise: self.specialise,
            options: !self.skip_a2a
                && (self.options || !self.receive.keeps_rows() && needs_options),
            receive: Receive::try_from(ReceiveFields {
                transposed_scales: self.transposed_scales,
                clear_absent: self.clear_absent,
                combine_weights: self.combine_weights,
                ..ReceiveFields::new(self.receive)
            })
            .unwrap_or_else(|refused| panic!("{refused}: {self:?}")),
            ..Config::new(
                self.experts,
                self.top_k,
                self.hidden,
                self.rows(most.max(self.most_tokens)).max(1),
            )
        })
    }

    /// The configuration with padding and tables as far as it takes them.
    fn with_groups(&self, config: Config) -> Config {
        let spans_nodes = !self.skip_a2a && self.p2p_world_size < self.ranks;
        let mut groups = self.groups;
        if spans_nodes && config.combine == CombineMode::Exact {
            // Rows are staged by their number.
            groups.alignment = 1;
        }
        groups.put(config)
    }

    /// Extent of a comparison, and the settings of the compared rounds.
    pub fn compared(&self) -> Compared {
        Compared {
            given: self.given,
            ..Compared::of(&self.config())
        }
    }

    /// Whether dispatch is given codes and scales.
    pub const fn gives_encoded(&self) -> bool {
        self.given.in_format(self.format, self.hidden).is_encoded()
    }

    /// Whether the expert ids of a rank are i64.
    pub fn has_wide_ids(&self, rank: usize) -> bool {
        let config = self.config();
        let has_options = config.options || config.shared_expert || config.skip_a2a;
        let takes_both = has_options || config.receive.keeps_rows();
        takes_both && self.wide_ids >> rank & 1 != 0
    }

    /// Whether a rank keeps its ids, apart from all else.
    pub fn keeps_ids(&self, rank: usize) -> bool {
        let bits = Dice::new(self.seed ^ 0x6b65_6570).bits();
        let is_alone = self.p2p_world_size >= self.ranks;
        let can_keep = self.how == Return::Reduced && is_alone && !self.skip_a2a;
        can_keep && bits >> rank & 1 != 0
    }

    /// Whether a rank gives no weights.
    pub const fn is_unweighted(&self, rank: usize) -> bool {
        self.unweighted >> rank & 1 != 0
    }

    /// Settings of a session whose outputs hold what these problems bring, and the spare rows.
    pub fn settings(&self, config: Config, problems: &[Problem]) -> Settings {
        let settings = Settings {
            split: self.is_split(0),
            apart: self.how == Return::Apart,
            wide_ids: self.has_wide_ids(0),
            keeps_ids: self.keeps_ids(0),
            given: self.given,
            strides: self.strides,
            ..Settings::of(config, problems)
        };
        settings.with_spare(self.spare_rows, self.spare_rows)
    }

    /// The simulator's options.
    pub fn machine(&self) -> Machine {
        Machine {
            warps: self.warps,
            stall_one_in: self.stall_one_in,
            lost: self.lost,
            stalled: self.stalled,
            patience: Some(Duration::ZERO),
            ..Machine::new(self.ranks as u32, self.seed)
        }
    }

    /// Whether a rank makes the split calls.
    pub const fn is_split(&self, rank: usize) -> bool {
        self.split >> rank & 1 != 0
    }
}

/// Draws less than `needed`, mostly, but room for `shared` rows: fewer rows, fewer blocks of scales, or both.
fn short_of(mut needed: Capacity, shared: usize, alignment: usize, dice: &mut Dice) -> Capacity {
    needed.rows = needed.rows.next_multiple_of(alignment);
    let blocks = shared.div_ceil(128);
    let (rows, scale_blocks) = (
        shared + dice.below(needed.rows.saturating_sub(shared) + 1) / alignment * alignment,
        blocks + dice.below(needed.scale_blocks.saturating_sub(blocks) + 1),
    );
    let drawn = match dice.below(4) {
        0 => needed,
        1 => Capacity { rows, ..needed },
        2 => Capacity {
            scale_blocks,
            ..needed
        },
        _ => Capacity {
            rows,
            scale_blocks,
            ..needed
        },
    };
    // Rows without a block of scales are refused.
    let least = usize::from(drawn.rows > 0);
    Capacity {
        scale_blocks: drawn.scale_blocks.max(least),
        ..drawn
    }
}
