//! Rules that the PTX must obey.

use ferry_build::{Package, Variant};

use crate::assemble::Resources;
use crate::generator::CodeGenerator;
use crate::ptx::PtxModule;

/// Kernels that may use local memory, and the most bytes. With an epilogue, the assembler finds a few
/// registers less than they need on sm_80; without one they use none, as the digests show.
///
/// Local memory is device memory behind the caches: a kernel that copies rows has no use for it, and it
/// appears by accident (a parameter indexed at run time, a spill).
const LOCAL_MEMORY_ALLOWED: [(Variant, &str, u64); 2] = [
    (Variant::Sm80, "ferry_combine", 16),
    (Variant::Sm80, "ferry_combine_wait", 16),
];

/// Most bytes that the assembler may spill in kernels of `ferry-rows`: in the fused dispatch, which sends and
/// receives and is a few registers short, and in any kernel on sm_80, where it finds fewer.
const SPILLED_IN_ROWS: u64 = 80;
/// The same for the fused combine of `ferry-rows`, some of whose warps only reduce: a few registers short.
const SPILLED_IN_COMBINE_OF_ROWS: u64 = 16;

/// The same for kernels that send to other nodes: NVSHMEM's requests and the waits for room before them are
/// inlined, and each row waits for a thread of the host, beside which a few spilled registers are nothing.
const SPILLED_BETWEEN_NODES: u64 = 48;

/// Kernels that may begin before the kernel before them in their stream has ended.
const EARLY_KERNELS: [&str; 3] = ["ferry_dispatch", "ferry_combine", "ferry_give_up"];

/// Non-coherent loads that such kernels may have: of 64 bits, from the table of the peers' windows, which is
/// written before the first launch. The user's tensors have no elements of 64 bits; a kernel that writes them
/// may still be running, and the assembler may move a non-coherent load before the wait for that kernel.
const EARLY_CONSTANT_LOADS: [&str; 2] = ["ld.global.nc.u64", "ld.global.nc.b64"];

/// Kernels that may use local memory if `rustc_codegen_nvvm` makes them, and the most bytes: it leaves ids in
/// an array, and with options fused dispatches are a few registers short. Without options they use none, as
/// the digests show.
const LOCAL_MEMORY_OF_NVVM: [(&str, u64); 3] = [
    ("ferry_dispatch_local", 128),
    ("ferry_dispatch", 88),
    ("ferry_dispatch_shmem", 56),
];

/// The rules that a module of a package breaks, given the resources of its kernels.
pub(crate) fn violations(
    package: Package,
    generator: CodeGenerator,
    variant: Variant,
    module: &PtxModule,
    kernels: &[(String, Resources)],
) -> Vec<String> {
    let mut found = Vec::new();
    for name in &module.external_functions {
        found.push(format!(
            "{variant}: `.extern .func {name}`: nothing defines it"
        ));
    }
    let keeps_rows = matches!(package, Package::Rows | Package::NodeRows);
    for function in &module.functions {
        let name = &function.name;
        let assembled = kernels.iter().find(|(kernel, _)| kernel == name);
        let stack = assembled.map_or(0, |(_, needs)| u64::from(needs.stack_bytes));
        let bytes = function.local_bytes.max(stack);
        let is_allowed = LOCAL_MEMORY_ALLOWED
            .iter()
            .any(|(of, kernel, most)| (*of, *kernel) == (variant, name.as_str()) && bytes <= *most);
        let is_of_nvvm = generator == CodeGenerator::Nvvm
            && LOCAL_MEMORY_OF_NVVM
                .iter()
                .any(|(kernel, most)| *kernel == name.as_str() && bytes <= *most);
        let spilled_at_most = match name.as_str() {
            "ferry_dispatch" => SPILLED_IN_ROWS,
            _ if variant == Variant::Sm80 => SPILLED_IN_ROWS,
            "ferry_combine" => SPILLED_IN_COMBINE_OF_ROWS,
            _ => 0,
        };
        let is_spilled_in_rows =
            keeps_rows && function.local_bytes == 0 && stack <= spilled_at_most;
        let is_spilled_between_nodes =
            name.ends_with("_shmem") && function.local_bytes == 0 && stack <= SPILLED_BETWEEN_NODES;
        let is_spilled = is_spilled_in_rows || is_spilled_between_nodes;
        if bytes > 0 && !is_allowed && !is_of_nvvm && !is_spilled {
            found.push(format!(
                "{variant}: {name} uses {bytes} bytes of local memory"
            ));
        }
        if !EARLY_KERNELS.iter().any(|early| name.starts_with(early)) {
            continue;
        }
        for opcode in function.memory_operations.keys() {
            let is_allowed = EARLY_CONSTANT_LOADS.contains(&&**opcode);
            if opcode.starts_with("ld.global.nc") && !is_allowed {
                found.push(format!(
                    "{variant}: {name} has {opcode}, and may begin before its input is written"
                ));
            }
        }
    }
    if kernels.is_empty() {
        found.push(format!("{variant}: no kernel"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = ".version 8.3\n.visible .entry ferry_dispatch(\n)\n{\n\tret;\n}\n";

    fn broken(ptx: &str, stack_bytes: u32) -> Vec<String> {
        broken_in(Package::Kernels, ptx, stack_bytes)
    }

    fn broken_in(package: Package, ptx: &str, stack_bytes: u32) -> Vec<String> {
        let module = PtxModule::parse(ptx).unwrap();
        let needs = Resources {
            stack_bytes,
            ..Resources::default()
        };
        let kernels: Vec<_> = module
            .kernels()
            .map(|kernel| (kernel.name.clone(), needs))
            .collect();
        let generator = CodeGenerator::Stock;
        violations(package, generator, Variant::Sm90a, &module, &kernels)
    }

    #[test]
    fn local_memory_stack_and_external_functions_are_violations() {
        assert_eq!(broken(PTX, 0), [""; 0]);
        let local = PTX.replace("\tret", "\t.local .align 8 .b8 depot[32];\n\tret");
        assert_eq!(
            broken(&local, 0),
            ["sm_90a: ferry_dispatch uses 32 bytes of local memory"]
        );
        assert_eq!(
            broken(PTX, 8),
            ["sm_90a: ferry_dispatch uses 8 bytes of local memory"]
        );
        let external = format!("{PTX}.extern .func nvshmem_quiet\n()\n;\n");
        let texts = broken(&external, 0);
        assert!(texts[0].contains("nvshmem_quiet"), "{texts:?}");
        assert_eq!(broken(".version 8.3\n", 0), ["sm_90a: no kernel"]);
    }

    #[test]
    fn from_sm_90_on_only_the_fused_kernels_of_rows_may_spill_a_little() {
        let broken = |ptx: &str, stack_bytes| broken_in(Package::Rows, ptx, stack_bytes);
        assert_eq!(broken(PTX, 48), [""; 0]);
        assert_eq!(broken(PTX, 88).len(), 1);
        let other = PTX.replace("ferry_dispatch", "ferry_combine");
        assert_eq!(broken(&other, 16), [""; 0]);
        assert_eq!(broken(&other, 24).len(), 1);
        let half = PTX.replace("ferry_dispatch", "ferry_combine_wait");
        assert_eq!(broken(&half, 8).len(), 1);
        let local = PTX.replacen("\tret", "\t.local .align 8 .b8 depot[32];\n\tret", 1);
        assert_eq!(broken(&local, 48).len(), 1);
    }

    #[test]
    fn kernels_that_send_to_other_nodes_may_spill_a_little() {
        let remote = PTX.replace("ferry_dispatch", "ferry_dispatch_shmem");
        assert_eq!(broken(&remote, 48), [""; 0]);
        assert_eq!(broken(&remote, 56).len(), 1);
        let local = remote.replacen("\tret", "\t.local .align 8 .b8 depot[32];\n\tret", 1);
        assert_eq!(broken(&local, 32).len(), 1);
    }

    #[test]
    fn kernels_that_may_begin_early_load_no_tensor_non_coherently() {
        let with = |load: &str| PTX.replace("\tret", &format!("\t{load} {{%r1}}, [%rd1];\n\tret"));
        for load in [
            "ld.global.nc.u32",
            "@p ld.global.nc.L1::no_allocate.v4.u32",
            "ld.global.nc.v4.u32",
        ] {
            let texts = broken(&with(load), 0);
            assert_eq!(texts.len(), 1, "{load}: {texts:?}");
            assert!(
                texts[0].contains("ferry_dispatch has ld.global.nc"),
                "{texts:?}"
            );
        }
        for load in ["ld.global.nc.u64", "ld.global.u32", "@p ld.global.v4.u32"] {
            assert_eq!(broken(&with(load), 0), [""; 0], "{load}");
        }
        let other = with("ld.global.nc.u32").replace("ferry_dispatch", "ferry_fused_silu");
        assert_eq!(broken(&other, 0), [""; 0]);
    }
}
