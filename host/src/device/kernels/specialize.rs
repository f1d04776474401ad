//! The embedded PTX for one shape: loads of parameters that are the same in every
//! launch of a communicator become constants, and so do results of these. The driver's compiler
//! then drops the code of other shapes and formats. Shorter code is faster code: with few tokens a
//! launch runs most of it once, and has to fetch it.

use std::mem::offset_of;
use std::ops::Range;

use ferry_layout::{COMMON_OFFSET, Common, DispatchRow, Kernel, Shape, Workspace};
use ferry_ptx::Module;

mod folding;

use folding::fold;

/// The kernels of rounds, without peers on other nodes.
pub(crate) const KERNELS: [Kernel; 10] = [
    Kernel::DispatchAsync,
    Kernel::DispatchWait,
    Kernel::Dispatch,
    Kernel::CombineAsync,
    Kernel::CombineWait,
    Kernel::Combine,
    Kernel::LocalDispatch,
    Kernel::LocalCombine,
    Kernel::GiveUp,
    Kernel::DispatchCounts,
];

/// Places in [`Common`] behind the shape that do not follow from it: plans of one shape may align rows
/// differently, and rounds may keep their routes in the caller's memory.
pub(crate) const VARIABLES: [Range<usize>; 2] = [
    words(offset_of!(Common, row) + DispatchRow::ALIGNMENT_OFFSET, 1),
    words(
        offset_of!(Common, tables) + offset_of!(Workspace, routes),
        2,
    ),
];

const fn words(at: usize, count: usize) -> Range<usize> {
    at..at + 4 * count
}

/// Specializes `ptx`: it has the round's kernels for `shape`, and no others.
pub(crate) fn specialised(ptx: &Module, shape: &Shape) -> String {
    let common = Common::of(shape);
    let mut text = String::with_capacity(ptx.text().len());
    let mut kept = 0;
    for function in &ptx.functions {
        let place = &function.place;
        text.push_str(&ptx.text()[kept..place.start]);
        kept = place.end;
        let is_of_round = |kernel: &Kernel| kernel.entry(false) == function.name;
        if function.is_kernel && !KERNELS.iter().any(is_of_round) {
            continue;
        }
        // One function at a time, as all name their registers alike.
        let moved = ptx.text()[place.clone()]
            .lines()
            .map(|line| constant(line, &common).unwrap_or_else(|| line.to_owned()));
        text.push_str(&fold(&moved.collect::<Vec<_>>()).join("\n"));
    }
    text.push_str(&ptx.text()[kept..]);
    text
}

/// The move that replaces `line`, if that loads a part of a kernel's parameter that never changes.
fn constant(line: &str, common: &Common) -> Option<String> {
    let rest = line.trim_start().strip_prefix("ld.param::entry.")?;
    let (width, rest) = rest.split_once(char::is_whitespace)?;
    let bytes = match width {
        "b64" | "u64" => 8,
        "b32" | "u32" => 4,
        _ => return None,
    };
    let (register, place) = rest.trim().split_once(", [")?;
    let place = place.strip_suffix("];")?;
    let (name, offset) = place.split_once('+').unwrap_or((place, "0"));
    if !name.ends_with("_param_0") {
        return None;
    }
    let start: usize = offset.parse().ok()?;
    let start = start.checked_sub(COMMON_OFFSET)?;
    // The shape, and all fields after it, most of which follow from it.
    let constants = offset_of!(Common, shape)..size_of::<Common>();
    if !constants.contains(&start) || start + bytes > constants.end {
        return None;
    }
    let overlaps = |of: &Range<usize>| start < of.end && of.start < start + bytes;
    if VARIABLES.iter().any(overlaps) {
        return None;
    }
    let value = &bytemuck::bytes_of(common)[start..start + bytes];
    let value = value
        .iter()
        .rev()
        .fold(0, |value, &byte| value << 8 | u64::from(byte));
    Some(format!("\tmov.{width} \t{register}, {value};"))
}

#[cfg(test)]
pub(crate) const SHAPE: Shape = Shape {
    ranks: 4,
    p2p_world_size: 4,
    experts: 256,
    top_k: 8,
    hidden: 7168,
    max_tokens_per_rank: 128,
    combine_mode: 0,
    token_format: 1,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_moved_and_all_else_is_loaded() {
        let common = Common::of(&SHAPE);
        let of = |line: &str| constant(line, &common);
        let moved = |line: &str, value: &str| assert_eq!(of(line).as_deref(), Some(value));
        moved(
            "\tld.param::entry.b64 \t%rd1, [ferry_dispatch_param_0+72];",
            &format!("\tmov.b64 \t%rd1, {};", 4_u64 << 32 | 4),
        );
        moved(
            "\tld.param::entry.b32 \t%r7, [ferry_dispatch_param_0+88];",
            "\tmov.b32 \t%r7, 7168;",
        );
        // A field before `common`, this rank, a field after the layout, a function's
        // parameter, no load at all.
        for offset in [16, 40, 392] {
            let line = format!("\tld.param::entry.b64 \t%rd1, [ferry_combine_param_0+{offset}];");
            assert_eq!(of(&line), None, "{line}");
        }
        // Words of the layout that do not follow from the shape.
        for at in VARIABLES.map(|range| COMMON_OFFSET + range.start) {
            for (width, at) in [("b64", at & !7), ("b32", at)] {
                let line =
                    format!("\tld.param::entry.{width} \t%r1, [ferry_combine_param_0+{at}];");
                assert_eq!(of(&line), None, "{line}");
            }
        }
        assert_eq!(of("\tld.param::func.b64 \t%rd1, [write_param_0];"), None);
        assert_eq!(of("\tadd.s64 \t%rd1, %rd2, 8;"), None);
    }

    #[test]
    fn what_other_compilers_write_stays_right() {
        let special = |body: &str| {
            let ptx = format!(
                ".version 8.3\n.visible .entry ferry_combine(\n)\n{{\n{body}\n}}\n\
                 .visible .entry my_combine(\n)\n{{\n\tret;\n}}\n"
            );
            specialised(&Module::parse(&ptx).unwrap(), &SHAPE)
        };
        // Loads that are written otherwise are kept, instructions in comments are none.
        let loads = "\tld.param.u32 \t%r1, [ferry_combine_param_0+80];\n\tadd.s32 \t%r2, %r1, 1;";
        let text = special(&format!("/*\n\tmov.b32 \t%r1, 4;\n*/\n{loads}"));
        assert!(text.contains(loads), "{text}");
        assert!(!text.contains("my_combine"), "{text}");
        // Registers with other names become constants, but nothing is computed with them.
        let text = special(
            "\t.reg .b64 \t%r<9>;\n\tld.param::entry.b32 \t%x, [ferry_combine_param_0+80];\n\
             \tmov.b64 \t%r1, 4;\n\tadd.s64 \t%r2, %r1, 1;",
        );
        assert!(text.contains("\tmov.b32 \t%x, 256;"), "{text}");
        assert!(text.contains("\tadd.s64 \t%r2, %r1, 1;"), "{text}");
    }

    #[test]
    fn the_rounds_kernels_are_kept_and_no_others() {
        let ptx = ".version 8.3\n.func helper\n{\n\tret;\n}\n.visible .entry ferry_combine(\n)\n{\n\
                   \tld.param::entry.b32 \t%r1, [ferry_combine_param_0+80];\n}\n\
                   .visible .entry ferry_combine_shmem(\n)\n{\n\tret;\n}\n\
                   .visible .entry ferry_fused_silu(\n)\n{\n\tret;\n}\n.func last\n{\n}\n";
        let wanted = ".version 8.3\n.func helper\n{\n\tret;\n}\n.visible .entry ferry_combine(\n)\n{\n\
                      \tmov.b32 \t%r1, 256;\n}\n\n\n.func last\n{\n}\n";
        assert_eq!(specialised(&Module::parse(ptx).unwrap(), &SHAPE), wanted);
    }
}
