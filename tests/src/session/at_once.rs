//! Calls of all local ranks at once.

use std::ops::{Deref, DerefMut};

use ferry::{CombineInput, CombineOutput, Communicator, Error, LocalRanks, Stream, UnfinishedAll};

use super::{Session, Turn};

/// A communicator that is lent to a call of all ranks, and back when that has returned.
pub(super) struct Lent(Option<Communicator>);

impl Lent {
    pub(super) const fn of(ep: Communicator) -> Self {
        Self(Some(ep))
    }

    /// It, which nobody else has.
    pub(super) fn into_inner(self) -> Communicator {
        self.0.expect(BACK)
    }
}

const BACK: &str = "a call of all ranks gives every communicator back";

impl Deref for Lent {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        self.0.as_ref().expect(BACK)
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Communicator {
        self.0.as_mut().expect(BACK)
    }
}

impl Session {
    /// Enqueues the dispatches of a [first](Turn::FIRST) round in calls of all local ranks. `stream` gives
    /// that of each, of its place and its own stream.
    pub fn dispatch_at_once(
        &mut self,
        stream: impl Fn(usize, Stream) -> Stream,
    ) -> Result<(), Error> {
        let split = self.settings.split;
        let ranks = self.ranks.iter().enumerate();
        let streams: Vec<_> = ranks.map(|(at, rank)| stream(at, rank.stream)).collect();
        let inputs: Vec<_> = self.ranks.iter().map(|rank| rank.input(0)).collect();
        let outputs: Vec<_> = self.ranks.iter().map(|rank| rank.output).collect();
        self.at_once(|ranks| {
            if !split {
                return ranks.dispatch_all(&streams, &inputs, &outputs).map(drop);
            }
            let sent = ranks.dispatch_all_async(&streams, &inputs)?;
            sent.wait(&streams, &outputs).map(drop)
        })
    }

    /// Enqueues the combines of a [first](Turn::FIRST) round in calls of all local ranks.
    pub(super) fn combine_at_once(&mut self, weights: bool) -> Result<(), Error> {
        let split = self.settings.split;
        let streams: Vec<_> = self.ranks.iter().map(|rank| rank.stream).collect();
        let (inputs, outputs): (Vec<CombineInput>, Vec<CombineOutput>) = (self.ranks.iter())
            .map(|rank| rank.combine_tensors(Turn::FIRST, rank.expert_rows, weights))
            .unzip();
        self.at_once(|ranks| {
            let UnfinishedAll::Combine(dispatched) = ranks.unfinished_all()? else {
                return Err(Error::DispatchNotWaited);
            };
            if !split {
                return dispatched.combine_all(&streams, &inputs, &outputs);
            }
            let returned = dispatched.combine_all_async(&streams, &inputs, &outputs)?;
            returned.wait(&streams)
        })
    }

    /// Lends the communicators of all local ranks to `call`.
    fn at_once<T>(
        &mut self,
        call: impl FnOnce(&mut LocalRanks) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let lent = self.ranks.iter_mut().map(|rank| rank.ep.0.take());
        let mut all = LocalRanks::from(lent.flatten().collect::<Vec<_>>());
        let result = call(&mut all);
        for (rank, ep) in self.ranks.iter_mut().zip(all) {
            rank.ep = Lent::of(ep);
        }
        result
    }
}
