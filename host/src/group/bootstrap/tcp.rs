//! A rendezvous over TCP that needs no launcher's help: rank 0 listens, the others connect.
//!
//! Every message is 16 bytes of header (a tag, a number, a length), little-endian, and then the
//! payload. A call has two rounds: all ranks send to rank 0, which answers with the bytes of all; all
//! confirm that they have them, and rank 0 lets all go on. A rank that finds another one lost, or gives up,
//! tells those that it is connected to, in a message that may come instead of any other.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use super::accept::Entrance;
use super::hello::{DUPLICATE, GIVEN_UP, Hello, WELCOME, WORLD_SIZE};
use super::key::Key;
use super::newcomer::Newcomer;
use super::peer::{HELLO_TIMEOUT, Limit, Loss, MAX_BYTES, PAUSE, Peer};
use super::require_ranks;
use crate::error::bootstrap::BootstrapError;
use crate::group::bootstrap::Bootstrap;

/// Most newcomers at one time that rank 0 keeps before they have identified themselves. If more come, the
/// first ones are sent away; ranks come again.
const MOST_NEWCOMERS: usize = 256;

/// A [`Bootstrap`] over TCP. Anybody who can connect to rank 0's address can take a rank's place: use it in
/// trusted networks, or give all ranks a [key](Self::connect_with_key).
///
/// A call that fails tells the other ranks why, and each later call fails at once, with
/// [`BootstrapError::Lost`] or [`BootstrapError::GaveUp`]. The remaining ranks can drop it and
/// [`connect`](Self::connect) anew, as a smaller group.
///
/// Once rank 0 has called, a rank whose process ended, or that gave up, is found at once, in the same
/// call of all ranks. Before, the others wait for `timeout`, and then learn only that rank 0 did
/// not answer. Rank 0 waits an eighth less than the others, so if it calls no later than that after
/// them, it tells them which rank did not come.
///
/// A call succeeds on all ranks or on none, except for failures while rank 0 sends its last 16
/// bytes to each: if a process ends, a connection breaks, or rank 0 or those bytes are held up
/// for an eighth of `timeout` just then, the call may succeed on some ranks and fail on others. A rank on
/// which it succeeded learns of the failure in its next call.
#[derive(Debug)]
pub struct TcpBootstrap {
    rank: u32,
    ranks: u32,
    timeout: Duration,
    /// Calls so far: each message carries the number of its call.
    calls: u32,
    /// All other ranks, ascending, on rank 0; elsewhere rank 0 alone.
    peers: Vec<Peer>,
    /// Reason why no call is made any more.
    loss: Option<Loss>,
}

impl TcpBootstrap {
    /// Meets the other ranks at `address`: rank 0 listens there, the others connect, again and
    /// again until it does. Collective. `timeout` bounds this call and each of the two rounds of a
    /// later one; a call that fails may take two seconds more for each rank that it has to tell.
    /// A process that expects another number of ranks is told so and sent away, and the others go on.
    ///
    /// # Errors
    /// [`BootstrapError`]: on every rank if one is missing; on one rank alone if another process has come as
    /// the same rank, if it expects another number of ranks than rank 0, or if rank 0 has a key.
    pub fn connect(
        rank: u32,
        ranks: u32,
        address: SocketAddr,
        timeout: Duration,
    ) -> Result<Self, BootstrapError> {
        Self::meet(rank, ranks, address, timeout, None)
    }

    /// Does the same as [`connect`](Self::connect), if all ranks have `key`: secret bytes. 32 random ones
    /// suffice; a password does not, as somebody who recorded a meeting can try words offline. Collective.
    ///
    /// Rank 0 and each other rank prove to each other that they have the key when they meet, by an
    /// HMAC-SHA256 over fresh random numbers of both, the rank and the number of ranks. A process that cannot
    /// is sent away and logged with its address, and the others go on. A key on only one side is
    /// refused on both.
    ///
    /// A key does no more than this. Messages are neither encrypted nor authenticated one by one: whoever
    /// can read the network reads them, and whoever can change its packets can still take part.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect), [`BootstrapError::EmptyKey`] before anything is sent, and
    /// [`BootstrapError::OtherKey`]: on a rank whose key is not rank 0's; on rank 0 only after its
    /// timeout, if no other process has come as that rank.
    pub fn connect_with_key(
        rank: u32,
        ranks: u32,
        address: SocketAddr,
        timeout: Duration,
        key: &[u8],
    ) -> Result<Self, BootstrapError> {
        let key = Key::new(key)?;
        Self::meet(rank, ranks, address, timeout, Some(&key))
    }

    fn meet(
        rank: u32,
        ranks: u32,
        address: SocketAddr,
        timeout: Duration,
        key: Option<&Key>,
    ) -> Result<Self, BootstrapError> {
        if rank >= ranks {
            return Err(BootstrapError::RankOutOfRange {
                rank,
                ranks,
                address,
            });
        }
        require_ranks(ranks)?;
        let rendezvous = Rendezvous {
            ranks,
            address,
            limit: Limit::of(timeout),
            key,
        };
        let peers = if rank == 0 {
            let doing = "listening";
            let listener = TcpListener::bind(address).map_err(|source| BootstrapError::Io {
                peer: 0,
                address,
                doing,
                source,
            })?;
            if key.is_none() && !address.ip().to_canonical().is_loopback() {
                tracing::warn!(
                    %address,
                    "anybody who can connect here can take a rank's place: give all ranks a key"
                );
            }
            rendezvous.host(&listener)?
        } else {
            vec![rendezvous.join(rank)?]
        };
        Ok(Self {
            rank,
            ranks,
            timeout,
            calls: 0,
            peers,
            loss: None,
        })
    }

    /// One call.
    fn exchange(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        if bytes.len() as u64 > MAX_BYTES {
            return Err(BootstrapError::Other {
                call: "the TCP bootstrap's all_gather",
                reason: format!("{} bytes given, at most {MAX_BYTES} are sent", bytes.len()),
            });
        }
        if self.rank > 0 {
            return self.take_part(bytes);
        }
        // Less than the others wait, so that rank 0 can tell them which rank did not come.
        let timeout = self.timeout - self.timeout / 8;
        let all = self.collect(bytes, Limit::of(timeout))?;
        // Begins before any of the others can confirm, so it ends before one that confirmed gives up.
        let limit = Limit::of(timeout);
        self.send_all(&all, limit)?;
        self.collect(&[], limit)?;
        if !self.peers.is_empty() && limit.left().is_none() {
            // This process was halted until now. Others may have given up, and their messages be under way.
            return Err(BootstrapError::GaveUp {
                rank: 0,
                reason: format!("it came too late to let the others go on ({timeout:?})"),
            });
        }
        self.send_all(&[Vec::new()], limit)?;
        Ok(all)
    }

    /// One call, on all ranks but rank 0.
    fn take_part(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let (doing, call, limit) = ("all_gather", self.calls, Limit::of(self.timeout));
        let host = &mut self.peers[0];
        host.send(call, bytes, doing, limit)?;
        let all: Result<_, _> = (0..self.ranks)
            .map(|_| host.receive(call, doing, limit))
            .collect();
        let all = all?;
        // The whole timeout again: rank 0 decides in less, as it began earlier.
        let limit = Limit::of(self.timeout);
        host.send(call, &[], doing, limit)?;
        host.receive(call, doing, limit)?;
        Ok(all)
    }

    /// Rank 0: sends the same messages to all ranks.
    fn send_all(&mut self, messages: &[Vec<u8>], limit: Limit) -> Result<(), BootstrapError> {
        for peer in &mut self.peers {
            for bytes in messages {
                peer.send(self.calls, bytes, "all_gather", limit)?;
            }
        }
        Ok(())
    }

    /// Rank 0: collects every rank's bytes of this round. Polls all connections, so that a lost rank is
    /// found even if another is late, and once more when all have come: a rank may
    /// have given up or ended after it sent its bytes.
    fn collect(&mut self, bytes: &[u8], limit: Limit) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let (doing, call) = ("all_gather", self.calls);
        let mut all = vec![None; self.ranks as usize];
        all[0] = Some(bytes.to_vec());
        loop {
            let had_come = all.iter().all(Option::is_some);
            for peer in &mut self.peers {
                if let Some(message) = peer.poll(MAX_BYTES, doing)? {
                    let bytes = peer.require(call, message, doing)?;
                    if all[peer.rank as usize].replace(bytes).is_some() {
                        // It sent the same call twice.
                        return Err(peer.unexpected(doing, u64::from(call) + 1, call.into()));
                    }
                }
            }
            if had_come {
                return Ok(all.into_iter().flatten().collect());
            }
            let Some(silent) = all.iter().position(Option::is_none) else {
                continue;
            };
            if limit.left().is_none() {
                return Err(self.peers[silent - 1].timeout(doing, limit));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

// SAFETY: ranks meet once, each rank is taken once, and neither number changes. A message carries the
// number of its call, over one connection per rank, in order. Rank 0 sends all ranks' messages once all have
// come, and each rank's call ends after that.
unsafe impl Bootstrap for TcpBootstrap {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        if let Some(loss) = &self.loss {
            return Err(loss.clone().error());
        }
        self.calls = self.calls.wrapping_add(1);
        self.exchange(bytes).inspect_err(|error| {
            let loss = Loss::of(error, self.rank);
            let limit = Limit::of(HELLO_TIMEOUT);
            for peer in &mut self.peers {
                loss.tell(peer, limit);
            }
            self.loss = Some(loss);
        })
    }
}

/// A meeting in progress.
#[derive(Clone, Copy)]
pub struct Rendezvous<'a> {
    pub ranks: u32,
    pub address: SocketAddr,
    pub limit: Limit,
    pub key: Option<&'a Key>,
}

/// A rank that has come.
struct Present {
    peer: Peer,
    nonce: u64,
    /// Proof in its welcome; empty without a key.
    proof: Vec<u8>,
}

impl Present {
    /// Whether its connection broke, or it sent an unexpected message.
    fn is_gone(&mut self) -> bool {
        self.peer.poll(0, "joining").is_err()
    }
}

impl Rendezvous<'_> {
    /// Rank 0's part: waits for all ranks, then lets them go on; or tells them that it gave up.
    fn host(self, listener: &TcpListener) -> Result<Vec<Peer>, BootstrapError> {
        let mut present: Vec<Option<Present>> = (1..self.ranks).map(|_| None).collect();
        let gathered = self.gather(listener, &mut present);
        let mut peers = Vec::new();
        for mut here in present.into_iter().flatten() {
            // The first call finds a rank that is gone again, and tells all.
            match gathered {
                Ok(()) => self.answer(&mut here.peer, WELCOME, &here.proof),
                Err(_) => self.answer(&mut here.peer, GIVEN_UP, &[]),
            }
            peers.push(here.peer);
        }
        gathered.map(|()| peers)
    }

    /// Answers a newcomer.
    fn answer(self, peer: &mut Peer, verdict: u32, proof: &[u8]) {
        let answer = [&self.ranks.to_le_bytes(), proof].concat();
        if let Err(error) = peer.send(verdict, &answer, "welcome", self.limit.at_least()) {
            tracing::warn!(%error, "a rank that came to the rendezvous is gone");
        }
    }

    /// Fills `present`. A silent connection does not keep others waiting.
    fn gather(
        self,
        listener: &TcpListener,
        present: &mut [Option<Present>],
    ) -> Result<(), BootstrapError> {
        let io = |source| BootstrapError::Io {
            peer: 0,
            address: self.address,
            doing: "accepting",
            source,
        };
        let mut entrance = Entrance::new(listener).map_err(io)?;
        let mut newcomers: Vec<Newcomer> = Vec::new();
        let mut refused = None;
        loop {
            // A rank that has gone may be started again.
            let is_here = |here: &mut Option<Present>| here.as_mut().is_some_and(|h| !h.is_gone());
            if present.iter_mut().all(is_here) {
                return Ok(());
            }
            if self.limit.left().is_none() {
                let failing = entrance.failing.map(io);
                return Err(failing.unwrap_or_else(|| self.missing(present, refused)));
            }
            if let Some((stream, from)) = entrance.accept() {
                self.let_in(stream, from, &mut newcomers);
            }
            for mut newcomer in std::mem::take(&mut newcomers) {
                match newcomer.hear(self.key) {
                    Ok(Some((hello, proof))) => {
                        let error = self.admit(newcomer.peer, &hello, proof, present).err();
                        refused = error.or(refused);
                    }
                    Ok(None) if newcomer.limit.left().is_some() => newcomers.push(newcomer),
                    Ok(None) => {
                        tracing::warn!(from = %newcomer.peer.address, "a stranger did not say who it is");
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a stranger came to the rendezvous");
                        let is_of_key = matches!(error, BootstrapError::OtherKey { .. });
                        refused = is_of_key.then_some(error).or(refused);
                    }
                }
            }
        }
    }

    /// The error for ranks that did not come, or, if all came, that are gone; or the reason why a missing one
    /// was sent away.
    fn missing(
        self,
        present: &mut [Option<Present>],
        refused: Option<BootstrapError>,
    ) -> BootstrapError {
        let all_came = present.iter().all(Option::is_some);
        let missing = |(rank, here): (u32, &mut Option<Present>)| {
            let here = here.as_mut();
            let is_missing = here.is_none_or(|here| all_came && here.is_gone());
            is_missing.then_some(rank)
        };
        let missing: Vec<u32> = (1..).zip(present).filter_map(missing).collect();
        if let Some(
            error
            @ (BootstrapError::WorldSize { peer, .. } | BootstrapError::OtherKey { peer, .. }),
        ) = refused
            && missing.contains(&peer)
        {
            return error;
        }
        BootstrapError::MissingRanks {
            missing,
            ranks: self.ranks,
            address: self.address,
            seconds: self.limit.timeout.as_secs_f64(),
        }
    }

    fn let_in(self, stream: TcpStream, from: SocketAddr, newcomers: &mut Vec<Newcomer>) {
        match Peer::new(u32::MAX, self.ranks, from, stream) {
            Ok(peer) => newcomers.push(Newcomer::new(peer)),
            Err(error) => tracing::warn!(%error, "a stranger came to the rendezvous"),
        }
        if newcomers.len() > MOST_NEWCOMERS {
            let first = newcomers.remove(0);
            tracing::warn!(from = %first.peer.address, "too many strangers came; sent away");
        }
    }

    /// Admits a rank. A rank that is here already keeps its own place, or takes that of a connection that
    /// broke; otherwise it is another process with the same rank, which is sent away. So is one that expects
    /// another number of ranks, which is the error.
    fn admit(
        self,
        mut peer: Peer,
        hello: &Hello,
        proof: Vec<u8>,
        present: &mut [Option<Present>],
    ) -> Result<(), BootstrapError> {
        let &Hello {
            rank,
            ranks: theirs,
            nonce,
            random: _,
        } = hello;
        peer.rank = rank;
        if theirs != self.ranks {
            self.answer(&mut peer, WORLD_SIZE, &[]);
            let error = BootstrapError::WorldSize {
                rank: 0,
                ours: self.ranks,
                peer: rank,
                theirs,
                address: self.address,
            };
            tracing::warn!(%error, from = %peer.address, "sent away");
            return Err(error);
        }
        let mut place = rank
            .checked_sub(1)
            .and_then(|index| present.get_mut(index as usize));
        if let Some(Some(here)) = &mut place
            && here.nonce != nonce
            && !here.is_gone()
        {
            place = None;
        }
        match place {
            Some(place) => *place = Some(Present { peer, nonce, proof }),
            // Also for a process that claims to be rank 0, as this one is.
            None => {
                tracing::warn!(from = %peer.address, rank, "a rank came to the rendezvous twice");
                self.answer(&mut peer, DUPLICATE, &[]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "tcp_tests.rs"]
mod tests;
