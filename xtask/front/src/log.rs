//! The file that holds all that a command's programs print.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// A file of lines from several threads.
pub struct Log {
    path: PathBuf,
    file: Mutex<File>,
}

impl Log {
    /// Makes `target/NAME.log`, empty.
    ///
    /// # Errors
    ///
    /// The file cannot be made.
    pub fn create(target_dir: &Path, name: &str) -> io::Result<Self> {
        fs::create_dir_all(target_dir)?;
        let path = target_dir.join(format!("{name}.log"));
        let file = Mutex::new(File::create(&path)?);
        Ok(Log { path, file })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a line. A full disk loses it: the results do not depend on it.
    pub fn line(&self, line: &str) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writeln!(file, "{line}");
    }
}
