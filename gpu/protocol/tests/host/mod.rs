//! Words for the host, which reads them while the kernel runs.

use ferry_protocol::Host;
use ferry_protocol::wire::ticket::Ticket;
use loom::sync::atomic::Ordering;
use loom::thread;

use super::run::{check, finds};
use super::{Memory, NOT_WHOLE, Warp, Weak, read, wait};

impl Host for Warp<'_> {
    fn tell_host(&self, ticket: u64) {
        let word = &self.memory.words[self.rank].flag;
        word.store(ticket, Ordering::Relaxed);
    }
}

/// A warp writes a word for the host and tells it, while the host looks for the ticket.
fn ticket_model(weak: Weak) {
    let memory = Memory::new(weak);
    let teller = thread::spawn({
        let memory = memory.clone();
        move || {
            let warp = memory.warp(0);
            memory.rows[0].store(1, Ordering::Relaxed);
            Ticket::release(&warp, 1).tell(&warp);
        }
    });
    let order = match weak {
        Weak::Acquire => Ordering::Relaxed,
        _ => Ordering::Acquire,
    };
    wait(|| memory.words[0].flag.load(order) == 1);
    read(&memory.rows[0], 1);
    teller.join().unwrap();
}

#[test]
fn a_host_that_sees_the_ticket_sees_the_words() {
    check(ticket_model, Weak::Nothing);
}

#[test]
fn a_ticket_that_orders_nothing_is_found() {
    finds(ticket_model, Weak::RowRelease, NOT_WHOLE);
    finds(ticket_model, Weak::Acquire, NOT_WHOLE);
}
