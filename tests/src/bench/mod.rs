//! The benchmark: what dispatch and combine cost on GPUs, beside what the machine can do.
//!
//! Per number of tokens it measures GPU time of each call (`round`), the period of pairs in a
//! CUDA graph, and host time of each call; then checks the results (`verify`). In the same run
//! it measures copies over the wire, signals and launches (`limits`) and NCCL (`nccl`), and if
//! asked for a whole layer with its experts (`layer`), and what it takes to make communicators (`set_up`).
//! All of it is timed in one way (`rig`), in one process with a thread a GPU or in a process a GPU
//! (`processes`).

pub mod against;
pub mod meeting;
pub mod options;
pub mod predict;
pub mod processes;
pub mod record;
pub mod routing;
pub mod samples;
pub mod sink;
pub mod statistics;
pub mod traffic;

#[cfg(feature = "cudarc")]
pub(crate) mod layer;
#[cfg(feature = "cuda")]
mod limits;
#[cfg(feature = "cuda")]
mod local;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(feature = "cuda")]
mod rig;
#[cfg(feature = "cuda")]
mod round;
#[cfg(feature = "cuda")]
mod run;
#[cfg(feature = "cuda")]
mod set_up;
#[cfg(feature = "cuda")]
mod silu;
#[cfg(feature = "cuda")]
mod verify;
#[cfg(feature = "cuda")]
mod with_options;

pub use options::BenchArgs;

/// Runs the benchmark.
///
/// # Errors
/// No GPUs, a wrong result, or what the library reports.
pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    match &args.against {
        Some(other) => {
            anyhow::ensure!(
                args.group == crate::group::GroupKind::Local,
                "--against: one process starts all runs, of ranks of one process each (--group local)"
            );
            against::run(other, args.turns, args.json.as_deref())
        }
        None => measure(args),
    }
}

#[cfg(feature = "cuda")]
fn measure(args: &BenchArgs) -> anyhow::Result<()> {
    run::run(&args.clone().resolved())
}

#[cfg(not(feature = "cuda"))]
fn measure(_args: &BenchArgs) -> anyhow::Result<()> {
    anyhow::bail!("the benchmark needs GPUs, and this program was built without the feature `cuda`")
}
