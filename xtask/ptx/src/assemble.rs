//! Assembles PTX with `ptxas` and reads back each kernel's registers and memory.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ferry_build::{
    Error, FileContext, Result, Stamp, Variant, output_of, site_packages, stdout_of,
};

use crate::wheels::NVCC;

/// The release whose register counts the digest holds.
const PTXAS_RELEASE: &str = "release 13.0";

/// Resources of a kernel, as `ptxas` reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// 32-bit registers a thread.
    pub registers: u32,
    /// Stack of a thread.
    pub stack_bytes: u32,
    /// Bytes of registers spilled to the stack.
    pub spill_store_bytes: u32,
    /// Bytes of spilled registers read back.
    pub spill_load_bytes: u32,
    /// Static shared memory of a block.
    pub shared_bytes: u32,
}

/// Finds `ptxas` of CUDA 13.0: on `PATH`, in Python's site-packages, or fetched with pip. Other releases
/// count other registers.
fn ptxas(target_dir: &Path) -> Result<PathBuf> {
    let wheel_file = |folder: PathBuf| folder.join("nvidia/cu13/bin/ptxas");
    let is_found = |program: &PathBuf| program.is_file() && is_wanted_release(program);
    let path = env::var_os("PATH").unwrap_or_default();
    let mut on_path = env::split_paths(&path).map(|folder| folder.join("ptxas"));
    let mut installed = on_path
        .find(|program| program.is_file())
        .into_iter()
        .chain(NVCC.fetched(target_dir).map(wheel_file));
    if let Some(program) = installed.find(is_found) {
        return Ok(program);
    }
    // Asked last: it starts Python.
    let packaged = site_packages().into_iter().map(wheel_file).find(is_found);
    packaged.map_or_else(|| Ok(wheel_file(NVCC.fetch(target_dir)?)), Ok)
}

fn is_wanted_release(program: &Path) -> bool {
    let version = stdout_of(Command::new(program).arg("--version"), missing_ptxas);
    let wanted = version
        .as_ref()
        .is_ok_and(|text| text.contains(PTXAS_RELEASE));
    if !wanted {
        eprintln!("not used: {} is not of CUDA 13.0", program.display());
    }
    wanted
}

/// Assembles the PTX and returns every kernel's resources, sorted by name.
///
/// Writes the machine code beside the PTX, as `.cubin`. An unchanged file is not assembled again.
///
/// # Errors
///
/// `ptxas` is missing or rejects the PTX.
pub fn assemble(
    ptx_path: &Path,
    variant: Variant,
    target_dir: &Path,
) -> Result<BTreeMap<String, Resources>> {
    let mut stamp = Stamp::new();
    stamp.text(PTXAS_RELEASE);
    stamp.file(ptx_path)?;
    let stamp = stamp.finish();
    let kept_path = ptx_path.with_extension("ptxas");
    let kept = fs::read_to_string(&kept_path).unwrap_or_default();
    if let Some(report) = kept.strip_prefix(&stamp) {
        return parse_report(report);
    }
    let mut command = Command::new(ptxas(target_dir)?);
    command
        .args(["--verbose", "--gpu-name", variant.target_cpu()])
        .args(["--maxrregcount", &ferry_layout::MAX_REGISTERS.to_string()])
        .arg(ptx_path)
        .arg("--output-file")
        .arg(ptx_path.with_extension("cubin"));
    let output = output_of(&mut command, missing_ptxas)?;
    let report = [output.stdout, output.stderr].concat();
    let report = String::from_utf8_lossy(&report);
    let resources = parse_report(&report)?;
    fs::write(&kept_path, format!("{stamp}\n{report}")).file("write", &kept_path)?;
    Ok(resources)
}

fn missing_ptxas() -> Error {
    Error::MissingTool {
        tool: "ptxas of CUDA 13.0".into(),
        needed_for: "it checks the PTX and counts registers",
        get: NVCC.get_command(),
    }
}

/// Reads `ptxas --verbose`.
fn parse_report(report: &str) -> Result<BTreeMap<String, Resources>> {
    let mut kernels = BTreeMap::new();
    let mut entry: Option<String> = None;
    let mut properties_of: Option<String> = None;
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or(rest).to_owned();
            kernels.insert(name.clone(), Resources::default());
            entry = Some(name);
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            properties_of = Some(name.trim().to_owned());
        } else if line.contains("bytes stack frame") {
            if let Some(kernel) = properties_of.take().and_then(|name| kernels.get_mut(&name)) {
                kernel.stack_bytes = number_before(line, " bytes stack frame")?;
                kernel.spill_store_bytes = number_before(line, " bytes spill stores")?;
                kernel.spill_load_bytes = number_before(line, " bytes spill loads")?;
            }
        } else if line.contains(" registers")
            && let Some(kernel) = entry.take().and_then(|name| kernels.get_mut(&name))
        {
            kernel.registers = number_before(line, " registers")?;
            kernel.shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
            // Includes the stack of the functions that it calls.
            let cumulative = number_before(line, " bytes cumulative stack size").unwrap_or(0);
            kernel.stack_bytes = kernel.stack_bytes.max(cumulative);
        }
    }
    Ok(kernels)
}

/// The number right before `unit`.
fn number_before(line: &str, unit: &str) -> Result<u32> {
    let number = line
        .split_once(unit)
        .and_then(|(before, _)| before.rsplit([' ', ',']).next())
        .and_then(|word| word.parse().ok());
    number.ok_or_else(|| Error::Parse {
        what: "the report of ptxas",
        detail: format!("no number before `{}` in `{}`", unit.trim(), line.trim()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\
ptxas info    : 0 bytes gmem, 788 bytes cmem[3]
ptxas info    : Compiling entry function 'put' for 'sm_80'
ptxas info    : Function properties for put
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 27 registers, used 1 barriers, 24 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 28.989 ms
ptxas info    : Function properties for _Z28helper
    96 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'plain' for 'sm_80'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
";

    #[test]
    fn each_kernels_resources_are_read() {
        let kernels = parse_report(REPORT).unwrap();
        assert_eq!(kernels.keys().collect::<Vec<_>>(), ["plain", "put"]);
        let put = Resources {
            registers: 27,
            stack_bytes: 24,
            spill_store_bytes: 8,
            spill_load_bytes: 4,
            shared_bytes: 512,
        };
        assert_eq!(kernels["put"], put);
        assert_eq!(
            kernels["plain"],
            Resources {
                registers: 16,
                ..Resources::default()
            }
        );
    }

    #[test]
    fn a_report_without_its_numbers_is_an_error() {
        let broken = REPORT.replace("16 bytes stack frame", "many bytes stack frame");
        assert!(
            parse_report(&broken)
                .unwrap_err()
                .to_string()
                .contains("stack frame")
        );
    }
}
