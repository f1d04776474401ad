//! Host writes that race with kernels.

use std::sync::{Arc, Mutex, PoisonError};

use rand::Rng;

/// Contents that device memory takes in turns while kernels run, as the copies of another thread would make
/// them, but at turns of the scheduler that the seed determines: for tests of inputs that change too early.
/// Clones share the contents.
#[derive(Clone, Debug, Default)]
pub struct Racing(Arc<Mutex<Option<Contents>>>);

#[derive(Clone, Debug)]
struct Contents {
    address: u64,
    each: Vec<Vec<u8>>,
}

impl Racing {
    /// Lets the memory at `address` take these contents from now on, in any order, each as a whole.
    pub fn begin(&self, address: u64, each: Vec<Vec<u8>>) {
        let begun = (!each.is_empty()).then_some(Contents { address, each });
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = begun;
    }

    /// Address and content of a write before the next turn, if there is one.
    pub(crate) fn next(&self, rng: &mut impl Rng) -> Option<(u64, Vec<u8>)> {
        let contents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Contents { address, each } = contents.as_ref()?;
        rng.random::<bool>().then(|| {
            let which = rng.random_range(0..each.len());
            (*address, each[which].clone())
        })
    }
}
