//! Requests of a machine's handles to the thread that simulates it.

use std::sync::mpsc::Sender;

use ferry_layout::{Args, Kernel};

use crate::error::SimulatorError;

/// Way back for an answer.
pub type Reply = Sender<Result<(), SimulatorError>>;

/// A launch that did not begin yet.
pub struct Launch {
    pub kernel: Kernel,
    pub args: Box<Args>,
    /// Most blocks; `None` for as many as the machine has.
    pub max_blocks: Option<u32>,
}

/// Request of a handle.
pub enum Command {
    Launch {
        rank: u32,
        launch: Launch,
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
