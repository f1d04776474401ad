//! The context of a launch of combine: all its functions share it, and take nothing else of the launch.

use core::ops::Deref;

use ferry_layout::{CombineArgs, CombineOptions};

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
