//! The host library, loaded at run time.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::ManuallyDrop;
use std::format;
use std::path::Path;
use std::string::String;

use crate::error::{CallError, LoadError};
use crate::version::LINKED_VERSION;

#[allow(
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
#[path = "generated/host.rs"]
mod generated;

pub use generated::{
    CUmodule, HostFunctions, cudaStream_t, nvshmemx_init_attr_t, nvshmemx_init_status_t,
    nvshmemx_uniqueid_t,
};

/// Name that the loader looks for if no path is given.
pub const SONAME: &str = "libnvshmem_host.so.3";

type VersionFunction = unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int);

/// Name of a job. One rank makes it and sends it to all others before any of them joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId([u8; UniqueId::BYTES]);

impl UniqueId {
    /// Its size.
    pub const BYTES: usize = size_of::<nvshmemx_uniqueid_t>();

    /// Makes one of bytes that another rank sent.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> UniqueId {
        UniqueId(bytes)
    }

    /// The bytes to send.
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    fn from_raw(raw: nvshmemx_uniqueid_t) -> UniqueId {
        let mut bytes = [0; Self::BYTES];
        let (version, internal) = bytes.split_at_mut(size_of::<c_int>());
        version.copy_from_slice(&raw.version.to_ne_bytes());
        for (byte, character) in internal.iter_mut().zip(raw.internal) {
            *byte = character.to_ne_bytes()[0];
        }
        UniqueId(bytes)
    }

    fn to_raw(self) -> nvshmemx_uniqueid_t {
        let [a, b, c, d, ..] = self.0;
        let mut raw = empty_unique_id();
        raw.version = c_int::from_ne_bytes([a, b, c, d]);
        for (character, byte) in raw.internal.iter_mut().zip(&self.0[size_of::<c_int>()..]) {
            *character = c_char::from_ne_bytes([*byte]);
        }
        raw
    }
}

/// `NVSHMEMX_UNIQUEID_INITIALIZER`.
fn empty_unique_id() -> nvshmemx_uniqueid_t {
    nvshmemx_uniqueid_t {
        version: struct_version::<nvshmemx_uniqueid_t>(),
        internal: [0; 124],
    }
}

/// `NVSHMEMX_INIT_ATTR_INITIALIZER`.
fn empty_attributes() -> nvshmemx_init_attr_t {
    let uid_args = generated::nvshmemx_uniqueid_args_t {
        version: struct_version::<generated::nvshmemx_uniqueid_args_t>(),
        id: core::ptr::null_mut(),
        myrank: generated::UNIQUEID_ARGS_INVALID,
        nranks: generated::UNIQUEID_ARGS_INVALID,
    };
    let args = generated::nvshmemx_init_args_t {
        version: struct_version::<generated::nvshmemx_init_args_t>(),
        uid_args,
        content: [0; 96],
    };
    nvshmemx_init_attr_t {
        version: struct_version::<nvshmemx_init_attr_t>(),
        mpi_comm: core::ptr::null_mut(),
        args,
    }
}

/// NVSHMEM's version of a struct: `(1 << 16) + size`.
const fn struct_version<T>() -> c_int {
    (1 << 16) + size_of::<T>() as c_int
}

/// The loaded host library, of the version that the kernels are linked with.
///
/// Stays loaded until the process ends, because NVSHMEM keeps threads and exit handlers. So does a library
/// that [`load`](Self::load) refused, because its constructors have run.
pub struct HostLibrary {
    functions: ManuallyDrop<HostFunctions>,
}

impl HostLibrary {
    /// Loads the library from `path`, or, if it is `None`, [`SONAME`] from the paths that the system's loader
    /// searches.
    ///
    /// # Errors
    ///
    /// The library is missing, lacks a function, or is not of [`LINKED_VERSION`].
    pub fn load(path: Option<&Path>) -> Result<HostLibrary, LoadError> {
        let file = path.unwrap_or(Path::new(SONAME));
        let name = || format!("{}", file.display());
        let failed = |source| LoadError::Library {
            library: name(),
            source,
        };
        // SAFETY: loading NVSHMEM runs its constructors, which touch nothing of this program.
        let kept = unsafe { libloading::Library::new(file) }.map_err(failed)?;
        // The loader counts its users: one that is never closed keeps even a library that is refused below.
        core::mem::forget(kept);
        // SAFETY: the library is loaded already, so no constructor runs.
        let library = unsafe { libloading::Library::new(file) }.map_err(failed)?;
        let found = version_of(&library).map_err(failed)?;
        if found != LINKED_VERSION {
            return Err(version_error(name(), found));
        }
        // SAFETY: a library of this version has the signatures that bindgen read.
        let functions = unsafe { HostFunctions::from_library(library) }.map_err(failed)?;
        Ok(HostLibrary {
            functions: ManuallyDrop::new(functions),
        })
    }

    /// All functions as NVSHMEM declares them.
    pub fn functions(&self) -> &HostFunctions {
        &self.functions
    }

    /// Makes the name of a new job. To be called by one rank.
    ///
    /// # Errors
    ///
    /// NVSHMEM's status.
    pub fn new_unique_id(&self) -> Result<UniqueId, CallError> {
        let mut raw = empty_unique_id();
        // SAFETY: the pointer is to a struct of the size that its version says.
        let status = unsafe { self.functions.nvshmemx_get_uniqueid(&mut raw) };
        check("nvshmemx_get_uniqueid", status)?;
        Ok(UniqueId::from_raw(raw))
    }

    /// Joins the job `id` as `rank` of `ranks`. Collective: waits until all `ranks` ranks have called it.
    ///
    /// # Safety
    ///
    /// The context of this rank's GPU is current in the calling thread, NVSHMEM is not initialised in this
    /// process, and no other thread uses it meanwhile.
    ///
    /// # Errors
    ///
    /// NVSHMEM's status.
    pub unsafe fn init(&self, id: &UniqueId, rank: i32, ranks: i32) -> Result<(), CallError> {
        const WITH_UNIQUEID: c_uint = generated::flags::NVSHMEMX_INIT_WITH_UNIQUEID as c_uint;
        let id = id.to_raw();
        let mut attributes = empty_attributes();
        // SAFETY: both pointers are to structs of the size that their versions say.
        let status = unsafe {
            self.functions
                .nvshmemx_set_attr_uniqueid_args(rank, ranks, &id, &mut attributes)
        };
        check("nvshmemx_set_attr_uniqueid_args", status)?;
        // SAFETY: context and threads are as documented on this function; `id`, to which the attributes
        // point, lives until the call returns.
        let status = unsafe {
            self.functions
                .nvshmemx_hostlib_init_attr(WITH_UNIQUEID, &mut attributes)
        };
        check("nvshmemx_hostlib_init_attr", status)
    }

    /// Leaves the job. Collective.
    ///
    /// # Safety
    ///
    /// NVSHMEM is initialised, and nothing uses its memory any more.
    pub unsafe fn finalize(&self) {
        // SAFETY: NVSHMEM is initialised and its memory unused: documented on this function.
        unsafe { self.functions.nvshmemx_hostlib_finalize() }
    }

    /// Lets the kernels of a loaded module call NVSHMEM. To be called once per module, after
    /// [`HostLibrary::init`].
    ///
    /// # Safety
    ///
    /// `module` is loaded in the current CUDA context and holds NVSHMEM's device state.
    ///
    /// # Errors
    ///
    /// NVSHMEM's status.
    pub unsafe fn register_module(&self, module: *mut c_void) -> Result<(), CallError> {
        // SAFETY: `module` is loaded and holds NVSHMEM's device state: documented on this function.
        let status = unsafe { self.functions.nvshmemx_cumodule_init(module.cast()) };
        check("nvshmemx_cumodule_init", status)
    }

    /// Undoes [`HostLibrary::register_module`], before the module is unloaded.
    ///
    /// # Safety
    ///
    /// `module` is registered, and no kernel of it runs.
    ///
    /// # Errors
    ///
    /// NVSHMEM's status.
    pub unsafe fn unregister_module(&self, module: *mut c_void) -> Result<(), CallError> {
        // SAFETY: `module` is registered and unused: documented on this function.
        let status = unsafe { self.functions.nvshmemx_cumodule_finalize(module.cast()) };
        check("nvshmemx_cumodule_finalize", status)
    }
}

impl core::fmt::Debug for HostLibrary {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter
            .debug_struct("HostLibrary")
            .field("version", &LINKED_VERSION)
            .finish()
    }
}

fn version_of(library: &libloading::Library) -> Result<(u32, u32, u32), libloading::Error> {
    // SAFETY: the function has this signature in every version of NVSHMEM.
    let function =
        unsafe { library.get::<VersionFunction>(b"nvshmemx_vendor_get_version_info\0") }?;
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: the function only writes the three integers, which live.
    unsafe { function(&mut major, &mut minor, &mut patch) };
    let [major, minor, patch] = [major, minor, patch].map(c_int::unsigned_abs);
    Ok((major, minor, patch))
}

fn version_error(library: String, found: (u32, u32, u32)) -> LoadError {
    LoadError::Version {
        library,
        found,
        linked: LINKED_VERSION,
    }
}

fn check(function: &'static str, status: c_int) -> Result<(), CallError> {
    if status == 0 {
        Ok(())
    } else {
        Err(CallError { function, status })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::process::Command;
    use std::string::ToString;

    /// Whether a file is loaded into this process.
    fn is_loaded(library: &Path) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains(library.to_str().unwrap())
    }

    /// Compiles a stand-in for the host library whose only function is that of its version, and returns its
    /// path. `version`: C statements that store the numbers in `*a`, `*b` and `*c`.
    fn stand_in(folder: &Path, version: &str) -> PathBuf {
        let (source, library) = (folder.join("a.c"), folder.join(SONAME));
        let code = format!(
            "void nvshmemx_vendor_get_version_info(int *a, int *b, int *c) {{ {version} }}"
        );
        std::fs::write(&source, code).unwrap();
        let compiled = Command::new("cc")
            .args(["-shared", "-o"])
            .arg(&library)
            .arg(&source)
            .status();
        assert!(compiled.unwrap().success());
        library
    }

    #[test]
    fn a_missing_library_is_named_with_the_command_that_gets_it() {
        let error = HostLibrary::load(Some(Path::new("no/such/library.so"))).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("no/such/library.so") && text.contains("pip install"),
            "{text}"
        );
    }

    #[test]
    fn a_library_of_another_version_is_refused_with_both_named() {
        let folder = tempfile::tempdir().unwrap();
        let library = stand_in(folder.path(), "*a = 3; *b = 3; *c = 9;");
        let text = HostLibrary::load(Some(&library)).unwrap_err().to_string();
        assert!(text.contains("3.3.9") && text.contains("3.4.5"), "{text}");
        assert!(is_loaded(&library), "unloaded after its constructors ran");
    }

    #[test]
    fn a_library_that_lacks_a_function_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let library = stand_in(folder.path(), "*a = 3; *b = 4; *c = 5;");
        let error = HostLibrary::load(Some(&library)).unwrap_err();
        assert!(matches!(error, LoadError::Library { .. }), "{error}");
        assert!(is_loaded(&library), "unloaded after its constructors ran");
    }

    #[test]
    fn a_unique_id_survives_the_way_through_bytes() {
        let mut raw = empty_unique_id();
        raw.internal[0] = -5;
        raw.internal[123] = 7;
        let sent = UniqueId::from_raw(raw).to_bytes();
        let received = UniqueId::from_bytes(sent).to_raw();
        assert_eq!(received.version, (1 << 16) + 128);
        assert_eq!((received.internal[0], received.internal[123]), (-5, 7));
    }

    #[test]
    fn the_attributes_name_their_own_sizes() {
        let attributes = empty_attributes();
        assert_eq!(attributes.version, (1 << 16) + 144);
        assert_eq!(attributes.args.version, (1 << 16) + 128);
        assert_eq!(attributes.args.uid_args.version, (1 << 16) + 24);
    }
}
