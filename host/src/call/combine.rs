//! The kernels' arguments of a combine.

use bytemuck::Zeroable;
use ferry_layout::{
    CombineArgs, CombineMode, CombineOptions, CombineWith, Common, EpilogueWords, OutputElement,
};

use super::{CombineInput, CombineOutput, Received, address_or_none};
use crate::call::epilogue::CombineEpilogue;
use crate::error::EpilogueError;
use crate::error::Error;
use crate::plan::Plan;
use crate::tensor::Element;
use crate::tensor::Tensor;
use crate::tensor::handles::DevicePtr;

impl CombineInput {
    /// The experts' outputs alone: no weights and no epilogue.
    pub const fn new(expert_rows: Tensor<2>) -> Self {
        Self {
            expert_rows,
            topk_weights: None,
            row_weights: None,
            epilogue: CombineEpilogue::None,
        }
    }

    /// The kernels' arguments. `taken`: [`Device::epilogue_bytes`](crate::Device::epilogue_bytes).
    pub(crate) fn args(
        &self,
        output: &CombineOutput,
        common: &Common,
        plan: &Plan,
        received: Received,
        taken: Option<usize>,
    ) -> Result<CombineWith<EpilogueWords>, Error> {
        let Received {
            tokens, capacity, ..
        } = received;
        let config = plan.config();
        self.expert_rows
            .require("expert_rows", [capacity, config.hidden], Element::BF16_ROW)?;
        if let Some(weights) = &self.topk_weights {
            if config.combine == CombineMode::Reduced {
                return Err(Error::WeightsInReducedMode);
            }
            weights.require("topk_weights", [tokens, config.top_k], Element::F32)?;
        }
        let combined = self.combined(output, plan, tokens)?;
        let args = CombineArgs {
            common: Common {
                tokens: tokens as u32,
                ..*common
            },
            expert_rows: self.expert_rows.at.address(),
            topk_weights: address_or_none(self.topk_weights),
            combined: combined.address(),
            // Positions below this index the staging too, which has no more rows than can come.
            row_capacity: (capacity as u64).min(plan.shape().max_rows() + plan.max_shared_rows()),
        };
        let with = self.with_options(args, output, plan, received, taken)?;
        self.require_apart(&Extent::of(&output.rows()))?;
        Ok(with)
    }

    /// Checks that the result overlaps no tensor that is read: rows
    /// are still read while sums are written. Each tensor was checked by itself.
    fn require_apart(&self, combined: &Extent) -> Result<(), Error> {
        let steps = match &self.epilogue {
            CombineEpilogue::Steps(steps) => Some(steps),
            _ => None,
        };
        let [bias_1, bias_2] =
            [0, 1].map(|index| extent(steps.and_then(|steps| steps.biases[index].as_ref())));
        let residual = steps.and_then(|steps| steps.residual.as_ref());
        let row_scales = steps.and_then(|steps| steps.row_scales.as_ref());
        let read = [
            ("expert_rows", extent(Some(&self.expert_rows))),
            ("topk_weights", extent(self.topk_weights.as_ref())),
            ("row_weights", extent(self.row_weights.as_ref())),
            ("row_scales", extent(row_scales)),
            ("biases[0]", bias_1),
            ("biases[1]", bias_2),
            ("residual", extent(residual)),
        ];
        let overlapping = read
            .into_iter()
            .find(|(_, read)| read.as_ref().is_some_and(|read| read.overlaps(combined)));
        match overlapping {
            Some((second, _)) => Err(Error::TensorsOverlap {
                first: "combined",
                second,
            }),
            None => Ok(()),
        }
    }

    /// `args`, with the options of this combine.
    fn with_options(
        &self,
        args: CombineArgs,
        output: &CombineOutput,
        plan: &Plan,
        Received {
            tokens,
            capacity,
            is_counted,
        }: Received,
        taken: Option<usize>,
    ) -> Result<CombineWith<EpilogueWords>, Error> {
        let words = self.epilogue.words(plan, tokens, taken)?;
        if let Some(weights) = &self.row_weights {
            if plan.config().combine == CombineMode::Exact {
                return Err(EpilogueError::RowWeightsInExactMode.into());
            }
            weights.require("row_weights", [capacity], Element::F32)?;
        }
        let element = output.element()?;
        let is_converted = element != OutputElement::Bf16;
        let is_apart = matches!(output, CombineOutput::Apart(_));
        let of_sums = [
            ("an epilogue", words.is_some()),
            ("a shared expert", plan.config().shared_expert),
        ];
        for (option, is_given) in of_sums {
            if is_apart && is_given {
                return Err(EpilogueError::Apart { option }.into());
            }
        }
        // Each of these launches the kernels with options, which then need their epilogue.
        let others = [
            ("row_weights", self.row_weights.is_some()),
            ("combined in another type than bf16", is_converted),
            ("a shared expert", plan.config().shared_expert),
            ("tokens_on_device", is_counted),
            ("skip_a2a", plan.config().skip_a2a),
        ];
        for (option, is_given) in others {
            if is_given && words.is_none() && taken.is_some() && !is_apart {
                return Err(EpilogueError::Missing { option }.into());
            }
        }
        Ok(CombineWith {
            options: CombineOptions {
                row_weights: address_or_none(self.row_weights),
                shared_of: plan.shared_of(),
                tokens_on_device: is_counted.into(),
                output: element.number(),
                has_epilogue: words.is_some().into(),
                ..CombineOptions::NONE
            },
            epilogue: words.unwrap_or_else(EpilogueWords::zeroed),
            args,
        })
    }

    /// Address of the result, if its shape fits the mode.
    fn combined(
        &self,
        output: &CombineOutput,
        plan: &Plan,
        tokens: usize,
    ) -> Result<DevicePtr, Error> {
        let config = plan.config();
        let weights = self.topk_weights.is_some();
        match (config.combine, weights, output) {
            (CombineMode::Reduced, _, CombineOutput::Apart(_)) => Err(Error::ApartInReducedMode),
            (CombineMode::Reduced, _, CombineOutput::Summed(combined))
            | (CombineMode::Exact, true, CombineOutput::Summed(combined)) => {
                let element = Element::row(output.element()?.into());
                combined.require("combined", [tokens, config.hidden], element)?;
                Ok(combined.at)
            }
            (CombineMode::Exact, false, CombineOutput::Apart(combined)) => {
                let dims = [tokens, config.top_k, config.hidden];
                combined.require("combined", dims, Element::BF16_ROW)?;
                Ok(combined.at)
            }
            (CombineMode::Exact, _, _) => Err(Error::WrongCombineOutput { weights }),
        }
    }
}

/// Extent of `tensor`, if it is present.
pub(super) fn extent<const N: usize>(tensor: Option<&Tensor<N>>) -> Option<Extent> {
    tensor.map(Extent::of)
}

/// Bytes of a tensor in memory.
pub(super) struct Extent {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

impl Extent {
    fn of<const N: usize>(tensor: &Tensor<N>) -> Self {
        Self {
            address: tensor.at.address(),
            bytes: tensor.bytes(),
        }
    }

    /// Whether the two have a byte in common.
    pub(super) const fn overlaps(&self, other: &Self) -> bool {
        // Distances, as ends could wrap.
        self.bytes > 0
            && other.bytes > 0
            && if self.address <= other.address {
                other.address - self.address < self.bytes
            } else {
                self.address - other.address < other.bytes
            }
    }
}
