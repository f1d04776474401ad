//! The context of a launch of combine: all its functions share it, and take nothing else of the launch.

use core::ops::Deref;

use ferry_layout::{CombineArgs, CombineMode, CombineOptions};

use crate::machine::Machine;
use crate::sync::launch::Launch;

/// A launch of combine, with its arguments and options.
pub struct Combine<'a, M> {
    /// The launch.
    pub launch: Launch<'a, M>,
    /// Its arguments.
    pub args: &'a CombineArgs,
    /// Its options.
    pub options: &'a CombineOptions,
}

impl<'a, M> Deref for Combine<'a, M> {
    type Target = Launch<'a, M>;

    #[inline(always)]
    fn deref(&self) -> &Launch<'a, M> {
        &self.launch
    }
}

impl<M: Machine> Combine<'_, M> {
    /// Way back of the rows, for those who sum them. Rows that stayed as they came never return as they are,
    /// so reducers of their kernels have no code for it. Senders keep theirs: without it the fused kernel
    /// spills more.
    #[inline(always)]
    pub fn mode(&self) -> CombineMode {
        match self.machine.keeps_rows() {
            true => CombineMode::Reduced,
            false => self.common.shape.mode(),
        }
    }
}
