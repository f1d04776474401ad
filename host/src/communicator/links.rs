//! Launches of the kernel that checks links.

use bytemuck::{Zeroable, cast_slice_mut};
use ferry_layout::{Counter, Kernel, LinkRecord, LinkTest, LinksArgs, Rank};

use super::Communicator;
use super::open::Open;
use super::together::launch_all;
use crate::device::Args;
use crate::error::Error;
use crate::tensor::handles::{DevicePtr, Stream};

impl Communicator {
    /// Launches the kernel that checks links on all ranks of this process. `args` returns the arguments of
    /// the rank at a place, but for those that every kernel needs. Collective. Synchronizes, before the
    /// launch.
    pub(crate) fn links_all(
        ranks: &mut [Self],
        streams: &[Stream],
        args: impl Fn(usize) -> LinksArgs,
    ) -> Result<(), Error> {
        for rank in ranks.iter() {
            let arrivals = rank.memory.workspace.plus(Counter::Arrivals.bytes());
            rank.device().fill(arrivals, 0, size_of::<u64>() as u64)?;
        }
        let prepare = |(at, rank): (usize, &Self)| {
            let common = rank.common;
            let args = Args::Links(LinksArgs { common, ..args(at) });
            rank.require_alive()?;
            rank.prepare_launch(streams[at], Kernel::Links, args, Open::Idle)
        };
        let prepared = ranks.iter().enumerate().map(prepare);
        let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
        Ok(launch_all(ranks, prepared)?)
    }

    /// The records of this rank's rows of a test, by peer. After the stream of the launch was waited for.
    /// Synchronizes.
    pub(crate) fn link_records(&self, test: LinkTest) -> Result<Vec<Vec<LinkRecord>>, Error> {
        let shape = self.plan.shape();
        let first = self.common.tables.row_map;
        let mut peers = Vec::new();
        for peer in (0..shape.ranks).map(Rank) {
            let mut records = vec![LinkRecord::zeroed(); test.rows(shape) as usize];
            let at = first + 4 * LinkRecord::index(shape, peer, 0, 0);
            let from: DevicePtr = self.memory.workspace.plus(at);
            self.device().download(from, cast_slice_mut(&mut records))?;
            peers.push(records);
        }
        Ok(peers)
    }
}
