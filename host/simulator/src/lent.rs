//! Memory of a machine, which its handles use while no warp runs.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{mem, thread};

use crate::addresses::Machine;
use crate::error::SimulatorError;
use crate::memory::Memory;

/// Memory that handles and the simulating thread use in turns, so that a handle's access needs no message to
/// that thread.
pub struct Lent {
    memory: Mutex<Memory>,
    /// Handles that wait for the memory. The simulating thread lets them pass.
    wanted: AtomicUsize,
}

impl Lent {
    pub fn new(ranks: u32, machine: Machine) -> Self {
        Self {
            memory: Mutex::new(Memory::new(ranks, machine)),
            wanted: AtomicUsize::new(0),
        }
    }

    /// Memory for a handle. [`SimulatorError::Ended`] if the simulating thread panicked.
    pub fn get(&self) -> Result<MutexGuard<'_, Memory>, SimulatorError> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let memory = self.memory.lock();
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        memory.map_err(|_| SimulatorError::Ended)
    }

    /// Whether a handle waits for the memory.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed) > 0
    }

    /// Moves the memory into `place` while `simulate` runs.
    pub fn lend<T>(&self, place: &RefCell<Memory>, simulate: impl FnOnce() -> T) -> T {
        while self.is_wanted() {
            thread::yield_now();
        }
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        mem::swap(&mut *place.borrow_mut(), &mut *memory);
        let result = simulate();
        mem::swap(&mut *place.borrow_mut(), &mut *memory);
        result
    }
}
