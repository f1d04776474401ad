//! Commands of the front door that must start soon after a checkout: the demo and the quick tests. `xtask`
//! has all others, and takes a minute to compile.

mod cargo;
mod demo;
mod lines;
mod log;
mod printed;
pub mod quick;
mod screen;
mod suites;
mod watched;

pub use cargo::{WORKSPACE_FEATURES, cargo, root, target_dir};
pub use demo::demo;
pub use log::Log;
pub use screen::{Screen, time};
pub use suites::{Suites, Tally};
pub use watched::build;
