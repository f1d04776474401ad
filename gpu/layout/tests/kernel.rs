//! How kernels are launched.

use ferry_layout::Kernel;

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
