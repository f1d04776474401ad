//! The arithmetic of the kernels, number by number: each device returns the same bits as the portable code
//! on a CPU, whether it has an instruction for a conversion or not.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Result, ensure};
use ferry::cuda::CudaDevice;
use ferry::simulator::Portable;
use ferry::{Activation, Device, Rank, Stream};
use ferry_layout::Arithmetic;
use ferry_layout::e2m1::e2m1x8_bits;
use ferry_layout::fp8::{self, Divisor, e4m3_bits};
use ferry_layout::sigmoids::{self, GateRange};
use ferry_layout::{bf16_bits, f32_of_bf16_bits, nvfp4};
use ferry_probes::{Conversion, ConvertArgs};

use super::{Outcome, Suite};
use crate::probes::Probes;
use crate::silu::{self, CLAMPS, Clamp};

/// Bits of two f32.
type Pair = [u32; 2];

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    type Test = fn(&Converter) -> Result<()>;
    let tests: [(&str, Test); 13] = [
        ("BF16", |on| every_pair(on, Conversion::Bf16)),
        ("e4m3", |on| every_pair(on, Conversion::E4m3)),
        ("e2m1", |on| products(on, Conversion::E2m1)),
        ("e2m1, scaled", |on| products(on, Conversion::ScaledE2m1)),
        ("larger magnitude", larger_magnitude),
        ("quotient by a scale", quotients),
        ("reciprocal", reciprocals),
        ("NVFP4 multiplier", multipliers),
        ("SiLU", |on| activations(on, Conversion::Silu, CLAMPS[0])),
        ("clamped SiLU", |on| {
            CLAMPS
                .into_iter()
                .try_for_each(|clamp| activations(on, Conversion::ClampedSilu, clamp))
        }),
        ("places of sigmoids", places),
        ("bits of 64 that are set", |on| {
            every_bit(on, Conversion::CountedBits)
        }),
        ("lowest of 64 bits", |on| {
            every_bit(on, Conversion::LowestBit)
        }),
    ];
    for (name, test) in tests {
        suite.check(&format!("conversion: {name}"), |suite| {
            for rank in suite.ranks_by_gpu() {
                let Some(converter) = Converter::new(suite, rank)? else {
                    return Ok(Outcome::Skipped("not on GPUs".into()));
                };
                test(&converter).map_err(|error| error.context(converter.device.name()))?;
            }
            Ok(Outcome::Passed)
        })?;
    }
    Ok(())
}

/// Pairs of all BF16s and hard numbers, each once as the first of a pair and once as the second.
fn pairs() -> Vec<Pair> {
    let values: Vec<u32> = bf16s().chain(hard_numbers()).collect();
    let others = values.iter().rev();
    values.iter().zip(others).map(|(&a, &b)| [a, b]).collect()
}

/// Bits of every BF16 as f32.
fn bf16s() -> impl Iterator<Item = u32> {
    (0..=u16::MAX).map(|bits| f32_of_bf16_bits(bits).to_bits())
}

/// About a million f32: every exponent, infinities and NaNs included, with both signs and the [`mantissas`].
fn hard_numbers() -> impl Iterator<Item = u32> {
    let mantissas = mantissas();
    (0..512_u32).flat_map(move |top| {
        let numbers: Vec<u32> = mantissas.iter().map(|bits| top << 23 | bits).collect();
        numbers
    })
}

/// Hard mantissas to round to 0 to 8 bits: every rounded value, the tie after it, and the neighbours of both.
/// BF16 keeps 7 bits; e4m3 and e2m1 keep 3 and 1, and fewer for small numbers.
fn mantissas() -> BTreeSet<u32> {
    let mut mantissas = BTreeSet::new();
    for kept in 0..=8 {
        let half = 1 << (22 - kept);
        for value in 0..1 << kept {
            let tails = [0, 1, half - 1, half, half + 1, 2 * half - 1];
            mantissas.extend(tails.map(|tail| value << (23 - kept) | tail));
        }
    }
    mantissas
}

fn every_pair(on: &Converter, conversion: Conversion) -> Result<()> {
    on.compare(conversion, &pairs()).map(drop)
}

/// Compares words with one bit or none, with all bits above or below one, and many others.
fn every_bit(on: &Converter, conversion: Conversion) -> Result<()> {
    let one = (0..u64::BITS).map(|bit| 1_u64 << bit);
    let words = one.flat_map(|bit| [bit, bit.wrapping_neg(), bit - 1, bit | 1 << 63, bit | 1]);
    let words = words.chain([u64::MAX]);
    let halves = words.map(|word| [word as u32, (word >> u32::BITS) as u32]);
    let pairs: Vec<Pair> = halves.chain(pairs()).collect();
    on.compare(conversion, &pairs).map(drop)
}

/// Compares conversions of results of arithmetic, whose only NaN on a GPU is a positive one.
fn products(on: &Converter, conversion: Conversion) -> Result<()> {
    let mut pairs = pairs();
    for bits in pairs.as_flattened_mut() {
        if f32::from_bits(*bits).is_nan() {
            *bits = f32::NAN.to_bits();
        }
    }
    on.compare(conversion, &pairs).map(drop)
}

fn larger_magnitude(on: &Converter) -> Result<()> {
    let mut pairs = pairs();
    for [a, _] in &mut pairs {
        // The largest so far is never NaN.
        if f32::from_bits(*a).is_nan() {
            *a = 0;
        }
    }
    on.compare(Conversion::Larger, &pairs).map(drop)
}

/// Compares quotients of every BF16 by scales of many exponents and mantissas.
fn quotients(on: &Converter) -> Result<()> {
    for scale in scales() {
        let pairs: Vec<Pair> = bf16s().map(|value| [value, scale.to_bits()]).collect();
        let given = on.compare(Conversion::Quotient, &pairs)?;
        for ([value, _], given) in pairs.into_iter().zip(given) {
            let (value, given) = (f32::from_bits(value), f32::from_bits(given));
            // A scale comes from the largest magnitude of its group.
            let is_possible = value.is_nan() || value.abs() <= fp8::MAX * scale;
            let (code, wanted) = (e4m3_bits(given), e4m3_bits(value / scale));
            ensure!(
                !is_possible || code == wanted,
                "{value:e} / {scale:e} is {given:e}, in e4m3 {code:#x}, not {wanted:#x}"
            );
        }
    }
    Ok(())
}

fn scales() -> Vec<f32> {
    let exponents = [0_u32, 1, 60, 100, 113, 114, 120, 127, 128, 134, 200, 254];
    let mantissas = [0_u32, 0x1, 0x2a, 0x55, 0x60, 0x7f];
    let amax = |exponent, mantissa| f32::from_bits(exponent << 23 | mantissa << 16);
    let finite = exponents
        .into_iter()
        .flat_map(|exponent| mantissas.map(|mantissa| fp8::scale(amax(exponent, mantissa))));
    let mut scales: Vec<f32> = finite.chain([fp8::scale(f32::INFINITY)]).collect();
    scales.dedup();
    scales
}

/// Compares reciprocals of every mantissa, and of hard numbers of all sizes from 1 on.
fn reciprocals(on: &Converter) -> Result<()> {
    const ONE: u32 = 1.0_f32.to_bits();
    const EACH: u32 = 1 << 20;
    for first in (ONE..2.0_f32.to_bits()).step_by(EACH as usize) {
        let pairs: Vec<Pair> = (first..first + EACH).map(|bits| [bits, 0]).collect();
        on.compare(Conversion::Reciprocal, &pairs)?;
    }
    let is_large = |&bits: &u32| (ONE..f32::INFINITY.to_bits()).contains(&bits);
    let pairs: Vec<Pair> = hard_numbers()
        .filter(is_large)
        .map(|bits| [bits, 0])
        .collect();
    on.compare(Conversion::Reciprocal, &pairs).map(drop)
}

/// Compares multipliers of every scale with inverses of all exponents.
fn multipliers(on: &Converter) -> Result<()> {
    let mantissas: Vec<u32> = mantissas().into_iter().step_by(16).collect();
    let inverses = (0..256_u32).flat_map(|top| mantissas.iter().map(move |bits| top << 23 | bits));
    let inverses: Vec<u32> = inverses.collect();
    for code in 0..=0x7f {
        let pairs: Vec<Pair> = inverses.iter().map(|&inverse| [code, inverse]).collect();
        on.compare(Conversion::Multiplier, &pairs)?;
    }
    Ok(())
}

/// Compares activations of every BF16 gate with ups of all kinds.
fn activations(on: &Converter, conversion: Conversion, clamp: Clamp) -> Result<()> {
    let limit = clamp.limit;
    let near_limit = [limit.next_down(), limit, limit.next_up()];
    let others = [0.0, 1e-40, 0.3, 1.0, 3.5, 1e30, f32::INFINITY];
    let ups = near_limit.into_iter().chain(others);
    for up in ups.flat_map(|up| [up, -up]).chain([f32::NAN]) {
        let pairs: Vec<Pair> = bf16s().map(|gate| [gate, up.to_bits()]).collect();
        on.compare_clamped(conversion, &pairs, clamp)?;
    }
    Ok(())
}

/// Compares words with every BF16 in the low half and another one in the high half.
fn places(on: &Converter) -> Result<()> {
    let halves = |bits: u16| u32::from(bits) | u32::from(!bits.rotate_left(5)) << 16;
    let pairs: Vec<Pair> = (0..=u16::MAX).map(|bits| [halves(bits), 0]).collect();
    CLAMPS.into_iter().try_for_each(|clamp| {
        on.compare_clamped(Conversion::Sigmoids, &pairs, clamp)
            .map(drop)
    })
}

/// Result of the portable code for a pair.
fn portable(conversion: Conversion, pair: Pair, clamp: Clamp) -> u32 {
    let [a, b] = pair.map(f32::from_bits);
    let clamped = silu::clamped(clamp);
    let activate = |activation: Activation| activation.apply(a, b, Portable).to_bits();
    match conversion {
        Conversion::Bf16 => u32::from(bf16_bits(a)) | u32::from(bf16_bits(b)) << 16,
        Conversion::E4m3 => u32::from_le_bytes([a, b, b, a].map(e4m3_bits)),
        Conversion::E2m1 | Conversion::ScaledE2m1 => e2m1x8_bits([a, b, a, b, b, a, b, a]),
        Conversion::Larger => fp8::larger(a.abs(), b).to_bits(),
        Conversion::Quotient => Divisor::new(b).divide(a, Portable).to_bits(),
        Conversion::Reciprocal => Portable.reciprocal(a).to_bits(),
        Conversion::Multiplier => nvfp4::multiplier(a.to_bits() as u8, b).to_bits(),
        Conversion::Silu => activate(Activation::Silu),
        Conversion::ClampedSilu => activate(clamped),
        Conversion::Sigmoids => GateRange::of(clamped).offsets(a.to_bits(), sigmoids::distances),
        Conversion::CountedBits => pair[0].count_ones() + pair[1].count_ones(),
        Conversion::LowestBit => (u64::from(pair[1]) << 32 | u64::from(pair[0])).trailing_zeros(),
    }
}

/// Whether two results are the same bit for bit. In f32, any two NaNs count as the same, since their bits
/// depend on the machine.
fn same(conversion: Conversion, wanted: u32, given: u32) -> bool {
    let are_nan = || f32::from_bits(wanted).is_nan() && f32::from_bits(given).is_nan();
    match conversion {
        Conversion::Bf16
        | Conversion::E4m3
        | Conversion::E2m1
        | Conversion::ScaledE2m1
        | Conversion::Sigmoids
        | Conversion::CountedBits
        | Conversion::LowestBit => wanted == given,
        Conversion::Larger
        | Conversion::Quotient
        | Conversion::Reciprocal
        | Conversion::Multiplier
        | Conversion::Silu
        | Conversion::ClampedSilu => wanted == given || are_nan(),
    }
}

/// A GPU that converts.
struct Converter {
    device: Arc<CudaDevice>,
    probes: Probes,
    stream: Stream,
}

impl Converter {
    /// Returns `None` if the rank has no GPU.
    fn new(suite: &Suite<'_>, rank: Rank) -> Result<Option<Self>> {
        let Some(device) = suite.group().cuda(rank) else {
            return Ok(None);
        };
        Ok(Some(Self {
            probes: Probes::new(&device, &suite.probes)?,
            stream: device.stream()?,
            device,
        }))
    }

    /// Converts the pairs on the device, and checks the results against the portable code.
    fn compare(&self, conversion: Conversion, pairs: &[Pair]) -> Result<Vec<u32>> {
        self.compare_clamped(conversion, pairs, CLAMPS[0])
    }

    /// Does the same as [`compare`](Self::compare) for a conversion with a clamped activation.
    fn compare_clamped(
        &self,
        conversion: Conversion,
        pairs: &[Pair],
        clamp: Clamp,
    ) -> Result<Vec<u32>> {
        let given = self.convert(conversion, pairs, clamp)?;
        for (&pair, &given) in pairs.iter().zip(&given) {
            let wanted = portable(conversion, pair, clamp);
            ensure!(
                same(conversion, wanted, given),
                "{conversion:?} of {:#010x} and {:#010x} is {given:#010x}, in the portable code \
                 {wanted:#010x} ({clamp:?})",
                pair[0],
                pair[1]
            );
        }
        Ok(given)
    }

    fn convert(
        &self,
        conversion: Conversion,
        pairs: &[Pair],
        Clamp { alpha, limit }: Clamp,
    ) -> Result<Vec<u32>> {
        let mut results = vec![0_u32; pairs.len()];
        let input = self.device.alloc(size_of_val(pairs) as u64)?;
        let output = self.device.alloc(size_of_val(&results[..]) as u64)?;
        self.device.upload(input, bytemuck::cast_slice(pairs))?;
        let args = ConvertArgs {
            input: input.address(),
            output: output.address(),
            count: pairs.len() as u32,
            conversion: conversion.number(),
            alpha,
            limit,
        };
        // SAFETY: both addresses are allocations of `count` pairs and words, made above; they are freed, and
        // `self` goes, only after the stream is synchronised.
        unsafe { self.probes.convert(self.stream, &args) }?;
        self.device.synchronize(self.stream)?;
        self.device
            .download(output, bytemuck::cast_slice_mut(&mut results))?;
        // SAFETY: this device allocated both, and the stream has passed the only kernel that uses them.
        unsafe {
            self.device.free(input)?;
            self.device.free(output)?;
        }
        Ok(results)
    }
}
