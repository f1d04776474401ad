//! Crates of kernels, their GPU generations, and the places of their PTX.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Environment variable with a folder of PTX to use instead of building any.
pub const FOLDER_VARIABLE: &str = "FERRY_PTX_DIR";

/// A GPU generation that PTX is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Variant {
    /// The portable variant: the driver compiles it for Ampere and later generations.
    Sm80,
    /// Hopper, with instructions that no other generation has.
    Sm90a,
    /// Blackwell, with instructions that no other generation has.
    Sm100a,
}

impl Variant {
    /// Every variant, oldest first.
    pub const ALL: [Variant; 3] = [Variant::Sm80, Variant::Sm90a, Variant::Sm100a];

    /// The name used by rustc, ptxas and file names.
    pub const fn target_cpu(self) -> &'static str {
        match self {
            Variant::Sm80 => "sm_80",
            Variant::Sm90a => "sm_90a",
            Variant::Sm100a => "sm_100a",
        }
    }

    /// The PTX version as the compiler's feature.
    ///
    /// Each is at most 9.0, which drivers of CUDA 13.0 accept, and the lowest with the features in use: 8.0
    /// has the cache hints, 8.3 is the version of NVSHMEM's own code, 8.6 is the first with sm_100a.
    pub const fn ptx_feature(self) -> &'static str {
        match self {
            Variant::Sm80 => "+ptx80",
            Variant::Sm90a => "+ptx83",
            Variant::Sm100a => "+ptx86",
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.target_cpu())
    }
}

/// A text that is not the name of a variant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is none of sm_80, sm_90a, sm_100a")]
pub struct UnknownVariant(String);

impl FromStr for Variant {
    type Err = UnknownVariant;

    fn from_str(text: &str) -> Result<Variant, UnknownVariant> {
        let found = Variant::ALL
            .into_iter()
            .find(|variant| variant.target_cpu() == text);
        found.ok_or_else(|| UnknownVariant(text.to_owned()))
    }
}

/// A crate of kernels, compiled to a PTX of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Package {
    /// `ferry-kernels`, with NVSHMEM: kernels embedded in a host library that has the feature `nvshmem`.
    Kernels,
    /// `ferry-options`, with NVSHMEM: kernels for launches with options, likewise.
    Options,
    /// `ferry-rows`, with NVSHMEM: kernels for rows that stay as they came, likewise.
    Rows,
    /// [`Kernels`](Self::Kernels) for one node, without NVSHMEM.
    NodeKernels,
    /// [`Options`](Self::Options) for one node, without NVSHMEM.
    NodeOptions,
    /// [`Rows`](Self::Rows) for one node, without NVSHMEM.
    NodeRows,
    /// `ferry-probes`: additional kernels of the tests and the benchmark.
    Probes,
    /// `ferry-own-epilogue`: kernels with a custom epilogue, for tests.
    OwnEpilogue,
}

impl Package {
    /// The package's name.
    pub const fn name(self) -> &'static str {
        match self {
            Package::Kernels | Package::NodeKernels => "ferry-kernels",
            Package::Options | Package::NodeOptions => "ferry-options",
            Package::Rows | Package::NodeRows => "ferry-rows",
            Package::Probes => "ferry-probes",
            Package::OwnEpilogue => "ferry-own-epilogue",
        }
    }

    /// The package that has these kernels, and beside them those that call NVSHMEM.
    pub(crate) const fn with_nvshmem(self) -> Option<Package> {
        match self {
            Package::NodeKernels => Some(Package::Kernels),
            Package::NodeOptions => Some(Package::Options),
            Package::NodeRows => Some(Package::Rows),
            _ => None,
        }
    }

    /// Folder of its PTX files.
    pub fn folder(self, target_dir: &Path) -> PathBuf {
        match self {
            Package::Kernels => target_dir.join("ptx"),
            Package::Options => target_dir.join("ptx/options"),
            Package::Rows => target_dir.join("ptx/rows"),
            Package::NodeKernels => target_dir.join("ptx/node"),
            Package::NodeOptions => target_dir.join("ptx/node/options"),
            Package::NodeRows => target_dir.join("ptx/node/rows"),
            Package::Probes => target_dir.join("ptx/probes"),
            Package::OwnEpilogue => target_dir.join("ptx/own-epilogue"),
        }
    }

    /// The middle of the variables that [`embed`](crate::embed()) sets.
    pub const fn variable(self) -> &'static str {
        match self {
            Package::Kernels | Package::NodeKernels | Package::Probes => "PTX",
            Package::Options | Package::NodeOptions => "OPTIONS_PTX",
            Package::Rows | Package::NodeRows => "ROWS_PTX",
            Package::OwnEpilogue => "EPILOGUE_PTX",
        }
    }

    /// Whether its kernels call NVSHMEM, to reach other nodes.
    pub const fn calls_nvshmem(self) -> bool {
        matches!(
            self,
            Package::Kernels | Package::Options | Package::Rows | Package::OwnEpilogue
        )
    }
}

/// One built PTX file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Package of its kernels.
    pub package: Package,
    /// GPU generation that it was built for.
    pub variant: Variant,
    /// The file `<variant>.ptx` in [`Package::folder`].
    pub ptx_path: PathBuf,
}

/// Place of a package's PTX in a folder of PTX.
pub fn place(package: Package, variant: Variant) -> String {
    match package {
        Package::Options | Package::NodeOptions => format!("options/{variant}.ptx"),
        Package::Rows | Package::NodeRows => format!("rows/{variant}.ptx"),
        _ => format!("{variant}.ptx"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_variants_go_both_ways() {
        for variant in Variant::ALL {
            assert_eq!(variant.target_cpu().parse::<Variant>().unwrap(), variant);
        }
        let text = "sm_70".parse::<Variant>().unwrap_err().to_string();
        assert!(text.contains("sm_70") && text.contains("sm_90a"), "{text}");
    }

    #[test]
    fn no_ptx_is_too_new_for_a_driver_of_cuda_13_0() {
        for variant in Variant::ALL {
            let version: u32 = variant
                .ptx_feature()
                .trim_start_matches("+ptx")
                .parse()
                .unwrap();
            assert!(version <= 90, "{variant} asks for {version}");
        }
    }
}
