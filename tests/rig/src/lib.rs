//! The one driver of rounds: their cases and inputs, the tensors of a rank, calls by half, and results beside
//! the oracle's. The suites, the benchmark, replays, soak and damaged rounds all use it.

#[cfg(feature = "suites")]
mod case;
#[cfg(feature = "suites")]
mod dice;
#[cfg(feature = "suites")]
mod draw;
#[cfg(feature = "suites")]
mod draw_rows;
mod encoding;
#[cfg(feature = "suites")]
mod expected;
#[cfg(feature = "suites")]
mod expected_rows;
#[cfg(feature = "suites")]
mod flags;
pub mod formats;
#[cfg(feature = "suites")]
mod graphs;
mod inputs;
mod local_rank;
#[cfg(feature = "suites")]
mod options;
#[cfg(feature = "suites")]
mod own;
#[cfg(feature = "suites")]
mod run;
#[cfg(feature = "suites")]
mod seeds;
mod session;
mod settings;
#[cfg(feature = "suites")]
mod specials;
mod tensors;
pub mod verify;

#[cfg(feature = "suites")]
pub use {
    case::Case,
    dice::Dice,
    draw::{any_case, gpu_case, inline_case, local_case, padded_case},
    draw_rows::{ROW_FORMATS, ROW_LAYOUTS, any_rows_case, rows_case, some_keep_rows},
    flags::{GroupFlags, Places},
    graphs::Graphs,
    options::Options,
    own::run_own,
    run::{Outcome, Run, caught, run_all},
    seeds::{choose, drawn, drawn_and, draws_all},
};
pub use {
    inputs::{Return, factors, problem},
    local_rank::LocalRank,
    session::{Phases, Session, strict, takes_weights},
    settings::{Settings, Turn},
    tensors::{HALVES, Room, Tensors},
};
