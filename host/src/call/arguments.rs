//! The table of a call's arguments: what checks, C and Python read of each. The outputs of a dispatch are in
//! `tensors.rs`.

use std::fmt::Display;

use ferry_layout::{CombineMode, ReceiveLayout, TokenFormat};

use self::Dim::{Hidden, One, Rows, Tokens, TopK};
use self::Elements::{Codes, Ids, Row, Scales, Sums, Word, X};
use crate::call::epilogue::{CombineEpilogue, CombineSteps};
use crate::call::{CombineInput, CombineOutput, DispatchInput};
use crate::error::{EpilogueError, Error, TensorError};
use crate::plan::Plan;
use crate::tensor::Tensor;
use crate::tensor::any::{AnyTensor, view};
use crate::tensor::data_type::DataType;
use crate::tensor::view::{Element, Layout, View};

/// An argument of a call.
#[derive(Clone, Copy, Debug)]
pub struct Argument {
    /// Its name in errors: that of its field, with a number if the field has several.
    pub name: &'static str,
    /// Whether it is in every call.
    pub is_required: bool,
    pub(super) elements: Elements,
    pub(super) dims: &'static [Dim],
    when: When,
    /// Whether a plan's calls have it. Inputs have rules instead, which say why a call takes none.
    pub(super) is_in: fn(&Plan) -> bool,
}

/// Fails unless an argument of this name may be there, or be missing, in the calls of a plan.
type When = fn(&'static str, &Plan, is_given: bool) -> Result<(), Error>;

/// Type and alignment of elements. Elements without a type in the table have checks of their own.
#[derive(Clone, Copy, Debug)]
pub(super) enum Elements {
    /// 16-byte aligned.
    Row(DataType),
    /// Aligned to their size.
    Word(DataType),
    /// BF16, or codes of the plan's format.
    X,
    /// Elements of the plan's format.
    Codes,
    Ids,
    /// Scales of `X` or of `Codes`.
    Scales,
    Sums,
}

/// Size of a dimension.
#[derive(Clone, Copy, Debug)]
pub(super) enum Dim {
    One,
    Tokens,
    Rows,
    Hidden,
    TopK,
    Ranks,
    LocalExperts,
    Groups,
    /// Groups, and the end of the last.
    GroupEnds,
    /// Experts, or groups of rows, that are counted.
    Counted,
    /// Numbers that say where a row comes from.
    SourceWords,
    /// Weights of a row.
    RowWeights,
}

/// Sizes of a call.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) tokens: usize,
    /// Rows that fit in the dispatch's outputs.
    pub(super) rows: usize,
}

impl Argument {
    pub(super) const fn new(name: &'static str, elements: Elements, dims: &'static [Dim]) -> Self {
        Self {
            name,
            is_required: false,
            elements,
            dims,
            when: |_, _, _| Ok(()),
            is_in: |_| true,
        }
    }

    pub(super) const fn required(self) -> Self {
        Self {
            is_required: true,
            ..self
        }
    }

    const fn when(self, when: When) -> Self {
        Self { when, ..self }
    }

    pub(super) const fn of(self, is_in: fn(&Plan) -> bool) -> Self {
        Self { is_in, ..self }
    }

    /// Whether it has the scales of rows that are encoded.
    pub const fn is_scales(&self) -> bool {
        matches!(self.elements, Scales)
    }

    /// Type that its elements usually have in a plan of this format. `is_encoded`: whether `x` comes with
    /// scales.
    pub fn data_type(&self, format: TokenFormat, is_encoded: bool) -> DataType {
        match self.elements {
            Row(data_type) | Word(data_type) => data_type,
            Codes => DataType::of_tokens(format),
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
        let wanted = self.layout(plan, sizes, element);
        Ok(tensor.require(self.name, wanted.dims(), wanted.element)?)
    }

    /// Its sizes.
    #[inline]
    pub(super) fn layout(&self, plan: &Plan, sizes: Sizes, element: Element) -> Layout {
        let config = plan.config();
        Layout::new(element, self.dims, |dim| match dim {
            One => 1,
            Tokens => sizes.tokens,
            Rows => sizes.rows,
            Hidden => config.hidden,
            TopK => config.top_k,
            Dim::Ranks => plan.ranks() as usize,
            Dim::LocalExperts => plan.local_experts(),
            Dim::Groups => plan.groups(),
            Dim::GroupEnds => plan.groups() + 1,
            Dim::Counted if config.receive.keeps_rows() => plan.local_experts(),
            Dim::Counted => plan.groups(),
            Dim::SourceWords if plan.receive().row_sources => 3,
            Dim::SourceWords => 2,
            Dim::RowWeights if config.receive.keeps_rows() => config.top_k,
            Dim::RowWeights => 1,
        })
    }
}

/// Tensors of a table's arguments, one after the other.
pub(super) struct InOrder<const N: usize> {
    table: &'static [Argument; N],
    given: [Option<AnyTensor>; N],
    at: usize,
}

impl<const N: usize> InOrder<N> {
    pub(super) const fn new(table: &'static [Argument; N], given: [Option<AnyTensor>; N]) -> Self {
        let at = 0;
        Self { table, given, at }
    }

    /// The next tensor, with its name.
    pub(super) const fn any(&mut self) -> (&'static str, Option<AnyTensor>) {
        let at = self.at;
        self.at += 1;
        (self.table[at].name, self.given[at])
    }

    pub(super) fn optional<const D: usize>(&mut self) -> Result<Option<Tensor<D>>, TensorError> {
        let (name, given) = self.any();
        AnyTensor::optional(name, given)
    }

    pub(super) fn required<const D: usize>(&mut self) -> Result<Tensor<D>, TensorError> {
        let (name, given) = self.any();
        AnyTensor::required(name, given)
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
        let mut all = InOrder::new(Self::ARGUMENTS, given);
        Ok(Self {
            x: all.required()?,
            topk_ids: all.required()?,
            topk_weights: all.optional()?,
            input_scale: all.optional()?,
            tokens_on_device: all.optional()?,
            x_scales: all.optional()?,
            kept_ids: all.optional()?,
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
        Argument::new("expert_rows", Row(DataType::Bf16), &[Rows, Hidden]).required(),
        Argument::new("topk_weights", Word(DataType::F32), &[Tokens, TopK]).when(weighs_sums),
        Argument::new("row_weights", Word(DataType::F32), &[Rows]).when(weighs_rows),
        Argument::new("row_scales", Word(DataType::F32), &[Tokens]),
        Argument::new("biases[0]", Row(DataType::Bf16), &[Hidden]),
        Argument::new("biases[1]", Row(DataType::Bf16), &[Hidden]),
        Argument::new("residual", Row(DataType::Bf16), &[Tokens, Hidden]),
        Argument::new("initial[0]", Row(DataType::Bf16), &[Tokens, Hidden]).when(begins_sums),
        Argument::new("initial[1]", Row(DataType::Bf16), &[Tokens, Hidden]).when(begins_sums),
        Argument::new("received_weights", Word(DataType::F32), &[Rows, TopK]).when(returns_weights),
    ];

    /// Inputs of tensors in the order of [`ARGUMENTS`](Self::ARGUMENTS), without an epilogue of the caller's
    /// own. Their sizes and elements are checked by calls.
    ///
    /// # Errors
    /// [`TensorError`] for a tensor of another number of dimensions, and if `expert_rows` is missing.
    pub fn of(given: [Option<AnyTensor>; 10]) -> Result<Self, TensorError> {
        let mut all = InOrder::new(Self::ARGUMENTS, given);
        let expert_rows = all.required()?;
        let (topk_weights, row_weights) = (all.optional()?, all.optional()?);
        let steps = CombineSteps {
            row_scales: all.optional()?,
            biases: [all.optional()?, all.optional()?],
            residual: all.optional()?,
        };
        Ok(Self {
            expert_rows,
            topk_weights,
            row_weights,
            initial: [all.optional()?, all.optional()?],
            received_weights: all.optional()?,
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
#[path = "arguments_tests.rs"]
mod tests;
