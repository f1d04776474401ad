//! Errors of a combine's options.

use ferry_layout::{MAX_EPILOGUE_BYTES, ReceiveLayout};

/// Problem with the epilogue, the weights or the output of a combine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EpilogueError {
    /// The value of an epilogue is too large to be passed with a launch.
    #[error(
        "an epilogue of {bytes} bytes, aligned to {align}: at most {MAX_EPILOGUE_BYTES} bytes and 8"
    )]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// Its alignment.
        align: usize,
    },
    /// The kernels take another epilogue than the call has.
    #[error(
        "the call's own epilogue has {given} bytes, but the kernels with options take {}",
        .taken.map_or("Ferry's steps: load kernels that were built with yours".to_owned(),
            |taken| format!("one of {taken} bytes (rounded up to 8)"))
    )]
    Size {
        /// Bytes of the call's epilogue.
        given: usize,
        /// Bytes of the kernels' epilogue, rounded up to 8; `None` if they take Ferry's steps.
        taken: Option<usize>,
    },
    /// Steps for kernels with an epilogue of the user's.
    #[error("the call has steps, but the kernels with options have an epilogue of yours")]
    StepsNotLoaded,
    /// An option without an epilogue, for kernels with an epilogue of the user's.
    #[error(
        "the call has {option} and no epilogue, but the kernels with options have one of yours"
    )]
    Missing {
        /// The option.
        option: &'static str,
    },
    /// An epilogue of the user's for rows that stay as they came.
    #[error(
        "the call has an epilogue of yours, but the plan's receive is {receive}, whose kernels have Ferry's \
         steps"
    )]
    RowsAsTheyCame {
        /// The plan's receive layout.
        receive: ReceiveLayout,
    },
    /// Row weights in exact mode, where the token's rank applies the weights.
    #[error("row_weights are given, but in exact mode the combine's topk_weights count")]
    RowWeightsInExactMode,
    /// An option that changes sums, for rows that are not summed.
    #[error("{option} is given, but the rows of a token are kept apart, not summed")]
    Apart {
        /// The option.
        option: &'static str,
    },
}
