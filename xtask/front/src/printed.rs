//! Reads what a program of tests prints.

/// Outcomes of a program's tests, read from its standard output.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Tests that passed, failed, and were left out.
    pub(crate) counts: [u64; 3],
    /// Tests that failed.
    pub(crate) failures: Vec<Failure>,
    /// Tests whose outcome was printed.
    pub(crate) ended: u64,
    /// Whether the program said how all of its tests ended.
    pub(crate) is_whole: bool,
    /// Whether lines belong to the last failure.
    in_failure: bool,
}

/// A test that failed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) test: String,
    /// Lines that it printed.
    pub(crate) output: Vec<String>,
}

impl Report {
    /// Reads the next line.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some((_, counts)) = line.split_once("test result: ") {
            self.add_counts(counts);
            (self.is_whole, self.in_failure) = (true, false);
        } else if line.starts_with("test ") && line.contains(" ... ") {
            self.ended += 1;
        } else if let Some(test) = failed(line) {
            self.in_failure = true;
            self.failures.push(Failure {
                test: test.to_owned(),
                output: Vec::new(),
            });
        } else if line == "failures:" {
            // Their output comes after this line, and their names after a second one.
            self.in_failure = false;
        } else if let (true, Some(failure)) = (self.in_failure, self.failures.last_mut()) {
            failure.output.push(line.to_owned());
        }
    }

    /// Adds the counts of a `test result:` line. Cargo prints one for each crate with doctests.
    fn add_counts(&mut self, counts: &str) {
        for part in counts.split([';', '.']) {
            let mut words = part.split_whitespace();
            let count = words.next().and_then(|word| word.parse::<u64>().ok());
            let place = words.next().and_then(|kind| {
                let kinds = ["passed", "failed", "ignored"];
                kinds.iter().position(|&known| known == kind)
            });
            if let (Some(count), Some(place)) = (count, place) {
                self.counts[place] += count;
            }
        }
    }
}

/// The test whose output begins here: `---- NAME stdout ----`, and without a kind for doctests that do not
/// compile.
fn failed(line: &str) -> Option<&str> {
    let name = line.strip_prefix("---- ")?.strip_suffix(" ----")?;
    Some(name.strip_suffix(" stdout").unwrap_or(name))
}

/// Seed that a failed test says it had: `seed = 17` or `FERRY_SEED=17`.
pub(crate) fn seed(output: &[String]) -> Option<&str> {
    let found = output
        .iter()
        .find_map(|line| line.split_once("FERRY_SEED="));
    found.map(|(_, after)| {
        after
            .split(|letter: char| !letter.is_ascii_digit())
            .next()
            .unwrap_or(after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "
running 3 tests
test a::right ... ok
test a::wrong ... FAILED
test a::left_out ... ignored

failures:

---- a::wrong stdout ----
thread 'a::wrong' panicked at src/lib.rs:1:1:
sums differ
one seed again: FERRY_SEED=2003

failures:
    a::wrong

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s";

    #[test]
    fn outcomes_and_the_output_of_failures_are_read() {
        let mut report = Report::default();
        PRINTED.lines().for_each(|line| report.line(line));
        assert_eq!((report.counts, report.ended), ([1, 1, 1], 3));
        let [failure] = &report.failures[..] else {
            panic!("{report:?}")
        };
        assert_eq!(failure.test, "a::wrong");
        assert_eq!(failure.output[1], "sums differ");
        assert_eq!(seed(&failure.output), Some("2003"));
        assert!(report.is_whole);
    }

    #[test]
    fn a_program_that_died_said_no_result() {
        let mut report = Report::default();
        let before = PRINTED.lines().take(3);
        before.for_each(|line| report.line(line));
        assert!(!report.is_whole && report.ended == 1);
    }

    #[test]
    fn result_lines_are_added_up() {
        let mut report = Report::default();
        report.line("test result: ok. 5 passed; 0 failed; 2 ignored; 0 measured; 1 filtered out");
        report.line("test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured");
        report.line("running 7 tests");
        assert_eq!(report.counts, [8, 1, 2]);
    }
}
