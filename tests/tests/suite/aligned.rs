//! Aligned experts and tables of their rows, with formats, nodes and tokens as they come. The cases of other
//! programs draw whether they have them; these all do.

use ferry_rig::verify::Groups;
use ferry_rig::{Case, any_case, inline_case, local_case, run_all};

/// A case with padding and tables, of which the seed leaves out some.
fn described(seed: u64, case: Case) -> Case {
    let is_set = |bit: u64| seed >> bit & 1 != 0;
    Case {
        groups: Groups {
            alignment: [128, 2, 8, 256, 16, 64, 4, 32][seed as usize % 8],
            clears_padding: is_set(1) || is_set(3),
            row_sources: is_set(2) || is_set(3),
            m_indices: is_set(0) || is_set(4),
            ..Groups::NONE
        },
        ..case
    }
}

#[test]
fn rows_that_travel() {
    run_all(71_000..71_150, |seed| described(seed, any_case(seed)));
}

#[test]
fn rows_with_inline_flags() {
    run_all(71_200..71_300, |seed| described(seed, inline_case(seed)));
}

#[test]
fn tokens_that_all_ranks_have() {
    run_all(71_400..71_480, |seed| described(seed, local_case(seed)));
}
