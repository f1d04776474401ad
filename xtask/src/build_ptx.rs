//! `cargo xtask build-ptx`.

use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail};
use ferry_build::{Artifact, Package, Variant, all_variants, build_each};
use ferry_ptx_tools::{
    CodeGenerator, DIGESTED, Digest, NvvmBuild, Resources, TESTED_COMMIT, assemble, build_own,
    stale_variants,
};

use crate::places::Places;

/// Compiler of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Backend {
    /// The stock compiler
    Stock,
    /// rustc_codegen_nvvm of a checkout of rust-cuda
    Nvvm,
}

/// Use of the committed digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nothing.
    Build,
    /// Compare it with this build's.
    Check,
    /// Replace it by this build's.
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
    let digests = digests(places, arch)?;
    judge_all(places, CodeGenerator::Stock, &digests, mode, print_line)?;
    if mode != Mode::Build {
        stale_digests(&places.root)?
            .iter()
            .for_each(|line| println!("note: {line}"));
    }
    Ok(())
}

/// A line for each committed digest of the second code generator that was made beside another digest of the
/// stock compiler. Kernels may change where only the stock compiler is, so this is no failure.
pub(crate) fn stale_digests(root: &Path) -> Result<Vec<String>> {
    let read = |file: &str| match fs::read_to_string(root.join(file)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        text => text.with_context(|| format!("cannot read {file}")),
    };
    let mut lines = Vec::new();
    for package in DIGESTED {
        let [nvvm, stock] = [CodeGenerator::Nvvm, CodeGenerator::Stock];
        let [nvvm, stock] = [nvvm, stock].map(|generator| generator.digest_file(package));
        let stale = stale_variants(&read(nvvm)?, &read(stock)?);
        if !stale.is_empty() {
            let stale: Vec<_> = stale.iter().map(Variant::to_string).collect();
            lines.push(format!(
                "{nvvm} was made beside another {stock} ({}): where rust-cuda is, `{}` renews it",
                stale.join(", "),
                CodeGenerator::Nvvm.bless_command()
            ));
        }
    }
    Ok(lines)
}

fn print_line(line: &str) {
    println!("{line}");
}

/// Builds and assembles every package.
pub(crate) fn digests(places: &Places, arch: Option<Variant>) -> Result<Vec<(Package, Digest)>> {
    let Places { root, target_dir } = places;
    let mut wanted = all_variants(&DIGESTED);
    wanted.retain(|(_, variant)| arch.is_none_or(|only| *variant == only));
    let artifacts = build_each(root, target_dir, &wanted)?;
    let of_packages = artifacts.chunk_by(|one, next| one.package == next.package);
    of_packages
        .map(|artifacts| {
            let package = artifacts[0].package;
            let digest = Digest::of(package, CodeGenerator::Stock, artifacts, target_dir)?;
            Ok((package, digest))
        })
        .collect()
}

/// Does the same as [`run`] with `rustc_codegen_nvvm` of a checkout of rust-cuda. Digests belong to one
/// commit of it: with another, nothing is compared or written.
pub(crate) fn run_nvvm(
    places: &Places,
    checkout: &Path,
    arch: Option<Variant>,
    mode: Mode,
) -> Result<()> {
    let Places { root, target_dir } = places;
    let build = NvvmBuild::prepare(root, target_dir, checkout)?;
    if !build.is_tested() {
        eprintln!(
            "warning: {} is at {}, perhaps with changes; tested is {TESTED_COMMIT}",
            checkout.display(),
            build.commit()
        );
    }
    let variants = arch.map_or(NvvmBuild::VARIANTS.to_vec(), |variant| vec![variant]);
    let mut digests = Vec::new();
    for package in DIGESTED {
        let artifacts: Result<Vec<_>, _> = {
            let variants = variants.iter();
            variants
                .map(|&variant| build.build(package, variant))
                .collect()
        };
        let artifacts = artifacts?;
        for artifact in &artifacts {
            println!("{}", title(artifact));
        }
        digests.push((
            package,
            Digest::of(package, CodeGenerator::Nvvm, &artifacts, target_dir)?,
        ));
    }
    if arch.is_none() {
        complete(places, &build)?;
    }
    let mode = match mode {
        Mode::Bless if !build.is_tested() => {
            bail!(
                "--bless: digests are of {TESTED_COMMIT}, not of {}",
                build.commit()
            )
        }
        Mode::Check if !build.is_tested() => {
            println!(
                "not comparable: digests are of {TESTED_COMMIT}, not of {}",
                build.commit()
            );
            Mode::Build
        }
        mode => mode,
    };
    judge_all(places, CodeGenerator::Nvvm, &digests, mode, print_line)
}

/// Path of an artifact's PTX, after the flag of `ferry-tests gpu` and `ferry-tests bench` that takes it.
fn title(artifact: &Artifact) -> String {
    let file = artifact.ptx_path.display();
    match artifact.package {
        Package::Kernels => format!("--kernels {file}"),
        Package::Options => format!("--options-kernels {file}"),
        Package::Rows => format!("--rows-kernels {file}"),
        Package::Probes => format!("--probe-kernels {file}"),
        _ => file.to_string(),
    }
}

/// Puts the stock compiler's kernels for sm_80 beside the others: FERRY_PTX_DIR must have all.
fn complete(places: &Places, build: &NvvmBuild) -> Result<()> {
    let Places { root, target_dir } = places;
    for package in [Package::Kernels, Package::Options, Package::Rows] {
        let stock = ferry_build::build(root, target_dir, package, Variant::Sm80)?;
        let to = build.ptx_folder(package).join("sm_80.ptx");
        fs::copy(&stock.ptx_path, &to).with_context(|| format!("cannot write {}", to.display()))?;
    }
    let folder = build.ptx_folder(Package::Kernels);
    println!(
        "FERRY_PTX_DIR={} (sm_80 is the stock compiler's)",
        folder.display()
    );
    Ok(())
}

/// Says the table, then judges every digest.
pub(crate) fn judge_all(
    places: &Places,
    generator: CodeGenerator,
    digests: &[(Package, Digest)],
    mode: Mode,
    say: impl Fn(&str),
) -> Result<()> {
    let kernels: Vec<_> = digests
        .iter()
        .flat_map(|(_, digest)| digest.kernels())
        .collect();
    say(table(&kernels).trim_end());
    for (package, digest) in digests {
        say(&judge(places, *package, generator, digest, mode)?);
    }
    Ok(())
}

/// Builds and assembles the crate of a manifest, and prints the table and the path of its PTX. Warns of local
/// memory.
pub(crate) fn run_own(places: &Places, manifest: &Path, arch: Option<Variant>) -> Result<()> {
    let Places { root, target_dir } = places;
    let variants = arch.map_or(Variant::ALL.to_vec(), |variant| vec![variant]);
    let mut kernels = Vec::new();
    for variant in variants {
        let ptx = build_own(root, target_dir, manifest, variant)?;
        println!("{}", ptx.display());
        for (name, needs) in assemble(&ptx, variant, target_dir)? {
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

/// Checks or renews the digest of a package, whose kernels must break no rule, and says so.
fn judge(
    places: &Places,
    package: Package,
    generator: CodeGenerator,
    digest: &Digest,
    mode: Mode,
) -> Result<String> {
    let (root, file) = (&places.root, generator.digest_file(package));
    let bless = generator.bless_command();
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
        return Ok(format!("{file} is written"));
    }
    if mode == Mode::Check {
        if !root.join(file).is_file() {
            bail!("there is no {file}; write it with `{bless}`");
        }
        let difference = digest
            .compare_with_committed(root)
            .context("cannot compare")?;
        if !difference.is_empty() {
            bail!(
                "the kernels of {} differ from {file} (- committed, + built):\n{difference}\
                 If this is what you want: `{bless}`",
                package.name()
            );
        }
        return Ok(format!("{file} holds"));
    }
    Ok(format!("{} is built", package.name()))
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
    fn what_the_test_program_takes_is_shown_with_its_flag() {
        let of = |package| {
            title(&Artifact {
                package,
                variant: Variant::Sm90a,
                ptx_path: "x/sm_90a.ptx".into(),
            })
        };
        assert_eq!(of(Package::Kernels), "--kernels x/sm_90a.ptx");
        assert_eq!(of(Package::Probes), "--probe-kernels x/sm_90a.ptx");
        assert_eq!(of(Package::Options), "--options-kernels x/sm_90a.ptx");
        assert_eq!(of(Package::Rows), "--rows-kernels x/sm_90a.ptx");
        assert_eq!(of(Package::OwnEpilogue), "x/sm_90a.ptx");
    }

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

    #[test]
    fn a_digest_that_was_made_beside_another_is_named_with_the_command_that_renews_it() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path();
        let write = |file: &str, text: &str| {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        // A missing stock digest has the sections of no bytes.
        let of_section = |section: &str| {
            let sum = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
            format!("\n[{section}]\nstock {sum}\n")
        };
        for package in DIGESTED {
            let sections = ["sm_90a", "sm_100a"].map(of_section).concat();
            write(CodeGenerator::Nvvm.digest_file(package), &sections);
        }
        assert_eq!(stale_digests(root).unwrap(), [""; 0]);
        let changed = "\n[sm_90a]\nptx 8.3\n";
        write("gpu/probes/ptx-digest.txt", changed);
        let found = [
            "gpu/probes/nvvm-digest.txt was made beside another gpu/probes/ptx-digest.txt (sm_90a): \
             where rust-cuda is, `cargo xtask build-ptx --backend nvvm --rust-cuda PATH --bless` renews it",
        ];
        assert_eq!(stale_digests(root).unwrap(), found);
        fs::remove_file(root.join("gpu/probes/nvvm-digest.txt")).unwrap();
        let missing = found[0].replace("(sm_90a)", "(sm_90a, sm_100a)");
        assert_eq!(stale_digests(root).unwrap(), [missing]);
    }
}
