//! The committed digest: it shows a reviewer how generated code changes.
//!
//! One sorted line per fact, so that a difference in the text is a difference in the code. Kernels that no
//! library loads have registers and stack only. A digest of the second code generator also identifies the
//! stock compiler's digest of the same kernels.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::fs;
use std::path::{Path, PathBuf};

use ferry_build::{Artifact, FileContext, Package, Result, Variant};
use sha2::{Digest as _, Sha256};

use crate::assemble::{Resources, assemble};
use crate::generator::CodeGenerator;
use crate::nvvm::NvvmBuild;
use crate::ptx::{PtxFunction, PtxModule, without_crate_hashes};
use crate::violation::violations;

/// The digest of some variants of a package, and the rules they break.
#[derive(Clone, Debug)]
pub struct Digest {
    package: Package,
    generator: CodeGenerator,
    sections: Vec<Section>,
    /// Rules that the PTX breaks, as messages.
    pub violations: Vec<String>,
}

/// The part of one variant.
#[derive(Clone, Debug)]
struct Section {
    variant: Variant,
    text: String,
    kernels: Vec<(String, Resources)>,
}

impl Digest {
    /// Reads and assembles a package's artifacts.
    ///
    /// # Errors
    ///
    /// `ptxas` is missing or refuses the PTX, or a file cannot be read.
    pub fn of(
        package: Package,
        generator: CodeGenerator,
        artifacts: &[Artifact],
        target_dir: &Path,
    ) -> Result<Digest> {
        let mut digest = Digest {
            package,
            generator,
            sections: Vec::new(),
            violations: Vec::new(),
        };
        for artifact in artifacts {
            let module = PtxModule::read(&artifact.ptx_path)?;
            // ptxas refuses a module with a hole; the violation says which.
            let is_whole = module.external_functions.is_empty();
            let resources = if is_whole {
                assemble(&artifact.ptx_path, artifact.variant, target_dir)?
            } else {
                BTreeMap::new()
            };
            let kernels: Vec<_> = module
                .kernels()
                .map(|kernel| {
                    (
                        kernel.name.clone(),
                        resources.get(&kernel.name).copied().unwrap_or_default(),
                    )
                })
                .collect();
            digest.violations.extend(violations(
                package,
                generator,
                artifact.variant,
                &module,
                &kernels,
            ));
            let text = section(package, artifact.variant, &module, &kernels);
            digest.sections.push(Section {
                variant: artifact.variant,
                text,
                kernels,
            });
        }
        Ok(digest)
    }

    /// Every kernel with the resources that `ptxas` reports.
    pub fn kernels(&self) -> impl Iterator<Item = (Variant, &str, Resources)> {
        self.sections.iter().flat_map(|section| {
            section
                .kernels
                .iter()
                .map(|(name, needs)| (section.variant, name.as_str(), *needs))
        })
    }

    /// The differences from the committed text, in lines of `-` and `+`; empty if there is none.
    ///
    /// Only the variants of this digest are compared.
    pub fn compare(&self, committed: &str) -> String {
        let mut report = String::new();
        for section in &self.sections {
            let kept = committed_section(committed, section.variant);
            for line in difference(&kept, &section.text) {
                report.push_str(&line);
                report.push('\n');
            }
        }
        report
    }

    /// Path of the committed digest.
    fn file(&self, workspace_root: &Path) -> PathBuf {
        workspace_root.join(self.generator.digest_file(self.package))
    }

    /// This digest as it is committed: the second code generator's names the stock one in each section.
    fn to_commit(&self, workspace_root: &Path) -> Result<Digest> {
        let mut digest = self.clone();
        if self.generator == CodeGenerator::Nvvm {
            let stock = CodeGenerator::Stock.digest_file(self.package);
            let stock = committed_text(&workspace_root.join(stock))?;
            for Section { variant, text, .. } in &mut digest.sections {
                text.insert_str(title(*variant).len(), &stock_line(&stock, *variant));
            }
        }
        Ok(digest)
    }

    /// Compares with the committed file below `workspace_root`.
    ///
    /// # Errors
    ///
    /// The file cannot be read. A missing one counts as empty.
    pub fn compare_with_committed(&self, workspace_root: &Path) -> Result<String> {
        let committed = committed_text(&self.file(workspace_root))?;
        Ok(self.to_commit(workspace_root)?.compare(&committed))
    }

    /// Renews the committed file; variants that this digest lacks keep their sections.
    ///
    /// # Errors
    ///
    /// The file cannot be read or written.
    pub fn bless(&self, workspace_root: &Path) -> Result<()> {
        let path = self.file(workspace_root);
        let committed = committed_text(&path)?;
        let digest = self.to_commit(workspace_root)?;
        let mut text = header(self.package, self.generator);
        for variant in Variant::ALL {
            let fresh = digest
                .sections
                .iter()
                .find(|section| section.variant == variant);
            let kept = || committed_section(&committed, variant);
            text.push_str(&fresh.map_or_else(kept, |section| section.text.clone()));
        }
        fs::write(&path, text).file("write", path)
    }
}

/// Variants whose section in a committed digest of the second code generator does not belong to this
/// committed digest of the stock compiler, of the same package.
pub fn stale_variants(nvvm: &str, stock: &str) -> Vec<Variant> {
    let is_stale = |variant: &Variant| {
        let section = committed_section(nvvm, *variant);
        !section.contains(&stock_line(stock, *variant))
    };
    NvvmBuild::VARIANTS.into_iter().filter(is_stale).collect()
}

/// The line of a section that identifies the stock compiler's section it belongs to.
fn stock_line(stock: &str, variant: Variant) -> String {
    let sum = Sha256::digest(committed_section(stock, variant));
    let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("stock {sum}\n")
}

/// Whether a package's digest has just one line per kernel, with registers and stack.
const fn is_brief(package: Package) -> bool {
    matches!(package, Package::Probes | Package::OwnEpilogue)
}

/// The first lines of a file.
fn header(package: Package, generator: CodeGenerator) -> String {
    let beside = match generator {
        CodeGenerator::Stock => "",
        CodeGenerator::Nvvm => {
            "# `stock` is the sha256 of the section of ptx-digest.txt at that time.\n"
        }
    };
    let facts = if is_brief(package) {
        "# Registers and bytes of stack of each kernel."
    } else {
        "# What the compiler made of the kernels: memory operations by full opcode, calls, local memory,\n\
         # and what ptxas needs to run them."
    };
    let command = generator.bless_command();
    format!("{facts} Written by `{command}`.\n{beside}")
}

/// First line of a variant's section, after an empty one.
fn title(variant: Variant) -> String {
    format!("\n[{variant}]\n")
}

fn committed_text(path: &Path) -> Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        outcome => outcome.file("read", path),
    }
}

fn section(
    package: Package,
    variant: Variant,
    module: &PtxModule,
    kernels: &[(String, Resources)],
) -> String {
    let mut text = format!("{}ptx {}\n", title(variant), module.isa);
    if is_brief(package) {
        let lines = kernels.iter().map(|(name, needs)| {
            format!(
                "  {name} registers {} stack {}\n",
                needs.registers, needs.stack_bytes
            )
        });
        return text + &lines.collect::<String>();
    }
    let mut functions: Vec<_> = module.functions.iter().collect();
    functions.sort_by_cached_key(|function| without_crate_hashes(&function.name));
    for function in functions {
        let needs = kernels
            .iter()
            .find(|(name, _)| *name == function.name)
            .map(|(_, needs)| needs);
        // A `String` takes every write.
        let _ = write_function(&mut text, variant, function, needs);
    }
    text
}

fn write_function(
    text: &mut String,
    variant: Variant,
    function: &PtxFunction,
    needs: Option<&Resources>,
) -> fmt::Result {
    let kind = if function.is_kernel {
        "kernel"
    } else {
        "function"
    };
    let name = without_crate_hashes(&function.name);
    writeln!(text, "\n{kind} {name} ({variant})")?;
    if let Some(needs) = needs {
        writeln!(text, "  registers {}", needs.registers)?;
        writeln!(text, "  stack {}", needs.stack_bytes)?;
        writeln!(
            text,
            "  spills {} {}",
            needs.spill_store_bytes, needs.spill_load_bytes
        )?;
        writeln!(text, "  shared {}", needs.shared_bytes)?;
    }
    writeln!(text, "  calls {}", function.calls)?;
    writeln!(text, "  local {}", function.local_bytes)?;
    for (opcode, count) in &function.memory_operations {
        writeln!(text, "  {opcode} {count}")?;
    }
    Ok(())
}

/// The part of the committed text that starts with `[variant]`.
fn committed_section(committed: &str, variant: Variant) -> String {
    let Some(start) = committed.find(&title(variant)) else {
        return String::new();
    };
    let rest = &committed[start + 1..];
    let end = rest.find("\n[").unwrap_or(rest.len());
    committed[start..start + 1 + end].to_owned()
}

/// Line differences, function by function: lines only in `old` with `-`, lines only in `new` with `+`.
fn difference(old: &str, new: &str) -> Vec<String> {
    let (old, new) = (blocks(old), blocks(new));
    let mut titles: Vec<&str> = old.iter().chain(&new).map(|(title, _)| *title).collect();
    titles.sort_unstable();
    titles.dedup();
    let lines_of = |blocks: &[(&str, Vec<&str>)], title: &str| -> Vec<String> {
        let found = blocks.iter().find(|(name, _)| *name == title);
        found.map_or_else(Vec::new, |(_, lines)| {
            lines.iter().map(|&line| line.to_owned()).collect()
        })
    };
    let mut report = Vec::new();
    for title in titles {
        let (old, new) = (lines_of(&old, title), lines_of(&new, title));
        let removed = old
            .iter()
            .filter(|line| !new.contains(line))
            .map(|line| format!("-{line}"));
        let added = new
            .iter()
            .filter(|line| !old.contains(line))
            .map(|line| format!("+{line}"));
        let mut changes: Vec<String> = removed.chain(added).collect();
        // Puts a removed and an added count of one opcode side by side.
        changes.sort_by(|a, b| (key(a), b).cmp(&(key(b), a)));
        if !changes.is_empty() {
            report.push(title.to_owned());
            report.append(&mut changes);
        }
    }
    report
}

/// Opcode or resource that a line of a difference is about.
fn key(change: &str) -> &str {
    change[1..].split_whitespace().next().unwrap_or_default()
}

/// A section's functions: title line, then its facts.
fn blocks(section: &str) -> Vec<(&str, Vec<&str>)> {
    let mut blocks: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in section.lines().filter(|line| !line.is_empty()) {
        match blocks.last_mut() {
            Some((_, facts))
                if ["  ", "ptx ", "stock "]
                    .iter()
                    .any(|fact| line.starts_with(fact)) =>
            {
                facts.push(line)
            }
            _ => blocks.push((line, Vec::new())),
        }
    }
    blocks
}

#[cfg(test)]
mod tests;
