//! Imports between the rooms of a crate or a package, the modules of its root, follow a committed order.

use std::collections::{BTreeMap, BTreeSet};

use super::imports::{self, Crate};
use super::source::{Complaint, SourceFile};

/// The file with a line for each crate and package: its folder, and its rooms from the top floor down.
pub(super) const ROOMS: &str = "xtask/rooms.txt";

/// The files that each file of a folder imports from, by their paths in it.
pub(super) type Imports = BTreeMap<String, BTreeSet<String>>;

/// Complaints about imports of a room from one above it, and about rooms that the order lacks.
pub(super) fn check(files: &[SourceFile]) -> Vec<Complaint> {
    let (orders, folders) = (orders(files), imports::folders(files));
    folders
        .iter()
        .flat_map(|folder| {
            let order = orders.get(folder).copied().unwrap_or("");
            let imports = Crate::read(files, folder).imports_of_modules();
            back_up(folder, order, &imports, is_below_root)
        })
        .collect()
}

/// The rooms of each folder that the file names, with a trailing slash.
pub(super) fn orders(files: &[SourceFile]) -> BTreeMap<String, &str> {
    let file = files.iter().find(|file| file.path == ROOMS);
    let lines = file.map_or("", |file| &file.text).lines();
    let orders = lines.filter_map(|line| line.split_once(": "));
    orders
        .map(|(place, rooms)| (format!("{place}/"), rooms))
        .collect()
}

/// The complaints about one folder. `is_below_root`: whether a room is not the root, which is above all
/// others and has no place in the order.
pub(super) fn back_up(
    folder: &str,
    order: &str,
    imports: &Imports,
    is_below_root: fn(&str) -> bool,
) -> Vec<Complaint> {
    let order: Vec<&str> = order.split_whitespace().collect();
    let floor = |room: &str| order.iter().position(|other| *other == room);
    let complaint = |path: &str, text: String| Complaint {
        path: format!("{folder}{path}"),
        line: None,
        text,
    };
    let mut complaints = Vec::new();
    let (mut unknown, mut known) = (BTreeSet::new(), BTreeSet::new());
    for (path, targets) in imports {
        let own = room(path);
        for room in targets.iter().map(|target| room(target)).chain([own]) {
            match floor(room) {
                Some(_) => known.insert(room.to_owned()),
                None => is_below_root(room) && unknown.insert(room.to_owned()),
            };
        }
        for target in targets {
            let above = room(target);
            let runs_up = match (floor(above), floor(own)) {
                (Some(above), Some(own)) => above < own,
                (_, own) => own.is_some() && !is_below_root(above),
            };
            if runs_up {
                let text = format!("`{own}` imports from `{above}`, which is above it ({target})");
                complaints.push(complaint(path, text));
            }
        }
    }
    let unknown = unknown.iter();
    let unknown = unknown.map(|room| format!("the order of {folder} has no room `{room}`"));
    let empty = order.iter().filter(|room| !known.contains(**room));
    let empty = empty.map(|room| format!("{folder} has no room `{room}`"));
    complaints.extend(unknown.chain(empty).map(|text| Complaint {
        path: ROOMS.into(),
        line: None,
        text,
    }));
    complaints
}

/// The room of a file: the module of the root that it belongs to.
fn room(path: &str) -> &str {
    let first = path.split('/').next().unwrap_or(path);
    first.split('.').next().unwrap_or(first)
}

/// Whether a room is not the root itself, which is above all others.
fn is_below_root(room: &str) -> bool {
    !["lib", "main"].contains(&room)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(order: &str, files: &[(&str, &str)]) -> Vec<String> {
        let source = |(path, text): &(&str, &str)| SourceFile {
            path: (*path).into(),
            text: (*text).into(),
        };
        let mut files: Vec<_> = files.iter().map(source).collect();
        files.push(source(&(ROOMS, order)));
        let complaints = check(&files);
        complaints
            .into_iter()
            .map(|complaint| complaint.text)
            .collect()
    }

    const FILES: [(&str, &str); 5] = [
        ("a/Cargo.toml", ""),
        (
            "a/src/lib.rs",
            "mod top; mod low; pub use low::deep::Deep; pub use top::Top;",
        ),
        (
            "a/src/top.rs",
            "use crate::low::deep::Deep; pub struct Top;",
        ),
        ("a/src/low/mod.rs", "pub mod deep; use deep::Deep;"),
        ("a/src/low/deep.rs", "pub struct Deep;"),
    ];

    #[test]
    fn imports_that_run_down_are_none_of_its_business() {
        assert_eq!(found("a/src: top low\n", &FILES), [""; 0]);
    }

    #[test]
    fn an_import_that_runs_back_up_is_found() {
        let wanted = "`top` imports from `low`, which is above it (low/deep.rs)";
        assert_eq!(found("a/src: low top\n", &FILES), [wanted]);
    }

    #[test]
    fn an_import_over_the_root_runs_back_up() {
        let mut files = FILES;
        files[2].1 = "use crate::Deep; pub struct Top;";
        let wanted = "`top` imports from `lib`, which is above it (lib.rs)";
        assert_eq!(found("a/src: top low\n", &files), [wanted]);
    }

    #[test]
    fn rooms_without_a_place_and_places_without_a_room_are_found() {
        let wanted = [
            "the order of a/src/ has no room `low`",
            "a/src/ has no room `old`",
        ];
        assert_eq!(found("a/src: top old\n", &FILES), wanted);
    }
}
