//! Takes the kernels for one node out of PTX that also has those for several.

use ferry_ptx::{function_name, next_function, without_comments};

use crate::error::{Error, Result};

/// A function's definition or declaration.
struct Function<'a> {
    name: &'a str,
    /// Declarations between the function before and this one.
    before: &'a str,
    /// All of it, to the closing brace or the semicolon.
    text: &'a str,
    is_kernel: bool,
}

/// Returns PTX without the kernels that call NVSHMEM, which end in `_shmem`, the functions that only they
/// call, and NVSHMEM's variables. All that stays is as it was, but for comments.
///
/// # Errors
///
/// [`Error::Parse`] if a line that stays names NVSHMEM.
pub fn for_one_node(ptx: &str) -> Result<String> {
    let ptx = without_comments(ptx);
    let (functions, end) = functions(&ptx);
    let kept = called_from(&functions, |function| {
        function.is_kernel && !function.name.ends_with("_shmem")
    });
    let mut left = String::with_capacity(ptx.len());
    let names_it = |line: &&str| line.contains("nvshmem");
    for (function, kept) in functions.iter().zip(kept) {
        let lines = function.before.split_inclusive('\n');
        left.extend(lines.filter(|line| !names_it(line)));
        if kept {
            left.push_str(function.text);
        }
    }
    left.push_str(end);
    match left.lines().find(names_it) {
        None => Ok(left),
        Some(line) => Err(Error::Parse {
            what: "the PTX",
            detail: format!("a kernel for one node uses NVSHMEM: {line}"),
        }),
    }
}

/// All functions in the order of the text, and the text after the last one.
fn functions(ptx: &str) -> (Vec<Function<'_>>, &str) {
    let (mut functions, mut rest) = (Vec::new(), ptx);
    while let Some((header, _, after)) = next_function(rest) {
        // Both are slices of `rest`.
        let start = header.as_ptr() as usize - rest.as_ptr() as usize;
        let end = rest.len() - after.len();
        functions.push(Function {
            name: function_name(header),
            before: &rest[..start],
            text: &rest[start..end],
            is_kernel: header.contains(".entry"),
        });
        rest = after;
    }
    (functions, rest)
}

/// Whether each function is one of `roots`, or called from them, directly or not.
fn called_from(functions: &[Function<'_>], roots: impl Fn(&Function<'_>) -> bool) -> Vec<bool> {
    let mut kept: Vec<bool> = functions.iter().map(roots).collect();
    loop {
        let is_called = |called: &Function<'_>| {
            let mut callers = functions.iter().zip(&kept).filter(|(_, kept)| **kept);
            callers.any(|(caller, _)| caller.text.contains(called.name))
        };
        let callees = functions.iter().zip(&kept);
        let more: Vec<bool> = callees
            .map(|(function, &kept)| kept || (!function.is_kernel && is_called(function)))
            .collect();
        if more == kept {
            return kept;
        }
        kept = more;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 8.3\n.target sm_90a\n.func _Rshared(\n)\n;\n.func nvshmem_put(\n)\n;\n\
        .visible .global .b8 layout[8];\n.visible .const .b8 nvshmemi_state[776];\n";

    fn function(kind: &str, name: &str, body: &str) -> String {
        format!("{kind} {name}(\n)\n{{\n\t{body}\n}}\n")
    }

    #[test]
    fn kernels_for_several_nodes_go_with_what_only_they_call() {
        let once = function(".visible .entry", "ferry_dispatch", "call _Rshared;");
        let shared = function(".func", "_Rshared", "call _Rinner;");
        let inner = function(".func", "_Rinner", "ld.global.u64 %rd1, [layout];");
        let several = function(".visible .entry", "ferry_dispatch_shmem", "call _Rsend;");
        let send = function(".func", "_Rsend", "call nvshmem_put;");
        let put = function(
            ".func",
            "nvshmem_put",
            "ld.const.u32 %r1, [nvshmemi_state];",
        );
        let all = [
            HEAD,
            &once,
            &several,
            "// of NVSHMEM\n",
            &send,
            &shared,
            &inner,
            &put,
        ]
        .concat();
        let left = for_one_node(&all).unwrap();
        for kept in [&once, &shared, &inner] {
            assert!(left.contains(kept.trim_end()), "{left}");
        }
        assert!(
            left.contains("layout[8];") && left.contains(".func _Rshared(\n)\n;"),
            "{left}"
        );
        assert!(
            !left.contains("_Rsend") && !left.contains("shmem"),
            "{left}"
        );

        let calls_it = once.replace("_Rshared", "nvshmem_put");
        let error = for_one_node(&all.replace(&once, &calls_it)).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("uses NVSHMEM: .func nvshmem_put"),
            "{error}"
        );
    }
}
