//! Buffers of rows that stay as they came.

use ferry_layout::{
    Common, DispatchWith, Rank, ReceiveLayout, ReceivedRows, ScaleLayout, TokenFormat,
};

use super::tests::{memory, with_misaligned};
use super::*;
use crate::call::address_or_none;
use crate::call::dispatch::args_of;
use crate::group::Group;
use crate::plan::config::Config;
use crate::plan::receive::{KeptRows, Receive, ReceiveFields};
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;

const TOP_K: usize = 2;
const HIDDEN: usize = 256;
const LAYOUTS: [ReceiveLayout; 3] = [
    ReceiveLayout::View,
    ReceiveLayout::Strided,
    ReceiveLayout::Compact,
];

/// Plans of one of two ranks, with 2 experts and 5 tokens each: every layout, every format that it takes.
fn plans() -> Vec<Plan> {
    let of = |receive, format| {
        let config = |transposed_scales| {
            let fields = ReceiveFields {
                transposed_scales,
                ..ReceiveFields::new(receive)
            };
            Config {
                receive: fields.try_into().unwrap(),
                format,
                ..Config::new(4, TOP_K, HIDDEN, 5)
            }
        };
        let fp8 = format == TokenFormat::BlockwiseFp8;
        [Some(config(false)), fp8.then(|| config(true))]
    };
    let formats = TokenFormat::ALL.into_iter();
    let taken = formats.filter(|format| format.scale_layout() != Some(ScaleLayout::Tiled));
    let taken: Vec<_> = taken.collect();
    let all = LAYOUTS
        .into_iter()
        .flat_map(|receive| taken.iter().flat_map(move |&format| of(receive, format)));
    all.flatten()
        .map(|config| Plan::check(2, true, config).unwrap())
        .collect()
}

fn device() -> Arc<dyn Device> {
    Group::simulated(2, 1).unwrap().device(Rank(0)).unwrap()
}

/// The table in the documentation of [`DispatchBuffers`].
fn documented_bytes(plan: &Plan, Capacity { rows, wide_ids, .. }: Capacity) -> usize {
    let (config, sizes) = (plan.config(), plan.config().format.sizes());
    let of_row = HIDDEN.checked_div(sizes.group as usize).unwrap_or(0);
    let scales = rows * of_row * sizes.scale_bytes as usize;
    let tokens = rows * HIDDEN * sizes.element_bits as usize / 8;
    let row_scales = if sizes.has_row_scale { 2 * rows } else { 0 };
    let copied = match config.receive {
        Receive::View(view) if view.transposed_scales => scales,
        Receive::View(_) => 0,
        _ => tokens + scales + row_scales,
    };
    let id = if wide_ids { 8 } else { 4 };
    copied + 8 * rows + (id + 4) * rows * TOP_K + 4 * 2 + 4 * 2
}

#[test]
fn buffers_have_the_documented_bytes_and_their_addresses_reach_the_kernels() {
    let device = device();
    for plan in plans() {
        let config = *plan.config();
        for wide_ids in [false, true] {
            let capacity = Capacity {
                wide_ids,
                ..Capacity::max(&plan)
            };
            let buffers = DispatchBuffers::with_capacity(&device, &plan, capacity).unwrap();
            let bytes: u64 = buffers.memory().iter().map(|at| at.bytes()).sum();
            assert_eq!(
                bytes,
                documented_bytes(&plan, capacity) as u64,
                "{config:?}"
            );
            let output = *buffers.output();
            assert_eq!(
                output.tokens.is_none(),
                matches!(config.receive, Receive::View(_))
            );
            let mut with = DispatchWith::plain(args_of(&Common::of(plan.shape()), 0));
            with.options.wide_ids = wide_ids.into();
            with.options.rows.is_on = 1;
            let DispatchWith { args, options } = output.add_to(with, &plan).unwrap();
            assert_eq!(args.row_capacity, 10);
            assert_eq!((args.row_offsets, args.expert_ids), (0, 0));
            assert_eq!(args.output_tokens, address_or_none(output.tokens));
            assert_eq!(args.src_info, output.src_info.at.address());
            let given = [output.ids, output.weights].map(|tensor| tensor.unwrap().at.address());
            let counts = [output.source_counts, output.expert_counts];
            let counts = counts.map(|tensor| tensor.unwrap().at.address());
            let rows = ReceivedRows {
                ids: given[0],
                weights: given[1],
                of_source: counts[0],
                of_expert: counts[1],
                is_on: 1,
                ..ReceivedRows::NONE
            };
            assert_eq!(options.rows, rows);
            // Ids come out in the type in which they went in.
            with.options.wide_ids = u32::from(!wide_ids);
            let refused = output.add_to(with, &plan).unwrap_err().to_string();
            let types = [("i64", "i32"), ("i32", "i64")];
            let (wanted, given) = types[usize::from(wide_ids)];
            let text =
                format!("tensor ids: wanted elements of {wanted}, as in topk_ids, given {given}");
            assert_eq!(refused, text);
            // SAFETY: no kernel was launched, and no address is kept.
            unsafe { buffers.free() }.unwrap();
        }
    }
}

#[test]
fn each_tensor_is_needed_and_aligned_and_no_other_one_is_taken() {
    let device = device();
    for plan in plans() {
        let capacity = Capacity {
            wide_ids: true,
            ..Capacity::max(&plan)
        };
        let layout = plan.output_layout(capacity).unwrap();
        let at = memory(&device, &layout);
        let made = |at: &[DevicePtr]| DispatchOutput::from_addresses(&plan, capacity, at);
        let good = made(&at).unwrap();
        assert_eq!(good.capacity(), 10);
        for moved in &layout {
            let refused = made(&with_misaligned(moved.name, &layout, &at)).unwrap_err();
            let wanted = format!(
                "tensor {}: wanted an address that is a multiple of {}",
                moved.name, moved.align
            );
            let text = refused.to_string();
            assert!(text.starts_with(&wanted), "{text}");
        }
        for (place, of) in DispatchOutput::ARGUMENTS.iter().enumerate() {
            if of.is_required || ["scales", "scale_offsets"].contains(&of.name) {
                continue;
            }
            let mut other = good.tensors();
            // Of as many dimensions as its argument has.
            let spare = match of.name {
                "tokens" | "ids" | "weights" | "source_ranges" => good.src_info.into(),
                _ => Tensor::contiguous(DevicePtr::NULL, DataType::I32, [1]).into(),
            };
            let (wanted, given) = match other[place].take() {
                Some(_) => ("a tensor", "none"),
                None => {
                    other[place] = Some(spare);
                    ("none", "a tensor")
                }
            };
            let other = DispatchOutput::of(&plan, other).unwrap();
            let text = other.fits(&plan).unwrap_err().to_string();
            let Config {
                format, receive, ..
            } = plan.config();
            let name = of.name;
            assert_eq!(
                text,
                format!(
                    "tensor {name}: wanted {wanted} (format {format}, receive {receive}), given {given}"
                )
            );
        }
    }
}

#[test]
fn weights_that_come_back_have_memory_of_their_own() {
    let device = device();
    let with = KeptRows {
        combine_weights: true,
        ..KeptRows::default()
    };
    let config = Config {
        receive: Receive::Compact(with),
        ..Config::new(4, TOP_K, HIDDEN, 5)
    };
    let plan = Plan::check(2, true, config).unwrap();
    let sums = CombineBuffers::new(&device, &plan).unwrap();
    let CombineOutput::Weighted { combined, weights } = sums.output(3).unwrap() else {
        panic!("no weights");
    };
    assert_eq!((combined.dims, weights.dims), ([3, HIDDEN], [3, TOP_K]));
    assert_eq!(
        (combined.at.bytes(), weights.at.bytes()),
        (2 * 5 * 256, 4 * 5 * 2)
    );
    sums.fill(0).unwrap();
    assert_eq!(sums.download_weights(3).unwrap(), [0.0; 6]);
    let without = Config {
        receive: Receive::of(ReceiveLayout::Compact),
        ..config
    };
    let without = Plan::check(2, true, without).unwrap();
    let sums = CombineBuffers::new(&device, &without).unwrap();
    assert!(sums.download_weights(3).unwrap().is_empty());
}
