//! Numbers of complaints that each crate may still have, by rule. They only fall: a number that is too large
//! is a complaint itself.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::source::{Complaint, SourceFile};

/// The file with a line for each rule and crate that breaks it: the rule, the crate's folder, the number.
pub(super) const ALLOWANCES: &str = "xtask/tidy-allowances.txt";

/// Numbers of complaints, by rule and crate.
pub(super) type Counts = BTreeMap<(String, String), usize>;

/// Reads the lines of [`ALLOWANCES`].
pub(super) fn read(text: &str) -> Result<Counts> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let counts = lines.map(|line| {
        let mut words = line.split(' ');
        let (rule, place, count) = (words.next(), words.next(), words.next());
        let count = count.and_then(|count| count.parse().ok());
        match (rule, place, count, words.next()) {
            (Some(rule), Some(place), Some(count), None) => {
                Ok(((rule.into(), place.into()), count))
            }
            _ => Err(anyhow::anyhow!(
                "`{line}` is not a rule, a folder and a number"
            )),
        }
    });
    counts.collect::<Result<_>>().context(ALLOWANCES)
}

/// The lines of [`ALLOWANCES`] for these numbers.
pub(super) fn write(counts: &Counts) -> String {
    let lines = counts
        .iter()
        .map(|((rule, place), count)| format!("{rule} {place} {count}\n"));
    lines.collect()
}

/// Folders of the crates, nested ones first.
pub(super) fn crates(files: &[SourceFile]) -> Vec<String> {
    let manifests = files
        .iter()
        .filter_map(|file| file.path.strip_suffix("/Cargo.toml"));
    let mut folders: Vec<String> = manifests.map(ToOwned::to_owned).collect();
    folders.sort_by(|a, b| b.cmp(a));
    folders
}

/// The crate that a file belongs to; outside of crates, the file itself.
pub(super) fn place_of<'a>(path: &'a str, crates: &'a [String]) -> &'a str {
    let has = |folder: &&String| {
        path.strip_prefix(folder.as_str())
            .is_some_and(|rest| rest.starts_with('/'))
    };
    crates.iter().find(has).map_or(path, |folder| folder)
}

/// Counts the complaints of each rule and crate.
pub(super) fn count(broken: &BTreeMap<&str, Vec<Complaint>>, crates: &[String]) -> Counts {
    let mut counts = Counts::new();
    for (rule, complaints) in broken {
        for complaint in complaints {
            let place = place_of(&complaint.path, crates);
            *counts.entry(((*rule).into(), place.into())).or_default() += 1;
        }
    }
    counts
}

/// Complaints about allowances that are too large.
pub(super) fn too_large(allowed: &Counts, found: &Counts) -> Vec<Complaint> {
    let lines = allowed.iter().filter_map(|(key, &most)| {
        let left = found.get(key).copied().unwrap_or(0);
        let (rule, place) = key;
        (left < most).then(|| Complaint {
            path: ALLOWANCES.into(),
            line: None,
            text: format!("`{rule} {place} {most}`: {left} are left, lower the number"),
        })
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaint(path: &str) -> Complaint {
        Complaint {
            path: path.into(),
            line: Some(3),
            text: "wrong".into(),
        }
    }

    #[test]
    fn complaints_count_for_the_innermost_crate() {
        let file = |path: &str| SourceFile {
            path: path.into(),
            text: String::new(),
        };
        let crates = crates(&["host/Cargo.toml", "host/c/Cargo.toml", "host/src/lib.rs"].map(file));
        let both = vec![complaint("host/c/src/a.rs"), complaint("host/c/build.rs")];
        let broken = BTreeMap::from([
            ("x", both),
            ("a", vec![complaint("host/cc.rs"), complaint("README.md")]),
        ]);
        let counts = count(&broken, &crates);
        assert_eq!(write(&counts), "a README.md 1\na host 1\nx host/c 2\n");
        assert_eq!(read(&write(&counts)).unwrap(), counts);
    }

    #[test]
    fn an_allowance_that_is_too_large_is_found() {
        let allowed = read("# rule, folder, number\na host 1\nx host/c 2\n").unwrap();
        let found = read("a host 1\nx host/c 1\n").unwrap();
        let complaints = too_large(&allowed, &found);
        assert_eq!(complaints.len(), 1);
        assert_eq!(
            complaints[0].text,
            "`x host/c 2`: 1 are left, lower the number"
        );
        assert_eq!(too_large(&allowed, &allowed), []);
    }

    #[test]
    fn lines_that_are_no_allowance_are_refused() {
        for line in ["a host", "a host many", "a host 1 2", ""] {
            assert!(read(&format!("{line}\n")).is_err(), "{line}");
        }
    }
}
