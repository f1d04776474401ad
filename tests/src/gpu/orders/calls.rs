//! Calls that a user makes after one rank's round is enqueued and before the others' are.

use anyhow::{Context, Result};
use ferry::cuda::CudaDevice;
use ferry::{Device, Stream};

use super::super::Suite;
use super::driver::{self, Memory, Module};
use super::{Scene, Told, check};

/// Bytes to allocate or copy.
const BYTES: usize = 16 << 20;

/// A call, with the resources made for it before the round.
type Call = Box<dyn FnOnce(&CudaDevice) -> Result<()>>;
/// Makes a call and its resources.
type Case = fn(&CudaDevice) -> Result<Call>;

const CASES: [(&str, Case); 10] = [
    ("a module is loaded", |_| {
        Ok(Box::new(|_| Module::load().map(drop)))
    }),
    (
        "a kernel of a loaded module is launched for the first time",
        |device| {
            let (module, stream) = (Module::load()?, device.stream()?);
            Ok(Box::new(move |_| module.launch(stream)))
        },
    ),
    ("device memory is allocated", |_| {
        Ok(Box::new(|_| Memory::alloc(BYTES).map(drop)))
    }),
    ("device memory is freed", |_| {
        let memory = Memory::alloc(BYTES)?;
        Ok(Box::new(|_| memory.free()))
    }),
    (
        "memory is allocated and freed in the order of a stream",
        |device| {
            let stream = device.stream()?;
            driver::alloc_in(stream, BYTES)?;
            Ok(Box::new(move |_| driver::alloc_in(stream, BYTES)))
        },
    ),
    ("pinned memory is allocated and freed", |_| {
        Ok(Box::new(|_| driver::alloc_pinned(BYTES)))
    }),
    ("pageable memory is copied by Ferry's device", |device| {
        let at = device.alloc(BYTES as u64)?;
        Ok(Box::new(move |device| {
            let mut bytes = vec![1; BYTES];
            device.upload(at, &bytes)?;
            Ok(device.download(at, &mut bytes)?)
        }))
    }),
    ("pageable memory is copied in a stream", |device| {
        let (memory, stream): (_, Stream) = (Memory::alloc(BYTES)?, device.stream()?);
        Ok(Box::new(move |_| memory.write_in(stream, &vec![1; BYTES])))
    }),
    ("pageable memory is copied in the default stream", |_| {
        let memory = Memory::alloc(BYTES)?;
        Ok(Box::new(move |_| memory.write(&vec![1; BYTES])))
    }),
    ("the context is synchronised", |_| {
        Ok(Box::new(|_| driver::synchronize_context()))
    }),
];

pub(super) fn run(suite: &mut Suite<'_>) -> Result<()> {
    for (name, case) in CASES {
        check(suite, name, |scene| {
            let device = scene.device.clone();
            let _current = device.enter()?;
            let call = case(&device)?;
            Ok(scene.others_behind_the_first(call)?.into())
        })?;
    }
    check(
        suite,
        "another thread synchronises the context",
        in_a_thread,
    )
}

/// Waits in a thread from the time the first rank's kernel runs; meanwhile the others' are launched.
fn in_a_thread(scene: &mut Scene) -> Result<Told> {
    let device = scene.device.clone();
    let wait = move || -> Result<()> {
        let _current = device.enter()?;
        driver::synchronize_context()
    };
    let mut thread = None;
    let ending = scene.others_behind_the_first(|_| {
        thread = Some(std::thread::spawn(wait));
        std::thread::sleep(super::HEAD_START);
        Ok(())
    })?;
    let waited = thread.context("the thread was not started")?.join();
    waited.map_err(|_| anyhow::anyhow!("the thread panicked"))??;
    Ok(ending.into())
}
