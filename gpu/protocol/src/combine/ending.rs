//! The last step of combine's sums: from f32 to the result's elements.

use core::array::from_fn;

use ferry_layout::{CombineMode, CombineOptions, Epilogue, Tensor};

use crate::combine::launch::Combine;
use crate::machine::Machine;
use crate::machine::finishing::{Finish, Rounding};
use crate::machine::rows::Row;

/// Last step of a launch for the sums of its tokens. Each variant is a type of its own, so that a launch
/// chooses between them once: choosing again at every token makes a launch that only rounds slower (T-118).
pub trait Ending<M: Machine>: Copy {
    /// Last step for the sums of a token.
    fn of_token(self, combine: &Combine<M>, token: u32) -> impl Finish<M>;
}

/// Only rounds sums to BF16.
#[derive(Clone, Copy)]
pub struct OnlyRounds;

impl<M: Machine> Ending<M> for OnlyRounds {
    #[inline(always)]
    fn of_token(self, _combine: &Combine<M>, _token: u32) -> impl Finish<M> {
        Rounding
    }
}

/// Whether a launch can use [`OnlyRounds`], which needs fewer registers. Without options a constant.
#[inline(always)]
pub fn only_rounds<M: Machine>(
    machine: &M,
    options: &CombineOptions,
    epilogue: &impl Epilogue,
) -> bool {
    let begins_with_zero = !machine.keeps_rows() || !options.rows.has_initial();
    epilogue.is_none() && options.only_rounds() && begins_with_zero
}

/// Last step according to options and an epilogue.
#[derive(Clone, Copy)]
pub struct GivenEnding<'a, E> {
    /// The launch's options.
    pub options: &'a CombineOptions,
    /// The launch's epilogue.
    pub epilogue: &'a E,
}

/// Last step for the sums of a token.
#[derive(Clone, Copy)]
pub struct TokenEnding<'a, E> {
    /// Last step of the launch.
    pub ending: GivenEnding<'a, E>,
    /// Number of expert rows.
    pub row_capacity: u64,
    /// Tokens of this rank in this round.
    pub tokens: u32,
    /// The token.
    pub token: u32,
    /// Whether the sum is rounded to BF16 before the shared expert's row is added.
    pub rounds_first: bool,
}

/// Vectors of a lane that are finished at a time: the loads for more would not find registers.
const PAIR: usize = 2;

impl<M: Machine, E: Epilogue> Ending<M> for GivenEnding<'_, E> {
    #[inline(always)]
    fn of_token(self, combine: &Combine<M>, token: u32) -> impl Finish<M> {
        TokenEnding {
            ending: self,
            row_capacity: combine.args.row_capacity,
            tokens: combine.tokens,
            token,
            rounds_first: matches!(combine.mode(), CombineMode::Exact),
        }
    }
}

impl<M: Machine, E: Epilogue> Finish<M> for TokenEnding<'_, E> {
    #[inline(always)]
    fn is_rounding(&self) -> bool {
        false
    }

    /// Begins with the user's tensors, one after the other. Spelled out, so that the sums stay in registers.
    #[inline(always)]
    fn begin<const DEPTH: usize>(&self, machine: &M, start: u32, end: u32) -> [M::Sums; DEPTH] {
        let zeros = [M::Sums::default(); DEPTH];
        if !machine.keeps_rows() {
            return zeros;
        }
        let rows = &self.ending.options.rows;
        let (first, second) = (rows.initial, rows.second_initial);
        let sums = self.add_initial(machine, first, Tensor::Initial, start, end, zeros);
        self.add_initial(machine, second, Tensor::SecondInitial, start, end, sums)
    }

    #[inline(always)]
    fn store<const DEPTH: usize>(
        &self,
        machine: &M,
        to: Row,
        start: u32,
        end: u32,
        sums: [M::Sums; DEPTH],
    ) {
        const { assert!(DEPTH == PAIR || DEPTH == 2 * PAIR) };
        let pair = |first: usize| from_fn(|index| sums[(first + index).min(DEPTH - 1)]);
        self.store_pair(machine, to, start, end, pair(0));
        if DEPTH > PAIR {
            let start = start + PAIR as u32 * M::WARP_BYTES;
            self.store_pair(machine, to, start, end, pair(PAIR));
        }
    }
}

impl<E: Epilogue> TokenEnding<'_, E> {
    /// Adds the token's row of a tensor to the sums of a tile, if there is such a tensor at `address`.
    #[inline(always)]
    fn add_initial<M: Machine, const DEPTH: usize>(
        &self,
        machine: &M,
        address: u64,
        tensor: Tensor,
        start: u32,
        end: u32,
        sums: [M::Sums; DEPTH],
    ) -> [M::Sums; DEPTH] {
        if address == 0 {
            return sums;
        }
        let row = machine.row(Row::Tensor(tensor, self.token));
        let tile: [M::Vector; DEPTH] = machine.load_tile(row, start, end, false);
        from_fn(|index| machine.add_sums(sums[index], machine.widen_bf16(tile[index])))
    }

    /// The expert row that is added, if it exists: outputs may be too small, which the dispatch has reported.
    #[inline(always)]
    fn shared_row<M: Machine>(&self, machine: &M) -> Option<u32> {
        // Late: during the sum there are no registers for it.
        let token = machine.late(self.token);
        let row = self.ending.options.shared_row(self.tokens, token);
        row.filter(|&row| (row as u64) < self.row_capacity)
    }

    /// Stores like [`Finish::store`]. Everything is loaded before the first store, as loads do not overtake
    /// stores.
    #[inline(always)]
    fn store_pair<M: Machine>(
        &self,
        machine: &M,
        to: Row,
        start: u32,
        end: u32,
        mut sums: [M::Sums; PAIR],
    ) {
        if let Some(row) = self.shared_row(machine) {
            let row = machine.row(Row::Tensor(Tensor::Expert, row));
            let shared: [M::Vector; PAIR] = machine.load_tile(row, start, end, false);
            sums = from_fn(|index| {
                let sum = match self.rounds_first {
                    true => machine.widen_bf16(machine.round_to_bf16(sums[index])),
                    false => sums[index],
                };
                machine.add_sums(sum, machine.widen_bf16(shared[index]))
            });
        }
        let GivenEnding { options, epilogue } = self.ending;
        let (token, element) = (machine.late(self.token), options.element());
        let starts = [start, start + M::WARP_BYTES];
        let apply = |index: usize| machine.apply(epilogue, token, starts[index], end, sums[index]);
        let [first, second] = [apply(0), apply(1)];
        let to = machine.row(match to {
            Row::Tensor(tensor, index) => Row::Tensor(tensor, machine.late(index)),
            to => to,
        });
        machine.store_sums(to, starts[0], end, first, element);
        machine.store_sums(to, starts[1], end, second, element);
    }
}
