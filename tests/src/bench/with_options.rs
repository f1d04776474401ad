//! Cost of each option: the same round without kernels that take options, and with each of them, in turns.

use anyhow::Result;
use ferry::{Config, Plan};
use ferry_reference::Problem;

use super::options::{BenchArgs, Choice};
use super::record::Limits;
use super::rig::{Repeats, Rig};
use super::round::{Bench, Input, Options, sets};
use super::traffic::{bytes_of_encoded, bytes_of_token};

/// Number of times that all options are timed. The least of the medians counts.
const TURNS: usize = 3;

/// A round's times, in microseconds.
#[derive(Clone, Debug, serde::Serialize)]
pub struct OptionsTime {
    /// The format's name.
    pub format: &'static str,
    /// Tokens of each rank.
    pub tokens: usize,
    /// Options of the round.
    pub options: Options,
    /// Medians of the slowest GPU, dispatch and combine, after the L2 cache was flushed, unless
    /// that was not asked for.
    pub us: [f64; 2],
    /// Time of the device memory for what a shared expert's rows add to dispatch: x is read once more,
    /// a row is written.
    pub shared_us: f64,
}

/// Times every format, every number of tokens and every option.
pub fn measure(rig: &Rig, args: &BenchArgs, limits: &Limits) -> Result<Vec<OptionsTime>> {
    let sets = sets(rig.ranks(), args);
    let mut formats: Vec<_> = args.kinds();
    formats.dedup_by_key(|(format, _)| *format);
    let mut times = Vec::new();
    for (format, mode) in formats {
        for &tokens in &args.tokens {
            let mut least = Options::ALL.map(|_| [f64::INFINITY; 2]);
            for _ in 0..TURNS {
                for (options, least) in Options::ALL.into_iter().zip(&mut least) {
                    let us = time(
                        rig,
                        args,
                        &sets,
                        options,
                        args.config(format, mode, tokens)?,
                    )?;
                    *least = [least[0].min(us[0]), least[1].min(us[1])];
                }
            }
            let plan = Plan::new(&rig.group, args.config(format, mode, tokens)?)?;
            let row = bytes_of_token(plan.shape()) + bytes_of_encoded(plan.shape());
            let bytes = tokens as u64 * row;
            let each = Options::ALL.into_iter().zip(least);
            times.extend(each.map(|(options, us)| OptionsTime {
                format: format.name(),
                tokens,
                options,
                us,
                shared_us: bytes as f64 / limits.hbm_gb_per_s / 1e3,
            }));
        }
    }
    Ok(times)
}

/// Prints them.
pub fn print(times: &[OptionsTime]) {
    println!(
        "\noptions (µs, and µs more than without; for a shared expert times the bytes it adds):"
    );
    println!(
        "{:16} tokens {:16}|  dispatch           |  combine",
        "format", "options"
    );
    for times in times.chunks(Options::ALL.len()) {
        let [dispatch, combine] = times[0].us;
        for time in times {
            let more = time.us[0] - dispatch;
            print!(
                "{:16} {:6} {:16}| {:7.1} {more:+6.2}",
                time.format,
                time.tokens,
                format!("{:?}", time.options),
                time.us[0],
            );
            match time.options {
                Options::SharedExpert => print!(" ({:4.2})", more / time.shared_us),
                _ => print!("       "),
            }
            println!(" | {:7.1} {:+6.2}", time.us[1], time.us[1] - combine);
        }
    }
}

/// Dispatch and combine.
fn time(
    rig: &Rig,
    args: &BenchArgs,
    sets: &[Problem],
    options: Options,
    config: Config,
) -> Result<[f64; 2]> {
    let bench = Bench::new(
        rig,
        sets,
        Config {
            options: options != Options::None,
            shared_expert: options == Options::SharedExpert,
            ..config
        },
        config.max_tokens_per_rank,
        Input {
            options,
            ..Input::of(args, config.format)
        },
    );
    let mut bench = rig.processes.agree(bench)?;
    let repeats = Repeats {
        warmup: args.warmup,
        iterations: args.iterations,
        flush: args.flush_l2 != Choice::No,
        late: false,
    };
    let timed = bench.fused(repeats)?.map(|timed| timed.gpu_us.median);
    bench.close()?;
    Ok(timed)
}
