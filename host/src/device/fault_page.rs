//! Reads of a fault page that a device may be writing.

use std::hint;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use ferry_layout::FaultPage;

/// Words of a page.
pub(crate) const WORDS: usize = size_of::<FaultPage>() / size_of::<u64>();

const COMPLETE: usize = offset_of!(FaultPage, complete) / size_of::<u64>();
const BEGUN: usize = offset_of!(FaultPage, begun) / size_of::<u64>();
const ACKNOWLEDGED: usize = offset_of!(FaultPage, acknowledged) / size_of::<u64>();

/// Most reads of a page while it is being written: a device is done within microseconds.
const MOST_TRIES: u32 = 10_000;

/// Reads a page. If its record is still being written after many tries, the record's numbers
/// differ, and [`FaultPage::has_news`] is false.
///
/// The device stores `begun`, the record and `complete`, with fences of system scope in between. So
/// a reader that loads `complete` first and `begun` last and finds the same number has loaded one record
/// in between.
pub(crate) fn read(words: &[AtomicU64; WORDS]) -> FaultPage {
    let mut page = load(words);
    for _ in 0..MOST_TRIES {
        if page.begun == page.complete {
            break;
        }
        hint::spin_loop();
        page = load(words);
    }
    page
}

fn load(words: &[AtomicU64; WORDS]) -> FaultPage {
    let complete = words[COMPLETE].load(Ordering::Acquire);
    let mut loaded = words.each_ref().map(|word| word.load(Ordering::Relaxed));
    fence(Ordering::Acquire);
    loaded[BEGUN] = words[BEGUN].load(Ordering::Relaxed);
    loaded[COMPLETE] = complete;
    bytemuck::cast(loaded)
}

/// Tells the device that record `number` was reported. A newer record is still reported.
pub(crate) fn acknowledge(words: &[AtomicU64; WORDS], number: u64) {
    words[ACKNOWLEDGED].store(number, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use std::thread;

    use ferry_layout::{Fault, FaultKind, Kernel, Rank, Region};

    use super::*;

    fn fault(number: u64) -> Fault {
        Fault {
            kind: FaultKind::PeerTimeout,
            kernel: Kernel::Dispatch,
            rank: Rank(0),
            peer: Rank(1),
            culprit: Rank(1),
            region: Region::Counts,
            index: number,
            wanted: number,
            saw: number,
            epoch: number,
            patience_ms: None,
            gpu_ranks: None,
            is_culprit_behind: false,
        }
    }

    /// Writes a record in the order of a device.
    fn write(words: &[AtomicU64; WORDS], number: u64) {
        let record: [u64; WORDS] = bytemuck::cast(FaultPage::of(&fault(number), number));
        words[BEGUN].store(number, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        for index in BEGUN + 1..COMPLETE {
            words[index].store(record[index], Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        words[COMPLETE].store(number, Ordering::Relaxed);
    }

    #[test]
    fn no_record_is_read_in_part() {
        const RECORDS: u64 = 200_000;
        let words: [AtomicU64; WORDS] = Default::default();
        thread::scope(|scope| {
            scope.spawn(|| (1..=RECORDS).for_each(|number| write(&words, number)));
            let mut last = 0;
            while last < RECORDS {
                let page = read(&words);
                if page.has_news() {
                    assert_eq!(
                        page.fault(),
                        Some(fault(page.complete)),
                        "record {}",
                        page.complete
                    );
                    assert!(page.complete >= last, "{} after {last}", page.complete);
                    last = page.complete;
                }
            }
        });
    }

    #[test]
    fn a_record_that_is_being_written_is_no_news() {
        let words: [AtomicU64; WORDS] = Default::default();
        assert_eq!(read(&words).fault(), None);
        write(&words, 1);
        assert_eq!(read(&words).fault(), Some(fault(1)));
        words[BEGUN].store(2, Ordering::Relaxed);
        assert!(!read(&words).has_news());
    }

    #[test]
    fn what_comes_after_the_acknowledged_record_is_told() {
        let words: [AtomicU64; WORDS] = Default::default();
        write(&words, 1);
        let told = read(&words).complete;
        write(&words, 2);
        acknowledge(&words, told);
        assert_eq!(read(&words).fault(), Some(fault(2)));
        acknowledge(&words, 2);
        assert_eq!(read(&words).fault(), None);
    }
}
