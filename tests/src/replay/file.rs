//! The files of a replay: tensors in, tensors out.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use ferry_reference::{Problem, RankInput, bf16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::session::RankOutputs;

/// What a file holds.
pub struct Given {
    /// Everything but what the experts do.
    pub problem: Problem,
    /// What each expert multiplies by.
    pub scale: Vec<f32>,
    /// Whether there are router weights.
    pub weights: bool,
}

/// Reads a file.
pub fn read(path: &Path) -> Result<Given> {
    let parsed = std::fs::read(path)
        .map_err(Into::into)
        .and_then(|bytes| parse(&bytes));
    parsed.with_context(|| path.display().to_string())
}

/// A tensor of the file, with its type and number of dimensions checked; `dims` names them.
fn tensor<'a>(
    file: &SafeTensors<'a>,
    name: &str,
    dtype: Dtype,
    dims: &[&str],
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
        shape.len() == dims.len(),
        "tensor {name} has shape {shape:?}, wanted [{}]",
        dims.join(", ")
    );
    Ok(view)
}

/// The same, with its sizes checked.
fn sized<'a>(
    file: &SafeTensors<'a>,
    name: &str,
    dtype: Dtype,
    dims: &[&str; 2],
    sizes: [usize; 2],
) -> Result<TensorView<'a>> {
    let view = tensor(file, name, dtype, dims)?;
    let shape = view.shape();
    ensure!(
        shape == sizes,
        "tensor {name} has shape {shape:?}, wanted {sizes:?}"
    );
    Ok(view)
}

fn values<T, const B: usize>(view: &TensorView<'_>, value: fn([u8; B]) -> T) -> Vec<T> {
    let chunks = view.data().as_chunks().0.iter();
    chunks.map(|&bytes| value(bytes)).collect()
}

const X: &[&str; 2] = &["tokens", "hidden"];
const ENTRIES: &[&str; 2] = &["tokens", "top_k"];

/// One more than the highest rank that a tensor named `prefix` and a number belongs to. The
/// highest, not the first gap: a rank behind a gap would be dropped without a word.
fn ranks_of(file: &SafeTensors<'_>, prefix: &str) -> Result<usize> {
    let mut ranks = 0;
    for name in file.names() {
        let rank = name.strip_prefix(prefix).unwrap_or_default();
        if rank.is_empty() || !rank.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let Ok(rank) = rank.parse::<u32>() else {
            bail!("tensor {name}: rank {rank} is more than {}", u32::MAX)
        };
        ranks = ranks.max(rank as usize + 1);
    }
    Ok(ranks)
}

fn parse(bytes: &[u8]) -> Result<Given> {
    let file = SafeTensors::deserialize(bytes)?;
    let scale = tensor(&file, "expert_scale", Dtype::F32, &["experts"])?;
    let scale = values(&scale, f32::from_le_bytes);
    let weighted = ranks_of(&file, "topk_weights.")?;
    let ranks = ranks_of(&file, "x.")?
        .max(ranks_of(&file, "topk_ids.")?)
        .max(weighted);
    let hidden = tensor(&file, "x.0", Dtype::BF16, X)?.shape()[1];
    let top_k = tensor(&file, "topk_ids.0", Dtype::I32, ENTRIES)?.shape()[1];
    let weights = weighted > 0;
    let inputs = (0..ranks)
        .map(|rank| parse_rank(&file, rank, (hidden, top_k), weights))
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

fn parse_rank(
    file: &SafeTensors<'_>,
    rank: usize,
    (hidden, top_k): (usize, usize),
    weights: bool,
) -> Result<RankInput> {
    let named = |name: &str| format!("{name}.{rank}");
    let x = tensor(file, &named("x"), Dtype::BF16, X)?;
    let tokens = x.shape()[0];
    let x = sized(file, &named("x"), Dtype::BF16, X, [tokens, hidden])?;
    let entries = [tokens, top_k];
    let ids = sized(file, &named("topk_ids"), Dtype::I32, ENTRIES, entries)?;
    let topk_weights = if weights {
        let view = sized(file, &named("topk_weights"), Dtype::F32, ENTRIES, entries)?;
        values(&view, f32::from_le_bytes)
    } else {
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
pub type Tensors = HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// What a rank's round left, without the rows that are not in use.
pub fn tensors(output: &RankOutputs, problem: &Problem, apart: bool) -> Tensors {
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

/// The bytes of a file.
pub fn serialize(tensors: &Tensors) -> Result<Vec<u8>> {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| {
            Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?))
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(safetensors::serialize(views, None)?)
}

/// Writes what all processes have, in one file.
pub fn write(path: &Path, processes: &[Vec<u8>]) -> Result<()> {
    let files = processes
        .iter()
        .map(|bytes| SafeTensors::deserialize(bytes))
        .collect::<Result<Vec<_>, _>>()?;
    let all = files.iter().flat_map(|file| file.iter());
    let bytes = safetensors::serialize(all, None)?;
    std::fs::write(path, bytes).with_context(|| path.display().to_string())
}
