//! `cargo xtask build-ptx`.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, bail};
use ferry_ptx_builder::{
    Digest, Package, Resources, Variant, assemble_file, build, build_all, build_own,
};

use crate::Places;

/// What to do with the digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nothing.
    Build,
    /// Compare it with the committed one.
    Check,
    /// Commit this one.
    Bless,
}

impl Mode {
    pub(crate) fn of(check: bool, bless: bool) -> Mode {
        match (check, bless) {
            (true, _) => Mode::Check,
            (_, true) => Mode::Bless,
            _ => Mode::Build,
        }
    }
}

/// Builds and assembles every package, prints the table, and checks or renews the digests.
pub(crate) fn run(places: &Places, arch: Option<Variant>, mode: Mode) -> Result<()> {
    let Places { root, target_dir } = places;
    let mut digests = Vec::new();
    for package in Package::ALL {
        let artifacts = match arch {
            Some(variant) => vec![build(root, target_dir, package, variant)?],
            None => build_all(root, target_dir, package)?,
        };
        digests.push((package, Digest::of(package, &artifacts, target_dir)?));
    }
    let kernels: Vec<_> = digests
        .iter()
        .flat_map(|(_, digest)| digest.kernels())
        .collect();
    print!("{}", table(&kernels));
    for (package, digest) in &digests {
        judge(places, *package, digest, mode)?;
    }
    Ok(())
}

/// Builds and assembles the crate of a manifest, prints the table and where its PTX lies, and fails
/// where a kernel takes too many registers. Local memory is warned of.
pub(crate) fn run_own(places: &Places, manifest: &Path, arch: Option<Variant>) -> Result<()> {
    let Places { root, target_dir } = places;
    let variants = arch.map_or(Variant::ALL.to_vec(), |variant| vec![variant]);
    let mut kernels = Vec::new();
    for variant in variants {
        let ptx = build_own(root, target_dir, manifest, variant)?;
        println!("{}", ptx.display());
        for (name, needs) in assemble_file(&ptx, variant, target_dir)? {
            kernels.push((variant, name, needs));
        }
    }
    let rows: Vec<_> = {
        let rows = kernels.iter();
        rows.map(|(variant, name, needs)| (*variant, name.as_str(), *needs))
            .collect()
    };
    print!("{}", table(&rows));
    let in_memory = rows.iter().find(|(_, _, needs)| needs.stack_bytes > 0);
    if let Some((variant, name, needs)) = in_memory {
        eprintln!(
            "warning: {variant}: {name} uses {} bytes of local memory, which takes time",
            needs.stack_bytes
        );
    }
    Ok(())
}

/// Checks or renews the digest of a package, which must break no rule.
fn judge(places: &Places, package: Package, digest: &Digest, mode: Mode) -> Result<()> {
    let (root, file) = (&places.root, package.digest_file());
    for violation in &digest.violations {
        eprintln!("{violation}");
    }
    if !digest.violations.is_empty() {
        bail!(
            "the kernels of {} break {} rules, listed above",
            package.name(),
            digest.violations.len()
        );
    }
    if mode == Mode::Bless {
        digest.bless(root)?;
        println!("{file} is written");
    }
    if mode == Mode::Check {
        if !root.join(file).is_file() {
            bail!("there is no {file}; write it with `cargo xtask build-ptx --bless`");
        }
        let difference = digest
            .compare_with_committed(root)
            .context("cannot compare")?;
        if !difference.is_empty() {
            bail!(
                "the kernels of {} differ from {file} (- committed, + built):\n{difference}\
                 If this is what you want: `cargo xtask build-ptx --bless`",
                package.name()
            );
        }
        println!("{file} holds");
    }
    Ok(())
}

fn table(kernels: &[(Variant, &str, Resources)]) -> String {
    let width = kernels
        .iter()
        .map(|(_, name, _)| name.len())
        .max()
        .unwrap_or(0)
        .max(6);
    let mut text = String::new();
    // A `String` takes every write.
    let _ = writeln!(
        text,
        "{:8} {:width$} {:>9} {:>6} {:>12} {:>7}",
        "variant", "kernel", "registers", "stack", "spills", "shared"
    );
    for (variant, name, needs) in kernels {
        let spills = format!("{} / {}", needs.spill_store_bytes, needs.spill_load_bytes);
        let _ = writeln!(
            text,
            "{variant:8} {name:width$} {:>9} {:>6} {spills:>12} {:>7}",
            needs.registers, needs.stack_bytes, needs.shared_bytes
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_line_for_each_kernel() {
        let needs = Resources {
            registers: 40,
            spill_load_bytes: 8,
            ..Resources::default()
        };
        let text = table(&[(Variant::Sm90a, "dispatch", needs)]);
        assert_eq!(text.lines().count(), 2);
        assert!(
            text.contains("sm_90a   dispatch        40      0        0 / 8       0"),
            "{text}"
        );
    }
}
