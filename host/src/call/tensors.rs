//! The output tensors of a dispatch: their layouts and addresses.

use ferry_layout::ScaleLayout;

use crate::call::DispatchOutput;
use crate::call::scales::ScaleTensor;
use crate::error::Error;
use crate::plan::Plan;
use crate::plan::capacity::Capacity;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;
use crate::tensor::handles::DevicePtr;

/// A value for each output tensor of a dispatch: `None` for those that the plan's format does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DispatchTensors<T> {
    /// Value for [`DispatchOutput::tokens`].
    pub tokens: T,
    /// Value for the scales in [`DispatchOutput::scales`], in any layout.
    pub scales: Option<T>,
    /// Value for the `offsets` of [`ScaleTensor::Tiled`].
    pub scale_offsets: Option<T>,
    /// Value for [`DispatchOutput::row_scales`].
    pub row_scales: Option<T>,
    /// Value for [`DispatchOutput::row_offsets`].
    pub row_offsets: T,
    /// Value for [`DispatchOutput::expert_ids`].
    pub expert_ids: T,
    /// Value for [`DispatchOutput::src_info`].
    pub src_info: T,
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
            tokens: map(self.tokens)?,
            scales: self.scales.map(&mut map).transpose()?,
            scale_offsets: self.scale_offsets.map(&mut map).transpose()?,
            row_scales: self.row_scales.map(&mut map).transpose()?,
            row_offsets: map(self.row_offsets)?,
            expert_ids: map(self.expert_ids)?,
            src_info: map(self.src_info)?,
        })
    }

    /// All values that are present, in the order of the fields.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let optional = [&self.scales, &self.scale_offsets, &self.row_scales];
        std::iter::once(&self.tokens)
            .chain(optional.into_iter().flatten())
            .chain([&self.row_offsets, &self.expert_ids, &self.src_info])
    }
}

impl TensorLayout {
    fn of<const N: usize>(name: &'static str, tensor: &Tensor<N>) -> Self {
        Self {
            name,
            data_type: tensor.data_type,
            dims: tensor.dims.to_vec(),
            bytes: tensor.bytes(),
            align: match name {
                "tokens" => 16,
                "scales" if tensor.dims.len() == 2 && tensor.data_type != DataType::F32 => 4,
                "scales" => 16,
                "row_scales" => 2,
                _ => 4,
            },
        }
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
    /// assert_eq!(layout.tokens.bytes, 8 * 256);
    /// let scales = layout.scales.expect("a format with scales");
    /// assert_eq!((scales.data_type, &scales.dims[..]), (DataType::F32, &[2, 8][..]));
    /// # Ok(())
    /// # }
    /// ```
    pub fn output_layout(
        &self,
        capacity: Capacity,
    ) -> Result<DispatchTensors<TensorLayout>, Error> {
        let output = self.outputs(capacity)?;
        let (scales, scale_offsets) = match &output.scales {
            None => (None, None),
            Some(ScaleTensor::Transposed(scales) | ScaleTensor::RowMajor(scales)) => {
                (Some(TensorLayout::of("scales", scales)), None)
            }
            Some(ScaleTensor::Tiled { scales, offsets }) => (
                Some(TensorLayout::of("scales", scales)),
                Some(TensorLayout::of("scale_offsets", offsets)),
            ),
        };
        let row_scales = output.row_scales.as_ref();
        Ok(DispatchTensors {
            tokens: TensorLayout::of("tokens", &output.tokens),
            scales,
            scale_offsets,
            row_scales: row_scales.map(|tensor| TensorLayout::of("row_scales", tensor)),
            row_offsets: TensorLayout::of("row_offsets", &output.row_offsets),
            expert_ids: TensorLayout::of("expert_ids", &output.expert_ids),
            src_info: TensorLayout::of("src_info", &output.src_info),
        })
    }

    /// Outputs without memory.
    fn outputs(&self, capacity: Capacity) -> Result<DispatchOutput, Error> {
        const fn tensor<const N: usize>(data_type: DataType, dims: [usize; N]) -> Tensor<N> {
            Tensor::contiguous(DevicePtr::NULL, data_type, dims)
        }
        let Capacity { rows, scale_blocks } = capacity;
        let (shape, groups) = (self.shape(), self.groups());
        capacity.check(shape)?;
        let (format, hidden) = (shape.format(), self.config().hidden);
        let of_row = shape.hidden.checked_div(shape.sizes().group).unwrap_or(0) as usize;
        let scales = DataType::of_scales(format).map(|element| match format.scale_layout() {
            None => ScaleTensor::Transposed(tensor(element, [of_row, rows])),
            Some(ScaleLayout::RowMajor) => ScaleTensor::RowMajor(tensor(element, [rows, of_row])),
            Some(ScaleLayout::Tiled) => ScaleTensor::Tiled {
                scales: tensor(element, [scale_blocks, of_row / 4, 32, 4, 4]),
                offsets: tensor(DataType::U32, [groups]),
            },
        });
        Ok(DispatchOutput {
            tokens: tensor(DataType::of_tokens(format), [rows, hidden]),
            scales,
            row_scales: (shape.sizes().has_row_scale).then(|| tensor(DataType::Bf16, [rows])),
            row_offsets: tensor(DataType::U32, [groups + 1]),
            expert_ids: tensor(DataType::I32, [groups]),
            src_info: tensor(DataType::I32, [rows, 2]),
        })
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
        let none = plan.outputs(capacity)?;
        let scales = match (none.scales, at.scales, at.scale_offsets) {
            (Some(ScaleTensor::Transposed(of)), Some(at), None) => {
                Some(ScaleTensor::Transposed(Tensor { at, ..of }))
            }
            (Some(ScaleTensor::RowMajor(of)), Some(at), None) => {
                Some(ScaleTensor::RowMajor(Tensor { at, ..of }))
            }
            (Some(ScaleTensor::Tiled { scales, offsets }), Some(at), Some(offsets_at)) => {
                Some(ScaleTensor::Tiled {
                    scales: Tensor { at, ..scales },
                    offsets: Tensor {
                        at: offsets_at,
                        ..offsets
                    },
                })
            }
            (None, None, None) => None,
            (wanted, scales, offsets) => {
                let tiled = matches!(wanted, Some(ScaleTensor::Tiled { .. }));
                return Err(if scales.is_some() == wanted.is_some() {
                    unfit("scale_offsets", tiled, offsets.is_some())
                } else {
                    unfit("scales", wanted.is_some(), scales.is_some())
                });
            }
        };
        let row_scales = match (none.row_scales, at.row_scales) {
            (Some(of), Some(at)) => Some(Tensor { at, ..of }),
            (None, None) => None,
            (wanted, given) => {
                return Err(unfit("row_scales", wanted.is_some(), given.is_some()));
            }
        };
        let output = Self {
            tokens: Tensor {
                at: at.tokens,
                ..none.tokens
            },
            scales,
            row_scales,
            row_offsets: Tensor {
                at: at.row_offsets,
                ..none.row_offsets
            },
            expert_ids: Tensor {
                at: at.expert_ids,
                ..none.expert_ids
            },
            src_info: Tensor {
                at: at.src_info,
                ..none.src_info
            },
        };
        output.check(plan)?;
        Ok(output)
    }
}

/// The error of an address that is missing or superfluous.
fn unfit(tensor: &'static str, is_wanted: bool, is_given: bool) -> Error {
    let word = |is_there| if is_there { "an address" } else { "none" };
    Error::Tensor(crate::error::TensorError {
        tensor,
        wanted: word(is_wanted).to_owned(),
        given: word(is_given).to_owned(),
    })
}
