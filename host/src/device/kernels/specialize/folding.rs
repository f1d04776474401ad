//! Constant folding in PTX. The driver's compiler drops code that branches on constants never
//! reach, but it never computes a division: each takes some twenty instructions, and all code that
//! depends on it stays.

use std::collections::HashMap;

use ferry_ptx::Instruction;

/// Folds the lines of a kernel, without comments: instructions with constant operands become moves of their
/// results, and divisions by constants become multiplications and shifts. Returns the lines unchanged if
/// registers are not named as LLVM does.
pub(crate) fn fold(body: &[String]) -> Vec<String> {
    if !body.iter().all(|line| declares_as_llvm(line)) {
        return body.to_vec();
    }
    let mut constants = Constants::of(body);
    body.iter()
        .map(|line| replaced(line, &mut constants).unwrap_or_else(|| line.clone()))
        .collect()
}

/// Whether a line declares no registers, or registers whose names have a [`Kind`] of that very width.
fn declares_as_llvm(line: &str) -> bool {
    line.split(['{', ';']).all(|statement| {
        let Some((_, declared)) = statement.split_once(".reg ") else {
            return true;
        };
        let (width, names) = declared
            .trim_start()
            .split_once(char::is_whitespace)
            .unwrap_or((declared, ""));
        names.split(',').all(|name| {
            let name = name.split('<').next().unwrap_or_default().trim();
            match Kind::of(name) {
                None => true,
                Some(Kind::Predicate) => width == ".pred",
                Some(Kind::Word) => width == ".b32" || width == ".u32" || width == ".s32",
                Some(Kind::DoubleWord) => width == ".b64" || width == ".u64" || width == ".s64",
            }
        })
    })
}

/// Another instruction for `line`, if a simpler one does.
fn replaced<'a>(line: &'a str, constants: &mut Constants<'a>) -> Option<String> {
    let Instruction { opcode, operands } = Instruction::of(line)?;
    let &to = operands.first()?;
    if let Some(value) = constants.value(to) {
        return Some(match Kind::of(to)? {
            Kind::Predicate => format!("\tmov.pred \t{to}, {};", -i32::from(value != 0)),
            Kind::Word => format!("\tmov.b32 \t{to}, {value};"),
            Kind::DoubleWord => format!("\tmov.b64 \t{to}, {value};"),
        });
    }
    let is_division = match opcode {
        "div.u32" => true,
        "rem.u32" => false,
        _ => return None,
    };
    let [_, number, divisor] = operands[..] else {
        return None;
    };
    let divisor = constants.value(divisor).filter(|&divisor| divisor != 0)?;
    Some(division(is_division, to, number, divisor))
}

/// Instructions for `number / divisor`, or the remainder.
fn division(is_quotient: bool, to: &str, number: &str, divisor: u64) -> String {
    let shift = divisor.trailing_zeros();
    match (divisor.is_power_of_two(), is_quotient) {
        (true, true) => format!("\tshr.u32 \t{to}, {number}, {shift};"),
        (true, false) => format!("\tand.b32 \t{to}, {number}, {};", divisor - 1),
        (false, _) => {
            let rest = if is_quotient {
                String::new()
            } else {
                format!("mul.lo.u32 q, q, {divisor}; sub.u32 q, {number}, q; ")
            };
            format!(
                "\t{{ .reg .b64 n; .reg .b32 q; cvt.u64.u32 n, {number}; mul.hi.u64 n, n, {}; \
                 cvt.u32.u64 q, n; {rest}mov.b32 {to}, q; }}",
                multiplier(divisor)
            )
        }
    }
}

/// Factor of a 32-bit number for which the upper half of the 128-bit product is the quotient:
/// `2^64 / divisor`, rounded up, as its error stays too small to reach the next whole number
/// (Lemire, Kaser, Kurz, "Faster remainder by direct computation", 2019, theorem 1 with N = 32 and
/// F = 64). `divisor` is not a power of two.
const fn multiplier(divisor: u64) -> u64 {
    u64::MAX / divisor + 1
}

/// Type of a register.
enum Kind {
    Predicate,
    Word,
    DoubleWord,
}

impl Kind {
    /// Kind of a register by the name that LLVM gives it; `None` for kinds that are not folded.
    fn of(register: &str) -> Option<Self> {
        let name = register.strip_prefix('%')?;
        match name.trim_end_matches(|letter: char| letter.is_ascii_digit()) {
            "p" => Some(Self::Predicate),
            "r" => Some(Self::Word),
            "rd" => Some(Self::DoubleWord),
            _ => None,
        }
    }
}

/// The registers of a kernel whose value is the same in every launch.
struct Constants<'a> {
    /// The only line that writes a register; `None` if there are more.
    writers: HashMap<&'a str, Option<&'a str>>,
    values: HashMap<&'a str, Option<u64>>,
}

impl<'a> Constants<'a> {
    fn of(body: &'a [String]) -> Self {
        let mut writers = HashMap::new();
        for line in body {
            let written = match Instruction::of(line) {
                Some(Instruction { operands, .. }) => operands[0],
                // Any of its registers.
                None => line.as_str(),
            };
            for register in registers(written) {
                writers
                    .entry(register)
                    .and_modify(|writer| *writer = None)
                    .or_insert(Some(line.as_str()));
            }
        }
        Self {
            writers,
            values: HashMap::new(),
        }
    }

    /// Value of an operand, a register or a number, if it is known.
    fn value(&mut self, operand: &'a str) -> Option<u64> {
        if !operand.starts_with('%') {
            let negative = || operand.parse::<i64>().ok().map(i64::cast_unsigned);
            return operand.parse().ok().or_else(negative);
        }
        if let Some(&known) = self.values.get(operand) {
            return known;
        }
        // Unknown while it is computed: a register may depend on itself.
        self.values.insert(operand, None);
        let line = self.writers.get(operand).copied().flatten();
        let value = line.and_then(|line| self.result(line, operand));
        self.values.insert(operand, value);
        value
    }

    /// Value that the instruction in `line` writes to `register`.
    fn result(&mut self, line: &'a str, register: &str) -> Option<u64> {
        let Instruction { opcode, operands } = Instruction::of(line)?;
        let (&to, from) = operands.split_first()?;
        let mut values = [0; 3];
        if from.len() > values.len() {
            return None;
        }
        for (value, operand) in values.iter_mut().zip(from) {
            *value = self.value(operand)?;
        }
        let value = match to.strip_prefix('{') {
            // The halves of a double word.
            Some(halves) if opcode == "mov.b64" => {
                let low = halves.split(',').next()?.trim();
                if low == register {
                    values[0]
                } else {
                    values[0] >> 32
                }
            }
            None if to == register => evaluate(opcode, from.len(), values)?,
            // One of several results.
            _ => return None,
        };
        Some(match Kind::of(register)? {
            Kind::DoubleWord => value,
            Kind::Word | Kind::Predicate => value & LOW,
        })
    }
}

/// The low half of a double word.
const LOW: u64 = 0xffff_ffff;

/// The result of an instruction with `count` operands, in the low bits. `None` for instructions that
/// computations of sizes and places do not need.
fn evaluate(opcode: &str, count: usize, [a, b, c]: [u64; 3]) -> Option<u64> {
    let (name, kind) = opcode.rsplit_once('.')?;
    // The bits beyond a narrow operand.
    let (bits, mask) = match kind {
        "b64" | "u64" | "s64" => (64, u64::MAX),
        "b32" | "u32" | "s32" => (32, LOW),
        "pred" => (1, 1),
        _ => return None,
    };
    let (x, y) = (a & mask, b & mask);
    let is_signed = kind.starts_with('s');
    Some(match (name, count) {
        ("mov", 1) => x,
        ("cvt.u64" | "cvt.u32", 1) if !is_signed => x,
        ("not", 1) => !x & mask,
        ("popc", 1) => x.count_ones().into(),
        ("clz", 1) => (x.leading_zeros() - (64 - bits)).into(),
        ("add", 2) => x.wrapping_add(y),
        ("sub", 2) => x.wrapping_sub(y),
        ("mul.lo", 2) => x.wrapping_mul(y),
        ("mul.wide", 2) if kind == "u32" => x * y,
        ("and", 2) => x & y,
        ("or", 2) => x | y,
        // A shift by too much leaves nothing (PTX ISA, "shl").
        ("shl", 2) => x.checked_shl(b as u32).unwrap_or(0),
        ("shr", 2) if !is_signed => x.checked_shr(b as u32).unwrap_or(0),
        ("min", 2) if !is_signed => x.min(y),
        ("max", 2) if !is_signed => x.max(y),
        ("div", 2) if kind == "u32" => x.checked_div(y)?,
        ("rem", 2) if kind == "u32" => x.checked_rem(y)?,
        ("selp", 3) => {
            if c & 1 != 0 {
                x
            } else {
                y
            }
        }
        ("setp.eq", 2) => (x == y).into(),
        ("setp.ne", 2) => (x != y).into(),
        ("setp.lt", 2) if !is_signed => (x < y).into(),
        ("setp.le", 2) if !is_signed => (x <= y).into(),
        ("setp.gt", 2) if !is_signed => (x > y).into(),
        ("setp.ge", 2) if !is_signed => (x >= y).into(),
        _ => return None,
    })
}

/// The registers that a text names.
fn registers(text: &str) -> impl Iterator<Item = &str> {
    let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    text.match_indices('%').map(move |(start, _)| {
        let name = &text[start + 1..];
        let length = name.find(|letter| !is_of_name(letter));
        &text[start..=start + length.unwrap_or(name.len())]
    })
}

#[cfg(test)]
#[path = "evaluate_tests.rs"]
mod evaluate_tests;

#[cfg(test)]
mod tests {
    use super::*;

    /// The last line of a body that is folded.
    fn last(body: &[&str]) -> String {
        let body: Vec<String> = body.iter().map(|&line| line.to_owned()).collect();
        fold(&body).pop().unwrap_or_default()
    }

    #[test]
    fn results_of_constants_are_worked_out() {
        for (instruction, result) in [
            ("div.u32 %r9, %r1, 32", "mov.b32 \t%r9, 7"),
            ("rem.u32 %r9, %r1, 32", "mov.b32 \t%r9, 0"),
            ("add.s32 %r9, %r1, -225", "mov.b32 \t%r9, 4294967295"),
            ("sub.s32 %r9, 0, %r1", "mov.b32 \t%r9, 4294967072"),
            ("mul.lo.s32 %r9, %r1, 1073741824", "mov.b32 \t%r9, 0"),
            (
                "mul.wide.u32 %rd9, %r1, 1073741824",
                "mov.b64 \t%rd9, 240518168576",
            ),
            ("clz.b32 %r9, %r1", "mov.b32 \t%r9, 24"),
            ("popc.b64 %r9, %rd1", "mov.b32 \t%r9, 4"),
            ("not.b32 %r9, %r1", "mov.b32 \t%r9, 4294967071"),
            ("shl.b32 %r9, %r1, 31", "mov.b32 \t%r9, 0"),
            ("shl.b32 %r9, %r1, 32", "mov.b32 \t%r9, 0"),
            ("shr.u32 %r9, %r1, 32", "mov.b32 \t%r9, 0"),
            ("shr.u64 %rd9, %rd1, 64", "mov.b64 \t%rd9, 0"),
            (
                "shl.b64 %rd9, %rd1, 31",
                "mov.b64 \t%rd9, 9223372051887161344",
            ),
            ("shr.u32 %r9, %r1, 5", "mov.b32 \t%r9, 7"),
            ("min.u32 %r9, %r1, -1", "mov.b32 \t%r9, 224"),
            ("setp.lt.u32 %p9, %r1, 225", "mov.pred \t%p9, -1"),
            ("setp.ge.u32 %p9, %r1, -1", "mov.pred \t%p9, 0"),
            ("setp.ne.b64 %p9, %rd1, 4294967303", "mov.pred \t%p9, 0"),
            ("selp.b32 %r9, 1, 2, %p1", "mov.b32 \t%r9, 1"),
            ("or.pred %p9, %p1, %p2", "mov.pred \t%p9, -1"),
            ("and.pred %p9, %p1, %p2", "mov.pred \t%p9, 0"),
            ("not.pred %p9, %p1", "mov.pred \t%p9, 0"),
            ("mov.b64 {%r9, %r11}, %rd1", "mov.b64 {%r9, %r11}, %rd1"),
            ("add.s32 %r9, %r8, %r8", "mov.b32 \t%r9, 2"),
            ("cvt.u32.u64 %r9, %rd1", "mov.b32 \t%r9, 7"),
            ("cvt.u64.u32 %rd9, %r1", "mov.b64 \t%rd9, 224"),
        ] {
            let line = last(&[
                "\tmov.b32 \t%r1, 224;",
                "\tmov.b64 \t%rd1, 4294967303;",
                "\tmov.b64 \t{_, %r8}, %rd1;",
                "\tmov.pred \t%p1, -1;",
                "\tsetp.eq.s32 \t%p2, %r1, 7;",
                &format!("\t{instruction};"),
            ]);
            assert_eq!(line.trim().trim_end_matches(';'), result);
        }
    }

    #[test]
    fn halves_are_told_apart_by_their_whole_names() {
        let halves = [
            "\tmov.b64 \t%rd1, 4294967303;",
            "\tmov.b64 \t{%r12, %r1}, %rd1;",
        ];
        let of = |register: &str| {
            last(&[
                halves[0],
                halves[1],
                &format!("\tmov.b32 \t%r20, {register};"),
            ])
        };
        assert_eq!(of("%r12"), "\tmov.b32 \t%r20, 7;");
        assert_eq!(of("%r1"), "\tmov.b32 \t%r20, 1;");
    }

    #[test]
    fn what_is_written_twice_or_in_unknown_ways_is_no_constant() {
        for other in [
            "\tmov.b32 \t%r1, 5;",
            "\t@%p1 mov.b32 \t%r1, 5;",
            "\t{ .reg .b32 t; mov.b32 t, 5; mov.b32 %r1, t; }",
            "\tshfl.sync.idx.b32 \t%r1|%p1, %r2, 0, 31, -1;",
            "\tatom.add.u32 \t%r1, [%rd1], 1;",
            "\tadd.s32 \t%r1, %r1, 1;",
        ] {
            let line = "\tadd.s32 \t%r3, %r1, 1;";
            assert_eq!(last(&["\tmov.b32 \t%r1, 4;", other, line]), line, "{other}");
        }
        // The second predicate is the other one's opposite.
        let line = "\tor.pred \t%p3, %p2, %p2;";
        assert_eq!(last(&["\tsetp.eq.s32 \t%p1|%p2, 1, 1;", line]), line);
        // Once, but not from constants, or by itself.
        for line in [
            "\tadd.s32 \t%r3, %r2, 1;",
            "\tadd.s32 \t%r3, %r3, 1;",
            "\tdiv.u32 \t%r3, 1, 0;",
        ] {
            assert_eq!(last(&["\tld.global.u32 \t%r2, [%rd1];", line]), line);
        }
    }

    #[test]
    fn registers_of_other_kinds_than_their_names_say_are_left_alone() {
        let folded =
            |declared: &str| last(&[declared, "\tmov.b32 \t%r1, 4;", "\tadd.s32 \t%r3, %r1, 1;"]);
        for declared in [
            "\t.reg .b32 \t%r<9>;",
            "\t{ .reg .pred p; .reg .f32 %f<2>; }",
        ] {
            assert_eq!(folded(declared), "\tmov.b32 \t%r3, 5;", "{declared}");
        }
        for declared in [
            "\t.reg .b64 \t%r<9>;",
            "\t.reg .b16 %x, %r3;",
            "\t{ .reg .f32 %r3; }",
        ] {
            assert_eq!(folded(declared), "\tadd.s32 \t%r3, %r1, 1;", "{declared}");
        }
    }

    #[test]
    fn divisions_by_constants_become_shifts_or_multiplications() {
        let by = |instruction: &str| last(&["\tmov.b32 \t%r1, 64;", instruction]);
        assert_eq!(by("\tdiv.u32 \t%r3, %r2, %r1;"), "\tshr.u32 \t%r3, %r2, 6;");
        assert_eq!(
            by("\trem.u32 \t%r3, %r2, %r1;"),
            "\tand.b32 \t%r3, %r2, 63;"
        );
        let unknown = "\tdiv.u32 \t%r3, %r1, %r2;";
        assert_eq!(by(unknown), unknown);
        assert_eq!(
            by("\trem.u32 \t%r3, %r2, 224;"),
            "\t{ .reg .b64 n; .reg .b32 q; cvt.u64.u32 n, %r2; mul.hi.u64 n, n, 82351536043346213; \
             cvt.u32.u64 q, n; mul.lo.u32 q, q, 224; sub.u32 q, %r2, q; mov.b32 %r3, q; }"
        );
    }

    #[test]
    fn the_multiplier_divides_every_number() {
        let divisors = [
            3,
            5,
            6,
            7,
            224,
            641,
            65_535,
            (1 << 31) - 1,
            (1 << 31) + 1,
            LOW,
        ];
        let upper = |number: u64, divisor| {
            ((u128::from(number) * u128::from(multiplier(divisor))) >> 64) as u64
        };
        for divisor in divisors {
            // Around multiples, where a wrong rounding shows.
            let multiples = [0, 1, 2, 1000, LOW / divisor].map(|times| times * divisor);
            for number in multiples
                .into_iter()
                .flat_map(|at| [at.saturating_sub(1), at, at + 1])
            {
                let number = number.min(LOW);
                assert_eq!(
                    upper(number, divisor),
                    number / divisor,
                    "{number} / {divisor}"
                );
            }
        }
    }
}
