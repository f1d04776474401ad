//! The first messages of a node group's processes.

use ferry_layout::Rank;

use crate::device::sharing::gpu_ranks::GpuRanks;
use crate::device::sharing::own_gpu::{Gpu, Terms, require_own};
use crate::error::{Error, NodeError};

/// File in which Linux has the machine's name; containers may have others.
#[cfg(feature = "cuda")]
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// Longest name that is sent.
const HOST_BYTES: usize = 255;

/// Numbers that distinguish a process from others on its machine. Each is 0 if it is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) id: u32,
    pub(crate) pid_namespace: u64,
    pub(crate) ipc_namespace: u64,
}

impl Process {
    const BYTES: usize = 20;

    #[cfg(feature = "cuda")]
    fn here() -> Self {
        use std::os::unix::fs::MetadataExt;

        let number = |at| std::fs::metadata(at).map_or(0, |found| found.ino());
        Self {
            id: std::process::id(),
            pid_namespace: number("/proc/self/ns/pid"),
            ipc_namespace: number("/proc/self/ns/ipc"),
        }
    }

    fn to_bytes(self) -> Vec<u8> {
        let namespaces = [self.pid_namespace, self.ipc_namespace].map(u64::to_le_bytes);
        [&self.id.to_le_bytes()[..], &namespaces.concat()].concat()
    }

    fn split_from(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (&id, bytes) = bytes.split_first_chunk()?;
        let (&pid, bytes) = bytes.split_first_chunk()?;
        let (&ipc, bytes) = bytes.split_first_chunk()?;
        let process = Self {
            id: u32::from_le_bytes(id),
            pid_namespace: u64::from_le_bytes(pid),
            ipc_namespace: u64::from_le_bytes(ipc),
        };
        Some((process, bytes))
    }

    /// The kind of a namespace that both know and do not share.
    fn parted_by(self, other: Self) -> Option<&'static str> {
        let differ = |ours, theirs| ours != 0 && theirs != 0 && ours != theirs;
        match self {
            _ if differ(self.ipc_namespace, other.ipc_namespace) => Some("IPC"),
            _ if differ(self.pid_namespace, other.pid_namespace) => Some("PID"),
            _ => None,
        }
    }
}

/// A GPU, its machine with its name, and the process that drives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) gpu: Gpu,
    pub(crate) terms: Terms,
    pub(crate) host: String,
    pub(crate) process: Process,
}

impl Place {
    /// A GPU of this machine.
    #[cfg(feature = "cuda")]
    pub(crate) fn here(uuid: [u8; 16], terms: Terms) -> Self {
        let host = std::fs::read_to_string(HOST_NAME).unwrap_or_default();
        let host = host.trim().to_owned();
        Self {
            gpu: Gpu::here(uuid),
            terms,
            host,
            process: Process::here(),
        }
    }

    /// Whether both are on one machine: their boot identifiers are equal, which all containers of a machine
    /// share, or neither has one and their host names are equal.
    fn shares_node(&self, other: &Self) -> bool {
        let (ours, theirs) = (&self.gpu.machine, &other.gpu.machine);
        ours == theirs && (!ours.is_empty() || self.host == other.host)
    }

    fn node(&self) -> String {
        format!("{} (boot {})", self.host, self.gpu.machine)
    }
}

/// A rank's description of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Introduction {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) place: Place,
}

impl Introduction {
    /// Bytes of an introduction without names.
    pub(crate) const LEAST_BYTES: usize = 8 + Process::BYTES + 17 + Terms::BYTES;

    /// The rank, the ranks, the process, the GPU, its terms, the machine's name.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let host = self.place.host.as_bytes();
        let host = &host[..host.len().min(HOST_BYTES)];
        let numbers = [self.rank.to_le_bytes(), self.ranks.to_le_bytes()].concat();
        let process = self.place.process.to_bytes();
        let (gpu, terms) = (self.place.gpu.to_bytes(), self.place.terms.to_bytes());
        [&numbers[..], &process, &gpu, &terms, host].concat()
    }

    /// Reads the bytes of [`to_bytes`](Self::to_bytes).
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (&rank, bytes) = bytes.split_first_chunk()?;
        let (&ranks, bytes) = bytes.split_first_chunk()?;
        let (process, bytes) = Process::split_from(bytes)?;
        let (gpu, bytes) = Gpu::split_from(bytes)?;
        let (terms, host) = Terms::split_from(bytes)?;
        let host = String::from_utf8_lossy(host).into_owned();
        Some(Self {
            rank: u32::from_le_bytes(rank),
            ranks: u32::from_le_bytes(ranks),
            place: Place {
                gpu,
                terms,
                host,
                process,
            },
        })
    }
}

/// Refuses processes that cannot be a node group by their introductions, of which every process has the same:
/// `all` are those of all ranks, and here there are `ours`. Returns their GPUs.
pub(crate) fn require_group(all: &[Introduction], ours: u32) -> Result<Vec<GpuRanks>, Error> {
    for (rank, said) in (0..).zip(all) {
        if (said.rank, said.ranks) != (rank, ours) {
            return Err(Error::Node(NodeError::RankCount {
                rank: Rank(rank),
                called: said.rank,
                theirs: said.ranks,
                ours,
            }));
        }
    }
    let Some(first) = all.first() else {
        return Err(Error::RankCount { ranks: 0 });
    };
    let elsewhere = |said: &&Introduction| !first.place.shares_node(&said.place);
    if let Some(second) = all.iter().find(elsewhere) {
        return Err(Error::Node(NodeError::OtherNode {
            first: Rank(first.rank),
            second: Rank(second.rank),
            first_node: first.place.node(),
            second_node: second.place.node(),
        }));
    }
    require_processes(all)?;
    let gpus = require_own(&on_gpus(all))?;
    Ok(gpus)
}

/// The GPU of each rank, and its terms on it.
pub(crate) fn on_gpus(all: &[Introduction]) -> Vec<(Gpu, Terms)> {
    let on_gpu = |said: &Introduction| (said.place.gpu.clone(), said.place.terms);
    all.iter().map(on_gpu).collect()
}

/// Refuses ranks that cannot map each other's windows by CUDA IPC: two in one process, or two in different
/// PID or IPC namespaces (containers).
fn require_processes(all: &[Introduction]) -> Result<(), Error> {
    for (at, said) in all.iter().enumerate() {
        let process = said.place.process;
        for before in &all[..at] {
            let (first, second) = (Rank(before.rank), Rank(said.rank));
            let other = before.place.process;
            if let Some(kind) = other.parted_by(process) {
                return Err(Error::Node(NodeError::OtherNamespace {
                    first,
                    second,
                    kind,
                }));
            }
            if process.id != 0 && process == other {
                let process = process.id;
                return Err(Error::Node(NodeError::SameProcess {
                    first,
                    second,
                    process,
                }));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction(rank: u32, boot: &str, host: &str) -> Introduction {
        let gpu = Gpu {
            uuid: [rank as u8; 16],
            machine: boot.into(),
        };
        let host = host.into();
        Introduction {
            rank,
            ranks: 2,
            place: Place {
                gpu,
                terms: Terms {
                    multiprocessors: 132,
                    shares: false,
                    runs_beside_others: false,
                },
                host,
                process: Process {
                    id: 40 + rank,
                    pid_namespace: 8,
                    ipc_namespace: 9,
                },
            },
        }
    }

    #[test]
    fn ranks_of_one_process_and_of_other_namespaces_are_named() {
        let both = |change: fn(&mut Process)| {
            let mut all = [introduction(0, "a", "x"), introduction(1, "a", "x")];
            change(&mut all[1].place.process);
            let group = require_group(&all, 2);
            group.map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(both(|_| ()), Ok(()));
        let refused = both(|process| process.id = 40).unwrap_err();
        assert!(
            refused.starts_with("ranks 0 and 1 are in one process (40)"),
            "{refused}"
        );
        let refused = both(|process| process.pid_namespace = 7).unwrap_err();
        assert!(
            refused.starts_with("ranks 0 and 1 are in different PID namespaces"),
            "{refused}"
        );
        let refused = both(|process| process.ipc_namespace = 7).unwrap_err();
        assert!(
            refused.starts_with("ranks 0 and 1 are in different IPC namespaces"),
            "{refused}"
        );
        // Unknown numbers refuse nobody.
        assert_eq!(both(|process| *process = Process::default()), Ok(()));
    }

    #[test]
    fn an_introduction_survives_the_way_through_bytes() {
        for (boot, host) in [("", ""), ("0f1e", "node-7")] {
            let said = introduction(1, boot, host);
            assert_eq!(Introduction::from_bytes(&said.to_bytes()), Some(said));
        }
        let least = introduction(0, "", "").to_bytes().len();
        assert_eq!(least, Introduction::LEAST_BYTES);
        assert_eq!(Introduction::from_bytes(&vec![0; least - 1]), None);
    }

    #[test]
    fn the_boot_says_which_node_and_the_name_only_where_there_is_none() {
        let one_node = |first: [&str; 2], second: [&str; 2]| {
            let first = introduction(0, first[0], first[1]);
            let second = introduction(1, second[0], second[1]);
            let outcome = require_group(&[first, second], 2);
            let is_other = matches!(outcome, Err(Error::Node(NodeError::OtherNode { .. })));
            assert!(is_other || outcome.is_ok(), "{outcome:?}");
            !is_other
        };
        assert!(one_node(["a", "x"], ["a", "x"]));
        // Two containers of a machine.
        assert!(one_node(["a", "x"], ["a", "y"]));
        assert!(!one_node(["a", "x"], ["b", "x"]));
        assert!(one_node(["", "x"], ["", "x"]));
        assert!(!one_node(["", "x"], ["", "y"]));
        assert!(!one_node(["a", "x"], ["", "x"]));
    }

    #[test]
    fn nodes_are_named() {
        let all = [introduction(0, "a", "x"), introduction(1, "b", "y")];
        let text = require_group(&all, 2).unwrap_err().to_string();
        for part in ["ranks 0 and 1", "x (boot a)", "y (boot b)"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
