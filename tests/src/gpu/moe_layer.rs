//! A small layer of experts: the results of some tokens beside f64.

use anyhow::{Context, Result, ensure};
use cudarc::driver::CudaContext;
use ferry::{Device, TokenFormat};

use super::{Outcome, Suite};
use crate::bench::layer::{self, Layer, Settings};

/// Tokens of each rank.
const TOKENS: usize = 256;
const EXPERTS_OF_A_RANK: usize = 8;
/// The architecture for which cuBLASLt has FP8 with scales of blocks.
const HOPPER: (i32, i32) = (9, 0);

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    for format in [TokenFormat::Bf16, TokenFormat::BlockwiseFp8] {
        let name = format.name().to_uppercase();
        let name = format!("a layer of experts beside f64, {name}");
        suite.check(&name, |suite| check(suite, format))?;
    }
    Ok(())
}

fn check(suite: &Suite<'_>, format: TokenFormat) -> Result<Outcome> {
    let (group, ranks) = (suite.group(), suite.ranks());
    if let Some(reason) = missing(suite, format)? {
        return Ok(Outcome::Skipped(reason));
    }
    let settings = Settings {
        format,
        ranks,
        tokens: TOKENS,
        hidden: 2048,
        intermediate: 1024,
        experts: EXPERTS_OF_A_RANK * ranks,
        top_k: 4,
        nccl: false,
        seed: suite.args.seed,
    };
    let mut streams = Vec::new();
    for rank in group.local_ranks() {
        let device = group.cuda(rank).context("not a CUDA device")?;
        streams.push(device.stream()?);
    }
    let mut layer = Layer::new(group, settings, &streams, &[])?;
    let first = layer.error(4)?;
    layer.forget()?;
    layer.enqueue()?;
    layer.wait()?;
    let (error, bar) = (layer.error(4)?, settings.bar());
    layer.close()?;
    let figures = format!("|y - f64| / |f64| is {first:.2e}, then {error:.2e}, bar {bar:.2e}");
    ensure!(first <= bar && error <= bar, "{figures}");
    Ok(Outcome::Measured(figures))
}

/// Returns what the layer needs and this group or machine does not have.
fn missing(suite: &Suite<'_>, format: TokenFormat) -> Result<Option<String>> {
    let group = suite.group();
    let local = group.local_ranks();
    let devices: Option<Vec<_>> = local.iter().map(|&rank| group.cuda(rank)).collect();
    let Some(devices) = devices else {
        return Ok(Some("not on GPUs".into()));
    };
    if local.len() < suite.ranks() {
        return Ok(Some("it needs all ranks in one process".into()));
    }
    if let Err(error) = layer::require_libraries() {
        return Ok(Some(error.to_string()));
    }
    for device in devices {
        let capability = CudaContext::new(device.ordinal())?.compute_capability()?;
        if format == TokenFormat::BlockwiseFp8 && capability != HOPPER {
            let reason = "cuBLASLt multiplies FP8 with scales of blocks on Hopper alone";
            return Ok(Some(reason.into()));
        }
    }
    Ok(None)
}
