//! Cases with the epilogue of a crate of a user's.

use ferry::layout::OutputElement;
use ferry::*;
use ferry_own_epilogue::LimitedWithOffsets;

use super::case::Case;
use super::options::Options;
use super::run::Run;

/// Runs a case with the epilogue of a crate of a user's on a group whose kernels have it: f32
/// results, of which each is what the epilogue makes of the sum.
pub fn run_own(group: &Group, case: &Case, config: Config) {
    let case = Case {
        finish: Some(Options {
            element: OutputElement::F32,
            ..Options::NONE
        }),
        ..case.clone()
    };
    let (limit, hidden) = (1.5, case.hidden);
    let offsets: Vec<f32> = (0..hidden).map(|column| column as f32 / 7.0).collect();
    let mut run = Run::on(group, config, &case, &case.problems(), |tensors, ranks| {
        for (t, rank) in tensors
            .iter_mut()
            .flat_map(|round| round.iter_mut().zip(ranks))
        {
            let offsets = rank.device().upload_tensor([hidden], &offsets).unwrap();
            let value = LimitedWithOffsets {
                offsets: offsets.at.address(),
                limit,
                reserved: 0,
            };
            // SAFETY: the offsets are never freed: documented on `OwnEpilogue::new`.
            let own = unsafe { OwnEpilogue::new(&value) }.unwrap();
            t.expert_rows.epilogue = CombineEpilogue::Own(own);
        }
    });
    for wanted in run.expected.iter_mut().flat_map(|round| &mut round.wanted) {
        for (index, sum) in wanted.as_chunks_mut().0.iter_mut().enumerate() {
            let (token, column) = (index / hidden, index % hidden);
            let limited = f32::from_ne_bytes(*sum).clamp(-limit, limit);
            *sum = (limited + offsets[column] * token as f32).to_ne_bytes();
        }
    }
    run.expect_success();
}
