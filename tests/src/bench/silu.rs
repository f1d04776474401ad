//! The fused SiLU kernels against the rate of a copy in device memory.

use anyhow::Result;
use ferry::{Activation, Capacity, DataType, Device, FusedSilu, ScaleLayout, Tensor, TokenFormat};

use super::rig::{Repeats, Rig, Stage};
use crate::silu::{self, CLAMPS};
use ferry_rig::formats::{self, Layout};

/// Rows, of [`EXPERTS`] experts.
const ROWS: usize = 32_768;
const EXPERTS: usize = 64;
/// Columns of the output.
const COLUMNS: usize = 2_048;
const REPEATS: Repeats = Repeats {
    warmup: 5,
    iterations: 30,
    flush: false,
    late: false,
};

/// A kernel's time.
#[derive(Clone, Debug, serde::Serialize)]
pub struct SiluTime {
    /// The format's name.
    pub format: &'static str,
    /// Whether gates and ups are interleaved.
    pub interleaved: bool,
    /// Whether the activation is the clamped one.
    pub clamped: bool,
    /// Median of the slowest GPU.
    pub us: f64,
    /// Time to read the input and write the output at the copy's rate.
    pub floor_us: f64,
}

/// A kernel to time.
#[derive(Clone, Copy)]
struct Kind {
    format: TokenFormat,
    interleaved: bool,
    activation: Activation,
}

/// Times every format. `hbm_gb_per_s` is the copy's rate, reads and writes counted.
pub fn measure(rig: &Rig, hbm_gb_per_s: f64) -> Result<Vec<SiluTime>> {
    use ScaleLayout::Tiled;
    let plain = Activation::Silu;
    // gpt-oss' numbers.
    let clamped = silu::clamped(CLAMPS[0]);
    let kinds = [
        (TokenFormat::Bf16, false, plain),
        (TokenFormat::Bf16, false, clamped),
        (TokenFormat::BlockwiseFp8, false, plain),
        (TokenFormat::BlockwiseFp8, false, clamped),
        (TokenFormat::Mxfp8(Tiled), false, plain),
        (TokenFormat::Mxfp8(Tiled), true, plain),
        (TokenFormat::Mxfp8(Tiled), false, clamped),
        (TokenFormat::Mxfp4(Tiled), false, plain),
        (TokenFormat::Mxfp4(Tiled), false, clamped),
        (TokenFormat::Mxfp4(Tiled), true, clamped),
        (TokenFormat::Nvfp4(Tiled), false, plain),
        (TokenFormat::Nvfp4(Tiled), true, plain),
        (TokenFormat::Nvfp4(Tiled), false, clamped),
    ];
    let measure = |(format, interleaved, activation)| -> Result<SiluTime> {
        let kind = Kind {
            format,
            interleaved,
            activation,
        };
        let layout = Layout {
            blocks: None,
            format,
            hidden: COLUMNS,
            capacity: Capacity {
                rows: ROWS,
                scale_blocks: ROWS / 128,
                ..Capacity::default()
            },
        };
        let output = layout.row_bytes() * ROWS + layout.scales_bytes();
        let bytes = (4 * COLUMNS * ROWS + output) as f64;
        Ok(SiluTime {
            format: format.name(),
            interleaved,
            clamped: activation != plain,
            us: time(rig, kind, layout)?,
            floor_us: bytes / hbm_gb_per_s / 1e3,
        })
    };
    kinds.into_iter().map(measure).collect()
}

/// Prints the times.
pub fn print(times: &[SiluTime]) {
    println!("\nfused SiLU, {ROWS} rows of {EXPERTS} experts, 2 * {COLUMNS} columns:");
    println!("{:26} |      µs   floor (x)", "format");
    for time in times {
        let mut name = time.format.to_owned();
        if time.interleaved {
            name += " interleaved";
        }
        if time.clamped {
            name += " clamped";
        }
        let ratio = time.us / time.floor_us;
        println!(
            "{name:26} | {:7.1} {:7.1} ({ratio:.2})",
            time.us, time.floor_us
        );
    }
}

/// Uploads BF16 between -6 and 6, the same few rows repeatedly. The time depends on the values: zeros and
/// other special ones take paths of their own.
fn upload_inputs(device: &dyn Device, input: ferry::DevicePtr) -> Result<()> {
    const SOME_ROWS: usize = 64;
    let values = silu::ordinary_numbers(2 * COLUMNS * SOME_ROWS);
    let bytes: &[u8] = bytemuck::cast_slice(&values);
    for row in (0..ROWS).step_by(SOME_ROWS) {
        device.upload(input.plus((4 * COLUMNS * row) as u64), bytes)?;
    }
    Ok(())
}

fn time(rig: &Rig, kind: Kind, layout: Layout) -> Result<f64> {
    let Kind {
        format,
        interleaved,
        activation,
    } = kind;
    let offsets: Vec<u32> = (0..=EXPERTS).map(|e| (e * ROWS / EXPERTS) as u32).collect();
    let starts = formats::scales_offsets(&offsets);
    let mut owned = Vec::new();
    let mut jobs = Vec::new();
    for gpu in &rig.gpus {
        let device = &gpu.device;
        let mut put = |bytes: usize| -> Result<ferry::DevicePtr> {
            let at = device.alloc(bytes.max(16) as u64)?;
            owned.push((device, at));
            Ok(at)
        };
        let input = put(4 * COLUMNS * ROWS)?;
        upload_inputs(&**device, input)?;
        let output = put(layout.row_bytes() * ROWS)?;
        let scales = put(layout.scales_bytes())?;
        let (row_offsets, blocks) = (put(4 * offsets.len())?, put(4 * starts.len())?);
        device.upload(row_offsets, bytemuck::cast_slice(&offsets))?;
        device.upload(blocks, bytemuck::cast_slice(&starts))?;
        let silu = FusedSilu {
            input: Tensor::contiguous(input, DataType::Bf16, [ROWS, 2 * COLUMNS]),
            interleaved,
            row_offsets: Tensor::contiguous(row_offsets, DataType::U32, [EXPERTS + 1]),
            activation,
            format,
            input_scales: None,
            output: Tensor::contiguous(output, DataType::of_tokens(format), [ROWS, COLUMNS]),
            scales: layout.scale_tensor(scales, blocks, EXPERTS),
        };
        jobs.push(move |_stage: usize, _iteration: u32| {
            let device: &dyn Device = &**device;
            Ok(device.fused_silu(gpu.stream, &silu, None)?)
        });
    }
    let us = rig.time(REPEATS, &[Stage::Aligned], jobs)?[0].gpu_us.median;
    owned
        .into_iter()
        // SAFETY: `device` allocated `at`, and `rig.time` has waited for the only kernels that use it.
        .try_for_each(|(device, at)| unsafe { device.free(at) })?;
    Ok(us)
}
