//! Shapes on GPUs: a new one every hundred rounds.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferry::{Capacity, Config, Group};

use super::tally::Tally;
use super::{Course, SoakArgs};
use crate::formats;
use crate::group::{GroupKind, GroupOptions, gpus, open};
use crate::kernel_files::KernelFiles;
use crate::session::{Session, Settings};
use crate::simulated::{Case, Dice, Return, gpu_case};
use crate::verify::{Compared, Oracle, capacity_with};

/// Longest wait of a kernel.
const DEADLINE: Duration = Duration::from_secs(20);
/// Rounds of a shape. Its problems take turns, in outputs that are poisoned before each.
const ROUNDS: usize = 100;

/// Runs seeds until the time is up. Gives the machine's name.
pub fn run(course: &Course, args: &SoakArgs, ranks: usize) -> Result<String> {
    let found = gpus();
    ensure!(ranks <= found, "--gpus {ranks}: this machine has {found}");
    let group = open(&GroupOptions {
        kind: GroupKind::Local,
        ranks,
        seed: 0,
        rendezvous: None,
        rank: None,
        files: KernelFiles::default(),
    })?
    .group;
    let name = group.device(group.local_ranks()[0])?.name();
    println!(
        "{ranks} GPUs, rank 0 is {name}, seeds from {}",
        course.first
    );
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            course.work(|seed| shape(&group, seed, ROUNDS).map_err(|error| format!("{error:#}")));
        });
        course.watch(args, || worker.is_finished());
    });
    let model = name.split(" (").next().unwrap_or_default();
    Ok(format!("{ranks} x {model}"))
}

/// Rounds of a seed's shape, each compared.
pub fn shape(group: &Group, seed: u64, rounds: usize) -> Result<Tally> {
    let case = gpu_case(seed, group.ranks() as usize);
    let outcome = rounds_of(group, &case, rounds);
    outcome.with_context(|| format!("{case:?}"))
}

fn rounds_of(group: &Group, case: &Case, rounds: usize) -> Result<Tally> {
    let mut dice = Dice::new(case.seed);
    let problems = case.problems();
    let scale: Vec<f32> = (0..case.experts)
        .map(|expert| 0.75 + (expert % 13) as f32 / 8.0)
        .collect();
    let compared = Compared::with_shared(case.shared_expert);
    let oracle = |problem| Oracle::of(problem, &scale, case.format, compared);
    let oracles: Vec<_> = problems.iter().map(oracle).collect();
    let capacity = problems
        .iter()
        .map(|p| capacity_with(p, case.format, case.shared_expert));
    let capacity = capacity.fold(Capacity::default(), formats::larger);
    let settings = Settings {
        config: Config {
            deadline: DEADLINE,
            max_sms: dice.pick(&[None, None, None, Some(8), Some(16), Some(66)]),
            // Compiling takes seconds.
            specialise: dice.below(32) == 0,
            ..case.config()
        },
        capacity: Capacity {
            scale_blocks: capacity.scale_blocks + case.spare_rows,
            ..formats::with_spare_rows(capacity, case.format, case.spare_rows)
        },
        split: case.is_split(0),
    };
    let weights = case.how != Return::Apart;
    let mut session = Session::new(group, &settings)?;
    let mut tally = Tally::default();
    for round in 0..rounds {
        let which = round % problems.len();
        let (problem, oracle) = (&problems[which], &oracles[which]);
        let context = || format!("round {round}, {settings:?}");
        let outputs = session
            .round(problem, &scale, weights)
            .with_context(context)?;
        oracle
            .verify(settings.config.combine, weights, &outputs)
            .with_context(context)?;
        let most = case.tokens[which].iter().copied().max().unwrap_or(0);
        tally.add(&Tally::of_round(&format!("{:?}", case.format), most));
    }
    session.close()?;
    Ok(tally.of_one_seed())
}
