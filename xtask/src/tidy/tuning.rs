//! Constants chosen by measurement name an entry of the tuning log.

use std::collections::BTreeSet;

use super::source::{Complaint, SourceFile};

/// The log.
const LOG: &str = "gpu/protocol/TUNING.md";
/// Text of a comment on a measured constant, before the entry and the GPU.
const MEASURED: &str = concat!("measured", ": ");
/// Text of a comment that names no entry.
const VAGUE: &str = concat!("by mea", "suring");

/// Complaints about comments of the kernels that claim a measurement without an existing entry and a GPU.
pub(super) fn check(files: &[SourceFile]) -> Vec<Complaint> {
    let log = files.iter().find(|file| file.path == LOG);
    let entries: BTreeSet<u32> = log
        .into_iter()
        .flat_map(entries)
        .map(|(_, entry)| entry)
        .collect();
    let sources = files
        .iter()
        .filter(|file| file.path.starts_with("gpu/") && file.is_rust());
    let lines =
        sources.flat_map(|file| file.text.lines().enumerate().map(move |line| (file, line)));
    let complaints = lines.filter_map(|(file, (index, line))| {
        let comment = line.split_once("//")?.1;
        let text = match comment.split_once(MEASURED) {
            Some((_, claim)) => match entry(claim) {
                Some((_, gpu)) if gpu.trim_matches([',', ' ']).is_empty() => {
                    "measured on which GPU?".into()
                }
                Some((entry, _)) if entries.contains(&entry) => return None,
                Some((entry, _)) => format!("{LOG} has no T-{entry:03}"),
                None => format!("say `{MEASURED}T-0NN, GPU`, with an entry of {LOG}"),
            },
            None if comment.contains(VAGUE) => {
                format!("measured, but names no entry of {LOG}")
            }
            None => return None,
        };
        Some(file.complaint_at(index + 1, text))
    });
    complaints.collect()
}

/// Complaints about the log: entries whose number is not one less than that of the entry above, or that the
/// log's index does not list.
pub(super) fn check_order(files: &[SourceFile]) -> Vec<Complaint> {
    let Some(log) = files.iter().find(|file| file.path == LOG) else {
        return Vec::new();
    };
    let entries = entries(log);
    let pairs = entries.iter().zip(entries.iter().skip(1));
    let falls = pairs.filter(|((_, first), (_, second))| *second + 1 != *first);
    let complaints = falls.map(|((_, first), (line, second))| {
        log.complaint_at(*line, format!("T-{second:03} follows T-{first:03}"))
    });
    let index = log
        .text
        .lines()
        .filter_map(|line| entry(line.strip_prefix("| ")?));
    let listed: BTreeSet<u32> = index.map(|(entry, _)| entry).collect();
    let missing = entries.iter().filter(|(_, entry)| !listed.contains(entry));
    let missing = missing.map(|(line, entry)| {
        log.complaint_at(*line, format!("the index has no line for T-{entry:03}"))
    });
    complaints.chain(missing).collect()
}

/// Lines and numbers of the log's entries.
fn entries(log: &SourceFile) -> Vec<(usize, u32)> {
    let headings = log.text.lines().enumerate();
    headings
        .filter_map(|(index, line)| Some((index + 1, entry(line.strip_prefix("### ")?)?.0)))
        .collect()
}

/// The number in `T-012, H200`, and the text after it.
fn entry(text: &str) -> Option<(u32, &str)> {
    let digits = text.strip_prefix("T-")?;
    let number = digits.get(..3)?.parse().ok()?;
    Some((number, &digits[3..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(source: &str, log: &str) -> [SourceFile; 2] {
        [("gpu/src/rows.rs", source), (LOG, log)].map(|(path, text)| SourceFile {
            path: path.into(),
            text: text.into(),
        })
    }

    #[test]
    fn a_claim_needs_an_entry_and_a_gpu() {
        let log = "# Tuning\n### T-002 Depth\n### T-001 Threads\n";
        let source = [
            "/// Depth.",
            "/// measu_red: T-002, H200",
            "/// measu_red: T-007, H200",
            "/// measu_red: T-001",
            "/// measu_red: often",
            "/// Threads: found by mea_suring.",
            "const NOT_A_COMMENT: &str = \"measu_red: never\";",
            "/// What that is worth was not measured.",
        ];
        let source = source
            .join("\n")
            .replace("measu_red", "measured")
            .replace("mea_suring", "measuring");
        let files = tree(&source, log);
        let found = check(&files);
        let lines: Vec<_> = found.iter().map(|complaint| complaint.line).collect();
        assert_eq!(lines, [3, 4, 5, 6].map(Some), "{found:#?}");
        assert!(found[0].text.contains("no T-007"), "{}", found[0]);
    }

    #[test]
    fn entries_are_in_order_and_in_the_index() {
        let index = "| T-001 | A |\n| T-003 | C |\n";
        let lines = |log: &str| -> Vec<_> {
            let found = check_order(&tree("", &format!("{index}{log}")));
            found.iter().map(|complaint| complaint.line).collect()
        };
        let log = "### T-003 C\n### T-001 A\n### T-001 A again\n";
        assert_eq!(lines(log), [4, 5].map(Some));
        assert_eq!(lines("### T-002 B\n### T-001 A\n"), [Some(3)]);
        assert_eq!(lines("### T-001 A\n"), []);
    }
}
