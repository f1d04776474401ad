//! Outputs of a round on a rank, on the host.

use bytemuck::Pod;
use ferry::{
    Capacity, Config, DataType, Device, DevicePtr, DispatchOutput, Error, ReceivedCounts,
    ScaleTensor, Tensor, View,
};
use ferry_reference::bf16;

use super::rows::{RowLayout, Rows, Viewed};
use super::tables::Tables;
use crate::formats::{Blocks, Images, Layout, Place};

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
    /// `[capacity]`; empty if rows have a source rank, too.
    pub src_info: Vec<[i32; 2]>,
    /// Tables that a plan asks for.
    pub tables: Tables,
}

/// Contents of the outputs of a rank's dispatch.
#[derive(PartialEq, Eq)]
pub enum Contents {
    /// Rows by expert.
    ByExpert(Received),
    /// Rows that stayed as they came.
    Rows(Rows),
}

impl Contents {
    /// Requires that these rows are as many as the counts say, if all have room. Panics if not.
    pub fn require_counts(&self, counts: &ReceivedCounts) {
        let rows = counts.capacity.rows;
        match self {
            Self::ByExpert(received) => {
                let end = received.row_offsets.last().copied().unwrap_or(0);
                assert_eq!(end as usize, rows, "rows by expert");
            }
            Self::Rows(received) => {
                let of_sources = received.source_counts.iter().map(|&rows| rows as u32);
                assert!(
                    of_sources.eq(counts.source_counts.iter().copied()),
                    "{counts:?}"
                );
                let of_experts = received.expert_counts.iter().map(|&rows| rows as u32);
                assert!(
                    of_experts.eq(counts.expert_counts.iter().copied()),
                    "{counts:?}"
                );
            }
        }
    }
}

/// Outputs of a round on a rank.
pub struct RankOutputs {
    /// Number of the rank.
    pub rank: usize,
    /// Outputs of dispatch.
    pub received: Contents,
    /// `[tokens, hidden]` or `[tokens, top_k, hidden]`.
    pub combined: Vec<bf16>,
    /// f32 bits `[tokens, top_k]` of the weights that came back, if any do.
    pub combined_weights: Vec<u32>,
    /// Bytes after `combined`, where nothing may write. May be empty.
    pub beyond: Vec<u8>,
}

/// `count` words on a device, whose bytes are in the host's order. Synchronises, but not with other streams.
pub fn download<T: Pod>(device: &dyn Device, at: DevicePtr, count: usize) -> Result<Vec<T>, Error> {
    let mut words = vec![T::zeroed(); count];
    device.download(at, bytemuck::cast_slice_mut(&mut words))?;
    Ok(words)
}

/// A tensor that outputs of this layout have.
fn present<const N: usize>(tensor: Option<Tensor<N>>) -> Tensor<N> {
    tensor.expect("a tensor of this receive layout")
}

impl Contents {
    /// Downloads the outputs of a dispatch of a plan of `config`, of a view the rows that were read of it, if
    /// any were. Synchronises, but not with other streams.
    pub fn download(
        device: &dyn Device,
        output: &DispatchOutput,
        config: &Config,
        viewed: Option<&Viewed>,
    ) -> Result<Self, Error> {
        Ok(if config.receive.keeps_rows() {
            let layout = RowLayout::of(config, output.src_info.dims[0]);
            Self::Rows(Rows::download(device, output, layout, viewed)?)
        } else {
            Self::ByExpert(Received::download(device, output, config)?)
        })
    }

    /// Rows by expert.
    ///
    /// # Panics
    /// If they stayed as they came.
    pub fn by_expert(&self) -> &Received {
        match self {
            Self::ByExpert(received) => received,
            Self::Rows(rows) => panic!("rows by expert, not {}", rows.layout.receive),
        }
    }
}

impl Received {
    /// Downloads a dispatch's outputs, by expert. Synchronises, but not with other streams.
    pub fn download(
        device: &dyn Device,
        output: &DispatchOutput,
        config: &Config,
    ) -> Result<Self, Error> {
        let (tokens, row_offsets) = (present(output.tokens), present(output.row_offsets));
        let expert_ids = present(output.expert_ids);
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
        let blocks = output.source_ranges.map(|ranges| Blocks {
            rows: rows / ranges.dims[0],
            transposed: config.receive.fields().transposed_scales,
        });
        let layout = Layout {
            format: config.format,
            blocks,
            hidden,
            capacity: Capacity {
                rows,
                scale_blocks,
                ..Capacity::default()
            },
        };
        let (experts, offset_count) = (expert_ids.elements(), row_offsets.elements());
        let scales = scales.map(|at| download(device, at, layout.scales_bytes()));
        let offsets = offsets.map(|tensor| download(device, tensor.at, tensor.elements()));
        let row_scales = output
            .row_scales
            .map(|tensor| download(device, tensor.at, rows));
        Ok(Self {
            layout,
            tokens: download(device, tokens.at, rows * layout.row_bytes())?,
            scales: scales.transpose()?.unwrap_or_default(),
            scales_offsets: offsets.transpose()?.unwrap_or_default(),
            row_scales: row_scales.transpose()?.unwrap_or_default(),
            row_offsets: download(device, row_offsets.at, offset_count)?,
            expert_ids: download(device, expert_ids.at, experts)?,
            src_info: match output.src_info.dims[1] {
                2 => download(device, output.src_info.at, rows)?,
                _ => Vec::new(),
            },
            tables: Tables::download(device, output)?,
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

impl Rows {
    /// Downloads a dispatch's outputs, whose rows stayed as they came. Synchronises, but not with other
    /// streams.
    pub fn download(
        device: &dyn Device,
        output: &DispatchOutput,
        layout: RowLayout,
        viewed: Option<&Viewed>,
    ) -> Result<Self, Error> {
        let rows = layout.rows;
        let bytes = |tensor: Option<DevicePtr>, count: usize| {
            tensor.map_or(Ok(Vec::new()), |at| download::<u8>(device, at, count))
        };
        let scales = output.scales.map(|scales| match scales {
            ScaleTensor::Transposed(tensor) | ScaleTensor::RowMajor(tensor) => tensor.at,
            ScaleTensor::Tiled { scales, .. } => scales.at,
        });
        let ids = present(output.ids);
        let ids = match ids.data_type {
            DataType::I64 => download(device, ids.at, ids.elements())?,
            _ => {
                let narrow: Vec<i32> = download(device, ids.at, ids.elements())?;
                narrow.into_iter().map(i64::from).collect()
            }
        };
        let (weights, source_counts) = (present(output.weights), present(output.source_counts));
        let expert_counts = present(output.expert_counts);
        let tokens = output.tokens.map(|tensor| tensor.at);
        let row_scales = output.row_scales.map(|tensor| tensor.at);
        let mut all = Self {
            layout,
            is_read: tokens.is_some(),
            tokens: bytes(tokens, rows * layout.row_bytes())?,
            scales: bytes(scales, rows * layout.scale_bytes())?,
            row_scales: bytes(row_scales, rows * layout.row_scale_bytes())?,
            ids,
            weights: download(device, weights.at, weights.elements())?,
            src_info: download(device, output.src_info.at, rows)?,
            source_counts: download(device, source_counts.at, source_counts.elements())?,
            expert_counts: download(device, expert_counts.at, expert_counts.elements())?,
        };
        if let Some(viewed) = viewed {
            all.take_view(viewed);
        }
        Ok(all)
    }
}

/// Reads the rows of a view out of the window. Synchronises, but not with other streams.
pub fn read_view(device: &dyn Device, view: &View, layout: &RowLayout) -> Result<Viewed, Error> {
    let part = |at: Option<DevicePtr>, width: usize| -> Result<Vec<u8>, Error> {
        let Some(at) = at else {
            return Ok(Vec::new());
        };
        let bytes: Vec<u8> = download(device, at, at.bytes() as usize)?;
        let rows = bytes.chunks(view.row_stride as usize);
        Ok(rows.flat_map(|row| row[..width].to_vec()).collect())
    };
    Ok(Viewed {
        tokens: part(Some(view.tokens.at), layout.row_bytes())?,
        scales: part(view.scales.map(|scales| scales.at), layout.scale_bytes())?,
        row_scales: part(
            view.row_scales.map(|scales| scales.at),
            layout.row_scale_bytes(),
        )?,
    })
}

impl Tables {
    /// Downloads them. Synchronises, but not with other streams.
    pub fn download(device: &dyn Device, output: &DispatchOutput) -> Result<Self, Error> {
        let mut tables = Self::default();
        if let Some(of) = output.expert_counts {
            tables.expert_counts = download(device, of.at, of.elements())?;
        }
        if let Some(of) = output.row_ends {
            tables.row_ends = download(device, of.at, of.elements())?;
        }
        if let Some(of) = output.weights {
            tables.weights = download(device, of.at, of.elements())?;
        }
        if let Some(of) = output.m_indices {
            tables.m_indices = download(device, of.at, of.elements())?;
        }
        if let Some(of) = output.source_ranges {
            tables.ranges = download(device, of.at, of.elements())?;
        }
        if let [rows, 3] = output.src_info.dims {
            tables.sources = download(device, output.src_info.at, rows)?;
        }
        Ok(tables)
    }
}
