//! Requests of a machine's handles to the thread that simulates it.

use std::sync::mpsc::Sender;

use ferry_layout::Kernel;

use crate::args::Args;
use crate::error::SimulatorError;

/// Way back for an answer.
pub type Reply<T> = Sender<Result<T, SimulatorError>>;

/// A request of a handle.
pub enum Command {
    Alloc {
        rank: u32,
        bytes: u64,
        reply: Reply<u64>,
    },
    AllocSymmetric {
        bytes: u64,
        reply: Reply<Vec<u64>>,
    },
    Free {
        address: u64,
        reply: Reply<()>,
    },
    Write {
        address: u64,
        bytes: Vec<u8>,
        reply: Reply<()>,
    },
    Read {
        address: u64,
        count: usize,
        reply: Reply<Vec<u8>>,
    },
    Launch {
        rank: u32,
        kernel: Kernel,
        args: Box<Args>,
        reply: Reply<()>,
    },
    Synchronize {
        rank: u32,
        reply: Reply<()>,
    },
}
