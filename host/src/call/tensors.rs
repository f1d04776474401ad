//! The output tensors of a dispatch: their layouts and addresses.

use std::convert::Infallible;

use ferry_layout::ReceiveLayout;

use crate::call::DispatchOutput;
use crate::call::scales::ScaleTensor;
use crate::error::{Error, TensorError};
use crate::plan::Plan;
use crate::plan::capacity::Capacity;
use crate::plan::scale_form::ScaleForm;
use crate::tensor::Tensor;
use crate::tensor::any::{AnyTensor, view};
use crate::tensor::data_type::DataType;
use crate::tensor::handles::DevicePtr;
use crate::tensor::view::{Element, View};

/// A value for each output tensor of a dispatch: `None` for those that the plan's format and
/// [receive layout](crate::Config::receive) do not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DispatchTensors<T> {
    /// Value for [`DispatchOutput::tokens`].
    pub tokens: Option<T>,
    /// Value for the scales in [`DispatchOutput::scales`], in any layout.
    pub scales: Option<T>,
    /// Value for the `offsets` of [`ScaleTensor::Tiled`].
    pub scale_offsets: Option<T>,
    /// Value for [`DispatchOutput::row_scales`].
    pub row_scales: Option<T>,
    /// Value for [`DispatchOutput::row_offsets`].
    pub row_offsets: Option<T>,
    /// Value for [`DispatchOutput::expert_ids`].
    pub expert_ids: Option<T>,
    /// Value for [`DispatchOutput::src_info`].
    pub src_info: T,
    /// Value for [`DispatchOutput::ids`].
    pub ids: Option<T>,
    /// Value for [`DispatchOutput::weights`].
    pub weights: Option<T>,
    /// Value for [`DispatchOutput::source_counts`].
    pub source_counts: Option<T>,
    /// Value for [`DispatchOutput::expert_counts`].
    pub expert_counts: Option<T>,
    /// Value for [`DispatchOutput::row_ends`].
    pub row_ends: Option<T>,
    /// Value for [`DispatchOutput::m_indices`].
    pub m_indices: Option<T>,
    /// Value for [`DispatchOutput::source_ranges`].
    pub source_ranges: Option<T>,
}

/// A tensor without gaps that is not allocated yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorLayout {
    /// Its name in [`DispatchTensors`].
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

impl<T> DispatchTensors<T> {
    /// Replaces each value by the result of `map`, in the order of the fields: a layout by memory, say.
    ///
    /// # Errors
    /// The first error of `map`, which is then not called any more.
    pub fn try_map<U, E>(
        self,
        mut map: impl FnMut(T) -> Result<U, E>,
    ) -> Result<DispatchTensors<U>, E> {
        Ok(DispatchTensors {
            tokens: self.tokens.map(&mut map).transpose()?,
            scales: self.scales.map(&mut map).transpose()?,
            scale_offsets: self.scale_offsets.map(&mut map).transpose()?,
            row_scales: self.row_scales.map(&mut map).transpose()?,
            row_offsets: self.row_offsets.map(&mut map).transpose()?,
            expert_ids: self.expert_ids.map(&mut map).transpose()?,
            src_info: map(self.src_info)?,
            ids: self.ids.map(&mut map).transpose()?,
            weights: self.weights.map(&mut map).transpose()?,
            source_counts: self.source_counts.map(&mut map).transpose()?,
            expert_counts: self.expert_counts.map(&mut map).transpose()?,
            row_ends: self.row_ends.map(&mut map).transpose()?,
            m_indices: self.m_indices.map(&mut map).transpose()?,
            source_ranges: self.source_ranges.map(&mut map).transpose()?,
        })
    }

    /// Replaces each value by the result of `map`, in the order of the fields.
    pub fn map<U>(self, mut map: impl FnMut(T) -> U) -> DispatchTensors<U> {
        let Ok(mapped) = self.try_map(|value| Ok::<_, Infallible>(map(value)));
        mapped
    }

    /// Every tensor's name, and its value if it is present, in the order of the fields.
    pub fn named(&self) -> [(&'static str, Option<&T>); 14] {
        [
            ("tokens", self.tokens.as_ref()),
            ("scales", self.scales.as_ref()),
            ("scale_offsets", self.scale_offsets.as_ref()),
            ("row_scales", self.row_scales.as_ref()),
            ("row_offsets", self.row_offsets.as_ref()),
            ("expert_ids", self.expert_ids.as_ref()),
            ("src_info", Some(&self.src_info)),
            ("ids", self.ids.as_ref()),
            ("weights", self.weights.as_ref()),
            ("source_counts", self.source_counts.as_ref()),
            ("expert_counts", self.expert_counts.as_ref()),
            ("row_ends", self.row_ends.as_ref()),
            ("m_indices", self.m_indices.as_ref()),
            ("source_ranges", self.source_ranges.as_ref()),
        ]
    }

    /// All values that are present, in the order of the fields.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.named().into_iter().filter_map(|(_, value)| value)
    }
}

impl DispatchOutput {
    /// All tensors.
    pub fn tensors(&self) -> DispatchTensors<AnyTensor> {
        self.views().map(AnyTensor::from)
    }

    pub(super) fn views(&self) -> DispatchTensors<View<'_>> {
        let (scales, scale_offsets) = match &self.scales {
            None => (None, None),
            Some(ScaleTensor::Transposed(scales) | ScaleTensor::RowMajor(scales)) => {
                (Some(scales.view()), None)
            }
            Some(ScaleTensor::Tiled { scales, offsets }) => {
                (Some(scales.view()), Some(offsets.view()))
            }
        };
        DispatchTensors {
            tokens: view(self.tokens.as_ref()),
            scales,
            scale_offsets,
            row_scales: view(self.row_scales.as_ref()),
            row_offsets: view(self.row_offsets.as_ref()),
            expert_ids: view(self.expert_ids.as_ref()),
            src_info: self.src_info.view(),
            ids: view(self.ids.as_ref()),
            weights: view(self.weights.as_ref()),
            source_counts: view(self.source_counts.as_ref()),
            expert_counts: view(self.expert_counts.as_ref()),
            row_ends: view(self.row_ends.as_ref()),
            m_indices: view(self.m_indices.as_ref()),
            source_ranges: view(self.source_ranges.as_ref()),
        }
    }

    /// Outputs in these tensors. Their sizes and elements are checked by calls.
    ///
    /// # Errors
    /// [`TensorError`] for a tensor of another number of dimensions, and for `scale_offsets` that are missing
    /// or superfluous.
    pub fn of(plan: &Plan, given: &DispatchTensors<AnyTensor>) -> Result<Self, TensorError> {
        let (scales, offsets) = (given.scales, given.scale_offsets);
        Ok(Self {
            tokens: AnyTensor::optional("tokens", given.tokens)?,
            scales: ScaleTensor::in_form(plan.scale_form(), scales, offsets)?,
            row_scales: AnyTensor::optional("row_scales", given.row_scales)?,
            row_offsets: AnyTensor::optional("row_offsets", given.row_offsets)?,
            expert_ids: AnyTensor::optional("expert_ids", given.expert_ids)?,
            src_info: given.src_info.of("src_info")?,
            ids: AnyTensor::optional("ids", given.ids)?,
            weights: AnyTensor::optional("weights", given.weights)?,
            source_counts: AnyTensor::optional("source_counts", given.source_counts)?,
            expert_counts: AnyTensor::optional("expert_counts", given.expert_counts)?,
            row_ends: AnyTensor::optional("row_ends", given.row_ends)?,
            m_indices: AnyTensor::optional("m_indices", given.m_indices)?,
            source_ranges: AnyTensor::optional("source_ranges", given.source_ranges)?,
        })
    }

    /// Alignment of the tensor `name` with elements of this type.
    fn align(&self, name: &str, data_type: DataType) -> u64 {
        match (name, self.scales) {
            ("scales", Some(ScaleTensor::RowMajor(_))) => 4,
            ("tokens" | "scales", _) => 16,
            _ => Element::natural(data_type).align_bytes,
        }
    }

    /// Checks that these outputs have the tensors of `wanted`, in their shapes. Scales are checked apart.
    pub(super) fn require(&self, wanted: &Self, plan: &Plan) -> Result<(), TensorError> {
        fn others(of: &DispatchOutput) -> DispatchTensors<View<'_>> {
            DispatchTensors {
                scales: None,
                scale_offsets: None,
                ..of.views()
            }
        }
        let (all, given) = (others(wanted), others(self));
        for ((name, of), (_, given)) in all.named().into_iter().zip(given.named()) {
            match (of, given) {
                (None, None) => {}
                (Some(of), Some(given)) => {
                    let element = Element {
                        data_type: of.data_type,
                        align_bytes: wanted.align(name, of.data_type),
                    };
                    given.require(name, of.dims, element)?;
                }
                _ => return Err(unfit(name, plan, of.is_some(), given.is_some(), "a tensor")),
            }
        }
        Ok(())
    }
}

impl Plan {
    /// The output tensors of a dispatch with this capacity: bytes, alignment, sizes and elements of each,
    /// for engines that allocate themselves. [`DispatchOutput::from_addresses`] turns their memory into
    /// outputs. Not collective; does not synchronize.
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
    /// assert_eq!(layout.tokens.unwrap().bytes, 8 * 256);
    /// let scales = layout.scales.expect("a format with scales");
    /// assert_eq!((scales.data_type, &scales.dims[..]), (DataType::F32, &[2, 8][..]));
    /// # Ok(())
    /// # }
    /// ```
    pub fn output_layout(
        &self,
        capacity: Capacity,
    ) -> Result<DispatchTensors<TensorLayout>, Error> {
        capacity.check(self)?;
        let outputs = self.outputs(capacity);
        let tensors = outputs.views();
        let mut names = (tensors.named().into_iter())
            .filter(|(_, tensor)| tensor.is_some())
            .map(|(name, _)| name);
        let layout = |tensor: View<'_>| {
            let name = names.next().expect("a name for each tensor");
            Ok(TensorLayout {
                name,
                data_type: tensor.data_type,
                dims: tensor.dims.to_vec(),
                bytes: tensor.span(),
                align: outputs.align(name, tensor.data_type),
            })
        };
        tensors.try_map(layout)
    }

    /// Outputs without memory, of a capacity that is checked elsewhere.
    pub(super) fn outputs(&self, capacity: Capacity) -> DispatchOutput {
        const fn tensor<const N: usize>(data_type: DataType, dims: [usize; N]) -> Tensor<N> {
            Tensor::contiguous(DevicePtr::NULL, data_type, dims)
        }
        let Capacity {
            rows,
            scale_blocks,
            wide_ids,
        } = capacity;
        let (shape, config, groups) = (self.shape(), self.config(), self.groups());
        let of_row = shape.hidden.checked_div(shape.sizes().group).unwrap_or(0) as usize;
        let element = DataType::of_scales(config.format).unwrap_or(DataType::U8);
        let scales = match self.scale_form() {
            ScaleForm::None => None,
            ScaleForm::Transposed { .. } => {
                Some(ScaleTensor::Transposed(tensor(element, [of_row, rows])))
            }
            ScaleForm::TransposedBlocks => {
                let dims = [self.local_experts() * of_row, self.block_rows()];
                Some(ScaleTensor::Transposed(tensor(element, dims)))
            }
            ScaleForm::RowMajor => Some(ScaleTensor::RowMajor(tensor(element, [rows, of_row]))),
            ScaleForm::Tiled => Some(ScaleTensor::Tiled {
                scales: tensor(element, [scale_blocks, of_row / 4, 32, 4, 4]),
                offsets: tensor(DataType::U32, [groups]),
            }),
        };
        let receive = self.receive();
        let keeps_rows = receive.layout.keeps_rows();
        let copied = receive.layout != ReceiveLayout::View;
        let by_expert = |of| (!keeps_rows).then_some(of);
        let of_rows = |of| keeps_rows.then_some(of);
        let has_row_scale = shape.sizes().has_row_scale && copied;
        let id = if wide_ids {
            DataType::I64
        } else {
            DataType::I32
        };
        let slots = [rows, config.top_k];
        let weights = match (keeps_rows, receive.row_sources) {
            (false, false) => None,
            (false, true) => Some(tensor(DataType::F32, [rows, 1])),
            (true, _) => Some(tensor(DataType::F32, slots)),
        };
        let sources = if receive.row_sources { 3 } else { 2 };
        let counts = |count| tensor(DataType::I32, [count]);
        let counts_groups = self.counts_groups();
        let experts = if keeps_rows {
            self.local_experts()
        } else {
            groups
        };
        DispatchOutput {
            tokens: copied
                .then(|| tensor(DataType::of_tokens(config.format), [rows, config.hidden])),
            scales,
            row_scales: has_row_scale.then(|| tensor(DataType::Bf16, [rows])),
            row_offsets: by_expert(tensor(DataType::U32, [groups + 1])),
            expert_ids: by_expert(tensor(DataType::I32, [groups])),
            src_info: tensor(DataType::I32, [rows, sources]),
            ids: of_rows(tensor(id, slots)),
            weights,
            source_counts: keeps_rows.then(|| counts(self.ranks() as usize)),
            expert_counts: (keeps_rows || counts_groups).then(|| counts(experts)),
            row_ends: counts_groups.then(|| tensor(DataType::U32, [groups])),
            m_indices: receive.m_indices.then(|| tensor(DataType::I32, [rows])),
            source_ranges: (self.block_rows() > 0).then(|| {
                let dims = [self.local_experts(), self.ranks() as usize];
                tensor(DataType::I64, dims)
            }),
        }
    }
}

impl DispatchOutput {
    /// Outputs in memory of yours: an address for each tensor of
    /// [`output_layout`](Plan::output_layout). Not collective; does not synchronize.
    ///
    /// # Errors
    /// Those of [`output_layout`](Plan::output_layout), and [`Error::Tensor`] if an address is missing,
    /// superfluous, not aligned, or has fewer bytes than the tensor; [`Error::TensorsOverlap`].
    pub fn from_addresses(
        plan: &Plan,
        capacity: Capacity,
        at: &DispatchTensors<DevicePtr>,
    ) -> Result<Self, Error> {
        capacity.check(plan)?;
        let outputs = plan.outputs(capacity);
        let tensors = outputs.views();
        let mut present = at.iter();
        for ((name, wanted), (_, given)) in tensors.named().into_iter().zip(at.named()) {
            if wanted.is_some() != given.is_some() {
                let (wanted, given) = (wanted.is_some(), given.is_some());
                return Err(unfit(name, plan, wanted, given, "an address").into());
            }
        }
        let placed = tensors.map(|tensor| {
            let at = present.next().copied().unwrap_or(DevicePtr::NULL);
            View { at, ..tensor }.into()
        });
        let output = Self::of(plan, &placed)?;
        output.fits(plan)?;
        Ok(output)
    }
}

/// The error of a tensor, or an address, that is missing or superfluous.
fn unfit(
    tensor: &'static str,
    plan: &Plan,
    is_wanted: bool,
    is_given: bool,
    thing: &str,
) -> TensorError {
    let word = |is_there: bool| if is_there { thing } else { "none" };
    let (format, receive) = (plan.config().format, plan.config().receive);
    TensorError {
        tensor,
        wanted: format!("{} (format {format}, receive {receive})", word(is_wanted)),
        given: word(is_given).to_owned(),
    }
}
