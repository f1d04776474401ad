//! The memory that this PE registered. Nothing else is written or read for others.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// A range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) place: Place,
    /// Whether only this PE uses it, as a source or for answers.
    pub(crate) is_local: bool,
}

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Gpu,
    Host,
}

/// All that is registered. Who reads or writes for others holds it, so that nothing is released meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Memory(RwLock<Vec<Region>>);

impl Memory {
    pub(crate) fn register(&self, region: Region) {
        let mut regions = self.0.write().unwrap_or_else(PoisonError::into_inner);
        regions.push(region);
    }

    /// Forgets one region of this base and length.
    pub(crate) fn release(&self, base: u64, bytes: u64) {
        let mut regions = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let found = regions
            .iter()
            .position(|one| (one.base, one.bytes) == (base, bytes));
        if let Some(index) = found {
            regions.swap_remove(index);
        }
    }

    pub(crate) fn hold(&self) -> Held<'_> {
        Held(self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Memory that stays registered.
pub(crate) struct Held<'a>(RwLockReadGuard<'a, Vec<Region>>);

impl Held<'_> {
    /// Kind of a range that peers may use, if all of it is registered for them and of one kind.
    pub(crate) fn of_peers(&self, at: u64, bytes: usize) -> Option<Place> {
        self.find(at, bytes, |region| !region.is_local)
    }

    /// Kind of a range of this PE, if all of it is registered.
    pub(crate) fn of_this_pe(&self, at: u64, bytes: usize) -> Option<Place> {
        self.find(at, bytes, |_| true)
    }

    /// NVSHMEM registers its heap in chunks, and a put may cross from one to the next.
    fn find(&self, at: u64, bytes: usize, is_fine: impl Fn(&Region) -> bool) -> Option<Place> {
        let end = at.checked_add(u64::try_from(bytes).ok()?)?;
        let has = |region: &&Region, at: u64| {
            let offset = at.checked_sub(region.base);
            is_fine(region) && offset.is_some_and(|offset| offset < region.bytes)
        };
        let region_at = |at: u64| self.0.iter().find(|region| has(region, at));
        let first = region_at(at)?;
        let mut next = first.base.saturating_add(first.bytes);
        while next < end {
            let region = region_at(next).filter(|region| region.place == first.place)?;
            next = region.base.saturating_add(region.bytes);
        }
        Some(first.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(base: u64, bytes: u64, place: Place, is_local: bool) -> Region {
        Region {
            base,
            bytes,
            place,
            is_local,
        }
    }

    #[test]
    fn only_ranges_that_are_registered_as_a_whole_are_found() {
        let memory = Memory::default();
        for (base, bytes, place, is_local) in [
            (0x1000, 0x100, Place::Gpu, false),
            (0x1100, 0x100, Place::Gpu, false),
            (0x1200, 0x100, Place::Host, false),
            (0x3000, 0x100, Place::Host, true),
            (u64::MAX - 0xff, 0xff, Place::Host, false),
        ] {
            memory.register(region(base, bytes, place, is_local));
        }
        let held = memory.hold();
        assert_eq!(held.of_peers(0x1000, 0x100), Some(Place::Gpu));
        assert_eq!(held.of_peers(0x10f8, 16), Some(Place::Gpu));
        assert_eq!(held.of_peers(0x11f8, 16), None);
        assert_eq!(held.of_peers(0x12f8, 8), Some(Place::Host));
        for (at, bytes) in [
            (0xfff, 2),
            (0x12f9, 8),
            (0x2000, 1),
            (0, 0),
            (0x1000, usize::MAX),
            (u64::MAX, 8),
            (u64::MAX - 4, 5),
        ] {
            assert_eq!(held.of_peers(at, bytes), None, "{at:#x} {bytes}");
        }
        assert_eq!(held.of_peers(0x3000, 8), None);
        assert_eq!(held.of_this_pe(0x3000, 8), Some(Place::Host));
    }

    #[test]
    fn what_is_registered_twice_stays_until_it_is_released_twice() {
        let memory = Memory::default();
        for _ in 0..2 {
            memory.register(region(64, 64, Place::Host, false));
        }
        memory.release(64, 64);
        assert!(memory.hold().of_peers(64, 64).is_some());
        memory.release(64, 64);
        assert!(memory.hold().of_peers(64, 64).is_none());
    }
}
