//! Hardware queues, of which a process has too few for many ranks.
//!
//! The driver gives streams with work a queue each as long as there are any; beyond that, streams share one
//! and wait for each other's kernels, whatever the multiprocessors could hold, so that a rank's kernel may
//! stand behind one that waits for it. (Seen on an H200 with driver 580: of 40 streams none held up another
//! while two had work; with 32 queues, 4 ranks and 28 other streams that waited went on, 4 ranks and 32 did
//! not.)

use std::ffi::OsStr;

use crate::error::notice::Notice;

/// What tells the driver how many queues to make, read as it is initialized.
pub(crate) const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Most that there can be.
const MOST: u32 = 32;
/// Those of a process that does not say.
const UNSET: u32 = 8;

/// Warns where `ranks` of this process share a GPU, and it has fewer queues than it can have. The driver
/// cannot be asked how many it has made. So the variable is read, for the warning alone: nothing else
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

/// Queues that the driver makes of the variable's value.
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
