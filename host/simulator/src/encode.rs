//! Encoding of rows on the CPU, with `ferry-layout`'s arithmetic.

use ferry_layout::{TokenFormat, e2m1, fp8, mxfp4, mxfp8, nvfp4};

/// Encoded elements.
#[derive(Default)]
pub struct Encoded {
    /// Codes.
    pub payload: Vec<u8>,
    /// Scales, in the order of groups.
    pub scales: Vec<u8>,
}

/// The largest magnitude, ignoring NaNs.
pub fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |amax, &x| fp8::larger(amax, x))
}

/// Encodes whole groups of elements. `global` is NVFP4's global scale.
pub fn encode(format: TokenFormat, values: &[f32], global: f32) -> Encoded {
    let mut encoded = Encoded::default();
    let group = format.sizes().group;
    for values in values.chunks(group as usize) {
        match format {
            TokenFormat::Bf16 => {}
            TokenFormat::BlockwiseFp8 => encoded.blockwise_fp8(values),
            TokenFormat::Mxfp8(_) => encoded.mxfp8(values),
            TokenFormat::Mxfp4(_) => {
                let scale = mxfp4::scale_bits(largest(values));
                encoded.e2m1(values, mxfp4::multiplier(scale), scale);
            }
            TokenFormat::Nvfp4(_) | TokenFormat::Nvfp4RowScaled(_) => {
                let scale = nvfp4::scale_bits(largest(values), global);
                encoded.e2m1(values, nvfp4::multiplier(scale, 1.0 / global), scale);
            }
        }
    }
    encoded
}

impl Encoded {
    fn blockwise_fp8(&mut self, values: &[f32]) {
        let scale = fp8::scale(largest(values));
        let codes = values.iter().map(|&x| fp8::e4m3_bits(x / scale));
        self.payload.extend(codes);
        self.scales.extend(scale.to_bits().to_le_bytes());
    }

    fn mxfp8(&mut self, values: &[f32]) {
        let amax = largest(values);
        let scale = mxfp8::scale_bits(amax);
        let multiplier = mxfp8::multiplier(amax, scale);
        let codes = values.iter().map(|&x| fp8::e4m3_bits(x * multiplier));
        self.payload.extend(codes);
        self.scales.push(scale);
    }

    fn e2m1(&mut self, values: &[f32], multiplier: f32, scale: u8) {
        let pairs = values.as_chunks().0.iter();
        let codes =
            pairs.map(|&[even, odd]| e2m1::e2m1x2_bits(even * multiplier, odd * multiplier));
        self.payload.extend(codes);
        self.scales.push(scale);
    }
}
