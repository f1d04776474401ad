//! `cargo xtask test-c`: C programs against the header, in the simulator.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use xshell::{Shell, cmd};

use super::entries::Entries;
use super::{header, package};
use crate::places::Places;

/// Programs of one rank a process, or all ranks of the simulator.
const SOURCES: [&str; 9] = [
    "round.c",
    "bad_input.c",
    "encoded.c",
    "formats.c",
    "modes.c",
    "options.c",
    "queries.c",
    "rows.c",
    "aligned.c",
];

const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

/// System libraries that a static library of Rust needs, by `rustc --print native-static-libs`; the compiler
/// adds libgcc.
const SYSTEM_LIBRARIES: [&str; 5] = ["-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];

/// An installed library, and the folders of the programs that use it.
struct Rig {
    shell: Shell,
    sources: PathBuf,
    /// Folder of the installed library.
    prefix: PathBuf,
    /// Folder of the compiled programs.
    programs: PathBuf,
}

/// Runs everything.
pub(super) fn run(places: &Places) -> Result<()> {
    header::run(&places.root, true)?;
    let rig = Rig::new(places, "", package::Profile::Dev)?;
    rig.require_exports(&Entries::read(&places.root.join("host/c/src"))?.names())?;
    rig.check_frozen_layout()?;
    rig.check_pages(&places.root)?;
    rig.run_shared()?;
    rig.run_as_cpp()?;
    rig.run_sanitized()?;
    println!("C: the header, its layout and 4 programs are right");
    Ok(())
}

/// Builds the program with the library in it, to be copied to a machine with GPUs.
pub(super) fn build(places: &Places, program: &Path, features: &str) -> Result<()> {
    let rig = Rig::new(places, features, package::Profile::Release)?;
    let flags = ["-std=c11", "-O2", "-static-libgcc"];
    let built = rig.compile("round-gpus", "gcc", &flags, &rig.statically()[..])?;
    fs::copy(&built, program).with_context(|| format!("cannot write {}", program.display()))?;
    println!("{}", program.display());
    Ok(())
}

impl Rig {
    /// Installs the library below the target folder.
    fn new(places: &Places, features: &str, profile: package::Profile) -> Result<Self> {
        let programs = places.target_dir.join("c");
        let prefix = programs.join(match profile {
            package::Profile::Dev => "installed",
            package::Profile::Release => "installed-release",
        });
        package::run(places, &prefix, features, profile)?;
        Ok(Self {
            shell: Shell::new()?,
            sources: places.root.join("tests/c"),
            prefix,
            programs,
        })
    }

    /// Checks that the shared library exports exactly the entries.
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

    /// Compiles the README's code, and compiles and runs the guide's, which is a program.
    fn check_pages(&self, root: &Path) -> Result<()> {
        let compile_only = ["-c".to_owned()];
        self.compile_page(&root.join("README.md"), "readme", &compile_only)?;
        let program = self.compile_page(&root.join("host/docs/c.md"), "guide", &self.shared())?;
        self.run(&program)
    }

    /// Compiles all C code of a page, and returns where the result is.
    fn compile_page(&self, page: &Path, name: &str, how: &[String]) -> Result<PathBuf> {
        let text =
            fs::read_to_string(page).with_context(|| format!("cannot read {}", page.display()))?;
        let code = c_code(&text);
        ensure!(!code.is_empty(), "{} has no C code", page.display());
        let (source, result) = (
            self.programs.join(format!("{name}.c")),
            self.programs.join(name),
        );
        fs::write(&source, code).with_context(|| format!("cannot write {name}.c"))?;
        let (shell, include) = (&self.shell, self.include());
        cmd!(
            shell,
            "gcc -std=c11 {WARNINGS...} {include} {source} {how...} -o {result}"
        )
        .quiet()
        .run()
        .with_context(|| format!("the C code of {} does not compile", page.display()))?;
        Ok(result)
    }

    /// Runs the program with the shared library.
    fn run_shared(&self) -> Result<()> {
        self.run(&self.compile("round", "gcc", &["-std=c11"], &self.shared())?)
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
        let flags = [&WARNINGS[..], flags].concat();
        let libraries = [&["-x".to_owned(), "none".to_owned()], libraries].concat();
        cmd!(
            shell,
            "{compiler} {flags...} {include} {sources...} {libraries...} -o {program}"
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

    /// Arguments that link the shared library, found as by an installed program.
    fn shared(&self) -> [String; 4] {
        let library = self.prefix.join("lib");
        [
            format!("-L{}", library.display()),
            format!("-Wl,-rpath,{}", library.display()),
            "-lferry".to_owned(),
            "-lm".to_owned(),
        ]
    }

    /// Arguments that link the static library.
    fn statically(&self) -> Vec<String> {
        let library = self.prefix.join("lib/libferry.a").display().to_string();
        let system = SYSTEM_LIBRARIES.map(str::to_owned);
        [&[library], &system[..]].concat()
    }
}

/// All blocks of C in a text, one after another.
fn c_code(text: &str) -> String {
    let blocks = text.split("```c\n").skip(1);
    blocks
        .filter_map(|block| Some(block.split_once("```")?.0))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_blocks_of_c_are_found() {
        let text = "a\n```sh\nls\n```\n```c\nint x;\n```\nb\n```c\nint y;\n```\n";
        assert_eq!(c_code(text), "int x;\nint y;\n");
    }
}
