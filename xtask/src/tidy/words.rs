//! Words of our own that the field has others for: ARCHITECTURE.md has what is said instead.

use proc_macro2::Ident;
use syn::visit::{self, Visit};
use syn::{FnArg, ImplItem, Item, Pat, TraitItem};

use super::source::{attributes, is_for_tests, line, parse, words};
use super::{Complaint, SourceFile};

/// Where they are looked for. Files of tests are not: a test's name is prose.
const FOLDERS: [&str; 2] = ["gpu/", "host/simulator/"];

/// Words, alone or after each other, in names of types, functions, fields, variants, constants, modules,
/// parameters and files; and what to say instead.
const HOME_MADE: [(&str, &str); 52] = [
    ("absent", "sentinel"),
    ("announce", "notify"),
    ("announcer", "notifier"),
    ("announcers", "notifiers"),
    ("apart", "partitioned by SM"),
    ("bare", "inline"),
    ("begins", "expert base"),
    ("chunk", "tile"),
    ("chunks", "tiles"),
    ("consumed", "credit"),
    ("crew", "roles"),
    ("crews", "roles"),
    ("crowded", "specialised"),
    ("deal", "next_item"),
    ("dealer", "work queue"),
    ("draw", "take_ticket"),
    ("drawn", "ticket"),
    ("draws", "tickets"),
    ("expired", "timed_out"),
    ("far", "remote"),
    ("few", "small batch"),
    ("gate", "block counter"),
    ("gather", "reduce, or arrivals"),
    ("gatherer", "reducer"),
    ("gatherers", "reducers"),
    ("gave up", "timed out, or culprit"),
    ("give up", "time out"),
    ("gives up", "times out"),
    ("halved", "sender half"),
    ("hand on", "tell the culprit"),
    ("hand over", "hand to the last"),
    ("last of block", "arrives_last"),
    ("join", "arrive at the split row"),
    ("joined", "split arrivals"),
    ("joins", "split rows"),
    ("near", "p2p"),
    ("ordinal", "rank in expert"),
    ("ordinals", "ranks in expert"),
    ("piece", "part"),
    ("pieces", "parts"),
    ("ring", "pipeline"),
    ("says", "credit return"),
    ("seat", "warp position"),
    ("seats", "warp positions"),
    ("share", "partition"),
    ("shares", "partitions"),
    ("stopped", "aborted"),
    ("strip", "tile"),
    ("strips", "tiles"),
    ("tells", "credit return"),
    ("unit", "item"),
    ("units", "items"),
];

/// Whole names: their words are common in other names.
const HOME_MADE_NAMES: [(&str, &str); 9] = [
    ("Entries", "AssignmentWords"),
    ("Entry", "Assignment"),
    ("Place", "RowLocation"),
    ("Places", "Destinations"),
    ("Span", "ByteRange"),
    ("find_places", "find_destinations"),
    ("starts", "source bases"),
    ("together", "batched"),
    ("turn", "rotation"),
];

/// A gate is also what an activation multiplies with; these files are about it.
const ABOUT_ACTIVATIONS: [&str; 2] = ["silu", "sigmoid"];

/// Names that a file defines.
pub(super) fn check(file: &SourceFile) -> Vec<Complaint> {
    let is_looked_at = FOLDERS.iter().any(|folder| file.path.starts_with(folder));
    let is_test = file
        .path
        .split('/')
        .any(|part| part == "tests" || part == "tests.rs");
    if !is_looked_at || is_test || !file.is_rust() {
        return Vec::new();
    }
    let mut names = Names {
        file,
        complaints: Vec::new(),
    };
    if let Some(word) = home_made(file, stem(&file.path)) {
        names
            .complaints
            .push(file.complaint(format!("named with {word}")));
    }
    match parse(file) {
        Ok(syntax) => names.visit_file(&syntax),
        Err(complaint) => names.complaints.push(complaint),
    }
    names.complaints
}

fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.trim_end_matches(".rs")
}

/// The first home-made word of a name, with what to say instead.
fn home_made(file: &SourceFile, name: &str) -> Option<String> {
    let whole = HOME_MADE_NAMES.iter().find(|(word, _)| *word == name);
    let text = format!(" {} ", words(name).join(" "));
    let is_activation = |word: &str| {
        word == "gate"
            && ABOUT_ACTIVATIONS
                .iter()
                .any(|topic| file.path.contains(topic))
    };
    let part = HOME_MADE
        .iter()
        .find(|(word, _)| text.contains(&format!(" {word} ")) && !is_activation(word));
    let (word, instead) = whole.or(part)?;
    Some(format!("`{word}`: say {instead}"))
}

/// Collects the names that are defined.
struct Names<'a> {
    file: &'a SourceFile,
    complaints: Vec<Complaint>,
}

impl Names<'_> {
    fn defined(&mut self, name: &Ident) {
        if let Some(word) = home_made(self.file, &name.to_string()) {
            let text = format!("`{name}` has {word}");
            self.complaints
                .push(self.file.complaint_at(line(name.span()), text));
        }
    }
}

impl<'ast> Visit<'ast> for Names<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_for_tests(attributes(item)) {
            return;
        }
        match item {
            Item::Const(item) if item.ident != "_" => self.defined(&item.ident),
            Item::Enum(item) => self.defined(&item.ident),
            Item::Mod(item) => self.defined(&item.ident),
            Item::Static(item) => self.defined(&item.ident),
            Item::Struct(item) => self.defined(&item.ident),
            Item::Trait(item) => self.defined(&item.ident),
            Item::Type(item) => self.defined(&item.ident),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.defined(&signature.ident);
        for argument in &signature.inputs {
            if let FnArg::Typed(argument) = argument
                && let Pat::Ident(name) = &*argument.pat
            {
                self.defined(&name.ident);
            }
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if let ImplItem::Const(item) = item {
            self.defined(&item.ident);
        }
        visit::visit_impl_item(self, item);
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        match item {
            TraitItem::Const(item) => self.defined(&item.ident),
            TraitItem::Type(item) => self.defined(&item.ident),
            _ => {}
        }
        visit::visit_trait_item(self, item);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if let Some(name) = &field.ident {
            self.defined(name);
        }
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.defined(&variant.ident);
        visit::visit_variant(self, variant);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let file = SourceFile {
            path: path.into(),
            text: text.into(),
        };
        check(&file).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn home_made_words_are_found_where_a_name_is_defined() {
        let text = "//! A file.
struct BareRow { crews: u32, hand_over_to: u32 }
enum Row { Few(u32) }
const MANY_UNITS: u32 = 32;
fn give_up(seat: u32, others: u32) { let units = seat; }
impl Row { const FAR_DEPTH: u32 = 1; fn is_crowded(&self) {} }
trait Machine { fn gate(&self); }
mod pieces;
struct Span;
";
        let lines: Vec<_> = found("gpu/protocol/src/work/item.rs", text);
        assert_eq!(lines.len(), 12, "{lines:#?}");
        assert!(
            lines[0].contains(":2: `BareRow` has `bare`: say inline"),
            "{}",
            lines[0]
        );
        assert!(found("gpu/src/dealer.rs", "//! A file.\n")[0].contains("named with `dealer`"));
    }

    #[test]
    fn other_names_uses_tests_and_prose_are_left_alone() {
        let text = "//! Few bare units, far apart.
fn united(spread: u32) { gate(spread); let few = bare.units; }
fn community(wherein: u32, string: &str, dealt: u32) {}
#[test] fn few_units_are_dealt() {}
#[cfg(test)] mod tests { fn bare() {} }
";
        assert_eq!(found("gpu/protocol/src/work/item.rs", text), [""; 0]);
        let bare = "//! A file.\nfn bare() {}\n";
        assert_eq!(found("gpu/layout/tests/window.rs", bare), [""; 0]);
        assert_eq!(found("host/src/plan.rs", bare), [""; 0]);
        assert_eq!(found("host/simulator/src/warp.rs", bare).len(), 1);
        let gates = "//! A file.\nfn gate() {}\n";
        assert_eq!(found("gpu/layout/src/silu/sigmoids.rs", gates), [""; 0]);
    }
}
