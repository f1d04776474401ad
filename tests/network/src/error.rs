//! Failures of the network.

use std::io;
use std::net::SocketAddrV4;

use thiserror::Error;

use crate::settings::SettingsError;

/// A failure of the network.
#[derive(Debug, Error)]
pub(crate) enum NetworkError {
    #[error(
        "the NVSHMEM that loads it has transport interface {0}; this transport has {1}, of NVSHMEM 3.4.5"
    )]
    Interface(i32, i32),
    #[error("{0} is not set")]
    NoSettings(&'static str),
    #[error("{variable}: {error}")]
    Settings {
        variable: &'static str,
        error: SettingsError,
    },
    #[error("CUDA: {0}")]
    Cuda(String),
    #[error("cannot listen at {0}: {1}")]
    Listen(SocketAddrV4, io::Error),
    #[error("PE {0} does not listen; what it printed says why")]
    DoesNotListen(usize),
    #[error("PE {0} has version {1} of the network, this PE has {2}")]
    Version(usize, u32, u32),
    #[error("the bootstrap's all-gather failed with {0}")]
    AllGather(i32),
    #[error("connecting to PE {0} at {1}: {2}")]
    Connect(usize, SocketAddrV4, io::Error),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("PEs {0:?} have not connected")]
    Missing(Vec<usize>),
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("a {what} of {bytes} bytes at {at:#x}, which is not registered for peers")]
    Outside {
        what: &'static str,
        bytes: usize,
        at: u64,
    },
}

/// Bytes that are no frame of this network, or one that nobody may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum FrameError {
    #[error("a frame begins with {0:#x}")]
    Magic(u32),
    #[error("a frame has kind {0}")]
    Kind(u8),
    #[error("a frame has {0} bytes; the most are {1}")]
    Length(u64, u64),
    #[error("a word has {0} bytes")]
    Size(u8),
    #[error("a word of {0} bytes is at {1:#x}, which is not aligned")]
    Alignment(u8, u64),
    #[error("an atomic operation has number {0}")]
    Atomic(u16),
    #[error("a flag of a frame is {0}")]
    Flag(u16),
    #[error("{0} operations are acknowledged after {1} of {2}")]
    Acknowledged(u64, u64, u64),
    #[error("the answer {0} was not asked for")]
    Answer(u64),
    #[error("the answer {0} has {1} bytes in place of {2}")]
    AnswerLength(u64, usize, usize),
    #[error("a frame came after the last one")]
    AfterLast,
}
