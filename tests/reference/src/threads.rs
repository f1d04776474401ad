//! The same work for each rank or part of a tensor, in threads if it takes long.

use std::thread;

/// Elements from which work on them takes longer than the start of a few threads, which is 0.1 ms.
const MANY: usize = 1 << 18;

/// Does `work` for each item, in the items' order or, if they have many `elements` together, in a thread for
/// each.
///
/// # Panics
///
/// A panic of `work` goes on in the caller.
pub fn each<Item: Send, Of: Send, All: FromIterator<Of>>(
    items: impl IntoIterator<Item = Item>,
    elements: usize,
    work: impl Fn(Item) -> Of + Sync,
) -> All {
    let (items, work) = (items.into_iter(), &work);
    if elements < MANY {
        return items.map(work).collect();
    }
    thread::scope(|scope| {
        let threads: Vec<_> = items.map(|item| scope.spawn(move || work(item))).collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    })
}
