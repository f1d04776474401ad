//! The embedded PTX for one shape: what kernels would load from their parameter, and is the same in every
//! launch of a communicator, is written into them, and what follows from it. The driver's compiler then drops what
//! other shapes and formats need. Shorter code is faster code: with few tokens a launch runs most of it once, and has
//! to fetch it.

use std::mem::offset_of;

use ferry_layout::{COMMON_OFFSET, Common, Kernel, Shape};

mod folding;

use folding::fold;

/// The kernels that work in rounds; without peers on other nodes.
pub(crate) const KERNELS: [Kernel; 6] = [
    Kernel::DispatchAsync,
    Kernel::DispatchWait,
    Kernel::Dispatch,
    Kernel::CombineAsync,
    Kernel::CombineWait,
    Kernel::Combine,
];

/// `ptx` with the round's kernels for `shape`, and no others.
pub(crate) fn specialised(ptx: &str, shape: &Shape) -> String {
    let common = Common::of(shape);
    let lines: Vec<&str> = ptx.lines().collect();
    // A function at a time: they name their registers alike.
    let functions = lines.split_inclusive(|&line| line == "}");
    let kept = functions.filter(|lines| {
        let entry = lines
            .iter()
            .find_map(|line| line.strip_prefix(".visible .entry "));
        let name = entry.map(|entry| entry.split('(').next().unwrap_or_default());
        name.is_none_or(|name| KERNELS.iter().any(|kernel| kernel.entry(false) == name))
    });
    let mut text = String::with_capacity(ptx.len());
    for lines in kept {
        let moved = lines
            .iter()
            .map(|line| constant(line, &common).unwrap_or_else(|| (*line).to_owned()));
        for line in fold(&moved.collect::<Vec<_>>()) {
            text.push_str(&line);
            text.push('\n');
        }
    }
    text
}

/// A move of what `line` loads, if it loads a part of a kernel's parameter that is the same in every launch.
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
    // All that follows from the shape, which is its first.
    let constants = offset_of!(Common, shape)..size_of::<Common>();
    if !constants.contains(&start) || start + bytes > constants.end {
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
            "\tld.param::entry.b64 \t%rd1, [ferry_dispatch_param_0+64];",
            &format!("\tmov.b64 \t%rd1, {};", 4_u64 << 32 | 4),
        );
        moved(
            "\tld.param::entry.b32 \t%r7, [ferry_dispatch_param_0+80];",
            "\tmov.b32 \t%r7, 7168;",
        );
        // A field of its own before, this rank, what comes behind the layout, a function's parameter, no load at all.
        for offset in [16, 40, 392] {
            let line = format!("\tld.param::entry.b64 \t%rd1, [ferry_combine_param_0+{offset}];");
            assert_eq!(of(&line), None, "{line}");
        }
        assert_eq!(of("\tld.param::func.b64 \t%rd1, [write_param_0];"), None);
        assert_eq!(of("\tadd.s64 \t%rd1, %rd2, 8;"), None);
    }

    #[test]
    fn the_rounds_kernels_are_kept_and_no_others() {
        let ptx = ".version 8.3\n.func helper\n{\n\tret;\n}\n.visible .entry ferry_combine(\n)\n{\n\
                   \tld.param::entry.b32 \t%r1, [ferry_combine_param_0+72];\n}\n\
                   .visible .entry ferry_combine_shmem(\n)\n{\n\tret;\n}\n\
                   .visible .entry ferry_fused_silu(\n)\n{\n\tret;\n}\n.func last\n{\n}\n";
        let wanted = ".version 8.3\n.func helper\n{\n\tret;\n}\n.visible .entry ferry_combine(\n)\n{\n\
                      \tmov.b32 \t%r1, 256;\n}\n.func last\n{\n}\n";
        assert_eq!(specialised(ptx, &SHAPE), wanted);
    }
}
