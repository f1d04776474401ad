//! Faults that kernels report, and waits for kernels.

use std::sync::PoisonError;

use ferry_layout::{Counter, CulpritWord, Fault, FaultKind, Rank};

use crate::communicator::{Communicator, Poison};
use crate::error::Error;
use crate::error::input_fault::{InputFault, InputReport};
use crate::tensor::handles::Stream;

impl Communicator {
    /// Returns what a kernel has reported so far. Reads host-visible memory; does not
    /// synchronize, so kernels still running may report later. Not collective.
    ///
    /// A fault of the input is returned once, as a value: the round goes on, and so must this rank, because
    /// its peers wait for the rest of its round. Of several faults since the last one returned it is the
    /// first, but an [`OutputTooSmall`](FaultKind::OutputTooSmall) takes precedence; the others are not
    /// reported.
    ///
    /// ```
    /// # fn all(rank: &ferry::Communicator) -> Result<(), ferry::Error> {
    /// if let Some(fault) = rank.check()?.fault() {
    ///     eprintln!("{fault}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Fault`]: why this rank gave up, once. After it this and every later call returns
    /// [`Error::Poisoned`], and only [`close`](Self::close) is left.
    pub fn check(&self) -> Result<InputReport, Error> {
        // Held from reading to acknowledging, so that no two threads return one record.
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        self.require_alive()?;
        let Some((fault, number)) = self.fault()? else {
            return Ok(InputReport::RIGHT);
        };
        if let (true, Some(page)) = (fault.kind.is_input(), &self.memory.page) {
            page.acknowledge(number);
            *told = Some(fault);
            return Ok(InputReport(Some(InputFault(fault))));
        }
        self.poison(Poison::Fault(fault));
        Err(Error::Fault(fault))
    }

    /// Waits for everything enqueued on `stream`, then [`check`](Self::check)s, and after an
    /// input fault also finds a communicator that gave up later. Then it looks for peers that gave up on this
    /// rank, by reading 8 bytes for each rank from the device: a late rank may have received everything that
    /// it waited for. Not collective, but waits for
    /// the peers that the kernels wait for, as long as the deadline allows: a thread that drives
    /// several ranks enqueues on all of them first, and then waits for each.
    ///
    /// ```
    /// # use ferry::*;
    /// # fn work(rank: &mut Communicator, stream: Stream, rounds: u32) -> Result<(), Error> {
    /// # fn round(_: &mut Communicator) -> Result<(), Error> { Ok(()) }
    /// for _ in 0..rounds {
    ///     round(rank)?; // dispatch, experts, combine
    ///     if let Some(fault) = rank.synchronize(stream)?.fault() {
    ///         eprintln!("{fault}"); // this round's results are not those of its whole input
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// An input fault is returned only once: also look at it if a program waits between dispatch and combine.
    ///
    /// # Errors
    /// Those of [`check`](Self::check), and errors of the device. On a late rank, on which a peer has given
    /// up by now: [`Error::PeerGaveUp`] if this rank's kernels received everything, or else [`Error::Fault`]
    /// with a [`PeerTimeout`](FaultKind::PeerTimeout) whose `culprit` is this rank.
    pub fn synchronize(&self, stream: Stream) -> Result<InputReport, Error> {
        self.device().synchronize(stream)?;
        self.streams.pass(stream);
        let found = self.check()?;
        let told = self
            .told
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match told {
            // A kernel records the reason before it stops, unless it cannot reach the page: checked again.
            Some(fault) if self.has_stopped()? => {
                let _ = self.check()?;
                Err(self.poison(Poison::Fault(fault)))
            }
            _ if found.fault().is_none() => self.require_peers().map(|()| found),
            // Returned only once, so now; the next call looks for peers.
            _ => Ok(found),
        }
    }

    /// Checks that no peer has given up on this rank. A peer that gave up on another rank does not matter
    /// here: this rank's kernels find that by themselves, and tell the ranks that wait for
    /// this one. Synchronizes.
    pub(super) fn require_peers(&self) -> Result<(), Error> {
        let shape = self.plan.shape();
        if self.plan.config().skip_a2a || shape.ranks == 1 {
            return Ok(());
        }
        let first = self.common.window.culprit(Rank(0)).bytes();
        let mut words = vec![[0; 8]; shape.ranks as usize];
        let at = self.memory.window.plus(first);
        self.device().download(at, words.as_flattened_mut())?;
        let own = CulpritWord::of(self.rank).0.to_le_bytes();
        match (0..).zip(&words).find(|&(_, &word)| word == own) {
            Some((peer, _)) => Err(self.poison(Poison::PeerGaveUp {
                rank: self.rank,
                peer: Rank(peer),
            })),
            None => Ok(()),
        }
    }

    /// Whether a kernel of this rank gave up, with or without a record. Synchronizes.
    pub(super) fn has_stopped(&self) -> Result<bool, Error> {
        let mut stopped = [0; 8];
        let at = self.memory.workspace.plus(Counter::Aborted.bytes());
        self.device().download(at, &mut stopped)?;
        Ok(stopped != [0; 8])
    }

    /// Returns an id that stands twice and is none of an expert as the id that it is: kernels look for both,
    /// one fault a round is recorded, and kernels without options compare ids alone. These are i32.
    const fn judged(&self, fault: Fault) -> Fault {
        let experts = self.plan.config().experts as u64;
        match fault.kind {
            FaultKind::DuplicateExpert if fault.saw >= experts => Fault {
                kind: FaultKind::InvalidExpert,
                wanted: experts,
                saw: fault.saw as i32 as i64 as u64,
                ..fault
            },
            _ => fault,
        }
    }

    /// Returns the fault with what this process knows of it, and the group's numbers of ranks: with
    /// `skip_a2a` kernels know only this rank.
    fn as_of_group(&self, fault: Fault) -> Fault {
        let rank = self.rank;
        let is_timeout = fault.kind == FaultKind::PeerTimeout;
        let progress = &self.windows.progress;
        let fault = Fault {
            gpu_ranks: self.gpu_ranks,
            is_culprit_behind: is_timeout
                && progress.is_behind(fault.culprit, fault.kernel, fault.epoch),
            ..fault
        };
        if !self.plan.config().skip_a2a {
            return fault;
        }
        let peer = match fault.kind {
            // The peer of an input fault is a top-k slot, except for outputs that are too small.
            kind if kind.is_input() && kind != FaultKind::OutputTooSmall => fault.peer,
            _ => rank,
        };
        Fault {
            rank,
            peer,
            culprit: rank,
            ..fault
        }
    }

    /// The fault on the page that was not returned yet, and the number of its record.
    pub(super) fn fault(&self) -> Result<Option<(Fault, u64)>, Error> {
        let Some(shared) = &self.memory.page else {
            return Ok(None);
        };
        let page = shared.read()?;
        match page.fault() {
            None if page.has_news() => Err(Error::FaultPageDamaged {
                rank: self.rank(),
                page: Box::new(page),
            }),
            fault => Ok(fault.map(|fault| (self.as_of_group(self.judged(fault)), page.complete))),
        }
    }
}
