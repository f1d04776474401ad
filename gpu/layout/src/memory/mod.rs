//! The memories that kernels work in, and the place of each row and word: the window that peers write, the
//! rows of a dispatch in it, this rank's own workspace, and the table that a block has of a small batch.

pub mod block_histogram;
pub mod dispatch_row;
pub mod row_groups;
pub mod window;
pub mod workspace;
