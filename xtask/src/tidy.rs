//! `cargo xtask tidy`: rules that no compiler checks.
//!
//! Every rule is a function from a file, or from all files, to its complaints, under the name that is shown
//! after each of them. Patterns are concatenated from pieces, so that this file does not match them.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

use crate::report;

mod heads;
mod imports;
mod python;
mod rooms;
mod source;
mod tuning;

use source::{Complaint, SourceFile};

/// A check of a file, and of all files together.
type OfFile = fn(&SourceFile) -> Vec<Complaint>;
type OfTree = fn(&[SourceFile]) -> Vec<Complaint>;

/// Rules about each file.
const OF_FILES: [(&str, OfFile); 8] = [
    ("assembly-stays-in-ptx", assembly_stays_in_ptx),
    ("files-are-short", files_are_short),
    ("lines-are-short", lines_are_short),
    ("nothing-is-unfinished", nothing_is_unfinished),
    ("files-say-what-they-are", files_say_what_they_are),
    ("no-environment", libraries_do_not_read_the_environment),
    ("no-path-of-a-machine", no_path_of_a_machine),
    ("doc-comments-have-a-head", heads::check),
];

/// Rules about all files together.
const OF_TREES: [(&str, OfTree); 5] = [
    ("no-import-circles", imports::check),
    ("imports-run-down", rooms::check),
    ("python-imports-run-down", python::check),
    ("measured-has-an-entry", tuning::check),
    ("log-is-in-order", tuning::check_order),
];

/// The rule about the generated page, checked separately: it reads records and the template.
const GENERATED_PAGE: &str = "benchmarks-are-generated";

const PROTOCOL: &str = "gpu/protocol/src/";

const MOST_LINES: usize = 500;
/// The same for the protocol's files.
const MOST_PROTOCOL_LINES: usize = 320;
const MOST_COLUMNS: usize = 110;

/// Logs, which may be of any length.
const LOGS: [&str; 2] = ["CHANGELOG.md", "gpu/protocol/TUNING.md"];

/// Code that other people's programs link.
const LIBRARIES: [&str; 7] = [
    "gpu/",
    "host/c/src/",
    "host/src/",
    "host/ptx/src/",
    "host/python/src/",
    "host/simulator/src/",
    "nvshmem-sys/src/",
];

/// The exceptions, of one line each: variables that the driver and NVSHMEM read, and do not tell of.
const READ_VARIABLES: [&str; 2] = [
    "host/src/device/sharing/queues.rs",
    "host/src/group/channel.rs",
];

/// Checks every file that git tracks or would add.
pub(crate) fn run(root: &Path) -> Result<()> {
    let files = files(root)?;
    let mut count = 0;
    let mut show = |complaint: &Complaint, rule: &str| {
        eprintln!("{complaint} [{rule}]");
        count += 1;
    };
    for (name, check) in OF_FILES {
        let complaints = files.iter().flat_map(check);
        complaints.for_each(|complaint| show(&complaint, name));
    }
    for (name, check) in OF_TREES {
        check(&files)
            .iter()
            .for_each(|complaint| show(complaint, name));
    }
    if let Some(text) = report::complaint(root) {
        let complaint = Complaint {
            path: report::PAGE.into(),
            line: None,
            text,
        };
        show(&complaint, GENERATED_PAGE);
    }
    if count > 0 {
        bail!("{count} complaints in {} files", files.len());
    }
    println!("{} files are tidy", files.len());
    Ok(())
}

fn files(root: &Path) -> Result<Vec<SourceFile>> {
    let shell = Shell::new()?;
    shell.change_dir(root);
    let listed = cmd!(shell, "git ls-files --cached --others --exclude-standard")
        .quiet()
        .read()?;
    let paths = listed.lines().filter(|path| root.join(path).is_file());
    let files = paths.map(|path| {
        let bytes = fs::read(root.join(path)).with_context(|| format!("cannot read {path}"))?;
        Ok(SourceFile {
            path: path.into(),
            text: String::from_utf8_lossy(&bytes).into(),
        })
    });
    files.collect()
}

/// Assembly is in one folder.
fn assembly_stays_in_ptx(file: &SourceFile) -> Vec<Complaint> {
    if !file.is_rust() || file.path.starts_with("gpu/src/ptx/") || file.path == "gpu/src/ptx.rs" {
        return Vec::new();
    }
    file.lines_with(concat!("as", "m!("), "inline assembly outside gpu/src/ptx")
}

fn files_are_short(file: &SourceFile) -> Vec<Complaint> {
    let lines = file.text.lines().count();
    let most = if file.path.starts_with(PROTOCOL) {
        MOST_PROTOCOL_LINES
    } else {
        MOST_LINES
    };
    if lines <= most || file.is_generated() || LOGS.contains(&file.path.as_str()) {
        return Vec::new();
    }
    vec![file.complaint(format!("{lines} lines, more than {most}"))]
}

fn lines_are_short(file: &SourceFile) -> Vec<Complaint> {
    if !file.is_rust() || file.is_generated() {
        return Vec::new();
    }
    let lines = file
        .text
        .lines()
        .map(|line| line.chars().count())
        .enumerate();
    lines
        .filter(|(_, columns)| *columns > MOST_COLUMNS)
        .map(|(index, columns)| {
            let text = format!("{columns} columns, more than {MOST_COLUMNS}");
            file.complaint_at(index + 1, text)
        })
        .collect()
}

fn nothing_is_unfinished(file: &SourceFile) -> Vec<Complaint> {
    [
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
        concat!("FIX", "ME"),
    ]
    .iter()
    .flat_map(|pattern| file.lines_with(pattern, "unfinished"))
    .collect()
}

fn files_say_what_they_are(file: &SourceFile) -> Vec<Complaint> {
    if !file.is_rust() || file.text.starts_with("//! ") {
        return Vec::new();
    }
    vec![file.complaint("does not begin with `//!` and its purpose")]
}

/// A library's behaviour depends on its caller, not on variables.
fn libraries_do_not_read_the_environment(file: &SourceFile) -> Vec<Complaint> {
    let in_library = LIBRARIES.iter().any(|folder| file.path.starts_with(folder));
    // Cargo tells build scripts everything by variables.
    if !in_library || !file.is_rust() || file.path.ends_with("/build.rs") {
        return Vec::new();
    }
    [
        concat!("env:", ":var"),
        concat!("option_", "env!("),
        concat!("get", "env("),
    ]
    .iter()
    .flat_map(|pattern| file.lines_with(pattern, "a library reads the environment"))
    .skip(usize::from(READ_VARIABLES.contains(&file.path.as_str())))
    .collect()
}

/// A path that begins with a person's folder is right on one machine only.
fn no_path_of_a_machine(file: &SourceFile) -> Vec<Complaint> {
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
        .map(|(index, _)| file.complaint_at(index + 1, "a path of one machine"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(check: fn(&SourceFile) -> Vec<Complaint>, path: &str, text: &str) -> usize {
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
    fn a_file_of_the_protocol_is_shorter_and_a_log_may_grow() {
        let text = "line\n".repeat(MOST_PROTOCOL_LINES + 1);
        let path = "gpu/protocol/src/sync/wait.rs";
        assert_eq!(complaints(files_are_short, path, &text), 1);
        assert_eq!(complaints(files_are_short, path, &text[5..]), 0);
        assert_eq!(complaints(files_are_short, "gpu/src/encode.rs", &text), 0);
        let log = "line\n".repeat(2 * MOST_LINES);
        assert_eq!(complaints(files_are_short, "CHANGELOG.md", &log), 0);
    }

    #[test]
    fn a_long_line_is_found_in_rust() {
        let columns = "é".repeat(MOST_COLUMNS);
        assert_eq!(complaints(lines_are_short, "host/src/plan.rs", &columns), 0);
        let longer = format!("//! Plans.\n{columns}e\n");
        assert_eq!(complaints(lines_are_short, "host/src/plan.rs", &longer), 1);
        assert_eq!(complaints(lines_are_short, "README.md", &longer), 0);
        let generated = "nvshmem-sys/src/generated/host.rs";
        assert_eq!(complaints(lines_are_short, generated, &longer), 0);
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
        assert_eq!(complaints(check, READ_VARIABLES[0], text), 0);
        let twice = format!("{text}\n{text}");
        assert_eq!(complaints(check, READ_VARIABLES[0], &twice), 1);
        assert_eq!(complaints(check, "gpu/layout/src/lib.rs", text), 1);
        assert_eq!(complaints(check, "host/ptx/src/lib.rs", text), 1);
        assert_eq!(complaints(check, "xtask/src/main.rs", text), 0);
        assert_eq!(complaints(check, "host/build.rs", text), 0);
        assert_eq!(complaints(check, "gpu/build.rs", text), 0);
    }

    #[test]
    fn a_path_of_a_machine_is_found() {
        let text = "cd \"/ho~me/me\"\nlog=/ro~ot/log\nhttps://a.b/ho~me/page\n".replace('~', "");
        assert_eq!(complaints(no_path_of_a_machine, "README.md", &text), 2);
    }
}
