//! `cargo xtask build-ptx --compare`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use ferry_ptx_tools::Comparison;

/// Compares two files, or the files of two folders by name. The exit code is 1 if any differs.
pub(crate) fn run(before: &Path, after: &Path) -> Result<ExitCode> {
    let mut is_same = true;
    for (name, before, after) in pairs(before, after)? {
        let [Some(before), Some(after)] = [before, after] else {
            bail!("{name} is in only one of the folders");
        };
        let [a, b] = [read(&before)?, read(&after)?];
        let comparison =
            Comparison::of(&a, &b).with_context(|| format!("cannot compare {name}"))?;
        println!("{name}: {} and {}", before.display(), after.display());
        println!("{comparison}");
        is_same &= comparison.is_same();
    }
    println!("{}", if is_same { "same" } else { "different" });
    Ok(if is_same {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

type Pair = (String, Option<PathBuf>, Option<PathBuf>);

fn pairs(before: &Path, after: &Path) -> Result<Vec<Pair>> {
    if before.is_file() && after.is_file() {
        let name = before.file_name().unwrap_or_default().to_string_lossy();
        return Ok(vec![(name.into(), Some(before.into()), Some(after.into()))]);
    }
    let [in_before, in_after] = [ptx_files(before)?, ptx_files(after)?];
    let names: BTreeSet<_> = in_before.union(&in_after).collect();
    let path = |folder: &Path, has: &BTreeSet<String>, name: &String| {
        has.contains(name).then(|| folder.join(name))
    };
    let pairs = names.into_iter().map(|name| {
        let [b, a] = [path(before, &in_before, name), path(after, &in_after, name)];
        (name.clone(), b, a)
    });
    Ok(pairs.collect())
}

/// Names of the PTX files in a folder, at least one.
fn ptx_files(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(folder)
        .with_context(|| format!("{} is neither a file nor a folder", folder.display()))?;
    let mut names = BTreeSet::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".ptx") {
            names.insert(name);
        }
    }
    if names.is_empty() {
        bail!("{} has no .ptx file", folder.display());
    }
    Ok(names)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_compared_file_by_file() {
        let root = std::env::temp_dir().join(format!("ferry-compare-{}", std::process::id()));
        let [a, b] = ["a", "b"].map(|name| root.join(name));
        let ptx = ".version 8.3\n.visible .entry k()\n{\n\tret;\n}\n";
        for folder in [&a, &b] {
            fs::create_dir_all(folder).unwrap();
            fs::write(folder.join("sm_80.ptx"), ptx).unwrap();
        }
        assert_eq!(run(&a, &b).unwrap(), ExitCode::SUCCESS);
        fs::write(b.join("sm_80.ptx"), ptx.replace("ret", "trap")).unwrap();
        assert_eq!(run(&a, &b).unwrap(), ExitCode::FAILURE);
        assert_eq!(
            run(&a.join("sm_80.ptx"), &b.join("sm_80.ptx")).unwrap(),
            ExitCode::FAILURE
        );
        fs::write(b.join("sm_90a.ptx"), ptx).unwrap();
        let error = run(&a, &b).unwrap_err().to_string();
        assert_eq!(error, "sm_90a.ptx is in only one of the folders");
        fs::remove_dir_all(root).unwrap();
    }
}
