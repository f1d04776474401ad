//! Outputs of a round on a rank, on the host.

use bytemuck::Pod;
use ferry::{Capacity, Device, DevicePtr, DispatchOutput, Error, ScaleTensor, TokenFormat};
use ferry_reference::bf16;

use crate::formats::{Images, Layout, Place};

/// Contents of the outputs of a rank's dispatch: every tensor, all of it.
#[derive(PartialEq, Eq)]
pub struct Received {
    /// Layout of the tensors.
    pub layout: Layout,
    /// `[capacity, row bytes]`.
    pub tokens: Vec<u8>,
    /// Scales in the format's layout, as bytes.
    pub scales: Vec<u8>,
    /// First blocks of tiled scales.
    pub scales_offsets: Vec<u32>,
    /// BF16 bits, if rows have scales of their own.
    pub row_scales: Vec<u16>,
    /// `[local experts + 1]`.
    pub row_offsets: Vec<u32>,
    /// `[local experts]`.
    pub expert_ids: Vec<i32>,
    /// `[capacity]`.
    pub src_info: Vec<[i32; 2]>,
}

/// Outputs of a round on a rank.
pub struct RankOutputs {
    /// Number of the rank.
    pub rank: usize,
    /// Outputs of dispatch.
    pub received: Received,
    /// `[tokens, hidden]` or `[tokens, top_k, hidden]`.
    pub combined: Vec<bf16>,
    /// Bytes after `combined`, where nothing may write. May be empty.
    pub beyond: Vec<u8>,
}

/// `count` words on a device, whose bytes are in the host's order. Synchronises, but not with other streams.
pub fn download<T: Pod>(device: &dyn Device, at: DevicePtr, count: usize) -> Result<Vec<T>, Error> {
    let mut words = vec![T::zeroed(); count];
    device.download(at, bytemuck::cast_slice_mut(&mut words))?;
    Ok(words)
}

impl Received {
    /// Downloads a dispatch's outputs. Synchronises, but not with other streams.
    pub fn download(
        device: &dyn Device,
        output: &DispatchOutput,
        format: TokenFormat,
    ) -> Result<Self, Error> {
        let by_expert = "rows by expert";
        let tokens = output.tokens.expect(by_expert);
        let row_offsets = output.row_offsets.expect(by_expert);
        let expert_ids = output.expert_ids.expect(by_expert);
        let [rows, hidden] = tokens.dims;
        let (scales, offsets, scale_blocks) = match output.scales {
            None => (None, None, 0),
            Some(ScaleTensor::Transposed(scales) | ScaleTensor::RowMajor(scales)) => {
                (Some(scales.at), None, 0)
            }
            Some(ScaleTensor::Tiled { scales, offsets }) => {
                (Some(scales.at), Some(offsets), scales.dims[0])
            }
        };
        let layout = Layout {
            format,
            hidden,
            capacity: Capacity {
                rows,
                scale_blocks,
                ..Capacity::default()
            },
        };
        let token_bytes = rows * layout.row_bytes();
        let experts = expert_ids.elements();
        let scales = scales.map(|at| download(device, at, layout.scales_bytes()));
        let offsets = offsets.map(|tensor| download(device, tensor.at, tensor.elements()));
        let row_scales = output
            .row_scales
            .map(|tensor| download(device, tensor.at, rows));
        Ok(Self {
            layout,
            tokens: download(device, tokens.at, token_bytes)?,
            scales: scales.transpose()?.unwrap_or_default(),
            scales_offsets: offsets.transpose()?.unwrap_or_default(),
            row_scales: row_scales.transpose()?.unwrap_or_default(),
            row_offsets: download(device, row_offsets.at, row_offsets.elements())?,
            expert_ids: download(device, expert_ids.at, experts)?,
            src_info: download(device, output.src_info.at, rows)?,
        })
    }

    /// Puts a row, which is not compared, into the images that are compared, which have the same layout.
    pub fn copy_row(&self, place: Place, to: &mut Images) {
        let (at, bytes) = (place.start + place.row, self.layout.row_bytes());
        let row = at * bytes..(at + 1) * bytes;
        to.tokens[row.clone()].copy_from_slice(&self.tokens[row]);
        for group in 0..self.layout.groups() {
            let scale = self.layout.scale_at(place, group);
            to.scales[scale.clone()].copy_from_slice(&self.scales[scale]);
        }
        if let Some(scale) = to.row_scales.get_mut(at) {
            *scale = self.row_scales[at];
        }
    }
}
