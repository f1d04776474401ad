//! Puts to ranks of other nodes, on a GPU.

use ferry_layout::{Arguments, ByteOffset};
use ferry_protocol::{Put, Puts};

use super::Gpu;
use crate::ptx::{memory, thread};
use crate::shmem;

impl<A: Arguments, const SHMEM: bool> Puts for Gpu<'_, A, SHMEM> {
    #[inline(always)]
    fn has_room(&self) -> bool {
        if !SHMEM {
            return true;
        }
        thread::converge();
        // Lanes look at different times, and all must decide alike.
        thread::ballot(shmem::has_room()) == u32::MAX
    }

    #[inline(always)]
    fn stage(&self, at: ByteOffset, word: u64) {
        // SAFETY: staged words lie inside the own window, which holds 64-bit words there.
        unsafe { memory::store_relaxed_sys(self.window(self.common().rank()) + at.bytes(), word) };
    }

    #[inline(always)]
    fn put_row(&self, put: Put) {
        if SHMEM {
            thread::converge();
            let own = self.window(self.common().rank());
            let (to, from) = (own + put.to.bytes(), own + put.from.bytes());
            // SAFETY: the windows are symmetric, and the staging is rewritten only in a later round: that of
            // dispatch after every peer has returned its credit for this one, that of combine after every
            // peer has sent the later round's counts, after it had all rows of this one.
            unsafe { shmem::put_row(put.peer.0, to, from, put.bytes) };
        }
    }

    #[inline(always)]
    fn put_words(&self, put: Put) {
        if SHMEM {
            let own = self.window(self.common().rank());
            let (to, from) = (own + put.to.bytes(), own + put.from.bytes());
            // SAFETY: the windows are symmetric, and words are staged again only after they have arrived, as
            // rows are.
            unsafe { shmem::put_words(put.peer.0, to, from, put.bytes) };
        }
    }

    #[inline(always)]
    fn fence_puts(&self) {
        if SHMEM {
            // Rows for peers that NVSHMEM has mapped are stores of all lanes.
            thread::converge();
            memory::fence_acq_rel_sys();
            thread::converge();
            if self.lane == 0 {
                // SAFETY: the host registered the module with NVSHMEM.
                unsafe { shmem::fence() };
            }
            thread::converge();
        }
    }
}
