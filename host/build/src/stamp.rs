//! A hash of a build's inputs, so that an unchanged build is not repeated.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use crate::error::{FileContext, Result};

/// Hash of a build's inputs.
#[derive(Default)]
pub struct Stamp(DefaultHasher);

impl Stamp {
    /// Makes a stamp without inputs.
    pub fn new() -> Stamp {
        Stamp::default()
    }

    /// Adds a text.
    pub fn text(&mut self, text: &str) {
        text.hash(&mut self.0);
    }

    /// Adds the contents of a file, or its absence.
    pub fn file(&mut self, path: &Path) -> Result<()> {
        let contents = match fs::read(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            outcome => Some(outcome.file("read", path)?),
        };
        contents.hash(&mut self.0);
        Ok(())
    }

    /// Adds the names and contents of all Rust sources and manifests below `folder`, sorted.
    pub fn sources(&mut self, folder: &Path) -> Result<()> {
        let mut files = Vec::new();
        collect_sources(folder, &mut files)?;
        files.sort();
        for file in files {
            file.strip_prefix(folder).unwrap_or(&file).hash(&mut self.0);
            self.file(&file)?;
        }
        Ok(())
    }

    /// Returns the hash of all inputs.
    pub fn finish(self) -> String {
        format!("{:016x}", self.0.finish())
    }
}

fn collect_sources(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).file("list", folder)? {
        let entry = entry.file("list", folder)?;
        let path = entry.path();
        if entry.file_type().file("read", &path)?.is_dir() {
            if entry.file_name() != "target" {
                collect_sources(&path, files)?;
            }
        } else if path
            .extension()
            .is_some_and(|end| end == "rs" || end == "toml")
        {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp_of(folder: &Path) -> String {
        let mut stamp = Stamp::new();
        stamp.sources(folder).unwrap();
        stamp.finish()
    }

    #[test]
    fn a_changed_renamed_or_added_source_changes_the_stamp() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path();
        fs::create_dir_all(folder.join("src")).unwrap();
        fs::write(folder.join("src/lib.rs"), "one").unwrap();
        let first = stamp_of(folder);
        assert_eq!(first, stamp_of(folder));
        fs::write(folder.join("notes.txt"), "not a source").unwrap();
        assert_eq!(first, stamp_of(folder));
        fs::write(folder.join("src/lib.rs"), "two").unwrap();
        let second = stamp_of(folder);
        assert_ne!(first, second);
        fs::rename(folder.join("src/lib.rs"), folder.join("src/main.rs")).unwrap();
        assert_ne!(second, stamp_of(folder));
    }
}
