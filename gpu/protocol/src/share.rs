//! Who of the warps that share a piece of work a warp is.

/// Number `index` of `of` warps that share work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub index: u32,
    pub of: u32,
}

impl Share {
    /// This one's of `tasks` tasks.
    #[inline(always)]
    pub fn tasks(self, tasks: u32) -> impl Iterator<Item = u32> {
        (self.index..tasks).step_by(self.of as usize)
    }
}
