//! Epilogues: steps on a combine's sums before they are stored.

use bytemuck::{NoUninit, Zeroable};
use ferry_layout::{EpilogueWords, MAX_EPILOGUE_BYTES, Steps};

use crate::error::EpilogueError;
use crate::error::Error;
use crate::plan::Plan;
use crate::tensor::Tensor;

/// Steps on the sum of each token's rows before it is stored. Sums are f32; the result
/// is converted once, to the elements of `combined`. A shared expert's row was
/// added before, in exact mode to the sum rounded to BF16.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum CombineEpilogue {
    /// No steps.
    #[default]
    None,
    /// Ferry's own steps.
    Steps(CombineSteps),
    /// The `Epilogue` of your device crate, with this value.
    Own(OwnEpilogue),
}

/// Steps on each sum, in the order of the fields; each result is rounded to f32. `None` skips a step.
///
/// With [`Config::skip_a2a`](crate::Config::skip_a2a), where every rank has all tokens, each rank's
/// result is a part of the sum, and a bias counts once for each rank that adds it. Pass biases and residual
/// on one rank.
///
/// The tensors are in use until the stream has passed the kernel that sums: in a split combine that
/// of the wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CombineSteps {
    /// f32 `[tokens]`: factor of each token.
    pub row_scales: Option<Tensor<1>>,
    /// BF16 `[hidden]`, 16-byte aligned: added to each token, one after the other.
    pub biases: [Option<Tensor<1>>; 2],
    /// BF16 `[tokens, hidden]`, 16-byte aligned: added. None of these tensors may overlap `combined`.
    pub residual: Option<Tensor<2>>,
}

/// A value of your device crate's `Epilogue`, passed with the launch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct OwnEpilogue {
    words: EpilogueWords,
    bytes: usize,
}

impl OwnEpilogue {
    /// Copies the bytes of `epilogue`.
    ///
    /// # Errors
    /// [`Error::Epilogue`] if it is larger than 256 bytes, or needs an alignment above 8.
    ///
    /// # Safety
    /// `E` is the type that the kernels of the group were built with: only its size is compared. The memory
    /// that `Epilogue::apply` reads with the value is readable by the rank's device until the stream has
    /// passed the kernels of the combines that take the value, and no graph of one is
    /// launched any more.
    pub unsafe fn new<E: NoUninit>(epilogue: &E) -> Result<Self, Error> {
        let given = bytemuck::bytes_of(epilogue);
        if given.len() > MAX_EPILOGUE_BYTES || align_of::<E>() > 8 {
            return Err(Error::Epilogue(EpilogueError::TooLarge {
                bytes: given.len(),
                align: align_of::<E>(),
            }));
        }
        let mut words = EpilogueWords::zeroed();
        bytemuck::bytes_of_mut(&mut words)[..given.len()].copy_from_slice(given);
        Ok(Self {
            words,
            bytes: given.len(),
        })
    }
}

impl std::fmt::Debug for OwnEpilogue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnEpilogue")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl CombineEpilogue {
    /// The words for a launch, if there is an epilogue. `taken`: bytes of the user's epilogue in
    /// the device's kernels, rounded up to 8; `None` if they have Ferry's steps.
    pub(crate) fn words(
        &self,
        plan: &Plan,
        taken: Option<usize>,
    ) -> Result<Option<EpilogueWords>, Error> {
        match (self, taken) {
            (Self::None, _) => Ok(None),
            (Self::Steps(steps), None) => Ok(Some(steps.words(plan))),
            (Self::Own(own), Some(taken)) if own.bytes.next_multiple_of(8) == taken => {
                Ok(Some(own.words))
            }
            (Self::Own(own), taken) => Err(Error::Epilogue(EpilogueError::Size {
                given: own.bytes,
                taken,
            })),
            (Self::Steps(_), Some(_)) => Err(Error::Epilogue(EpilogueError::StepsNotLoaded)),
        }
    }
}

impl CombineSteps {
    /// No steps.
    pub(super) const NONE: Self = Self {
        row_scales: None,
        biases: [None; 2],
        residual: None,
    };

    /// The words of steps that were checked.
    fn words(&self, plan: &Plan) -> EpilogueWords {
        let address = |tensor: Tensor<1>| tensor.at.address();
        let steps = Steps {
            row_scales: self.row_scales.map_or(0, address),
            biases: self.biases.map(|bias| bias.map_or(0, address)),
            residual: self.residual.map_or(0, |tensor| tensor.at.address()),
            hidden: plan.config().hidden as u64,
        };
        let mut words = EpilogueWords::zeroed();
        bytemuck::bytes_of_mut(&mut words)[..size_of::<Steps>()]
            .copy_from_slice(bytemuck::bytes_of(&steps));
        words
    }
}
