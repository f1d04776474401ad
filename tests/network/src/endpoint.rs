//! A PE on the network: what NVSHMEM asks of it, and its two agents.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::counts::Counts;
use crate::cuda::Context;
use crate::error::NetworkError;
use crate::frame::{Atomic, AtomicRequest, MOST_BYTES, Request};
use crate::join;
use crate::memory::Memory;
use crate::mover::Mover;
use crate::receiver::{Incoming, Receiver};
use crate::sender::{Outgoing, Sender};
use crate::settings::{Lost, Settings};
use crate::shared::{Idle, Op, Pending, Queue, Shared};

/// Longest that an end waits for peers to say that they send nothing more.
const CLOSE: Duration = Duration::from_secs(2);

/// Answer to NVSHMEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Fine,
    /// The transport has failed, or a peer is lost.
    Failed,
}

/// A PE on the network.
pub(crate) struct Endpoint {
    shared: Arc<Shared>,
    agents: Vec<JoinHandle<()>>,
}

impl Endpoint {
    /// Meets all PEs and starts the agents; `gather` sends bytes to all and returns all. Collective.
    pub(crate) fn connect(
        settings: Settings,
        context: Option<Context>,
        memory: Arc<Memory>,
        [pe, pes]: [usize; 2],
        gather: impl FnOnce(&[u8], usize) -> Result<Vec<u8>, NetworkError>,
    ) -> Result<Self, NetworkError> {
        let links = join::meet(&settings, [pe, pes], gather)?;
        let order = settings.order;
        // All memory now: later, it would wait for the kernels that run.
        let (for_sender, for_receiver) =
            (Mover::new(context.as_ref())?, Mover::new(context.as_ref())?);
        let shared = Arc::new(Shared::new(settings, context, memory, [pe, pes]));
        let outgoing = links.outgoing.into_iter().enumerate();
        let outgoing = outgoing.map(|(pe, link)| Outgoing::new(pe, link)).collect();
        let incoming = links.incoming.into_iter().enumerate();
        let incoming = incoming
            .map(|(pe, link)| Incoming::new(pe, link, order))
            .collect();
        let sender = Sender::new(shared.clone(), for_sender);
        let receiver = Receiver::new(shared.clone(), for_receiver);
        let mut endpoint = Self {
            shared,
            agents: Vec::new(),
        };
        endpoint.start("ferry-net-tx", move || sender.run(outgoing))?;
        endpoint.start("ferry-net-rx", move || receiver.run(incoming))?;
        endpoint.shared.log(&format!("connected to {pes} PEs"));
        Ok(endpoint)
    }

    fn start(
        &mut self,
        name: &str,
        run: impl FnOnce() -> Result<(), NetworkError> + Send + 'static,
    ) -> Result<(), NetworkError> {
        let shared = self.shared.clone();
        let agent = thread::Builder::new().name(name.into()).spawn(move || {
            match catch_unwind(AssertUnwindSafe(run)) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => shared.fail(&error.to_string()),
                Err(_) => shared.fail("an agent of the network panicked"),
            }
        })?;
        self.agents.push(agent);
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    pub(crate) fn log(&self, text: &str) {
        self.shared.log(text);
    }

    /// Whether there is a PE of this number.
    pub(crate) fn has(&self, pe: usize) -> bool {
        pe < self.shared.peers.len()
    }

    /// Answer to NVSHMEM where it asks for nothing.
    pub(crate) fn progress(&self) -> Verdict {
        match self.shared.has_failed() {
            true => Verdict::Failed,
            false => Verdict::Fine,
        }
    }

    /// Answer to NVSHMEM about a peer.
    fn verdict(&self, pe: usize) -> Verdict {
        let is_lost = self.shared.peers[pe].is_lost();
        match is_lost && self.shared.settings.lost == Lost::Error {
            true => Verdict::Failed,
            false => self.progress(),
        }
    }

    /// Whether puts and signals are only counted from now on. Counts this one if so.
    fn only_counts(&self) -> bool {
        let (counts, after) = (&self.shared.counts, self.shared.settings.count_after);
        let so_far =
            || counts.puts.load(Ordering::Relaxed) + counts.signals.load(Ordering::Relaxed);
        let only = after > 0 && so_far() >= after;
        Counts::add(&counts.only_counted, u64::from(only));
        only
    }

    /// Waits, as for a send queue, until a peer has acknowledged enough.
    fn wait_for_room(&self, pe: usize) {
        let (peer, window) = (&self.shared.peers[pe], self.shared.settings.window);
        if window == 0 {
            return;
        }
        let asked = peer.queue().to_acknowledge;
        let has_room = || asked - peer.acknowledged.load(Ordering::Acquire).min(asked) < window;
        if !has_room() {
            Counts::add(&self.shared.counts.stalls, 1);
            self.wait(pe, "its send queue is full", has_room);
        }
    }

    /// Waits until `is_over`, or the peer is lost: at the latest after the settings' patience.
    fn wait(&self, pe: usize, why: &str, is_over: impl Fn() -> bool) {
        let (shared, since) = (&self.shared, Instant::now());
        let patience = Duration::from_secs(shared.settings.patience_s);
        let mut idle = Idle::default();
        while !is_over() {
            if shared.peers[pe].is_lost()
                || shared.has_failed()
                || shared.stops.load(Ordering::Relaxed)
            {
                return;
            }
            if since.elapsed() > patience {
                shared.lose(
                    pe,
                    &format!("{why}, and it did not acknowledge within {patience:?}"),
                );
                return;
            }
            idle.after(false);
        }
    }

    /// Asks a peer, once there is room, unless it is lost.
    fn ask(&self, pe: usize, by_proxy: bool, push: impl FnOnce(&mut Queue)) -> Verdict {
        Counts::add(&self.shared.counts.by_host, u64::from(!by_proxy));
        self.wait_for_room(pe);
        let peer = &self.shared.peers[pe];
        if !peer.is_lost() {
            let mut queue = peer.queue();
            queue.is_fenced = false;
            push(&mut queue);
        }
        self.verdict(pe)
    }

    /// Puts bytes that stay as they are until a quiet.
    ///
    /// # Safety
    /// So many bytes are there until then.
    pub(crate) unsafe fn put(
        &self,
        pe: usize,
        [to, from]: [u64; 2],
        bytes: usize,
        by_proxy: bool,
    ) -> Verdict {
        let counts = &self.shared.counts;
        let only_counts = self.only_counts();
        Counts::add(&counts.puts, 1);
        Counts::add(&counts.put_bytes, bytes as u64);
        if only_counts {
            return self.verdict(pe);
        }
        self.ask(pe, by_proxy, |queue| {
            for (offset, bytes) in frames(bytes) {
                queue.to_acknowledge += 1;
                queue.ops.push(Op::Put {
                    to: to.wrapping_add(offset),
                    from: from.wrapping_add(offset),
                    bytes,
                });
            }
        })
    }

    /// Puts a value.
    pub(crate) fn put_value(
        &self,
        pe: usize,
        to: u64,
        [value, size]: [u64; 2],
        by_proxy: bool,
    ) -> Verdict {
        Counts::add(&self.shared.counts.words, 1);
        self.ask(pe, by_proxy, |queue| {
            queue.to_acknowledge += 1;
            let size = size as u8;
            queue.ops.push(Op::Send(Request::Word { to, size, value }));
        })
    }

    /// Gets bytes, which are there after a quiet.
    ///
    /// # Safety
    /// There is room for them until then.
    pub(crate) unsafe fn get(
        &self,
        pe: usize,
        [to, from]: [u64; 2],
        bytes: usize,
        by_proxy: bool,
    ) -> Verdict {
        Counts::add(&self.shared.counts.gets, 1);
        self.ask(pe, by_proxy, |queue| {
            for (offset, bytes) in frames(bytes) {
                let to = to.wrapping_add(offset);
                let id = queue.expect(Pending::Get { to, bytes });
                let from = from.wrapping_add(offset);
                queue.ops.push(Op::Send(Request::Get { from, bytes, id }));
            }
        })
    }

    /// Changes a word; with a place, the old value and then a flag go there.
    ///
    /// # Safety
    /// There is room for both in that place until a quiet.
    pub(crate) unsafe fn change(
        &self,
        pe: usize,
        mut atomic: AtomicRequest,
        back: Option<(u64, u64)>,
        by_proxy: bool,
    ) -> Verdict {
        let counts = &self.shared.counts;
        let is_signal = atomic.operation.is_signal();
        let only_counts = is_signal && self.only_counts();
        let count = match atomic.operation {
            Atomic::Signal | Atomic::SignalAdd => &counts.signals,
            _ if back.is_some() => &counts.fetches,
            _ => &counts.atomics,
        };
        Counts::add(count, 1);
        if only_counts {
            return self.verdict(pe);
        }
        self.ask(pe, by_proxy, |queue| {
            match back {
                Some((to, flag)) => atomic.fetch = Some(queue.expect(Pending::Fetch { to, flag })),
                None => queue.to_acknowledge += 1,
            }
            queue.ops.push(Op::Send(Request::Atomic(atomic)));
        })
    }

    /// Orders what was asked before it before what is asked after it.
    pub(crate) fn fence(&self, pe: usize) -> Verdict {
        Counts::add(&self.shared.counts.fences, 1);
        let mut queue = self.shared.peers[pe].queue();
        if !std::mem::replace(&mut queue.is_fenced, true) {
            queue.ops.push(Op::Send(Request::Fence));
        }
        drop(queue);
        self.verdict(pe)
    }

    /// Waits until a peer has done all that it was asked.
    pub(crate) fn quiet(&self, pe: usize) -> Verdict {
        Counts::add(&self.shared.counts.quiets, 1);
        let peer = &self.shared.peers[pe];
        let queue = peer.queue();
        let (to_acknowledge, to_answer) = (queue.to_acknowledge, queue.to_answer);
        drop(queue);
        self.wait(pe, "a quiet waits", || {
            peer.acknowledged.load(Ordering::Acquire) >= to_acknowledge
                && peer.answered.load(Ordering::Acquire) >= to_answer
        });
        self.verdict(pe)
    }
}

impl Drop for Endpoint {
    /// Sends what was asked, receives until no PE sends any more, and ends the agents: after two seconds in
    /// any case, and at once if the transport has failed.
    fn drop(&mut self) {
        // Before its last words, which one that left does not acknowledge.
        self.shared.is_leaving.store(true, Ordering::Release);
        for peer in &self.shared.peers {
            let mut queue = peer.queue();
            queue.to_acknowledge += 1;
            queue.ops.push(Op::Send(Request::Last));
        }
        self.shared.is_closing.store(true, Ordering::Release);
        let limit = Instant::now() + CLOSE;
        let is_over =
            || self.shared.has_failed() || self.agents.iter().all(JoinHandle::is_finished);
        while Instant::now() < limit && !is_over() {
            thread::sleep(Duration::from_micros(100));
        }
        self.shared.stops.store(true, Ordering::Release);
        for agent in self.agents.drain(..) {
            // Agents catch their panics.
            let _ = agent.join();
        }
        self.shared.write_counts();
    }
}

/// Offsets and lengths of the frames of so many bytes.
fn frames(bytes: usize) -> impl Iterator<Item = (u64, usize)> {
    let starts = (0..bytes).step_by(MOST_BYTES);
    starts.map(move |start| (start as u64, MOST_BYTES.min(bytes - start)))
}
