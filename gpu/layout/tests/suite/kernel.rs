//! Launch parameters of kernels.

use ferry_layout::{Kernel, MAX_BLOCKS, PIPELINE_BYTES};

#[test]
fn plans_of_few_tokens_launch_half_the_threads() {
    for kernel in Kernel::ALL {
        let most = kernel.threads_per_block();
        let few = match kernel {
            Kernel::FusedSilu => most,
            _ => most / 2,
        };
        let threads = [0, 1, 16, 17, 4096].map(|tokens| kernel.threads(tokens));
        assert_eq!(threads, [few, few, few, most, most], "{}", kernel.name());
        assert!(few.is_multiple_of(32), "{}", kernel.name());
    }
}

#[test]
fn blocks_are_one_a_multiprocessor_that_may_be_occupied() {
    for (max_sms, blocks) in [
        (None, 132),
        (Some(16), 16),
        (Some(132), 132),
        (Some(1 << 20), 132),
    ] {
        assert_eq!(Kernel::blocks(max_sms, 132), blocks, "{max_sms:?}");
    }
    assert_eq!(Kernel::blocks(Some(0), 132), 1);
    assert_eq!(Kernel::blocks(None, MAX_BLOCKS), MAX_BLOCKS);
    assert_eq!(Kernel::blocks(None, u32::MAX), MAX_BLOCKS);
}

/// Shared memory of the kernels that sum rows, or load tokens before their destination is known: for each of
/// 16 warps four slots of four vectors of 16 bytes for each of 32 lanes, or eight of two.
#[test]
fn rings_by_hand() {
    assert_eq!(PIPELINE_BYTES, 8 * 1024);
    for kernel in Kernel::ALL {
        let has_rings = kernel.combines() || kernel == Kernel::LocalDispatch;
        let wanted = if has_rings { 128 * 1024 } else { 0 };
        assert_eq!(kernel.pipeline_bytes(), wanted, "{}", kernel.name());
    }
}
