//! Requests of a machine's handles to the thread that simulates it.

use std::sync::mpsc::Sender;

use ferry_layout::Kernel;

use crate::args::Args;
use crate::error::SimulatorError;

/// Way back for an answer.
pub type Reply = Sender<Result<(), SimulatorError>>;

/// Request of a handle.
pub enum Command {
    Launch {
        rank: u32,
        kernel: Kernel,
        args: Box<Args>,
        reply: Reply,
    },
    Synchronize {
        rank: u32,
        reply: Reply,
    },
    Lose {
        rank: u32,
        reply: Reply,
    },
}
