//! What host and kernels must agree on, as one number.

use crate::{
    CombineArgs, CombineWith, Common, DispatchArgs, DispatchRow, DispatchWith, FaultPage, Kernel,
    PIPELINE_BYTES, PIPELINE_STAGES, PROTOCOL_VERSION, SMALL_BLOCK_TOKENS, Shape, SiluArgs, Window,
    Workspace,
};

/// Whether kernels and host were built from the same memory layout: the protocol's version, the sizes of all
/// arguments, and everything that follows from some shapes. Kernels carry the number as the variable
/// [`FINGERPRINT_VARIABLE`] of their PTX. FNV-1a, as [`Common::fingerprint`].
pub const LAYOUT_FINGERPRINT: u64 = {
    let sizes = [
        PROTOCOL_VERSION as usize,
        size_of::<DispatchArgs>(),
        size_of::<CombineArgs>(),
        size_of::<DispatchWith>(),
        size_of::<CombineWith<()>>(),
        size_of::<SiluArgs>(),
        size_of::<FaultPage>(),
        // What the host gives a launch, and kernels rely on.
        PIPELINE_BYTES as usize,
        PIPELINE_STAGES as usize,
        SMALL_BLOCK_TOKENS as usize,
        Kernel::Dispatch.threads_per_block() as usize,
        Kernel::Combine.threads_per_block() as usize,
        Kernel::FusedSilu.threads_per_block() as usize,
    ];
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let mut index = 0;
    while index < sizes.len() {
        hash = with_bytes(hash, &(sizes[index] as u64).to_le_bytes());
        index += 1;
    }
    let mut index = 0;
    while index < SHAPES.len() {
        let common: [u8; size_of::<Common>()] = bytemuck::must_cast(common(SHAPES[index]));
        hash = with_bytes(hash, &common);
        index += 1;
    }
    hash
};

/// The variable of a PTX that holds [`LAYOUT_FINGERPRINT`].
pub const FINGERPRINT_VARIABLE: &str = "ferry_layout_fingerprint";

/// One node and several, few tokens and many, both ways to combine, every format.
const SHAPES: [Shape; 11] = [
    shape(8, 128, 0),
    shape(8, 4096, 1),
    shape(8, 128, 2),
    shape(8, 128, 3),
    shape(8, 128, 4),
    shape(8, 128, 5),
    shape(8, 128, 6),
    shape(8, 128, 7),
    shape(8, 128, 8),
    shape(8, 128, 9),
    Shape {
        p2p_world_size: 4,
        combine_mode: 1,
        ..shape(16, 512, 2)
    },
];

const fn shape(ranks: u32, max_tokens_per_rank: u32, token_format: u32) -> Shape {
    Shape {
        ranks,
        p2p_world_size: ranks,
        experts: 256,
        top_k: 8,
        hidden: 7168,
        max_tokens_per_rank,
        combine_mode: 0,
        token_format,
    }
}

/// What follows from a shape; all else is zero.
const fn common(shape: Shape) -> Common {
    Common {
        peers: 0,
        workspace: 0,
        rank: 0,
        debug_checks: 0,
        tokens: 0,
        deadline_ns: 0,
        fault_page: 0,
        own_window: 0,
        shape,
        window: Window::of(&shape),
        tables: Workspace::of(&shape),
        row: DispatchRow::of(&shape),
    }
}

const fn with_bytes(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut index = 0;
    while index < bytes.len() {
        hash = (hash ^ bytes[index] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        index += 1;
    }
    hash
}
