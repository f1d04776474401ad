//! All tests of the programs and of the kernels' protocol in the simulator, in one program: to link each file
//! apart takes longer than most of them run.

mod aligned;
mod bad_inputs;
mod counts;
mod damaged;
mod decoded;
mod demo;
mod epilogue;
mod exact;
mod explain;
mod faults;
mod given_up;
mod gpu_suite;
mod help;
mod local;
mod many_ranks;
mod out_of_turn;
mod overflow;
mod padded;
mod pass_through;
mod patience;
mod reference;
mod replay;
mod rig;
mod rows;
mod seeds;
mod silu;
mod simulated;
mod verify;
