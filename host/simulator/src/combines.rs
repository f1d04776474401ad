//! Ways to run combines: as kernels without options, or with the epilogue that the machine was made for.

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
    /// Bytes of an epilogue that is not Ferry's own.
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

    /// Bytes of the epilogue, rounded up to 8; `None`: Ferry's own steps.
    pub const fn epilogue_bytes(&self) -> Option<usize> {
        self.bytes
    }

    /// Runs them with an epilogue of another crate, which travels as the first words of a launch's.
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

fn combine_plain(warp: &Warp<'_>, kernel: Kernel, args: &CombineArgs) -> Result<(), Aborted> {
    let options = &CombineOptions::NONE;
    match kernel {
        Kernel::CombineAsync => ferry_protocol::combine_async(warp, args, options, &NoEpilogue),
        Kernel::CombineWait => ferry_protocol::combine_wait(warp, args, options, &NoEpilogue),
        Kernel::LocalCombine => ferry_protocol::combine_local(warp, args, options, &NoEpilogue),
        _ => ferry_protocol::combine(warp, args, options, &NoEpilogue),
    }
}

fn combine<E: Epilogue + AnyBitPattern>(
    warp: &Warp<'_>,
    kernel: Kernel,
    with: &CombineWith<EpilogueWords>,
) -> Result<(), Aborted> {
    let CombineWith {
        args,
        options,
        epilogue,
    } = with;
    if !with.has_options() {
        // As kernels without options.
        return combine_plain(warp, kernel, args);
    }
    let bytes = bytemuck::bytes_of(epilogue);
    let epilogue: E = bytemuck::pod_read_unaligned(&bytes[..size_of::<E>()]);
    match kernel {
        Kernel::CombineAsync => ferry_protocol::combine_async(warp, args, options, &epilogue),
        Kernel::CombineWait => ferry_protocol::combine_wait(warp, args, options, &epilogue),
        Kernel::LocalCombine => ferry_protocol::combine_local(warp, args, options, &epilogue),
        _ => ferry_protocol::combine(warp, args, options, &epilogue),
    }
}
