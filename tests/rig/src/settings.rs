//! Settings of sessions, and their turns.

use ferry::{Capacity, CombineMode, Config, Receive};
use ferry_reference::{Problem, RowNumbers, receive_rows};

use super::inputs::Return;
use crate::formats::given::{Given, Strides};
use crate::formats::{self, INPUT_SCALE};
use crate::verify::{Groups, Placement, SHARED_FACTOR, largest};

/// Purpose of a session.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Configuration of the plan.
    pub config: Config,
    /// Capacity of the dispatch's outputs.
    pub capacity: Capacity,
    /// Whether to make the split calls.
    pub split: bool,
    /// Whether exact mode keeps the rows of a token apart, instead of summing them with the router's weights.
    pub apart: bool,
    /// Whether dispatches are given the router's weights.
    pub weights: bool,
    /// Global scale that NVFP4 is given.
    pub input_scale: Option<f32>,
    /// Whether the device says how many tokens there are. Every tensor has as many rows as the plan allows
    /// then. The plan has options.
    pub counted: bool,
    /// Whether expert ids are i64.
    pub wide_ids: bool,
    /// Whether rounds keep their ids in memory of the rig's, in reduced mode.
    pub keeps_ids: bool,
    /// Form of the tokens that dispatch is given. The plan has options if they are encoded.
    pub given: Given,
    /// Places of their scales, if they are encoded.
    pub strides: Strides,
}

impl Settings {
    /// Fused calls in which rows are summed, and outputs that hold what these problems bring.
    pub fn of(config: Config, problems: &[Problem]) -> Self {
        let needed = |problem: &Problem| {
            if config.receive.keeps_rows() {
                let ranks = 0..problem.ranks;
                let rows = ranks.map(|rank| rows_for(problem, rank, &config)).max();
                return Capacity {
                    rows: rows.unwrap_or(0),
                    ..Capacity::default()
                };
            }
            largest(&Placement::of_config(problem, &config, SHARED_FACTOR))
        };
        let needed = problems.iter().map(needed);
        Self {
            config,
            capacity: needed.fold(Capacity::default(), formats::larger),
            split: false,
            apart: false,
            weights: true,
            input_scale: Some(INPUT_SCALE),
            counted: false,
            wide_ids: false,
            keeps_ids: false,
            given: Given::Bf16,
            strides: Strides::RowMajor,
        }
    }

    /// The same with so many rows and blocks of scales more.
    #[must_use]
    pub fn with_spare(self, rows: usize, scale_blocks: usize) -> Self {
        let has_places = matches!(
            self.config.receive,
            Receive::View(_) | Receive::Strided(_) | Receive::Padded(_)
        );
        if has_places {
            return self;
        }
        let alignment = Groups::of(&self.config).alignment_in(self.config.format);
        let capacity = formats::with_spare_rows(self.capacity, alignment, rows);
        Self {
            capacity: Capacity {
                scale_blocks: capacity.scale_blocks + scale_blocks,
                ..capacity
            },
            ..self
        }
    }

    /// Way back of the rows.
    pub const fn how(&self) -> Return {
        match self.config.combine {
            CombineMode::Reduced => Return::Reduced,
            CombineMode::Exact if self.apart => Return::Apart,
            CombineMode::Exact => Return::Exact,
        }
    }
}

/// Rows that outputs must hold for those that stay as they came.
pub(super) fn rows_for(problem: &Problem, rank: usize, config: &Config) -> usize {
    match config.receive {
        Receive::Compact(_) => {
            receive_rows(problem, rank, RowNumbers::Compact { capacity: 0 }).sent
        }
        _ => problem.ranks * config.max_tokens_per_rank,
    }
}

/// Inputs of a round, its experts, and where its result goes.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// The slot with the inputs.
    pub slot: usize,
    /// The result's place, of as many as there are slots. Two rounds that follow each other in
    /// one place should have different inputs: a round that did not run is not noticed otherwise.
    pub into: usize,
    /// Whether the experts return BF16 rows as they arrived, instead of what the host has put there.
    pub returns: bool,
}

impl Turn {
    /// Inputs of the first slot, result in the first place, answers by the host.
    pub const FIRST: Self = Self {
        slot: 0,
        into: 0,
        returns: false,
    };

    /// The same with experts that return the rows.
    pub const RETURNED: Self = Self::of(0, 0);

    /// A slot and a place, with experts that return the rows.
    pub const fn of(slot: usize, into: usize) -> Self {
        Self {
            slot,
            into,
            returns: true,
        }
    }
}
