//! Folders that the tasks read and write.

use std::path::{Path, PathBuf};

/// Folders that the tasks read and write.
pub(crate) struct Places {
    /// The workspace.
    pub(crate) root: PathBuf,
    /// Cargo's target folder.
    pub(crate) target_dir: PathBuf,
}

impl Places {
    pub(crate) fn find() -> Places {
        let manifest_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = manifest_dir.parent().unwrap_or(manifest_dir).to_owned();
        let target_dir = ferry_build::target_dir(&root);
        Places { root, target_dir }
    }
}
