//! Addresses of a rank's memory.

use crate::noted;
use std::sync::Arc;

use crate::support::{self, STREAM, TOKENS, close, download, two_ranks};
use ferry::device::DevicePointers;
use ferry::device::{Args, DispatchWith, Launch};
use ferry::*;
use ferry_layout::{Epoch, Tagged, Window};

/// The pointers of a rank of two, with `p2p_world_size` ranks per node, and the arguments of its kernels.
fn pointers(p2p_world_size: usize, combine: CombineMode) -> (DevicePointers, Plan, [u64; 2]) {
    let notes = Arc::default();
    let config = Config {
        p2p_world_size: Some(p2p_world_size),
        combine,
        ..noted::config()
    };
    let mut rank = noted::start(&notes, 2, config).unwrap();
    let (input, output) = noted::empty_tensors(&rank);
    rank.dispatch(STREAM, &input, &output).unwrap();
    let launches = notes.launches.lock().unwrap().clone();
    let [
        Launch {
            args: Args::Dispatch(DispatchWith { args, .. }),
            ..
        },
    ] = launches[..]
    else {
        panic!("not one dispatch: {launches:?}")
    };
    let told = [args.common.own_window, args.common.workspace];
    (rank.device_pointers(), *rank.plan(), told)
}

#[test]
fn the_table_names_the_places_that_kernels_use() {
    for (size, combine) in [
        (2, CombineMode::Reduced),
        (2, CombineMode::Exact),
        (1, CombineMode::Reduced),
        (1, CombineMode::Exact),
    ] {
        let (pointers, plan, [own, workspace]) = pointers(size, combine);
        let window = Window::of(plan.shape());
        let first = Rank(0);
        let returned = match combine {
            CombineMode::Reduced => window.reduced_staging(first, 0),
            CombineMode::Exact => window.exact_staging(0),
        };
        let [dispatch_send, combine_send] = match size {
            1 => [window.dispatch_staging(0), returned].map(|at| own + at.bytes()),
            _ => [0, 0],
        };
        let wanted = [
            [
                dispatch_send,
                own + window.dispatch_row(first, 0).bytes(),
                own + window.count(first, 0).bytes(),
            ],
            [
                combine_send,
                own + window.combine_row(0, 0).bytes(),
                own + window.combine_flag(0, 0).bytes(),
            ],
        ];
        assert_eq!(pointers.table, wanted, "{size} ranks a node, {combine:?}");
        assert_eq!((pointers.rank, pointers.counters), (first, workspace));
        let last = pointers.counters + DevicePointers::COUNTERS * DevicePointers::COUNTER_STRIDE;
        assert!(last <= workspace + plan.workspace_bytes());
    }
}

/// The shape of the counts, read from outside: the last one of a source is its tokens.
#[test]
fn counts_are_where_the_table_says() {
    let (mut ranks, tensors) = two_ranks(3, support::config());
    for (rank, t) in ranks.iter_mut().zip(&tensors) {
        rank.dispatch(STREAM, &t.input, &t.output).unwrap();
        rank.combine(STREAM, &t.combine_input(None), &t.combine_output(false))
            .unwrap();
    }
    for rank in &ranks {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
        let local = rank.plan().local_experts();
        let counts = rank.device_pointers().table[0][2];
        let bytes = 2 * (local + 1) * 8;
        // SAFETY: the window has that many counts there, and the communicator is open.
        let counts = unsafe { DevicePtr::new(counts, bytes as u64) };
        let bytes = download(rank, counts, bytes);
        let words = bytes.as_chunks().0.iter();
        let counts: Vec<u64> = words.map(|word| u64::from_le_bytes(*word)).collect();
        let value = |word| Tagged(word).value(Epoch::after(0)).unwrap() as usize;
        let tokens = [counts[local], counts[2 * local + 1]].map(value);
        assert_eq!(tokens, TOKENS.map(<[_]>::len));
    }
    close(ranks);
}
