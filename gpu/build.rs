//! Sets the generation for which the kernels are compiled, in a form that does not depend on the code
//! generator: `cfg(ferry_sm = "90")` holds for sm_90 and every architecture that has all its instructions.
//! Each compiler has its own names for this, and one of them does not know the generation at all.
//!
//! The stock compiler reports it in its target features. `rustc_codegen_nvvm` compiles for a generation that
//! it supports, and `cargo xtask build-ptx --backend nvvm` names the intended one in `FERRY_NVVM_ARCH`. Then
//! `cfg(ferry_nvvm)` holds, too.

use std::env;

/// Generations that the sources test for, and the architectures that have their instructions.
const GENERATIONS: [(&str, &[&str]); 3] = [
    ("89", &["sm_90a", "sm_100a"]),
    ("90", &["sm_90a", "sm_100a"]),
    ("100a", &["sm_100a"]),
];

fn main() {
    println!("cargo::rerun-if-env-changed=FERRY_NVVM_ARCH");
    println!(r#"cargo::rustc-check-cfg=cfg(ferry_sm, values("89", "90", "100a"))"#);
    println!("cargo::rustc-check-cfg=cfg(ferry_nvvm)");
    let nvvm = env::var("FERRY_NVVM_ARCH").ok();
    if let Some(architecture) = &nvvm {
        let is_known = GENERATIONS
            .iter()
            .any(|(_, has_it)| has_it.contains(&architecture.as_str()));
        assert!(
            is_known,
            "FERRY_NVVM_ARCH is {architecture}, not sm_90a or sm_100a"
        );
        println!("cargo::rustc-cfg=ferry_nvvm");
    }
    let features = env::var("CARGO_CFG_TARGET_FEATURE").unwrap_or_default();
    for (generation, architectures) in GENERATIONS {
        let has_it = match &nvvm {
            Some(architecture) => architectures.contains(&architecture.as_str()),
            None => features
                .split(',')
                .any(|feature| feature == format!("sm_{generation}")),
        };
        if has_it {
            println!(r#"cargo::rustc-cfg=ferry_sm="{generation}""#);
        }
    }
}
