//! Imports have no circles: no file imports, directly or over others, from a file that imports from it.
//!
//! A name that a module re-exports counts as an import from the file that defines it.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};
use syn::{Item, ItemMod, UseTree, Visibility};

use super::source::{Complaint, SourceFile, attributes, is_for_tests, parse};

/// Most re-exports of a name in turn that are followed.
const MOST_HOPS: usize = 8;

/// The one circle that may be: an error of a call for all ranks holds the error of one, and the error of any
/// call may hold one of all ranks, so the two types are one recursion.
const RECURSION: &str = "error/local_ranks -> error/mod -> error/local_ranks";

/// A module's path below its crate: `work`, `item` for `work/item.rs`.
type Module = Vec<String>;

/// Circles of files in each crate.
pub(super) fn check(files: &[SourceFile]) -> Vec<Complaint> {
    let folders = folders(files);
    folders
        .iter()
        .flat_map(|folder| circles(files, folder))
        .collect()
}

/// Folders of the crates' sources, each with a trailing slash.
pub(super) fn folders(files: &[SourceFile]) -> Vec<String> {
    let manifests = files
        .iter()
        .filter_map(|file| file.path.strip_suffix("Cargo.toml"));
    let sources = manifests.map(|folder| format!("{folder}src/"));
    let has_files = |folder: &String| files.iter().any(|file| file.path.starts_with(folder));
    sources.filter(has_files).collect()
}

fn circles(files: &[SourceFile], folder: &str) -> Vec<Complaint> {
    let library = Crate::read(files, folder);
    let imports = library.imports();
    let complaint = |path: &str, text| Complaint {
        path: format!("{folder}{path}"),
        line: None,
        text,
    };
    let unread = library.unread.iter().cloned();
    let mut complaints: Vec<_> = unread.collect();
    let circles = circles_of(&imports).into_iter();
    let others = circles.filter(|(_, way)| way != RECURSION);
    complaints
        .extend(others.map(|(start, way)| complaint(&start, format!("import circle: {way}"))));
    complaints
}

/// The circles of imports: for each a file, and the way from it to itself, without the endings of names.
pub(super) fn circles_of(imports: &BTreeMap<String, BTreeSet<String>>) -> Vec<(String, String)> {
    let (mut circles, mut seen) = (Vec::new(), BTreeSet::new());
    for start in imports.keys() {
        let Some(circle) = way(imports, start, start) else {
            continue;
        };
        let members: BTreeSet<_> = circle.iter().copied().collect();
        if members.iter().all(|member| seen.contains(member)) {
            continue;
        }
        seen.extend(members);
        let names = circle.iter().map(|path| {
            let name = path.rsplit_once('.');
            name.map_or(*path, |(name, _)| name)
        });
        let way = names.collect::<Vec<_>>().join(" -> ");
        circles.push((start.clone(), way));
    }
    circles
}

/// The shortest path over one or more imports, from the first file to the last, both included.
fn way<'a>(
    imports: &'a BTreeMap<String, BTreeSet<String>>,
    from: &'a str,
    to: &str,
) -> Option<Vec<&'a str>> {
    let mut ways = vec![vec![from]];
    let mut reached = BTreeSet::new();
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            let last = *way.last()?;
            for next in imports.get(last).into_iter().flatten() {
                let mut way = way.clone();
                way.push(next);
                if next == to {
                    return Some(way);
                }
                if reached.insert(next.as_str()) {
                    longer.push(way);
                }
            }
        }
        ways = longer;
    }
    None
}

/// A crate's files.
#[derive(Default)]
pub(super) struct Crate {
    /// Files by module.
    files: BTreeMap<Module, ModuleFile>,
    /// Complaints about files that cannot be parsed.
    unread: Vec<Complaint>,
}

/// Imports and re-exports of a file.
struct ModuleFile {
    /// Below the crate's sources.
    path: String,
    /// All paths that it names, unresolved.
    paths: Vec<Vec<String>>,
    /// Re-exported names with their paths.
    reexports: BTreeMap<String, Vec<String>>,
}

impl Crate {
    /// Reads the sources below `folder`.
    pub(super) fn read(files: &[SourceFile], folder: &str) -> Crate {
        let mut library = Crate::default();
        for file in files.iter().filter(|file| file.is_rust()) {
            let Some(path) = file.path.strip_prefix(folder) else {
                continue;
            };
            let is_test = path
                .split('/')
                .any(|part| part == "tests" || part == "tests.rs" || part.ends_with("_tests.rs"));
            if is_test {
                continue;
            }
            match parse(file) {
                Ok(syntax) => {
                    let mut paths = Paths::default();
                    paths.visit_file(&syntax);
                    let module = ModuleFile {
                        path: path.into(),
                        paths: paths.named,
                        reexports: paths.reexports,
                    };
                    // Of two roots the library's, which is listed first.
                    library.files.entry(module_of(path)).or_insert(module);
                }
                Err(complaint) => library.unread.push(complaint),
            }
        }
        library
    }

    /// The files that each file imports from: those that define the names.
    fn imports(&self) -> BTreeMap<String, BTreeSet<String>> {
        self.imports_over(MOST_HOPS)
    }

    /// The same as [`imports`](Self::imports), but a re-exported name counts as the re-exporting module's.
    pub(super) fn imports_of_modules(&self) -> BTreeMap<String, BTreeSet<String>> {
        self.imports_over(0)
    }

    fn imports_over(&self, hops: usize) -> BTreeMap<String, BTreeSet<String>> {
        let imports = self.files.iter().map(|(module, file)| {
            let targets = file
                .paths
                .iter()
                .filter_map(|path| self.file_of(module, path, hops));
            let others = targets.filter(|target| *target != file.path);
            (file.path.clone(), others.map(ToOwned::to_owned).collect())
        });
        imports.collect()
    }

    /// The file that a path names, as seen in `module`; none if it is in another crate.
    fn file_of(&self, module: &[String], path: &[String], hops: usize) -> Option<&str> {
        let (mut at, mut rest) = self.start(module, path)?;
        while let Some((name, after)) = rest.split_first() {
            let mut inner = at.clone();
            inner.push(name.clone());
            if self.files.contains_key(&inner) {
                (at, rest) = (inner, after);
                continue;
            }
            let handed_on = self.files.get(&at)?.reexports.get(name);
            if let (Some(target), true) = (handed_on, hops > 0) {
                let target: Vec<_> = target.iter().chain(after).cloned().collect();
                if let Some(file) = self.file_of(&at, &target, hops - 1) {
                    return Some(file);
                }
            }
            break;
        }
        Some(&self.files.get(&at)?.path)
    }

    /// The module in which a path begins, and the rest of the path.
    fn start<'p>(&self, module: &[String], path: &'p [String]) -> Option<(Module, &'p [String])> {
        let (first, mut rest) = path.split_first()?;
        let mut at = module.to_vec();
        match first.as_str() {
            "crate" => at.clear(),
            "self" => {}
            "super" => {
                at.pop()?;
                while rest.first().is_some_and(|name| name == "super") {
                    at.pop()?;
                    rest = &rest[1..];
                }
            }
            // A module below this one, without `self`.
            _ => {
                at.push(first.clone());
                if !self.files.contains_key(&at) {
                    return None;
                }
            }
        }
        Some((at, rest))
    }
}

fn module_of(path: &str) -> Module {
    let path = path.trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    match path {
        "lib" | "main" => Module::new(),
        path => path.split('/').map(ToOwned::to_owned).collect(),
    }
}

/// Collects the paths that a file names.
#[derive(Default)]
struct Paths {
    named: Vec<Vec<String>>,
    reexports: BTreeMap<String, Vec<String>>,
}

impl Paths {
    fn uses(&mut self, tree: &UseTree, before: &[String], is_handed_on: bool) {
        let with = |name: String| [before, &[name]].concat();
        match tree {
            UseTree::Path(path) => {
                self.uses(&path.tree, &with(path.ident.to_string()), is_handed_on);
            }
            UseTree::Name(name) if name.ident == "self" => {
                let name = before.last().cloned().unwrap_or_default();
                self.used(before.to_vec(), name, is_handed_on);
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                self.used(with(name.clone()), name, is_handed_on);
            }
            UseTree::Rename(rename) => {
                let path = with(rename.ident.to_string());
                self.used(path, rename.rename.to_string(), is_handed_on);
            }
            UseTree::Glob(_) => self.named.push(before.to_vec()),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.uses(tree, before, is_handed_on);
                }
            }
        }
    }

    fn used(&mut self, path: Vec<String>, name: String, is_handed_on: bool) {
        if is_handed_on {
            self.reexports.insert(name, path.clone());
        }
        self.named.push(path);
    }
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_for_tests(attributes(item)) {
            return;
        }
        if let Item::Use(item) = item {
            let is_handed_on = !matches!(item.vis, Visibility::Inherited);
            self.uses(&item.tree, &[], is_handed_on);
        }
        visit::visit_item(self, item);
    }

    // Inline modules are for tests only; their paths would begin elsewhere.
    fn visit_item_mod(&mut self, _: &'ast ItemMod) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string());
        let names: Vec<_> = names.collect();
        if ["crate", "super", "self"].contains(&names[0].as_str()) && names.len() > 1 {
            self.named.push(names);
        }
        visit::visit_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOLDER: &str = "a/src/";

    fn tree(files: &[(&str, &str)]) -> Vec<SourceFile> {
        let files = files.iter().map(|(path, text)| SourceFile {
            path: format!("{FOLDER}{path}"),
            text: (*text).into(),
        });
        let manifest = SourceFile {
            path: "a/Cargo.toml".into(),
            text: String::new(),
        };
        files.chain([manifest]).collect()
    }

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        check(&tree(files))
            .into_iter()
            .map(|complaint| complaint.text)
            .collect()
    }

    #[test]
    fn a_circle_is_found_over_super_and_paths_in_code() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c; mod d;"),
            ("a.rs", "use crate::b::{self, one};"),
            ("b.rs", "fn one() { super::c::two() }"),
            ("c.rs", "use super::{d, a::Three as Four};"),
            ("d.rs", "struct Alone;"),
        ];
        assert_eq!(found(&files), ["import circle: a -> b -> c -> a"]);
    }

    #[test]
    fn the_recursion_of_two_errors_may_be_and_no_larger_circle() {
        let module = ("error/mod.rs", "mod local_ranks; use local_ranks::All;");
        let all = ("error/local_ranks.rs", "use crate::error::Error;");
        let error = ("lib.rs", "mod error;");
        assert_eq!(found(&[error, module, all]), [""; 0]);
        let larger = ("error/mod.rs", "mod local_ranks; mod b; use b::Two;");
        let over = ("error/b.rs", "use super::local_ranks::All;");
        assert_eq!(found(&[error, larger, all, over]).len(), 1);
    }

    #[test]
    fn a_circle_over_the_root_of_a_program_is_found() {
        let main = ("main.rs", "mod a; use crate::a::run; struct Places;");
        let module = ("a.rs", "use crate::places::Places; fn run() {}");
        assert_eq!(found(&[main, module]), ["import circle: a -> main -> a"]);
        assert_eq!(found(&[("lib.rs", "mod a;"), main, module]), [""; 0]);
    }

    #[test]
    fn a_name_that_is_handed_on_counts_as_the_file_that_has_it() {
        let library = "mod a; mod b; pub use a::Far; pub use b::inner::Near as Next;";
        let files = [
            ("lib.rs", library),
            ("a.rs", "use crate::Next; pub struct Far;"),
            ("b/mod.rs", "pub mod inner;"),
            ("b/inner.rs", "use crate::Far; pub struct Near;"),
        ];
        assert_eq!(found(&files), ["import circle: a -> b/inner -> a"]);
    }

    #[test]
    fn tests_other_crates_and_one_way_imports_make_no_circle() {
        let files = [
            ("lib.rs", "mod a; mod b; pub use a::Far;"),
            (
                "a.rs",
                "use b::Other; use std::vec; #[cfg(test)] mod tests { use crate::b; }",
            ),
            ("b.rs", "use crate::Far; use super::a; fn f(self_: Self) {}"),
            ("tests.rs", "use crate::a;"),
        ];
        assert_eq!(found(&files), [""; 0]);
        assert_eq!(found(&[("lib.rs", "fn {")]).len(), 1);
    }
}
