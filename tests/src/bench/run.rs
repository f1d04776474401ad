//! The whole run.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use ferry::{CombineMode, Config, Plan, TokenFormat};
use ferry_reference::Problem;

use super::limits::{self, CopySizes};
use super::local;
use super::nccl;
use super::options::{BenchArgs, Part};
use super::processes::Processes;
use super::record::{HEAD, Limits, Phase, Record};
use super::rig::{Repeats, Rig, Rigged, Timed};
use super::round::{Bench, Input, sets};
use super::sink::Sink;
use super::statistics::Summary;
use super::verify::Answers;
use super::{predict, with_options};
use super::{set_up, silu};
use crate::group::{GroupKind, GroupOptions, OpenGroup, open};
use crate::sharing;
use ferry_rig::formats::given::Given;

/// Figures that the rounds are set beside.
#[derive(Default)]
struct Yardsticks {
    limits: Option<Limits>,
    /// Each number of tokens' all-gather and reduce-scatter.
    nccl: Vec<[Summary; 2]>,
}

/// Runs all that `args` ask for.
pub fn run(args: &BenchArgs) -> Result<()> {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
    let started = Instant::now();
    let mut opened = open(&group_options(args)?)?;
    if args.set_up_here {
        set_up::measure_here(&opened.group, args, started)?;
        return Ok(opened.group.close()?);
    }
    let probes = opened.agree(args.files.probes())?;
    let is_first = opened.is_first();
    let OpenGroup {
        group,
        gather,
        ranks_per_gpu,
    } = opened;
    let processes = Processes::new(gather, is_first);
    let rigged = Rigged {
        group: &group,
        ranks_per_gpu,
        processes: &processes,
        probes: &probes,
    };
    match processes.agree(measure_all(rigged, args)) {
        Ok(()) => Ok(group.close()?),
        Err(error) => {
            // Leaving MPI would wait for the processes that have not heard of it and wait
            // elsewhere. What started them ends them when this one ends without leaving.
            std::mem::forget(processes);
            Err(error)
        }
    }
}

/// Options of the group.
fn group_options(args: &BenchArgs) -> Result<GroupOptions> {
    let gpus = ferry::cuda::device_count()?;
    let ranks = args.ranks.unwrap_or(gpus);
    ensure!(
        args.group != GroupKind::Simulated,
        "--group simulated: the benchmark needs GPUs"
    );
    if let Some(part) = args.part_of_one_node() {
        let part = format!("{part:?}").to_lowercase();
        bail!("--only {part}: between nodes only dispatch, combine and pair are measured");
    }
    let has_own = args.group_args.share_gpus || (1..=gpus).contains(&ranks);
    ensure!(
        args.predict.is_none() || !args.group_args.share_gpus,
        "--predict: from ranks that share GPUs nothing follows for ranks with a GPU each"
    );
    ensure!(
        args.group.has_processes() || has_own,
        "{ranks} ranks asked for, and this machine has {gpus} GPUs; --share-gpus lets ranks share them"
    );
    Ok(GroupOptions {
        kind: args.group,
        ranks,
        seed: args.seed,
        args: args.group_args.clone(),
        files: args.files.clone(),
    })
}

fn measure_all(rigged: Rigged<'_>, args: &BenchArgs) -> Result<()> {
    args.routing.check(args.experts, args.top_k)?;
    let processes = rigged.processes;
    let ranks = rigged.group.ranks() as usize;
    ensure!(
        args.ranks.is_none_or(|wanted| wanted == ranks),
        "--ranks {}: {ranks} processes were started, each with a rank",
        args.ranks.unwrap_or(ranks)
    );
    let row_bytes = row_sizes(args, ranks);
    let sizes = CopySizes {
        tokens: &args.tokens,
        row_bytes: &row_bytes,
        experts: args.experts,
        top_k: args.top_k,
        max_sms: args.max_sms,
    };
    let mut sink = processes.agree(Sink::new(args, processes.is_first()))?;
    let copy_bytes = if args.wants(Part::Limits) {
        sizes.memory(ranks)
    } else {
        0
    };
    let mut rig = Rig::new(rigged, copy_bytes)?;
    if args.late_us > 0 {
        ensure!(
            ranks > 1,
            "--late-us {}: one rank waits for none",
            args.late_us
        );
        rig.wait_kernels = rig.kernels_of(f64::from(args.late_us))?;
    }
    sink.say(rig.title());
    if let Some(title) = sharing::title(rig.ranks_per_gpu) {
        sink.say(format_args!("  {title}"));
    }
    for (flag, file) in args.files.given() {
        sink.say(format_args!("  {flag} {}", file.display()));
    }
    let yardsticks = measure_yardsticks(&rig, args, &sizes, &mut sink)?;
    if args.wants(Part::SetUp) {
        set_up::measure(&rig, &mut sink)?;
    }
    if args.wants(Part::Layer) {
        #[cfg(feature = "cudarc")]
        super::layer::measure::measure(&rig, args, &mut sink)?;
        #[cfg(not(feature = "cudarc"))]
        anyhow::bail!("--only layer: this program was built without the feature `cudarc`");
    }
    let records = if args.wants_rounds() {
        rounds(&rig, args, &yardsticks, &mut sink)?
    } else {
        Vec::new()
    };
    if let (Some(ranks), Some(limits)) = (args.predict, &yardsticks.limits) {
        for line in predict::predict(&records, limits, ranks) {
            sink.say(line);
        }
    }
    // Collective, so only if the first process has not failed.
    processes.meet()?;
    rig.close()
}

/// Measures what the machine can do, what a copy does, and NCCL.
fn measure_yardsticks(
    rig: &Rig,
    args: &BenchArgs,
    sizes: &CopySizes,
    sink: &mut Sink,
) -> Result<Yardsticks> {
    let mut yardsticks = Yardsticks::default();
    if args.wants(Part::Limits) {
        let limits = limits::measure(rig, sizes, args)?;
        print_limits(&limits, sink);
        sink.line("limits", &limits)?;
        yardsticks.limits = Some(limits);
    }
    if let (true, Some(limits)) = (args.wants(Part::Silu), &yardsticks.limits) {
        let times = silu::measure(rig, limits.hbm_gb_per_s)?;
        if sink.is_first() {
            silu::print(&times);
        }
        sink.line("silu", &times)?;
    }
    if let (true, Some(limits)) = (args.wants(Part::SkipA2a), &yardsticks.limits) {
        let times = local::measure(rig, args, limits)?;
        if sink.is_first() {
            local::print(&times);
        }
        sink.line("skip_a2a", &times)?;
    }
    if let (true, Some(limits)) = (args.wants(Part::Options), &yardsticks.limits) {
        let times = with_options::measure(rig, args, limits)?;
        if sink.is_first() {
            with_options::print(&times);
        }
        sink.line("options", &times)?;
    }
    if args.wants(Part::Nccl) {
        let measured = rig.processes.agree(run_nccl(rig, args, sink));
        yardsticks.nccl = measured.or_else(|error| {
            sink.say(format_args!("NCCL: failed, left out ({error:#})"));
            rig.reset().map(|()| Vec::new())
        })?;
    }
    Ok(yardsticks)
}

/// Bytes of rows to copy for comparison: dispatch's in each format, and combine's.
fn row_sizes(args: &BenchArgs, ranks: usize) -> Vec<u32> {
    let mut sizes = Vec::new();
    for (format, combine) in args.kinds() {
        if let Ok(shape) = shape(args, ranks, format, combine) {
            sizes.extend([shape.dispatch_row_bytes(), shape.combine_row_bytes()]);
        }
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn shape(
    args: &BenchArgs,
    ranks: usize,
    format: TokenFormat,
    combine: CombineMode,
) -> Result<ferry::layout::Shape> {
    // A group of simulated ranks costs nothing, and checks the sizes.
    let group = ferry::Group::simulated(ranks as u32, 0)?;
    Ok(*Plan::new(&group, args.config(format, combine, 1)?)?.shape())
}

fn print_limits(limits: &Limits, sink: &Sink) {
    sink.say(format_args!(
        "limits: wire {:.0} GB/s a GPU and direction, device memory {:.0} GB/s, signal there and \
         back {:.2} µs, empty kernel {:.2} µs",
        limits.wire_gb_per_s, limits.hbm_gb_per_s, limits.round_trip_us, limits.launch_us
    ));
    sink.say(format_args!(
        "an empty call between events: {:.1} µs cold, {:.1} µs warm",
        limits.empty_call.cold_us, limits.empty_call.warm_us
    ));
    sink.say("all-to-all copy: tokens, bytes of a row: µs with stores, with bulk copies (GB/s)");
    for copy in &limits.copies {
        sink.say(format_args!(
            "{:>5} {:>6}: {:>7.1} {:>7.1} ({:.0})",
            copy.tokens,
            copy.row_bytes,
            copy.stores_us,
            copy.bulk_us,
            copy.bytes as f64 / copy.best_us() / 1e3
        ));
    }
}

/// NCCL's times, or a word why there are none.
fn run_nccl(rig: &Rig, args: &BenchArgs, sink: &Sink) -> Result<Vec<[Summary; 2]>> {
    let nccl = match nccl::open(rig, args.nccl.as_deref())? {
        Ok(nccl) => nccl,
        Err(reason) => {
            sink.say(format_args!("NCCL: skipped, {reason}"));
            return Ok(Vec::new());
        }
    };
    let version = nccl.version()?;
    sink.say(format_args!(
        "NCCL {version}: tokens: all-gather, reduce-scatter in BF16, µs"
    ));
    let repeats = Repeats {
        warmup: args.warmup,
        iterations: args.iterations,
        flush: false,
        late: true,
    };
    let mut times = Vec::new();
    for &tokens in &args.tokens {
        let [gather, scatter] = nccl
            .time(repeats, tokens, args.hidden)?
            .map(|timed| timed.gpu_us);
        sink.say(format_args!(
            "{tokens:>5}: {:>7.1} {:>7.1}",
            gather.median, scatter.median
        ));
        times.push([gather, scatter]);
    }
    nccl.close()?;
    Ok(times)
}

fn rounds(
    rig: &Rig,
    args: &BenchArgs,
    yardsticks: &Yardsticks,
    sink: &mut Sink,
) -> Result<Vec<Record>> {
    let sets = sets(rig.ranks(), args);
    let mut all = Vec::new();
    for (format, mode) in args.kinds() {
        for (index, &tokens) in args.tokens.iter().enumerate() {
            let mut records = Vec::new();
            for &specialise in args.specialise.values() {
                let config = Config {
                    specialise,
                    ..args.config(format, mode, tokens)?
                };
                records.extend(measure(rig, &sets, args, config, tokens)?);
            }
            if index == 0 {
                sink.say(format_args!("\n{}\n{HEAD}", records[0].title()));
            }
            for record in &mut records {
                compare(
                    record,
                    yardsticks,
                    index,
                    shape(args, rig.ranks(), format, mode)?,
                );
                sink.say(record.row());
                for line in [record.halves(), record.memory()].into_iter().flatten() {
                    sink.say(line);
                }
                sink.line("round", &*record)?;
            }
            all.extend(records);
        }
    }
    Ok(all)
}

/// Measures one number of tokens, cold and warm, then checks the results.
fn measure(
    rig: &Rig,
    sets: &[Problem],
    args: &BenchArgs,
    config: Config,
    tokens: usize,
) -> Result<Vec<Record>> {
    let Config {
        format,
        combine: mode,
        ..
    } = config;
    let bench = Bench::new(rig, sets, config, tokens, Input::of(args, format));
    let mut bench = rig.processes.agree(bench)?;
    // The suites compare the bits of rows that stay as they came.
    let is_compared = !args.no_verify && !args.receive.keeps_rows();
    let oracle = is_compared.then(|| Answers::new(&sets[0], bench.plan.config(), tokens));
    if let Some(oracle) = &oracle {
        oracle.fill_expert_rows(&mut bench)?;
    }
    let mut records = Vec::new();
    for &flush in args.flush_l2.values() {
        let repeats = Repeats {
            warmup: args.warmup,
            iterations: args.iterations,
            flush,
            late: true,
        };
        records.push(fused(&mut bench, args, repeats)?);
    }
    // Nobody is late in pairs.
    if args.wants(Part::Pair) && args.late_us == 0 {
        let pair = bench.pair(args.iterations)?;
        for record in &mut records {
            (record.pair_us, record.pair_p99_us) = (Some(pair.median), Some(pair.p99));
        }
    }
    let mut verified = "no";
    if let Some(oracle) = &oracle {
        bench.once()?;
        let what = || format!("{} {} with {tokens} tokens", format.name(), mode.name());
        rig.processes
            .agree(oracle.verify(&bench).with_context(what))?;
        verified = oracle.extent();
    }
    records
        .iter_mut()
        .for_each(|record| record.verified = verified);
    bench.close()?;
    Ok(records)
}

/// Dispatch and combine, with their halves if asked for.
fn fused(bench: &mut Bench, args: &BenchArgs, repeats: Repeats) -> Result<Record> {
    let [dispatch, combine] = bench.fused(repeats)?;
    let traffic = bench.traffic();
    let config = *bench.plan.config();
    let receive = config.receive.fields();
    let mut record = Record {
        group: bench.group_name(),
        ranks_per_gpu: bench.ranks_per_gpu(),
        ranks: bench.plan.shape().ranks as usize,
        tokens: bench.tokens(),
        plan_tokens: config.max_tokens_per_rank,
        receive: args.receive.name(),
        alignment: receive.expert_alignment,
        clear_padding: receive.clear_padding,
        pass_through: args.given(config.format) != Given::Bf16,
        hidden: args.hidden,
        top_k: args.top_k,
        experts: args.experts,
        routing: args.routing.to_string(),
        late_us: args.late_us,
        format: config.format.name(),
        mode: config.combine.name(),
        specialised: config.specialise,
        l2_flushed: repeats.flush,
        max_sms: args.max_sms,
        dispatch: phase(&dispatch, traffic.dispatch_payload, traffic.dispatch_wire),
        combine: phase(&combine, traffic.combine_wire, traffic.combine_wire),
        pair_us: None,
        pair_p99_us: None,
        verified: "no",
    };
    if let Some(memory) = bench.memory_traffic() {
        record.dispatch.memory_bytes = Some(memory.dispatch);
        record.combine.memory_bytes = Some(memory.combine);
    }
    if args.split {
        let halves = bench.halves(repeats)?.map(|timed| timed.gpu_us.median);
        record.dispatch.halves_us = Some([halves[0], halves[1]]);
        record.combine.halves_us = Some([halves[2], halves[3]]);
    }
    Ok(record)
}

fn phase(timed: &Timed, payload_bytes: u64, wire_bytes: u64) -> Phase {
    Phase {
        gpu_us: timed.gpu_us,
        host_us: timed.host_us,
        payload_bytes,
        wire_bytes,
        gb_per_s: wire_bytes as f64 / timed.gpu_us.median / 1e3,
        ..Phase::default()
    }
}

/// Adds the limits and NCCL's times to a record. `index` is the position of its number of tokens in
/// `BenchArgs::tokens`.
fn compare(
    record: &mut Record,
    yardsticks: &Yardsticks,
    index: usize,
    shape: ferry::layout::Shape,
) {
    let rows = [shape.dispatch_row_bytes(), shape.combine_row_bytes()];
    for (half, phase) in [&mut record.dispatch, &mut record.combine]
        .into_iter()
        .enumerate()
    {
        if let Some(limits) = &yardsticks.limits {
            let floor = phase.wire_bytes as f64 / limits.wire_gb_per_s / 1e3;
            phase.floor_us = (limits.wire_gb_per_s > 0.0).then_some(floor);
            let memory = phase.memory_bytes.map(|bytes| bytes as f64);
            phase.memory_us = memory.map(|bytes| bytes / limits.hbm_gb_per_s / 1e3);
            let copy = limits.copy(record.tokens, rows[half]);
            phase.copy_us = copy.map(super::record::CopyLimit::best_us);
        }
        phase.nccl_us = yardsticks.nccl.get(index).map(|times| times[half].median);
    }
}
