//! Reads what a program of tests prints.

/// Outcomes of a program's tests, read from its standard output. Tests may print the words of other programs
/// of tests, so that the last words count.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Tests that passed, failed, and were left out.
    pub(crate) counts: [u64; 3],
    /// Names of tests that failed, as their outcomes say.
    failed: Vec<String>,
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
        let test = failed(line).filter(|test| self.failed.iter().any(|failed| failed == test));
        if let Some(test) = test {
            self.in_failure = true;
            self.failures.push(Failure {
                test: test.to_owned(),
                output: Vec::new(),
            });
        } else if let Some(counts) = line.strip_prefix("test result: ") {
            (self.is_whole, self.counts) = (true, counts_of(counts));
            self.keep(line);
        } else if let Some((test, outcome)) = outcome(line).filter(|_| !self.in_failure) {
            self.ended += 1;
            if outcome.starts_with("FAILED") {
                self.failed.push(test.to_owned());
            }
        } else {
            self.keep(line);
        }
    }

    fn keep(&mut self, line: &str) {
        if let (true, Some(failure)) = (self.in_failure, self.failures.last_mut()) {
            failure.output.push(line.to_owned());
        }
    }

    /// Ends the report: what follows the output of the last failure, the list of all their names, is no part
    /// of it.
    pub(crate) fn end(&mut self) {
        if let Some(Failure { output, .. }) = self.failures.last_mut() {
            let names = output.iter().rposition(|line| line == "failures:");
            output.truncate(names.unwrap_or(output.len()));
        }
        for Failure { output, .. } in &mut self.failures {
            while output.last().is_some_and(|line| line.is_empty()) {
                output.pop();
            }
        }
    }

    /// Adds another program's report.
    pub(crate) fn add(&mut self, other: Report) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        self.failures.extend(other.failures);
        self.is_whole |= other.is_whole;
    }
}

/// A test and its outcome, of the line `test NAME ... OUTCOME`.
fn outcome(line: &str) -> Option<(&str, &str)> {
    let (test, outcome) = line.strip_prefix("test ")?.split_once(" ... ")?;
    Some((test.trim_end_matches(" - should panic"), outcome))
}

/// The counts of a `test result:` line.
fn counts_of(text: &str) -> [u64; 3] {
    let mut counts = [0; 3];
    for part in text.split([';', '.']) {
        let mut words = part.split_whitespace();
        let count = words.next().and_then(|word| word.parse::<u64>().ok());
        let place = words.next().and_then(|kind| {
            let kinds = ["passed", "failed", "ignored"];
            kinds.iter().position(|&known| known == kind)
        });
        if let (Some(count), Some(place)) = (count, place) {
            counts[place] += count;
        }
    }
    counts
}

/// The test whose output begins here: `---- NAME stdout ----`, and without a kind for doctests that do not
/// compile.
fn failed(line: &str) -> Option<&str> {
    let name = line.strip_prefix("---- ")?.strip_suffix(" ----")?;
    Some(name.strip_suffix(" stdout").unwrap_or(name))
}

/// Seed that a failed test says it had: `FERRY_SEED=17`.
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
        report.end();
        assert_eq!((report.counts, report.ended), ([1, 1, 1], 3));
        let [failure] = &report.failures[..] else {
            panic!("{report:?}")
        };
        assert_eq!(failure.test, "a::wrong");
        assert_eq!(failure.output[1], "sums differ");
        assert_eq!(failure.output.len(), 3, "{failure:?}");
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
    fn words_of_another_program_of_tests_in_a_failure_are_its_output() {
        let inner = "---- b::other stdout ----\nfailures:\n    b::other\n\
                     test result: ok. 9 passed; 0 failed;";
        let printed = PRINTED.replace("sums differ", inner);
        let mut report = Report::default();
        printed.lines().for_each(|line| report.line(line));
        report.end();
        assert_eq!(report.counts, [1, 1, 1]);
        assert_eq!(report.failures.len(), 1);
        assert_eq!(report.failures[0].output.len(), 6, "{report:?}");
        assert_eq!(seed(&report.failures[0].output), Some("2003"));
        let mut report = Report::default();
        report.line("it said test result: ok. 1 passed; 0 failed");
        assert!(!report.is_whole);
    }

    #[test]
    fn reports_are_added_up() {
        let of = |line| {
            let mut report = Report::default();
            report.line(line);
            report
        };
        let mut report =
            of("test result: ok. 5 passed; 0 failed; 2 ignored; 0 measured; 1 filtered out");
        report.add(of(
            "test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured",
        ));
        report.add(of("running 7 tests"));
        assert_eq!(report.counts, [8, 1, 2]);
    }
}
