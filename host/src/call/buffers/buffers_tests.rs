//! Buffers of every format fit a dispatch and a combine.

use super::*;
use crate::call::tensors::TensorLayout;
use crate::communicator::Communicator;
use crate::group::Group;
use crate::plan::config::Config;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;
use ferry_layout::{CombineMode, Rank, ScaleLayout, TokenFormat};

fn plan(format: TokenFormat, combine: CombineMode) -> (Arc<dyn Device>, Plan) {
    let group = Group::simulated(1, 1).unwrap();
    let config = Config {
        format,
        combine,
        ..Config::new(3, 2, 256, 50)
    };
    (
        group.device(Rank(0)).unwrap(),
        Plan::new(&group, config).unwrap(),
    )
}

/// The table in the documentation of [`DispatchBuffers`].
fn documented_bytes(format: TokenFormat, capacity: Capacity) -> usize {
    let Capacity {
        rows, scale_blocks, ..
    } = capacity;
    let (hidden, local, sizes) = (256, 3, format.sizes());
    let tokens = rows * hidden * sizes.element_bits as usize / 8;
    let group = sizes.group.max(1) as usize;
    let scales = match (format, format.scale_layout()) {
        (TokenFormat::Bf16, _) => 0,
        (_, None) => 4 * rows * hidden / 128,
        (_, Some(ScaleLayout::RowMajor)) => rows * hidden / group,
        (_, Some(ScaleLayout::Tiled)) => 128 * scale_blocks * hidden / group + 4 * local,
    };
    let row_scales = if sizes.has_row_scale { 2 * rows } else { 0 };
    tokens + scales + row_scales + 4 * (local + 1) + 4 * local + 8 * rows
}

#[test]
fn buffers_of_every_format_have_the_documented_bytes_and_pass_the_checks() {
    for format in TokenFormat::ALL {
        let (device, plan) = plan(format, CombineMode::Reduced);
        for capacity in [Capacity::max(&plan), Capacity::of_rows(&plan, 40)] {
            let buffers = DispatchBuffers::with_capacity(&device, &plan, capacity).unwrap();
            let bytes: u64 = buffers.memory().iter().map(|at| at.bytes()).sum();
            assert_eq!(
                bytes,
                documented_bytes(format, capacity) as u64,
                "{format:?}"
            );
            let args = crate::call::dispatch::args_of(&ferry_layout::Common::of(plan.shape()), 0);
            let args = buffers
                .output()
                .add_to(ferry_layout::DispatchWith::plain(args), &plan)
                .unwrap();
            assert_eq!(args.args.row_capacity, capacity.rows as u64);
            // SAFETY: no kernel was launched, and no address is kept.
            unsafe { buffers.free() }.unwrap();
        }
    }
}

#[test]
fn blocks_of_a_number_of_rows_suffice_however_the_experts_share_them() {
    let (_, plan) = plan(TokenFormat::Mxfp8(ScaleLayout::Tiled), CombineMode::Reduced);
    for rows in [0, 1, 2, 3, 127, 128, 129, 130, 131, 258, 300] {
        let blocks = |a: usize, b: usize| {
            let parts = [a, b, rows - a - b];
            parts
                .into_iter()
                .map(|rows| rows.div_ceil(128))
                .sum::<usize>()
        };
        let most = (0..=rows).flat_map(|a| (0..=rows - a).map(move |b| blocks(a, b)));
        assert_eq!(
            most.max(),
            Some(Capacity::of_rows(&plan, rows).scale_blocks)
        );
    }
}

#[test]
fn a_capacity_that_cannot_be_is_refused_by_name() {
    let tiled = TokenFormat::Mxfp8(ScaleLayout::Tiled);
    let refused = |format, rows, scale_blocks| {
        let (device, plan) = plan(format, CombineMode::Reduced);
        let capacity = Capacity {
            rows,
            scale_blocks,
            ..Capacity::default()
        };
        let refused = DispatchBuffers::with_capacity(&device, &plan, capacity);
        refused.err().map(|error| error.to_string()).unwrap()
    };
    for (text, part) in [
        (
            refused(TokenFormat::BlockwiseFp8, 6, 0),
            "rows is 6, but it must be a multiple of 4",
        ),
        (
            refused(tiled, usize::MAX, 1),
            "rows is 18446744073709551615, but it must be at most",
        ),
        (
            refused(tiled, 1, 1 << 40),
            "scale_blocks is 1099511627776, but it must be at most",
        ),
        (
            refused(tiled, 1, 0),
            "scale_blocks is 0, but 1 rows take at least 1 block of scales",
        ),
        (
            refused(tiled, 1, 1 << 25),
            "scales has 33554432 blocks, and at most 16777216",
        ),
    ] {
        assert!(text.contains(part), "{text}");
    }
    let (device, plan) = plan(tiled, CombineMode::Reduced);
    assert!(DispatchBuffers::with_capacity(&device, &plan, Capacity::default()).is_ok());
}

/// Returns the tensors at `at`, of which the one of this name is half its alignment further on.
pub(super) fn with_misaligned(
    name: &str,
    layout: &[TensorLayout],
    at: &[DevicePtr],
) -> Vec<DevicePtr> {
    let pairs = layout.iter().zip(at);
    let moved = pairs.map(|(tensor, at)| {
        let is_moved = tensor.name == name;
        let shift = if is_moved { tensor.align / 2 } else { 0 };
        // SAFETY: `DevicePtr::new` is about accesses of a device, and none is made here.
        unsafe { DevicePtr::new(at.address() + shift, tensor.bytes) }
    });
    moved.collect()
}

/// Memory for these outputs.
pub(super) fn memory(device: &Arc<dyn Device>, layout: &[TensorLayout]) -> Vec<DevicePtr> {
    let all = layout.iter().map(|tensor| device.alloc(tensor.bytes));
    all.collect::<Result<_, _>>().unwrap()
}

#[test]
fn outputs_of_addresses_are_those_that_the_layout_says() {
    for format in TokenFormat::ALL {
        let (device, plan) = plan(format, CombineMode::Reduced);
        let capacity = Capacity::of_rows(&plan, 40);
        let layout = plan.output_layout(capacity).unwrap();
        let bytes: u64 = layout.iter().map(|tensor| tensor.bytes).sum();
        assert_eq!(bytes, documented_bytes(format, capacity) as u64);
        let at = memory(&device, &layout);
        let output = DispatchOutput::from_addresses(&plan, capacity, &at).unwrap();
        assert_eq!(output.capacity(), 40);
        // The alignment in the layout is the one that is checked.
        for moved in layout.iter() {
            let odd = with_misaligned(moved.name, &layout, &at);
            let refused = DispatchOutput::from_addresses(&plan, capacity, &odd);
            let text = refused.unwrap_err().to_string();
            assert!(
                text.contains(&format!("a multiple of {}", moved.align)),
                "{text}"
            );
        }
    }
}

#[test]
fn addresses_that_do_not_fit_the_format_are_named() {
    let tiled = TokenFormat::Mxfp8(ScaleLayout::Tiled);
    let (device, plan_of) = plan(tiled, CombineMode::Reduced);
    let capacity = Capacity::of_rows(&plan_of, 40);
    let layout = plan_of.output_layout(capacity).unwrap();
    let at = memory(&device, &layout);
    let few = DispatchOutput::from_addresses(&plan_of, capacity, &at[1..]);
    assert_eq!(
        few.unwrap_err().to_string(),
        "tensor output: wanted an address for each of tokens, scales, scale_offsets, row_offsets, \
         expert_ids, src_info, given 5"
    );
    let short = [&[at[3]], &at[1..]].concat();
    let short = DispatchOutput::from_addresses(&plan_of, capacity, &short);
    let text = short.unwrap_err().to_string();
    assert!(
        text.starts_with("tensor tokens: wanted 10240 bytes at its address"),
        "{text}"
    );
    let all = DispatchOutput::from_addresses(&plan_of, capacity, &at).unwrap();
    let told = |plan: &Plan, output: DispatchOutput| output.fits(plan).unwrap_err().to_string();
    let more = DispatchOutput {
        row_scales: all.row_offsets,
        ..all
    };
    assert_eq!(
        told(&plan_of, more),
        "tensor row_scales: wanted none (format mxfp8:tiled, receive by-expert), given a tensor"
    );
    let none = DispatchOutput {
        expert_ids: None,
        ..all
    };
    assert_eq!(
        told(&plan_of, none),
        "tensor expert_ids: wanted a tensor (format mxfp8:tiled, receive by-expert), given none"
    );
    let mut tensors = all.tensors();
    tensors[2] = None;
    assert_eq!(
        DispatchOutput::of(&plan_of, tensors)
            .unwrap_err()
            .to_string(),
        "tensor scale_offsets: wanted 1 dimensions, given none"
    );
    let (_, bf16) = plan(TokenFormat::Bf16, CombineMode::Reduced);
    let refused = all.fits(&bf16);
    assert!(
        matches!(refused, Err(Error::WrongScales { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_result_has_the_shape_of_its_mode_and_no_more_tokens_than_the_plan() {
    let (device, plan) = plan(TokenFormat::Bf16, CombineMode::Exact);
    let summed = CombineBuffers::new(&device, &plan).unwrap();
    let apart = CombineBuffers::apart(&device, &plan).unwrap();
    let dims = |buffers: &CombineBuffers, tokens| match buffers.output(tokens).unwrap() {
        CombineOutput::Summed(tensor) => tensor.dims.to_vec(),
        CombineOutput::Apart(tensor) => tensor.dims.to_vec(),
        CombineOutput::Weighted { .. } => Vec::new(),
    };
    assert_eq!(dims(&summed, 50), [50, 256]);
    assert_eq!(dims(&apart, 7), [7, 2, 256]);
    assert_eq!(apart.memory.at()[0].bytes(), 2 * 50 * 2 * 256);
    let refused = summed.output(51);
    let is_named = matches!(refused, Err(Error::TooManyTokens { given: 51, max: 50 }));
    assert!(is_named, "{refused:?}");
}

#[test]
fn rows_apart_are_refused_in_reduced_mode() {
    let (device, plan) = plan(TokenFormat::Bf16, CombineMode::Reduced);
    let refused = CombineBuffers::apart(&device, &plan).err();
    assert!(matches!(refused, Some(Error::ApartInReducedMode)));
}

#[test]
fn values_go_to_a_tensor_and_come_back() {
    let (device, _) = plan(TokenFormat::Bf16, CombineMode::Reduced);
    let tensor = device
        .upload_tensor([2, 3], &[1_i32, 2, 3, 4, 5, 6])
        .unwrap();
    assert_eq!(
        device.download_tensor::<i32, 2>(&tensor).unwrap(),
        [1, 2, 3, 4, 5, 6]
    );
    let short = device.upload_tensor([2, 3], &[1_u16]);
    let short = short.map(|_| ()).unwrap_err().to_string();
    assert!(
        short.contains("wanted 6 elements (shape [2, 3]), given 1"),
        "{short}"
    );
    let other = device.download_tensor::<f32, 2>(&tensor);
    assert_eq!(
        other.unwrap_err().to_string(),
        "tensor tensor: wanted a download as i32 or u32, given one as f32"
    );
    let bytes = device.download_tensor::<u8, 2>(&tensor).unwrap();
    assert_eq!((bytes.len(), bytes[4]), (24, 2));
    let longer = Tensor::contiguous(tensor.at, DataType::I32, [2, 4]);
    assert!(matches!(
        device.download_tensor::<i32, 2>(&longer),
        Err(Error::MemoryTooShort {
            wanted: 32,
            given: 24,
            ..
        })
    ));
    let rows = Tensor {
        strides: [6, 1],
        ..tensor
    };
    let gaps = device
        .download_tensor::<i32, 2>(&rows)
        .unwrap_err()
        .to_string();
    assert!(
        gaps.contains("wanted no gaps, given strides [6, 1]"),
        "{gaps}"
    );
}

/// A rank's own device and plan.
#[test]
fn buffers_of_a_communicator_outlive_it() {
    let group = Group::simulated(1, 1).unwrap();
    let plan = Plan::new(&group, Config::new(1, 1, 8, 1)).unwrap();
    let rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let buffers = DispatchBuffers::new(rank.device(), rank.plan()).unwrap();
    buffers.fill(7).unwrap();
    let device = rank.device().clone();
    rank.close().unwrap();
    let mut bytes = [0; 4];
    let offsets = buffers.output().row_offsets.unwrap().at;
    device.download(offsets, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 4]);
    // SAFETY: no kernel was launched, and no address is kept.
    unsafe { buffers.free() }.unwrap();
}
