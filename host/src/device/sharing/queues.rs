//! Hardware queues, of which a process has too few for many ranks.
//!
//! The driver gives each stream with work a queue of its own as long as there are any; beyond that, streams
//! share one and wait for each other's kernels, even if multiprocessors are free, so that a rank's kernel may
//! be queued after one that waits for it. (Seen on an H200 with driver 580: of 40 streams none held up
//! another while two had work; with 32 queues, 4 ranks and 28 other streams that waited went on, 4 ranks and
//! 32 did not.)

use std::ffi::OsStr;

use crate::error::notice::Notice;

/// Variable with the number of queues, which the driver reads when it is initialized.
pub(crate) const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Largest number of queues.
const MOST: u32 = 32;
/// Number of queues if the variable is not set.
const UNSET: u32 = 8;

/// Warns that `ranks` of this process share a GPU, if the process has fewer queues than it could have. The
/// driver cannot be asked how many it has made. So the variable is read, only for this warning: nothing else
/// depends on it.
pub(crate) fn warn(ranks: usize) {
    static FEW: Notice = Notice::new();
    let queues = queues(std::env::var_os(VARIABLE).as_deref());
    if queues >= MOST {
        return;
    }
    tracing::warn!(
        ranks,
        queues,
        "ranks of a process share a GPU with few hardware queues"
    );
    FEW.tell(&format!(
        "{ranks} ranks of this process share a GPU, and it has {queues} hardware queues; streams that share \
         one wait for each other's kernels, which can end a round at its deadline: set {VARIABLE}={MOST} \
         before anything uses the driver"
    ));
}

/// Number of queues for this value of the variable.
fn queues(value: Option<&OsStr>) -> u32 {
    let number = value.and_then(OsStr::to_str);
    let number = number.and_then(|text| text.trim().parse().ok());
    number.map_or(UNSET, |number: u32| number.clamp(1, MOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_those_of_the_variable_within_bounds() {
        for (value, wanted) in [
            (None, 8),
            (Some("32"), 32),
            (Some(" 4 "), 4),
            (Some("0"), 1),
            (Some("99"), 32),
            (Some("many"), 8),
        ] {
            assert_eq!(queues(value.map(OsStr::new)), wanted, "{value:?}");
        }
    }
}
