//! Finds NVSHMEM's device bitcode and reduces it to the functions that the kernels call.
//!
//! The whole file is 31 MB and takes minutes to optimise; the functions in use take 10 kB.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest as _, Sha256};

use crate::command::output_of;
use crate::error::{Error, FileContext, Result};
use crate::stamp::Stamp;
use crate::wheel::{Wheel, site_packages};

/// Version of the linked device code, which the host library must match.
const NVSHMEM_VERSION: (u32, u32, u32) = (3, 4, 5);

/// NVSHMEM functions that kernels call. All that they do not need, but for the device state, is stripped
/// from the bitcode.
pub const DEVICE_FUNCTIONS: [&str; 3] = [
    "nvshmemx_putmem_nbi_warp",
    "nvshmem_putmem_nbi",
    "nvshmem_fence",
];

/// Variables that the host library writes when a module is registered.
const DEVICE_STATE: [&str; 2] = ["nvshmemi_device_state_d", "nvshmemi_device_lib_version_d"];

/// Sums of [`NVSHMEM_VERSION`]'s bitcode in [`Wheel::NVSHMEM`] for x86_64 and for aarch64. The reduced
/// files differ only in paths of sources.
const BITCODE_SHA256: [&str; 2] = [
    "39ed77a212066c98689a2cf003a889ddd6433a4a90cdb9ced08642db5ff4526b",
    "9281a1361d05365fd37b217f9ca98f9e3ae765b25e5a8c79a5c5dadee9d83389",
];

/// Place of the bitcode below an NVSHMEM folder.
const BITCODE: &str = "lib/libnvshmem_device.bc";

/// Returns the reduced bitcode file to link, made on first use and kept under `target_dir`.
pub fn device_bitcode(
    target_dir: &Path,
    llvm_tools: impl FnOnce() -> Result<PathBuf>,
) -> Result<PathBuf> {
    let (home, reduced) = (home(), reduced(target_dir)?);
    if reduced.is_file() {
        return Ok(reduced);
    }
    let folder = reduced.parent().unwrap_or(target_dir);
    fs::create_dir_all(folder).file("create", folder)?;
    let tools = llvm_tools()?;
    match home {
        Some(home) => reduce_checked(&tools, &home_bitcode(&home)?, &reduced)?,
        None => reduce_found(&tools, target_dir, &reduced)?,
    }
    Ok(reduced)
}

/// The reduced bitcode file, if it was made before.
pub(crate) fn kept_bitcode(target_dir: &Path) -> Result<Option<PathBuf>> {
    let reduced = reduced(target_dir)?;
    Ok(reduced.is_file().then_some(reduced))
}

/// Path of the reduced bitcode file.
pub(crate) fn reduced(target_dir: &Path) -> Result<PathBuf> {
    let key = cache_key(home().as_deref())?;
    Ok(target_dir.join(format!("nvshmem/{key}.bc")))
}

fn home() -> Option<PathBuf> {
    env::var_os("NVSHMEM_HOME").map(PathBuf::from)
}

/// Names a reduced file after its inputs.
fn cache_key(home: Option<&Path>) -> Result<String> {
    let mut stamp = Stamp::new();
    stamp.text(&DEVICE_FUNCTIONS.join(","));
    stamp.text(include_str!("nvshmem.rs"));
    if let Some(home) = home {
        let bitcode = home_bitcode(home)?;
        let metadata = fs::metadata(&bitcode).file("read", &bitcode)?;
        stamp.text(&format!(
            "{} {} {:?}",
            bitcode.display(),
            metadata.len(),
            metadata.modified()
        ));
    }
    Ok(stamp.finish())
}

fn home_bitcode(home: &Path) -> Result<PathBuf> {
    let bitcode = home.join(BITCODE);
    if bitcode.is_file() {
        Ok(bitcode)
    } else {
        Err(Error::NvshmemHome { home: home.into() })
    }
}

/// Reduces the bitcode of the wheel in site-packages if its version is right, else of one that is fetched.
fn reduce_found(tools: &Path, target_dir: &Path, reduced: &Path) -> Result<()> {
    let folder = match installed(site_packages()) {
        Some(packages) => packages,
        None => Wheel::NVSHMEM.fetch(target_dir)?,
    };
    reduce_checked(tools, &folder.join("nvidia/nvshmem").join(BITCODE), reduced)
}

/// The first folder of packages that has the wheel.
fn installed(packages: impl IntoIterator<Item = PathBuf>) -> Option<PathBuf> {
    packages
        .into_iter()
        .find(|folder| Wheel::NVSHMEM.is_in(folder))
}

/// Reduces `bitcode` to [`DEVICE_FUNCTIONS`], if its sum is known.
fn reduce_checked(tools: &Path, bitcode: &Path, reduced: &Path) -> Result<()> {
    check_sum(bitcode)?;
    let scratch = reduced.with_extension(format!("partial-{}", std::process::id()));
    fs::create_dir_all(&scratch).file("create", &scratch)?;
    let outcome = reduce(tools, bitcode, &scratch)
        .and_then(|small| fs::rename(&small, reduced).file("move into place", reduced));
    fs::remove_dir_all(&scratch).file("remove", &scratch)?;
    outcome
}

/// Refuses bitcode that is not NVIDIA's, before any tool reads it.
fn check_sum(bitcode: &Path) -> Result<()> {
    let sum = Sha256::digest(fs::read(bitcode).file("read", bitcode)?);
    let found: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    if BITCODE_SHA256.contains(&found.as_str()) {
        return Ok(());
    }
    Err(Error::NvshmemSum {
        path: bitcode.into(),
        found,
        wanted: BITCODE_SHA256.join(" or "),
        get: Wheel::NVSHMEM.get_command(),
    })
}

fn reduce(tools: &Path, bitcode: &Path, scratch: &Path) -> Result<PathBuf> {
    let path = |name: &str| scratch.join(name);
    fs::write(path("roots.ll"), roots()).file("write", path("roots.ll"))?;
    let run = |tool: &str, arguments: &[&str], input: &[&Path], output: &Path| {
        let mut command = Command::new(tools.join(tool));
        command.args(arguments).args(input).arg("-o").arg(output);
        output_of(&mut command, || missing_llvm_tool(tool))
    };
    run(
        "llvm-link",
        &["--only-needed"],
        &[&path("roots.ll"), bitcode],
        &path("linked.bc"),
    )?;
    let public = [&DEVICE_FUNCTIONS[..], &DEVICE_STATE[..]]
        .concat()
        .join(",");
    let keep = format!("-internalize-public-api-list={public}");
    let passes = "-passes=internalize,globaldce";
    run(
        "opt",
        &[passes, &keep],
        &[&path("linked.bc")],
        &path("public.bc"),
    )?;
    run("llvm-dis", &[], &[&path("public.bc")], &path("public.ll"))?;
    let text = fs::read_to_string(path("public.ll")).file("read", path("public.ll"))?;
    check_version(bitcode, &text)?;
    check_complete(&text)?;
    let portable = without_target(&text);
    fs::write(path("portable.ll"), portable).file("write", path("portable.ll"))?;
    run("llvm-as", &[], &[&path("portable.ll")], &path("small.bc"))?;
    Ok(path("small.bc"))
}

/// A module that uses exactly [`DEVICE_FUNCTIONS`].
fn roots() -> String {
    let declarations: String = DEVICE_FUNCTIONS
        .iter()
        .map(|name| format!("declare void @{name}()\n"))
        .collect();
    let uses = DEVICE_FUNCTIONS
        .map(|name| format!("ptr @{name}"))
        .join(", ");
    let count = DEVICE_FUNCTIONS.len();
    format!(
        "target triple = \"nvptx64-nvidia-cuda\"\n{declarations}\
         @ferry_roots = constant [{count} x ptr] [{uses}]\n"
    )
}

/// Removes the `target-cpu` and `target-features` that NVSHMEM was built for: the kernels' own apply.
fn without_target(text: &str) -> String {
    text.lines()
        .map(|line| without_attributes(line) + "\n")
        .collect()
}

fn without_attributes(line: &str) -> String {
    let mut line = line.to_owned();
    if !line.starts_with("attributes #") {
        return line;
    }
    for name in ["\"target-cpu\"=\"", "\"target-features\"=\""] {
        if let Some(start) = line.find(name) {
            let value = start + name.len();
            let end = line[value..]
                .find('"')
                .map_or(line.len(), |length| value + length + 1);
            line.replace_range(start..end, "");
        }
    }
    line
}

/// Checks that the version in the bitcode is [`NVSHMEM_VERSION`].
fn check_version(bitcode: &Path, text: &str) -> Result<()> {
    let found = linked_version(text).ok_or_else(|| Error::Parse {
        what: "NVSHMEM's device bitcode",
        detail: format!(
            "{} names no nvshmemi_device_lib_version_d",
            bitcode.display()
        ),
    })?;
    if found == NVSHMEM_VERSION {
        return Ok(());
    }
    let dotted = |(major, minor, patch): (u32, u32, u32)| format!("{major}.{minor}.{patch}");
    Err(Error::NvshmemVersion {
        path: bitcode.into(),
        found: dotted(found),
        wanted: dotted(NVSHMEM_VERSION),
        get: Wheel::NVSHMEM.get_command(),
    })
}

fn linked_version(text: &str) -> Option<(u32, u32, u32)> {
    let line = text
        .lines()
        .find(|line| line.starts_with("@nvshmemi_device_lib_version_d"))?;
    let (_, value) = line.split_once("%struct.nvshmemi_version_t {")?;
    let (numbers, _) = value.split_once('}')?;
    let mut numbers = numbers
        .split(',')
        .map(|word| word.trim().strip_prefix("i32 ")?.parse().ok());
    Some((numbers.next()??, numbers.next()??, numbers.next()??))
}

/// Checks that every function has a body, without which the PTX would have an `.extern .func`.
fn check_complete(text: &str) -> Result<()> {
    let defined = |name: &&str| {
        text.lines()
            .any(|line| line.starts_with("define") && line.contains(&format!("@{name}(")))
    };
    match DEVICE_FUNCTIONS.iter().find(|name| !defined(name)) {
        None => Ok(()),
        Some(name) => Err(Error::Parse {
            what: "NVSHMEM's device bitcode",
            detail: format!("it defines no {name}"),
        }),
    }
}

fn missing_llvm_tool(tool: &str) -> Error {
    Error::MissingTool {
        tool: tool.into(),
        needed_for: "it reduces NVSHMEM's bitcode",
        get: "rustup component add llvm-tools".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION_LINE: &str = "@nvshmemi_device_lib_version_d = dso_local addrspace(4) \
        externally_initialized global %struct.nvshmemi_version_t { i32 3, i32 4, i32 5 }, align 4";

    #[test]
    fn the_bindings_the_bitcode_and_the_wheel_are_one_version() {
        assert_eq!(NVSHMEM_VERSION, nvshmem_sys::LINKED_VERSION);
        let (major, minor, patch) = NVSHMEM_VERSION;
        assert_eq!(Wheel::NVSHMEM.version, format!("{major}.{minor}.{patch}"));
    }

    #[test]
    fn the_version_is_read_from_the_bitcode() {
        assert_eq!(linked_version(VERSION_LINE), Some((3, 4, 5)));
        assert!(check_version(Path::new("a.bc"), VERSION_LINE).is_ok());
    }

    #[test]
    fn another_version_is_refused_with_both_named() {
        let other = VERSION_LINE.replace("i32 4", "i32 3");
        let text = check_version(Path::new("a.bc"), &other)
            .unwrap_err()
            .to_string();
        assert!(text.contains("3.3.5") && text.contains("3.4.5"), "{text}");
    }

    #[test]
    fn bitcode_with_another_sum_is_refused_with_both_before_a_tool_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let bitcode = folder.path().join("libnvshmem_device.bc");
        fs::write(&bitcode, b"abc").unwrap();
        let refused = reduce_checked(
            Path::new("no/tools"),
            &bitcode,
            &folder.path().join("small.bc"),
        );
        let text = refused.unwrap_err().to_string();
        let found = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        for part in [found, BITCODE_SHA256[0], BITCODE_SHA256[1]] {
            assert!(text.contains(part), "{text}");
        }
        assert!(text.contains(bitcode.to_str().unwrap()), "{text}");
    }

    #[test]
    fn an_installed_wheel_of_another_version_or_name_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let other = folder.path().join("other");
        for record in [
            "nvidia_nvshmem_cu13-3.3.20.dist-info",
            "nvidia_nvshmem_cu12-3.4.5.dist-info",
        ] {
            fs::create_dir_all(other.join(record)).unwrap();
        }
        assert_eq!(installed([other.clone()]), None);
        let right = folder.path().join("right");
        fs::create_dir_all(right.join("nvidia_nvshmem_cu13-3.4.5.dist-info")).unwrap();
        assert_eq!(installed([other, right.clone()]), Some(right));
    }

    #[test]
    fn a_function_without_a_body_is_refused() {
        let text = check_complete("define void @nvshmem_fence() {\n")
            .unwrap_err()
            .to_string();
        assert!(text.contains("nvshmemx_putmem_nbi_warp"), "{text}");
    }

    #[test]
    fn the_processor_is_dropped_and_other_attributes_stay() {
        let line =
            "attributes #0 = { nounwind \"target-cpu\"=\"sm_90\" \"target-features\"=\"+ptx83\" }";
        let kept = without_attributes(line);
        assert!(kept.contains("nounwind") && !kept.contains("sm_90") && !kept.contains("ptx83"));
    }
}
