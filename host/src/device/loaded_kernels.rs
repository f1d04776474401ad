//! Loaded kernels of a device, for a shape or for all.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
#[cfg(any(feature = "cuda", test))]
use std::sync::{Mutex, PoisonError};

#[cfg(any(feature = "cuda", test))]
use crate::error::Error;

/// Kernels of a device: those for every shape, or those of one call of
/// [`Device::kernels`](crate::Device::kernels). A communicator holds its own, so that a launch
/// needs no lookup and no lock.
#[derive(Clone, Default)]
pub struct LoadedKernels(Option<Arc<dyn Any + Send + Sync>>);

impl LoadedKernels {
    /// The kernels for every shape.
    pub const GENERAL: Self = Self(None);

    /// Kernels that a device of yours identifies by `held`.
    pub fn of(held: Arc<dyn Any + Send + Sync>) -> Self {
        Self(Some(held))
    }

    /// The value passed to [`of`](Self::of); `None` for the general kernels.
    pub fn held(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.0.as_deref()
    }
}

impl fmt::Debug for LoadedKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "LoadedKernels for a shape"
        } else {
            "LoadedKernels::GENERAL"
        })
    }
}

/// Values that are made once per key and kept.
#[cfg(any(feature = "cuda", test))]
pub(crate) struct Kept<K, T>(Mutex<Vec<(K, Arc<T>)>>);

#[cfg(any(feature = "cuda", test))]
impl<K: PartialEq, T> Kept<K, T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Returns the value for `key`, made unless it exists. Waits while another value is being made.
    pub(crate) fn get(
        &self,
        key: K,
        make: impl FnOnce() -> Result<T, Error>,
    ) -> Result<Arc<T>, Error> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, made)) = all.iter().find(|(of, _)| *of == key) {
            return Ok(made.clone());
        }
        let made = Arc::new(make()?);
        all.push((key, made.clone()));
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::device::kernels::specialize::SHAPE;
    use ferry_layout::Shape;

    #[test]
    fn kernels_are_at_hand_while_others_are_compiled() {
        let cache = Kept::new();
        let other = Shape {
            hidden: 512,
            ..SHAPE
        };
        let own = LoadedKernels::of(cache.get(SHAPE, || Ok(7_u32)).unwrap());
        let (begun, has_begun) = channel();
        let (go_on, may_go_on) = channel::<()>();
        thread::scope(|scope| {
            let cache = &cache;
            scope.spawn(move || {
                cache.get(other, || {
                    begun.send(()).unwrap();
                    may_go_on.recv().unwrap();
                    Ok(8)
                })
            });
            has_begun.recv().unwrap();
            let (launched, has_launched) = channel();
            scope.spawn(move || {
                let function = own.held().and_then(|held| held.downcast_ref::<u32>());
                launched.send(function.copied())
            });
            let function = has_launched.recv_timeout(Duration::from_secs(20));
            go_on.send(()).unwrap();
            assert_eq!(function, Ok(Some(7)));
        });
        assert_eq!(*cache.get(other, || Ok(9)).unwrap(), 8);
    }

    #[test]
    fn a_failure_is_not_kept() {
        let cache = Kept::new();
        assert!(
            cache
                .get(SHAPE, || Err(Error::RankCount { ranks: 0 }))
                .is_err()
        );
        assert_eq!(*cache.get(SHAPE, || Ok(1)).unwrap(), 1);
    }
}
