//! Memory that the host reads while kernels run.

/// A word that the host waits for.
pub trait Host {
    /// Stores the number that the host waits for. Not ordered with anything but an earlier release. For one
    /// lane.
    fn tell_host(&self, ticket: u64);
}
