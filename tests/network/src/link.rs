//! An end of a connection: bytes that came, and bytes that go.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

use crate::error::FrameError;
use crate::frame::{HEADER, MOST_BYTES};

/// Most bytes of one read.
const READ: usize = 1 << 18;
/// Bytes that wait to be read as frames before no more are taken from the socket: a whole frame fits.
const MOST_INPUT: usize = 2 * (HEADER + MOST_BYTES);

/// An end of a connection. Neither reads nor writes wait.
pub(crate) struct Link {
    stream: TcpStream,
    input: Vec<u8>,
    /// Bytes of the input that were read as frames.
    taken: usize,
    output: Vec<u8>,
    /// Bytes of the output that the socket has.
    sent: usize,
    is_closed: bool,
    buffer: Box<[u8]>,
}

impl Link {
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            input: Vec::new(),
            taken: 0,
            output: Vec::new(),
            sent: 0,
            is_closed: false,
            buffer: vec![0; READ].into(),
        })
    }

    /// Whether it is closed. What came before the other end closed it can still be read.
    pub(crate) const fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Closes it, and forgets what came and what was to go.
    pub(crate) fn close(&mut self) {
        // A connection that is gone cannot be closed.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.is_closed = true;
        self.input.clear();
        self.taken = 0;
        self.output.clear();
        self.sent = 0;
    }

    /// The buffer to which frames are written.
    pub(crate) const fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Bytes that the socket has not taken.
    pub(crate) const fn unsent(&self) -> usize {
        self.output.len() - self.sent
    }

    /// Writes what the socket takes. Whether any went.
    pub(crate) fn flush(&mut self) -> bool {
        let before = self.sent;
        while !self.is_closed && self.sent < self.output.len() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(0) => self.is_closed = true,
                Ok(bytes) => self.sent += bytes,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => break,
                    ErrorKind::Interrupted => {}
                    _ => self.is_closed = true,
                },
            }
        }
        let any = self.sent > before;
        if self.sent == self.output.len() || self.is_closed {
            self.output.clear();
            self.sent = 0;
        }
        any
    }

    /// Reads what the socket has. Whether any came.
    pub(crate) fn fill(&mut self) -> bool {
        let mut any = false;
        if self.taken > MOST_INPUT / 2 || self.taken == self.input.len() {
            self.input.drain(..self.taken);
            self.taken = 0;
        }
        while !self.is_closed && self.input.len() - self.taken < MOST_INPUT {
            match self.stream.read(&mut self.buffer) {
                Ok(0) => self.is_closed = true,
                Ok(bytes) => {
                    any = true;
                    self.input.extend_from_slice(&self.buffer[..bytes]);
                    if bytes < self.buffer.len() {
                        break;
                    }
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => break,
                    ErrorKind::Interrupted => {}
                    _ => self.is_closed = true,
                },
            }
        }
        any
    }

    /// The next whole frame, as `read` reads it.
    pub(crate) fn next<T>(
        &mut self,
        read: impl Fn(&[u8]) -> Result<Option<(T, usize)>, FrameError>,
    ) -> Result<Option<T>, FrameError> {
        let Some((frame, bytes)) = read(&self.input[self.taken..])? else {
            return Ok(None);
        };
        self.taken += bytes;
        Ok(Some(frame))
    }
}
