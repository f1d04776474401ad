//! Whether every process has a GPU of its own.

use ferry_layout::Rank;

use crate::Error;

/// Where Linux names a machine's boot: the same in all its containers.
#[cfg(feature = "cuda")]
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A GPU, and the machine that it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// The driver's; of a part of a GPU, the part's.
    pub(crate) uuid: [u8; 16],
    /// Empty where it is not known.
    pub(crate) machine: String,
}

impl Gpu {
    /// A GPU of this machine.
    #[cfg(feature = "cuda")]
    pub(crate) fn here(uuid: [u8; 16]) -> Self {
        let machine = std::fs::read_to_string(BOOT_ID).unwrap_or_default();
        let machine = machine.trim().chars().take(255).collect();
        Self { uuid, machine }
    }

    /// For other ranks: the identifier, the length of the machine's name, the name.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let length = [self.machine.len() as u8];
        [&self.uuid, &length[..], self.machine.as_bytes()].concat()
    }

    /// What [`to_bytes`](Self::to_bytes) gave, and the bytes behind it.
    pub(crate) fn split_from(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (&uuid, rest) = bytes.split_first_chunk()?;
        let (&length, rest) = rest.split_first()?;
        let (machine, rest) = rest.split_at_checked(length.into())?;
        let machine = String::from_utf8_lossy(machine).into_owned();
        Some((Self { uuid, machine }, rest))
    }

    /// As the driver's tools write it.
    pub(crate) fn name(&self) -> String {
        let digits: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
        format!("GPU-{}", parts.join("-"))
    }
}

/// Refuses a GPU that two ranks have: their kernels would wait for each other's turn on it. `gpus`
/// are those of all ranks.
pub(crate) fn require_own(gpus: &[Gpu]) -> Result<(), Error> {
    for (second, gpu) in gpus.iter().enumerate() {
        if let Some(first) = gpus[..second].iter().position(|other| other == gpu) {
            return Err(Error::GpuShared {
                first: Rank(first as u32),
                second: Rank(second as u32),
                device: gpu.name(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: u8, machine: &str) -> Gpu {
        let mut uuid = [0x10; 16];
        uuid[15] = number;
        let machine = machine.into();
        Gpu { uuid, machine }
    }

    #[test]
    fn two_ranks_on_one_gpu_are_named_with_it() {
        let gpus = [gpu(1, "a"), gpu(2, "a"), gpu(3, "a"), gpu(2, "a")];
        let Err(error) = require_own(&gpus) else {
            panic!("ranks 1 and 3 share a GPU");
        };
        assert!(matches!(
            error,
            Error::GpuShared {
                first: Rank(1),
                second: Rank(3),
                ..
            }
        ));
        let text = error.to_string();
        assert!(
            text.contains("ranks 1 and 3")
                && text.contains("GPU-10101010-1010-1010-1010-101010101002"),
            "{text}"
        );
    }

    #[test]
    fn gpus_of_different_machines_or_numbers_are_different() {
        require_own(&[gpu(1, "a"), gpu(2, "a"), gpu(1, "b"), gpu(2, "b")]).unwrap();
    }

    #[test]
    fn a_gpu_survives_the_way_through_bytes() {
        for machine in ["", "0f1e2d3c"] {
            let gpu = gpu(9, machine);
            let bytes = [gpu.to_bytes(), vec![5, 6]].concat();
            assert_eq!(Gpu::split_from(&bytes), Some((gpu, &[5, 6][..])));
        }
        assert_eq!(Gpu::split_from(&[1; 16]), None);
        assert_eq!(Gpu::split_from(&[200; 20]), None);
    }
}
