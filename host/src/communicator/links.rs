//! Launches of the kernel that checks links.

use bytemuck::{Zeroable, cast_slice_mut};
use ferry_layout::{Kernel, LinkRecord, LinkTest, LinksArgs, Rank};

use super::Communicator;
use super::open::Open;
use super::together::launch_all;
use crate::device::Args;
use crate::error::Error;
use crate::tensor::handles::{DevicePtr, Stream};

impl Communicator {
    /// Launches the kernel that checks links on all ranks of this process, of which none has work. `args`
    /// returns the arguments of a rank, but for those that every kernel needs. Collective. Synchronizes,
    /// before the launch.
    pub(crate) fn links_all(
        ranks: &mut [Self],
        streams: &[Stream],
        args: impl Fn(Rank) -> LinksArgs,
    ) -> Result<(), Error> {
        let prepare = |(rank, &stream): (&Self, &Stream)| {
            // Counters, and records of earlier launches.
            let bytes = rank.plan.workspace_bytes();
            rank.device().fill(rank.memory.workspace, 0, bytes)?;
            let (common, args) = (rank.common, args(rank.rank));
            let args = Args::Links(LinksArgs { common, ..args });
            rank.require_alive()?;
            rank.prepare_launch(stream, Kernel::Links, args, Open::Idle)
        };
        let prepared = ranks.iter().zip(streams).map(prepare);
        let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
        Ok(launch_all(ranks, prepared)?)
    }

    /// The records of this rank's rows of a test with a peer. After the stream of the launch was waited for.
    /// Synchronizes.
    pub(crate) fn link_records(
        &self,
        test: LinkTest,
        peer: Rank,
    ) -> Result<Vec<LinkRecord>, Error> {
        let shape = self.plan.shape();
        let mut records = vec![LinkRecord::zeroed(); test.rows(shape) as usize];
        let at = self.common.tables.row_map + 4 * LinkRecord::index(shape, peer, 0, 0);
        let from: DevicePtr = self.memory.workspace.plus(at);
        self.device().download(from, cast_slice_mut(&mut records))?;
        Ok(records)
    }
}
