//! Frames: six words, then a payload. Requests go one way of a connection, answers the other way.

use crate::error::FrameError;

/// Version of frames and greetings.
pub(crate) const VERSION: u32 = 1;
/// Most bytes of a put or get in one frame.
pub(crate) const MOST_BYTES: usize = 1 << 20;
/// Bytes before a payload.
pub(crate) const HEADER: usize = 48;

const MAGIC: u32 = 0x6e79_7266;

const PUT: u8 = 1;
const WORD: u8 = 2;
const ATOMIC: u8 = 3;
const GET: u8 = 4;
const FENCE: u8 = 5;
const LAST: u8 = 6;
const DONE: u8 = 16;
const BYTES: u8 = 17;
const OLD: u8 = 18;

/// A PE's request to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Writes bytes.
    Put { to: u64, bytes: Vec<u8> },
    /// Writes a value of 1, 2, 4 or 8 bytes.
    Word { to: u64, size: u8, value: u64 },
    /// Changes a word of 4 or 8 bytes.
    Atomic(AtomicRequest),
    /// Reads bytes.
    Get { from: u64, bytes: usize, id: u64 },
    /// Is between what was asked before it and after it.
    Fence,
    /// Nothing comes after it.
    Last,
}

/// A change of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AtomicRequest {
    pub(crate) at: u64,
    pub(crate) size: u8,
    pub(crate) operation: Atomic,
    pub(crate) value: u64,
    pub(crate) comparand: u64,
    /// Number of the answer with the old value, if there is to be one.
    pub(crate) fetch: Option<u64>,
}

/// A PE's answer to another's requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// So many puts, words, and atomic operations without an answer of their own took effect so far.
    Done(u64),
    /// The bytes of a get.
    Bytes { id: u64, bytes: Vec<u8> },
    /// Old value of a word.
    Old { id: u64, value: u64 },
}

/// Atomic operations, without whether they return the old value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Atomic {
    Set,
    /// Set by a put-with-signal, or as a signal.
    Signal,
    Add,
    /// Added as a signal.
    SignalAdd,
    And,
    Or,
    Xor,
    Increment,
    Fetch,
    CompareAndSwap,
}

impl Atomic {
    /// NVSHMEM's operation of this number, and whether it returns the old value.
    pub(crate) const fn of_nvshmem(number: i32) -> Option<(Self, bool)> {
        Some(match number {
            2 => (Self::Increment, false),
            3 => (Self::Set, false),
            4 => (Self::Add, false),
            5 => (Self::And, false),
            6 => (Self::Or, false),
            7 => (Self::Xor, false),
            8 | 9 => (Self::Signal, false),
            10 => (Self::SignalAdd, false),
            12 => (Self::Fetch, true),
            13 => (Self::Increment, true),
            14 => (Self::Add, true),
            15 => (Self::And, true),
            16 => (Self::Or, true),
            17 => (Self::Xor, true),
            18 => (Self::Set, true),
            19 => (Self::CompareAndSwap, true),
            _ => return None,
        })
    }

    const ALL: [Self; 10] = [
        Self::Set,
        Self::Signal,
        Self::Add,
        Self::SignalAdd,
        Self::And,
        Self::Or,
        Self::Xor,
        Self::Increment,
        Self::Fetch,
        Self::CompareAndSwap,
    ];

    /// Whether it is a signal, as put-with-signal has.
    pub(crate) const fn is_signal(self) -> bool {
        matches!(self, Self::Signal | Self::SignalAdd)
    }

    /// Whether the new word does not depend on the old one.
    pub(crate) const fn only_writes(self) -> bool {
        matches!(self, Self::Set | Self::Signal)
    }

    /// The word after this operation, `None` if it stays.
    pub(crate) const fn apply(self, old: u64, value: u64, comparand: u64) -> Option<u64> {
        Some(match self {
            Self::Set | Self::Signal => value,
            Self::Add | Self::SignalAdd => old.wrapping_add(value),
            Self::And => old & value,
            Self::Or => old | value,
            Self::Xor => old ^ value,
            Self::Increment => old.wrapping_add(1),
            Self::CompareAndSwap if old == comparand => value,
            Self::Fetch | Self::CompareAndSwap => return None,
        })
    }
}

fn write(out: &mut Vec<u8>, kind: u8, size: u8, operation: u16, words: [u64; 5]) {
    let kinds = u64::from(kind) << 32 | u64::from(size) << 40 | u64::from(operation) << 48;
    let first = u64::from(MAGIC) | kinds;
    for word in std::iter::once(first).chain(words) {
        out.extend_from_slice(&word.to_le_bytes());
    }
}

/// The header of a put, whose bytes follow.
pub(crate) fn write_put(out: &mut Vec<u8>, to: u64, bytes: usize) {
    write(out, PUT, 0, 0, [bytes as u64, to, 0, 0, 0]);
}

impl Request {
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Put { to, bytes } => {
                write_put(out, *to, bytes.len());
                out.extend_from_slice(bytes);
            }
            Self::Word { to, size, value } => write(out, WORD, *size, 0, [0, *to, *value, 0, 0]),
            Self::Atomic(atomic) => {
                let number = Atomic::ALL.iter().position(|one| *one == atomic.operation);
                let fetches = u16::from(atomic.fetch.is_some()) << 8;
                let operation = number.unwrap_or_default() as u16 | fetches;
                let id = atomic.fetch.unwrap_or_default();
                let words = [0, atomic.at, atomic.value, atomic.comparand, id];
                write(out, ATOMIC, atomic.size, operation, words);
            }
            Self::Get { from, bytes, id } => {
                write(out, GET, 0, 0, [*bytes as u64, *from, 0, 0, *id])
            }
            Self::Fence => write(out, FENCE, 0, 0, [0; 5]),
            Self::Last => write(out, LAST, 0, 0, [0; 5]),
        }
    }

    /// The request at the beginning of `bytes` and its length, if all of it is there.
    pub(crate) fn read(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let Some(header) = Header::read(bytes)? else {
            return Ok(None);
        };
        let payload = match header.kind {
            PUT => match header.payload(bytes)? {
                Some(payload) => payload,
                None => return Ok(None),
            },
            _ => &[],
        };
        let [_, at, value, comparand, id] = header.words;
        let request = match header.kind {
            PUT => Self::Put {
                to: at,
                bytes: payload.to_vec(),
            },
            WORD => Self::Word {
                to: at,
                size: header.size_of(&[1, 2, 4, 8])?,
                value,
            },
            ATOMIC => {
                let size = header.size_of(&[4, 8])?;
                if at % u64::from(size) != 0 {
                    return Err(FrameError::Alignment(size, at));
                }
                let (operation, fetches) = header.atomic()?;
                Self::Atomic(AtomicRequest {
                    at,
                    size,
                    operation,
                    value,
                    comparand,
                    fetch: fetches.then_some(id),
                })
            }
            GET => Self::Get {
                from: at,
                bytes: header.length()?,
                id,
            },
            FENCE => Self::Fence,
            LAST => Self::Last,
            other => return Err(FrameError::Kind(other)),
        };
        Ok(Some((request, HEADER + payload.len())))
    }
}

impl Answer {
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Done(count) => write(out, DONE, 0, 0, [0, 0, *count, 0, 0]),
            Self::Bytes { id, bytes } => {
                write(out, BYTES, 0, 0, [bytes.len() as u64, 0, 0, 0, *id]);
                out.extend_from_slice(bytes);
            }
            Self::Old { id, value } => write(out, OLD, 0, 0, [0, 0, *value, 0, *id]),
        }
    }

    /// The answer at the beginning of `bytes` and its length, if all of it is there.
    pub(crate) fn read(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let Some(header) = Header::read(bytes)? else {
            return Ok(None);
        };
        let [_, _, value, _, id] = header.words;
        Ok(Some(match header.kind {
            DONE => (Self::Done(value), HEADER),
            BYTES => {
                let Some(payload) = header.payload(bytes)? else {
                    return Ok(None);
                };
                let bytes = payload.to_vec();
                (Self::Bytes { id, bytes }, HEADER + payload.len())
            }
            OLD => (Self::Old { id, value }, HEADER),
            other => return Err(FrameError::Kind(other)),
        }))
    }
}

/// The six words.
struct Header {
    kind: u8,
    size: u8,
    operation: u16,
    /// Length, address, value, comparand, number of the answer.
    words: [u64; 5],
}

impl Header {
    fn read(bytes: &[u8]) -> Result<Option<Self>, FrameError> {
        let Some(header) = bytes.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let (words, _) = header.as_chunks::<8>();
        let [first, words @ ..] =
            std::array::from_fn::<u64, 6, _>(|i| u64::from_le_bytes(words[i]));
        if first as u32 != MAGIC {
            return Err(FrameError::Magic(first as u32));
        }
        Ok(Some(Self {
            kind: (first >> 32) as u8,
            size: (first >> 40) as u8,
            operation: (first >> 48) as u16,
            words,
        }))
    }

    /// Bytes that are sent or wanted.
    fn length(&self) -> Result<usize, FrameError> {
        match usize::try_from(self.words[0]) {
            Ok(length) if length <= MOST_BYTES => Ok(length),
            _ => Err(FrameError::Length(self.words[0], MOST_BYTES as u64)),
        }
    }

    /// The bytes behind the header, if all are there.
    fn payload<'a>(&self, frame: &'a [u8]) -> Result<Option<&'a [u8]>, FrameError> {
        Ok(frame[HEADER..].get(..self.length()?))
    }

    fn size_of(&self, sizes: &[u8]) -> Result<u8, FrameError> {
        let known = sizes.contains(&self.size);
        known
            .then_some(self.size)
            .ok_or(FrameError::Size(self.size))
    }

    /// The operation, and whether it returns the old value.
    fn atomic(&self) -> Result<(Atomic, bool), FrameError> {
        let number = self.operation & 0xff;
        let operation = Atomic::ALL.get(usize::from(number)).copied();
        let operation = operation.ok_or(FrameError::Atomic(number))?;
        match self.operation >> 8 {
            0 => Ok((operation, false)),
            1 => Ok((operation, true)),
            other => Err(FrameError::Flag(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests() -> Vec<Request> {
        let atomic = |operation, fetch| {
            Request::Atomic(AtomicRequest {
                at: 0x7000_0000_0008,
                size: 8,
                operation,
                value: u64::MAX,
                comparand: 3,
                fetch,
            })
        };
        let mut requests = vec![
            Request::Put {
                to: 8,
                bytes: (0..100).collect(),
            },
            Request::Put {
                to: 8,
                bytes: Vec::new(),
            },
            Request::Word {
                to: 5,
                size: 1,
                value: 7,
            },
            Request::Get {
                from: 9,
                bytes: MOST_BYTES,
                id: 4,
            },
            Request::Fence,
            Request::Last,
        ];
        for operation in Atomic::ALL {
            requests.push(atomic(operation, None));
            requests.push(atomic(operation, Some(9)));
        }
        requests
    }

    #[test]
    fn what_is_written_is_read_and_a_part_of_it_is_awaited() {
        for request in requests() {
            let mut frame = Vec::new();
            request.write(&mut frame);
            for cut in 0..frame.len() {
                assert_eq!(Request::read(&frame[..cut]), Ok(None), "{request:?}");
            }
            let length = frame.len();
            frame.push(1);
            assert_eq!(Request::read(&frame), Ok(Some((request, length))));
        }
        let bytes = vec![1, 2, 3];
        for answer in [
            Answer::Done(u64::MAX),
            Answer::Old { id: 1, value: 2 },
            Answer::Bytes { id: 3, bytes },
        ] {
            let mut frame = Vec::new();
            answer.write(&mut frame);
            for cut in 0..frame.len() {
                assert_eq!(Answer::read(&frame[..cut]), Ok(None), "{answer:?}");
            }
            let length = frame.len();
            assert_eq!(Answer::read(&frame), Ok(Some((answer, length))));
        }
    }

    #[test]
    fn what_nobody_may_send_is_refused() {
        let frame = |kind, size, operation, words| {
            let mut frame = Vec::new();
            write(&mut frame, kind, size, operation, words);
            frame
        };
        let most = MOST_BYTES as u64;
        for (bytes, error) in [
            (vec![0; HEADER], FrameError::Magic(0)),
            (frame(0, 0, 0, [0; 5]), FrameError::Kind(0)),
            (frame(DONE, 0, 0, [0; 5]), FrameError::Kind(DONE)),
            (
                frame(PUT, 0, 0, [most + 1, 0, 0, 0, 0]),
                FrameError::Length(most + 1, most),
            ),
            (
                frame(GET, 0, 0, [u64::MAX, 0, 0, 0, 0]),
                FrameError::Length(u64::MAX, most),
            ),
            (frame(WORD, 3, 0, [0; 5]), FrameError::Size(3)),
            (frame(WORD, 0, 0, [0; 5]), FrameError::Size(0)),
            (frame(ATOMIC, 2, 0, [0; 5]), FrameError::Size(2)),
            (
                frame(ATOMIC, 8, 0, [0, 4, 0, 0, 0]),
                FrameError::Alignment(8, 4),
            ),
            (frame(ATOMIC, 8, 10, [0; 5]), FrameError::Atomic(10)),
            (frame(ATOMIC, 8, 2 << 8, [0; 5]), FrameError::Flag(2)),
        ] {
            assert_eq!(Request::read(&bytes), Err(error));
        }
        let put = frame(PUT, 0, 0, [0; 5]);
        assert_eq!(Answer::read(&put), Err(FrameError::Kind(PUT)));
        let long = frame(BYTES, 0, 0, [most + 1, 0, 0, 0, 0]);
        assert_eq!(Answer::read(&long), Err(FrameError::Length(most + 1, most)));
    }

    #[test]
    fn noise_is_no_frame_and_no_panic() {
        use rand::rngs::SmallRng;
        use rand::{Rng, SeedableRng};

        let mut dice = SmallRng::seed_from_u64(1);
        for request in requests() {
            let mut frame = Vec::new();
            request.write(&mut frame);
            for _ in 0..2_000 {
                let mut frame = frame.clone();
                let at = dice.random_range(0..frame.len());
                frame[at] = dice.random();
                let _ = (Request::read(&frame), Answer::read(&frame));
            }
        }
    }

    #[test]
    fn words_change_as_nvshmem_says() {
        let all = (0..24).filter_map(Atomic::of_nvshmem);
        assert_eq!(all.filter(|(_, fetches)| *fetches).count(), 8);
        assert_eq!(Atomic::of_nvshmem(1), None);
        assert_eq!(Atomic::of_nvshmem(11), None);
        assert_eq!(Atomic::Add.apply(u64::MAX, 2, 0), Some(1));
        assert_eq!(Atomic::Increment.apply(u64::MAX, 9, 0), Some(0));
        assert_eq!(Atomic::CompareAndSwap.apply(3, 4, 3), Some(4));
        assert_eq!(Atomic::CompareAndSwap.apply(3, 4, 2), None);
        assert_eq!(Atomic::Fetch.apply(3, 4, 3), None);
        assert_eq!(Atomic::Set.apply(3, 4, 0), Some(4));
    }
}
