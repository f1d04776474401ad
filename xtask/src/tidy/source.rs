//! Reads Rust for the rules that need more than its text.

use proc_macro2::Span;
use syn::{Attribute, Item, Meta};

use super::{Complaint, SourceFile};

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

/// The words of an identifier, in lower case: of `BareRow` and `BARE_ROW` `bare` and `row`.
pub(super) fn words(identifier: &str) -> Vec<String> {
    let mut words = Vec::new();
    for part in identifier.trim_start_matches("r#").split('_') {
        let characters: Vec<char> = part.chars().collect();
        let mut word = String::new();
        for (index, &character) in characters.iter().enumerate() {
            let before = index.checked_sub(1).map(|before| characters[before]);
            let after = characters.get(index + 1);
            let begins = character.is_uppercase()
                && before.is_some_and(|before| {
                    !before.is_uppercase() || after.is_some_and(|after| after.is_lowercase())
                });
            if begins {
                words.push(std::mem::take(&mut word));
            }
            word.extend(character.to_lowercase());
        }
        words.push(word);
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_fall_into_words() {
        for (identifier, expected) in [
            ("has_few_tokens", "has few tokens"),
            ("FEW_ENTRIES", "few entries"),
            ("FewCounts", "few counts"),
            ("TMABox2d", "tma box2d"),
            ("r#unit", "unit"),
        ] {
            assert_eq!(words(identifier).join(" "), expected);
        }
    }
}
