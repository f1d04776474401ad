//! Ways to run combines: like kernels without options, or with the epilogue that the machine was made for.

use bytemuck::AnyBitPattern;
use ferry_layout::{
    CombineArgs, CombineOptions, CombineWith, Epilogue, EpilogueWords, Kernel, MAX_EPILOGUE_BYTES,
    NoEpilogue, Steps,
};
use ferry_protocol::Aborted;

use crate::warp::Warp;

/// Runs combines.
type RunCombine = fn(&Warp<'_>, Kernel, &CombineWith<EpilogueWords>) -> Result<(), Aborted>;

/// Way in which a simulated machine runs combines: the epilogue.
#[derive(Clone, Copy, Debug)]
pub struct Combines {
    run: RunCombine,
    /// Bytes of a custom epilogue.
    bytes: Option<usize>,
}

impl Combines {
    pub(crate) fn run(
        &self,
        warp: &Warp<'_>,
        kernel: Kernel,
        with: &CombineWith<EpilogueWords>,
    ) -> Result<(), Aborted> {
        (self.run)(warp, kernel, with)
    }

    /// Runs them with Ferry's own steps.
    pub const STEPS: Self = Self {
        run: combine::<Steps>,
        bytes: None,
    };

    /// Bytes of the epilogue, rounded up to 8; `None` for Ferry's own steps.
    pub const fn epilogue_bytes(&self) -> Option<usize> {
        self.bytes
    }

    /// Runs them with a custom epilogue, which travels in the first words of a launch's epilogue.
    pub const fn with<E: Epilogue + AnyBitPattern>() -> Self {
        const {
            assert!(
                size_of::<E>() <= MAX_EPILOGUE_BYTES && align_of::<E>() <= 8,
                "an epilogue has at most MAX_EPILOGUE_BYTES and an alignment of at most 8"
            );
        }
        Self {
            run: combine::<E>,
            bytes: Some(size_of::<E>().next_multiple_of(8)),
        }
    }
}

fn combine_with(
    warp: &Warp<'_>,
    kernel: Kernel,
    args: &CombineArgs,
    options: &CombineOptions,
    epilogue: &impl Epilogue,
) -> Result<(), Aborted> {
    match kernel {
        Kernel::CombineAsync => ferry_protocol::combine_async(warp, args, options, epilogue),
        Kernel::CombineWait => ferry_protocol::combine_wait(warp, args, options, epilogue),
        Kernel::LocalCombine => ferry_protocol::combine_local(warp, args, options, epilogue),
        _ => ferry_protocol::combine(warp, args, options, epilogue),
    }
}

fn combine<E: Epilogue + AnyBitPattern>(
    warp: &Warp<'_>,
    kernel: Kernel,
    with: &CombineWith<EpilogueWords>,
) -> Result<(), Aborted> {
    if cfg!(test) {
        unreachable!("unit tests launch none of the protocol's kernels");
    }
    let CombineWith {
        args,
        options,
        epilogue,
    } = with;
    if !with.has_options() {
        // Runs the same code as kernels without options.
        return combine_with(warp, kernel, args, &CombineOptions::NONE, &NoEpilogue);
    }
    let bytes = bytemuck::bytes_of(epilogue);
    let epilogue: E = bytemuck::pod_read_unaligned(&bytes[..size_of::<E>()]);
    combine_with(warp, kernel, args, options, &epilogue)
}
