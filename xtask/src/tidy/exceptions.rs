//! Files that may still break a rule. A line that is not needed any more is a complaint itself.

use std::collections::{BTreeMap, BTreeSet};

use super::Complaint;

/// Where the files are named that may still break a rule: the rule's name, a space, the path.
pub(super) const EXCEPTIONS: &str = "xtask/tidy-exceptions.txt";

/// A line for each rule and file that breaks it, sorted.
pub(super) fn of(broken: &BTreeMap<&str, Vec<Complaint>>) -> String {
    let lines = broken.iter().flat_map(|(rule, complaints)| {
        let lines = complaints.iter();
        lines.map(move |complaint| format!("{rule} {}\n", complaint.path))
    });
    lines.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Lines of [`EXCEPTIONS`] whose file does not break the rule, or that name neither.
pub(super) fn stale(exceptions: &str, broken: &BTreeMap<&str, Vec<Complaint>>) -> Vec<Complaint> {
    let still = of(broken);
    let still: BTreeSet<&str> = still.lines().collect();
    let lines = exceptions.lines().enumerate();
    lines
        .filter(|(_, line)| !still.contains(line))
        .map(|(index, line)| Complaint {
            path: EXCEPTIONS.into(),
            line: Some(index + 1),
            text: format!("`{line}` is not needed"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_name_each_rule_and_file_once() {
        let complaint = |path: &str, line| Complaint {
            path: path.into(),
            line,
            text: "wrong".into(),
        };
        let both = vec![complaint("b.rs", Some(1)), complaint("b.rs", Some(2))];
        let broken = BTreeMap::from([("x", both), ("a", vec![complaint("c.rs", None)])]);
        assert_eq!(of(&broken), "a c.rs\nx b.rs\n");
        assert_eq!(complaint("b.rs", Some(2)).to_string(), "b.rs:2: wrong");
        let found = stale("a c.rs\nx b.rs\n", &broken);
        assert_eq!(found, []);
        let found = stale("a b.rs\na c.rs\nx b.rs\n\n", &broken);
        let found: Vec<_> = found.iter().map(ToString::to_string).collect();
        let line = |number, text| format!("{EXCEPTIONS}:{number}: `{text}` is not needed");
        assert_eq!(found, [line(1, "a b.rs"), line(4, "")]);
    }
}
