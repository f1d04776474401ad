//! The library for C: its header, its installation and its tests.

use std::path::PathBuf;

use anyhow::Result;
use clap::Subcommand;

use crate::places::Places;

mod entries;
mod header;
mod package;
mod test;

/// Tasks of the library for C.
#[derive(Subcommand)]
pub(crate) enum Task {
    /// Generate host/c/include/ferry.h from host/c/src
    CHeader {
        /// Fail if the committed file is stale, and write nothing
        #[arg(long)]
        check: bool,
    },
    /// Build the library for C and install libferry.so, libferry.a, ferry.h and ferry.pc
    PackageC {
        /// Install into DIR/include, DIR/lib and DIR/lib/pkgconfig
        #[arg(long, value_name = "DIR")]
        prefix: PathBuf,
        /// Features of the package ferry-c: cuda, nvshmem
        #[arg(long, value_name = "FEATURES", default_value = "")]
        features: String,
    },
    /// Compile C programs against the header and run them in the simulator, also under AddressSanitizer
    TestC {
        /// Run nothing; build tests/c/round.c for a machine with GPUs that has only a driver
        #[arg(long, value_name = "PATH")]
        build: Option<PathBuf>,
        /// Features of the package ferry-c in that program
        #[arg(
            long,
            value_name = "FEATURES",
            default_value = "cuda",
            requires = "build"
        )]
        features: String,
    },
}

pub(crate) fn run(places: &Places, task: &Task) -> Result<()> {
    match task {
        Task::CHeader { check } => header::run(&places.root, *check),
        Task::PackageC { prefix, features } => {
            package::run(places, prefix, features, package::Profile::Release)
        }
        Task::TestC { build: None, .. } => test::run(places),
        Task::TestC {
            build: Some(program),
            features,
        } => test::build(places, program, features),
    }
}
