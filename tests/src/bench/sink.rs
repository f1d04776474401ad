//! Output of results.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::json;

use super::options::BenchArgs;

/// The terminal and the file of JSON lines; neither in a process other than the first.
pub struct Sink {
    is_first: bool,
    file: Option<File>,
}

impl Sink {
    /// Creates the file of `--json`.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn new(args: &BenchArgs, is_first: bool) -> Result<Self> {
        let create = |path: &PathBuf| {
            File::create(path).with_context(|| format!("--json {}: cannot create", path.display()))
        };
        let path = args.json.as_ref().filter(|_| is_first);
        Ok(Self {
            is_first,
            file: path.map(create).transpose()?,
        })
    }

    /// Whether this process prints and writes.
    pub const fn is_first(&self) -> bool {
        self.is_first
    }

    /// Prints a line.
    pub fn say(&self, text: impl Display) {
        if self.is_first {
            println!("{text}");
        }
    }

    /// Appends a line to the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn line(&mut self, kind: &str, value: impl serde::Serialize) -> Result<()> {
        if let Some(file) = &mut self.file {
            writeln!(file, "{}", json!({ kind: value }))?;
        }
        Ok(())
    }
}
