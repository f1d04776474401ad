//! `cargo xtask tidy`: the habits that no compiler checks.
//!
//! Every check is a function from a file to its complaints. Patterns are put together from
//! pieces, so that this file does not complain of itself.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

/// A file of the tree.
struct SourceFile {
    /// Below the workspace, with `/`.
    path: String,
    text: String,
}

impl SourceFile {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn is_generated(&self) -> bool {
        self.path.contains("/generated/") || GENERATED_FILES.contains(&self.path.as_str())
    }

    /// A complaint for every line that has the pattern.
    fn lines_with(&self, pattern: &str, complaint: &str) -> Vec<String> {
        let lines = self.text.lines().enumerate();
        lines
            .filter(|(_, line)| line.contains(pattern))
            .map(|(index, _)| format!("{}:{}: {complaint}", self.path, index + 1))
            .collect()
    }
}

type Check = fn(&SourceFile) -> Vec<String>;

const CHECKS: [Check; 7] = [
    assembly_stays_in_ptx,
    files_are_short,
    nothing_is_unfinished,
    files_say_what_they_are,
    libraries_do_not_read_the_environment,
    top_level_is_known,
    no_path_of_a_machine,
];

const MOST_LINES: usize = 600;

/// Files that a program writes.
const GENERATED_FILES: [&str; 2] = ["Cargo.lock", "gpu/ptx-digest.txt"];

/// Code that other people's programs link.
const LIBRARIES: [&str; 4] = [
    "gpu/",
    "host/src/",
    "host/simulator/src/",
    "nvshmem-sys/src/",
];

const TOP_LEVEL: [&str; 17] = [
    ".cargo",
    ".ci",
    ".gitignore",
    "ARCHITECTURE.md",
    "BENCHMARKS.md",
    "CHANGELOG.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "gpu",
    "host",
    "nvshmem-sys",
    "rust-toolchain.toml",
    "tests",
    "xtask",
];

/// Checks every file that git knows or would add.
pub(crate) fn run(root: &Path) -> Result<()> {
    let shell = Shell::new()?;
    shell.change_dir(root);
    let listed = cmd!(shell, "git ls-files --cached --others --exclude-standard")
        .quiet()
        .read()?;
    let mut complaints = Vec::new();
    let mut count = 0;
    for path in listed.lines().filter(|path| root.join(path).is_file()) {
        let bytes = fs::read(root.join(path)).with_context(|| format!("cannot read {path}"))?;
        let file = SourceFile {
            path: path.into(),
            text: String::from_utf8_lossy(&bytes).into(),
        };
        complaints.extend(CHECKS.iter().flat_map(|check| check(&file)));
        count += 1;
    }
    for complaint in &complaints {
        eprintln!("{complaint}");
    }
    if !complaints.is_empty() {
        bail!("{} complaints in {count} files", complaints.len());
    }
    println!("{count} files are tidy");
    Ok(())
}

/// Instructions are named in one place.
fn assembly_stays_in_ptx(file: &SourceFile) -> Vec<String> {
    if !file.is_rust() || file.path.starts_with("gpu/src/ptx/") || file.path == "gpu/src/ptx.rs" {
        return Vec::new();
    }
    file.lines_with(concat!("as", "m!("), "inline assembly outside gpu/src/ptx")
}

fn files_are_short(file: &SourceFile) -> Vec<String> {
    let lines = file.text.lines().count();
    if lines <= MOST_LINES || file.is_generated() {
        return Vec::new();
    }
    vec![format!(
        "{}: {lines} lines, more than {MOST_LINES}",
        file.path
    )]
}

fn nothing_is_unfinished(file: &SourceFile) -> Vec<String> {
    [
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
        concat!("FIX", "ME"),
    ]
    .iter()
    .flat_map(|pattern| file.lines_with(pattern, "unfinished"))
    .collect()
}

fn files_say_what_they_are(file: &SourceFile) -> Vec<String> {
    if !file.is_rust() || file.text.starts_with("//! ") {
        return Vec::new();
    }
    vec![format!(
        "{}: does not begin with `//!` and what it is for",
        file.path
    )]
}

/// A library's behaviour is what its caller asked for, not what a shell exported.
fn libraries_do_not_read_the_environment(file: &SourceFile) -> Vec<String> {
    let in_library = LIBRARIES.iter().any(|folder| file.path.starts_with(folder));
    if !in_library || !file.is_rust() {
        return Vec::new();
    }
    [
        concat!("env:", ":var"),
        concat!("option_", "env!("),
        concat!("get", "env("),
    ]
    .iter()
    .flat_map(|pattern| file.lines_with(pattern, "a library reads the environment"))
    .collect()
}

fn top_level_is_known(file: &SourceFile) -> Vec<String> {
    let first = file.path.split('/').next().unwrap_or_default();
    if TOP_LEVEL.contains(&first) {
        return Vec::new();
    }
    vec![format!(
        "{}: nothing named `{first}` belongs at the top level",
        file.path
    )]
}

/// A path that starts at a person's folder holds on one machine only.
fn no_path_of_a_machine(file: &SourceFile) -> Vec<String> {
    let roots = [
        concat!("/ho", "me/"),
        concat!("/ro", "ot/"),
        concat!("/Us", "ers/"),
    ];
    let starts_path = |line: &str, start: usize| {
        let before = line[..start].chars().next_back();
        before.is_none_or(|character| !character.is_alphanumeric() && !"._-~}/".contains(character))
    };
    let lines = file.text.lines().enumerate();
    lines
        .filter(|(_, line)| {
            roots.iter().any(|root| {
                line.match_indices(root)
                    .any(|(at, _)| starts_path(line, at))
            })
        })
        .map(|(index, _)| format!("{}:{}: a path of one machine", file.path, index + 1))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(check: Check, path: &str, text: &str) -> usize {
        check(&SourceFile {
            path: path.into(),
            text: text.into(),
        })
        .len()
    }

    #[test]
    fn assembly_outside_its_place_is_found() {
        let text = concat!("core::arch::as", "m!(\"exit;\")");
        assert_eq!(
            complaints(assembly_stays_in_ptx, "gpu/src/device.rs", text),
            1
        );
        assert_eq!(
            complaints(assembly_stays_in_ptx, "gpu/src/ptx/memory.rs", text),
            0
        );
    }

    #[test]
    fn a_long_file_is_found_unless_it_is_generated() {
        let text = "line\n".repeat(MOST_LINES + 1);
        assert_eq!(complaints(files_are_short, "host/src/plan.rs", &text), 1);
        assert_eq!(
            complaints(files_are_short, "nvshmem-sys/src/generated/host.rs", &text),
            0
        );
        assert_eq!(
            complaints(files_are_short, "host/src/plan.rs", &text[5..]),
            0
        );
    }

    #[test]
    fn unfinished_code_is_found() {
        let text = concat!(
            "to",
            "do!()\n// FIX",
            "ME later\nunimple",
            "mented!()\ndone()"
        );
        assert_eq!(
            complaints(nothing_is_unfinished, "host/src/plan.rs", text),
            3
        );
    }

    #[test]
    fn a_file_without_docs_is_found() {
        assert_eq!(
            complaints(files_say_what_they_are, "host/src/plan.rs", "use core;\n"),
            1
        );
        assert_eq!(
            complaints(files_say_what_they_are, "host/src/plan.rs", "//! Plans.\n"),
            0
        );
        assert_eq!(
            complaints(files_say_what_they_are, "README.md", "# Ferry\n"),
            0
        );
    }

    #[test]
    fn a_library_that_reads_the_environment_is_found() {
        let text = concat!("let home = std::env:", ":var(\"HOME\");");
        let check = libraries_do_not_read_the_environment;
        assert_eq!(complaints(check, "host/src/group.rs", text), 1);
        assert_eq!(complaints(check, "gpu/layout/src/lib.rs", text), 1);
        assert_eq!(complaints(check, "xtask/src/main.rs", text), 0);
        assert_eq!(complaints(check, "host/build.rs", text), 0);
    }

    #[test]
    fn an_unknown_name_at_the_top_is_found() {
        assert_eq!(complaints(top_level_is_known, "scripts/run.sh", ""), 1);
        assert_eq!(complaints(top_level_is_known, "NOTES.txt", ""), 1);
        assert_eq!(complaints(top_level_is_known, "gpu/src/lib.rs", ""), 0);
    }

    #[test]
    fn a_path_of_a_machine_is_found() {
        let text = concat!(
            "cd \"/ho",
            "me/me\"\nlog=/ro",
            "ot/log\nhttps://a.b/ho",
            "me/page\n"
        );
        assert_eq!(complaints(no_path_of_a_machine, "README.md", text), 2);
    }
}
