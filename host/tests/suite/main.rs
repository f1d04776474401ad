//! All tests of the library through its public interface, in one program: to link each file apart takes
//! longer than to run it.

mod books;
mod combine_options;
mod config_files;
mod counts;
mod deadlines;
mod descriptors;
mod downloads;
mod encoded;
mod examples;
mod fault_peers;
mod faults;
mod graphs;
mod holders;
mod kept_ids;
mod killed;
mod leaks;
mod lifecycle;
mod links;
mod local_ranks;
mod noted;
mod order;
mod overlaps;
mod padded;
mod pointers;
mod racing;
mod recovery;
mod refusals;
mod rounds;
mod rows;
mod rows_refused;
mod shared_gpu;
mod support;
mod teardown;
