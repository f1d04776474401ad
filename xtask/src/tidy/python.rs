//! Imports of the Python package: without circles, down the order of its rooms, and of no private names.
//!
//! Python's own parser reads the modules, so these rules need `python3`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde::Deserialize;
use xshell::{Shell, cmd};

use super::imports::circles_of;
use super::rooms::{Imports, back_up, orders};
use super::source::{Complaint, SourceFile};

/// Folder of the package's folder.
const SOURCES: &str = "host/python/python/";
/// The program that reads modules.
const READER: &str = include_str!("modules.py");

/// Imports of a module, and its names that begin with an underscore.
#[derive(Deserialize)]
struct Module {
    /// Paths of files.
    imports: BTreeSet<String>,
    defines: BTreeSet<String>,
    /// Line and name of each use of an attribute of another object, or import.
    uses: Vec<(usize, String)>,
    /// The reason why it cannot be read.
    unread: Option<String>,
}

/// Complaints about the package's imports.
pub(super) fn check(files: &[SourceFile]) -> Vec<Complaint> {
    let modules: BTreeMap<_, _> = files
        .iter()
        .filter_map(|file| {
            let path = file.path.strip_prefix(SOURCES)?;
            (path.ends_with(".py") || path.ends_with(".pyi")).then_some((path, &file.text[..]))
        })
        .collect();
    if modules.is_empty() {
        return Vec::new();
    }
    match read(&modules) {
        Ok(modules) => complaints(files, &modules),
        Err(error) => vec![complaint(
            SOURCES,
            None,
            format!("cannot be read: {error:#}"),
        )],
    }
}

fn read(modules: &BTreeMap<&str, &str>) -> Result<BTreeMap<String, Module>> {
    let (shell, texts) = (Shell::new()?, serde_json::to_string(modules)?);
    let found = cmd!(shell, "python3 -I -c {READER}").stdin(texts).quiet();
    let found = found.read().context("python3 does not read modules")?;
    Ok(serde_json::from_str(&found)?)
}

fn complaints(files: &[SourceFile], modules: &BTreeMap<String, Module>) -> Vec<Complaint> {
    let at = |path: &str, line, text| complaint(&format!("{SOURCES}{path}"), line, text);
    let mut complaints = Vec::new();
    let imports: Imports = modules
        .iter()
        .map(|(path, module)| (path.clone(), module.imports.clone()))
        .collect();
    for (start, way) in circles_of(&imports) {
        complaints.push(at(&start, None, format!("import circle: {way}")));
    }
    for (path, module) in modules {
        if let Some(error) = &module.unread {
            complaints.push(at(path, None, format!("cannot be read: {error}")));
        }
        for (line, name) in &module.uses {
            let has_it = |other: &&String| modules[*other].defines.contains(name);
            let other = modules.keys().filter(|other| *other != path).find(has_it);
            if let (Some(other), false) = (other, module.defines.contains(name)) {
                let text = format!("`{name}` is private to {other}");
                complaints.push(at(path, Some(*line), text));
            }
        }
    }
    for (folder, order) in orders(files) {
        let Some(package) = folder.strip_prefix(SOURCES) else {
            continue;
        };
        complaints.extend(back_up(&folder, order, &within(&imports, package), |_| {
            true
        }));
    }
    complaints
}

/// Imports of a folder's files from each other, by their paths in the folder.
fn within(imports: &Imports, folder: &str) -> Imports {
    let below = |path: &String| path.strip_prefix(folder).map(ToOwned::to_owned);
    imports
        .iter()
        .filter_map(|(path, targets)| {
            Some((below(path)?, targets.iter().filter_map(below).collect()))
        })
        .collect()
}

fn complaint(path: &str, line: Option<usize>, text: String) -> Complaint {
    let path = path.into();
    Complaint { path, line, text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::rooms::ROOMS;

    fn found(order: &str, files: &[(&str, &str)]) -> Vec<String> {
        let source = |(path, text): &(&str, &str)| SourceFile {
            path: format!("{SOURCES}ferry/{path}"),
            text: (*text).into(),
        };
        let mut files: Vec<_> = files.iter().map(source).collect();
        files.push(SourceFile {
            path: ROOMS.into(),
            text: order.into(),
        });
        let complaints = check(&files).into_iter();
        let below = |text: String| text.replace(SOURCES, "");
        complaints.map(|each| below(each.to_string())).collect()
    }

    /// Orders of two folders.
    fn order(low: &str) -> String {
        let folder = "host/python/python/ferry";
        format!("{folder}: top __init__ low\n{folder}/low: {low}\n")
    }

    const FILES: [(&str, &str); 5] = [
        ("__init__.py", "from .low.a import One\n"),
        ("top.py", "from . import One\nimport ferry.low.b, os\n"),
        ("low/__init__.py", ""),
        (
            "low/a.py",
            "from . import b\nclass One:\n  def __init__(self):\n    self._x = b._other\n",
        ),
        ("low/b.pyi", "def f() -> None: ...\n"),
    ];

    #[test]
    fn imports_that_run_down_and_own_names_are_none_of_its_business() {
        assert_eq!(found(&order("__init__ a b"), &FILES), [""; 0]);
    }

    #[test]
    fn imports_that_run_back_up_are_found_in_functions_and_for_types() {
        let mut files = FILES;
        files[3].1 = "def f():\n  from ..top import g\n";
        files[4].1 = "if TYPE_CHECKING:\n  from .a import f\n";
        let wanted = [
            "ferry/__init__.py: import circle: ferry/__init__ -> ferry/low/a -> ferry/top -> ferry/__init__",
            "ferry/low/b.pyi: import circle: ferry/low/b -> ferry/low/a -> ferry/top -> ferry/low/b",
            "ferry/low/a.py: `low` imports from `top`, which is above it (top.py)",
            "ferry/low/b.pyi: `b` imports from `a`, which is above it (a.py)",
        ];
        assert_eq!(found(&order("__init__ a b"), &files), wanted);
    }

    #[test]
    fn private_names_of_other_modules_are_found() {
        let mut files = FILES;
        files[1].1 = "from .low.a import _f\ndef g(one):\n  return one._x, one._unknown\n";
        let wanted = [
            "ferry/top.py:1: `_f` is private to ferry/low/b.pyi",
            "ferry/top.py:3: `_x` is private to ferry/low/a.py",
        ];
        files[4].1 = "def _f() -> None: ...\n";
        assert_eq!(found(&order("__init__ a b"), &files), wanted);
    }

    #[test]
    fn rooms_without_a_place_and_modules_without_a_meaning_are_found() {
        let mut files = FILES;
        files[4].1 = "def";
        let found = found(&order("__init__ a"), &files);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].starts_with("ferry/low/b.pyi: cannot be read: "),
            "{found:?}"
        );
        let wanted = "xtask/rooms.txt: the order of ferry/low/ has no room `b`";
        assert_eq!(found[1], wanted);
    }
}
