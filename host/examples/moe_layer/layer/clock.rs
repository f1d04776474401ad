//! Events between stages.

use std::sync::Arc;

use anyhow::Result;
use ferry::Stream;
use ferry::cuda::{CudaDevice, CudaEvent};

/// The events of one step after another.
pub struct Clock {
    events: Vec<CudaEvent>,
    marked: usize,
}

impl Clock {
    pub fn new(device: &Arc<CudaDevice>, stages: usize) -> Result<Self> {
        let events = (0..=stages)
            .map(|_| device.event())
            .collect::<Result<_, _>>()?;
        Ok(Self { events, marked: 0 })
    }

    /// A step begins.
    pub fn start(&mut self, stream: Stream) -> Result<()> {
        self.marked = 0;
        self.mark(stream)
    }

    /// A stage ends.
    pub fn mark(&mut self, stream: Stream) -> Result<()> {
        self.events[self.marked].record(stream)?;
        self.marked += 1;
        Ok(())
    }

    /// Of each stage; the last one has ended.
    pub fn milliseconds(&self) -> Result<Vec<f32>> {
        let pairs = self.events.windows(2);
        Ok(pairs
            .map(|pair| pair[1].elapsed_ms_since(&pair[0]))
            .collect::<Result<_, _>>()?)
    }
}
