//! Shapes on the ranks of a group: a new one every hundred rounds.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferry::Config;

use super::tally::{Tally, name_of};
use super::{Course, LONGEST, SoakArgs, conclude};
use crate::group::{GroupKind, GroupOptions, OpenGroup, gpus, open};
use crate::kernel_files::KernelFiles;
use crate::sharing;
use ferry_rig::verify::Oracle;
use ferry_rig::{Case, Dice, Session, factors, gpu_case, some_keep_rows};

/// Longest wait of a kernel, of ranks that have a GPU each.
const DEADLINE: Duration = Duration::from_secs(20);
/// Rounds of a shape. Its problems take turns, in outputs that are poisoned before each.
const ROUNDS: usize = 100;

/// Opens the group. Collective.
pub fn open_group(args: &SoakArgs) -> Result<OpenGroup> {
    let found = match args.kind() {
        GroupKind::Simulated => 4,
        _ => gpus(),
    };
    if let Some(wanted) = args.gpus {
        ensure!(wanted <= found, "--gpus {wanted}: this machine has {found}");
    }
    open(&GroupOptions {
        kind: args.kind(),
        ranks: args.gpus.or(args.ranks).unwrap_or(found),
        seed: 0,
        args: args.group_args.clone(),
        files: KernelFiles::default(),
    })
}

/// Runs seeds until the time is up, from the first process's `first` on. An error if a round was wrong.
pub fn run(args: &SoakArgs, first: u64) -> Result<()> {
    let mut open = open_group(args)?;
    let all = (open.gather)(&first.to_le_bytes())?;
    let first = u64::from_le_bytes(all[0][..].try_into()?);
    let course = Course::new(args, first, open.scaled(LONGEST));
    let ranks = open.group.ranks() as usize;
    let node = args.group_args.node.unwrap_or(ranks);
    ensure!(
        node > 0 && ranks.is_multiple_of(node),
        "--node {node}: does not divide the {ranks} ranks"
    );
    let machine = introduce(&open, first)?;
    let (is_over, is_first) = (AtomicBool::new(false), open.is_first());
    let lost = std::thread::scope(|scope| {
        scope.spawn(|| course.watch(args, is_first, || is_over.load(Ordering::Acquire)));
        // Other processes are talked to from the thread that joined them, as MPI wants it.
        let lost = work(&course, &mut open, node);
        is_over.store(true, Ordering::Release);
        lost
    });
    lost?;
    if open.is_first() {
        conclude(course, args, &machine)?;
    } else if let Some((seed, why)) = &course.lock().failure {
        bail!("seed {seed}: {why}");
    }
    Ok(open.group.close()?)
}

/// Says what is run. Gives the machine's name.
fn introduce(open: &OpenGroup, first: u64) -> Result<String> {
    let (group, ranks) = (&open.group, open.group.ranks() as usize);
    let name = group.device(group.local_ranks()[0])?.name();
    if open.is_first() {
        println!(
            "{} group of {ranks} ranks, rank 0 is {name}, seeds from {first}",
            group.name()
        );
        if let Some(title) = sharing::title(open.ranks_per_gpu) {
            println!("  {title}");
        }
    }
    let model = name.split(" (").next().unwrap_or_default();
    Ok(match open.ranks_per_gpu {
        1 => format!("{ranks} x {model}"),
        shared => format!("{ranks} ranks on {} x {model}", ranks.div_ceil(shared)),
    })
}

/// Runs seeds for as long as no process has enough. An error if another process is lost.
fn work(course: &Course, open: &mut OpenGroup, node: usize) -> Result<()> {
    let open = RefCell::new(open);
    let mut lost = Ok(());
    let goes_on = || match (open.borrow_mut().gather)(&[u8::from(course.goes_on())]) {
        Ok(all) => all.iter().all(|one| one == &[1]),
        Err(error) => {
            lost = Err(error);
            false
        }
    };
    course.work_while(goes_on, |seed| {
        let tally = shape(&mut open.borrow_mut(), seed, node, ROUNDS);
        tally.map_err(|error| format!("{error:#}"))
    });
    lost
}

/// Rounds of a seed's shape on nodes of so many ranks, each compared. Collective.
pub fn shape(open: &mut OpenGroup, seed: u64, node: usize, rounds: usize) -> Result<Tally> {
    let case = some_keep_rows(gpu_case(seed, open.group.ranks() as usize, node));
    let outcome = rounds_of(open, &case, rounds);
    outcome.with_context(|| format!("{case:?}"))
}

fn rounds_of(open: &mut OpenGroup, case: &Case, rounds: usize) -> Result<Tally> {
    let mut dice = Dice::new(case.seed);
    let problems = case.problems();
    let scale = factors(case.experts, 0);
    let compared = case.compared();
    let oracle = |problem| Oracle::of(problem, &scale, case.format, compared);
    let oracles: Vec<_> = problems.iter().map(oracle).collect();
    let config = Config {
        deadline: open.scaled(DEADLINE),
        max_sms: dice.pick(&[None, None, None, Some(8), Some(16), Some(66)]),
        // Compiling takes seconds.
        specialise: dice.below(32) == 0,
        ..case.config()
    };
    let settings = case.settings(config, &problems);
    let session = Session::new(&open.group, &settings).map_err(Into::into);
    let mut session = open.agree(session)?;
    let mut tally = Tally::default();
    let result = (0..rounds).try_for_each(|round| -> Result<()> {
        let which = round % problems.len();
        let (problem, oracle) = (&problems[which], &oracles[which]);
        let context = || format!("round {round}, {settings:?}");
        session.give_up_before_rounds(case.gives_up(round % 64));
        session.count_on_host(case.counts);
        session.set_deadlines(|| dice.pick(&[1, 2, 8]) * config.deadline)?;
        let outputs = session.round(problem, &scale).with_context(context)?;
        oracle
            .verify(config.combine, !settings.apart, &outputs)
            .with_context(context)?;
        let most = case.tokens[which].iter().copied().max().unwrap_or(0);
        tally.add(&Tally::of_round(&name_of(case), most));
        Ok(())
    });
    open.agree(result)?;
    session.close()?;
    Ok(tally.of_one_seed())
}
