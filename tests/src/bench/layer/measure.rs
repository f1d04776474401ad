//! A layer's times by stage.

use anyhow::{Result, ensure};
use ferry::TokenFormat;
use serde_json::{Value, json};

use super::Layer;
use super::settings::Settings;
use crate::bench::nccl::{self, Comm};
use crate::bench::options::BenchArgs;
use crate::bench::rig::{Repeats, Rig, Stage as Start};
use crate::bench::sink::Sink;

/// Tokens of each rank that are compared with f64.
const SAMPLES: usize = 4;

/// Times layers of each number of tokens and format, carried by Ferry and by NCCL.
pub fn measure(rig: &Rig, args: &BenchArgs, sink: &mut Sink) -> Result<()> {
    super::require_libraries()?;
    ensure!(
        rig.gpus.len() == rig.ranks(),
        "--only layer: one process has all ranks; leave --group out"
    );
    let nccl = nccl::open(rig, args.nccl.as_deref())?;
    if let Err(reason) = &nccl {
        sink.say(format_args!("NCCL: skipped, {reason}"));
    }
    let ways = [Some(&[][..]), nccl.as_ref().ok().map(nccl::Nccl::comms)];
    let mut formats: Vec<_> = args.kinds().into_iter().map(|(format, _)| format).collect();
    formats.dedup();
    for &tokens in &args.tokens {
        for &format in &formats {
            ensure!(
                matches!(format, TokenFormat::Bf16 | TokenFormat::BlockwiseFp8),
                "--format {}: a layer takes bf16 or fp8",
                format.name()
            );
            for comms in ways.into_iter().flatten() {
                let settings = Settings {
                    format,
                    ranks: rig.ranks(),
                    tokens,
                    hidden: args.hidden,
                    intermediate: args.intermediate,
                    experts: args.experts,
                    top_k: args.top_k,
                    nccl: !comms.is_empty(),
                    seed: args.seed,
                };
                sink.line("layer", time(rig, args, settings, comms, sink)?)?;
            }
        }
    }
    nccl.map_or(Ok(()), nccl::Nccl::close)
}

/// Times a layer by stage and as a whole, prints medians of the slowest rank, and returns the record.
fn time(
    rig: &Rig,
    args: &BenchArgs,
    settings: Settings,
    comms: &[Comm],
    sink: &Sink,
) -> Result<Value> {
    let streams: Vec<_> = rig.gpus.iter().map(|gpu| gpu.stream).collect();
    let mut layer = Layer::new(&rig.group, settings, &streams, comms)?;
    let repeats = Repeats {
        warmup: args.warmup,
        iterations: args.iterations,
        flush: false,
        late: false,
    };
    let stages = settings.stages();
    let mut starts = vec![Start::Following; stages.len()];
    starts[0] = Start::Aligned;
    let ranks = layer.ranks.iter_mut();
    let calls = ranks.map(|rank| |stage: usize, _iteration: u32| rank.enqueue(stages[stage].0));
    let timed = rig.time(repeats, &starts, calls.collect())?;
    layer.wait()?;
    layer.forget()?;
    let ranks = layer.ranks.iter_mut();
    let calls = ranks.map(|rank| |_stage: usize, _iteration: u32| rank.enqueue_all());
    let whole = rig.time(repeats, &[Start::Aligned], calls.collect())?;
    layer.wait()?;
    let (error, bar, layer_us) = (
        layer.error(SAMPLES)?,
        settings.bar(),
        whole[0].gpu_us.median,
    );
    layer.close()?;

    let carried_by = if settings.nccl { "NCCL" } else { "Ferry" };
    let format = settings.format.name().to_uppercase();
    let Settings {
        ranks,
        tokens,
        hidden,
        intermediate,
        experts,
        top_k,
        ..
    } = settings;
    sink.say(format_args!(
        "\nlayer, {format} rows of {tokens} tokens, carried by {carried_by}: µs"
    ));
    let mut times = Vec::new();
    for ((_, stage), timed) in stages.into_iter().zip(timed) {
        let us = timed.gpu_us.median;
        sink.say(format_args!("  {stage:<20} {us:>9.1}"));
        times.push(json!({ "stage": stage, "us": us }));
    }
    sink.say(format_args!("  {:<20} {layer_us:>9.1}", "layer"));
    let samples = SAMPLES.min(tokens) * ranks;
    let figures =
        format!("|y - f64| / |f64|, worst of {samples} tokens: {error:.2e}, bar {bar:.2e}");
    sink.say(format_args!("  {figures}"));
    ensure!(error <= bar, "{figures}");
    Ok(json!({
        "carried_by": carried_by, "format": format, "ranks": ranks, "tokens": tokens, "hidden": hidden,
        "intermediate": intermediate, "experts": experts, "top_k": top_k, "iterations": args.iterations,
        "stages": times, "layer_us": layer_us, "samples": samples, "error": error, "bar": bar,
    }))
}
