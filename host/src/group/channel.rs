//! NVSHMEM's channel: its kernels' requests for ranks of other nodes, which a thread of the host carries out.

use std::env;
use std::ffi::OsStr;
use std::mem::offset_of;
use std::thread;
use std::time::{Duration, Instant};

use ferry_layout::Rank;
use nvshmem_sys::device::{CHANNEL_BYTES, DeviceState};

use crate::cuda::CudaDevice;
use crate::device::Device;
use crate::error::{Error, NvshmemError};
use crate::tensor::handles::DevicePtr;

/// Longest time without progress before the thread counts as stuck: a request takes microseconds.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes that the thread may have read and not yet told of: NVSHMEM 3.4.5 tells once they are as many more
/// than it last told.
const UNTOLD_BYTES: u64 = 1024;
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(1);

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: a GPU sees its own writes from a network in their order.
const ORDERED: u32 = 100;

/// The variable that names NVSHMEM's transport between nodes.
const TRANSPORT: &str = "NVSHMEM_REMOTE_TRANSPORT";
/// The variable that lets a NIC's writes pass each other. NVSHMEM 3.4.5 takes it as 1 unless it is set.
const RELAXED_ORDERING: &str = "NVSHMEM_IB_ENABLE_RELAXED_ORDERING";

/// A job's channel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Channel {
    /// Number of bytes that kernels have written to it.
    issued: DevicePtr,
    /// Number of them that the thread has read.
    complete: DevicePtr,
}

impl Channel {
    /// Reads NVSHMEM's state in a registered module, for rank `pe` of `pes`; `None` if there is no channel.
    /// Synchronizes with its own copy alone.
    ///
    /// # Errors
    /// [`NvshmemError::State`] if the state is not laid out as the kernels' code has it.
    pub(super) fn of(
        device: &CudaDevice,
        state: DevicePtr,
        pe: u32,
        pes: u32,
    ) -> Result<Option<Self>, Error> {
        let mut bytes = [0; size_of::<DeviceState>()];
        device.download(state, &mut bytes)?;
        let number = |place: usize| {
            let word: [u8; 4] = std::array::from_fn(|index| bytes[place + index]);
            u64::from(u32::from_le_bytes(word))
        };
        let word = |place: usize| number(place + 4) << 32 | number(place);
        let found = [
            ("mype", number(offset_of!(DeviceState, mype)), u64::from(pe)),
            (
                "npes",
                number(offset_of!(DeviceState, npes)),
                u64::from(pes),
            ),
            (
                "proxy_channel_buf_size",
                word(offset_of!(DeviceState, proxy_channel_buf_size)),
                CHANNEL_BYTES,
            ),
        ];
        let issued = word(offset_of!(DeviceState, proxy_channels_issue));
        let complete = word(offset_of!(DeviceState, proxy_channels_complete));
        // Without a channel it has no size.
        let compared = if issued == 0 { &found[..2] } else { &found[..] };
        if let Some(&(field, found, wanted)) =
            compared.iter().find(|(_, found, wanted)| found != wanted)
        {
            return Err(NvshmemError::State {
                field,
                found,
                wanted,
            }
            .into());
        }
        // SAFETY: NVSHMEM's words of 8 bytes, which stay until the job is left.
        let at = |address| unsafe { DevicePtr::new(address, 8) };
        Ok((issued != 0).then(|| Self {
            issued: at(issued),
            complete: at(complete),
        }))
    }

    /// Makes sure that rows can get to `peer`, whose memory is not mapped, and are there before their flags.
    ///
    /// # Errors
    /// [`NvshmemError::NoChannel`], [`NvshmemError::WritesUnordered`], [`NvshmemError::RelaxedOrdering`], and
    /// those of the driver.
    pub(super) fn require_way(
        channel: Option<&Self>,
        device: &CudaDevice,
        peer: Rank,
    ) -> Result<(), Error> {
        if channel.is_none() {
            return Err(NvshmemError::NoChannel { peer }.into());
        }
        let ordering = device.rdma_writes_ordering()?;
        if ordering < ORDERED {
            let device = device.name();
            return Err(NvshmemError::WritesUnordered { device, ordering }.into());
        }
        // NVSHMEM cannot be asked. If its variables were changed after it was initialised, this is not seen.
        let variable = |name| env::var_os(name);
        Ok(require_strict_ordering(
            variable(TRANSPORT).as_deref(),
            variable(RELAXED_ORDERING).as_deref(),
        )?)
    }

    /// Waits until the thread has read what is in the channel now, as long as it makes progress: a call that
    /// waits for it would not end. A last kilobyte passes, as nobody can tell whether it was read.
    ///
    /// # Errors
    /// [`NvshmemError::Stalled`].
    pub(super) fn require_progress(&self, device: &CudaDevice) -> Result<(), Error> {
        let read = |at: DevicePtr| {
            let mut bytes = [0; 8];
            device.download(at, &mut bytes)?;
            Ok::<_, Error>(u64::from_le_bytes(bytes))
        };
        let issued = read(self.issued)?;
        let (mut last, mut since) = (read(self.complete)?, Instant::now());
        loop {
            let complete = read(self.complete)?;
            if complete + UNTOLD_BYTES >= issued {
                return Ok(());
            }
            if complete != last {
                (last, since) = (complete, Instant::now());
            }
            if since.elapsed() >= PATIENCE {
                let bytes = issued - complete;
                return Err(NvshmemError::Stalled { bytes }.into());
            }
            thread::sleep(PAUSE);
        }
    }
}

/// Makes sure that a NIC writes a row before its flag, given NVSHMEM's variables: its transports for
/// InfiniBand and RoCE, of which one is the default, register memory for relaxed ordering on PCIe unless told
/// otherwise.
fn require_strict_ordering(
    transport: Option<&OsStr>,
    relaxed_ordering: Option<&OsStr>,
) -> Result<(), NvshmemError> {
    let over_nic = transport.is_none_or(|name| {
        let name = name.as_encoded_bytes();
        name.is_empty()
            || name
                .get(..2)
                .is_some_and(|two| two.eq_ignore_ascii_case(b"ib"))
    });
    if over_nic && relaxed_ordering.is_none_or(|value| value != "0") {
        let value = relaxed_ordering.map(|value| value.to_string_lossy().into_owned());
        return Err(NvshmemError::RelaxedOrdering { value });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_whose_writes_may_pass_each_other_is_refused() {
        let found = |transport: Option<&str>, relaxed: Option<&str>| {
            require_strict_ordering(transport.map(OsStr::new), relaxed.map(OsStr::new))
        };
        for transport in [None, Some(""), Some("ibrc"), Some("IBDEVX")] {
            for relaxed in [None, Some(""), Some("1"), Some("false")] {
                let refused = found(transport, relaxed).unwrap_err().to_string();
                assert!(
                    refused.contains("NVSHMEM_IB_ENABLE_RELAXED_ORDERING=0"),
                    "{refused}"
                );
                assert!(refused.contains(relaxed.unwrap_or("unset")), "{refused}");
            }
            assert!(found(transport, Some("0")).is_ok());
        }
        for transport in ["ucx", "libfabric", "i"] {
            assert!(found(Some(transport), None).is_ok());
        }
    }
}
