//! The table of a call's arguments: what checks, C and Python read of each.
//! The outputs of a dispatch, whose sizes follow from the plan, are those of [`Plan::output_layout`].

use std::fmt::Display;

use ferry_layout::{CombineMode, ReceiveLayout, TokenFormat};

use self::Dim::{Capacity, Hidden, One, Tokens, TopK};
use self::Elements::{Ids, Row, Scales, Sums, Word, X};
use crate::call::epilogue::{CombineEpilogue, CombineSteps};
use crate::call::{CombineInput, CombineOutput, DispatchInput};
use crate::error::{EpilogueError, Error, TensorError};
use crate::plan::Plan;
use crate::tensor::any::{AnyTensor, view};
use crate::tensor::data_type::DataType;
use crate::tensor::view::{Element, View};

/// An argument of a call.
#[derive(Clone, Copy, Debug)]
pub struct Argument {
    /// Its name in errors: that of its field, with a number if the field has several.
    pub name: &'static str,
    /// Whether it is in every call.
    pub is_required: bool,
    elements: Elements,
    dims: &'static [Dim],
    when: When,
}

/// Fails unless an argument of this name may be there, or be missing, in the calls of a plan.
type When = fn(&'static str, &Plan, is_given: bool) -> Result<(), Error>;

/// Type and alignment of elements. Elements without a type in the table have checks of their own.
#[derive(Clone, Copy, Debug)]
enum Elements {
    /// 16-byte aligned.
    Row(DataType),
    /// Aligned to their size.
    Word(DataType),
    /// BF16, or codes of the plan's format.
    X,
    Ids,
    /// Scales of `X`.
    Scales,
    Sums,
}

/// Size of a dimension.
#[derive(Clone, Copy, Debug)]
enum Dim {
    One,
    Tokens,
    Capacity,
    Hidden,
    TopK,
}

/// Sizes of a call.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) tokens: usize,
    /// Rows that fit in the dispatch's outputs.
    pub(super) capacity: usize,
}

impl Argument {
    const fn new(name: &'static str, elements: Elements, dims: &'static [Dim]) -> Self {
        Self {
            name,
            is_required: false,
            elements,
            dims,
            when: |_, _, _| Ok(()),
        }
    }

    const fn required(self) -> Self {
        Self {
            is_required: true,
            ..self
        }
    }

    const fn when(self, when: When) -> Self {
        Self { when, ..self }
    }

    /// Whether it has the scales of an `x` that is encoded.
    pub const fn is_scales(&self) -> bool {
        matches!(self.elements, Scales)
    }

    /// Type that its elements usually have in a plan of this format. `is_encoded`: whether `x` comes with
    /// scales.
    pub fn data_type(&self, format: TokenFormat, is_encoded: bool) -> DataType {
        match self.elements {
            Row(data_type) | Word(data_type) => data_type,
            X if is_encoded => DataType::of_tokens(format),
            X | Sums => DataType::Bf16,
            Ids => DataType::I32,
            Scales => DataType::of_scales(format).unwrap_or(DataType::U8),
        }
    }

    /// Checks that a tensor is there if the plan needs it, and only if it allows it; then its elements and
    /// sizes.
    fn check(&self, given: Option<View<'_>>, plan: &Plan, sizes: Sizes) -> Result<(), Error> {
        (self.when)(self.name, plan, given.is_some())?;
        let (Some(tensor), Row(data_type) | Word(data_type)) = (given, self.elements) else {
            return Ok(());
        };
        let element = match self.elements {
            Row(_) => Element::row(data_type),
            _ => Element::natural(data_type),
        };
        let config = plan.config();
        let mut dims = [0; 2];
        for (size, dim) in dims.iter_mut().zip(self.dims) {
            *size = match dim {
                One => 1,
                Tokens => sizes.tokens,
                Capacity => sizes.capacity,
                Hidden => config.hidden,
                TopK => config.top_k,
            };
        }
        Ok(tensor.require(self.name, &dims[..self.dims.len()], element)?)
    }
}

/// Checks the arguments of a table.
pub(super) fn check(
    table: &'static [Argument],
    given: &[Option<View<'_>>],
    plan: &Plan,
    sizes: Sizes,
) -> Result<(), Error> {
    let mut pairs = table.iter().zip(given);
    pairs.try_for_each(|(argument, given)| argument.check(*given, plan, sizes))
}

impl DispatchInput {
    /// Its arguments.
    pub const ARGUMENTS: &'static [Argument; 7] = &[
        Argument::new("x", X, &[]).required(),
        Argument::new("topk_ids", Ids, &[]).required(),
        Argument::new("topk_weights", Word(DataType::F32), &[Tokens, TopK]),
        Argument::new("input_scale", Word(DataType::F32), &[One]).when(takes_input_scale),
        Argument::new("tokens_on_device", Word(DataType::U32), &[One]),
        Argument::new("x_scales", Scales, &[]),
        Argument::new("kept_ids", Word(DataType::I32), &[Tokens, TopK]).when(keeps_ids),
    ];

    /// Inputs of tensors in the order of [`ARGUMENTS`](Self::ARGUMENTS). Their sizes and elements are checked
    /// by calls.
    ///
    /// # Errors
    /// [`TensorError`] for a tensor of another number of dimensions, and if `x` or `topk_ids` is missing.
    pub fn of(given: [Option<AnyTensor>; 7]) -> Result<Self, TensorError> {
        let [x, ids, weights, scale, count, scales, kept_ids] = given;
        Ok(Self {
            x: AnyTensor::required("x", x)?,
            topk_ids: AnyTensor::required("topk_ids", ids)?,
            topk_weights: AnyTensor::optional("topk_weights", weights)?,
            input_scale: AnyTensor::optional("input_scale", scale)?,
            tokens_on_device: AnyTensor::optional("tokens_on_device", count)?,
            x_scales: AnyTensor::optional("x_scales", scales)?,
            kept_ids: AnyTensor::optional("kept_ids", kept_ids)?,
        })
    }

    /// Its tensors, in the order of [`ARGUMENTS`](Self::ARGUMENTS).
    pub fn tensors(&self) -> [Option<AnyTensor>; 7] {
        self.views().map(|tensor| tensor.map(AnyTensor::from))
    }

    pub(super) fn views(&self) -> [Option<View<'_>>; 7] {
        [
            Some(self.x.view()),
            Some(self.topk_ids.view()),
            view(self.topk_weights.as_ref()),
            view(self.input_scale.as_ref()),
            view(self.tokens_on_device.as_ref()),
            view(self.x_scales.as_ref()),
            view(self.kept_ids.as_ref()),
        ]
    }
}

impl CombineInput {
    /// Its arguments. Those from `row_scales` to `residual` are [`CombineSteps`].
    pub const ARGUMENTS: &'static [Argument; 10] = &[
        Argument::new("expert_rows", Row(DataType::Bf16), &[Capacity, Hidden]).required(),
        Argument::new("topk_weights", Word(DataType::F32), &[Tokens, TopK]).when(weighs_sums),
        Argument::new("row_weights", Word(DataType::F32), &[Capacity]).when(weighs_rows),
        Argument::new("row_scales", Word(DataType::F32), &[Tokens]),
        Argument::new("biases[0]", Row(DataType::Bf16), &[Hidden]),
        Argument::new("biases[1]", Row(DataType::Bf16), &[Hidden]),
        Argument::new("residual", Row(DataType::Bf16), &[Tokens, Hidden]),
        Argument::new("initial[0]", Row(DataType::Bf16), &[Tokens, Hidden]).when(begins_sums),
        Argument::new("initial[1]", Row(DataType::Bf16), &[Tokens, Hidden]).when(begins_sums),
        Argument::new("received_weights", Word(DataType::F32), &[Capacity, TopK])
            .when(returns_weights),
    ];

    /// Inputs of tensors in the order of [`ARGUMENTS`](Self::ARGUMENTS), without an epilogue of the caller's
    /// own. Their sizes and elements are checked by calls.
    ///
    /// # Errors
    /// [`TensorError`] for a tensor of another number of dimensions, and if `expert_rows` is missing.
    pub fn of(given: [Option<AnyTensor>; 10]) -> Result<Self, TensorError> {
        let [
            rows,
            weights,
            of_rows,
            row_scales,
            first,
            second,
            residual,
            initial,
            more,
            received,
        ] = given;
        let steps = CombineSteps {
            row_scales: AnyTensor::optional("row_scales", row_scales)?,
            biases: [
                AnyTensor::optional("biases[0]", first)?,
                AnyTensor::optional("biases[1]", second)?,
            ],
            residual: AnyTensor::optional("residual", residual)?,
        };
        Ok(Self {
            expert_rows: AnyTensor::required("expert_rows", rows)?,
            topk_weights: AnyTensor::optional("topk_weights", weights)?,
            row_weights: AnyTensor::optional("row_weights", of_rows)?,
            initial: [
                AnyTensor::optional("initial[0]", initial)?,
                AnyTensor::optional("initial[1]", more)?,
            ],
            received_weights: AnyTensor::optional("received_weights", received)?,
            epilogue: if steps == CombineSteps::default() {
                CombineEpilogue::None
            } else {
                CombineEpilogue::Steps(steps)
            },
        })
    }

    /// Its tensors, in the order of [`ARGUMENTS`](Self::ARGUMENTS).
    pub fn tensors(&self) -> [Option<AnyTensor>; 10] {
        self.views().map(|tensor| tensor.map(AnyTensor::from))
    }

    pub(super) fn views(&self) -> [Option<View<'_>>; 10] {
        let steps = match &self.epilogue {
            CombineEpilogue::Steps(steps) => steps,
            CombineEpilogue::None | CombineEpilogue::Own(_) => &CombineSteps::NONE,
        };
        [
            Some(self.expert_rows.view()),
            view(self.topk_weights.as_ref()),
            view(self.row_weights.as_ref()),
            view(steps.row_scales.as_ref()),
            view(steps.biases[0].as_ref()),
            view(steps.biases[1].as_ref()),
            view(steps.residual.as_ref()),
            view(self.initial[0].as_ref()),
            view(self.initial[1].as_ref()),
            view(self.received_weights.as_ref()),
        ]
    }
}

impl CombineOutput {
    /// Its arguments.
    pub const ARGUMENTS: &'static [Argument; 2] = &[
        Argument::new("combined", Sums, &[]).required(),
        Argument::new("weights", Word(DataType::F32), &[Tokens, TopK]).when(returns_weights),
    ];

    /// The output of tensors in the order of [`ARGUMENTS`](Self::ARGUMENTS): rows apart if `combined` has 3
    /// dimensions. Their sizes and elements are checked by calls.
    ///
    /// # Errors
    /// [`TensorError`] for a tensor of another number of dimensions, and if `combined` is missing.
    pub fn of([combined, weights]: [Option<AnyTensor>; 2]) -> Result<Self, TensorError> {
        let is_apart = combined.is_some_and(|tensor| tensor.dims().len() == 3);
        Ok(match AnyTensor::optional("weights", weights)? {
            Some(weights) => Self::Weighted {
                combined: AnyTensor::required("combined", combined)?,
                weights,
            },
            None if is_apart => Self::Apart(AnyTensor::required("combined", combined)?),
            None => Self::Summed(AnyTensor::required("combined", combined)?),
        })
    }

    /// Its tensors, in the order of [`ARGUMENTS`](Self::ARGUMENTS).
    pub fn tensors(&self) -> [Option<AnyTensor>; 2] {
        self.views().map(|tensor| tensor.map(AnyTensor::from))
    }

    pub(super) fn views(&self) -> [Option<View<'_>>; 2] {
        match self {
            Self::Summed(combined) => [Some(combined.view()), None],
            Self::Weighted { combined, weights } => [Some(combined.view()), Some(weights.view())],
            Self::Apart(combined) => [Some(combined.view()), None],
        }
    }
}

fn takes_input_scale(_: &'static str, plan: &Plan, is_given: bool) -> Result<(), Error> {
    match plan.config().format {
        TokenFormat::Nvfp4(_) => Ok(()),
        format if is_given => Err(Error::UnusedInputScale { format }),
        _ => Ok(()),
    }
}

fn keeps_ids(name: &'static str, plan: &Plan, is_given: bool) -> Result<(), Error> {
    if !is_given {
        return Ok(());
    }
    let (config, shape) = (plan.config(), plan.shape());
    require_field(name, true, !config.skip_a2a, "skip_a2a", config.skip_a2a)?;
    // Between nodes a round ends once combine has every row of its ids, and later puts rely on that: ids
    // that a caller changes would end it sooner.
    let is_alone = !shape.spans_nodes();
    require_field(name, true, is_alone, "p2p_world_size", shape.p2p_world_size)?;
    // In exact mode combine names the ranks of ids that nobody has looked at, once a wait times out.
    let is_reduced = config.combine == CombineMode::Reduced;
    Ok(require_field(
        name,
        true,
        is_reduced,
        "combine",
        config.combine,
    )?)
}

fn weighs_sums(name: &'static str, plan: &Plan, is_given: bool) -> Result<(), Error> {
    match plan.config().combine {
        CombineMode::Reduced if is_given => Err(Error::WeightsInReducedMode),
        CombineMode::Reduced => Ok(()),
        CombineMode::Exact => required_of_padded(name, plan, is_given),
    }
}

fn weighs_rows(name: &'static str, plan: &Plan, is_given: bool) -> Result<(), Error> {
    let config = plan.config();
    if is_given {
        let by_expert = !config.receive.keeps_rows();
        require_field(name, true, by_expert, "receive", config.receive)?;
    }
    match config.combine {
        CombineMode::Exact if is_given => Err(EpilogueError::RowWeightsInExactMode.into()),
        CombineMode::Exact => Ok(()),
        CombineMode::Reduced => required_of_padded(name, plan, is_given),
    }
}

/// Padded blocks have no weights of the router.
fn required_of_padded(name: &'static str, plan: &Plan, is_given: bool) -> Result<(), Error> {
    let is_padded = plan.receive().layout == ReceiveLayout::Padded;
    let receive = plan.config().receive;
    Ok(require_field(
        name,
        is_given,
        is_given || is_padded,
        "receive",
        receive,
    )?)
}

fn begins_sums(name: &'static str, plan: &Plan, is_given: bool) -> Result<(), Error> {
    let receive = plan.config().receive;
    let is_allowed = is_given && receive.keeps_rows();
    Ok(require_field(
        name, is_given, is_allowed, "receive", receive,
    )?)
}

fn returns_weights(name: &'static str, plan: &Plan, is_given: bool) -> Result<(), Error> {
    let is_wanted = plan.receive().combine_weights;
    Ok(require_field(
        name,
        is_given,
        is_wanted,
        "combine_weights",
        is_wanted,
    )?)
}

/// Checks that a tensor is given if, and only if, a field of the plan's configuration says so.
fn require_field(
    tensor: &'static str,
    is_given: bool,
    is_wanted: bool,
    field: &str,
    value: impl Display,
) -> Result<(), TensorError> {
    if is_given == is_wanted {
        return Ok(());
    }
    let word = |is_there: bool| if is_there { "a tensor" } else { "none" };
    Err(TensorError {
        tensor,
        wanted: format!("{}, as the plan's {field} is {value}", word(is_wanted)),
        given: word(is_given).to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::handles::DevicePtr;

    /// Tensors of these numbers of dimensions, each at an address of its own.
    fn tensors<const N: usize>(ndims: [usize; N]) -> [Option<AnyTensor>; N] {
        let mut address = 0;
        ndims.map(|ndim| {
            address += 16;
            // SAFETY: `DevicePtr::new` is about accesses of a device, and none is made here.
            let at = unsafe { DevicePtr::new(address, 16) };
            AnyTensor::new(at, DataType::F32, &[1; 5][..ndim], None)
        })
    }

    /// Checks that each argument is in its place, and that its errors have its name.
    fn each_is_itself<const N: usize>(
        table: &[Argument; N],
        ndims: [usize; N],
        read: impl Fn([Option<AnyTensor>; N]) -> Result<[Option<AnyTensor>; N], TensorError>,
    ) {
        let all = tensors(ndims);
        assert_eq!(read(all), Ok(all));
        for (at, argument) in table.iter().enumerate() {
            let mut other = all;
            other[at] = AnyTensor::new(DevicePtr::NULL, DataType::F32, &[1; 4], None);
            assert_eq!(read(other).unwrap_err().tensor, argument.name);
            other[at] = None;
            match read(other) {
                Ok(read) => assert!(!argument.is_required && read == other),
                Err(error) => assert!(argument.is_required && error.tensor == argument.name),
            }
        }
    }

    #[test]
    fn each_argument_is_the_one_of_its_row() {
        each_is_itself(DispatchInput::ARGUMENTS, [2, 2, 2, 1, 1, 2, 2], |given| {
            Ok(DispatchInput::of(given)?.tensors())
        });
        let of_combine = [2, 2, 1, 1, 1, 1, 2, 2, 2, 2];
        each_is_itself(CombineInput::ARGUMENTS, of_combine, |given| {
            Ok(CombineInput::of(given)?.tensors())
        });
        each_is_itself(CombineOutput::ARGUMENTS, [2, 2], |given| {
            Ok(CombineOutput::of(given)?.tensors())
        });
        let [apart, _] = tensors([3, 1]);
        assert!(matches!(
            CombineOutput::of([apart, None]),
            Ok(CombineOutput::Apart(_))
        ));
    }
}
