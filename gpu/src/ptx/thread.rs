//! Thread numbers, warp-wide operations, and time.

use core::arch::asm;

// The LLVM intrinsics behind the warp-wide instructions of the same names.
#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn llvm_ballot(mask: u32, value: bool) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn llvm_shuffle_index(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
    fn llvm_shuffle_up(mask: u32, value: u32, distance: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn llvm_shuffle_xor(mask: u32, value: u32, lanes: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.match.any.sync.i32"]
    fn llvm_match_any(mask: u32, value: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umax"]
    fn llvm_reduce_max(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.or"]
    fn llvm_reduce_or(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn llvm_warp_barrier(mask: u32);
    #[cfg(not(ferry_nvvm))]
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
    fn llvm_block_barrier(barrier: u32);
}

/// All lanes of a warp.
const ALL: u32 = u32::MAX;

/// Waits until the kernels before this one in its stream have ended and their writes can be read: a launch
/// may begin before. Does nothing before sm_90, where launches do not.
#[inline(always)]
pub fn wait_for_earlier_kernels() {
    #[cfg(ferry_sm = "90")]
    // SAFETY: waits.
    unsafe {
        asm!("griddepcontrol.wait;", options(nostack, preserves_flags));
    }
}

/// Lets the kernel after this one in its stream begin, after every block of this one has called this. Does
/// nothing before sm_90.
#[inline(always)]
pub fn allow_later_kernels() {
    #[cfg(ferry_sm = "90")]
    // SAFETY: touches no memory.
    unsafe {
        asm!(
            "griddepcontrol.launch_dependents;",
            options(nostack, preserves_flags)
        );
    }
}

/// Declares a function that reads a 32-bit special register that is constant for a thread; for the second
/// code generator by a function of `cuda_std`.
macro_rules! register {
    ($(#[$doc:meta])* $name:ident, $register:literal, $std:ident :: $of_std:ident) => {
        $(#[$doc])*
        #[cfg(ferry_nvvm)]
        #[inline(always)]
        pub fn $name() -> u32 {
            cuda_std::$std::$of_std()
        }

        $(#[$doc])*
        #[cfg(not(ferry_nvvm))]
        #[inline(always)]
        pub fn $name() -> u32 {
            let value;
            // SAFETY: reading a special register touches no memory.
            unsafe {
                asm!(concat!("mov.u32 {}, %", $register, ";"), out(reg32) value,
                    options(pure, nomem, nostack, preserves_flags));
            }
            value
        }
    };
}

register!(
    /// `%tid.x`: the thread's number in its block.
    thread,
    "tid.x",
    thread::thread_idx_x
);
register!(
    /// `%ntid.x`: threads of a block.
    threads,
    "ntid.x",
    thread::block_dim_x
);
register!(
    /// `%ctaid.x`: the block's number.
    block,
    "ctaid.x",
    thread::block_idx_x
);
register!(
    /// `%nctaid.x`: blocks of the launch.
    blocks,
    "nctaid.x",
    thread::grid_dim_x
);
register!(
    /// `%laneid`: the thread's number in its warp.
    lane,
    "laneid",
    warp::lane_id
);

/// `%globaltimer`: nanoseconds, the same clock on all multiprocessors of a GPU.
#[inline(always)]
pub fn global_timer_ns() -> u64 {
    let now;
    // SAFETY: reading a special register touches no memory.
    unsafe { asm!("mov.u64 {}, %globaltimer;", out(reg64) now, options(nostack, preserves_flags)) }
    now
}

/// `vote.sync.ballot`: bit `i` is lane `i`'s value. All lanes.
#[inline(always)]
pub fn ballot(value: bool) -> u32 {
    // SAFETY: all lanes of the warp execute it together.
    unsafe { llvm_ballot(ALL, value) }
}

/// `shfl.sync.idx`: the value of `lane`. All lanes.
#[inline(always)]
pub fn broadcast(value: u32, lane: u32) -> u32 {
    // SAFETY: all lanes of the warp execute it together.
    unsafe { llvm_shuffle_index(ALL, value, lane, 31) }
}

/// `shfl.sync.up`: the value of the lane `distance` below, or the own one. All lanes.
#[inline(always)]
pub fn from_below(value: u32, distance: u32) -> u32 {
    // SAFETY: all lanes of the warp execute it together.
    unsafe { llvm_shuffle_up(ALL, value, distance, 0) }
}

/// `match.any.sync`: the lanes that hold the same value, as bits. All lanes.
#[inline(always)]
pub fn matching(value: u32) -> u32 {
    // SAFETY: all lanes of the warp execute it together.
    unsafe { llvm_match_any(ALL, value) }
}

/// `redux.sync.max`, unsigned: the largest value. All lanes.
#[inline(always)]
pub fn max(value: u32) -> u32 {
    // SAFETY: all lanes of the warp execute it together.
    unsafe { llvm_reduce_max(value, ALL) }
}

/// `shfl.sync.bfly`: the value of the lane whose number differs in the bits of `lanes`. All lanes.
#[inline(always)]
pub fn from_partner(value: u32, lanes: u32) -> u32 {
    // SAFETY: all lanes of the warp execute it together.
    unsafe { llvm_shuffle_xor(ALL, value, lanes, 31) }
}

/// `redux.sync.or`: bits that any lane holds. All lanes.
#[inline(always)]
pub fn union(value: u32) -> u32 {
    // SAFETY: all lanes of the warp execute it together.
    unsafe { llvm_reduce_or(value, ALL) }
}

/// `bar.warp.sync`: orders the memory accesses of the warp's lanes among each other. All lanes.
#[inline(always)]
pub fn converge() {
    // SAFETY: all lanes of the warp execute it together.
    unsafe { llvm_warp_barrier(ALL) }
}

/// `barrier.sync 0`: waits for all threads of the block that have not ended. All threads.
#[inline(always)]
pub fn block_barrier() {
    // libNVVM's LLVM is older than the intrinsic.
    #[cfg(ferry_nvvm)]
    cuda_std::thread::sync_threads();
    #[cfg(not(ferry_nvvm))]
    // SAFETY: all threads of the block execute it together.
    unsafe {
        llvm_block_barrier(0)
    }
}

/// `mov`: copies a register, here and not earlier.
#[inline(always)]
pub fn late(value: u32) -> u32 {
    let copy;
    // SAFETY: copies a register. Not pure, so that it stays where it is, and so does everything that needs
    // its result.
    unsafe {
        asm!("mov.u32 {}, {};", out(reg32) copy, in(reg32) value, options(nostack, preserves_flags));
    }
    copy
}

/// Copies two registers, like [`late`].
#[inline(always)]
pub fn late_u64(value: u64) -> u64 {
    let copy;
    // SAFETY: as in `late`.
    unsafe {
        asm!("mov.u64 {}, {};", out(reg64) copy, in(reg64) value, options(nostack, preserves_flags));
    }
    copy
}

/// `trap`: ends the kernel with an error. No code of Ferry's panics; this is for panics that the compiler
/// cannot rule out.
pub fn trap() -> ! {
    // SAFETY: ends the program.
    unsafe { asm!("trap;", "exit;", options(noreturn, nostack)) }
}
