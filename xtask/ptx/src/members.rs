//! Copies of the workspace's manifest for fewer crates.

use ferry_build::{Error, Result};

/// A workspace's manifest with other members.
///
/// # Errors
///
/// The manifest has no list of members.
pub fn with_members(manifest: &str, members: &[&str]) -> Result<String> {
    let error = || Error::Parse {
        what: "the workspace's Cargo.toml",
        detail: "it has no list of members".into(),
    };
    let (before, rest) = manifest.split_once("members = [").ok_or_else(error)?;
    let (_, after) = rest.split_once(']').ok_or_else(error)?;
    Ok(format!("{before}members = {members:?}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_gets_other_members_and_keeps_all_else() {
        let manifest = "[workspace]\nmembers = [\n    \"gpu\", \"tests\",\n]\n\n[profile.dev]\n";
        let copied = "[workspace]\nmembers = [\"gpu\", \"gpu/layout\"]\n\n[profile.dev]\n";
        assert_eq!(
            with_members(manifest, &["gpu", "gpu/layout"]).unwrap(),
            copied
        );
        assert!(with_members("[package]\n", &[]).is_err());
    }
}
