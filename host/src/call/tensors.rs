//! The output tensors of a dispatch: their table, layouts and addresses.

use ferry_layout::ReceiveLayout;

use crate::call::DispatchOutput;
use crate::call::arguments::Dim::{
    Counted, GroupEnds, Groups, Hidden, LocalExperts, Ranks, RowWeights, Rows, SourceWords, TopK,
};
use crate::call::arguments::Elements::{Codes, Ids, Scales, Word};
use crate::call::arguments::{Argument, InOrder, Sizes};
use crate::call::scales::ScaleTensor;
use crate::error::{Error, TensorError};
use crate::plan::Plan;
use crate::plan::capacity::Capacity;
use crate::plan::scale_form::ScaleForm;
use crate::tensor::any::{AnyTensor, view};
use crate::tensor::data_type::DataType;
use crate::tensor::handles::DevicePtr;
use crate::tensor::view::{Element, Layout, View, bytes_of};

/// A tensor without gaps that is not allocated yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorLayout {
    /// Its name in [`DispatchOutput::ARGUMENTS`].
    pub name: &'static str,
    /// Type of the elements.
    pub data_type: DataType,
    /// Sizes, slowest first, in elements.
    pub dims: Vec<usize>,
    /// Bytes of all elements.
    pub bytes: u64,
    /// Required alignment of its address, in bytes.
    pub align: u64,
}

impl Argument {
    /// The output that a dispatch of this plan writes; `None` if it writes none.
    #[inline]
    fn output(&self, plan: &Plan, capacity: Capacity) -> Option<Layout> {
        if !(self.is_in)(plan) {
            return None;
        }
        let Capacity {
            rows,
            scale_blocks,
            wide_ids,
        } = capacity;
        let data_type = self.data_type(plan.config().format, false);
        let element = match self.elements {
            Scales => {
                let (form, groups) = (plan.scale_form(), plan.groups());
                return Some(form.layout(plan.shape(), groups, rows, scale_blocks));
            }
            Codes => Element::row(data_type),
            Ids if wide_ids => Element::natural(DataType::I64),
            _ => Element::natural(data_type),
        };
        Some(self.layout(plan, Sizes { tokens: 0, rows }, element))
    }
}

const fn keeps_rows(plan: &Plan) -> bool {
    plan.config().receive.keeps_rows()
}

const fn by_expert(plan: &Plan) -> bool {
    !keeps_rows(plan)
}

const fn copies_rows(plan: &Plan) -> bool {
    !matches!(plan.receive().layout, ReceiveLayout::View)
}

impl DispatchOutput {
    /// Its tensors.
    pub const ARGUMENTS: &'static [Argument; 14] = &[
        Argument::new("tokens", Codes, &[Rows, Hidden]).of(copies_rows),
        Argument::new("scales", Scales, &[]).of(|plan| plan.scale_form() != ScaleForm::None),
        Argument::new("scale_offsets", Word(DataType::U32), &[Groups])
            .of(|plan| plan.scale_form() == ScaleForm::Tiled),
        Argument::new("row_scales", Word(DataType::Bf16), &[Rows])
            .of(|plan| plan.shape().sizes().has_row_scale && copies_rows(plan)),
        Argument::new("row_offsets", Word(DataType::U32), &[GroupEnds]).of(by_expert),
        Argument::new("expert_ids", Word(DataType::I32), &[Groups]).of(by_expert),
        Argument::new("src_info", Word(DataType::I32), &[Rows, SourceWords]).required(),
        Argument::new("ids", Ids, &[Rows, TopK]).of(keeps_rows),
        Argument::new("weights", Word(DataType::F32), &[Rows, RowWeights])
            .of(|plan| keeps_rows(plan) || plan.receive().row_sources),
        Argument::new("source_counts", Word(DataType::I32), &[Ranks]).of(keeps_rows),
        Argument::new("expert_counts", Word(DataType::I32), &[Counted])
            .of(|plan| keeps_rows(plan) || plan.counts_groups()),
        Argument::new("row_ends", Word(DataType::U32), &[Groups]).of(Plan::counts_groups),
        Argument::new("m_indices", Word(DataType::I32), &[Rows])
            .of(|plan| plan.receive().m_indices),
        Argument::new("source_ranges", Word(DataType::I64), &[LocalExperts, Ranks])
            .of(|plan| plan.block_rows() > 0),
    ];

    /// Outputs of tensors in the order of [`ARGUMENTS`](Self::ARGUMENTS), of dispatches of this plan. Their
    /// sizes and elements are checked by calls.
    ///
    /// # Errors
    /// [`TensorError`] for a tensor of another number of dimensions, if `src_info` is missing, and for
    /// `scale_offsets` that are missing or superfluous.
    pub fn of(plan: &Plan, given: [Option<AnyTensor>; 14]) -> Result<Self, TensorError> {
        let mut all = InOrder::new(Self::ARGUMENTS, given);
        Ok(Self {
            tokens: all.optional()?,
            scales: {
                let [(_, scales), (_, offsets)] = [all.any(), all.any()];
                ScaleTensor::in_form(plan.scale_form(), scales, offsets)?
            },
            row_scales: all.optional()?,
            row_offsets: all.optional()?,
            expert_ids: all.optional()?,
            src_info: all.required()?,
            ids: all.optional()?,
            weights: all.optional()?,
            source_counts: all.optional()?,
            expert_counts: all.optional()?,
            row_ends: all.optional()?,
            m_indices: all.optional()?,
            source_ranges: all.optional()?,
        })
    }

    /// Its tensors, in the order of [`ARGUMENTS`](Self::ARGUMENTS).
    pub fn tensors(&self) -> [Option<AnyTensor>; 14] {
        self.views().map(|tensor| tensor.map(AnyTensor::from))
    }

    pub(super) fn views(&self) -> [Option<View<'_>>; 14] {
        let (scales, scale_offsets) = match &self.scales {
            None => (None, None),
            Some(ScaleTensor::Transposed(scales) | ScaleTensor::RowMajor(scales)) => {
                (Some(scales.view()), None)
            }
            Some(ScaleTensor::Tiled { scales, offsets }) => {
                (Some(scales.view()), Some(offsets.view()))
            }
        };
        [
            view(self.tokens.as_ref()),
            scales,
            scale_offsets,
            view(self.row_scales.as_ref()),
            view(self.row_offsets.as_ref()),
            view(self.expert_ids.as_ref()),
            Some(self.src_info.view()),
            view(self.ids.as_ref()),
            view(self.weights.as_ref()),
            view(self.source_counts.as_ref()),
            view(self.expert_counts.as_ref()),
            view(self.row_ends.as_ref()),
            view(self.m_indices.as_ref()),
            view(self.source_ranges.as_ref()),
        ]
    }

    /// Checks that these outputs have the tensors of the plan, in their shapes. Scales are checked apart.
    pub(super) fn require(&self, plan: &Plan, capacity: Capacity) -> Result<(), TensorError> {
        let pairs = Self::ARGUMENTS.iter().zip(self.views());
        for (of, given) in pairs.filter(|(of, _)| !of.is_scales()) {
            match (of.output(plan, capacity), given) {
                (None, None) => {}
                (Some(wanted), Some(given)) => {
                    given.require(of.name, wanted.dims(), wanted.element)?;
                }
                (wanted, given) => {
                    return Err(unfit(of.name, plan, wanted.is_some(), given.is_some()));
                }
            }
        }
        Ok(())
    }
}

impl Plan {
    /// The output tensors of a dispatch with this capacity, in the order of [`DispatchOutput::ARGUMENTS`]:
    /// bytes, alignment, sizes and elements of each, for engines that allocate themselves.
    /// [`DispatchOutput::from_addresses`] turns their memory into outputs. Not collective; does not
    /// synchronize.
    ///
    /// # Errors
    /// [`Error::Capacity`], [`Error::TooManyScales`].
    ///
    /// ```
    /// use ferry::{Capacity, Config, DataType, Group, Plan, TokenFormat};
    ///
    /// # fn main() -> Result<(), ferry::Error> {
    /// let group = Group::simulated(2, 7)?;
    /// let plan = Plan::new(&group, Config {
    ///     format: TokenFormat::BlockwiseFp8,
    ///     ..Config::new(4, 2, 256, 3)
    /// })?;
    /// let layout = plan.output_layout(Capacity::of_rows(&plan, 8))?;
    /// let [tokens, scales] = [&layout[0], &layout[1]];
    /// assert_eq!((tokens.name, tokens.bytes), ("tokens", 8 * 256));
    /// assert_eq!((scales.name, scales.data_type), ("scales", DataType::F32));
    /// assert_eq!(scales.dims, [2, 8]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn output_layout(&self, capacity: Capacity) -> Result<Vec<TensorLayout>, Error> {
        capacity.check(self)?;
        let layout = |of: &Argument| {
            let layout = of.output(self, capacity)?;
            let Element {
                data_type,
                align_bytes,
            } = layout.element;
            Some(TensorLayout {
                name: of.name,
                data_type,
                dims: layout.dims().to_vec(),
                bytes: bytes_of(layout.dims(), data_type).unwrap_or(u64::MAX),
                align: align_bytes,
            })
        };
        Ok(DispatchOutput::ARGUMENTS
            .iter()
            .filter_map(layout)
            .collect())
    }

    /// A value for each output of a dispatch of this plan, in the order of [`DispatchOutput::ARGUMENTS`]:
    /// what `value` makes of those that the plan has.
    ///
    /// # Errors
    /// The first error of `value`, which is then not called any more.
    pub fn each_output<T, E>(
        &self,
        mut value: impl FnMut(&'static Argument) -> Result<T, E>,
    ) -> Result<[Option<T>; 14], E> {
        let mut values = [const { None }; 14];
        for (place, of) in values.iter_mut().zip(DispatchOutput::ARGUMENTS) {
            if (of.is_in)(self) {
                *place = Some(value(of)?);
            }
        }
        Ok(values)
    }
}

impl DispatchOutput {
    /// Outputs in memory of yours: an address for each tensor of
    /// [`output_layout`](Plan::output_layout), in its order. Not collective; does not synchronize.
    ///
    /// # Errors
    /// Those of [`output_layout`](Plan::output_layout), and [`Error::Tensor`] if there are more or fewer
    /// addresses, or one is not aligned, or has fewer bytes than the tensor; [`Error::TensorsOverlap`].
    pub fn from_addresses(
        plan: &Plan,
        capacity: Capacity,
        at: &[DevicePtr],
    ) -> Result<Self, Error> {
        let layout = plan.output_layout(capacity)?;
        if layout.len() != at.len() {
            let names: Vec<_> = layout.iter().map(|of| of.name).collect();
            return Err(TensorError {
                tensor: "output",
                wanted: format!("an address for each of {}", names.join(", ")),
                given: at.len().to_string(),
            }
            .into());
        }
        let mut placed = layout.iter().zip(at);
        let placed = plan.each_output(|_| {
            let (of, &at) = placed.next().expect("a layout for each output");
            Ok::<_, Error>(AnyTensor::new(at, of.data_type, &of.dims, None).expect("5 dimensions"))
        })?;
        let output = Self::of(plan, placed)?;
        output.fits(plan)?;
        Ok(output)
    }
}

/// The error of a tensor that is missing or superfluous.
fn unfit(tensor: &'static str, plan: &Plan, is_wanted: bool, is_given: bool) -> TensorError {
    let word = |is_there: bool| if is_there { "a tensor" } else { "none" };
    let (format, receive) = (plan.config().format, plan.config().receive);
    TensorError {
        tensor,
        wanted: format!("{} (format {format}, receive {receive})", word(is_wanted)),
        given: word(is_given).to_owned(),
    }
}
