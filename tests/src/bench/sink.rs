//! Where results go.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::json;

use super::options::BenchArgs;

/// The terminal and the file of JSON lines; nowhere, in a process that does not speak for all.
pub struct Sink {
    is_first: bool,
    file: Option<File>,
}

impl Sink {
    /// Creates the file.
    ///
    /// # Errors
    /// It cannot be created.
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

    /// Whether anything goes anywhere.
    pub const fn is_first(&self) -> bool {
        self.is_first
    }

    /// A line for people.
    pub fn say(&self, text: impl Display) {
        if self.is_first {
            println!("{text}");
        }
    }

    /// A line of the file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn line(&mut self, kind: &str, value: impl serde::Serialize) -> Result<()> {
        if let Some(file) = &mut self.file {
            writeln!(file, "{}", json!({ kind: value }))?;
        }
        Ok(())
    }
}
