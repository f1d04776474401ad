//! An all-gather of any lengths over the caller's of equal lengths.

use std::ffi::{c_int, c_void};

use ferry::error::BootstrapError;

/// Function of a [`ferry_all_gather`](super::ferry_all_gather) that is not null.
type Function = unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void) -> c_int;

/// The caller's all-gather of equal lengths.
pub(super) struct Gather {
    pub(super) all_gather: Function,
    pub(super) context: *mut c_void,
    pub(super) ranks: usize,
}

// SAFETY: `ferry_all_gather` documents that the function is called from any thread that calls Ferry.
unsafe impl Send for Gather {}

impl Gather {
    /// Gathers every rank's bytes, of any lengths: first the lengths, then bytes padded to the longest.
    pub(super) fn all(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let lengths = self.equal(&(bytes.len() as u64).to_le_bytes())?;
        let lengths: Vec<usize> = lengths
            .as_chunks::<8>()
            .0
            .iter()
            .map(|&length| u64::from_le_bytes(length) as usize)
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest > MOST_BYTES {
            return Err(refused(format!("a rank says that it has {longest} bytes")));
        }
        if longest == 0 {
            return Ok(vec![Vec::new(); self.ranks]);
        }
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let all = self.equal(&padded)?;
        let each = all.chunks_exact(longest).zip(lengths);
        Ok(each
            .map(|(bytes, length)| bytes[..length].to_vec())
            .collect())
    }

    fn equal(&mut self, bytes: &[u8]) -> Result<Vec<u8>, BootstrapError> {
        let mut all = vec![0; bytes.len() * self.ranks];
        // SAFETY: it reads so many bytes and writes as many a rank: documented on `ferry_all_gather`.
        let code = unsafe {
            (self.all_gather)(
                self.context,
                bytes.as_ptr().cast(),
                bytes.len(),
                all.as_mut_ptr().cast(),
            )
        };
        match code {
            0 => Ok(all),
            code => Err(refused(format!("it returned {code}"))),
        }
    }
}

/// Most bytes of a rank: far more than is ever gathered, and little memory even for all ranks.
const MOST_BYTES: usize = 1 << 20;

fn refused(reason: String) -> BootstrapError {
    let call = "the all_gather of the bootstrap";
    BootstrapError::Other { call, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gathers for two ranks that have the same bytes.
    unsafe extern "C" fn echo(
        _: *mut c_void,
        mine: *const c_void,
        bytes: usize,
        all: *mut c_void,
    ) -> c_int {
        for rank in 0..2 {
            // SAFETY: `mine` has `bytes` bytes, and `all` twice as many.
            unsafe {
                all.cast::<u8>()
                    .add(rank * bytes)
                    .copy_from_nonoverlapping(mine.cast(), bytes);
            }
        }
        0
    }

    unsafe extern "C" fn fails(
        _: *mut c_void,
        _: *const c_void,
        _: usize,
        _: *mut c_void,
    ) -> c_int {
        7
    }

    /// Gathers lengths, rank 1's one above the limit, and fails for anything else.
    unsafe extern "C" fn announces_too_many(
        _: *mut c_void,
        mine: *const c_void,
        bytes: usize,
        all: *mut c_void,
    ) -> c_int {
        if bytes != 8 {
            return 7;
        }
        let lengths = [
            mine.cast::<[u8; 8]>(),
            &(MOST_BYTES as u64 + 1).to_le_bytes(),
        ];
        for (rank, length) in lengths.into_iter().enumerate() {
            // SAFETY: `mine` has 8 bytes, and `all` twice as many.
            unsafe { all.cast::<[u8; 8]>().add(rank).write(length.read()) };
        }
        0
    }

    fn gather(all_gather: Function) -> Gather {
        Gather {
            all_gather,
            context: std::ptr::null_mut(),
            ranks: 2,
        }
    }

    #[test]
    fn an_all_gather_of_equal_lengths_will_do() {
        for length in [0, 1, 300] {
            let bytes = vec![3; length];
            assert_eq!(gather(echo).all(&bytes).unwrap(), [bytes.clone(), bytes]);
        }
    }

    #[test]
    fn bytes_of_all_ranks_that_fill_memory_are_refused() {
        let error = gather(announces_too_many).all(&[1]).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("a rank says that it has 1048577 bytes"),
            "{text}"
        );
    }

    #[test]
    fn a_failure_is_told_with_its_number() {
        let error = gather(fails).all(&[1]).unwrap_err().to_string();
        assert!(error.contains("it returned 7"), "{error}");
    }
}
