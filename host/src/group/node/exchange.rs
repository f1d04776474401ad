//! Exchange of windows between processes, and their release.

use std::sync::Arc;

use ferry_layout::Rank;

use super::introduction::Place;
use crate::device::Device;
use crate::device::sharing::own_gpu::Gpu;
use crate::error::bootstrap::BootstrapError;
use crate::error::{Error, NodeError};
use crate::group::bootstrap::Bootstrap;
use crate::group::job::{agree, wrong_length};
use crate::tensor::handles::DevicePtr;

/// Steps of ranks, each of which succeeds on all or fails on all.
const SHARING: &str = "sharing windows";
const MAPPING: &str = "mapping the windows of the other ranks";
const UNMAPPING: &str = "unmapping the windows of the other ranks";

/// A device whose memory other processes can map, for a node group. No call is collective.
pub(crate) trait Share: Send {
    /// The device.
    fn device(&self) -> Arc<dyn Device>;

    /// The CUDA device, for graphs and events.
    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<Arc<crate::cuda::CudaDevice>>;

    /// Description of this process's place, for the other ranks.
    fn place(&self) -> Result<Place, Error>;

    /// Refuses the GPU of `peer` if the GPU of `rank`, this one, is known not to reach its memory.
    fn require_access(&self, rank: Rank, peer: Rank, gpu: &Gpu) -> Result<(), Error>;

    /// Allocates a window of at least `bytes` bytes.
    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error>;

    /// Frees a window.
    ///
    /// # Safety
    /// [`alloc`](Self::alloc) returned it, nothing uses it any more, and no process has mapped it.
    unsafe fn free(&self, window: DevicePtr) -> Result<(), Error>;

    /// A window of `rank`, this one, as bytes for other processes.
    fn export(&self, rank: Rank, window: DevicePtr) -> Result<Vec<u8>, Error>;

    /// Maps the window of `peer`, of at least `bytes` bytes, for `rank`, this one.
    ///
    /// # Safety
    /// [`export`](Self::export) of that rank returned `handle`, and the rank keeps the window until this one
    /// has unmapped it.
    unsafe fn map(
        &self,
        rank: Rank,
        peer: Rank,
        handle: &[u8],
        bytes: u64,
    ) -> Result<DevicePtr, Error>;

    /// Unmaps a window.
    ///
    /// # Safety
    /// [`map`](Self::map) returned it, and nothing in this process uses it any more.
    unsafe fn unmap(&self, mapped: DevicePtr) -> Result<(), Error>;

    /// Waits for all work on the device.
    fn drain(&self) -> Result<(), Error>;
}

/// A requested window: the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Number of the request, from 1 on.
    pub(crate) number: u64,
    pub(crate) bytes: u64,
}

impl Asked {
    const BYTES: usize = 16;

    /// Message of a rank about its window: its number, its bytes, and its handle.
    fn message(self, handle: &[u8]) -> Vec<u8> {
        let numbers = [self.number.to_le_bytes(), self.bytes.to_le_bytes()];
        [&numbers.concat()[..], handle].concat()
    }

    /// Splits a [`message`](Self::message), if it is one.
    fn split_from(message: &[u8]) -> Option<(Self, &[u8])> {
        let (&number, rest) = message.split_first_chunk()?;
        let (&bytes, handle) = rest.split_first_chunk()?;
        let [number, bytes] = [number, bytes].map(u64::from_le_bytes);
        Some((Self { number, bytes }, handle))
    }

    /// Returns the handles in all ranks' messages. Fails if a message is too short or the ranks ask for
    /// different windows. The outcome is the same on all ranks.
    fn handles(told: &[Vec<u8>]) -> Result<Vec<&[u8]>, Error> {
        let mut first = None;
        let each = told.iter().enumerate().map(|(rank, message)| {
            let wrong = || wrong_length(rank, message.len(), Self::BYTES);
            let (asked, handle) = Self::split_from(message).ok_or_else(wrong)?;
            match *first.get_or_insert(asked) {
                first if first != asked => Err(Error::Node(NodeError::OtherWindow {
                    second: Rank(rank as u32),
                    numbers: [first.number, asked.number],
                    bytes: [first.bytes, asked.bytes],
                })),
                _ => Ok(handle),
            }
        });
        each.collect()
    }
}

/// A window of this rank, and those of the other ranks that belong to it.
pub(crate) struct Shared {
    /// Unique number of the window, the same on every rank.
    number: u64,
    pub(crate) own: DevicePtr,
    /// Windows of the other ranks, at their addresses on this one.
    mapped: Vec<(Rank, DevicePtr)>,
}

impl Shared {
    /// The window of `peer`, at its address on this rank.
    pub(crate) fn of(&self, peer: Rank) -> DevicePtr {
        let mapped = self.mapped.iter().find(|&&(rank, _)| rank == peer);
        mapped.map_or(self.own, |&(_, window)| window)
    }
}

/// Shares this rank's window with all others, and maps theirs. Collective.
///
/// Only this function knows how windows get to other processes: as bytes that describe
/// them, through the bootstrap. `own` is the result of the allocation: if that failed on any rank, all
/// return an error. After an error this rank has mapped nothing, and its window is freed, or leaked
/// with a warning if another rank may have mapped it.
pub(crate) fn exchange<S: Share>(
    bootstrap: &mut dyn Bootstrap,
    share: &S,
    asked: Asked,
    own: Result<DevicePtr, Error>,
) -> Result<Shared, Error> {
    let rank = Rank(bootstrap.rank());
    let allocated = own.as_ref().ok().copied();
    let exported = own.and_then(|own| Ok((own, share.export(rank, own)?)));
    let is_told = exported.is_ok();
    let message = |(_, handle): &(DevicePtr, Vec<u8>)| asked.message(handle);
    let agreed = agree(bootstrap, SHARING, exported, message);
    let agreed = agreed.and_then(|((own, _), told)| {
        Asked::handles(&told)?;
        Ok((own, told))
    });
    let agreed = agreed.inspect_err(|error| {
        // If a rank failed, or shares another window, all know of it, and none maps anything.
        let is_known = matches!(
            error,
            Error::PeerFailed { .. } | Error::Node(NodeError::OtherWindow { .. })
        );
        if is_told && !is_known {
            warn_of_leak(allocated.as_slice(), error);
            return;
        }
        // SAFETY: `alloc` returned it, and no rank knows of the window, or none maps it.
        if let Err(error) = unsafe { free_all(share, allocated.as_slice()) } {
            tracing::warn!(%error, "cannot free a window");
        }
    });
    let (own, told) = agreed?;
    let mapped =
        Asked::handles(&told).and_then(|handles| map_all(share, rank, asked.bytes, &handles));
    let shared = Shared {
        number: asked.number,
        own,
        // If mapping failed, nothing stays mapped.
        mapped: mapped.as_ref().map_or_else(|_| Vec::new(), Clone::clone),
    };
    match agree(bootstrap, MAPPING, mapped, |_| Vec::new()) {
        Ok(_) => Ok(shared),
        Err(error) => {
            // The first error says more than one of freeing.
            // SAFETY: the window was not returned to anybody, so that no kernel uses it.
            if let Err(error) = unsafe { release(bootstrap, share, Ok(()), &[shared]) } {
                tracing::warn!(%error, "cannot free a window");
            }
            Err(error)
        }
    }
}

/// Unmaps the windows of the other ranks and, once every rank has done so, frees the own ones; otherwise
/// leaks them with a warning. `ready`: whether nothing in this process uses them any more.
/// Collective.
///
/// # Safety
/// [`exchange`] returned them with this `share`, each is released once, and if `ready` is `Ok`,
/// nothing in this process uses them any more, nor after this call those of the other ranks that it
/// maps.
pub(crate) unsafe fn release<S: Share>(
    bootstrap: &mut dyn Bootstrap,
    share: &S,
    ready: Result<(), Error>,
    windows: &[Shared],
) -> Result<(), Error> {
    let mapped: Vec<_> = windows
        .iter()
        .flat_map(|window| &window.mapped)
        .copied()
        .collect();
    // SAFETY: `exchange` mapped them, and as `ready` is `Ok`, nothing in this process uses them any more:
    // documented on this function.
    let unmapped = ready.and_then(|()| unsafe { unmap_all(share, &mapped) });
    let numbers = windows
        .iter()
        .flat_map(|window| window.number.to_le_bytes());
    let numbers: Vec<u8> = numbers.collect();
    let own: Vec<_> = windows.iter().map(|window| window.own).collect();
    agree(bootstrap, UNMAPPING, unmapped, |()| numbers)
        .and_then(|((), numbers)| require_equal(&numbers))
        .inspect_err(|error| warn_of_leak(&own, error))?;
    // SAFETY: every rank has confirmed that nothing there uses these windows, and that they are unmapped.
    unsafe { free_all(share, &own) }
}

/// Maps the windows of all other ranks, of at least `bytes` bytes each, or none.
fn map_all<S: Share>(
    share: &S,
    rank: Rank,
    bytes: u64,
    handles: &[&[u8]],
) -> Result<Vec<(Rank, DevicePtr)>, Error> {
    let mut mapped = Vec::new();
    for (peer, handle) in (0..)
        .map(Rank)
        .zip(handles)
        .filter(|&(peer, _)| peer != rank)
    {
        // SAFETY: that rank exported the handle, as `Bootstrap` promises unchanged bytes by rank. It frees
        // the window only after all ranks have confirmed that they unmapped it.
        match unsafe { share.map(rank, peer, handle, bytes) } {
            Ok(window) => mapped.push((peer, window)),
            Err(error) => {
                // SAFETY: they were mapped above, and nobody else has their addresses.
                if let Err(error) = unsafe { unmap_all(share, &mapped) } {
                    tracing::warn!(%error, "cannot unmap a window");
                }
                return Err(error);
            }
        }
    }
    Ok(mapped)
}

/// Checks that the `window` of `owner`, at its address on `rank`, is the allocation that was `found` there,
/// and returns that allocation's bytes. A window is an allocation of its own, as a handle shares a whole one.
pub(crate) fn require_whole(
    rank: Rank,
    owner: Rank,
    window: Extent,
    found: Extent,
) -> Result<u64, Error> {
    if found.at == window.at && found.bytes >= window.bytes {
        return Ok(found.bytes);
    }
    Err(Error::Node(NodeError::NotWhole {
        rank,
        owner,
        at: window.at,
        wanted: window.bytes,
        base: found.at,
        bytes: found.bytes,
    }))
}

/// An address range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

/// Unmaps all windows; the first error is returned.
///
/// # Safety
/// As [`Share::unmap`], for each window once.
unsafe fn unmap_all<S: Share>(share: &S, mapped: &[(Rank, DevicePtr)]) -> Result<(), Error> {
    let mut result = Ok(());
    for &(_, window) in mapped {
        // SAFETY: `map` returned it and nothing uses it: documented on this function.
        result = result.and(unsafe { share.unmap(window) });
    }
    result
}

/// Frees all windows; the first error is returned.
///
/// # Safety
/// As [`Share::free`], for each window once.
unsafe fn free_all<S: Share>(share: &S, windows: &[DevicePtr]) -> Result<(), Error> {
    let mut result = Ok(());
    for &window in windows {
        // SAFETY: `alloc` returned it, nothing uses it, and no process has mapped it: documented on this
        // function.
        result = result.and(unsafe { share.free(window) });
    }
    result
}

fn warn_of_leak(windows: &[DevicePtr], error: &Error) {
    if !windows.is_empty() {
        let windows = windows.len();
        tracing::warn!(%error, windows, "windows are leaked: other processes may have mapped them");
    }
}

/// Refuses ranks that free different windows: some would be in use.
fn require_equal(numbers: &[Vec<u8>]) -> Result<(), Error> {
    let Some(rank) = numbers.iter().position(|of_rank| of_rank != &numbers[0]) else {
        return Ok(());
    };
    Err(Error::Bootstrap(BootstrapError::Other {
        call: "the bootstrap's all_gather",
        reason: format!(
            "ranks 0 and {rank} close different communicators; do all make the same calls?"
        ),
    }))
}
