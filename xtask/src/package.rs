//! `cargo xtask package`: the crates as they publish, and a project outside this workspace that uses them.
//!
//! All of it lies in `target/crates`: `source` is a workspace of what publishes, in which the host library
//! has PTX for one node and the kernels' sources with it; `build/package` has the `.crate` files that cargo
//! made and verified; `unpacked` is what a registry would give; `outside` depends on that.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use ferry_build::{PACKAGED_MANIFEST, PACKAGED_PTX, PACKAGED_SOURCES, Package, build_all, place};
use ferry_ptx_tools::{CodeGenerator, Comparison, Digest, Verdict};
use xshell::{Shell, cmd};

use crate::Places;

mod outside;

/// The largest `.crate` that the registry takes (The Cargo Book, "Publishing on crates.io").
const MOST_BYTES: u64 = 10 << 20;

/// The package that carries PTX, and its folder.
const HOST: &str = "host";

/// What the kernels are compiled from, below the workspace root.
const DEVICE_CRATES: [&str; 6] = [
    "gpu",
    "gpu/kernels",
    "gpu/layout",
    "gpu/options",
    "gpu/protocol",
    "nvshmem-sys",
];

/// A package that publishes.
struct Published {
    name: String,
    version: String,
    /// Its folder below the workspace root.
    folder: PathBuf,
    /// The oldest toolchain that compiles it, as rustup names it.
    toolchain: String,
}

impl Published {
    fn full_name(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }
}

/// Removes what earlier runs made cargo unpack: cargo keeps crates that it took from a folder by
/// name and version, and would check the packages with those of another state of this version.
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

/// Packs all, and builds and runs the project outside. `full`: the packaged kernels are assembled, and the
/// project is built with the feature `nvshmem`, too, whose kernels are compiled there, with NVSHMEM's
/// device code and the toolchain that the packages name.
pub(crate) fn run(places: &Places, full: bool) -> Result<()> {
    let crates = places.target_dir.join("crates");
    let published = published(places)?;
    stage(places, &published, &crates.join("source"), full)?;
    let build = crates.join("build");
    let shell = Shell::new()?;
    shell.change_dir(crates.join("source"));
    forget_unpacked(&published)?;
    let newest = published.iter().map(|package| &package.toolchain).max();
    let toolchain = newest.context("no package publishes")?;
    let install = format!("`rustup toolchain install {toolchain} --profile minimal`");
    cmd!(
        shell,
        "rustup run {toolchain} cargo package --quiet --workspace --offline --allow-dirty"
    )
    .quiet()
    .env("RUSTUP_TOOLCHAIN", toolchain)
    .env("CARGO_TARGET_DIR", &build)
    .run()
    .with_context(|| format!("cargo package failed; it takes what {install} installs"))?;
    let unpacked = crates.join("unpacked");
    shell.remove_path(&unpacked)?;
    shell.create_dir(&unpacked)?;
    for package in &published {
        let file = build.join(format!("package/{}.crate", package.full_name()));
        let bytes = fs::metadata(&file).context("cargo made no crate")?.len();
        println!("{}: {} KiB", file.display(), bytes.div_ceil(1024));
        ensure!(bytes <= MOST_BYTES, "no registry takes more than 10 MiB");
        cmd!(shell, "tar -xzf {file} -C {unpacked}").quiet().run()?;
    }
    outside::run(places, &crates, &published, toolchain, full)
}

/// The workspace's packages that publish.
fn published(places: &Places) -> Result<Vec<Published>> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let metadata = cmd!(shell, "cargo metadata --format-version 1 --no-deps").quiet();
    let metadata: serde_json::Value = serde_json::from_str(&metadata.read()?)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let mut published = Vec::new();
    for package in packages {
        // A package that does not publish has an empty list of registries.
        if package["publish"].is_array() {
            continue;
        }
        let text = |key: &str| -> Result<&str> {
            package[key]
                .as_str()
                .with_context(|| format!("{} has no {key}", package["name"]))
        };
        let manifest = Path::new(text("manifest_path")?);
        let folder = manifest.parent().unwrap_or(manifest);
        published.push(Published {
            name: text("name")?.into(),
            version: text("version")?.into(),
            folder: folder.strip_prefix(&places.root)?.into(),
            toolchain: format!("{}.0", text("rust_version")?),
        });
    }
    Ok(published)
}

/// Makes the workspace of what publishes.
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
    let members = published.iter().map(|package| package.folder.as_path());
    copy_workspace(root, source, "Cargo.toml", members)?;
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
    copy_workspace(
        root,
        &device,
        PACKAGED_MANIFEST,
        DEVICE_CRATES.iter().map(Path::new),
    )?;
    fs::copy(
        root.join("rust-toolchain.toml"),
        device.join("rust-toolchain.toml"),
    )?;
    Ok(())
}

/// The sources that are packed.
struct Tree<'a> {
    root: &'a Path,
    /// The files that git tracks; `None` where the sources are no checkout, as those of an archive are not.
    tracked: Option<BTreeSet<PathBuf>>,
}

impl<'a> Tree<'a> {
    fn of(root: &'a Path) -> Result<Self> {
        let mut tracked = None;
        // In a worktree it is a file.
        if root.join(".git").exists() {
            let shell = Shell::new()?;
            shell.change_dir(root);
            let listed = cmd!(shell, "git ls-files -z").quiet().read()?;
            let files = listed.split_terminator('\0').map(|file| root.join(file));
            tracked = Some(files.collect());
        }
        Ok(Self { root, tracked })
    }

    /// As [`copy_package`], of the package in `folder`, without what git does not track: nobody meant to
    /// publish that.
    fn copy_package(&self, folder: &Path, to: &Path, takes: &dyn Fn(&Path) -> bool) -> Result<()> {
        let is_tracked =
            |path: &Path| (self.tracked.as_ref()).is_none_or(|files| files.contains(path));
        let takes = |path: &Path| takes(path) && is_tracked(path);
        copy_package(&self.root.join(folder), to, &takes)
    }
}

/// Copies what `takes` of a package, without other packages in it. Links become what they point to.
fn copy_package(from: &Path, to: &Path, takes: &dyn Fn(&Path) -> bool) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let path = entry?.path();
        let target = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            if path.join("Cargo.toml").is_file() || path.ends_with("target") {
                continue;
            }
            copy_package(&path, &target, takes)?;
        } else if takes(&path) {
            fs::create_dir_all(to)?;
            fs::copy(&path, &target).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

/// Copies the workspace's manifest, with other members, and its lock file.
fn copy_workspace<'a>(
    root: &Path,
    to: &Path,
    manifest: &str,
    members: impl Iterator<Item = &'a Path>,
) -> Result<()> {
    let text = fs::read_to_string(root.join("Cargo.toml"))?;
    fs::write(to.join(manifest), with_members(&text, members)?)?;
    fs::copy(root.join("Cargo.lock"), to.join("Cargo.lock"))?;
    Ok(())
}

/// A workspace's manifest with other members.
fn with_members<'a>(manifest: &str, members: impl Iterator<Item = &'a Path>) -> Result<String> {
    let start = "members = [";
    let (before, rest) = manifest.split_once(start).context("no members")?;
    let (_, after) = rest.split_once(']').context("no end of the members")?;
    let members: Vec<_> = members
        .map(|folder| format!("\"{}\"", folder.display()))
        .collect();
    Ok(format!("{before}{start}{}]{after}", members.join(", ")))
}

/// Builds the kernels for one node into the host library's package. They have nothing of NVSHMEM, and each
/// has the operations on memory, shuffles, votes, barriers and calls of the kernel that has kernels with
/// NVSHMEM beside it, whose digest is committed; the compiler may order them otherwise. `full`: they are
/// assembled, too, and break no rule.
fn stage_ptx(places: &Places, folder: &Path, full: bool) -> Result<()> {
    let Places { root, target_dir } = places;
    fs::create_dir_all(folder.join("options"))?;
    for (of_node, of_all) in [
        (Package::NodeKernels, Package::Kernels),
        (Package::NodeOptions, Package::Options),
    ] {
        let of_all = build_all(root, target_dir, of_all)?;
        let of_node = build_all(root, target_dir, of_node)?;
        if full {
            let digest = Digest::of(
                of_node[0].package,
                CodeGenerator::Stock,
                &of_node,
                target_dir,
            )?;
            let violations = digest.violations.iter().map(ToString::to_string);
            let violations = violations.collect::<Vec<_>>().join("\n");
            ensure!(violations.is_empty(), "{violations}");
        }
        for (node, all) in of_node.iter().zip(&of_all) {
            let [text, with_nvshmem] = [
                fs::read_to_string(&node.ptx_path)?,
                fs::read_to_string(&all.ptx_path)?,
            ];
            let name = place(node.package, node.variant);
            require_same_kernels(&text, &with_nvshmem).with_context(|| name.clone())?;
            fs::write(folder.join(&name), text)?;
        }
    }
    Ok(())
}

/// Checks kernels for one node against those with NVSHMEM beside them.
fn require_same_kernels(text: &str, with_nvshmem: &str) -> Result<()> {
    if let Some(line) = text
        .lines()
        .find(|line| line.to_lowercase().contains("nvshmem"))
    {
        bail!("it has something of NVSHMEM: {line}");
    }
    let comparison = Comparison::of(text, with_nvshmem)?;
    let kernels = comparison
        .parts
        .iter()
        .filter(|part| part.name.starts_with("ferry_"));
    for kernel in kernels.filter(|kernel| !kernel.name.ends_with("_shmem")) {
        let is_there = !matches!(kernel.verdict, Verdict::OnlyBefore | Verdict::OnlyAfter);
        ensure!(
            is_there && kernel.counts.is_empty(),
            "{} has other operations than beside kernels that call NVSHMEM: {:?}",
            kernel.name,
            kernel.counts
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_gets_other_members_and_keeps_all_else() {
        let manifest = "[workspace]\nmembers = [\n    \"gpu\", \"tests\",\n]\n\
                        \n[profile.dev]\nopt-level = 2\n";
        let members = ["gpu", "gpu/layout"].map(Path::new).into_iter();
        assert_eq!(
            with_members(manifest, members).unwrap(),
            "[workspace]\nmembers = [\"gpu\", \"gpu/layout\"]\n\n[profile.dev]\nopt-level = 2\n"
        );
        assert!(with_members("[package]\n", [].into_iter()).is_err());
    }

    #[test]
    fn only_what_git_tracks_is_packed() {
        let shell = Shell::new().unwrap();
        let folder = shell.create_temp_dir().unwrap();
        let root = folder.path();
        shell.change_dir(root);
        let files = [
            "Cargo.toml",
            "src/lib.rs",
            "src/secret.rs",
            "notes/mine.txt",
        ];
        for file in files {
            shell.write_file(format!("a/{file}"), file).unwrap();
        }
        let packed = |to: &str| {
            let (tree, to) = (Tree::of(root).unwrap(), root.join(to));
            let takes = |path: &Path| !path.ends_with("Cargo.toml");
            tree.copy_package(Path::new("a"), &to, &takes).unwrap();
            assert!(!to.join("Cargo.toml").exists());
            ["src/lib.rs", "src/secret.rs", "notes"].map(|path| to.join(path).exists())
        };
        // An archive is packed as it is.
        assert_eq!(packed("all"), [true, true, true]);
        cmd!(shell, "git init --quiet").run().unwrap();
        cmd!(shell, "git add a/Cargo.toml a/src/lib.rs")
            .run()
            .unwrap();
        assert_eq!(packed("tracked"), [true, false, false]);
    }

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
        let all = format!("{node}{}", kernel("ferry_dispatch_shmem", "nop;"));
        require_same_kernels(&node, &all).unwrap();
        let text = |outcome: Result<()>| outcome.unwrap_err().to_string();
        let other = all.replace("ld.global.u32", "ld.global.u64");
        let found = text(require_same_kernels(&node, &other));
        assert!(found.contains("ferry_dispatch has other"), "{found}");
        let with = format!("{node}.global .u32 nvshmemi_device_state_d;\n");
        let found = text(require_same_kernels(&with, &all));
        assert!(found.contains("nvshmemi_device_state_d"), "{found}");
    }
}
