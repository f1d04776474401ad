//! Launches, captures and memory on CUDA devices, on machines without one: with a driver that runs nothing and
//! keeps books.
#![cfg(feature = "cuda")]

#[path = "books/program.rs"]
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
                }
            }
            assert_eq!(books.count("books_modules"), 6);
        },
    );
}
