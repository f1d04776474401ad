//! Files of the tree, complaints about them, and their syntax.

use proc_macro2::Span;
use syn::{Attribute, Item, Meta};

/// Generated files, besides digests and folders named `generated`.
const GENERATED_FILES: [&str; 3] = [
    "Cargo.lock",
    "host/c/include/ferry.h",
    "tests/benchmarks/chart.svg",
];

/// A file of the tree.
pub(super) struct SourceFile {
    /// Path below the workspace, with `/`.
    pub(super) path: String,
    pub(super) text: String,
}

impl SourceFile {
    pub(super) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    pub(super) fn is_generated(&self) -> bool {
        let path = &self.path;
        path.contains("/generated/")
            || path.ends_with("-digest.txt")
            || GENERATED_FILES.contains(&path.as_str())
    }

    /// A complaint about the whole file.
    pub(super) fn complaint(&self, text: impl Into<String>) -> Complaint {
        Complaint {
            path: self.path.clone(),
            line: None,
            text: text.into(),
        }
    }

    /// A complaint about a line, counted from 1.
    pub(super) fn complaint_at(&self, line: usize, text: impl Into<String>) -> Complaint {
        Complaint {
            line: Some(line),
            ..self.complaint(text)
        }
    }

    /// A complaint for every line that has the pattern.
    pub(super) fn lines_with(&self, pattern: &str, complaint: &str) -> Vec<Complaint> {
        let lines = self.text.lines().enumerate();
        lines
            .filter(|(_, line)| line.contains(pattern))
            .map(|(index, _)| self.complaint_at(index + 1, complaint))
            .collect()
    }
}

/// A broken rule: the file, the line if it is about one line, the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Complaint {
    pub(super) path: String,
    pub(super) line: Option<usize>,
    pub(super) text: String,
}

impl std::fmt::Display for Complaint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.path, self.text),
            None => write!(f, "{}: {}", self.path, self.text),
        }
    }
}

/// The file's syntax, or a complaint that it has none.
pub(super) fn parse(file: &SourceFile) -> Result<syn::File, Complaint> {
    syn::parse_file(&file.text)
        .map_err(|error| file.complaint_at(line(error.span()), format!("cannot be read: {error}")))
}

/// The line where something begins, counted from 1.
pub(super) fn line(span: Span) -> usize {
    span.start().line
}

/// Whether these attributes keep something for tests.
pub(super) fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            condition == "test" || condition.starts_with("all (test") || condition == "loom"
        }
        _ => false,
    })
}

/// The attributes of an item.
pub(super) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}
