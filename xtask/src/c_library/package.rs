//! `cargo xtask package-c`: builds the library for C and installs it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::header::HEADER;
use crate::builds;
use crate::places::Places;

const PKG_CONFIG: &str = include_str!("ferry.pc");

/// The library's soname, which host/c/build.rs sets.
const SHARED_NAME: &str = "libferry.so.0";

/// Cargo's profile for the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Profile {
    Dev,
    Release,
}

/// Builds and installs below `prefix`.
pub(super) fn run(places: &Places, prefix: &Path, features: &str, profile: Profile) -> Result<()> {
    let (release, folder) = match profile {
        Profile::Dev => (None, "debug"),
        Profile::Release => (Some("--release"), "release"),
    };
    let mut cargo = builds::cargo(["build", "--package", "ferry-c", "--features", features]);
    cargo.args(release);
    builds::build(places, "package-c", "the library for C", cargo)?;
    let built = places.target_dir.join(folder);
    let (include, lib) = (prefix.join("include"), prefix.join("lib"));
    let pkg_config = lib.join("pkgconfig");
    for folder in [&include, &pkg_config] {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let copy = |from: &Path, to: &Path| {
        // A program may have the old file mapped.
        let _ = fs::remove_file(to);
        fs::copy(from, to)
            .map(drop)
            .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
    };
    copy(&places.root.join(HEADER), &include.join("ferry.h"))?;
    copy(&built.join("libferry_c.a"), &lib.join("libferry.a"))?;
    copy(&built.join("libferry_c.so"), &lib.join(SHARED_NAME))?;
    let link = lib.join("libferry.so");
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(SHARED_NAME, &link)
        .with_context(|| format!("cannot link {}", link.display()))?;
    let text = PKG_CONFIG.replace("@VERSION@", env!("CARGO_PKG_VERSION"));
    fs::write(pkg_config.join("ferry.pc"), text)?;
    println!("installed ferry for C in {}", prefix.display());
    Ok(())
}
