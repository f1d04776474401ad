//! The fused SiLU kernels: the activation between an expert's two matrix multiplications, in the
//! format that the second one reads.

use bytemuck::Zeroable;
use ferry_layout::silu::Activation;
use ferry_layout::{Kernel, Shape, SiluArgs, TokenFormat};

use crate::call::address_or_none;
use crate::call::scales::ScaleTensor;
use crate::device::Device;
use crate::device::loaded_kernels::LoadedKernels;
use crate::device::{Args, Launch};
use crate::error::Error;
use crate::plan::scale_form::ScaleForm;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;
use crate::tensor::handles::Stream;
use crate::tensor::view::Element;

/// Columns that a lane processes at a time.
const LANE_COLUMNS: usize = 16;

/// Arguments of a fused SiLU ([`fused_silu`](trait.Device.html#method.fused_silu)). Rows are those
/// of a dispatch, or any others: `row_offsets` is read on the device, and rows from its last entry on, and
/// those beyond `capacity`, are not touched.
///
/// | the reference's kernel | here |
/// |---|---|
/// | `fused_silu` | `format` BF16 |
/// | `fused_silu_fp8` | blockwise FP8 |
/// | `fused_silu_mx` (MXFP4, MXFP8) | MXFP4, MXFP8, row-major or tiled |
/// | `fused_silu_mxfp8_interleaved` | MXFP8, tiled, `interleaved` |
/// | `fused_silu_nvfp4`, `fused_silu_nvfp4_interleaved` | NVFP4, tiled, `interleaved` or not |
#[derive(Clone, Copy, Debug)]
pub struct FusedSilu {
    /// BF16 `[capacity, 2 * columns]`, 16-byte aligned: gates, then ups.
    pub input: Tensor<2>,
    /// Whether gates and ups alternate instead: gate, up, gate, up.
    pub interleaved: bool,
    /// u32 `[experts + 1]`: the first row of each expert, and the end of the last. For rows that are not by
    /// expert `[2]`, as of one expert: 0 and their number.
    pub row_offsets: Tensor<1>,
    /// Function of gate and up.
    pub activation: Activation,
    /// Format of the results, which are rounded straight from f32. Not
    /// [`Nvfp4RowScaled`](TokenFormat::Nvfp4RowScaled).
    pub format: TokenFormat,
    /// f32 `[experts]`, NVFP4 only: the global scale of each expert, 2^-126 to 2^126. `None`: they are 1.
    pub input_scales: Option<Tensor<1>>,
    /// `[capacity, columns]` in `format`, 16-byte aligned, written.
    pub output: Tensor<2>,
    /// The rows' scales in the layout of `format`, written as a dispatch by expert writes them; the tiled
    /// layout's `offsets` are read. `None` for BF16.
    pub scales: Option<ScaleTensor>,
}

impl dyn Device + '_ {
    /// Enqueues a fused SiLU on `stream`: a kernel that waits for nobody and needs no round. Not collective;
    /// does not synchronize or allocate, and can be captured in a graph. `max_sms` bounds the
    /// multiprocessors that it occupies; `None` for all.
    ///
    /// # Errors
    /// [`Error::Tensor`], [`Error::WrongScales`], [`Error::TooManyScales`], [`Error::UnusedInputScale`],
    /// [`Error::SiluLimit`] or [`Error::SiluColumns`] for arguments that do not fit together; errors of the
    /// launch.
    pub fn fused_silu(
        &self,
        stream: Stream,
        silu: &FusedSilu,
        max_sms: Option<u32>,
    ) -> Result<(), Error> {
        let launch = Launch {
            kernel: Kernel::FusedSilu,
            kernels: LoadedKernels::GENERAL,
            args: Args::Silu(silu.args()?),
            shmem: false,
            max_sms,
            stream,
        };
        // SAFETY: `args` found memory for every element of every tensor, which `DevicePtr::new` promises to
        // be the device's; the kernel uses no other, and the general kernels fit every shape.
        unsafe { self.launch(&launch) }
    }
}

impl FusedSilu {
    /// The kernel's arguments.
    fn args(&self) -> Result<SiluArgs, Error> {
        let [capacity, columns] = self.output.dims;
        let experts = self.row_offsets.dims[0].saturating_sub(1);
        let multiple = (self.format.sizes().elements_of_word() as usize).max(LANE_COLUMNS);
        let too_many = capacity > i32::MAX as usize || columns > i32::MAX as usize / 4;
        let are_experts = (1..=i32::MAX as usize).contains(&experts);
        if columns == 0 || !columns.is_multiple_of(multiple) || too_many || !are_experts {
            return Err(Error::SiluColumns {
                columns,
                multiple,
                capacity,
                experts,
            });
        }
        self.input
            .require("input", [capacity, 2 * columns], Element::BF16_ROW)?;
        let element = Element::row(DataType::of_tokens(self.format));
        self.output
            .require("output", [capacity, columns], element)?;
        self.row_offsets
            .require("row_offsets", [experts + 1], Element::U32)?;
        match (&self.input_scales, self.format) {
            (None, _) => {}
            (Some(scales), TokenFormat::Nvfp4(_)) => {
                scales.require("input_scales", [experts], Element::F32)?;
            }
            (Some(_), format) => return Err(Error::UnusedInputScale { format }),
        }
        if self.format.sizes().has_row_scale {
            return Err(Error::WrongScales {
                given: ScaleTensor::title(self.scales.as_ref()),
                wanted: "scales of a format without row scales",
                format: self.format,
            });
        }
        let rows = Shape {
            ranks: 1,
            experts: experts as u32,
            hidden: columns as u32,
            token_format: self.format.number(),
            ..Shape::zeroed()
        };
        let form = ScaleForm::of_format(self.format);
        let scales = ScaleTensor::check(self.scales.as_ref(), form, &rows, experts, capacity)?;
        let scale_words = self.scale_words(columns);
        let (clamped, alpha, limit) = match self.activation {
            Activation::Silu => (0, 0.0, 0.0),
            Activation::Clamped { alpha, limit } if limit > 0.0 => (1, alpha, limit),
            // NaN, too.
            Activation::Clamped { limit, .. } => return Err(Error::SiluLimit { limit }),
        };
        Ok(SiluArgs {
            input: self.input.at.address(),
            row_offsets: self.row_offsets.at.address(),
            output: self.output.at.address(),
            scales: scales.scales,
            scales_offsets: scales.offsets,
            input_scales: address_or_none(self.input_scales),
            row_capacity: capacity as u64,
            scale_words,
            experts: experts as u32,
            columns: columns as u32,
            format: self.format.number(),
            interleaved: self.interleaved.into(),
            clamped,
            alpha,
            limit,
            reserved: 0,
        })
    }

    /// Number of words in the tensor of scales.
    fn scale_words(&self, columns: usize) -> u64 {
        let words = u64::from(self.format.sizes().scale_words(columns as u32));
        let rows = match self.scales {
            None => 0,
            Some(ScaleTensor::Transposed(_) | ScaleTensor::RowMajor(_)) => self.output.dims[0],
            Some(ScaleTensor::Tiled { scales, .. }) => scales.dims[0] * 128,
        };
        words * rows as u64
    }
}
