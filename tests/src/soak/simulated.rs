//! Cases in the simulator, on all processors.

use super::tally::{Tally, name_of};
use super::{Course, SoakArgs};
use ferry_rig::{Dice, Run, any_case, any_rows_case, caught};

/// Runs seeds until the time is up. Gives the machine's name.
pub fn run(course: &Course, args: &SoakArgs) -> String {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!(
        "simulator on {threads} threads, seeds from {}",
        course.first
    );
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| scope.spawn(|| course.work(case)))
            .collect();
        course.watch(args, true, || {
            workers.iter().all(|worker| worker.is_finished())
        });
    });
    String::from("simulator")
}

/// Runs the case of a seed: of one in three, rows stay as they came.
fn case(seed: u64) -> Result<Tally, String> {
    let case = match Dice::new(!seed).below(3) {
        0 => any_rows_case(seed),
        _ => any_case(seed),
    };
    caught(|| Run::of(&case).expect_success())?;
    let mut tally = Tally::default();
    for tokens in &case.tokens {
        let most = tokens.iter().copied().max().unwrap_or(0);
        tally.add(&Tally::of_round(&name_of(&case), most));
    }
    Ok(tally.of_one_seed())
}
