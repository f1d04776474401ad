//! Builds the probes with the feature `cuda`, and passes on where their PTX is.

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}

#[cfg(feature = "cuda")]
fn main() -> std::process::ExitCode {
    use ferry_build::{Package, embed};

    match embed(&[Package::Probes, Package::OwnEpilogue]) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            // As its `Display`, whose lines cargo shows one by one.
            eprintln!("cannot build the probes: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
