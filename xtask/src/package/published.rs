//! The packages that publish, and copies of their files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use xshell::{Shell, cmd};

use crate::builds;
use crate::places::Places;

/// The package that carries PTX, and its folder.
pub(super) const HOST: &str = "host";

/// A package that publishes.
pub(super) struct Published {
    pub(super) name: String,
    pub(super) version: String,
    /// Its folder below the workspace root.
    pub(super) folder: PathBuf,
    /// The oldest toolchain that compiles it, by rustup's name.
    pub(super) toolchain: String,
}

impl Published {
    pub(super) fn full_name(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }
}

/// The workspace's packages that publish.
pub(super) fn published(places: &Places) -> Result<Vec<Published>> {
    let mut published = Vec::new();
    for package in builds::packages(&places.root, &["--no-deps"])? {
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

/// The sources that are packed.
pub(super) struct Tree<'a> {
    root: &'a Path,
    /// The files that git tracks; `None` if the sources are not a checkout, such as an unpacked archive.
    tracked: Option<BTreeSet<PathBuf>>,
}

impl<'a> Tree<'a> {
    pub(super) fn of(root: &'a Path) -> Result<Self> {
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

    /// Copies the package in `folder` like [`copy_package`], but only files that git tracks.
    pub(super) fn copy_package(
        &self,
        folder: &Path,
        to: &Path,
        takes: &dyn Fn(&Path) -> bool,
    ) -> Result<()> {
        let is_tracked =
            |path: &Path| (self.tracked.as_ref()).is_none_or(|files| files.contains(path));
        let takes = |path: &Path| takes(path) && is_tracked(path);
        copy_package(&self.root.join(folder), to, &takes)
    }
}

/// Copies the files of a package for which `takes` is true, without packages inside it. Follows links.
pub(super) fn copy_package(from: &Path, to: &Path, takes: &dyn Fn(&Path) -> bool) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
        // All files of an archive are packed.
        assert_eq!(packed("all"), [true, true, true]);
        cmd!(shell, "git init --quiet").run().unwrap();
        cmd!(shell, "git add a/Cargo.toml a/src/lib.rs")
            .run()
            .unwrap();
        assert_eq!(packed("tracked"), [true, false, false]);
    }
}
