//! Memory that the probes of all ranks address.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ferry::layout::Shape;
use ferry::{DevicePtr, Fabric, Group};
use ferry_probes::ProbeArgs;

/// Every rank's probe memory, from where the group's windows come, so that a rank addresses
/// another's in whichever process that is. Dropped, it is leaked.
pub struct ProbeMemory {
    /// Keeps the group.
    _group: Group,
    fabric: Arc<dyn Fabric>,
    own: Vec<DevicePtr>,
    peers: Vec<Vec<DevicePtr>>,
}

impl ProbeMemory {
    /// Allocates `bytes` for each rank, all of one node, and clears the words. Collective. Synchronises.
    pub fn alloc(group: &Group, bytes: u64) -> Result<Self> {
        // SAFETY: no group is made over the fabric, and the probes' memory is freed before the group is
        // closed.
        let fabric = unsafe { group.fabric() }.clone();
        let own = fabric.alloc_windows(bytes.max(ProbeArgs::WORDS_BYTES))?;
        let set_up = set_up(&*fabric, &own);
        // Also the barrier: no probe signals before all words are clear.
        let well = fabric.all_gather(u64::from(set_up.is_ok()))?;
        let peers = set_up.and_then(|peers| {
            let failed = well.iter().position(|&well| well == 0);
            ensure!(
                failed.is_none(),
                "rank {failed:?} cannot set up probe memory"
            );
            Ok(peers)
        });
        if peers.is_err() {
            // SAFETY: they are those of a moment ago, and no rank knows them.
            unsafe { fabric.free_windows(&own) }.context("cannot free probe memory")?;
        }
        Ok(Self {
            _group: group.clone(),
            fabric,
            own,
            peers: peers?,
        })
    }

    /// Ranks of this process, ascending: each one's memory, and every rank's as it addresses it.
    pub fn local(&self) -> impl Iterator<Item = (DevicePtr, &[DevicePtr])> {
        let peers = self.peers.iter().map(Vec::as_slice);
        self.own.iter().copied().zip(peers)
    }

    /// Gives it back, after a barrier with the other processes. Collective. Synchronises.
    ///
    /// # Safety
    /// No probe of any rank is at work, and the addresses are not used any more.
    pub unsafe fn free(self) -> Result<()> {
        self.fabric.barrier()?;
        // SAFETY: the fabric gave them, and nobody uses them: documented on this function.
        Ok(unsafe { self.fabric.free_windows(&self.own) }?)
    }
}

/// Clears the words of this process's ranks, and gives each everybody's memory as it addresses it.
fn set_up(fabric: &dyn Fabric, own: &[DevicePtr]) -> Result<Vec<Vec<DevicePtr>>> {
    let ranks = fabric.ranks();
    let one_node = Shape {
        ranks,
        p2p_world_size: ranks,
        experts: ranks,
        top_k: 1,
        hidden: 8,
        max_tokens_per_rank: 1,
        combine_mode: 0,
        token_format: 0,
    };
    let local = fabric.local_ranks().into_iter().zip(own);
    let peers = local.map(|(rank, &at)| {
        fabric.device(rank)?.fill(at, 0, ProbeArgs::WORDS_BYTES)?;
        Ok(fabric.peer_windows(rank, own, &one_node)?)
    });
    peers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_memory_is_every_ranks_and_its_words_are_clear() {
        let group = Group::simulated(3, 1).unwrap();
        let memory = ProbeMemory::alloc(&group, 0).unwrap();
        let own: Vec<DevicePtr> = memory.local().map(|(own, _)| own).collect();
        for (rank, (at, peers)) in group.local_ranks().into_iter().zip(memory.local()) {
            assert_eq!(peers, own);
            let mut words = [1; ProbeArgs::WORDS_BYTES as usize];
            group
                .device(rank)
                .unwrap()
                .download(at, &mut words)
                .unwrap();
            assert!(words.iter().all(|&byte| byte == 0));
        }
        // SAFETY: no probe was launched.
        unsafe { memory.free() }.unwrap();
    }
}
