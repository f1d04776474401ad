//! What can be wrong with a combine's options.

use ferry_layout::MAX_EPILOGUE_BYTES;

/// What is wrong with the epilogue, the weights or the output of a combine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EpilogueError {
    /// The value of an epilogue is too large to travel with a launch.
    #[error(
        "an epilogue of {bytes} bytes, aligned to {align}: at most {MAX_EPILOGUE_BYTES} bytes and 8"
    )]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// Its alignment.
        align: usize,
    },
    /// The kernels take another epilogue than the call gives.
    #[error(
        "the call's own epilogue has {given} bytes, but the kernels with options take {}",
        .taken.map_or("Ferry's steps: load yours with Kernels::with_epilogue".to_owned(),
            |taken| format!("one of {taken} bytes (rounded up to 8)"))
    )]
    Size {
        /// Bytes of the call's.
        given: usize,
        /// Bytes that the kernels take, rounded up to 8; `None` if they are Ferry's own.
        taken: Option<usize>,
    },
    /// Steps for kernels with an epilogue of the user's.
    #[error("the call gives steps, but the kernels with options have an epilogue of yours")]
    StepsNotLoaded,
    /// An option without an epilogue, for kernels that have one of the user's.
    #[error(
        "the call gives {option} and no epilogue, but the kernels with options have one of yours"
    )]
    Missing {
        /// Which option.
        option: &'static str,
    },
    /// Row weights in exact mode, where the source weighs.
    #[error("row_weights are given, but in exact mode the combine's topk_weights count")]
    RowWeightsInExactMode,
    /// An option that changes sums, where rows are not summed.
    #[error("{option} is given, but the rows of a token are kept apart (CombineOutput::Apart)")]
    Apart {
        /// Which option.
        option: &'static str,
    },
}
