//! The Python package: its wheel, and its tests in virtual environments.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Subcommand, ValueEnum};
use xshell::{Shell, cmd};

use crate::builds;
use crate::places::Places;

mod torch;

/// The package, below the workspace root.
const PACKAGE: &str = "host/python";
/// The distribution that installs the name `deep_ep`, in the package's folder. No compiled code.
const DEEP_EP: &str = "deep-ep";
/// Packages that build and check wheels, and a program of each. A new pip installs into other environments;
/// flit brings the backend that builds `ferry-ep-deep-ep`, ziglang a linker for older systems.
const TOOLS: [(&str, &str); 8] = [
    ("pip", "pip"),
    ("maturin", "maturin"),
    ("abi3audit", "abi3audit"),
    ("basedpyright", "basedpyright"),
    ("flit", "flit"),
    ("mypy", "mypy"),
    ("ruff", "ruff"),
    ("ziglang", "python-zig"),
];
/// Oldest systems on which a wheel of the release profile runs: those with glibc 2.28.
const SYSTEMS: &str = "manylinux_2_28";
/// Licence texts, of which each wheel has one of its own.
const LICENCES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];
/// Packages that the tests without torch need, beside the wheel.
const TESTED_WITH: [&str; 2] = ["numpy", "pytest"];

/// Tasks of the Python package.
#[derive(Subcommand)]
pub(crate) enum Task {
    /// Build the wheel in target/python/wheels; check it, and test it in a clean virtual environment
    PackagePython {
        /// Cargo's profile for the native module
        #[arg(long, value_enum, default_value = "release")]
        profile: Profile,
        /// Features of the native module, instead of those in pyproject.toml (cuda)
        #[arg(long, value_name = "FEATURES")]
        features: Option<String>,
        /// Build and check, and run no tests
        #[arg(long)]
        no_test: bool,
    },
    /// Test the wheel of the last package-python with torch and transformers, in a virtual environment
    /// outside the checkout; skipped without one
    TestPython {
        /// Run the tests with torch
        #[arg(long, required = true)]
        torch: bool,
        /// Make the environment first, of 4.4 GB
        #[arg(long)]
        make: bool,
        /// Folder of the environment, from the workspace root
        #[arg(long, value_name = "DIR", default_value = "../ferry-torch")]
        environment: PathBuf,
        /// Arguments of pytest
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

/// Cargo's profile for the native module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Profile {
    /// Builds soon
    Dev,
    /// Runs fast
    Release,
}

pub(crate) fn run(places: &Places, task: &Task) -> Result<()> {
    match task {
        Task::PackagePython {
            profile,
            features,
            no_test,
        } => {
            let wheel = package(places, *profile, features.as_deref())?;
            if *no_test {
                return Ok(());
            }
            test(places, &wheel)
        }
        Task::TestPython {
            make,
            environment,
            arguments,
            ..
        } => {
            let environment = places.root.join(environment);
            torch::run(places, &environment, *make, arguments)
        }
    }
}

/// Folder of everything that these tasks make, except the environment with torch.
fn folder(places: &Places) -> PathBuf {
    places.target_dir.join("python")
}

/// Builds the wheel and checks it. Returns its path.
fn package(places: &Places, profile: Profile, features: Option<&str>) -> Result<PathBuf> {
    let begin = Instant::now();
    let (shell, tools) = (shell(places)?, tools(places)?);
    let source = places.root.join(PACKAGE);
    cmd!(shell, "{tools}/ruff check --quiet {source}")
        .quiet()
        .run()?;
    cmd!(shell, "{tools}/ruff format --quiet --check {source}")
        .quiet()
        .run()?;
    let wheels = folder(places).join("wheels");
    shell.remove_path(&wheels)?;
    let name = match profile {
        Profile::Dev => "dev",
        Profile::Release => "release",
    };
    let features = features.map(|features| ["--no-default-features", "--features", features]);
    let (manifest, target) = (source.join("Cargo.toml"), &places.target_dir);
    // Zig links with an older glibc than this system's, in a folder of its own.
    let linked = match profile {
        Profile::Dev => None,
        Profile::Release => Some(["--zig", "--compatibility", SYSTEMS]),
    };
    let maturin = cmd!(
        shell,
        "{tools}/maturin build --profile {name} --manifest-path {manifest} --target-dir {target}
         --out {wheels}"
    )
    .args(features.into_iter().flatten())
    .args(linked.into_iter().flatten())
    .env("PATH", search_path(&tools)?)
    // A user's wheel has the features of its own package alone.
    .env_remove("CARGO_RESOLVER_FEATURE_UNIFICATION");
    builds::build(
        places,
        "package-python",
        "the native module",
        maturin.into(),
    )?;
    let wheel = wheel(places)?;
    ensure!(
        profile == Profile::Dev || path(&wheel)?.contains(SYSTEMS),
        "{} is not for {SYSTEMS}",
        wheel.display()
    );
    package_deep_ep(places, &shell, &tools)?;
    cmd!(shell, "{tools}/abi3audit --strict {wheel}")
        .quiet()
        .ignore_stdout()
        .run()
        .context("the wheel uses more than the stable ABI")?;
    let bytes = std::fs::metadata(&wheel)?.len();
    println!(
        "{}: {:.2} MB, built and checked in {} s",
        wheel.display(),
        bytes as f64 / 1e6,
        begin.elapsed().as_secs()
    );
    Ok(wheel)
}

/// Builds the wheel of `ferry-ep-deep-ep` into the same folder. Its version must be the package's.
fn package_deep_ep(places: &Places, shell: &Shell, tools: &Path) -> Result<()> {
    let wheels = folder(places).join("wheels");
    let source = places.root.join(PACKAGE).join(DEEP_EP);
    // Copies, as flit refuses links out of its folder.
    for name in LICENCES {
        let (copy, text) = (source.join(name), places.root.join(name));
        ensure!(
            std::fs::read(&copy)? == std::fs::read(&text)?,
            "{} is not {}: copy it",
            copy.display(),
            text.display()
        );
    }
    let options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
    ];
    cmd!(
        shell,
        "{tools}/python -m pip wheel {options...} {wheels} {source}"
    )
    .quiet()
    .run()
    .context("cannot build the wheel of ferry-ep-deep-ep")?;
    let (wheel, deep_ep) = (wheel(places)?, wheel_of(places, "ferry_ep_deep_ep")?);
    ensure!(
        version(&wheel) == version(&deep_ep),
        "{} and {} have different versions: set that of ferry-ep in {}/pyproject.toml",
        wheel.display(),
        deep_ep.display(),
        source.display()
    );
    Ok(())
}

/// Version in a wheel's name, which is `distribution-version-tags`.
fn version(wheel: &Path) -> Option<&str> {
    wheel.file_name()?.to_str()?.split('-').nth(1)
}

/// The only wheel that was built of the package.
fn wheel(places: &Places) -> Result<PathBuf> {
    wheel_of(places, "ferry_ep")
}

/// The only wheel that was built of this distribution.
fn wheel_of(places: &Places, distribution: &str) -> Result<PathBuf> {
    let wheels = folder(places).join("wheels");
    let found = Shell::new()?.read_dir(&wheels).unwrap_or_default();
    let is_it = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| {
            name.starts_with(&format!("{distribution}-")) && name.ends_with(".whl")
        })
    };
    found.into_iter().find(is_it).with_context(|| {
        let wheels = wheels.display();
        format!(
            "no wheel of {distribution} in {wheels}; make one with `cargo xtask package-python`"
        )
    })
}

/// Installs the wheel into an environment that has nothing else, and runs the tests there.
fn test(places: &Places, wheel: &Path) -> Result<()> {
    let begin = Instant::now();
    let (shell, tools) = (shell(places)?, tools(places)?);
    let clean = folder(places).join("clean");
    shell.remove_path(&clean)?;
    let programs = environment(&shell, &clean, &["--without-pip"])?;
    let into = ["--python", path(&clean)?];
    let quiet = ["--quiet", "--disable-pip-version-check"];
    cmd!(
        shell,
        "{tools}/python -m pip {into...} install {quiet...} {wheel}"
    )
    .args(TESTED_WITH)
    .quiet()
    .run()
    .context("cannot install the wheel")?;
    let source = places.root.join(PACKAGE);
    // Not beside the sources, which Python would import instead of the wheel.
    shell.change_dir(&clean);
    let tests = source.join("tests");
    cmd!(
        shell,
        "{programs}/python -m pytest -q -p no:cacheprovider {tests}"
    )
    .quiet()
    .env("PYTHONDONTWRITEBYTECODE", "1")
    .run()
    .context("the tests of the Python package failed")?;
    check_types(places, &shell, &tools, &programs)?;
    println!("tested in {} s", begin.elapsed().as_secs());
    Ok(())
}

/// Compares the stubs with the module, and checks the types of the installed package.
fn check_types(places: &Places, shell: &Shell, tools: &Path, programs: &Path) -> Result<()> {
    let source = places.root.join(PACKAGE);
    let package = PathBuf::from(installed(shell, programs)?);
    let packages = package.parent().context("a package is in a folder")?;
    let (mypy_ini, allowed) = (source.join("mypy.ini"), source.join("tests/stubtest.txt"));
    let given = [
        "--mypy-config-file",
        path(&mypy_ini)?,
        "--allowlist",
        path(&allowed)?,
    ];
    cmd!(
        shell,
        "{tools}/python -m mypy.stubtest --concise ferry_ep {given...}"
    )
    .quiet()
    .env("PYTHONPATH", packages)
    .env("MYPYPATH", packages)
    .run()
    .context("the stubs do not fit the module")?;
    let (python, settings) = (programs.join("python"), source.join("pyproject.toml"));
    let given = [
        "--pythonpath",
        path(&python)?,
        "--project",
        path(&settings)?,
    ];
    cmd!(
        shell,
        "{tools}/basedpyright --level error {given...} {package}"
    )
    .quiet()
    .run()
    .context("the package's types do not fit together")
}

/// Folder of the installed package.
fn installed(shell: &Shell, programs: &Path) -> Result<String> {
    let code = "import ferry_ep, os; print(os.path.dirname(ferry_ep.__file__))";
    Ok(cmd!(shell, "{programs}/python -c {code}").quiet().read()?)
}

/// Programs of an environment with the tools, which is made once.
fn tools(places: &Places) -> Result<PathBuf> {
    let shell = shell(places)?;
    let tools = folder(places).join("tools");
    let programs = tools.join("bin");
    if TOOLS
        .iter()
        .all(|(_, program)| programs.join(program).is_file())
    {
        return Ok(programs);
    }
    environment(&shell, &tools, &[])?;
    let quiet = ["--quiet", "--disable-pip-version-check", "--upgrade"];
    cmd!(shell, "{programs}/python -m pip install {quiet...}")
        .args(TOOLS.map(|(package, _)| package))
        .quiet()
        .run()
        .context("cannot install the programs that build and check the wheel")?;
    Ok(programs)
}

/// Folders in which programs are looked for, the tools' own first: maturin finds Zig in them.
fn search_path(tools: &Path) -> Result<OsString> {
    let others = std::env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(tools.to_path_buf()).chain(std::env::split_paths(&others));
    std::env::join_paths(all).context("a folder of PATH has a colon in its name")
}

/// Makes a virtual environment, and returns the folder of its programs.
fn environment(shell: &Shell, at: &Path, options: &[&str]) -> Result<PathBuf> {
    let version = "import sys; print(sys.version_info >= (3, 10))";
    let is_new = cmd!(shell, "python3 -c {version}").quiet().read()?;
    ensure!(is_new == "True", "python3 is older than 3.10");
    cmd!(shell, "python3 -m venv {options...} {at}")
        .quiet()
        .run()
        .context(
            "cannot make a virtual environment; get one with `apt-get install python3-venv`",
        )?;
    Ok(at.join("bin"))
}

fn shell(places: &Places) -> Result<Shell> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    Ok(shell)
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("a path is not text")
}
