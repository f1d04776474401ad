//! Words that the host hands to a launch: the arguments of each kernel, the options that follow them, the
//! tables and epilogues that these name, and the fingerprint by which host and kernels find that they were
//! built from different layouts.

pub mod any_args;
pub mod args;
pub mod encoded;
pub mod epilogue;
pub mod fingerprint;
pub mod group_tables;
pub mod links;
pub mod options;
