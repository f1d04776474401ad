//! Processes that form a node group, and some that cannot: each is a thread here, with a bootstrap of
//! its own over TCP and a simulated GPU. Their handles are addresses.

mod calls;
mod fake;
mod recovery;
mod sharing;

use std::thread;
use std::time::{Duration, Instant};

use fake::*;
use ferry_layout::Rank;

use super::exchange::{Extent, Share, require_whole};
use super::fabric::NodeFabric;
use super::introduction::Place;
use crate::call::buffers::{CombineBuffers, DispatchBuffers};
use crate::call::{CombineInput, DispatchInput};
use crate::communicator::Communicator;
use crate::communicator::close::CloseError;
use crate::error::bootstrap::BootstrapError;
use crate::error::{Error, NodeError};
use crate::group::Group;
use crate::group::bootstrap::function::FnBootstrap;
use crate::group::bootstrap::tcp::TcpBootstrap;
use crate::plan::Plan;
use crate::plan::config::Config;
use crate::tensor::handles::Stream;

/// The step in which the other ranks learned of rank 1's failure.
fn peer_failed<T>(outcome: &Result<T, Error>) -> &'static str {
    match outcome {
        Err(Error::PeerFailed {
            rank: Rank(1),
            step,
        }) => step,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("nothing was heard of rank 1"),
    }
}

/// A communicator of `group`, for one token a rank.
fn begin(group: &Group) -> Result<Communicator, Error> {
    begin_with(group, config(group.ranks()))
}

fn begin_with(group: &Group, config: Config) -> Result<Communicator, Error> {
    let plan = Plan::new(group, config)?;
    Ok(Communicator::new(group, &plan)?.remove(0))
}

/// Each rank's token goes to the next rank's first expert and comes back.
fn round(rank: &mut Communicator) -> Result<(), Error> {
    let (device, plan, stream) = (rank.device().clone(), *rank.plan(), Stream::DEFAULT);
    let number = rank.rank().0;
    let token = [0x3f80 + 16 * number as u16; HIDDEN];
    let expert = (number + 1) % plan.shape().ranks * plan.local_experts() as u32;
    let input = DispatchInput {
        x: device.upload_tensor([1, HIDDEN], &token)?,
        topk_ids: device.upload_tensor([1, 1], &[expert as i32])?,
        topk_weights: None,
        input_scale: None,
        tokens_on_device: None,
        x_scales: None,
        kept_ids: None,
    };
    let (rows, sums) = (
        DispatchBuffers::new(&device, &plan)?,
        CombineBuffers::new(&device, &plan)?,
    );
    rank.dispatch(stream, &input, rows.output())?;
    let experts = CombineInput {
        topk_weights: None,
        ..CombineInput::new(rows.output().tokens()?)
    };
    rank.combine(stream, &experts, &sums.output(1)?)?;
    assert_eq!(rank.synchronize(stream)?.fault(), None);
    let combined: Vec<u16> = device.download_tensor(&sums.output(1)?.rows())?;
    assert_eq!(combined, token);
    Ok(())
}

#[test]
fn a_group_of_processes_passes_rounds_and_gives_everything_back() {
    let node = Node::new(3);
    node.each(|process| {
        let group = process.join(Failure::none())?;
        assert_eq!((group.name(), group.ranks()), ("node", 3));
        let mut rank = begin(&group)?;
        round(&mut rank)?;
        round(&mut rank)?;
        rank.close()?;
        group.close()
    })
    .into_iter()
    .for_each(|outcome| outcome.unwrap());
    assert!(node.ledger().is_clean(), "{:?}", node.ledger());
}

#[test]
fn a_rank_that_fails_while_the_group_forms_is_named_to_all_and_nothing_is_kept() {
    let steps = [
        (Step::Open, "opening the device"),
        (Step::Access, "looking for peer access"),
        (Step::Alloc, "sharing windows"),
        (Step::Export, "sharing windows"),
        (Step::Map, "mapping the windows of the other ranks"),
        (Step::Confuse, "reading the windows of the other ranks"),
    ];
    for (step, name) in steps {
        let node = Node::new(3);
        let joined = node.each(|process| process.join(Failure::of(1, step, 1)).map(drop));
        assert_eq!(
            (peer_failed(&joined[0]), peer_failed(&joined[2])),
            (name, name)
        );
        let own = joined[1].as_ref().unwrap_err();
        assert!(own.to_string().contains(step.text()), "{own}");
        assert!(node.ledger().is_clean(), "{step:?}: {:?}", node.ledger());
    }
}

#[test]
fn a_rank_that_fails_with_a_window_is_named_to_all_and_the_group_stays_usable() {
    for step in [Step::Alloc, Step::Export, Step::Map] {
        let node = Node::new(3);
        let begun = node.each(|process| {
            let group = process.join(Failure::of(1, step, 2))?;
            let refused = begin(&group).map(drop);
            let mut rank = begin(&group)?;
            round(&mut rank)?;
            rank.close()?;
            group.close()?;
            Ok(refused)
        });
        let begun: Vec<_> = begun.into_iter().map(Result::unwrap).collect();
        assert_eq!(peer_failed(&begun[0]), peer_failed(&begun[2]));
        let own = begun[1].as_ref().unwrap_err();
        assert!(own.to_string().contains(step.text()), "{own}");
        assert!(node.ledger().is_clean(), "{step:?}: {:?}", node.ledger());
    }
}

#[test]
fn windows_that_a_rank_cannot_unmap_are_leaked_on_all() {
    let node = Node::new(2);
    let closed = node.each(|process| {
        let group = process.join(Failure::of(1, Step::Unmap, 2))?;
        let rank = begin(&group)?;
        Ok((rank.close().map_err(Error::from), group.close()))
    });
    let closed: Vec<_> = closed.into_iter().map(Result::unwrap).collect();
    assert_eq!(
        peer_failed(&closed[0].0),
        "unmapping the windows of the other ranks"
    );
    let own = closed[1].0.as_ref().unwrap_err();
    assert!(own.to_string().contains(Step::Unmap.text()), "{own}");
    assert!(closed.iter().all(|(_, group)| group.is_ok()));
    let ledger = node.ledger();
    assert_eq!((ledger.windows.len(), ledger.maps.len()), (2, 1));
}

#[test]
fn a_window_that_is_not_an_allocation_of_its_own_is_refused() {
    let (rank, owner, window) = (Rank(0), Rank(1), Extent { at: 512, bytes: 64 });
    let found = |at, bytes| require_whole(rank, owner, window, Extent { at, bytes });
    assert!(matches!(found(512, 64), Ok(64)) && matches!(found(512, 90), Ok(90)));
    for (at, bytes) in [(0, 4096), (512, 63)] {
        let text = found(at, bytes).unwrap_err().to_string();
        let wanted = format!("64 bytes at 0x200, in an allocation of {bytes} bytes at {at:#x}");
        assert!(
            text.starts_with("rank 0 finds the window of rank 1, ") && text.contains(&wanted),
            "{text}"
        );
    }
}

#[test]
fn processes_on_different_nodes_are_refused_on_all() {
    let node = Node::new(3);
    let joined = node.each(|process| {
        let mut place = process.place();
        if process.rank == 2 {
            place.gpu.machine = "boot 2".into();
            place.host = "other".into();
        }
        process.join_at(place).map(drop)
    });
    for outcome in joined {
        let Err(Error::Node(NodeError::OtherNode {
            first,
            second,
            first_node,
            second_node,
        })) = outcome
        else {
            panic!("{outcome:?}");
        };
        assert_eq!((first, second), (Rank(0), Rank(2)));
        assert!(first_node.contains("host") && second_node.contains("other"));
    }
    assert!(node.ledger().is_clean());
}

#[test]
fn two_ranks_on_one_gpu_are_refused_on_all() {
    let node = Node::new(3);
    let joined = node.each(|process| {
        let mut place = process.place();
        if process.rank == 2 {
            place.gpu.uuid = [0; 16];
        }
        process.join_at(place).map(drop)
    });
    for outcome in joined {
        let shared = matches!(
            outcome,
            Err(Error::GpuShared {
                first: Rank(0),
                second: Rank(2),
                ..
            })
        );
        assert!(shared, "{outcome:?}");
    }
    assert!(node.ledger().is_clean());
}

#[test]
fn processes_that_count_their_ranks_differently_are_refused_on_all() {
    let node = Node::new(2);
    let joined = node.each(|process| {
        let mut inner = process.bootstrap();
        let counts = 2 + process.rank;
        let gather =
            move |bytes: &[u8]| crate::group::bootstrap::Bootstrap::all_gather(&mut inner, bytes);
        // SAFETY: the wrong number of ranks is refused before anything is shared.
        let bootstrap = unsafe { FnBootstrap::new(process.rank, counts, gather) }?;
        process
            .join_with(Box::new(bootstrap), Failure::none())
            .map(drop)
    });
    let counted = matches!(
        joined[0],
        Err(Error::Node(NodeError::RankCount {
            rank: Rank(1),
            called: 1,
            theirs: 3,
            ours: 2
        }))
    );
    assert!(counted, "{:?}", joined[0]);
    let gathered = BootstrapError::Gathered { given: 2, ranks: 3 }.to_string();
    assert_eq!(joined[1].as_ref().unwrap_err().to_string(), gathered);
    assert!(node.ledger().is_clean());
}

#[test]
fn a_rank_that_does_not_come_ends_every_step_at_the_deadline_and_windows_are_kept() {
    let node = Node::with_timeout(2, SHORT);
    let waited = node.each(|process| {
        let group = process.join(Failure::none())?;
        if process.rank == 1 {
            // There, and at no step, until the other one has given up.
            process.wait_for_the_others();
            return Ok(None);
        }
        let rank = group.fabric.alloc_windows(64);
        let start = Instant::now();
        let closed = group.close();
        let took = start.elapsed();
        process.wait_for_the_others();
        Ok(Some((rank, closed, took)))
    });
    let (window, closed, took) = waited.into_iter().next().unwrap().unwrap().unwrap();
    assert!(matches!(window, Err(Error::Bootstrap(_))), "{window:?}");
    assert!(matches!(closed, Err(Error::Bootstrap(_))), "{closed:?}");
    assert!(took < LONG, "leaving took {took:?}");
    // Rank 1 may have mapped it, for all that rank 0 knows.
    let ledger = node.ledger();
    assert_eq!((ledger.windows.len(), ledger.maps.len()), (1, 0));
}

#[test]
fn ranks_at_different_steps_of_closing_all_say_so() {
    let node = Node::new(2);
    let closed = node.each(|process| {
        let group = process.join(Failure::none())?;
        Ok(match process.rank {
            0 => group.fabric.barrier(),
            _ => group.close(),
        })
    });
    let closed: Vec<_> = closed.into_iter().map(Result::unwrap).collect();
    for (outcome, (rank, step)) in closed.into_iter().zip([
        (1, "unmapping the windows of the other ranks"),
        (0, "closing a communicator"),
    ]) {
        let text = outcome.unwrap_err().to_string();
        let wanted = format!("rank {rank} is at another step ({step})");
        assert!(text.contains(&wanted), "{text}");
    }
}

#[test]
fn a_group_that_was_left_asks_nobody() {
    let node = Node::with_timeout(2, SHORT);
    let asked = node.each(|process| {
        let group = process.join(Failure::none())?;
        group.close()?;
        let asked = (process.rank == 0).then(|| {
            let gathered = group.fabric.all_gather(1).map(drop);
            [gathered, group.fabric.barrier(), begin(&group).map(drop)]
        });
        process.wait_for_the_others();
        Ok(asked)
    });
    let asked = asked.into_iter().next().unwrap().unwrap();
    for outcome in asked.into_iter().flatten() {
        assert!(matches!(outcome, Err(Error::GroupClosed)), "{outcome:?}");
    }
}

#[test]
fn windows_of_different_communicators_are_not_shared() {
    let node = Node::new(2);
    let shared = node.each(|process| {
        let group = process.join(Failure::none())?;
        let window = group.fabric.alloc_windows(64 << process.rank);
        group.close()?;
        Ok(window)
    });
    for shared in shared.into_iter().map(Result::unwrap) {
        let text = shared.unwrap_err().to_string();
        assert!(text.contains("different communicators"), "{text}");
    }
    assert!(node.ledger().is_clean(), "{:?}", node.ledger());
}

#[test]
fn threads_that_begin_communicators_at_once_do_not_mix_their_steps() {
    for _ in 0..4 {
        let node = Node::new(2);
        let begun = node.each(|process| {
            let group = process.join(Failure::none())?;
            thread::scope(|scope| {
                let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| begin(&group))).collect();
                let each = threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap().map(drop));
                each.collect::<Result<(), Error>>()
            })?;
            group.close()
        });
        begun.into_iter().for_each(|outcome| outcome.unwrap());
        assert!(node.ledger().is_clean(), "{:?}", node.ledger());
    }
}

#[test]
fn windows_of_dropped_communicators_are_given_back_when_the_group_is_left() {
    let node = Node::new(2);
    let left = node.each(|process| {
        let group = process.join(Failure::none())?;
        let mut rank = begin(&group)?;
        round(&mut rank)?;
        drop(rank);
        group.close()
    });
    left.into_iter().for_each(|outcome| outcome.unwrap());
    let ledger = node.ledger();
    assert!(ledger.is_clean() && ledger.drained == 2, "{ledger:?}");
}

#[test]
fn a_group_that_is_dropped_keeps_its_windows() {
    let node = Node::new(2);
    let kept = node.each(|process| {
        let group = process.join(Failure::none())?;
        drop(begin(&group)?);
        Ok(())
    });
    kept.into_iter().for_each(|outcome| outcome.unwrap());
    let ledger = node.ledger();
    assert_eq!((ledger.windows.len(), ledger.maps.len()), (2, 2));
}

#[test]
fn communicators_that_ranks_close_in_another_order_are_not_freed_under_a_peer() {
    let node = Node::new(2);
    let closed = node.each(|process| {
        let group = process.join(Failure::none())?;
        let (first, second) = (begin(&group)?, begin(&group)?);
        let closed = match process.rank {
            0 => [first.close(), second.close()],
            _ => [second.close(), first.close()],
        };
        group.close()?;
        Ok(closed)
    });
    for error in closed.into_iter().flat_map(Result::unwrap) {
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("ranks 0 and 1 close different communicators"),
            "{text}"
        );
    }
    // Each rank has leaked both, and mapped none.
    let ledger = node.ledger();
    assert_eq!((ledger.windows.len(), ledger.maps.len()), (4, 0));
}

#[test]
fn survivors_of_a_lost_process_leave_and_form_a_new_group() {
    let (node, survivors) = (Node::new(3), Node::new(2));
    let outcomes = node.each(|process| {
        let group = process.join(Failure::none())?;
        let mut rank = begin(&group)?;
        round(&mut rank)?;
        if process.rank == 1 {
            // As if the process were killed: its connections end.
            return Ok(());
        }
        let closed = rank.close().map_err(Error::from);
        assert!(lost_rank(&closed) == Some(1), "{closed:?}");
        let left = group.close();
        assert!(lost_rank(&left) == Some(1), "{left:?}");

        let group = survivors.process(process.rank / 2).join(Failure::none())?;
        let mut rank = begin(&group)?;
        round(&mut rank)?;
        rank.close()?;
        group.close()
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    assert!(survivors.ledger().is_clean());
    // The survivors have unmapped each other's, and kept their own.
    let ledger = node.ledger();
    let maps: Vec<u32> = ledger.maps.iter().map(|map| map.0).collect();
    assert!(
        ledger.windows.len() == 3 && !maps.contains(&0) && !maps.contains(&2),
        "{ledger:?}"
    );
}

fn lost_rank<T>(outcome: &Result<T, Error>) -> Option<u32> {
    match outcome {
        Err(Error::Bootstrap(error)) => error.lost_rank(),
        _ => None,
    }
}
