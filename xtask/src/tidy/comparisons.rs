//! Thresholds of tokens, assignments, rows and warps are in `tactics`, and nowhere else.

use proc_macro2::Span;
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{BinOp, Expr, Item, Lit};

use super::source::{Complaint, SourceFile, attributes, is_for_tests, line, parse};

const FOLDER: &str = "gpu/protocol/src/";
const TACTICS: &str = "gpu/protocol/src/tactics";

/// Last words of the names of counts.
const COUNTED: [&str; 6] = ["assignments", "entries", "items", "rows", "tokens", "warps"];

/// Constants set by the hardware or by the meaning of a value.
const NOT_TUNED: [&str; 3] = ["LANES", "MAX", "NOT_ROUTED"];

/// Complaints about comparisons of a count with a chosen number.
pub(super) fn check(file: &SourceFile) -> Vec<Complaint> {
    if !file.path.starts_with(FOLDER) || file.path.starts_with(TACTICS) || !file.is_rust() {
        return Vec::new();
    }
    let mut comparisons = Comparisons {
        file,
        complaints: Vec::new(),
    };
    match parse(file) {
        Ok(syntax) => comparisons.visit_file(&syntax),
        Err(complaint) => comparisons.complaints.push(complaint),
    }
    comparisons.complaints
}

struct Comparisons<'a> {
    file: &'a SourceFile,
    complaints: Vec<Complaint>,
}

impl Comparisons<'_> {
    fn found(&mut self, span: Span, count: &str, constant: &str) {
        let text = format!("compares `{count}` with {constant}: thresholds belong to `tactics`");
        self.complaints
            .push(self.file.complaint_at(line(span), text));
    }
}

impl<'ast> Visit<'ast> for Comparisons<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_expr_binary(&mut self, binary: &'ast syn::ExprBinary) {
        let is_comparison = matches!(
            binary.op,
            BinOp::Lt(_) | BinOp::Le(_) | BinOp::Gt(_) | BinOp::Ge(_) | BinOp::Eq(_) | BinOp::Ne(_)
        );
        if is_comparison {
            let sides = [(&binary.left, &binary.right), (&binary.right, &binary.left)];
            for (count, number) in sides {
                if let (Some(count), Some(number)) = (counted(count), constant(number)) {
                    self.found(binary.span(), &count, &number);
                } else if let Some((count, number)) = scaled(count) {
                    self.found(binary.span(), &count, &number);
                }
            }
        }
        visit::visit_expr_binary(self, binary);
    }
}

/// Name of the count that an expression computes: the last name of a path, a field or a call.
fn counted(expression: &Expr) -> Option<String> {
    let name = match expression {
        Expr::Path(path) => path.path.segments.last()?.ident.to_string(),
        Expr::Field(field) => match &field.member {
            syn::Member::Named(name) => name.to_string(),
            syn::Member::Unnamed(_) => return None,
        },
        Expr::MethodCall(call) => match constant(&call.receiver) {
            Some(_) => return None,
            None => call.method.to_string(),
        },
        Expr::Paren(paren) => return counted(&paren.expr),
        Expr::Cast(cast) => return counted(&cast.expr),
        // A conversion: `u64::from(tokens)`.
        Expr::Call(call) if call.args.len() == 1 => return counted(&call.args[0]),
        Expr::Reference(reference) => return counted(&reference.expr),
        Expr::Unary(unary) => return counted(&unary.expr),
        Expr::Binary(binary) => return counted(&binary.left).or_else(|| counted(&binary.right)),
        _ => return None,
    };
    let is_constant = name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    let is_counted = (name.rsplit('_').next()).is_some_and(|last| COUNTED.contains(&last));
    (is_counted && !is_constant).then_some(name)
}

/// A count and a constant that it is multiplied or divided by.
fn scaled(expression: &Expr) -> Option<(String, String)> {
    let Expr::Binary(binary) = expression else {
        return None;
    };
    let number = match &*binary.right {
        Expr::Path(_) => constant(&binary.right)?,
        _ => return None,
    };
    Some((counted(&binary.left)?, number))
}

/// A number from 2 on, or a constant's name.
fn constant(expression: &Expr) -> Option<String> {
    match expression {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Int(number) => {
                let value: u64 = number.base10_parse().ok()?;
                (value > 1).then(|| value.to_string())
            }
            _ => None,
        },
        Expr::Path(path) => {
            let name = path.path.segments.last()?.ident.to_string();
            let is_constant = name.len() > 1
                && name
                    .chars()
                    .all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
            (is_constant && !NOT_TUNED.contains(&name.as_str())).then(|| format!("`{name}`"))
        }
        Expr::Paren(paren) => constant(&paren.expr),
        Expr::Cast(cast) => constant(&cast.expr),
        Expr::Binary(binary) => constant(&binary.left).or_else(|| constant(&binary.right)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<Option<usize>> {
        let file = SourceFile {
            path: path.into(),
            text: text.into(),
        };
        check(&file)
            .iter()
            .map(|complaint| complaint.line)
            .collect()
    }

    const TEXT: &str = "//! A file.
fn decides(tokens: u32) -> bool {
    tokens >= MANY_ROWS
        || launch.common.tokens < 64
        || 1024 < role.warps()
        || items / 32 >= tuning::MOST_ITEMS
        || items / MANY_ITEMS >= senders
        || u64::from(tokens) * 2 > 64 || rows as u64 > MOST_ROWS
}
fn does_not(tokens: u32) -> bool {
    tokens == 0 || rows > 1 || warps > senders
        || row_bytes >= LARGE_PART || tokens < LANES || entries > u32::MAX
}
#[cfg(test)]
mod tests { fn compares(rows: u32) -> bool { rows == 7 } }
";

    #[test]
    fn comparisons_with_a_constant_are_found_outside_tactics() {
        let found = lines("gpu/protocol/src/dispatch/send.rs", TEXT);
        assert_eq!(found, [3, 4, 5, 6, 7, 8, 8].map(Some));
        assert_eq!(lines("gpu/protocol/src/tactics/decide.rs", TEXT), []);
        assert_eq!(lines("gpu/protocol/src/tactics.rs", TEXT), []);
        assert_eq!(lines("gpu/layout/src/shape.rs", TEXT), []);
    }
}
