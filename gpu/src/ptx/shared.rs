//! Loads and stores in the shared memory of a block.
//!
//! # Safety
//!
//! Every function takes a shared address, aligned to the access, inside a declared variable. A loaded word
//! was stored before a barrier of the block, and the address was taken after that barrier; nobody stores
//! there afterwards. So loads are `pure` and `nomem`: the compiler may move them, but not to before the
//! barrier. A word that is added to was stored before a barrier, too. It is loaded after a barrier that
//! follows the last addition, and nobody adds to it afterwards.

use core::arch::asm;

use super::memory::Vector;

/// `st.shared`, one word.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn store_u32(address: u32, word: u32) {
    // SAFETY: `address` is aligned and inside a declared variable: see the module.
    unsafe {
        asm!("st.shared.u32 [{}], {};", in(reg32) address, in(reg32) word,
            options(nostack, preserves_flags));
    }
}

/// `st.shared`, the lowest byte of a word.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn store_u8(address: u32, byte: u32) {
    // SAFETY: `address` is inside a declared variable: see the module.
    unsafe {
        asm!("st.shared.u8 [{}], {};", in(reg32) address, in(reg32) byte,
            options(nostack, preserves_flags));
    }
}

/// `st.shared.v4`.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn store_vector(address: u32, words: Vector) {
    let [a, b, c, d] = words;
    // SAFETY: `address` is aligned and inside a declared variable: see the module.
    unsafe {
        asm!("st.shared.v4.u32 [{}], {{{}, {}, {}, {}}};", in(reg32) address, in(reg32) a,
            in(reg32) b, in(reg32) c, in(reg32) d, options(nostack, preserves_flags));
    }
}

/// `red.shared.add`: adds one to a word.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn count(address: u32) {
    // SAFETY: `address` is that of a word stored before a barrier, and not loaded yet: see the module.
    unsafe {
        asm!("red.relaxed.cta.shared.add.u32 [{}], 1;", in(reg32) address,
            options(nostack, preserves_flags));
    }
}

/// `atom.shared.add`: adds to a word, and returns its previous value.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn add(address: u32, value: u32) -> u32 {
    let before;
    // SAFETY: `address` is that of a word stored before a barrier, and not loaded yet: see the module.
    unsafe {
        asm!("atom.relaxed.cta.shared.add.u32 {}, [{}], {};", out(reg32) before, in(reg32) address,
            in(reg32) value, options(nostack, preserves_flags));
    }
    before
}

/// `ld.shared`, one word.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn load_u32(address: u32) -> u32 {
    let word;
    // SAFETY: `address` was taken after the barrier that follows the word's last store: see the module.
    unsafe {
        asm!("ld.shared.u32 {}, [{}];", out(reg32) word, in(reg32) address,
            options(pure, nomem, nostack, preserves_flags));
    }
    word
}

/// `ld.shared`, one byte.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn load_u8(address: u32) -> u32 {
    let byte;
    // SAFETY: `address` was taken after the barrier that follows the byte's last store: see the module.
    unsafe {
        asm!("ld.shared.u8 {}, [{}];", out(reg32) byte, in(reg32) address,
            options(pure, nomem, nostack, preserves_flags));
    }
    byte
}

/// `ld.shared.v4`.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn load_vector(address: u32) -> Vector {
    let (a, b, c, d);
    // SAFETY: `address` was taken after the barrier that follows the vector's last store: see the module.
    unsafe {
        asm!("ld.shared.v4.u32 {{{}, {}, {}, {}}}, [{}];", out(reg32) a, out(reg32) b,
            out(reg32) c, out(reg32) d, in(reg32) address,
            options(pure, nomem, nostack, preserves_flags));
    }
    [a, b, c, d]
}
