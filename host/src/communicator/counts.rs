//! Counts of a dispatch on the host, before its rows are received.

use std::sync::atomic::Ordering;

use bytemuck::cast_slice;
use ferry_layout::{DispatchCountsArgs, HostCounts, ReceiveLayout, scale_placement};

use super::Communicator;
use super::open::Open;
use crate::call::Call;
use crate::call::dispatch::Sent;
use crate::error::Error;
use crate::plan::capacity::Capacity;
use crate::tensor::handles::Stream;

/// Numbers of the rows that a dispatch brings to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedCounts {
    /// Capacity that the outputs need, and no more: by expert with the rows of a [shared
    /// expert](crate::Config::shared_expert) and those that pad experts; in views and strided rows all
    /// places. If the device counts the tokens, at least the shared expert's rows of all of `x`.
    pub capacity: Capacity,
    /// Rows of each source rank, `[ranks]`: by expert its assignments to this rank's experts, else its tokens
    /// that have one here.
    pub source_counts: Vec<u32>,
    /// Assignments to each local expert, `[local_experts]`: by expert its rows, without padding.
    pub expert_counts: Vec<u32>,
}

impl Communicator {
    /// Tells the host how many rows the open dispatch brings, before they are received: a launch of one block
    /// between [`dispatch_async`](Self::dispatch_async) and [`dispatch_wait`](Self::dispatch_wait), which
    /// [`received`](Self::received) reads. So outputs can be allocated exactly. Enqueues only. Not
    /// collective, but the kernel waits for the counts of all ranks' dispatches: the rules for [kernels that
    /// wait](Self#what-waits-on-a-gpu-at-one-time) count it, with one multiprocessor. It can be called again.
    ///
    /// # Errors
    /// [`Error::WrongOrder`] unless `dispatch_wait` comes next, so never after a fused
    /// [`dispatch`](Self::dispatch); [`Error::SplitWithoutTravel`] with
    /// [`skip_a2a`](crate::Config::skip_a2a); [`Error::CountsInGraph`] if `stream` is being captured;
    /// [`Error::SharedGpu`]; [`Error::Poisoned`]; or the launch's own. Nothing is enqueued then.
    pub fn dispatch_counts(&mut self, stream: Stream) -> Result<(), Error> {
        self.enqueue(stream, &Call::DispatchCounts)
    }

    /// Returns the counts that [`dispatch_counts`](Self::dispatch_counts) was enqueued for last; `None` until
    /// its kernel has written them, and the fault if this rank has given up, so that a loop around it ends.
    /// Reads host-visible memory alone: does not synchronize, except in a simulated group, where it waits for
    /// the rank's kernels, as these run only while somebody waits. Allocates two lists. Not collective.
    ///
    /// ```
    /// use ferry::*;
    ///
    /// # fn main() -> Result<(), Error> {
    /// let group = Group::simulated(2, 7)?;
    /// let plan = Plan::new(&group, Config::new(4, 2, 8, 3))?;
    /// let mut ranks = Communicator::new(&group, &plan)?;
    /// let stream = Stream::DEFAULT;
    /// for rank in &mut ranks {
    ///     let x = rank.device().upload_tensor([1, 8], &[0x3f80_u16; 8])?;
    ///     let ids = rank.device().upload_tensor([1, 2], &[0_i32, 2])?;
    ///     rank.dispatch_async(stream, &DispatchInput::new(x, ids))?;
    ///     rank.dispatch_counts(stream)?;
    /// }
    /// for rank in &mut ranks {
    ///     let counts = loop {
    ///         if let Some(counts) = rank.received()? {
    ///             break counts;
    ///         }
    ///         std::hint::spin_loop();
    ///     };
    ///     assert_eq!((counts.capacity.rows, &counts.expert_counts[..]), (2, &[2, 0][..]));
    ///     let rows = DispatchBuffers::with_capacity(rank.device(), &plan, counts.capacity)?;
    ///     rank.dispatch_wait(stream, rows.output())?;
    ///     rank.give_up(stream)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoCounts`] unless counts were asked for and `dispatch_wait` comes next; [`Error::Fault`],
    /// then [`Error::Poisoned`], if a kernel of this rank has given up; the device's own. Faults of the input
    /// are left to [`check`](Self::check).
    pub fn received(&self) -> Result<Option<ReceivedCounts>, Error> {
        self.require_alive()?;
        let Open::Sent(sent, Some(ticket)) = self.open else {
            return Err(Error::NoCounts { rank: self.rank() });
        };
        let shape = self.plan.shape();
        let mut words = vec![0; HostCounts::words(shape)];
        if let Some(page) = &self.memory.page {
            page.counts(&mut words)?;
        }
        if words[0] == ticket {
            return Ok(Some(self.counts_of(sent, &words)));
        }
        match self.fault()? {
            Some((fault, _)) if !fault.kind.is_input() => self.check().map(|_| None),
            _ => Ok(None),
        }
    }

    /// The counts in the words of a page.
    fn counts_of(&self, sent: Sent, words: &[u64]) -> ReceivedCounts {
        let (plan, shape) = (&self.plan, self.plan.shape());
        let words: &[u32] = cast_slice(words);
        let of = |first: u64, count: u32| words[first as usize..][..count as usize].to_vec();
        let source_counts = of(HostCounts::source(0), shape.ranks);
        let expert_counts = of(HostCounts::expert(shape, 0), shape.local_experts());
        let tokens = words[HostCounts::TOKENS as usize] as usize;
        let capacity = if plan.block_rows() > 0 {
            Capacity::max(plan)
        } else if plan.config().receive.keeps_rows() {
            Capacity {
                rows: match plan.receive().layout {
                    ReceiveLayout::Compact => source_counts.iter().map(|&rows| rows as usize).sum(),
                    _ => plan.max_rows(),
                },
                wide_ids: sent.has_wide_ids(),
                ..Capacity::default()
            }
        } else {
            let alignment = plan.row_alignment() as usize;
            let shared_of = |tokens| plan.shared_tokens(self.rank(), tokens).len();
            let shared = shared_of(tokens);
            // Outputs have room for the shared expert's rows of all of `x`, however many the device counts.
            let least = shared_of(sent.tokens()).next_multiple_of(alignment);
            let groups = expert_counts.iter().map(|&rows| rows as usize);
            let rows = groups.chain([shared]);
            let rows = rows.map(|rows| rows.next_multiple_of(alignment));
            let blocks_of = |rows: usize| rows.div_ceil(scale_placement::BLOCK_ROWS as usize);
            let blocks: usize = rows.clone().map(blocks_of).sum();
            Capacity {
                rows: rows.sum::<usize>().max(least),
                scale_blocks: blocks.max(blocks_of(least)),
                ..Capacity::default()
            }
        };
        ReceivedCounts {
            capacity,
            source_counts,
            expert_counts,
        }
    }

    /// Arguments of a launch that tells of the counts of what was sent, and its ticket.
    pub(super) fn ask_for_counts(
        &self,
        stream: Stream,
        sent: Sent,
    ) -> Result<(DispatchCountsArgs, u64), Error> {
        if self.device().capture(stream).is_some() {
            return Err(Error::CountsInGraph);
        }
        let ticket = 1 + self.tickets.fetch_add(1, Ordering::Relaxed);
        let with = sent.args(&self.common, &self.plan);
        let args = DispatchCountsArgs {
            ticket,
            keeps_rows: self.plan.config().receive.keeps_rows().into(),
            tokens_on_device: sent.is_counted().into(),
            common: with.args.common,
        };
        Ok((args, ticket))
    }
}
