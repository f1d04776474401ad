//! The kernels' arguments of a combine.

use bytemuck::Zeroable;
use ferry_layout::{
    CombineArgs, CombineMode, CombineOptions, CombineWith, Common, EpilogueWords, OutputElement,
    ReturnedRows,
};

use super::{CombineInput, CombineOutput, address_or_none};
use crate::call::apart::{Extent, named};
use crate::call::arguments::{self, Sizes};
use crate::call::dispatch::{Received, with_kept};
use crate::call::epilogue::CombineEpilogue;
use crate::error::{EpilogueError, Error};
use crate::plan::Plan;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;
use crate::tensor::handles::DevicePtr;
use crate::tensor::view::{Element, View};

/// Arguments of a combine's first half, and of its dispatch, that the second half needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Returned {
    pub(crate) received: Received,
    pub(crate) input: CombineInput,
    pub(crate) output: CombineOutput,
}

/// Address of the weights of no rows, which kernels do not read: not 0, which says that no weights return.
const NO_ROWS: u64 = 16;

impl CombineInput {
    /// The experts' outputs alone: no weights and no epilogue.
    pub const fn new(expert_rows: Tensor<2>) -> Self {
        Self {
            expert_rows,
            topk_weights: None,
            row_weights: None,
            initial: [None; 2],
            received_weights: None,
            epilogue: CombineEpilogue::None,
        }
    }

    /// The kernels' arguments. `taken`: bytes of the user's epilogue in the kernels, if they have one.
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
        let rows = capacity;
        let sizes = Sizes { tokens, rows };
        let (read, written) = (self.views(), output.views());
        // What goes with the mode comes before what goes with the layout: it says more.
        let (first, others) = Self::ARGUMENTS.split_at(2);
        arguments::check(first, &read[..2], plan, sizes)?;
        let combined = self.combined(output, plan, tokens)?;
        arguments::check(others, &read[2..], plan, sizes)?;
        arguments::check(CombineOutput::ARGUMENTS, &written, plan, sizes)?;
        let args = CombineArgs {
            common: Common {
                tokens: tokens as u32,
                ..with_kept(common, received.kept_ids)
            },
            expert_rows: self.expert_rows.at.address(),
            topk_weights: address_or_none(self.topk_weights),
            combined: combined.address(),
            // Positions below this index the staging too, which has no more rows than can come.
            row_capacity: (capacity as u64).min(plan.max_positions()),
        };
        let with = self.with_options(args, output, plan, received, taken)?;
        require_apart(&read, &written, received)?;
        Ok(with)
    }

    /// `args`, with the options of this combine.
    fn with_options(
        &self,
        args: CombineArgs,
        output: &CombineOutput,
        plan: &Plan,
        received: Received,
        taken: Option<usize>,
    ) -> Result<CombineWith<EpilogueWords>, Error> {
        let is_counted = received.is_counted;
        let rows = self.returned_rows(output, plan);
        if rows.is_on != 0 && matches!(self.epilogue, CombineEpilogue::Own(_)) {
            let receive = plan.receive().layout;
            return Err(EpilogueError::RowsAsTheyCame { receive }.into());
        }
        let words = self.epilogue.words(plan, taken)?;
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
                rows,
                ..CombineOptions::NONE
            },
            epilogue: words.unwrap_or_else(EpilogueWords::zeroed),
            args,
        })
    }

    /// Inputs and outputs that only rows that stay as they came have.
    fn returned_rows(&self, output: &CombineOutput, plan: &Plan) -> ReturnedRows {
        if !plan.config().receive.keeps_rows() {
            return ReturnedRows::NONE;
        }
        let weights = self.received_weights;
        ReturnedRows {
            initial: address_or_none(self.initial[0]),
            second_initial: address_or_none(self.initial[1]),
            // Of no rows, weights may have no address.
            weights: weights.map_or(0, |tensor| tensor.at.address().max(NO_ROWS)),
            combined_weights: address_or_none(output.weights()),
            is_on: 1,
            layout: plan.receive().layout.number(),
        }
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
            (
                CombineMode::Reduced,
                _,
                CombineOutput::Summed(combined) | CombineOutput::Weighted { combined, .. },
            )
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

impl Plan {
    /// The output of a combine of `tokens` tokens, without memory: sums `[tokens, hidden]` of these elements,
    /// with weights `[tokens, top_k]` if the plan has [`combine_weights`](crate::KeptRows::combine_weights);
    /// or in exact mode BF16 rows apart, `[tokens, top_k, hidden]`. Not collective; does not synchronize.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`], [`Error::ApartInReducedMode`].
    pub fn result(
        &self,
        tokens: usize,
        element: OutputElement,
        is_apart: bool,
    ) -> Result<CombineOutput, Error> {
        let (at, config) = (DevicePtr::NULL, self.config());
        let (given, max) = (tokens, config.max_tokens_per_rank);
        if given > max {
            return Err(Error::TooManyTokens { given, max });
        }
        if is_apart {
            let dims = [tokens, config.top_k, config.hidden];
            let rows = Tensor::contiguous(at, DataType::Bf16, dims);
            return match config.combine {
                CombineMode::Reduced => Err(Error::ApartInReducedMode),
                CombineMode::Exact => Ok(CombineOutput::Apart(rows)),
            };
        }
        let combined = Tensor::contiguous(at, element.into(), [tokens, config.hidden]);
        let weights = Tensor::contiguous(at, DataType::F32, [tokens, config.top_k]);
        Ok(match self.receive().combine_weights {
            false => CombineOutput::Summed(combined),
            true => CombineOutput::Weighted { combined, weights },
        })
    }
}

/// Checks that no result overlaps another one or a tensor that is read: rows
/// are still read while sums are written. Each tensor was checked by itself.
fn require_apart(
    read: &[Option<View<'_>>; 10],
    written: &[Option<View<'_>>; 2],
    received: Received,
) -> Result<(), Error> {
    let read = named(CombineInput::ARGUMENTS, read);
    let kept = (
        "kept_ids",
        received.kept_ids.as_ref().map(|ids| Extent::of(ids.view())),
    );
    let [(_, combined), weights] = named(CombineOutput::ARGUMENTS, written);
    for (first, written) in [("combined", combined), weights] {
        let Some(written) = written else { continue };
        if first != "combined" {
            written.require_outside(first, &[("combined", combined)])?;
        }
        written.require_outside(first, &read)?;
        written.require_outside(first, &[kept])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ferry_layout::TokenFormat;

    use super::*;
    use crate::plan::config::Config;

    /// A position in exact mode is also a row of the staging, which has [`Shape::max_rows`] rows: fewer than
    /// [`Plan::max_rows`] if that is rounded up.
    #[test]
    fn positions_of_a_combine_stay_in_the_staging() {
        let config = Config {
            p2p_world_size: Some(1),
            format: TokenFormat::BlockwiseFp8,
            combine: CombineMode::Exact,
            deadline: Duration::from_secs(1),
            ..Config::new(2, 1, 1024, 4)
        };
        let plan = Plan::check(2, true, config).unwrap();
        assert!(plan.max_rows() as u64 > plan.shape().max_rows());
        // SAFETY: `DevicePtr::new` is about accesses of a device, and none is made here.
        let memory = |address| unsafe { DevicePtr::new(address, 1 << 20) };
        let rows = Tensor::contiguous(memory(1 << 20), DataType::Bf16, [plan.max_rows(), 1024]);
        let input = CombineInput::new(rows);
        let output = CombineOutput::Apart(Tensor::contiguous(
            memory(1 << 21),
            DataType::Bf16,
            [4, 1, 1024],
        ));
        let received = Received {
            tokens: 4,
            capacity: plan.max_rows(),
            is_counted: false,
            kept_ids: None,
        };
        let args = input
            .args(&output, &Common::of(plan.shape()), &plan, received, None)
            .unwrap();
        assert_eq!(args.args.row_capacity, plan.shape().max_rows());
    }
}
