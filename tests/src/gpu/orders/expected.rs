//! Endings that cases must have.

use anyhow::{Context, Result, ensure};

use super::ending::Ending;

/// Ending that a case must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Right,
    Deadline,
    /// Any ending, as the driver makes it: it is only recorded.
    Any,
}

use Expected::{Any, Deadline, Right};

/// Kernels in streams with a queue each, those of the ranks included.
pub(in crate::gpu) const STREAMS_WITH_QUEUES: &str = "kernels wait in other streams, a queue each";
/// Kernels in streams that share queues.
pub(in crate::gpu) const STREAMS_BEYOND_QUEUES: &str =
    "kernels wait in other streams, more than there are queues";

/// Expected endings by case.
#[rustfmt::skip]
const EXPECTED: [(&str, Expected); 19] = [
    ("a module is loaded", Any),
    ("a kernel of a loaded module is launched for the first time", Any),
    ("device memory is allocated", Any),
    ("device memory is freed", Any),
    ("memory is allocated and freed in the order of a stream", Any),
    ("pinned memory is allocated and freed", Any),
    ("pageable memory is copied by Ferry's device", Right),
    ("pageable memory is copied in a stream", Right),
    ("pageable memory is copied in the default stream", Any),
    // It waits for the first rank's kernel, which waits for the others'.
    ("the context is synchronised", Deadline),
    ("another thread synchronises the context", Any),
    // The group has loaded them already.
    ("kernels of a shape are launched for the first time", Right),
    (STREAMS_WITH_QUEUES, Right),
    (STREAMS_BEYOND_QUEUES, Any),
    ("100 launches for one rank before the others'", Right),
    ("500 launches for one rank before the others'", Any),
    ("1000 launches for one rank before the others'", Any),
    ("one graph has the rounds of all ranks as branches", Any),
    ("a kernel with an early trigger between dispatch and combine", Right),
];

/// Returns an error if a round of this case ended otherwise than it must.
pub(in crate::gpu) fn require(name: &str, ending: &Ending) -> Result<()> {
    let found = EXPECTED.iter().find(|(of, _)| *of == name);
    let (_, expected) = found.with_context(|| format!("{name}: no expected ending is listed"))?;
    let is_expected = match expected {
        Right => matches!(ending, Ending::Right(_)),
        Deadline => matches!(ending, Ending::Deadline(_)),
        Any => true,
    };
    ensure!(is_expected, "expected {expected:?}, but {name}: {ending}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_case_that_ends_otherwise_than_it_must_is_an_error() {
        let endings = [
            Ending::Right(Duration::ZERO),
            Ending::Slow(Duration::ZERO),
            Ending::Deadline("nobody came".into()),
        ];
        let fits = |name: &str| endings.each_ref().map(|end| require(name, end).is_ok());
        assert_eq!(fits(STREAMS_WITH_QUEUES), [true, false, false]);
        assert_eq!(fits(STREAMS_BEYOND_QUEUES), [true; 3]);
        assert_eq!(fits("the context is synchronised"), [false, false, true]);
        assert_eq!(fits("a case that nobody knows"), [false; 3]);
    }
}
