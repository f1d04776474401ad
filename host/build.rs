//! Finds or builds the kernels with the feature `cuda`, and passes on where their PTX is.

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}

#[cfg(feature = "cuda")]
fn main() -> std::process::ExitCode {
    use ferry_build::{Package, embed};

    // Those of one node have nothing of NVSHMEM.
    let packages = match cfg!(feature = "nvshmem") {
        true => [Package::Kernels, Package::Options, Package::Rows],
        false => [
            Package::NodeKernels,
            Package::NodeOptions,
            Package::NodeRows,
        ],
    };
    match embed(&packages) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            // As its `Display`, whose lines cargo shows one by one.
            eprintln!("cannot build the kernels: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
