//! A program of its own for each test: the driver is loaded once in each.

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use libloading::Library;

/// Set in such a program.
const PROGRAM: &str = "FERRY_TEST_BOOKS";
const LOADER_PATH: &str = "LD_LIBRARY_PATH";
const DRIVER: &str = "libcuda.so.1";

/// The driver, and what it keeps.
pub struct Books(Library);

impl Books {
    /// The number of this name.
    pub fn count(&self, name: &str) -> u64 {
        // SAFETY: the driver has these numbers, and nobody else uses them now.
        unsafe { **self.0.get::<*const u64>(name).unwrap() }
    }
}

/// Runs `work` in a program with such a driver. `name` is that of the test.
pub fn with_books(name: &str, work: impl FnOnce(&Books)) {
    if env::var_os(PROGRAM).is_some() {
        // SAFETY: its constructors do nothing.
        let driver = unsafe { Library::new(DRIVER) };
        return work(&Books(driver.unwrap()));
    }
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(PROGRAM, "1")
        .env(LOADER_PATH, folder())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("1 passed"), "{text}");
}

/// Where the driver lies.
fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("books");
        std::fs::create_dir_all(&folder).unwrap();
        let made = folder.join(format!("{DRIVER}.{}", std::process::id()));
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-w", "-o"]).arg(&made);
        compiler.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/books/driver.c"));
        assert!(compiler.status().unwrap().success());
        std::fs::rename(made, folder.join(DRIVER)).unwrap();
        folder
    })
}
