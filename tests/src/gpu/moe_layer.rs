//! The layer of `host/examples/moe_layer`, small: the results of some tokens beside f64, within its own bars.

#[allow(
    dead_code,
    reason = "the example also has NCCL, and shows what each stage takes"
)]
#[path = "../../../host/examples/moe_layer/layer/mod.rs"]
mod layer;

use std::sync::Arc;

use anyhow::{Result, ensure};
use cudarc::driver::CudaContext;

use super::{Outcome, Suite};
use crate::bench::meeting::Meeting;
use layer::weights::Tiles;
use layer::{Format, Job, Shape, Way, reference};

/// Tokens of each rank.
const TOKENS: usize = 256;
const EXPERTS_OF_A_RANK: usize = 8;
/// Where cuBLASLt has FP8 with scales of blocks.
const HOPPER: (i32, i32) = (9, 0);

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    for format in [Format::Bf16, Format::Fp8] {
        let name = format!("a layer of experts beside f64, {}", format.name());
        suite.check(&name, |suite| check(suite, format))?;
    }
    Ok(())
}

impl layer::Meeting for Meeting {
    fn wait(&self) -> Result<()> {
        self.wait()
    }

    fn fail(&self, _: &str) {
        self.fail();
    }
}

fn check(suite: &Suite<'_>, format: Format) -> Result<Outcome> {
    let (group, ranks) = (suite.group(), suite.ranks());
    if let Some(reason) = missing(suite, format)? {
        return Ok(Outcome::Skipped(reason));
    }
    let job = Job {
        shape: Shape {
            ranks,
            tokens: TOKENS,
            hidden: 2048,
            intermediate: 1024,
            experts: EXPERTS_OF_A_RANK * ranks,
            top_k: 4,
        },
        tiles: Arc::new(Tiles::new(suite.args.seed)),
        format,
        way: Way::Ferry,
        iterations: 2,
        warm_up: 0,
        samples: 4,
        meeting: &Meeting::new(ranks),
    };
    let outcomes = layer::run(group, &job, &mut [])?;
    let samples: Vec<_> = outcomes.into_iter().flat_map(|rank| rank.samples).collect();
    let (error, bar) = (
        reference::worst(&job.tiles, &job.shape, format, &samples),
        format.bar(),
    );
    let figures = format!("|y - f64| / |f64| is {error:.2e}, bar {bar:.2e}");
    ensure!(error <= bar, "{figures}");
    Ok(Outcome::Measured(figures))
}

/// What the layer needs and this group or machine has not.
fn missing(suite: &Suite<'_>, format: Format) -> Result<Option<String>> {
    let group = suite.group();
    let local = group.local_ranks();
    let devices: Option<Vec<_>> = local.iter().map(|&rank| group.cuda(rank)).collect();
    let Some(devices) = devices else {
        return Ok(Some("not on GPUs".into()));
    };
    if local.len() < suite.ranks() {
        return Ok(Some("its ranks are threads of a process".into()));
    }
    if let Err(error) = layer::require_libraries() {
        return Ok(Some(error.to_string()));
    }
    for device in devices {
        let capability = CudaContext::new(device.ordinal())?.compute_capability()?;
        if format == Format::Fp8 && capability != HOPPER {
            let reason = "cuBLASLt multiplies FP8 with scales of blocks on Hopper alone";
            return Ok(Some(reason.into()));
        }
    }
    Ok(None)
}
