//! All tests of the layout through its public interface, in one program: to link each file apart takes longer
//! than to run it.

mod bf16;
mod block_histogram;
mod e2m1;
mod e8m0;
mod epoch;
mod fault;
mod fingerprint;
mod formats;
mod fp8;
mod kernel;
mod last_launch;
mod names;
mod real_shapes;
mod row_groups;
mod scale_placement;
mod shapes;
mod silu;
mod support;
mod window;
