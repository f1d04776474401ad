//! Cases: everything that decides a run, drawn from a seed.

use std::time::Duration;

use ferry::simulator::{Lost, Options};
use ferry::*;
use ferry_reference::Problem;
use ferry_reference::workload::{Routing, WorkloadSpec, generate};

use crate::formats;

/// How the rows of a token come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// Summed on the experts' ranks, then at the source.
    Reduced,
    /// Summed at the source.
    Exact,
    /// Not summed.
    Apart,
}

impl Return {
    /// Every way.
    pub const ALL: [Self; 3] = [Self::Reduced, Self::Exact, Self::Apart];

    /// The plan's.
    pub const fn mode(self) -> CombineMode {
        match self {
            Self::Reduced => CombineMode::Reduced,
            Self::Exact | Self::Apart => CombineMode::Exact,
        }
    }
}

/// Everything that decides a run. Its `Debug` text is what a failing test prints.
#[derive(Clone, Debug)]
pub struct Case {
    /// Of the scheduler and of the workloads.
    pub seed: u64,
    /// How many ranks.
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
    /// How tokens find their experts.
    pub routing: Routing,
    /// Of the tokens.
    pub format: TokenFormat,
    /// How rows come back.
    pub how: Return,
    /// Bit `r`: rank `r` makes the split calls.
    pub split: u64,
    /// As in the simulator's options.
    pub warps: u32,
    /// As in the simulator's options.
    pub stall_one_in: u32,
    /// Whether the host waits after every call; if not, all rounds are enqueued at once.
    pub synchronize: bool,
    /// Rows of the outputs that are not needed.
    pub spare_rows: usize,
    /// As in the plan's configuration.
    pub debug_checks: bool,
    /// As in the plan's configuration.
    pub shared_expert: bool,
    /// The device says how many tokens there are, and the inputs have so many rows more.
    pub counted: Option<usize>,
    /// As in the simulator's options.
    pub lost: Option<Lost>,
    /// A rank that never launches anything.
    pub absent: Option<usize>,
    /// As in the plan's configuration.
    pub options: bool,
    /// Outputs hold fewer rows, or blocks of scales, than come: the seed says how many.
    pub short: bool,
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
            counted: None,
            lost: None,
            absent: None,
            options: false,
            short: false,
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
        generate(WorkloadSpec {
            ranks: self.ranks,
            experts: self.experts,
            top_k: self.top_k,
            hidden: self.hidden,
            tokens: self.tokens[round].clone(),
            routing: self.routing.clone(),
            seed: self.seed.wrapping_mul(16).wrapping_add(round as u64),
        })
    }

    /// What the outputs of a rank with `tokens` tokens hold that must hold `needed`.
    pub fn capacity(&self, mut needed: Capacity, tokens: usize, dice: &mut Dice) -> Capacity {
        let tokens = tokens + self.counted.unwrap_or(0);
        let alignment = self.format.sizes().row_alignment as usize;
        // What the host asks for: room for all rows of `x`.
        let shared = match self.shared_expert {
            true => tokens.next_multiple_of(alignment),
            false => 0,
        };
        if let (true, Some(more)) = (self.shared_expert, self.counted) {
            needed.rows += more;
            needed.scale_blocks += more.div_ceil(128);
        }
        if self.short {
            return short_of(needed, shared, alignment, dice);
        }
        let rows = formats::with_spare_rows(needed, self.format, self.spare_rows);
        Capacity {
            scale_blocks: needed.scale_blocks + self.spare_rows,
            ..rows
        }
    }

    /// The inputs of all rounds.
    pub fn problems(&self) -> Vec<Problem> {
        (0..self.tokens.len())
            .map(|round| self.problem(round))
            .collect()
    }

    /// The plan's configuration.
    pub fn config(&self) -> Config {
        let most = self.tokens.iter().flatten().max().copied();
        Config {
            p2p_world_size: Some(self.p2p_world_size),
            format: self.format,
            combine: self.how.mode(),
            deadline: Duration::from_secs(3600),
            debug_checks: self.debug_checks,
            shared_expert: self.shared_expert,
            options: self.options || self.counted.is_some(),
            ..Config::new(
                self.experts,
                self.top_k,
                self.hidden,
                (most.unwrap_or(0) + self.counted.unwrap_or(0)).max(1),
            )
        }
    }

    /// The machine that it runs on.
    pub fn machine(&self) -> Options {
        Options {
            warps: self.warps,
            stall_one_in: self.stall_one_in,
            lost: self.lost,
            patience: Some(Duration::ZERO),
            ..Options::new(self.ranks as u32, self.seed)
        }
    }

    /// Whether a rank makes the split calls.
    pub fn is_split(&self, rank: usize) -> bool {
        self.split >> rank & 1 != 0
    }
}

/// Less than `needed`, mostly, but room for `shared` rows: fewer rows, fewer blocks of scales, or both.
pub fn short_of(
    mut needed: Capacity,
    shared: usize,
    alignment: usize,
    dice: &mut Dice,
) -> Capacity {
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
        _ => Capacity { rows, scale_blocks },
    };
    // Rows without a block of scales are refused.
    let least = usize::from(drawn.rows > 0);
    Capacity {
        scale_blocks: drawn.scale_blocks.max(least),
        ..drawn
    }
}

/// Draws the parameters of a case from its seed (splitmix64).
pub struct Dice(u64);

impl Dice {
    /// Of a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `end`.
    pub const fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }
}

/// A case whose every parameter comes from its seed: 2 to 8 ranks of 1, 2 or all a node, two or
/// three rounds.
pub fn any_case(seed: u64) -> Case {
    let mut dice = Dice::new(seed);
    let ranks = 2 + dice.below(7);
    let nodes: Vec<usize> = [1, 2, ranks]
        .into_iter()
        .filter(|&size| ranks.is_multiple_of(size))
        .collect();
    let p2p_world_size = dice.pick(&nodes);
    let experts = ranks * (1 + dice.below(4));
    let top_k = (1 + dice.below(8)).min(experts);
    let rounds = 2 + dice.below(2);
    let most = 1 + dice.below(12);
    let tokens = (0..rounds)
        .map(|_| (0..ranks).map(|_| dice.below(most + 1)).collect())
        .collect();
    let routing = match dice.below(4) {
        0 => Routing::Uniform,
        1 => Routing::Zipf { exponent: 1.0 },
        2 => Routing::Duplicates,
        _ => Routing::Holes { probability: 0.4 },
    };
    let format = match dice.below(3) {
        0 => TokenFormat::Bf16,
        _ => dice.pick(&TokenFormat::ALL),
    };
    // Rows of more than 512 bytes travel in parts.
    let hidden = match format {
        TokenFormat::Bf16 => 8 * dice.pick(&[1, 2, 3, 4, 5, 6, 7, 8, 40, 100, 161]),
        TokenFormat::Nvfp4(_) | TokenFormat::Nvfp4RowScaled(_) => 64 * dice.pick(&[1, 2, 3, 9, 33]),
        _ => 128 * dice.pick(&[1, 2, 3, 5, 9, 17]),
    };
    let how = dice.pick(&Return::ALL);
    Case {
        seed,
        ranks,
        p2p_world_size,
        experts,
        top_k,
        hidden,
        format,
        tokens,
        routing,
        how,
        split: dice.pick(&[0, u64::MAX, dice.0]),
        warps: 1 + dice.below(8) as u32,
        stall_one_in: dice.pick(&[0, 8, 64]),
        synchronize: dice.below(4) == 0,
        spare_rows: dice.below(3),
        debug_checks: false,
        // Rows that stay apart are not added to.
        shared_expert: dice.below(3) == 0 && how != Return::Apart,
        counted: dice.pick(&[None, None, Some(0), Some(3)]),
        lost: None,
        absent: None,
        options: false,
        short: false,
    }
}

/// A case for GPUs, all of one node: [`any_case`] with larger sizes, and eight rounds' tokens.
pub fn gpu_case(seed: u64, ranks: usize) -> Case {
    let case = any_case(seed);
    let mut dice = Dice::new(!seed);
    let experts = ranks * dice.pick(&[1, 2, 4, 8, 16, 32]);
    let most = dice.pick(&[1, 1, 2, 4, 8, 16, 32, 128]);
    let tokens = (0..8)
        .map(|_| (0..ranks).map(|_| dice.below(most + 1)).collect())
        .collect();
    Case {
        ranks,
        p2p_world_size: ranks,
        experts,
        top_k: (1 + dice.below(9)).min(experts),
        hidden: case.hidden * dice.pick(&[1, 1, 2, 3]),
        tokens,
        ..case
    }
}

/// Few tokens in rows of several parts, on one node, in formats whose rows then go bare; many rounds.
pub fn inline_case(seed: u64) -> Case {
    let case = any_case(seed);
    let mut dice = Dice::new(!seed);
    let ranks = dice.pick(&[2, 3, 4]);
    let experts = ranks * (1 + dice.below(3));
    let tokens = (0..6)
        .map(|_| (0..ranks).map(|_| dice.pick(&[0, 1, 1, 2, 5])).collect())
        .collect();
    let format = dice.pick(&[
        TokenFormat::Bf16,
        TokenFormat::BlockwiseFp8,
        TokenFormat::Mxfp8(ScaleLayout::Tiled),
        TokenFormat::Mxfp8(ScaleLayout::RowMajor),
    ]);
    Case {
        ranks,
        p2p_world_size: ranks,
        experts,
        top_k: (1 + dice.below(4)).min(experts),
        // More than 512 bytes.
        hidden: match format {
            TokenFormat::Bf16 => 8 * dice.pick(&[33, 65, 161]),
            _ => 128 * dice.pick(&[5, 9, 17]),
        },
        format,
        tokens,
        synchronize: false,
        ..case
    }
}
