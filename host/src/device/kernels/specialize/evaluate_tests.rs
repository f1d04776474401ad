//! Every folded operation, compared with a second implementation of the PTX documentation in
//! integers that do not overflow, at values at which a wrong bound, sign or width shows.

use super::*;

/// An instruction's name, the number of its operands, the types for which it is folded, and those
/// for which it is valid and left alone.
type Operation = (
    &'static str,
    usize,
    &'static [&'static str],
    &'static [&'static str],
);

const ALL: &[&str] = &["b32", "u32", "s32", "b64", "u64", "s64"];
const NUMBERS: &[&str] = &["u32", "s32", "u64", "s64"];
const UNSIGNED: &[&str] = &["u32", "u64"];
const SIGNED: &[&str] = &["s32", "s64"];
const BITS: &[&str] = &["b32", "b64"];
const LOGICAL: &[&str] = &["b32", "b64", "pred"];

const OPERATIONS: [Operation; 26] = [
    ("mov", 1, ALL, &[]),
    ("mov", 1, &["pred"], &[]),
    ("cvt.u64", 1, UNSIGNED, SIGNED),
    ("cvt.u32", 1, UNSIGNED, SIGNED),
    ("not", 1, LOGICAL, &[]),
    ("popc", 1, BITS, &[]),
    ("clz", 1, BITS, &[]),
    ("add", 2, NUMBERS, &[]),
    ("sub", 2, NUMBERS, &[]),
    ("mul.lo", 2, NUMBERS, &[]),
    ("mul.wide", 2, &["u32"], &["s32"]),
    ("and", 2, LOGICAL, &[]),
    ("or", 2, LOGICAL, &[]),
    ("shl", 2, BITS, &[]),
    ("shr", 2, &["b32", "u32", "b64", "u64"], SIGNED),
    ("min", 2, UNSIGNED, SIGNED),
    ("max", 2, UNSIGNED, SIGNED),
    ("div", 2, &["u32"], &["s32", "u64", "s64"]),
    ("rem", 2, &["u32"], &["s32", "u64", "s64"]),
    ("selp", 3, ALL, &[]),
    ("setp.eq", 2, ALL, &[]),
    ("setp.ne", 2, ALL, &[]),
    ("setp.lt", 2, UNSIGNED, SIGNED),
    ("setp.le", 2, UNSIGNED, SIGNED),
    ("setp.gt", 2, UNSIGNED, SIGNED),
    ("setp.ge", 2, UNSIGNED, SIGNED),
];

/// Types of an instruction's operands, and of its result.
fn types(name: &str, kind: &'static str) -> ([&'static str; 3], &'static str) {
    match name {
        "shl" | "shr" => ([kind, "u32", "u32"], kind),
        "selp" => ([kind, kind, "pred"], kind),
        "popc" | "clz" | "cvt.u32" => ([kind; 3], "u32"),
        "mul.wide" | "cvt.u64" => ([kind; 3], "u64"),
        _ if name.starts_with("setp") => ([kind; 3], "pred"),
        _ => ([kind; 3], kind),
    }
}

/// Bits of an operand.
fn width(kind: &str) -> u32 {
    kind[1..].parse().unwrap_or(1)
}

/// Mask of an operand's bits.
fn mask(kind: &str) -> u64 {
    u64::MAX >> (64 - width(kind))
}

/// A register for an operand.
fn register(kind: &str, number: usize) -> String {
    let letters = match width(kind) {
        1 => "p",
        32 => "r",
        _ => "rd",
    };
    format!("%{letters}{number}")
}

/// The ends of both widths and their neighbours, all shift distances and one more and
/// less, a few others.
fn edges(kind: &str) -> Vec<u64> {
    let small = [0, 1, 2, 3, 6, 7, 31, 32, 33, 63, 64, 65, 224];
    let powers = [15, 31, 32, 63].map(|power| 1_u64 << power);
    let around = powers.iter().flat_map(|&at| [at - 1, at, at + 1]);
    let most = mask(kind);
    let mut edges: Vec<u64> = small.into_iter().chain(around).collect();
    edges.extend([most, most & !1, most / 3]);
    edges.retain(|&edge| edge <= most);
    edges.sort_unstable();
    edges.dedup();
    edges
}

/// An operand as a number, by its type.
fn number(kind: &str, bits: u64) -> i128 {
    match kind {
        "s32" => (bits as u32).cast_signed().into(),
        "s64" => bits.cast_signed().into(),
        _ => bits.into(),
    }
}

/// Result of an instruction (PTX ISA, the section of its name), before it is cut to the width of its result.
/// `None` if it is undefined.
fn reference(name: &str, kind: &str, [a, b, c]: [u64; 3]) -> Option<i128> {
    let bits = width(kind);
    let (x, y) = (number(kind, a), number(kind, b));
    let bit = |of: u64, index: u32| of >> index & 1 == 1;
    let set = (0..bits).filter(|&index| bit(a, index));
    let each = |result: fn(bool, bool) -> bool| {
        let of = |index| i128::from(result(bit(a, index), bit(b, index))) << index;
        (0..bits).map(of).sum::<i128>()
    };
    Some(match name {
        "mov" | "cvt.u64" | "cvt.u32" => x,
        "not" => each(|x, _| !x),
        "and" => each(|x, y| x && y),
        "or" => each(|x, y| x || y),
        "popc" => set.count() as i128,
        "clz" => (bits - set.max().map_or(0, |highest| highest + 1)).into(),
        "add" => x + y,
        "sub" => x - y,
        "mul.lo" | "mul.wide" => x.wrapping_mul(y),
        // A shift by more than the width is one by the width.
        "shl" => x << b.min(bits.into()),
        "shr" => x >> b.min(bits.into()),
        "min" => x.min(y),
        "max" => x.max(y),
        "div" => x.checked_div(y)?,
        "rem" => x.checked_rem(y)?,
        "selp" if c == 0 => y,
        "selp" => x,
        "setp.eq" => (x == y).into(),
        "setp.ne" => (x != y).into(),
        "setp.lt" => (x < y).into(),
        "setp.le" => (x <= y).into(),
        "setp.gt" => (x > y).into(),
        "setp.ge" => (x >= y).into(),
        _ => unreachable!("{name}"),
    })
}

/// The line that must replace an instruction.
fn folded(kind: &str, result: i128) -> String {
    let (to, value) = (register(kind, 9), result as u64 & mask(kind));
    match width(kind) {
        1 => format!("\tmov.pred \t{to}, {};", -i32::from(value == 1)),
        bits => format!("\tmov.b{bits} \t{to}, {value};"),
    }
}

/// An instruction on these operands, each in a register, except the one with the number `literal`, written as
/// the compiler writes numbers: with a sign or without.
fn instruction(
    opcode: &str,
    operands: &[(&str, u64)],
    to: &str,
    literal: Option<(usize, bool)>,
) -> Vec<String> {
    let mut body = Vec::new();
    let mut last = format!("\t{opcode} \t{}", register(to, 9));
    for (index, &(kind, value)) in operands.iter().enumerate() {
        let bits = width(kind);
        let unsigned = value.to_string();
        let signed = match bits {
            1 => (-i32::from(value == 1)).to_string(),
            32 => (value as u32).cast_signed().to_string(),
            _ => value.cast_signed().to_string(),
        };
        last += match literal {
            Some((which, true)) if which == index => format!(", {signed}"),
            Some((which, false)) if which == index => format!(", {unsigned}"),
            _ => {
                let register = register(kind, index);
                body.push(match bits {
                    1 => format!("\tsetp.eq.u32 \t{register}, {value}, 1;"),
                    _ => format!("\tmov.b{bits} \t{register}, {signed};"),
                });
                format!(", {register}")
            }
        }
        .as_str();
    }
    body.push(last + ";");
    body
}

/// Folds an instruction on one set of operands, in all ways that they can be written.
fn check(name: &str, count: usize, kind: &'static str, must_fold: bool, values: [u64; 3]) {
    let (kinds, to) = types(name, kind);
    let opcode = format!("{name}.{kind}");
    let operands: Vec<(&str, u64)> = kinds.into_iter().zip(values).take(count).collect();
    let literals = (0..count).filter(|&index| kinds[index] != "pred" || name == "mov");
    let ways = literals.flat_map(|index| [Some((index, false)), Some((index, true))]);
    for way in ways.chain([None]) {
        let body = instruction(&opcode, &operands, to, way);
        let (given, line) = (&body[body.len() - 1], fold(&body).pop().unwrap());
        match reference(name, kind, values).map(|result| folded(to, result)) {
            Some(wanted) if must_fold || line != *given => assert_eq!(line, wanted, "{body:?}"),
            _ => assert_eq!(line, *given, "{body:?}"),
        }
    }
}

#[test]
fn every_operation_gives_what_ptx_says() {
    for (name, count, fold, leave) in OPERATIONS {
        let folded = fold.iter().map(|&kind| (kind, true));
        for (kind, must_fold) in folded.chain(leave.iter().map(|&kind| (kind, false))) {
            let (kinds, _) = types(name, kind);
            let values = |index: usize| {
                if index < count {
                    edges(kinds[index])
                } else {
                    vec![0]
                }
            };
            for a in values(0) {
                for b in values(1) {
                    for c in values(2) {
                        check(name, count, kind, must_fold, [a, b, c]);
                    }
                }
            }
        }
    }
}
