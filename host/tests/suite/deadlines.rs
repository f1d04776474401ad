//! The deadline of each call, as its launch has it. That kernels keep it is for the simulator's tests.

use std::sync::Arc;
use std::time::Duration;

use ferry::device::{Args, Launch};
use ferry::error::PlanError;
use ferry::*;

use crate::noted::*;

const STREAM: Stream = Stream::DEFAULT;
/// Calls of two rounds, split, of which one is given up, and of one that is not split.
const CALLS: [&str; 9] = [
    "dispatch_async",
    "dispatch_counts",
    "dispatch_wait",
    "combine_async",
    "combine_wait",
    "dispatch",
    "give_up",
    "dispatch",
    "combine",
];

fn deadline_ns(launch: &Launch) -> u64 {
    match launch.args {
        Args::Dispatch(with) => with.args.common.deadline_ns,
        Args::Combine(with) => with.args.common.deadline_ns,
        Args::Counts(args) => args.common.deadline_ns,
        Args::GiveUp(args) => args.common.deadline_ns,
        Args::Links(_) | Args::Silu(_) => panic!("a kernel that nobody asked for"),
    }
}

/// Makes all of [`CALLS`], each after `before`.
fn call_all(rank: &mut Communicator, mut before: impl FnMut(&mut Communicator)) {
    let (input, output) = empty_tensors(rank);
    let experts = CombineInput::new(output.tokens.unwrap());
    let sums = CombineOutput::Apart(Tensor::contiguous(memory(8192), DataType::Bf16, [2, 1, 8]));
    for call in CALLS {
        before(rank);
        let made = match call {
            "dispatch_async" => rank.dispatch_async(STREAM, &input),
            "dispatch_counts" => rank.dispatch_counts(STREAM),
            "dispatch_wait" => rank.dispatch_wait(STREAM, &output),
            "combine_async" => rank.combine_async(STREAM, &experts, &sums),
            "combine_wait" => rank.combine_wait(STREAM),
            "dispatch" => rank.dispatch(STREAM, &input, &output),
            "give_up" => rank.give_up(STREAM),
            _ => rank.combine(STREAM, &experts, &sums),
        };
        made.unwrap_or_else(|error| panic!("{call}: {error}"));
    }
}

#[test]
fn each_call_has_the_deadline_that_was_set_before_it() {
    let notes = Arc::<Notes>::default();
    let mut rank = start(&notes, 2, config()).unwrap();
    let planned = rank.plan().config().deadline;
    assert_eq!(rank.deadline(), planned);
    let day = Duration::from_secs(24 * 60 * 60);
    let (mut set, mut wanted) = ((0..).map(Duration::from_secs), Vec::new());
    call_all(&mut rank, |rank| {
        // The plan's at first, then the most, then another one each time.
        let deadline = match (wanted.len(), set.next()) {
            (1, _) => Some(day),
            (_, next) => next.filter(|next| !next.is_zero()),
        };
        rank.set_deadline(deadline).unwrap();
        wanted.push(deadline.unwrap_or(planned));
        assert_eq!(rank.deadline(), wanted[wanted.len() - 1]);
    });
    rank.set_deadline(None).unwrap();
    call_all(&mut rank, |rank| wanted.push(rank.deadline()));
    let launches = notes.launches.lock().unwrap().clone();
    let found: Vec<_> = launches.iter().map(deadline_ns).collect();
    let wanted: Vec<_> = (wanted.iter().map(|each| each.as_nanos() as u64)).collect();
    assert_eq!(found, wanted);
    assert_eq!(&wanted[9..], [7_000_000; 9]);
    rank.close().unwrap();
}

#[test]
fn a_deadline_of_a_call_is_refused_as_the_plan_refuses_it() {
    let notes = Arc::<Notes>::default();
    let mut rank = start(&notes, 2, config()).unwrap();
    let set = Duration::from_secs(3);
    rank.set_deadline(Some(set)).unwrap();
    let too_long = Duration::from_nanos(24 * 60 * 60 * 1_000_000_000 + 1);
    for refused in [Duration::ZERO, too_long, Duration::MAX] {
        let found = rank.set_deadline(Some(refused)).unwrap_err();
        let Error::Deadline(problem) = &found else {
            panic!("{found:?}");
        };
        let planned = Config {
            deadline: refused,
            ..config()
        };
        let Err(Error::Plan(PlanError { problems })) = start(&notes, 2, planned).map(drop) else {
            panic!("a plan with a deadline of {refused:?}");
        };
        assert_eq!(problems.iter().collect::<Vec<_>>(), [problem]);
        let text = found.to_string();
        assert!(
            text.starts_with("the deadline of later calls stays as it was: deadline is "),
            "{text}"
        );
        assert_eq!(rank.deadline(), set);
    }
    rank.close().unwrap();
}
