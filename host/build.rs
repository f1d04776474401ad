//! With the feature `cuda`, builds the kernels and says where their PTX lies.

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}

#[cfg(feature = "cuda")]
fn main() -> std::process::ExitCode {
    match build() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            // As its `Display`, whose lines cargo shows one by one.
            eprintln!("cannot build the kernels: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

#[cfg(feature = "cuda")]
fn build() -> Result<(), Box<dyn std::error::Error>> {
    let package = std::path::PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?);
    let root = package
        .parent()
        .ok_or("the package is not in a workspace")?;
    // What the builder looks at to tell whether its last result still holds.
    for path in [
        "gpu",
        "nvshmem-sys",
        "Cargo.toml",
        "Cargo.lock",
        "rust-toolchain.toml",
    ] {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    println!("cargo::rerun-if-env-changed=NVSHMEM_HOME");

    let target_dir = ferry_ptx_builder::target_dir(root);
    for artifact in ferry_ptx_builder::build_all(root, &target_dir)? {
        let name = artifact.variant.target_cpu().to_uppercase();
        println!("cargo::rerun-if-changed={}", artifact.ptx_path.display());
        println!(
            "cargo::rustc-env=FERRY_PTX_{name}={}",
            artifact.ptx_path.display()
        );
    }
    Ok(())
}
