//! `cargo xtask package`: the crates as published, and a project outside this workspace that uses them.
//!
//! All of it is in `target/crates`: `source` is a workspace of the published crates, in which the host
//! library carries PTX for one node and the kernels' sources; `build/package` has the `.crate` files that
//! cargo made and verified; `unpacked` has them as a user gets them from a registry; `outside` depends on
//! those.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use ferry_build::{
    Artifact, PACKAGED_MANIFEST, PACKAGED_PTX, PACKAGED_SOURCES, Package, Variant, all_variants,
    compile_each, for_one_node, place,
};
use ferry_ptx_tools::{CodeGenerator, Comparison, Digest, with_members};
use xshell::{Shell, cmd};

use crate::builds;
use crate::places::Places;

mod outside;
mod published;

use published::{HOST, Published, Tree};

/// The largest `.crate` that the registry accepts (The Cargo Book, "Publishing on crates.io").
const MOST_BYTES: u64 = 10 << 20;

/// Folders of the kernels' sources below the workspace root.
const DEVICE_CRATES: [&str; 7] = [
    "gpu",
    "gpu/kernels",
    "gpu/layout",
    "gpu/options",
    "gpu/protocol",
    "gpu/rows",
    "nvshmem-sys",
];

/// Settings of every build of the packages, so that crates of the registry are compiled once for all of them.
/// Nobody debugs these builds or changes them.
const BUILD_SETTINGS: [(&str, &str); 2] = [
    ("CARGO_INCREMENTAL", "0"),
    ("CARGO_PROFILE_DEV_DEBUG", "false"),
];

/// Removes the crates that cargo unpacked in earlier runs: cargo keeps crates from a folder by name and
/// version, and would check the packages with an older state of this version.
fn forget_unpacked(published: &[Published]) -> Result<()> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let Some(home) = home.or_else(|| Some(env::home_dir()?.join(".cargo"))) else {
        return Ok(());
    };
    let shell = Shell::new()?;
    for kept in ["src", "cache"] {
        let Ok(registries) = shell.read_dir(home.join("registry").join(kept)) else {
            continue;
        };
        // A registry that is a folder has no host, and so a name that begins with this.
        let of_folders = registries.iter().filter(|registry| {
            let name = registry.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with('-'))
        });
        for registry in of_folders {
            for package in published {
                shell.remove_path(registry.join(package.full_name()))?;
                shell.remove_path(registry.join(format!("{}.crate", package.full_name())))?;
            }
        }
    }
    Ok(())
}

/// Packs all, and builds and runs the project outside. With `full`, also assembles the packaged kernels and
/// builds the project with the feature `nvshmem`, which compiles kernels with NVSHMEM's device code and the
/// toolchain that the packages name.
pub(crate) fn run(places: &Places, full: bool) -> Result<()> {
    let crates = places.target_dir.join("crates");
    let published = published::published(places)?;
    stage(places, &published, &crates.join("source"), full)?;
    let build = crates.join("build");
    let shell = Shell::new()?;
    forget_unpacked(&published)?;
    let newest = published.iter().map(|package| &package.toolchain).max();
    let toolchain = newest.context("no package publishes")?;
    let install = format!("`rustup toolchain install {toolchain} --profile minimal`");
    let mut cargo = Command::new("rustup");
    cargo
        .args(["run", toolchain, "cargo", "package"])
        .args(["--workspace", "--offline", "--allow-dirty"])
        .current_dir(crates.join("source"))
        .env("RUSTUP_TOOLCHAIN", toolchain)
        .env("CARGO_TARGET_DIR", &build)
        .envs(BUILD_SETTINGS);
    builds::build(places, "package", "the packages, each by itself", cargo)
        .with_context(|| format!("cargo package failed; it needs {install}"))?;
    let unpacked = crates.join("unpacked");
    shell.remove_path(&unpacked)?;
    shell.create_dir(&unpacked)?;
    for package in &published {
        let file = build.join(format!("package/{}.crate", package.full_name()));
        let bytes = fs::metadata(&file).context("cargo made no crate")?.len();
        println!("{}: {} KiB", file.display(), bytes.div_ceil(1024));
        ensure!(bytes <= MOST_BYTES, "the registry accepts at most 10 MiB");
        cmd!(shell, "tar -xzf {file} -C {unpacked}").quiet().run()?;
    }
    outside::run(places, &crates, &published, toolchain, full)
}

/// Makes the workspace of the published crates.
fn stage(places: &Places, published: &[Published], source: &Path, full: bool) -> Result<()> {
    let root = &places.root;
    let tree = Tree::of(root)?;
    if source.is_dir() {
        fs::remove_dir_all(source)?;
    }
    for package in published {
        let folder = &package.folder;
        tree.copy_package(folder, &source.join(folder), &|_| true)?;
    }
    let members = published.iter().map(|package| package.folder.to_str());
    let members: Option<Vec<&str>> = members.collect();
    let members = members.context("a package's folder is not text")?;
    copy_workspace(root, source, "Cargo.toml", &members)?;
    stage_ptx(places, &source.join(HOST).join(PACKAGED_PTX), full)?;

    let device = source.join(HOST).join(PACKAGED_SOURCES);
    let is_source = |path: &Path| {
        path.extension()
            .is_some_and(|end| end == "rs" || end == "toml")
    };
    for folder in DEVICE_CRATES {
        let folder = Path::new(folder);
        tree.copy_package(folder, &device.join(folder), &is_source)?;
        let tests = device.join(folder).join("tests");
        if tests.is_dir() {
            fs::remove_dir_all(tests)?;
        }
        let manifest = device.join(folder).join("Cargo.toml");
        fs::rename(&manifest, manifest.with_file_name(PACKAGED_MANIFEST))?;
    }
    copy_workspace(root, &device, PACKAGED_MANIFEST, &DEVICE_CRATES)?;
    fs::copy(
        root.join("rust-toolchain.toml"),
        device.join("rust-toolchain.toml"),
    )?;
    Ok(())
}

/// Copies the workspace's manifest, with other members, and its lock file.
fn copy_workspace(root: &Path, to: &Path, manifest: &str, members: &[&str]) -> Result<()> {
    let text = fs::read_to_string(root.join("Cargo.toml"))?;
    fs::write(to.join(manifest), with_members(&text, members)?)?;
    fs::copy(root.join("Cargo.lock"), to.join("Cargo.lock"))?;
    Ok(())
}

/// Writes the kernels for one node into the host library's package: those of the committed digests, without
/// the kernels that call NVSHMEM. A checkout compiles them without NVSHMEM, to the same counted instructions,
/// which the compiler may order differently. This is checked for one variant, with `full` for all. With
/// `full`, also assembles the packaged kernels and checks the rules.
fn stage_ptx(places: &Places, folder: &Path, full: bool) -> Result<()> {
    let Places { root, target_dir } = places;
    for subfolder in ["options", "rows"] {
        fs::create_dir_all(folder.join(subfolder))?;
    }
    let packages = [
        (Package::Kernels, Package::NodeKernels),
        (Package::Options, Package::NodeOptions),
        (Package::Rows, Package::NodeRows),
    ];
    let mut wanted = Vec::new();
    for (of_all, of_node) in packages {
        wanted.extend(all_variants(&[of_all]));
        let compared = all_variants(&[of_node]).into_iter();
        wanted.extend(compared.filter(|(_, variant)| full || *variant == Variant::Sm90a));
    }
    let built = compile_each(root, target_dir, &wanted)?;
    for (of_all, of_node) in packages {
        let of_all = built.iter().filter(|artifact| artifact.package == of_all);
        let mut staged: Vec<_> = of_all.cloned().collect();
        for artifact in &mut staged {
            let name = place(of_node, artifact.variant);
            let text = for_one_node(&fs::read_to_string(&artifact.ptx_path)?)?;
            let is_same =
                |other: &&Artifact| (other.package, other.variant) == (of_node, artifact.variant);
            if let Some(compiled) = built.iter().find(is_same) {
                require_same_kernels(&fs::read_to_string(&compiled.ptx_path)?, &text)
                    .with_context(|| name.clone())?;
            }
            artifact.package = of_node;
            artifact.ptx_path = folder.join(name);
            fs::write(&artifact.ptx_path, text)?;
        }
        if full {
            let digest = Digest::of(of_node, CodeGenerator::Stock, &staged, target_dir)?;
            let violations = digest.violations.join("\n");
            ensure!(violations.is_empty(), "{violations}");
        }
    }
    Ok(())
}

/// Checks kernels that were compiled without NVSHMEM against those taken out of a build with it.
fn require_same_kernels(compiled: &str, taken: &str) -> Result<()> {
    let mut lines = compiled.lines().chain(taken.lines());
    if let Some(line) = lines.find(|line| line.to_lowercase().contains("nvshmem")) {
        bail!("it mentions NVSHMEM: {line}");
    }
    let comparison = Comparison::of(compiled, taken)?;
    let mut parts = comparison.parts.iter();
    parts.try_for_each(|part| {
        // Halves of register pairs, and pairs with an empty half: the assembler makes no operation of them.
        let is_free = |name: &str| ["cvt.u32.u64", "cvt.u64.u32"].contains(&name);
        let mut counts = part.counts();
        counts.retain(|(name, ..)| !is_free(name));
        ensure!(
            !part.name.starts_with("ferry_") || part.is_in_both() && counts.is_empty(),
            "{} has other operations than in the build with NVSHMEM: {counts:?}",
            part.name
        );
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_have_nvshmem_or_are_others_are_found() {
        let kernel = |name: &str, body: &str| {
            format!(".visible .entry {name}(\n)\n{{\n\t{body}\n\tret;\n}}\n")
        };
        let head = ".version 8.3\n.target sm_90a\n.address_size 64\n";
        let node = format!(
            "{head}{}",
            kernel("ferry_dispatch", "ld.global.u32 \t%r1, [%rd1];")
        );
        require_same_kernels(&node, &node).unwrap();
        let text = |outcome: Result<()>| outcome.unwrap_err().to_string();
        let other = node.replace("ld.global.u32", "ld.global.u64");
        let found = text(require_same_kernels(&node, &other));
        assert!(found.contains("ferry_dispatch has other"), "{found}");
        let with = format!("{node}.global .u32 nvshmemi_device_state_d;\n");
        let found = text(require_same_kernels(&with, &node));
        assert!(found.contains("nvshmemi_device_state_d"), "{found}");
    }
}
