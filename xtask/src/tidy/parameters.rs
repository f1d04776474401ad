//! Parameters have names: `range: ByteRange, rows: u32` rather than `(range, rows): (ByteRange, u32)`.

use syn::visit::{self, Visit};
use syn::{FnArg, Pat, Signature};

use super::source::{Complaint, SourceFile, line, parse};

/// Complaints about functions with a tuple for a parameter.
pub(super) fn check(file: &SourceFile) -> Vec<Complaint> {
    if !file.is_rust() || file.is_generated() {
        return Vec::new();
    }
    let mut tuples = Tuples {
        file,
        complaints: Vec::new(),
    };
    match parse(file) {
        Ok(syntax) => tuples.visit_file(&syntax),
        Err(complaint) => tuples.complaints.push(complaint),
    }
    tuples.complaints
}

struct Tuples<'a> {
    file: &'a SourceFile,
    complaints: Vec<Complaint>,
}

impl<'ast> Visit<'ast> for Tuples<'_> {
    fn visit_signature(&mut self, signature: &'ast Signature) {
        for argument in &signature.inputs {
            let FnArg::Typed(argument) = argument else {
                continue;
            };
            if let Pat::Tuple(tuple) = &*argument.pat {
                let text = format!("`{}` has a tuple for a parameter", signature.ident);
                let line = line(tuple.paren_token.span.open());
                self.complaints.push(self.file.complaint_at(line, text));
            }
        }
        visit::visit_signature(self, signature);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tuple_parameter_is_found_and_a_closures_is_not() {
        let text = "//! A file.
fn free((a, b): (u32, u32), c: (u32, u32)) { [(1, 2)].map(|(a, b)| a + b); }
impl Row {
    fn method(
        &self,
        (a, _): (u32, u32),
    ) {
        fn inner((a, b): (u32, u32)) {}
    }
}
trait Machine { fn provided((a, b): (u32, u32)) {} }
";
        let file = SourceFile {
            path: "host/src/plan.rs".into(),
            text: text.into(),
        };
        let lines: Vec<_> = check(&file)
            .iter()
            .map(|complaint| complaint.line)
            .collect();
        assert_eq!(lines, [2, 6, 8, 11].map(Some));
        let other = SourceFile {
            path: "README.md".into(),
            text: "fn free((a, b): (u32, u32)) {}".into(),
        };
        assert_eq!(check(&other), []);
    }
}
