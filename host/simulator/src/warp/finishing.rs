//! Finishing of a token's sums, and reads of the epilogue.

use std::array;

use ferry_layout::{
    EPILOGUE_ELEMENTS, Epilogue, Load, OutputElement, bf16_bits, f16_bits, f32_bits,
    f32_of_bf16_bits,
};
use ferry_protocol::{ByteRange, Finish, Finishing, LANES, Row, Tiles};

use super::Warp;
use super::tiles::{Address, Vector};
use crate::memory::Outside;
use crate::write::Polled;

type Sums = <Warp<'static> as Tiles>::Sums;

/// Vectors of a lane in a tile of finished sums.
const DEPTH: usize = 2;

impl Warp<'_> {
    /// Loads elements `index..index + N` of `bytes` bytes each of a tensor.
    fn elements<const N: usize>(&self, tensor: u64, index: u64, bytes: u64) -> Vec<u8> {
        let length = N as u64 * bytes;
        let address = self.within(tensor, tensor.wrapping_add(bytes * index));
        if !address.is_multiple_of(length.min(16)) {
            let what = "read out of alignment";
            return self.checked(Err(Outside {
                what,
                address,
                bytes: length,
            }));
        }
        self.with_memory(|memory| memory.read(address, length).map(<[u8]>::to_vec))
    }

    /// Sums with which those of a byte range begin, tile by tile.
    pub(super) fn begin_sums(&self, range: ByteRange, finish: &impl Finish<Self>) -> Vec<f32> {
        let mut sums = Vec::new();
        let mut start = range.start;
        while start < range.end {
            let tile: [Sums; DEPTH] = finish.begin(self, start, range.end);
            sums.extend(tile.as_flattened().as_flattened());
            start += DEPTH as u32 * Self::WARP_BYTES;
        }
        sums.truncate((range.end - range.start) as usize / 2);
        sums
    }

    /// Finishes sums tile by tile and stores them.
    pub(super) fn finish_sums(
        &self,
        range: ByteRange,
        sums: &[f32],
        to: Row,
        finish: &impl Finish<Self>,
    ) {
        let mut start = range.start;
        while start < range.end {
            let first = ((start - range.start) / 2) as usize;
            let sum = |index: usize| sums.get(first + index).copied().unwrap_or(0.0);
            let of_vector = |vector: usize| {
                let lane = |lane| (vector * LANES as usize + lane) * EPILOGUE_ELEMENTS;
                array::from_fn(|l| array::from_fn(|element| sum(lane(l) + element)))
            };
            let tile: [Sums; DEPTH] = array::from_fn(of_vector);
            finish.store(self, to, start, range.end, tile);
            start += DEPTH as u32 * Self::WARP_BYTES;
        }
    }
}

impl Load for Warp<'_> {
    fn bf16x8(&self, tensor: u64, index: u64, otherwise: f32) -> [f32; EPILOGUE_ELEMENTS] {
        if tensor == 0 {
            return [otherwise; EPILOGUE_ELEMENTS];
        }
        let bytes = self.elements::<EPILOGUE_ELEMENTS>(tensor, index, 2);
        let bits = bytes.as_chunks().0;
        array::from_fn(|element| f32_of_bf16_bits(u16::from_le_bytes(bits[element])))
    }

    fn f32x8(&self, tensor: u64, index: u64, otherwise: f32) -> [f32; EPILOGUE_ELEMENTS] {
        if tensor == 0 {
            return [otherwise; EPILOGUE_ELEMENTS];
        }
        let bytes = self.elements::<EPILOGUE_ELEMENTS>(tensor, index, 4);
        let bits = bytes.as_chunks().0;
        array::from_fn(|element| f32::from_le_bytes(bits[element]))
    }

    fn f32(&self, tensor: u64, index: u64, otherwise: f32) -> f32 {
        if tensor == 0 {
            return otherwise;
        }
        let bytes = self.elements::<1>(tensor, index, 4);
        f32::from_le_bytes(bytes.as_chunks().0[0])
    }
}

impl Finishing for Warp<'_> {
    fn widen_bf16(&self, vector: Vector) -> Sums {
        vector.map(|words| {
            array::from_fn(|index| f32_of_bf16_bits((words[index / 2] >> (index % 2 * 16)) as u16))
        })
    }

    fn add_sums(&self, sums: Sums, others: Sums) -> Sums {
        array::from_fn(|lane| array::from_fn(|index| sums[lane][index] + others[lane][index]))
    }

    fn apply(
        &self,
        epilogue: &impl Epilogue,
        token: u32,
        start: u32,
        end: u32,
        sums: Sums,
    ) -> Sums {
        let applied = array::from_fn(|lane| {
            // After the row's end its last vector again, as on a GPU.
            let at = (start + lane as u32 * Self::VECTOR_BYTES).min(end - Self::VECTOR_BYTES);
            epilogue.apply(self, token, at / 2, sums[lane])
        });
        self.pause();
        applied
    }

    fn store_sums(&self, row: Address, start: u32, end: u32, sums: Sums, element: OutputElement) {
        let bytes: Vec<u8> = match element {
            OutputElement::Bf16 => bytes_of(&sums, |sum| bf16_bits(sum).to_le_bytes()),
            OutputElement::F16 => bytes_of(&sums, |sum| f16_bits(sum).to_le_bytes()),
            OutputElement::F32 => bytes_of(&sums, |sum| f32_bits(sum).to_le_bytes()),
        };
        let in_row = |byte: u32| byte / 16 * element.bits();
        let length = in_row(end.saturating_sub(start)) as usize;
        let bytes = &bytes[..length.min(bytes.len())];
        self.store_bytes(row.start + u64::from(in_row(start)), bytes, Polled::No);
        self.pause();
    }
}

fn bytes_of<const N: usize>(sums: &Sums, of: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    sums.as_flattened()
        .iter()
        .flat_map(|&sum| of(sum))
        .collect()
}
