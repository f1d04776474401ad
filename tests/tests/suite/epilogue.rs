//! Combines with options on simulated ranks give what the oracle gives, bit for bit: epilogues,
//! results of other elements, late weights, the shared expert's rows.

use ferry::simulator::{Combines, Options as Machine};
use ferry::{Group, TokenFormat};
use ferry_own_epilogue::LimitedWithOffsets;
use ferry_rig::*;

/// Any case whose rows are summed: of all sizes and formats, and rows with inline flags.
fn summed(seed: u64) -> Case {
    let case = match seed % 3 {
        0 => inline_case(seed),
        _ => any_case(seed),
    };
    let formats = TokenFormat::ALL;
    let format = if case.hidden.is_multiple_of(128) {
        formats[seed as usize % formats.len()]
    } else {
        case.format
    };
    Case {
        how: [Return::Reduced, Return::Exact][seed as usize / 3 % 2],
        format,
        options: true,
        shared_expert: false,
        counted: None,
        ..case
    }
}

/// The same with options.
fn with_options(seed: u64, shared_expert: bool) -> Case {
    Case {
        shared_expert,
        finish: Some(Options::any(seed)),
        ..summed(seed)
    }
}

#[test]
fn any_options_1() {
    run_all(0..200, |seed| with_options(seed, false));
}

#[test]
fn any_options_2() {
    run_all(200..400, |seed| with_options(seed, false));
}

/// Every rank has the shared expert's rows of all its tokens: as many of the expert rows as it has
/// tokens, from the first one on.
#[test]
fn with_a_shared_expert() {
    run_all(400..760, |seed| with_options(seed, true));
}

/// An epilogue of a user's own crate: f32 results, of which each is what the epilogue makes of the sum.
#[test]
fn an_epilogue_of_ones_own() {
    for seed in drawn(900..940) {
        let case = summed(seed);
        let machine = Machine {
            combines: Combines::with::<LimitedWithOffsets>(),
            ..case.machine()
        };
        run_own(
            &Group::simulated_with(machine).unwrap(),
            &case,
            case.config(),
        );
    }
}
