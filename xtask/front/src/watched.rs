//! Builds by cargo that say what they do, and that they wait for another cargo.

use std::io;
use std::process::{Command, ExitStatus, Stdio};

use crate::lines::{Line, each};
use crate::log::Log;
use crate::screen::{Screen, time};

/// First words of cargo's messages that say what it does; the others are errors, warnings and their text.
const STATUS: [&str; 20] = [
    "Adding",
    "Archiving",
    "Blocking",
    "Building",
    "Checking",
    "Compiling",
    "Doc-tests",
    "Downloaded",
    "Downloading",
    "Executable",
    "Finished",
    "Fresh",
    "Locking",
    "Packaged",
    "Packaging",
    "Removed",
    "Running",
    "Unpacking",
    "Updating",
    "Verifying",
];

/// Messages that a cargo prints on standard error: shows what is under way and that it waits, and logs all.
pub(crate) struct Messages<'a> {
    screen: &'a Screen,
    log: &'a Log,
    /// Lines that do not say what is under way: errors and warnings.
    pub(crate) rest: Vec<String>,
}

impl<'a> Messages<'a> {
    pub(crate) fn new(screen: &'a Screen, log: &'a Log) -> Self {
        let rest = Vec::new();
        Messages { screen, log, rest }
    }

    /// Takes the next line.
    pub(crate) fn line(&mut self, line: String) {
        self.log.line(&line);
        let text = line.trim_start();
        match status(&line) {
            Some("Blocking") => self
                .screen
                .say(&format!("another cargo is at work: {text}")),
            Some(_) => self.screen.under_way(text.to_lowercase()),
            // A build script of Ferry says which kernels it compiles.
            None if text.starts_with("compiling ") => self.screen.under_way(text),
            None => self.rest.push(line),
        }
    }
}

/// The first word of a message that says what cargo does. Cargo aligns these words at their ends.
fn status(line: &str) -> Option<&str> {
    let word = line.split_whitespace().next()?;
    let is_aligned = line.len() - line.trim_start().len() + word.len() == 12;
    (is_aligned && STATUS.contains(&word)).then_some(word)
}

/// Runs a cargo that builds, with its messages on the screen's last line and in the log. What it says beside
/// these is printed if it fails.
///
/// # Errors
///
/// Cargo cannot be run, or its messages cannot be read.
pub fn build(mut cargo: Command, what: &str, screen: &Screen, log: &Log) -> io::Result<ExitStatus> {
    let begin = screen.elapsed();
    screen.under_way(format!("building {what}"));
    let (status, rest) = screen.during(|| {
        let mut messages = Messages::new(screen, log);
        let status = each(cargo.stderr(Stdio::piped()).spawn()?, |line| match line {
            Line::Out(line) | Line::Error(line) => messages.line(line),
        })?;
        io::Result::Ok((status, messages.rest))
    })?;
    if !status.success() {
        screen.say(&rest.join("\n"));
    } else if screen.elapsed() - begin >= std::time::Duration::from_secs(3) {
        screen.say(&format!(
            "built {what} in {}",
            time(screen.elapsed() - begin)
        ));
    }
    Ok(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cargo_does_is_told_from_what_it_says() {
        assert_eq!(
            status("   Compiling ferry-ep v0.3.0 (/x)"),
            Some("Compiling")
        );
        assert_eq!(
            status("    Blocking waiting for file lock"),
            Some("Blocking")
        );
        assert_eq!(status("Compiling is hard"), None);
        assert_eq!(status("error: could not compile"), None);
        assert_eq!(status(""), None);
    }
}
