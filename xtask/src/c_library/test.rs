//! `cargo xtask test-c`: C programs against the header, in the simulator.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

use super::entries::Entries;
use super::{header, package};
use crate::Places;

/// Programs of one rank a process, or all ranks of the simulator.
const SOURCES: [&str; 4] = ["round.c", "bad_input.c", "formats.c", "options.c"];

const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

/// What a static library of Rust's needs besides, as `rustc --print native-static-libs` says.
const SYSTEM_LIBRARIES: [&str; 6] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];

/// Where things are.
struct Rig {
    shell: Shell,
    sources: PathBuf,
    /// Where the library was installed.
    prefix: PathBuf,
    /// Where programs go.
    programs: PathBuf,
}

/// Runs everything.
pub(super) fn run(places: &Places) -> Result<()> {
    header::run(&places.root, true)?;
    let programs = places.target_dir.join("c");
    let prefix = programs.join("installed");
    package::run(places, &prefix, "", package::Profile::Dev)?;
    let rig = Rig {
        shell: Shell::new()?,
        sources: places.root.join("tests/c"),
        prefix,
        programs,
    };
    rig.require_exports(&Entries::read(&places.root.join("host/c/src"))?.names())?;
    rig.check_frozen_layout()?;
    rig.run_shared()?;
    rig.run_as_cpp()?;
    rig.run_sanitized()?;
    println!("C: the header, its layout and 3 programs are as they must be");
    Ok(())
}

impl Rig {
    /// That the shared library exports the entries, and nothing else.
    fn require_exports(&self, entries: &[String]) -> Result<()> {
        let library = self.prefix.join("lib/libferry.so");
        let shell = &self.shell;
        let printed = cmd!(shell, "nm --dynamic --defined-only {library}")
            .quiet()
            .read()?;
        let mut exported: Vec<&str> = printed
            .lines()
            .filter_map(|line| line.split_whitespace().last())
            .collect();
        exported.sort_unstable();
        if exported != entries {
            bail!("libferry.so exports {exported:?}, but the entries are {entries:?}");
        }
        Ok(())
    }

    /// Compiles the assertions of sizes and offsets, in C and in C++.
    fn check_frozen_layout(&self) -> Result<()> {
        let Self { shell, sources, .. } = self;
        let (source, include) = (sources.join("frozen.c"), self.include());
        let object = self.programs.join("frozen.o");
        cmd!(
            shell,
            "gcc -std=c11 {WARNINGS...} {include} -c {source} -o {object}"
        )
        .quiet()
        .run()
        .context("the layout of a struct has changed, which breaks programs that are compiled")
    }

    /// With the shared library, as an installed program finds it.
    fn run_shared(&self) -> Result<()> {
        let library = self.prefix.join("lib");
        let link = [
            format!("-L{}", library.display()),
            format!("-Wl,-rpath,{}", library.display()),
            "-lferry".to_owned(),
            "-lm".to_owned(),
        ];
        self.run(&self.compile("round", "gcc", &["-std=c11"], &link)?)
    }

    /// The same sources as C++, where there is a compiler, with the static library.
    fn run_as_cpp(&self) -> Result<()> {
        let shell = &self.shell;
        let version = cmd!(shell, "g++ --version").quiet().ignore_stdout();
        if version.run().is_err() {
            println!("no g++: the programs were not compiled as C++");
            return Ok(());
        }
        let flags = ["-std=c++17", "-x", "c++"];
        self.run(&self.compile("round-cpp", "g++", &flags, &self.statically())?)
    }

    /// Under AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer.
    fn run_sanitized(&self) -> Result<()> {
        let sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
        let flags = [&["-std=c11", "-g"], &sanitizers[..]].concat();
        self.run(&self.compile("round-sanitized", "gcc", &flags, &self.statically())?)
    }

    /// Compiles all sources to a program, and gives its path.
    fn compile(
        &self,
        name: &str,
        compiler: &str,
        flags: &[&str],
        libraries: &[String],
    ) -> Result<PathBuf> {
        let shell = &self.shell;
        let (sources, include) = (self.sources(), self.include());
        let program = self.programs.join(name);
        let language = ["-x", "none"];
        cmd!(
            shell,
            "{compiler} {WARNINGS...} {include} {flags...} {sources...} {language...} {libraries...} -o {program}"
        )
        .quiet()
        .run()
        .with_context(|| format!("cannot compile {name}"))?;
        Ok(program)
    }

    fn run(&self, program: &Path) -> Result<()> {
        let shell = &self.shell;
        cmd!(shell, "{program}")
            .quiet()
            .env("ASAN_OPTIONS", "detect_leaks=1")
            .run()
            .with_context(|| format!("{} failed", program.display()))
    }

    fn sources(&self) -> Vec<PathBuf> {
        SOURCES.map(|name| self.sources.join(name)).to_vec()
    }

    fn include(&self) -> String {
        format!("-I{}", self.prefix.join("include").display())
    }

    /// What links the static library.
    fn statically(&self) -> Vec<String> {
        let library = self.prefix.join("lib/libferry.a").display().to_string();
        let system = SYSTEM_LIBRARIES.map(str::to_owned);
        [&[library], &system[..]].concat()
    }
}
