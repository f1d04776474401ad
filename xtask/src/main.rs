//! Commands of `cargo xtask`, except the demo: builds the kernels, tests, packs, and keeps the tree tidy.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};
use ferry_build::Variant;

mod bench;
#[cfg(feature = "bindgen")]
mod bindgen;
mod build_ptx;
mod builds;
mod c_library;
mod candle;
mod commit;
mod compare_ptx;
mod cuda_stub;
mod dist;
mod generated;
mod package;
mod places;
mod python;
mod report;
mod soak;
mod test;
mod tidy;

use places::Places;

/// Tasks of the Ferry workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", version, about)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Compile the kernels to PTX, assemble them, and print the resources of each
    BuildPtx {
        /// Only this architecture: sm_80, sm_90a or sm_100a (default: all)
        #[arg(long)]
        arch: Option<Variant>,
        /// Compiler: the stock one, or rustc_codegen_nvvm for sm_90a and sm_100a
        ///
        /// rustc_codegen_nvvm's PTX goes below target/nvvm/ptx: the kernels to ARCH.ptx, those with options
        /// to options/ARCH.ptx, those for rows that stay as they came to rows/ARCH.ptx, the probes to
        /// probes/ARCH.ptx. `ferry-tests gpu` and `ferry-tests bench` take them by --kernels,
        /// --options-kernels, --rows-kernels and --probe-kernels.
        #[arg(
            long,
            value_enum,
            default_value = "stock",
            conflicts_with = "manifest_path"
        )]
        backend: build_ptx::Backend,
        /// A checkout of rust-cuda, for its rustc_codegen_nvvm
        #[arg(long, value_name = "PATH", required_if_eq("backend", "nvvm"))]
        rust_cuda: Option<PathBuf>,
        /// Fail if the code differs from the committed digest
        #[arg(long, conflicts_with = "bless")]
        check: bool,
        /// Renew the committed digest
        #[arg(long)]
        bless: bool,
        /// Build the library of this manifest instead: a crate with its own kernels
        #[arg(long, value_name = "PATH", conflicts_with_all = ["check", "bless"])]
        manifest_path: Option<PathBuf>,
        /// Build nothing; compare two PTX files, or folders of them: exit code 1 if the code differs
        ///
        /// Mangled names, numbers of labels, comments, line tables and the order of functions do not count.
        #[arg(long, num_args = 2, value_names = ["A", "B"])]
        #[arg(conflicts_with_all = ["arch", "backend", "rust_cuda", "check", "bless", "manifest_path"])]
        compare: Option<Vec<PathBuf>>,
    },
    /// Generate nvshmem-sys/src/generated from NVSHMEM's headers
    Bindgen {
        /// Fail if the committed files are stale, and write nothing
        #[arg(long)]
        check: bool,
    },
    /// Check rules that no compiler checks
    Tidy,
    /// Run the tests that need no kernels, each case with some of its seeds: a few minutes
    Test {
        /// Run all tests that need no GPU, with all seeds, and compare the kernels with their digests
        #[arg(long, conflicts_with = "gpus")]
        full: bool,
        /// Run what `cargo xtask test` leaves out: --full without packages that draw no seeds, and
        /// have neither models of loom nor code for GPUs
        #[arg(long, conflicts_with_all = ["full", "gpus"])]
        rest: bool,
        /// Run the tests on this many GPUs, in one process and under mpirun
        #[arg(long, value_name = "N")]
        gpus: Option<u32>,
        /// Arguments of `ferry-tests all`, after --gpus N: --ranks R, --only SUITE, --list, --sanitize
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, requires = "gpus")]
        arguments: Vec<String>,
    },
    /// Carry a text's tokens to their experts and back (`cargo xtask demo --help` lists all)
    #[command(disable_help_flag = true)]
    Demo {
        /// Arguments of the demo
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure dispatch and combine on this machine's GPUs (`cargo xtask bench --help` lists all)
    #[command(disable_help_flag = true)]
    Bench {
        /// Measure nothing; generate BENCHMARKS.md from records in tests/benchmarks
        #[arg(long, conflicts_with = "arguments")]
        report: bool,
        /// Write nothing; fail if BENCHMARKS.md is stale
        #[arg(long, requires = "report")]
        check: bool,
        /// Arguments of `ferry-tests bench`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run rounds with fresh seeds, each compared with the oracle (`cargo xtask soak --help` lists all)
    #[command(disable_help_flag = true)]
    Soak {
        /// Arguments of `ferry-tests soak`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    #[command(flatten)]
    C(c_library::Task),
    #[command(flatten)]
    Python(python::Task),
    /// Run clippy with the feature `candle`, with an nvcc that writes empty files
    CheckCandle,
    /// Print a folder for CUDA_LIBRARY_PATH, to build with the feature `cust` without CUDA
    CudaStub,
    /// Pack the test program for a GPU machine without cargo: target/dist/ferry-tests.tar.gz
    Dist {
        /// Only the features `candle` and `cudarc`: nvcc compiles candle's kernels, which takes many minutes,
        /// and the program links CUDA's libraries. `CUDA_HOME` names a CUDA installation (default: fetched
        /// wheels), and `CUDA_COMPUTE_CAP` the compute capability (default: 90)
        #[arg(long)]
        candle: bool,
    },
    /// Pack the published crates, with PTX, in target/crates; build a project that depends on them
    Package {
        /// Also assemble the PTX, and build with the feature `nvshmem`, which compiles kernels: takes minutes
        #[arg(long)]
        full: bool,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().task, &Places::find()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task, places: &Places) -> Result<ExitCode> {
    match task {
        // These two report failures themselves, and end with a line that counts them.
        Task::Test {
            gpus: None,
            full: true,
            ..
        } => return test::run(places, test::Extent::Full),
        Task::Test {
            gpus: None,
            rest: true,
            ..
        } => return test::run(places, test::Extent::Rest),
        // Listed here for --help: the front door runs it without building this program.
        Task::Test { gpus: None, .. } => return Ok(xtask_front::quick::run()?),
        Task::Test {
            gpus: Some(count),
            arguments,
            ..
        } => return dist::run_suites(places, count, &arguments),
        // Listed here for --help: the front door runs it without building this program.
        Task::Demo { arguments } => {
            let status = xtask_front::demo(&arguments)?;
            ensure!(status.success(), "the demo failed");
        }
        Task::BuildPtx {
            compare: Some(paths),
            ..
        } => return compare_ptx::run(&paths[0], &paths[1]),
        Task::BuildPtx {
            arch,
            manifest_path: Some(manifest),
            ..
        } => build_ptx::run_own(places, &manifest, arch)?,
        Task::BuildPtx {
            arch,
            check,
            bless,
            backend: build_ptx::Backend::Nvvm,
            rust_cuda: Some(checkout),
            ..
        } => build_ptx::run_nvvm(places, &checkout, arch, build_ptx::Mode::of(check, bless))?,
        Task::BuildPtx {
            arch, check, bless, ..
        } => build_ptx::run(places, arch, build_ptx::Mode::of(check, bless))?,
        Task::Bindgen { check } => generate_bindings(places, check)?,
        Task::Tidy => tidy::run(&places.root)?,
        Task::Bench {
            report: true,
            check,
            ..
        } => report::run(&places.root, check)?,
        Task::Bench { arguments, .. } => bench::run(places, &arguments)?,
        Task::Soak { arguments } => soak::run(places, &arguments)?,
        Task::C(task) => c_library::run(places, &task)?,
        Task::Python(task) => python::run(places, &task)?,
        Task::CheckCandle => candle::check(places)?,
        Task::CudaStub => {
            println!("{}", cuda_stub::folder(places)?.display());
        }
        Task::Dist { candle: false } => dist::run(places)?,
        Task::Dist { candle: true } => candle::dist(places)?,
        Task::Package { full } => package::run(places, full)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(feature = "bindgen")]
fn generate_bindings(places: &Places, check: bool) -> Result<()> {
    bindgen::run(&places.root, &places.target_dir, check)
}

/// bindgen takes a minute to compile, so only this command builds xtask with it.
#[cfg(not(feature = "bindgen"))]
fn generate_bindings(places: &Places, check: bool) -> Result<()> {
    let shell = xshell::Shell::new()?;
    shell.change_dir(&places.root);
    let check = check.then_some("--check");
    let with_bindgen = ["--package", "xtask", "--features", "bindgen"];
    xshell::cmd!(
        shell,
        "cargo run --quiet {with_bindgen...} -- bindgen {check...}"
    )
    .quiet()
    .run()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn arguments_of_other_programs_pass_through() {
        let passed_on = |given: &str| {
            let words = std::iter::once("xtask").chain(given.split(' '));
            match Arguments::try_parse_from(words).unwrap().task {
                Task::Demo { arguments } => arguments,
                Task::Test {
                    gpus: Some(1),
                    arguments,
                    ..
                } => arguments,
                _ => panic!("another task"),
            }
        };
        let given = "--ranks 2 --only memcheck --only racecheck --list --sanitize";
        let words: Vec<&str> = given.split(' ').collect();
        assert_eq!(passed_on(&format!("demo {given} --help")).len(), 9);
        assert_eq!(passed_on(&format!("test --gpus 1 {given}")), words);
        assert!(Arguments::try_parse_from(["xtask", "test", "--list"]).is_err());
    }

    #[test]
    fn the_benchmark_reports_or_passes_its_arguments_through() {
        let parse = |arguments: &[&str]| {
            let start = ["xtask", "bench"].into_iter();
            let all = start.chain(arguments.iter().copied());
            let Task::Bench {
                report,
                check,
                arguments,
            } = Arguments::try_parse_from(all).unwrap().task
            else {
                panic!("not the benchmark")
            };
            (report, check, arguments.len())
        };
        assert_eq!(parse(&["--quick", "--json", "a.jsonl"]), (false, false, 3));
        assert_eq!(parse(&["--help"]), (false, false, 1));
        assert_eq!(parse(&["--report", "--check"]), (true, true, 0));
    }
}
