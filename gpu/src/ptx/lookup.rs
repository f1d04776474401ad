//! A table of numbers in a block's shared memory.

use core::arch::asm;

use super::thread;

/// Bytes of the table.
pub const BYTES: u32 = 32_768;

const _: () = assert!(BYTES == 32768, "as many bytes are declared below");

/// Shared memory for a table.
#[derive(Clone, Copy)]
pub struct Storage {
    base: u32,
}

/// A table that no longer changes.
#[derive(Clone, Copy)]
pub struct LookupTable {
    base: u32,
}

impl Storage {
    /// Declares the memory. Called once in a kernel.
    #[inline(always)]
    pub fn declare() -> Self {
        let base: u32;
        // SAFETY: declares shared memory of the block, as many bytes as above, and takes its address.
        unsafe {
            asm!("{{ .shared .align 16 .b8 ferry_table[32768]; mov.u32 {}, ferry_table; }}",
                out(reg32) base, options(nostack, preserves_flags));
        }
        Self { base }
    }

    /// Fills the table with `number` of 0, 1 and so on, `COUNT` of them. Called once in a launch, by
    /// all threads of the block.
    #[inline(always)]
    pub fn fill<const COUNT: u32>(self, number: impl Fn(u32) -> f32) -> LookupTable {
        const { assert!(4 * COUNT <= BYTES) };
        let mut index = thread::thread();
        while index < COUNT {
            // SAFETY: inside the table; nobody else writes there.
            unsafe {
                asm!("st.shared.f32 [{}], {};", in(reg32) self.base + 4 * index,
                    in(reg32) number(index), options(nostack, preserves_flags));
            }
            index += thread::threads();
        }
        thread::block_barrier();
        let mut base = self.base;
        // SAFETY: no instruction. It is not `pure`, so it stays after the barrier, and so do the loads from
        // its result.
        unsafe { asm!("// {}", inout(reg32) base, options(nostack, preserves_flags)) };
        LookupTable { base }
    }
}

impl LookupTable {
    /// `ld.shared`: the number `offset` bytes from the start.
    ///
    /// # Safety
    /// `offset` is four times the index of a number that was filled in.
    #[inline(always)]
    pub unsafe fn at(self, offset: u32) -> f32 {
        let number;
        // SAFETY: the offset of a filled-in number: documented above; `pure` and `nomem` hold because nobody
        // writes there any more.
        unsafe {
            asm!("ld.shared.f32 {}, [{}];", out(reg32) number, in(reg32) self.base + offset,
                options(pure, nomem, nostack, preserves_flags));
        }
        number
    }
}
