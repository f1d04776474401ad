//! Names the library as NVSHMEM does, and keeps it loaded.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The loader takes a library that is preloaded for one that is opened by this name.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,nvshmem_transport_ucx.so.3");
    // Threads that end may have destructors in it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
