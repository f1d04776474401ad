//! `cargo xtask build-ptx --compare`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use ferry_ptx_tools::Comparison;

/// Compares two files, or the files of two folders by name. The exit code is 1 if any differs.
pub(crate) fn run(before: &Path, after: &Path) -> Result<ExitCode> {
    let mut is_same = true;
    for [before, after] in pairs(before, after)? {
        let read = |path: &Path| {
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let comparison = Comparison::of(&read(&before)?, &read(&after)?);
        let comparison =
            comparison.with_context(|| format!("cannot compare {}", before.display()))?;
        println!("{} and {}\n{comparison}", before.display(), after.display());
        is_same &= comparison.is_same();
    }
    println!("{}", if is_same { "same" } else { "different" });
    Ok(if is_same {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn pairs(before: &Path, after: &Path) -> Result<Vec<[PathBuf; 2]>> {
    if before.is_file() && after.is_file() {
        return Ok(vec![[before.into(), after.into()]]);
    }
    let [of_before, of_after] = [ptx_files(before)?, ptx_files(after)?];
    if let Some(name) = of_before.symmetric_difference(&of_after).next() {
        bail!("{name} is in only one of the folders");
    }
    let pairs = of_before
        .iter()
        .map(|name| [before.join(name), after.join(name)]);
    Ok(pairs.collect())
}

/// Names of the PTX files in a folder, at least one.
fn ptx_files(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(folder)
        .with_context(|| format!("{} is neither a file nor a folder", folder.display()))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<Result<BTreeSet<String>>>()?;
    names.retain(|name| name.ends_with(".ptx"));
    ensure!(!names.is_empty(), "{} has no .ptx file", folder.display());
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_compared_file_by_file() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path();
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
    }
}
