//! `cargo xtask bindgen`: generates `nvshmem-sys/src/generated` from NVSHMEM's headers.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use ferry_build::{DEVICE_FUNCTIONS, Wheel};
use ferry_ptx_tools::wheels::{CCCL, CRT, RUNTIME};

/// Host functions that `nvshmem-sys` loads. `cargo xtask bindgen` generates no other host functions.
const HOST_FUNCTIONS: [&str; 17] = [
    "nvshmemx_get_uniqueid",
    "nvshmemx_set_attr_uniqueid_args",
    "nvshmemx_hostlib_init_attr",
    "nvshmemx_hostlib_finalize",
    "nvshmemx_init_status",
    "nvshmemx_cumodule_init",
    "nvshmemx_cumodule_finalize",
    "nvshmemx_vendor_get_version_info",
    "nvshmemx_barrier_all_on_stream",
    "nvshmem_barrier_all",
    "nvshmem_my_pe",
    "nvshmem_n_pes",
    "nvshmem_malloc",
    "nvshmem_calloc",
    "nvshmem_align",
    "nvshmem_free",
    "nvshmem_ptr",
];

/// Types and constants of the host half that are in no function's signature.
const HOST_ITEMS: &str = "nvshmemx_init_status_t|flags|UNIQUEID_ARGS_INVALID";

/// Types of the device half that are in no function's signature.
const DEVICE_ITEMS: &str = "nvshmemi_device_host_state_v1|CHANNEL_BUF_SIZE_LOG";

/// Generates the bindings, or with `check` compares them with the committed ones.
pub fn run(root: &Path, target_dir: &Path, check: bool) -> Result<()> {
    let headers = Headers::fetch(target_dir)?;
    let folder = root.join("nvshmem-sys/src/generated");
    let halves = [
        ("host.rs", host_half(&headers)?),
        ("device.rs", device_half(&headers)?),
    ];
    let mut stale = Vec::new();
    for (name, text) in halves {
        let path = folder.join(name);
        if check {
            if fs::read_to_string(&path).unwrap_or_default() != text {
                stale.push(name);
            }
        } else {
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    if !stale.is_empty() {
        bail!(
            "stale: {}; renew with `cargo xtask bindgen`",
            stale.join(", ")
        );
    }
    println!(
        "nvshmem-sys/src/generated is {}",
        if check { "fresh" } else { "written" }
    );
    Ok(())
}

/// Include folders of the four wheels.
struct Headers {
    include_folders: Vec<PathBuf>,
}

impl Headers {
    fn fetch(target_dir: &Path) -> Result<Headers> {
        let mut include_folders = vec![
            Wheel::NVSHMEM
                .fetch(target_dir)?
                .join("nvidia/nvshmem/include"),
        ];
        for wheel in [RUNTIME, CRT, CCCL] {
            let include = wheel.fetch(target_dir)?.join("nvidia/cu13/include");
            include_folders.extend([include.join("cccl"), include]);
        }
        include_folders.retain(|folder| folder.is_dir());
        Ok(Headers { include_folders })
    }

    /// Settings that both halves share.
    fn builder(&self, name: &str, includes: &[&str]) -> Result<bindgen::Builder> {
        // The first compiler with the edition that the bindings are written in.
        let rust = bindgen::RustTarget::stable(85, 0)
            .map_err(|error| anyhow!("bindgen does not know Rust 1.85: {error}"))?;
        let source: String = includes
            .iter()
            .map(|file| format!("#include <{file}>\n"))
            .collect();
        let folders = self
            .include_folders
            .iter()
            .map(|folder| format!("-I{}", folder.display()));
        Ok(bindgen::builder()
            .rust_target(rust)
            .header_contents(name, &source)
            .clang_args(["-x", "c++", "-std=c++17"])
            .clang_args(folders)
            .rust_edition(bindgen::RustEdition::Edition2024)
            .disable_header_comment()
            .generate_comments(false)
            .default_enum_style(bindgen::EnumVariation::ModuleConsts)
            .wrap_unsafe_ops(true)
            .merge_extern_blocks(true)
            .sort_semantically(true)
            .formatter(bindgen::Formatter::Rustfmt))
    }
}

fn host_half(headers: &Headers) -> Result<String> {
    let builder = headers
        .builder("host_half.h", &["nvshmem_host.h", "nvshmemx.h"])?
        .allowlist_function(HOST_FUNCTIONS.join("|"))
        .allowlist_item(HOST_ITEMS)
        .dynamic_library_name("HostFunctions")
        .dynamic_link_require_all(true);
    generate(builder, "The host functions, loaded at run time.")
}

fn device_half(headers: &Headers) -> Result<String> {
    let builder = headers
        .builder("device_half.h", &["nvshmem.h", "nvshmemx.h"])?
        .allowlist_function(DEVICE_FUNCTIONS.join("|"))
        .allowlist_item(DEVICE_ITEMS)
        .use_core();
    generate(builder, "The device functions, linked as bitcode.")
}

fn generate(builder: bindgen::Builder, about: &str) -> Result<String> {
    let bindings = builder
        .generate()
        .context("bindgen failed; it needs libclang: `apt-get install libclang-19-dev`")?;
    Ok(format!(
        "//! {about}\n//! Generated by `cargo xtask bindgen` from NVSHMEM {}; do not edit.\n\n{}",
        Wheel::NVSHMEM.version,
        bindings
    ))
}
