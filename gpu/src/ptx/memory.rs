//! Loads, stores, atomics and fences in global memory.
//!
//! `.nc` loads are for memory that nobody writes from before the launch to its end. That excludes the user's
//! tensors if the launch may begin before the kernel before it has ended: the compiler and the assembler may
//! move such a load to before the wait for that kernel.
//!
//! # Safety
//!
//! Every function takes a generic address in global memory (a device's, a mapped peer's, or mapped host
//! memory), aligned to the access, inside a live allocation. Races with other accesses are the protocol's
//! responsibility: see `ferry-protocol`.

use core::arch::asm;

use ferry_protocol::LANES;

/// Sixteen bytes: the widest access of one lane.
pub type Vector = [u32; 4];

/// Bytes that the lanes of a warp move with one instruction.
pub const WARP_BYTES: u32 = LANES * size_of::<Vector>() as u32;

/// `ld.global.nc`, one word: memory that nobody writes while the kernel runs.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn load_constant_u32(address: u64) -> u32 {
    let value;
    // SAFETY: `address` is aligned, live and in global memory: see the module. The memory does not
    // change, so `pure` and `nomem` hold.
    unsafe {
        asm!("ld.global.nc.u32 {}, [{}];", out(reg32) value, in(reg64) address,
            options(pure, nomem, nostack, preserves_flags));
    }
    value
}

/// `ld.global.nc`, a double word: memory that nobody writes while the kernel runs.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn load_constant_u64(address: u64) -> u64 {
    let value;
    // SAFETY: `address` is aligned, live and in global memory: see the module. The memory does not
    // change, so `pure` and `nomem` hold.
    unsafe {
        asm!("ld.global.nc.u64 {}, [{}];", out(reg64) value, in(reg64) address,
            options(pure, nomem, nostack, preserves_flags));
    }
    value
}

/// `ld.global`, one word, weak: ordered by an acquire before it.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn load_u32(address: u64) -> u32 {
    let value;
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("ld.global.u32 {}, [{}];", out(reg32) value, in(reg64) address,
            options(nostack, preserves_flags));
    }
    value
}

/// `ld.global`, one word, if `active`, else 0.
///
/// # Safety
/// See the module; `address` may be anything if not `active`.
#[inline(always)]
pub unsafe fn load_u32_if(address: u64, active: bool) -> u32 {
    let mut value = 0;
    // SAFETY: if `active`, `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {}, 0; @p ld.global.u32 {}, [{}]; }}",
            in(reg32) active as u32, inout(reg32) value, in(reg64) address,
            options(nostack, preserves_flags));
    }
    value
}

/// `st.global`, one word, weak: ordered by a release after it.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn store_u32(address: u64, value: u32) {
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("st.global.u32 [{}], {};", in(reg64) address, in(reg32) value,
            options(nostack, preserves_flags));
    }
}

/// `ld.relaxed.sys.global`, one word, which a peer may be writing.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn load_relaxed_u32(address: u64) -> u32 {
    let value;
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("ld.relaxed.sys.global.u32 {}, [{}];", out(reg32) value, in(reg64) address,
            options(nostack, preserves_flags));
    }
    value
}

/// `st.relaxed.sys.global`, one word, which a peer may poll.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn store_relaxed_u32(address: u64, value: u32) {
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("st.relaxed.sys.global.u32 [{}], {};", in(reg64) address, in(reg32) value,
            options(nostack, preserves_flags));
    }
}

/// `ld.global.nc.L1::no_allocate.v4`, if `active`, else zeros: read once, written by nobody
/// while the kernel runs.
///
/// # Safety
/// See the module; `address` may be anything if not `active`.
#[inline(always)]
pub unsafe fn load_constant_vector(address: u64, active: bool) -> Vector {
    let [mut a, mut b, mut c, mut d] = [0u32; 4];
    // SAFETY: if `active`, `address` is aligned, live and in global memory: see the module. The memory does
    // not change, so `pure` and `nomem` hold.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {}, 0;",
            "@p ld.global.nc.L1::no_allocate.v4.u32 {{{}, {}, {}, {}}}, [{}]; }}",
            in(reg32) active as u32, inout(reg32) a, inout(reg32) b, inout(reg32) c,
            inout(reg32) d, in(reg64) address,
            options(pure, nomem, nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// `ld.global.v4`, if `active`, else zeros: weak. A lane that reads 32 bytes in two halves finds the
/// second in the L1 cache.
///
/// # Safety
/// See the module; `address` may be anything if not `active`.
#[inline(always)]
pub unsafe fn load_or_zeros(address: u64, active: bool) -> Vector {
    let [mut a, mut b, mut c, mut d] = [0u32; 4];
    // SAFETY: if `active`, `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {}, 0;",
            "@p ld.global.v4.u32 {{{}, {}, {}, {}}}, [{}]; }}",
            in(reg32) active as u32, inout(reg32) a, inout(reg32) b, inout(reg32) c,
            inout(reg32) d, in(reg64) address,
            options(nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// `ld.global.nc.v4`, if `active`, else arbitrary values. Written by nobody while the kernel runs.
///
/// # Safety
/// See the module; `address` may be anything if not `active`.
#[inline(always)]
pub unsafe fn load_constant_or_any(address: u64, active: bool) -> Vector {
    let (a, b, c, d);
    // SAFETY: if `active`, `address` is aligned, live and in global memory: see the module. The memory does
    // not change, so `pure` and `nomem` hold.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {}, 0;",
            "@p ld.global.nc.v4.u32 {{{}, {}, {}, {}}}, [{}]; }}",
            in(reg32) active as u32, out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d,
            in(reg64) address, options(pure, nomem, nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// `ld.global.L1::no_allocate.v4`, if `active`, else zeros: weak, ordered by an acquire before it.
///
/// # Safety
/// See the module; `address` may be anything if not `active`.
#[inline(always)]
pub unsafe fn load_vector(address: u64, active: bool) -> Vector {
    let [mut a, mut b, mut c, mut d] = [0u32; 4];
    // SAFETY: if `active`, `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {}, 0;",
            "@p ld.global.L1::no_allocate.v4.u32 {{{}, {}, {}, {}}}, [{}]; }}",
            in(reg32) active as u32, inout(reg32) a, inout(reg32) b, inout(reg32) c,
            inout(reg32) d, in(reg64) address,
            options(nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// `ld.global.v4`, weak. Without a predicate, so that nothing waits for it before its use.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn load_whole_vector(address: u64) -> Vector {
    let (a, b, c, d);
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("ld.global.v4.u32 {{{}, {}, {}, {}}}, [{}];", out(reg32) a, out(reg32) b,
            out(reg32) c, out(reg32) d, in(reg64) address, options(nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// `ld.relaxed.sys.global.v4`, if `active`, else zeros: four words that peers write, each for itself
/// (PTX ISA, "Vector Data-types" of the memory consistency model).
///
/// # Safety
/// See the module; `address` may be anything if not `active`.
#[inline(always)]
pub unsafe fn load_relaxed_vector(address: u64, active: bool) -> Vector {
    let [mut a, mut b, mut c, mut d] = [0u32; 4];
    // SAFETY: if `active`, `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {}, 0;",
            "@p ld.relaxed.sys.global.v4.u32 {{{}, {}, {}, {}}}, [{}]; }}",
            in(reg32) active as u32, inout(reg32) a, inout(reg32) b, inout(reg32) c,
            inout(reg32) d, in(reg64) address,
            options(nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// `st.global.v4`, if `active`: weak, ordered by a release after it.
///
/// # Safety
/// See the module; `address` may be anything if not `active`.
#[inline(always)]
pub unsafe fn store_vector(address: u64, value: Vector, active: bool) {
    let [a, b, c, d] = value;
    // SAFETY: if `active`, `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {}, 0;",
            "@p st.global.v4.u32 [{}], {{{}, {}, {}, {}}}; }}",
            in(reg32) active as u32, in(reg64) address, in(reg32) a, in(reg32) b, in(reg32) c,
            in(reg32) d, options(nostack, preserves_flags));
    }
}

/// `st.relaxed.sys.global.v4`, if `active`: four words that a peer may poll, each for itself.
///
/// # Safety
/// See the module; `address` may be anything if not `active`.
#[inline(always)]
pub unsafe fn store_relaxed_vector(address: u64, value: Vector, active: bool) {
    let [a, b, c, d] = value;
    // SAFETY: if `active`, `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {}, 0;",
            "@p st.relaxed.sys.global.v4.u32 [{}], {{{}, {}, {}, {}}}; }}",
            in(reg32) active as u32, in(reg64) address, in(reg32) a, in(reg32) b, in(reg32) c,
            in(reg32) d, options(nostack, preserves_flags));
    }
}

/// `st.global.v2`, the first half of `value`, if `active`: weak, ordered by a release after it.
///
/// # Safety
/// See the module; `address` may be anything if not `active`.
#[inline(always)]
pub unsafe fn store_pair(address: u64, value: Vector, active: bool) {
    let [a, b, ..] = value;
    // SAFETY: if `active`, `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {}, 0;", "@p st.global.v2.u32 [{}], {{{}, {}}}; }}",
            in(reg32) active as u32, in(reg64) address, in(reg32) a, in(reg32) b,
            options(nostack, preserves_flags));
    }
}

/// Stores like [`store_u32`] a word whose neighbours in memory will soon be written by others: asks the L2
/// cache to keep the word's line longer than others, so that these arrive before the line is written to
/// memory. A hint, which the line keeps after the kernel (PTX ISA, "createpolicy").
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn store_u32_kept(address: u64, value: u32) {
    let policy: u64;
    // SAFETY: touches no memory.
    unsafe {
        asm!("createpolicy.fractional.L2::evict_last.b64 {}, 1.0;", out(reg64) policy,
            options(pure, nomem, nostack, preserves_flags));
    }
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("st.global.L2::cache_hint.u32 [{}], {}, {};", in(reg64) address, in(reg32) value,
            in(reg64) policy, options(nostack, preserves_flags));
    }
}

/// `st.global`, a half word, weak: ordered by a release after it.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn store_u16(address: u64, value: u16) {
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("st.global.u16 [{}], {};", in(reg64) address, in(reg16) value,
            options(nostack, preserves_flags));
    }
}

/// `st.global`, a byte, weak: ordered by a release after it.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn store_u8(address: u64, value: u8) {
    // SAFETY: `address` is live and in global memory: see the module. There is no register of fewer than
    // 16 bits; the byte is the lower one.
    unsafe {
        asm!("st.global.u8 [{}], {};", in(reg64) address, in(reg16) value as u16,
            options(nostack, preserves_flags));
    }
}

/// Declares a function for one load instruction.
macro_rules! load_u64 {
    ($(#[$doc:meta])* $name:ident, $instruction:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// See the module.
        #[inline(always)]
        pub unsafe fn $name(address: u64) -> u64 {
            let value;
            // SAFETY: `address` is aligned, live and in global memory: see the module.
            unsafe {
                asm!(concat!($instruction, " {}, [{}];"), out(reg64) value, in(reg64) address,
                    options(nostack, preserves_flags));
            }
            value
        }
    };
}

/// Declares a function for one store instruction.
macro_rules! store_u64 {
    ($(#[$doc:meta])* $name:ident, $instruction:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// See the module.
        #[inline(always)]
        pub unsafe fn $name(address: u64, value: u64) {
            // SAFETY: `address` is aligned, live and in global memory: see the module.
            unsafe {
                asm!(concat!($instruction, " [{}], {};"), in(reg64) address, in(reg64) value,
                    options(nostack, preserves_flags));
            }
        }
    };
}

load_u64!(
    /// `ld.acquire.sys.global`.
    load_acquire_sys,
    "ld.acquire.sys.global.u64"
);
load_u64!(
    /// `ld.relaxed.sys.global`.
    load_relaxed_sys,
    "ld.relaxed.sys.global.u64"
);
load_u64!(
    /// `ld.acquire.gpu.global`.
    load_acquire_gpu,
    "ld.acquire.gpu.global.u64"
);
load_u64!(
    /// `ld.relaxed.gpu.global`.
    load_relaxed_gpu,
    "ld.relaxed.gpu.global.u64"
);
store_u64!(
    /// `st.global`, weak: ordered by the end of the kernel.
    store_u64,
    "st.global.u64"
);
store_u64!(
    /// `st.relaxed.sys.global`.
    store_relaxed_sys,
    "st.relaxed.sys.global.u64"
);
store_u64!(
    /// `st.release.gpu.global`.
    store_release_gpu,
    "st.release.gpu.global.u64"
);

/// `atom.acq_rel.gpu.global.add`: the value before.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn add_acq_rel_gpu(address: u64, amount: u64) -> u64 {
    let before;
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("atom.acq_rel.gpu.global.add.u64 {}, [{}], {};", out(reg64) before,
            in(reg64) address, in(reg64) amount, options(nostack, preserves_flags));
    }
    before
}

/// `atom.relaxed.gpu.global.add` of one: the value before.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn increment_relaxed_gpu(address: u64) -> u32 {
    let before;
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("atom.relaxed.gpu.global.add.u32 {}, [{}], 1;", out(reg32) before,
            in(reg64) address, options(nostack, preserves_flags));
    }
    before
}

/// `red.release.gpu.global.add` of one; returns nothing.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn count_release_gpu(address: u64) {
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("red.release.gpu.global.add.u64 [{}], 1;", in(reg64) address,
            options(nostack, preserves_flags));
    }
}

/// `atom.relaxed.gpu.global.max`. Returns the previous value.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn max_relaxed_gpu(address: u64, value: u64) -> u64 {
    let before;
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("atom.relaxed.gpu.global.max.u64 {}, [{}], {};", out(reg64) before,
            in(reg64) address, in(reg64) value, options(nostack, preserves_flags));
    }
    before
}

/// `atom.acq_rel.gpu.global.exch`. Returns the previous value.
///
/// # Safety
/// See the module.
#[inline(always)]
pub unsafe fn exchange_acq_rel_gpu(address: u64, value: u64) -> u64 {
    let before;
    // SAFETY: `address` is aligned, live and in global memory: see the module.
    unsafe {
        asm!("atom.acq_rel.gpu.global.exch.b64 {}, [{}], {};", out(reg64) before,
            in(reg64) address, in(reg64) value, options(nostack, preserves_flags));
    }
    before
}

/// `fence.acq_rel.sys`.
#[inline(always)]
pub fn fence_acq_rel_sys() {
    // SAFETY: a fence touches no memory of its own.
    unsafe { asm!("fence.acq_rel.sys;", options(nostack, preserves_flags)) }
}

/// Loads the word at a place of NVSHMEM's state, which the module has if it is linked with NVSHMEM's code.
#[cfg(feature = "nvshmem")]
#[inline(always)]
pub fn load_nvshmem_state<const PLACE: usize>() -> u64 {
    let word;
    // SAFETY: a load of a constant of the module, which never changes while kernels run.
    unsafe {
        asm!(
            "ld.const.u64 {}, [nvshmemi_device_state_d+{}];",
            out(reg64) word,
            const PLACE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    word
}
