//! Launches, captures and memory on CUDA devices, on machines without one: with a driver that runs nothing
//! and keeps books.
#![cfg(feature = "cuda")]

mod program;

use std::sync::Arc;

use ferry::cuda::CudaDevice;
use ferry::*;
use program::with_books;

/// Opens the GPU once more.
fn open() -> Arc<CudaDevice> {
    Arc::new(CudaDevice::open(0).unwrap())
}

/// Enqueues a fused SiLU of one row.
fn fused_silu(device: &CudaDevice, stream: Stream) -> Result<(), Error> {
    let device: &dyn Device = device;
    let memory = || device.alloc(1 << 10);
    let silu = FusedSilu {
        input: Tensor::contiguous(memory()?, DataType::Bf16, [1, 32]),
        interleaved: false,
        row_offsets: device.upload_tensor([2], &[0_u32, 1])?,
        activation: Activation::Silu,
        format: TokenFormat::Bf16,
        input_scales: None,
        output: Tensor::contiguous(memory()?, DataType::Bf16, [1, 16]),
        scales: None,
    };
    device.fused_silu(stream, &silu, None)
}

#[test]
fn a_graph_of_another_device_launches_kernels_that_are_loaded() {
    with_books(
        "a_graph_of_another_device_launches_kernels_that_are_loaded",
        |_| {
            let (launched, captures) = (open(), open());
            let stream = captures.stream().unwrap();
            let graph = captures.capture(stream, || fused_silu(&launched, stream));
            drop(launched);
            graph.unwrap().launch(stream).unwrap();
        },
    );
}

#[test]
fn a_device_that_is_dropped_leaves_kernels_at_work() {
    with_books("a_device_that_is_dropped_leaves_kernels_at_work", |_| {
        let (launched, waits) = (open(), open());
        let stream = waits.stream().unwrap();
        fused_silu(&launched, stream).unwrap();
        drop(launched);
        waits.synchronize(stream).unwrap();
    });
}

#[test]
fn a_device_that_is_opened_again_has_the_kernels_that_are_loaded() {
    with_books(
        "a_device_that_is_opened_again_has_the_kernels_that_are_loaded",
        |books| {
            let shape = |hidden| {
                let group = Group::simulated(1, 1).unwrap();
                *Plan::new(&group, Config::new(2, 1, hidden, 4))
                    .unwrap()
                    .shape()
            };
            for _ in 0..3 {
                let device = open();
                for shape in [None, Some(&shape(8)), Some(&shape(16))] {
                    shape.map(|shape| device.kernels(shape).unwrap());
                    device.kernels_with_options(shape).unwrap();
                    device.kernels_with_rows(shape).unwrap();
                }
            }
            assert_eq!(books.count("books_modules"), 9);
        },
    );
}

/// A rank alone, and a round that it enqueues on `stream`.
struct Alone {
    group: Group,
    rank: Communicator,
    input: DispatchInput,
    rows: DispatchOutput,
    sums: CombineOutput,
}

impl Alone {
    fn new() -> Self {
        let group = Group::local(&[0], &GroupOptions::default()).unwrap();
        let plan = Plan::new(&group, Config::new(2, 1, 8, 4)).unwrap();
        let rank = Communicator::new(&group, &plan).unwrap().remove(0);
        let device = rank.device();
        let x = device.upload_tensor([1, 8], &[0_u16; 8]).unwrap();
        let topk_ids = device.upload_tensor([1, 1], &[0_i32]).unwrap();
        let rows = DispatchBuffers::new(device, &plan).unwrap();
        let sums = CombineBuffers::new(device, &plan).unwrap();
        Self {
            input: DispatchInput::new(x, topk_ids),
            rows: *rows.output(),
            sums: sums.output(1).unwrap(),
            group,
            rank,
        }
    }

    fn round(&mut self, stream: Stream) -> Result<(), Error> {
        let experts = CombineInput::new(self.rows.tokens.unwrap());
        self.rank.dispatch(stream, &self.input, &self.rows)?;
        self.rank.combine(stream, &experts, &self.sums)
    }
}

#[test]
fn a_rank_in_a_graph_of_others_that_is_dropped_is_leaked() {
    with_books(
        "a_rank_in_a_graph_of_others_that_is_dropped_is_leaked",
        |books| {
            let mut alone = Alone::new();
            let stream = alone.rank.device().stream().unwrap();
            let graph = books.capture(stream, || alone.round(stream).unwrap());
            assert_eq!(alone.rank.synchronize(stream).unwrap().fault(), None);
            let before = books.count("books_allocations");
            drop(alone.rank);
            assert_eq!(books.count("books_allocations"), before);
            books.launch(graph, stream);
        },
    );
}

#[test]
fn a_rank_in_a_graph_of_others_is_closed_once_that_is_gone() {
    with_books(
        "a_rank_in_a_graph_of_others_is_closed_once_that_is_gone",
        |books| {
            let mut alone = Alone::new();
            let stream = alone.rank.device().stream().unwrap();
            let graph = books.capture(stream, || alone.round(stream).unwrap());
            let before = books.count("books_allocations");
            let refused = alone.rank.close().unwrap_err();
            assert!(
                matches!(refused.error, Error::ForeignGraphs { rank: Rank(0) }),
                "{refused}"
            );
            assert_eq!(books.count("books_allocations"), before);
            books.launch(graph, stream);
            let mut rank = refused.communicator.unwrap();
            assert_eq!(rank.synchronize(stream).unwrap().fault(), None);
            // SAFETY: the graph is not launched any more.
            unsafe { rank.assume_no_foreign_graphs() };
            rank.close().unwrap();
            // Workspace, table, page, window.
            assert_eq!(books.count("books_allocations"), before - 4);
            alone.group.close().unwrap();
        },
    );
}

#[test]
fn a_launch_asks_once_whether_its_stream_is_captured() {
    with_books(
        "a_launch_asks_once_whether_its_stream_is_captured",
        |books| {
            let mut alone = Alone::new();
            let stream = alone.rank.device().stream().unwrap();
            alone.round(stream).unwrap();
            assert_eq!(books.count("books_questions"), 2);
            // An impossible combination.
            alone.round(Stream::DEFAULT).unwrap();
            assert_eq!(books.count("books_questions"), 2);
        },
    );
}
