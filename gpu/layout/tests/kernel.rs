//! How kernels are launched.

use ferry_layout::{Kernel, PIPELINE_BYTES};

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
}

/// Four slots a warp, of four vectors of 16 bytes for each of 32 lanes, and 16 warps.
#[test]
fn rings_by_hand() {
    assert_eq!(PIPELINE_BYTES, 8 * 1024);
    for kernel in Kernel::ALL {
        let wanted = match kernel.name().contains("combine") {
            true => 128 * 1024,
            false => 0,
        };
        assert_eq!(kernel.pipeline_bytes(), wanted, "{}", kernel.name());
    }
}
