//! Graphs and communicators that hold a communicator, a group or multiprocessors, and refusals meanwhile.

use std::sync::Arc;

use crate::noted::*;
use ferry::*;

#[test]
fn a_communicator_that_a_graph_will_launch_is_not_closed() {
    let notes = Arc::<Notes>::default();
    let group = group_of(&notes);
    let mut rank = join(&group, config());
    *notes.graph.lock().unwrap() = Some(Vec::new());
    round(&mut rank, Stream::DEFAULT).unwrap();
    let graph = notes.graph.lock().unwrap().take();
    notes.take();

    let refused = rank.close().unwrap_err();
    assert!(refused.to_string().contains("1 CUDA graphs"), "{refused}");
    let CloseError {
        error: Error::GraphsAlive { graphs: 1, .. },
        communicator: Some(mut rank),
    } = refused
    else {
        panic!("{refused}")
    };
    assert_eq!(notes.take(), [""; 0]);
    round(&mut rank, Stream::DEFAULT).unwrap();
    notes.take();
    drop(graph);
    rank.close().unwrap();
    let freed = notes.take();
    assert!(
        freed.ends_with(&["barrier".into(), "free_windows".into()]),
        "{freed:?}"
    );
}

#[test]
fn a_communicator_that_a_graph_of_others_may_launch_is_not_closed() {
    let notes = Arc::<Notes>::default();
    let group = group_of(&notes);
    let mut rank = join(&group, config());
    *notes.others_capture.lock().unwrap() = true;
    round(&mut rank, Stream::DEFAULT).unwrap();
    *notes.others_capture.lock().unwrap() = false;
    round(&mut rank, Stream::DEFAULT).unwrap();
    notes.take();

    let refused = rank.close().unwrap_err();
    assert!(
        refused.to_string().contains("assume_no_foreign_graphs"),
        "{refused}"
    );
    let CloseError {
        error: Error::ForeignGraphs { rank: Rank(0) },
        communicator: Some(mut rank),
    } = refused
    else {
        panic!("{refused}")
    };
    assert_eq!(notes.take(), [""; 0]);
    // SAFETY: nothing here makes graphs.
    unsafe { rank.assume_no_foreign_graphs() };
    rank.close().unwrap();
    let freed = notes.take();
    assert!(freed.ends_with(&["barrier".into(), "free_windows".into()]));
    group.close().unwrap();
}

#[test]
fn a_group_with_open_communicators_is_not_closed() {
    let notes = Arc::<Notes>::default();
    let group = group_of(&notes);
    let (one, mut two) = (join(&group, config()), join(&group, config()));
    let refused = |left: usize| {
        let refused = group.clone().close();
        let Err(Error::CommunicatorsOpen { communicators }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(communicators, left);
    };
    refused(2);
    one.close().unwrap();
    refused(1);
    *notes.graph.lock().unwrap() = Some(Vec::new());
    round(&mut two, Stream::DEFAULT).unwrap();
    notes.take();
    drop(two);
    // The communicator is gone, but not the graph, nor the memory.
    refused(1);
    assert_eq!(notes.take(), [""; 0]);
    *notes.graph.lock().unwrap() = None;
    group.close().unwrap();
    assert_eq!(notes.take(), ["close"]);
}

#[test]
fn a_closed_group_makes_no_communicator() {
    let notes = Arc::<Notes>::default();
    let group = group_of(&notes);
    let plan = Plan::new(&group, config()).unwrap();
    group.clone().close().unwrap();
    notes.take();
    let refused = Communicator::new(&group, &plan).err();
    assert!(matches!(refused, Some(Error::GroupClosed)), "{refused:?}");
    assert_eq!(notes.take(), [""; 0]);
}

#[test]
fn a_green_context_that_is_too_small_is_refused() {
    // SAFETY: `Stream::new` is about enqueued work, and nothing here enqueues.
    let [roomy, tight] = [1, 2].map(|handle| unsafe { Stream::new(handle) });
    let notes = Arc::<Notes>::default();
    *notes.green.lock().unwrap() = vec![(roomy, 5), (tight, 4)];
    let mut rank = start(&notes, 2, config()).unwrap();
    notes.take();
    for stream in [roomy, Stream::DEFAULT, roomy, Stream::DEFAULT] {
        round(&mut rank, stream).unwrap();
    }
    notes.take();
    let refused = round(&mut rank, tight).unwrap_err();
    let wanted = "max_sms is 5, but the stream belongs to a green context with 4 multiprocessors";
    assert!(refused.to_string().starts_with(wanted), "{refused}");
    assert_eq!(notes.take(), [""; 0]);
    // A handle may be another stream's after its own was destroyed.
    *notes.green.lock().unwrap() = vec![(roomy, 4)];
    round(&mut rank, tight).unwrap();
    notes.take();
    let refused = round(&mut rank, roomy).unwrap_err();
    assert!(refused.to_string().starts_with(wanted), "{refused}");
    assert_eq!(notes.take(), [""; 0]);
    rank.close().unwrap();

    *notes.green.lock().unwrap() = vec![(roomy, 131)];
    let all = Config {
        max_sms: None,
        ..config()
    };
    let mut rank = start(&notes, 2, all).unwrap();
    let refused = round(&mut rank, roomy).unwrap_err();
    assert!(
        refused.to_string().starts_with("max_sms is None (all)"),
        "{refused}"
    );
    rank.close().unwrap();
}

#[test]
fn a_graph_holds_the_fabric_of_the_communicators_that_it_launches() {
    let notes = Arc::<Notes>::default();
    let group = group_of(&notes);
    let mut rank = join(&group, config());
    *notes.graph.lock().unwrap() = Some(Vec::new());
    round(&mut rank, Stream::DEFAULT).unwrap();
    let graph = notes.graph.lock().unwrap().take();
    drop((rank, group));
    // The fabric has one of these, the page that is leaked another one.
    let with_fabric = Arc::strong_count(&notes);
    drop(graph);
    assert_eq!(Arc::strong_count(&notes), with_fabric - 1);
}

#[test]
fn memory_whose_upload_fails_is_freed() {
    let notes = Arc::<Notes>::default();
    let device = group_of(&notes).device(Rank(0)).unwrap();
    notes.take();
    *notes.refuses_uploads.lock().unwrap() = true;
    let refused = device.upload_tensor([2, 2], &[1_u16; 4]);
    assert!(matches!(refused, Err(Error::GroupClosed)), "{refused:?}");
    assert_eq!(notes.take(), ["alloc", "upload", "free"]);
}

/// The kernel that tells the host of counts has one block, whatever the others take.
#[test]
fn counts_take_one_multiprocessor_of_a_green_context() {
    // SAFETY: `Stream::new` is about enqueued work, and nothing here enqueues.
    let tight = unsafe { Stream::new(1) };
    let notes = Arc::<Notes>::default();
    let mut rank = start(&notes, 2, config()).unwrap();
    let (input, output) = empty_tensors(&rank);
    rank.dispatch_async(Stream::DEFAULT, &input).unwrap();
    *notes.green.lock().unwrap() = vec![(tight, 1)];
    rank.dispatch_counts(tight).unwrap();
    let refused = rank.dispatch_wait(tight, &output);
    assert!(
        matches!(refused, Err(Error::GreenContext { .. })),
        "{refused:?}"
    );
    std::mem::forget(rank);
}
