//! Moves bytes between staging memory and this PE's memory, on a GPU or not.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

use crate::cuda::{Context, Lane};
use crate::error::NetworkError;
use crate::memory::Place;

/// Bytes of staging memory.
const STAGING: usize = 8 << 20;
/// Multiple of bytes at which each staged part begins.
const ALIGNMENT: usize = 16;

/// Staging memory of one thread, and the stream that copies from and to it.
pub(crate) struct Mover {
    staging: Staging,
    /// Bytes in use.
    used: usize,
    /// Whether there are copies that nobody waited for.
    is_open: bool,
}

enum Staging {
    Pinned(Lane),
    Own(Box<[u8]>),
}

impl Mover {
    /// Makes one; without a context, for memory of this process alone.
    pub(crate) fn new(context: Option<&Context>) -> Result<Self, NetworkError> {
        let staging = match context {
            Some(context) => Staging::Pinned(context.lane(STAGING)?),
            None => Staging::Own(vec![0; STAGING].into()),
        };
        Ok(Self {
            staging,
            used: 0,
            is_open: false,
        })
    }

    fn staged(&mut self) -> &mut [u8] {
        match &mut self.staging {
            // SAFETY: it is this lane's own memory, initialized or not looked at, and no copy is under way in
            // the part that is used: each part is handed out once between two waits.
            Staging::Pinned(lane) => unsafe {
                let (memory, bytes) = lane.pinned();
                std::slice::from_raw_parts_mut(memory, bytes)
            },
            Staging::Own(memory) => memory,
        }
    }

    /// Whether so many bytes can be staged before the next wait.
    pub(crate) const fn has_room(&self, bytes: usize) -> bool {
        bytes <= STAGING - self.used
    }

    /// A free part of the staging memory; waits for copies if there is none.
    fn room(&mut self, bytes: usize) -> Result<Range<usize>, NetworkError> {
        if bytes > STAGING {
            let text = format!("{bytes} bytes are more than the {STAGING} of the staging memory");
            return Err(NetworkError::Cuda(text));
        }
        if !self.has_room(bytes) {
            self.wait()?;
        }
        let range = self.used..self.used + bytes;
        self.used = range.end.next_multiple_of(ALIGNMENT).min(STAGING);
        Ok(range)
    }

    /// Writes bytes. They are there after the next [`Self::wait`].
    ///
    /// # Safety
    /// There is memory to write, in this place, until then.
    pub(crate) unsafe fn write(
        &mut self,
        to: u64,
        bytes: &[u8],
        place: Place,
    ) -> Result<(), NetworkError> {
        let (Place::Gpu, Staging::Pinned(_)) = (place, &self.staging) else {
            // SAFETY: as the caller promises.
            unsafe { store(to, bytes) };
            return Ok(());
        };
        let range = self.room(bytes.len())?;
        let staged = &mut self.staged()[range];
        staged.copy_from_slice(bytes);
        let from = staged.as_ptr() as u64;
        // SAFETY: as the caller promises, and the staged bytes are handed out once.
        unsafe { self.copy(to, from, bytes.len()) }
    }

    /// Reads bytes, which [`Self::get`] has after the next [`Self::wait_for_reads`].
    ///
    /// # Safety
    /// There is memory to read, in this place, until then.
    pub(crate) unsafe fn read(
        &mut self,
        from: u64,
        bytes: usize,
        place: Place,
    ) -> Result<Range<usize>, NetworkError> {
        let range = self.room(bytes)?;
        let is_pinned = matches!(self.staging, Staging::Pinned(_));
        let staged = &mut self.staged()[range.clone()];
        if place == Place::Gpu && is_pinned {
            let to = staged.as_mut_ptr() as u64;
            // SAFETY: as the caller promises, and the staged bytes are handed out once.
            unsafe { self.copy(to, from, bytes)? };
        } else {
            // SAFETY: as the caller promises.
            unsafe { load(from, staged) };
        }
        Ok(range)
    }

    /// Bytes that were read.
    pub(crate) fn get(&mut self, range: Range<usize>) -> &[u8] {
        &self.staged()[range]
    }

    /// # Safety
    /// So many bytes can be read and written there until the next wait.
    unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), NetworkError> {
        self.is_open = true;
        match &self.staging {
            // SAFETY: as the caller promises.
            Staging::Pinned(lane) => unsafe { lane.copy(to, from, bytes) },
            Staging::Own(_) => Ok(()),
        }
    }

    /// Waits for all copies, and keeps what was read.
    pub(crate) fn wait_for_reads(&mut self) -> Result<(), NetworkError> {
        fence(Ordering::SeqCst);
        if let (Staging::Pinned(lane), true) = (&self.staging, self.is_open) {
            lane.wait()?;
        }
        self.is_open = false;
        Ok(())
    }

    /// Waits for all copies. The staging memory is free then.
    pub(crate) fn wait(&mut self) -> Result<(), NetworkError> {
        self.wait_for_reads()?;
        self.used = 0;
        Ok(())
    }
}

/// Bytes before the first aligned word.
const fn before_word(at: u64, bytes: usize) -> usize {
    let before = (at.wrapping_neg() % 8) as usize;
    if before < bytes { before } else { bytes }
}

/// Stores bytes of host memory, aligned words as a whole.
///
/// # Safety
/// There is memory to write. Others use it by atomic operations alone, or not at the same time.
unsafe fn store(to: u64, bytes: &[u8]) {
    let (head, rest) = bytes.split_at(before_word(to, bytes.len()));
    let (words, tail) = rest.as_chunks::<8>();
    let at = to as *mut u8;
    // SAFETY: all offsets are below the length, and words are aligned.
    unsafe {
        let byte = |offset: usize, value: u8| {
            (*at.add(offset).cast::<AtomicU8>()).store(value, Ordering::Relaxed);
        };
        head.iter()
            .enumerate()
            .for_each(|(i, value)| byte(i, *value));
        for (i, word) in words.iter().enumerate() {
            let word_at = at.add(head.len() + 8 * i).cast::<AtomicU64>();
            (*word_at).store(u64::from_ne_bytes(*word), Ordering::Release);
        }
        let behind = bytes.len() - tail.len();
        tail.iter()
            .enumerate()
            .for_each(|(i, value)| byte(behind + i, *value));
    }
}

/// Loads bytes of host memory, aligned words as a whole.
///
/// # Safety
/// There is memory to read. Others use it by atomic operations alone, or not at the same time.
unsafe fn load(from: u64, into: &mut [u8]) {
    let length = into.len();
    let (head, rest) = into.split_at_mut(before_word(from, length));
    let behind = head.len();
    let (words, tail) = rest.as_chunks_mut::<8>();
    let at = from as *const u8;
    // SAFETY: all offsets are below the length, and words are aligned.
    unsafe {
        let byte = |offset: usize| (*at.add(offset).cast::<AtomicU8>()).load(Ordering::Relaxed);
        head.iter_mut()
            .enumerate()
            .for_each(|(i, into)| *into = byte(i));
        for (i, word) in words.iter_mut().enumerate() {
            let word_at = at.add(behind + 8 * i).cast::<AtomicU64>();
            *word = (*word_at).load(Ordering::Acquire).to_ne_bytes();
        }
        let offset = length - tail.len();
        tail.iter_mut()
            .enumerate()
            .for_each(|(i, into)| *into = byte(offset + i));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_any_place_and_length_are_moved() {
        let mut mover = Mover::new(None).unwrap();
        let source: Vec<u8> = (0..64).collect();
        for start in 0..9 {
            for length in 0..40 {
                let mut target = [0xff_u8; 64];
                let bytes = &source[start..start + length];
                let at = target.as_mut_ptr() as u64 + start as u64;
                // SAFETY: the target has 64 bytes, and nobody else uses it.
                unsafe { mover.write(at, bytes, Place::Host).unwrap() };
                mover.wait().unwrap();
                assert_eq!(&target[start..start + length], bytes);
                assert!(target[..start].iter().all(|byte| *byte == 0xff));
                assert!(target[start + length..].iter().all(|byte| *byte == 0xff));
                // SAFETY: as above.
                let range = unsafe { mover.read(at, length, Place::Host).unwrap() };
                mover.wait_for_reads().unwrap();
                assert_eq!(mover.get(range), bytes);
            }
        }
    }

    #[test]
    fn more_than_the_staging_memory_is_refused() {
        let mut mover = Mover::new(None).unwrap();
        assert!(mover.room(STAGING + 1).is_err());
        assert_eq!(mover.room(STAGING).unwrap(), 0..STAGING);
        assert!(!mover.has_room(1));
        assert_eq!(mover.room(8).unwrap(), 0..8);
    }
}
