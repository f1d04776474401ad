//! Replays given tensors, so that anyone can compare Ferry with a reference of their own.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferry::{CombineMode, Config, TokenFormat};
use ferry_reference::{Problem, RankInput, bf16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::group::{GroupKind, GroupOptions, open};
use crate::session::{RankOutputs, Session, Settings};
use crate::verify::capacity_for;

/// Options of `ferry-tests replay`.
///
/// IN holds, for each rank r: `x.r` bf16 `[tokens, hidden]`, `topk_ids.r` i32 `[tokens, top_k]`,
/// `topk_weights.r` f32 `[tokens, top_k]` (on all ranks or on none), and `expert_scale` f32
/// `[experts]`: the stand-in for an expert multiplies each row by it and rounds to bf16.
/// OUT gets `tokens.r`, `row_offsets.r`, `expert_ids.r`, `src_info.r`, `combined.r`. In exact mode
/// without weights, `combined.r` is `[tokens, top_k, hidden]`; in reduced mode without weights, every
/// weight is 1.
#[derive(clap::Args, Debug)]
pub struct ReplayArgs {
    /// Tensors to read
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// Tensors to write
    #[arg(value_name = "OUT.safetensors")]
    output: PathBuf,
    /// Where the ranks are
    #[arg(long, value_enum, default_value = "simulated")]
    group: GroupKind,
    /// How expert outputs come back
    #[arg(long, value_enum, default_value = "reduced")]
    mode: Mode,
    /// Ranks of a node [default: all]
    #[arg(long, value_name = "N")]
    p2p_world_size: Option<usize>,
    /// Make the split calls
    #[arg(long)]
    split: bool,
    /// Of the simulator
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where processes meet without MPI
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: Option<SocketAddr>,
    /// This process's rank, with --rendezvous
    #[arg(long)]
    rank: Option<u32>,
}

/// [`CombineMode`] on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// One row a rank, weighted where the experts are
    Reduced,
    /// One row a top-k slot, weighted at the source
    Exact,
}

/// What a file holds.
struct Given {
    problem: Problem,
    scale: Vec<f32>,
    weights: bool,
}

/// Runs a replay. Under mpirun, every process reads and rank 0 writes.
pub fn run(args: &ReplayArgs) -> Result<()> {
    let bytes = std::fs::read(&args.input).with_context(|| args.input.display().to_string())?;
    let given = read(&bytes).with_context(|| args.input.display().to_string())?;
    let mut open = open(&GroupOptions {
        kind: args.group,
        ranks: given.problem.ranks,
        seed: args.seed,
        rendezvous: args.rendezvous,
        rank: args.rank,
    })?;
    let (ranks, wanted) = (open.group.ranks() as usize, given.problem.ranks);
    ensure!(
        ranks == wanted,
        "the file has tensors of {wanted} ranks, the group has {ranks}"
    );
    let settings = settings(args, &given);
    let mut session = Session::new(&open.group, &settings)?;
    let outputs = session.round(&given.problem, &given.scale, given.weights)?;
    session.close()?;
    let apart = settings.config.combine == CombineMode::Exact && !given.weights;
    let own: Tensors = outputs
        .iter()
        .flat_map(|o| tensors(o, &given.problem, apart))
        .collect();
    let own = safetensors::serialize(views(&own)?, None)?;
    let all = (open.gather)(&own)?;
    if open.is_first() {
        write(&args.output, &all)?;
        println!(
            "wrote {}: {ranks} ranks, {:?} mode, {} group",
            args.output.display(),
            settings.config.combine,
            open.group.name()
        );
    }
    Ok(open.group.close()?)
}

fn settings(args: &ReplayArgs, given: &Given) -> Settings {
    let problem = &given.problem;
    let most = problem
        .inputs
        .iter()
        .map(|input| input.tokens)
        .max()
        .unwrap_or(0);
    let config = Config {
        experts: problem.experts,
        top_k: problem.top_k,
        hidden: problem.hidden,
        max_tokens_per_rank: most.max(1),
        p2p_world_size: args.p2p_world_size,
        format: TokenFormat::Bf16,
        combine: match args.mode {
            Mode::Reduced => CombineMode::Reduced,
            Mode::Exact => CombineMode::Exact,
        },
        deadline: Duration::from_secs(30),
        debug_checks: false,
        max_sms: None,
    };
    Settings {
        config,
        capacity: capacity_for(problem, TokenFormat::Bf16),
        split: args.split,
    }
}

/// A tensor of the file, with its type and number of dimensions checked.
fn tensor<'a>(
    file: &SafeTensors<'a>,
    name: &str,
    dtype: Dtype,
    dims: usize,
) -> Result<TensorView<'a>> {
    let Ok(view) = file.tensor(name) else {
        bail!("tensor {name} is missing")
    };
    let (given, shape) = (view.dtype(), view.shape());
    ensure!(
        given == dtype,
        "tensor {name} is {given:?}, wanted {dtype:?}"
    );
    ensure!(
        shape.len() == dims,
        "tensor {name} has shape {shape:?}, wanted {dims} dimensions"
    );
    Ok(view)
}

fn values<T, const B: usize>(view: &TensorView<'_>, value: fn([u8; B]) -> T) -> Vec<T> {
    view.data()
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| value(bytes))
        .collect()
}

fn read(bytes: &[u8]) -> Result<Given> {
    let file = SafeTensors::deserialize(bytes)?;
    let scale = values(
        &tensor(&file, "expert_scale", Dtype::F32, 1)?,
        f32::from_le_bytes,
    );
    let ranks = (0..)
        .take_while(|rank| file.tensor(&format!("x.{rank}")).is_ok())
        .count();
    ensure!(ranks > 0, "tensor x.0 is missing");
    let weights = file.tensor("topk_weights.0").is_ok();
    let first = (
        tensor(&file, "x.0", Dtype::BF16, 2)?,
        tensor(&file, "topk_ids.0", Dtype::I32, 2)?,
    );
    let (hidden, top_k) = (first.0.shape()[1], first.1.shape()[1]);
    let inputs = (0..ranks)
        .map(|rank| read_rank(&file, rank, (hidden, top_k), weights))
        .collect::<Result<_>>()?;
    let problem = Problem {
        ranks,
        experts: scale.len(),
        top_k,
        hidden,
        inputs,
    };
    problem.check()?;
    Ok(Given {
        problem,
        scale,
        weights,
    })
}

fn read_rank(
    file: &SafeTensors<'_>,
    rank: usize,
    (hidden, top_k): (usize, usize),
    weights: bool,
) -> Result<RankInput> {
    let x = tensor(file, &format!("x.{rank}"), Dtype::BF16, 2)?;
    let ids = tensor(file, &format!("topk_ids.{rank}"), Dtype::I32, 2)?;
    let tokens = x.shape()[0];
    ensure!(
        x.shape() == [tokens, hidden],
        "tensor x.{rank} has shape {:?}, wanted [{tokens}, {hidden}]",
        x.shape()
    );
    ensure!(
        ids.shape() == [tokens, top_k],
        "tensor topk_ids.{rank} has shape {:?}, wanted [{tokens}, {top_k}]",
        ids.shape()
    );
    let name = format!("topk_weights.{rank}");
    let topk_weights = if weights {
        let view = tensor(file, &name, Dtype::F32, 2)?;
        ensure!(
            view.shape() == [tokens, top_k],
            "tensor {name} has shape {:?}, wanted [{tokens}, {top_k}]",
            view.shape()
        );
        values(&view, f32::from_le_bytes)
    } else {
        ensure!(
            file.tensor(&name).is_err(),
            "tensor {name} is there, but topk_weights.0 is missing"
        );
        vec![1.0; tokens * top_k]
    };
    Ok(RankInput {
        tokens,
        x: values(&x, bf16::from_le_bytes),
        topk_ids: values(&ids, i32::from_le_bytes),
        topk_weights,
    })
}

/// Tensors by name: type, shape, bytes.
type Tensors = HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// What a rank's round left, without the rows that are not in use.
fn tensors(output: &RankOutputs, problem: &Problem, apart: bool) -> Tensors {
    let rank = output.rank;
    let rows = output.row_offsets.last().copied().unwrap_or(0) as usize;
    let (tokens, hidden) = (problem.inputs[rank].tokens, problem.hidden);
    let info = output.src_info[..rows].as_flattened();
    let combined = if apart {
        vec![tokens, problem.top_k, hidden]
    } else {
        vec![tokens, hidden]
    };
    let bytes_of = |words: &[i32]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let offsets = output
        .row_offsets
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    let sums = output
        .combined
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let named = |name: &str| format!("{name}.{rank}");
    HashMap::from([
        (
            named("tokens"),
            (
                Dtype::BF16,
                vec![rows, hidden],
                output.tokens[..2 * rows * hidden].to_vec(),
            ),
        ),
        (
            named("row_offsets"),
            (Dtype::U32, vec![output.row_offsets.len()], offsets),
        ),
        (
            named("expert_ids"),
            (
                Dtype::I32,
                vec![output.expert_ids.len()],
                bytes_of(&output.expert_ids),
            ),
        ),
        (
            named("src_info"),
            (Dtype::I32, vec![rows, 2], bytes_of(info)),
        ),
        (named("combined"), (Dtype::BF16, combined, sums)),
    ])
}

fn views(tensors: &Tensors) -> Result<Vec<(&String, TensorView<'_>)>> {
    tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| {
            Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?))
        })
        .collect()
}

/// Writes what all processes have, in one file.
fn write(path: &Path, processes: &[Vec<u8>]) -> Result<()> {
    let files = processes
        .iter()
        .map(|bytes| SafeTensors::deserialize(bytes))
        .collect::<Result<Vec<_>, _>>()?;
    let all = files.iter().flat_map(|file| file.iter());
    let bytes = safetensors::serialize(all, None)?;
    std::fs::write(path, bytes).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use ferry_reference::workload::{Routing, WorkloadSpec, generate};

    use super::*;
    use crate::verify::{Oracle, compare_rows};

    fn file_of(problem: &Problem, scale: &[f32], weights: bool) -> Vec<u8> {
        let mut all = Tensors::new();
        for (rank, input) in problem.inputs.iter().enumerate() {
            let entries = vec![input.tokens, problem.top_k];
            let x = input.x.iter().flat_map(|x| x.to_le_bytes()).collect();
            let ids = input
                .topk_ids
                .iter()
                .flat_map(|id| id.to_le_bytes())
                .collect();
            let router = input
                .topk_weights
                .iter()
                .flat_map(|w| w.to_le_bytes())
                .collect();
            all.insert(
                format!("x.{rank}"),
                (Dtype::BF16, vec![input.tokens, problem.hidden], x),
            );
            all.insert(
                format!("topk_ids.{rank}"),
                (Dtype::I32, entries.clone(), ids),
            );
            if weights {
                all.insert(
                    format!("topk_weights.{rank}"),
                    (Dtype::F32, entries, router),
                );
            }
        }
        let scale: Vec<u8> = scale.iter().flat_map(|x| x.to_le_bytes()).collect();
        all.insert(
            "expert_scale".into(),
            (Dtype::F32, vec![problem.experts], scale),
        );
        safetensors::serialize(views(&all).unwrap(), None).unwrap()
    }

    fn problem() -> Problem {
        generate(WorkloadSpec {
            ranks: 2,
            experts: 8,
            top_k: 3,
            hidden: 24,
            tokens: vec![5, 2],
            routing: Routing::Holes { probability: 0.2 },
            seed: 3,
        })
    }

    fn replay(mode: Mode, weights: bool) {
        let folder = std::env::temp_dir().join(format!(
            "ferry-replay-{}-{mode:?}-{weights}",
            std::process::id()
        ));
        std::fs::create_dir_all(&folder).unwrap();
        let (input, output) = (
            folder.join("in.safetensors"),
            folder.join("out.safetensors"),
        );
        let (problem, scale) = (problem(), [0.5, 1.5, 2.0, 0.25, 3.0, 1.0, 1.25, 0.75]);
        std::fs::write(&input, file_of(&problem, &scale, weights)).unwrap();
        run(&ReplayArgs {
            input,
            output: output.clone(),
            group: GroupKind::Simulated,
            mode,
            p2p_world_size: Some(1),
            split: weights,
            seed: 9,
            rendezvous: None,
            rank: None,
        })
        .unwrap();
        let combine = if mode == Mode::Exact {
            CombineMode::Exact
        } else {
            CombineMode::Reduced
        };
        let wanted =
            Oracle::new(&problem, &scale, TokenFormat::Bf16).combined(&problem, combine, weights);
        let dispatched = ferry_reference::dispatch(&problem);
        let bytes = std::fs::read(&output).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for rank in 0..2 {
            let combined = values(
                &file.tensor(&format!("combined.{rank}")).unwrap(),
                bf16::from_le_bytes,
            );
            compare_rows(rank, "combined", &wanted[rank], &combined, 24).unwrap();
            let tokens = values(
                &file.tensor(&format!("tokens.{rank}")).unwrap(),
                bf16::from_le_bytes,
            );
            assert_eq!(tokens, dispatched[rank].tokens);
            let offsets = values(
                &file.tensor(&format!("row_offsets.{rank}")).unwrap(),
                u32::from_le_bytes,
            );
            assert_eq!(offsets, dispatched[rank].row_offsets);
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_comes_back_reduced() {
        replay(Mode::Reduced, true);
    }

    #[test]
    fn a_file_comes_back_exact() {
        replay(Mode::Exact, true);
    }

    #[test]
    fn a_file_comes_back_apart() {
        replay(Mode::Exact, false);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let (mut problem, scale) = (problem(), [1.0; 8]);
        problem.inputs[1].topk_ids.truncate(3);
        let told = |bytes: &[u8]| {
            read(bytes)
                .err()
                .map(|e| format!("{e:#}"))
                .unwrap_or_default()
        };
        problem.inputs[1].tokens = 1;
        problem.inputs[1].x.truncate(24);
        problem.inputs[1].topk_weights.truncate(3);
        let good = file_of(&problem, &scale, true);
        assert_eq!(told(&good), "");
        assert!(
            told(b"nonsense").contains("header"),
            "{}",
            told(b"nonsense")
        );
        problem.inputs[1].topk_ids[0] = 8;
        assert!(told(&file_of(&problem, &scale, true)).contains('8'));
    }
}
