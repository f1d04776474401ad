//! What the processes of a node group tell each other first.

use ferry_layout::Rank;

use crate::own_gpu::{Gpu, require_own};
use crate::{Error, NodeError};

/// Where Linux has the machine's name; containers may have others.
#[cfg(feature = "cuda")]
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// Longest name that is told.
const HOST_BYTES: usize = 255;

/// A GPU, and the machine that it is in, with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) gpu: Gpu,
    pub(crate) host: String,
}

impl Place {
    /// A GPU of this machine.
    #[cfg(feature = "cuda")]
    pub(crate) fn here(uuid: [u8; 16]) -> Self {
        let host = std::fs::read_to_string(HOST_NAME).unwrap_or_default();
        let host = host.trim().to_owned();
        Self {
            gpu: Gpu::here(uuid),
            host,
        }
    }

    /// Whether both are on one machine. The boot decides where both know theirs: it is the same in all
    /// containers of a machine, whose names differ.
    fn shares_node(&self, other: &Self) -> bool {
        let (ours, theirs) = (&self.gpu.machine, &other.gpu.machine);
        ours == theirs && (!ours.is_empty() || self.host == other.host)
    }

    fn node(&self) -> String {
        format!("{} (boot {})", self.host, self.gpu.machine)
    }
}

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Introduction {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) place: Place,
}

impl Introduction {
    /// The rank, the ranks, the GPU, the machine's name.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let host = self.place.host.as_bytes();
        let host = &host[..host.len().min(HOST_BYTES)];
        let numbers = [self.rank.to_le_bytes(), self.ranks.to_le_bytes()].concat();
        [&numbers[..], &self.place.gpu.to_bytes(), host].concat()
    }

    /// What [`to_bytes`](Self::to_bytes) gave.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (&rank, bytes) = bytes.split_first_chunk()?;
        let (&ranks, bytes) = bytes.split_first_chunk()?;
        let (gpu, host) = Gpu::split_from(bytes)?;
        let host = String::from_utf8_lossy(host).into_owned();
        Some(Self {
            rank: u32::from_le_bytes(rank),
            ranks: u32::from_le_bytes(ranks),
            place: Place { gpu, host },
        })
    }
}

/// Refuses processes that cannot be a node group by what they say of themselves, as which all of them see the
/// same: `all` are those of all ranks, here `ours`.
pub(crate) fn require_group(all: &[Introduction], ours: u32) -> Result<(), Error> {
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
        return Err(Error::NoRanks);
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
    let gpus: Vec<Gpu> = all.iter().map(|said| said.place.gpu.clone()).collect();
    require_own(&gpus)
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
            place: Place { gpu, host },
        }
    }

    #[test]
    fn an_introduction_survives_the_way_through_bytes() {
        for (boot, host) in [("", ""), ("0f1e", "node-7")] {
            let said = introduction(1, boot, host);
            assert_eq!(Introduction::from_bytes(&said.to_bytes()), Some(said));
        }
        assert_eq!(Introduction::from_bytes(&[0; 24]), None);
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
