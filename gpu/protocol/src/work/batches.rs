//! Batches of items that a warp takes at a time. The last items are taken one at a time, so that all warps
//! end at about the same time.

/// Items of each ticket of the work queue.
#[derive(Clone, Copy)]
pub struct Batches {
    /// Tickets for a batch each; they come first.
    batches: u32,
    /// Items of a batch, a power of two.
    size: u32,
    /// Items after the batches, a ticket each.
    singles: u32,
}

impl Batches {
    /// A ticket for every item.
    #[inline(always)]
    pub fn none(items: u32) -> Self {
        Self {
            batches: 0,
            size: 1,
            singles: items,
        }
    }

    /// Batches of `size` items, a power of two; at least the last `warps` items have a ticket each.
    #[inline(always)]
    pub fn of(items: u32, warps: u32, size: u32) -> Self {
        let log = size.trailing_zeros();
        let batches = items.saturating_sub(warps) >> log;
        Self {
            batches,
            size,
            singles: items - (batches << log),
        }
    }

    /// Tickets of all items.
    #[inline(always)]
    pub fn tickets(self) -> u32 {
        self.batches + self.singles
    }

    /// Whether a ticket stands for a batch.
    #[inline(always)]
    pub fn is_batch(self, ticket: u32) -> bool {
        self.size > 1 && ticket < self.batches
    }

    /// The first item of a ticket.
    #[inline(always)]
    pub fn first_item(self, ticket: u32) -> u32 {
        debug_assert!(
            ticket < self.tickets(),
            "ticket {ticket} of {}",
            self.tickets()
        );
        match ticket.checked_sub(self.batches) {
            None => ticket << self.size.trailing_zeros(),
            Some(single) => (self.batches << self.size.trailing_zeros()) + single,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_of_one_ticket() {
        for items in [0u32, 1, 7, 8, 9, 100, 4097] {
            for warps in [1, 8, 2048] {
                for size in [1, 2, 4] {
                    let batches = Batches::of(items, warps, size);
                    let mut next = 0;
                    for ticket in 0..batches.tickets() {
                        assert_eq!(batches.first_item(ticket), next, "{items} {warps} {size}");
                        next += if batches.is_batch(ticket) { size } else { 1 };
                    }
                    assert_eq!(next, items);
                    let alone = (0..batches.tickets()).filter(|&ticket| !batches.is_batch(ticket));
                    assert!(alone.count() as u32 >= items.min(warps));
                }
            }
        }
    }
}
