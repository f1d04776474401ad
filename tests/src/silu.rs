//! Fused SiLU on any device: activations by the portable arithmetic, which is compared with f64,
//! and what becomes of them in a format by the oracle.

use anyhow::{Result, ensure};
use ferry::simulator::Portable;
use ferry::{
    Activation, Capacity, DataType, Device, FusedSilu, ScaleLayout, Stream, Tensor, TokenFormat,
};
use ferry_reference::{bf16, fp8};

use ferry_rig::Dice;
use ferry_rig::formats::{self, Images, Layout, Place};
use ferry_rig::verify::POISON;

/// A clamped activation's `alpha` and limit.
#[derive(Clone, Copy, Debug)]
pub struct Clamp {
    /// Factor of the sigmoid's argument.
    pub alpha: f32,
    /// Limit of gate and up.
    pub limit: f32,
}

const fn clamp(alpha: f32, limit: f32) -> Clamp {
    Clamp { alpha, limit }
}

/// gpt-oss' numbers first, then some for which the table of sigmoids begins elsewhere: with 0 for the
/// steepest, and so late that it goes past infinity for the flattest.
pub const CLAMPS: [Clamp; 7] = [
    clamp(1.702, 7.0),
    clamp(-1.702, 7.3),
    clamp(0.0, 7.0),
    clamp(0.01, f32::INFINITY),
    clamp(1e5, 1e-3),
    clamp(f32::MAX, 1e-42),
    clamp(1e-40, f32::MAX),
];

/// The activation with a clamp.
pub const fn clamped(Clamp { alpha, limit }: Clamp) -> Activation {
    Activation::Clamped { alpha, limit }
}

/// A problem.
#[derive(Clone, Debug)]
pub struct SiluCase {
    /// Rows of each expert.
    pub rows: Vec<usize>,
    /// Columns of the output.
    pub columns: usize,
    /// Format of the output.
    pub format: TokenFormat,
    /// Activation of the gates.
    pub activation: Activation,
    /// Whether gates and ups stand side by side.
    pub interleaved: bool,
    /// Seed of the inputs.
    pub seed: u64,
}

/// Mostly of ordinary size; one in 32 is any BF16 but NaN and infinity.
fn number(bits: u64) -> bf16 {
    let any = bf16::from_bits(bits as u16);
    if bits >> 59 == 0 && any.is_finite() {
        return any;
    }
    ordinary(bits)
}

/// Between -6 and 6.
fn ordinary(bits: u64) -> bf16 {
    bf16::from_f32(((bits >> 40) as f32 / (1 << 23) as f32 - 1.0) * 6.0)
}

/// Numbers between -6 and 6, always the same.
pub fn ordinary_numbers(count: usize) -> Vec<bf16> {
    let mut dice = Dice::new(1);
    (0..count).map(|_| ordinary(dice.bits())).collect()
}

/// Every format that a fused SiLU has.
pub fn formats() -> impl Iterator<Item = TokenFormat> {
    TokenFormat::ALL
        .into_iter()
        .filter(|format| !format.sizes().has_row_scale)
}

/// Inputs of a case.
struct Inputs<'a> {
    /// Layout of the outputs.
    layout: Layout,
    input: &'a [bf16],
    offsets: &'a [u32],
    input_scales: &'a [f32],
}

impl SiluCase {
    fn row_offsets(&self) -> Vec<u32> {
        let rows: Vec<u32> = std::iter::once(0)
            .chain(self.rows.iter().scan(0, |end, &rows| {
                *end += rows as u32;
                Some(*end)
            }))
            .collect();
        fp8::padded_offsets(&rows, self.format.sizes().row_alignment)
    }

    /// Runs it on a device and compares all that it leaves. Synchronises.
    pub fn run(&self, device: &dyn Device, stream: Stream) -> Result<()> {
        let offsets = self.row_offsets();
        let needed = Capacity {
            rows: offsets[offsets.len() - 1] as usize,
            scale_blocks: formats::first_blocks(&offsets)[offsets.len() - 1] + 1,
            ..Capacity::default()
        };
        let layout = Layout {
            blocks: None,
            format: self.format,
            hidden: self.columns,
            capacity: formats::with_spare_rows(
                needed,
                self.format.sizes().row_alignment as usize,
                3,
            ),
        };
        let mut dice = Dice::new(self.seed);
        let input: Vec<bf16> = (0..layout.capacity.rows * 2 * self.columns)
            .map(|_| number(dice.bits()))
            .collect();
        let input_scales: Vec<f32> = (0..self.rows.len())
            .map(|expert| 0.5 + expert as f32 / 8.0)
            .collect();
        let inputs = Inputs {
            layout,
            input: &input,
            offsets: &offsets,
            input_scales: &input_scales,
        };
        self.compare(&self.given(device, stream, &inputs)?, &inputs)
    }

    fn given(&self, device: &dyn Device, stream: Stream, inputs: &Inputs<'_>) -> Result<Images> {
        let Inputs {
            layout,
            input,
            offsets,
            input_scales,
        } = *inputs;
        let (format, columns, experts) = (self.format, self.columns, self.rows.len());
        let (rows, mut images) = (layout.capacity.rows, Images::poisoned(layout, POISON));
        let put = |bytes: &[u8]| device.upload_tensor([bytes.len()], bytes);
        let (tokens, scales) = (put(&images.tokens)?.at, put(&images.scales)?.at);
        let starts = formats::scales_offsets(offsets);
        let starts = device.upload_tensor([starts.len()], &starts)?.at;
        let input_scales = device.upload_tensor([experts], input_scales)?;
        let silu = FusedSilu {
            input: device.upload_tensor([rows, 2 * columns], input)?,
            interleaved: self.interleaved,
            row_offsets: device.upload_tensor([experts + 1], offsets)?,
            activation: self.activation,
            format,
            input_scales: matches!(format, TokenFormat::Nvfp4(_)).then_some(input_scales),
            output: Tensor::contiguous(tokens, DataType::of_tokens(format), [rows, columns]),
            scales: layout.scale_tensor(scales, starts, experts),
        };
        device.fused_silu(stream, &silu, None)?;
        device.synchronize(stream)?;
        device.download(tokens, &mut images.tokens)?;
        device.download(scales, &mut images.scales)?;
        let inputs = [input_scales.at, silu.input.at, silu.row_offsets.at];
        for at in [tokens, scales, starts].into_iter().chain(inputs) {
            // SAFETY: allocated here, and the stream was synchronised: documented on `Device::free`.
            unsafe { device.free(at) }?;
        }
        Ok(images)
    }

    fn compare(&self, given: &Images, inputs: &Inputs<'_>) -> Result<()> {
        let Inputs {
            layout,
            input,
            offsets,
            input_scales,
        } = *inputs;
        let (format, columns) = (self.format, self.columns);
        let mut wanted = Images::poisoned(layout, POISON);
        wanted.clear_unused(offsets);
        let blocks = formats::first_blocks(offsets);
        for (expert, pair) in offsets.windows(2).enumerate() {
            for row in pair[0]..pair[1] {
                let values = self.activate(&input[row as usize * 2 * columns..][..2 * columns])?;
                let place = Place {
                    start: pair[0] as usize,
                    block: blocks[expert],
                    row: (row - pair[0]) as usize,
                };
                let row = formats::encode_f32(format, &values, input_scales[expert]);
                wanted.put(place, &row);
            }
        }
        let same = |name: &str, wanted: &[u8], given: &[u8]| {
            let at = wanted.iter().zip(given).position(|(a, b)| a != b);
            ensure!(
                at.is_none(),
                "{name}: byte {} differs: {:?}",
                at.unwrap_or(0),
                at.map(|at| (wanted[at], given[at]))
            );
            Ok(())
        };
        same("output", &wanted.tokens, &given.tokens)?;
        same("scales", &wanted.scales, &given.scales)
    }

    /// The f32 results of a row, each near what f64 says.
    fn activate(&self, row: &[bf16]) -> Result<Vec<f32>> {
        let pair = |column: usize| {
            if self.interleaved {
                (row[2 * column], row[2 * column + 1])
            } else {
                (row[column], row[self.columns + column])
            }
        };
        (0..self.columns)
            .map(|column| {
                let (gate, up) = pair(column);
                let found = self.activation.apply(gate.to_f32(), up.to_f32(), Portable);
                let exact = exact(self.activation, gate.to_f64(), up.to_f64());
                let near = (f64::from(found) - exact).abs()
                    <= exact.abs() * 1e-5 + 1e-37 * (1.0 + up.to_f64().abs());
                let too_large = exact.abs() > 3e38;
                ensure!(
                    near || too_large,
                    "silu({gate}, {up}): {found}, not {exact}"
                );
                Ok(found)
            })
            .collect()
    }
}

fn exact(activation: Activation, gate: f64, up: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::Silu => gate * sigmoid(gate) * up,
        Activation::Clamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            (up + 1.0) * gate * sigmoid(alpha * gate)
        }
    }
}

/// Cases of all sizes, in every format.
pub fn cases(large: bool) -> Vec<SiluCase> {
    let mut cases = Vec::new();
    let sizes: &[(Vec<usize>, usize)] = &[
        (vec![0], 128),
        (vec![1], 128),
        (vec![127], 640),
        (vec![130, 0, 5, 256, 0], 128),
        ((0..64).map(|expert| expert % 7 * 9).collect(), 1408),
        (vec![1000], 2048),
    ];
    let count = if large { sizes.len() } else { 4 };
    for format in formats() {
        for (index, (rows, columns)) in sizes[..count].iter().enumerate() {
            for interleaved in [false, true] {
                cases.push(SiluCase {
                    rows: rows.clone(),
                    columns: *columns,
                    format,
                    activation: if index % 2 == 0 {
                        clamped(CLAMPS[0])
                    } else {
                        Activation::Silu
                    },
                    interleaved,
                    seed: index as u64 * 2 + u64::from(interleaved),
                });
            }
        }
        let (rows, columns) = if large { (100, 640) } else { (3, 128) };
        for (index, clamp) in CLAMPS.into_iter().enumerate() {
            cases.push(SiluCase {
                rows: vec![rows],
                columns,
                format,
                activation: clamped(clamp),
                interleaved: index % 2 == 0,
                seed: 100 + index as u64,
            });
        }
    }
    cases
}

impl SiluCase {
    /// Name for people.
    pub fn name(&self) -> String {
        let layout = match self.format.scale_layout() {
            Some(ScaleLayout::RowMajor) => ", row-major scales",
            _ => "",
        };
        format!(
            "{:?} to {}{layout}: {} rows of {} experts, {} columns{}",
            self.activation,
            self.format.name(),
            self.rows.iter().sum::<usize>(),
            self.rows.len(),
            self.columns,
            if self.interleaved {
                ", interleaved"
            } else {
                ""
            }
        )
    }
}
