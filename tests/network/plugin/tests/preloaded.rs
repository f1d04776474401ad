//! The library as NVSHMEM finds it: preloaded, and opened by the name of its transport for UCX.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr;

use libloading::os::unix::Library;
use tempfile::TempDir;

/// The name by which NVSHMEM opens its transport for UCX.
const NAME: &str = "nvshmem_transport_ucx.so.3";
/// A library that asks for the host's name. It does something after the call, so that it is on the stack.
const ASKS: &str = "#include <unistd.h>\n\
    int ask(char *name) { int code = gethostname(name, 256); name[255] = 0; return code; }\n";

/// The library of this source: Cargo puts none beside a test. Built in a folder of its own, as the cargo that
/// builds the other tests may hold theirs.
fn library() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plugin");
    let output = Command::new(env!("CARGO"))
        .args(["build", "--package", "ferry-network-plugin", "--target-dir"])
        .arg(target)
        .args(["--offline", "--message-format", "json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let lines = String::from_utf8(output.stdout).unwrap();
    let mut words = lines.split('"');
    let file = words.rfind(|word| word.ends_with("nvshmem_transport_ferry.so"));
    file.expect("an artifact of the build").into()
}

fn text(output: &Output) -> String {
    let all = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&all).into_owned()
}

/// A folder of this test with libraries of two names that ask for the host's name.
fn askers() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("asks.c");
    fs::write(&source, ASKS).unwrap();
    for name in ["libnvshmem_asks.so", "libother.so"] {
        let mut compiled = Command::new("cc");
        compiled.args(["-shared", "-fPIC", "-O2", "-o"]);
        let output = compiled
            .arg(folder.path().join(name))
            .arg(&source)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output));
    }
    folder
}

/// Name of the host as a library is told it.
fn asked(file: &Path) -> String {
    let mut name = [0 as c_char; 256];
    // SAFETY: the library was made by this test, has this function, and writes up to 256 bytes.
    unsafe {
        let library = Library::new(file).unwrap();
        let ask = library.get::<unsafe extern "C" fn(*mut c_char) -> c_int>(b"ask\0");
        assert_eq!(ask.unwrap()(name.as_mut_ptr()), 0);
        CStr::from_ptr(name.as_ptr()).to_str().unwrap().into()
    }
}

/// Not a test: what the process with the library runs.
#[test]
fn process() {
    let Some(folder) = env::var_os("ASKERS").map(PathBuf::from) else {
        return;
    };
    println!("\n=nvshmem {}", asked(&folder.join("libnvshmem_asks.so")));
    println!("=other {}", asked(&folder.join("libother.so")));
    type Init = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, c_int) -> c_int;
    let mut transport = ptr::null_mut();
    // SAFETY: it is preloaded, or there is none; the function has this type, and refuses this version.
    let code = unsafe {
        let library = Library::new(NAME).unwrap();
        let init = library.get::<Init>(b"nvshmemt_init\0").unwrap();
        init(&raw mut transport, ptr::null_mut(), 30_100)
    };
    println!("=init {code}");
}

#[test]
fn nvshmem_finds_it_by_name_and_alone_has_a_host_name_of_its_own() {
    let folder = askers();
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "process", "--nocapture"])
        .env("LD_PRELOAD", library())
        .env("ASKERS", folder.path())
        .env("FERRY_NETWORK_HOST", "node7")
        .output()
        .unwrap();
    let text = text(&output);
    let machine = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let machine = machine.trim();
    for line in ["=nvshmem node7", &format!("=other {machine}"), "=init 7"] {
        assert!(text.lines().any(|one| one == line), "{line}: {text}");
    }
    assert!(text.contains("has transport interface 30100"), "{text}");
}
