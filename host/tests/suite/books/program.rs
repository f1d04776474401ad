//! A program of its own for each test, as a program loads the driver once.

use std::env;
use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::ptr;
use std::sync::OnceLock;

use ferry::Stream;
use libloading::Library;

/// Set in such a program.
const PROGRAM: &str = "FERRY_TEST_BOOKS";
const LOADER_PATH: &str = "LD_LIBRARY_PATH";
const DRIVER: &str = "libcuda.so.1";

/// The driver and its books.
pub struct Books(Library);

/// A graph that the library did not make.
#[derive(Clone, Copy)]
pub struct Foreign(*mut c_void);

impl Books {
    /// The number of this name.
    pub fn count(&self, name: &str) -> u64 {
        // SAFETY: the driver has these numbers, and nobody else uses them now.
        unsafe { **self.0.get::<*const u64>(name).unwrap() }
    }

    /// Captures what `work` enqueues on `stream`, as another library would.
    pub fn capture(&self, stream: Stream, work: impl FnOnce()) -> Foreign {
        type Begin = unsafe extern "C" fn(stream: u64, mode: c_int) -> c_int;
        type End = unsafe extern "C" fn(stream: u64, graph: *mut *mut c_void) -> c_int;
        // SAFETY: the driver has these functions.
        let (begin, end) = unsafe {
            let begin = self.0.get::<Begin>("cuStreamBeginCapture_v2").unwrap();
            (begin, self.0.get::<End>("cuStreamEndCapture").unwrap())
        };
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is live.
        assert_eq!(unsafe { begin(stream.handle(), 0) }, 0);
        work();
        // SAFETY: as above; `graph` is a live pointer to write to.
        assert_eq!(unsafe { end(stream.handle(), &mut graph) }, 0);
        Foreign(graph)
    }

    /// Launches a graph.
    pub fn launch(&self, graph: Foreign, stream: Stream) {
        type Launch = unsafe extern "C" fn(graph: *mut c_void, stream: u64) -> c_int;
        // SAFETY: the driver has this function, and launches what it captured.
        let code = unsafe {
            let launch = self.0.get::<Launch>("cuGraphLaunch").unwrap();
            launch(graph.0, stream.handle())
        };
        assert_eq!(code, 0);
    }
}

/// Runs `work` in a program with such a driver. `name` is the test's name.
pub fn with_books(name: &str, work: impl FnOnce(&Books)) {
    if env::var_os(PROGRAM).is_some() {
        // SAFETY: its constructors do nothing.
        let driver = unsafe { Library::new(DRIVER) };
        return work(&Books(driver.unwrap()));
    }
    let name = format!("books::{name}");
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture"])
        .env(PROGRAM, "1")
        .env(LOADER_PATH, folder())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("1 passed"), "{text}");
}

/// Path of the driver.
fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("books");
        std::fs::create_dir_all(&folder).unwrap();
        let made = folder.join(format!("{DRIVER}.{}", std::process::id()));
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-w", "-o"]).arg(&made);
        compiler.arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/suite/books/driver.c"
        ));
        assert!(compiler.status().unwrap().success());
        std::fs::rename(made, folder.join(DRIVER)).unwrap();
        folder
    })
}
