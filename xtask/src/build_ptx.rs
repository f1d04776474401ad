//! `cargo xtask build-ptx`.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use ferry_ptx_builder::{DIGEST_FILE, Digest, Resources, Variant, build, build_all};

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

/// Builds, assembles, prints the table, and checks or renews the digest.
pub(crate) fn run(places: &Places, arch: Option<Variant>, mode: Mode) -> Result<()> {
    let Places { root, target_dir } = places;
    let artifacts = match arch {
        Some(variant) => vec![build(root, target_dir, variant)?],
        None => build_all(root, target_dir)?,
    };
    let digest = Digest::of(&artifacts, target_dir)?;
    let kernels: Vec<_> = digest.kernels().collect();
    print!("{}", table(&kernels));
    if mode == Mode::Bless {
        digest.bless(root)?;
        println!("{DIGEST_FILE} is written");
    }
    for violation in &digest.violations {
        eprintln!("{violation}");
    }
    if !digest.violations.is_empty() {
        bail!(
            "the kernels break {} rules, listed above",
            digest.violations.len()
        );
    }
    if mode == Mode::Check {
        if !root.join(DIGEST_FILE).is_file() {
            bail!("there is no {DIGEST_FILE}; write it with `cargo xtask build-ptx --bless`");
        }
        let difference = digest
            .compare_with_committed(root)
            .context("cannot compare")?;
        if !difference.is_empty() {
            bail!(
                "the kernels differ from {DIGEST_FILE} (- committed, + built):\n{difference}\
                 If this is what you want: `cargo xtask build-ptx --bless`"
            );
        }
        println!("{DIGEST_FILE} holds");
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
