//! End of a round.

use std::fmt;
use std::time::Duration;

/// A round that takes longer than that, and many times as long as another, is slow.
const SLOW: Duration = Duration::from_millis(100);
const MANY_TIMES: u32 = 20;

/// End of a round whose kernels something could have kept from each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// Right, as others end, in that time.
    Right(Duration),
    /// Right results, after that time.
    Slow(Duration),
    /// Ranks gave up, with that text.
    Deadline(String),
}

impl Ending {
    /// End of a round with the right results; `usual` is another's time.
    pub(super) fn of(took: Duration, usual: Duration) -> Self {
        if took > SLOW + MANY_TIMES * usual {
            Self::Slow(took)
        } else {
            Self::Right(took)
        }
    }

    /// A word.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Right(_) => "right",
            Self::Slow(_) => "slow",
            Self::Deadline(_) => "deadline",
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        match self {
            Self::Right(took) | Self::Slow(took) => {
                write!(f, "{name}, in {:.1} ms", 1e3 * took.as_secs_f64())
            }
            Self::Deadline(told) => write!(f, "{name}: {told}"),
        }
    }
}

/// Ends of rounds with numbers of something: which numbers had the same end, in one line.
pub(super) fn by_number(endings: &[(usize, Ending)]) -> String {
    let same = |a: &(usize, Ending), b: &(usize, Ending)| a.1.name() == b.1.name();
    let spans = endings.chunk_by(same).map(|span| {
        let numbers = match span {
            [(only, _)] => only.to_string(),
            [(first, _), .., (last, _)] => format!("{first} to {last}"),
            [] => String::new(),
        };
        let (_, ending) = &span[span.len() - 1];
        format!("{numbers}: {ending}")
    });
    spans.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_round_is_slow_if_it_takes_long_and_many_times_as_long_as_others() {
        assert_eq!(Ending::of(99 * MS, MS / 10), Ending::Right(99 * MS));
        assert_eq!(Ending::of(103 * MS, MS / 10), Ending::Slow(103 * MS));
        // Ranks that take turns on a GPU are slow every time.
        assert_eq!(Ending::of(103 * MS, MS), Ending::Right(103 * MS));
        assert_eq!(Ending::Slow(103 * MS).to_string(), "slow, in 103.0 ms");
    }

    #[test]
    fn numbers_with_the_same_end_are_one() {
        let endings = [
            (8, Ending::Right(MS)),
            (16, Ending::Right(2 * MS)),
            (32, Ending::Deadline("nobody came".into())),
        ];
        let text = "8 to 16: right, in 2.0 ms; 32: deadline: nobody came";
        assert_eq!(by_number(&endings), text);
        assert_eq!(by_number(&[]), "");
    }
}
