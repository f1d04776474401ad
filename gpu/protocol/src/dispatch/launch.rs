//! The context of a launch of dispatch: all its functions share it, and take nothing else of the launch.

use core::ops::Deref;

use ferry_layout::{
    Counter, DispatchArgs, DispatchOptions, Fault, FaultKind, ReceiveLayout, Region, Table,
};

use crate::machine::Machine;
use crate::sync::launch::Launch;

/// A launch of dispatch, with its arguments and options.
pub struct Dispatch<'a, M> {
    /// The launch.
    pub launch: Launch<'a, M>,
    /// Its arguments.
    pub args: &'a DispatchArgs,
    /// Its options.
    pub options: &'a DispatchOptions,
}

impl<'a, M> Deref for Dispatch<'a, M> {
    type Target = Launch<'a, M>;

    #[inline(always)]
    fn deref(&self) -> &Launch<'a, M> {
        &self.launch
    }
}

impl<M: Machine> Dispatch<'_, M> {
    /// Layout of the received rows.
    #[inline(always)]
    pub fn layout(&self) -> ReceiveLayout {
        match self.machine.keeps_rows() {
            true => self.options.rows.layout(),
            false => ReceiveLayout::ByExpert,
        }
    }

    /// Keeps the number of tokens for the round's other launches, and reports a number above the host's
    /// limit. One warp.
    #[inline(always)]
    pub fn keep_tokens(&self) {
        let (machine, most) = (self.machine, self.common.tokens);
        machine.leave(Counter::Tokens, self.tokens as u64);
        let given = machine.agreed();
        if given > most {
            self.record_input(FaultKind::TooManyOnDevice, 1, |_| Fault {
                region: Region::TokensOnDevice,
                wanted: most as u64,
                saw: given as u64,
                ..self.fault()
            });
        }
    }
}

/// Number of tokens on the device: one for all warps of a block, which pass a barrier. Blocks may read other
/// numbers if the user changes it too early; each of them still stays inside its tensors, and waits end.
#[inline(always)]
pub fn read_tokens<M: Machine>(machine: &M) -> u32 {
    machine.agree(|| {
        let tokens = machine.lanes(|_| machine.read(Table::TokensOnDevice, 0));
        machine.broadcast(tokens, 0)
    })
}
