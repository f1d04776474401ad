//! Items of the library for C, read from its sources: structs with their size first, and entries.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use syn::{Expr, Fields, File, Item, ItemFn, ItemStruct, Lit, Stmt, Type};

/// Items of the sources that the header is made of, in the order of files and lines.
pub(super) struct Entries {
    items: Vec<Item>,
}

/// Entries that cannot fail, and whose bodies cannot panic.
const PLAIN_ENTRIES: [&str; 8] = [
    "ferry_last_error",
    "ferry_status_string",
    "ferry_tensor_1d",
    "ferry_tensor_2d",
    "ferry_tensor_3d",
    "ferry_version",
    "ferry_version_number",
    "ferry_features",
];

impl Entries {
    /// Reads the sources in `folder` and below.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let mut items = Vec::new();
        let mut folders = vec![folder.to_owned()];
        while let Some(folder) = folders.pop() {
            let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
            for entry in entries {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let file: File = syn::parse_file(&fs::read_to_string(&path)?)
                        .with_context(|| path.display().to_string())?;
                    items.extend(file.items);
                }
            }
        }
        Ok(Self { items })
    }

    /// Names of all entries, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .entries()
            .map(|entry| entry.sig.ident.to_string())
            .collect();
        names.sort();
        names
    }

    fn entries(&self) -> impl Iterator<Item = &ItemFn> {
        self.items.iter().filter_map(|item| match item {
            Item::Fn(function) if function.sig.abi.is_some() => Some(function),
            _ => None,
        })
    }

    /// Checks that each entry's body is one call of `guard` with its own name, so that no panic crosses.
    pub(super) fn require_guards(&self) -> Result<()> {
        let unguarded: Vec<String> = self
            .entries()
            .filter(|entry| !is_guarded(entry))
            .map(|entry| entry.sig.ident.to_string())
            .filter(|name| !PLAIN_ENTRIES.contains(&name.as_str()))
            .collect();
        if unguarded.is_empty() {
            return Ok(());
        }
        bail!(
            "the body of an entry must be guard(\"its name\", ..): {}",
            unguarded.join(", ")
        );
    }

    /// `#define`s that initialize every field to its default: zero.
    pub(super) fn initialisers(&self) -> Result<String> {
        let mut structs: Vec<&ItemStruct> = self
            .items
            .iter()
            .filter_map(|item| match item {
                Item::Struct(item) if has_size(item) || item.ident == "ferry_tensor" => Some(item),
                _ => None,
            })
            .collect();
        structs.sort_by_key(|item| item.ident.to_string());
        let mut text = String::new();
        for item in structs {
            let name = item.ident.to_string();
            let values = item
                .fields
                .iter()
                .map(|field| default_of(&name, field))
                .collect::<Result<Vec<_>>>()?;
            text += &format!(
                "#define {}_INIT \\\n    {{ {} }}\n",
                name.to_uppercase(),
                wrapped(&values)
            );
        }
        Ok(text)
    }
}

/// Values, wrapped to short lines.
fn wrapped(values: &[String]) -> String {
    let (mut text, mut column) = (String::new(), 6);
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            text += ", ";
            column += 2;
        }
        if column + value.len() > 96 {
            text = text.trim_end().to_owned() + " \\\n      ";
            column = 6;
        }
        text += value;
        column += value.len();
    }
    text
}

fn has_size(item: &ItemStruct) -> bool {
    let is_named = matches!(item.fields, Fields::Named(_));
    let mut names = item.fields.iter().map(|field| field.ident.as_ref());
    is_named && names.next().flatten().is_some_and(|first| first == "size")
}

fn default_of(of: &str, field: &syn::Field) -> Result<String> {
    let is_size = field.ident.as_ref().is_some_and(|name| name == "size");
    Ok(match &field.ty {
        _ if is_size => format!("sizeof({of})"),
        Type::Ptr(_) => "NULL".to_owned(),
        Type::Array(_) => "{ 0, 0, 0, 0, 0 }".to_owned(),
        Type::Path(path) => {
            let name = path.path.require_ident()?.to_string();
            match name.as_str() {
                "u8" | "u32" | "i32" | "u64" | "usize" => "0".to_owned(),
                "f32" => "0.0f".to_owned(),
                "ferry_tensor" => "FERRY_TENSOR_INIT".to_owned(),
                "ferry_all_gather" => "NULL".to_owned(),
                other => bail!("{of}: no default is known for {other}"),
            }
        }
        _ => bail!("{of}: no default is known for a field of this kind"),
    })
}

fn is_guarded(entry: &ItemFn) -> bool {
    let [Stmt::Expr(Expr::Call(call), None)] = &entry.block.stmts[..] else {
        return false;
    };
    let calls_guard = matches!(&*call.func, Expr::Path(path) if path.path.is_ident("guard"));
    let named = call.args.first().is_some_and(|first| match first {
        Expr::Lit(literal) => {
            matches!(&literal.lit, Lit::Str(name) if entry.sig.ident == name.value())
        }
        _ => false,
    });
    calls_guard && named
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(text: &str) -> Entries {
        let items = syn::parse_str::<File>(text).unwrap().items;
        Entries { items }
    }

    #[test]
    fn an_entry_without_its_guard_is_found() {
        let good = r#"extern "C" fn ferry_a() -> ferry_status { guard("ferry_a", || Ok(())) }"#;
        assert!(entries(good).require_guards().is_ok());
        for bad in [
            r#"extern "C" fn ferry_a() -> ferry_status { guard("ferry_b", || Ok(())) }"#,
            r#"extern "C" fn ferry_a() -> ferry_status { let _ = 1; guard("ferry_a", || Ok(())) }"#,
            r#"extern "C" fn ferry_a() -> ferry_status { other("ferry_a", || Ok(())) }"#,
        ] {
            let error = entries(bad).require_guards().unwrap_err().to_string();
            assert!(error.ends_with("ferry_a"), "{error}");
        }
    }

    #[test]
    fn initialisers_are_made_of_structs_with_their_size_first() {
        let text = "struct ferry_a(());
            struct ferry_b { size: usize, at: *const u8, x: ferry_tensor, f: f32 }";
        assert_eq!(
            entries(text).initialisers().unwrap(),
            "#define FERRY_B_INIT \\\n    { sizeof(ferry_b), NULL, FERRY_TENSOR_INIT, 0.0f }\n"
        );
    }
}
