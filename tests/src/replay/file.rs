//! The files of a replay: tensors in, tensors out.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use ferry::{ScaleLayout, TokenFormat};
use ferry_reference::{Problem, RankInput, bf16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::stored::{Stored, Tensors, bytes_of, ranks_of};
use super::{encoded, groups, rows};
use ferry_rig::Places;
use ferry_rig::formats::{self, Layout};
use ferry_rig::verify::{Contents, RankOutputs, Received};
use ferry_rig::{Return, Settings};

/// Contents of a file.
pub struct Given {
    /// Everything but what the experts do.
    pub problem: Problem,
    /// Factor of each expert.
    pub scale: Vec<f32>,
    /// Whether there are router weights.
    pub weights: bool,
    /// NVFP4's global scale, if the file has it.
    pub input_scale: Option<f32>,
    /// Factor of the shared expert, if the file has it.
    pub shared_scale: Option<f32>,
    /// Rows that combine adds, by rank, if the file has them.
    pub residual: Option<Vec<Vec<bf16>>>,
    /// Rows that the sums of rows begin with, by rank, if the file has them.
    pub initial: [Option<Vec<Vec<bf16>>>; 2],
    /// Tokens that are encoded, by rank, if the file has them.
    pub encoded: Option<encoded::Tokens>,
}

/// Reads a file, and tokens that are encoded if `places` are those of their scales.
pub fn read(path: &Path, places: Option<Places>) -> Result<Given> {
    let parsed = std::fs::read(path)
        .map_err(Into::into)
        .and_then(|bytes| parse(&bytes, places));
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
/// Prefix of the names of rows that combine adds.
const RESIDUAL: &str = "residual.";
/// Prefixes of the names of rows that the sums of rows begin with.
const INITIAL: [&str; 2] = ["initial.", "second_initial."];

fn parse(bytes: &[u8], places: Option<Places>) -> Result<Given> {
    let file = SafeTensors::deserialize(bytes)?;
    let scale = tensor(&file, "expert_scale", Dtype::F32, &["experts"])?;
    let scale = values(&scale, f32::from_le_bytes);
    let weighted = ranks_of(&file, "topk_weights.")?;
    let mut ranks = weighted;
    let rows = ["x.", "topk_ids.", RESIDUAL, INITIAL[0], INITIAL[1]];
    for prefix in rows.into_iter().chain(encoded::PREFIXES) {
        ranks = ranks.max(ranks_of(&file, prefix)?);
    }
    let input_scale = parse_input_scale(&file)?;
    let hidden = tensor(&file, "x.0", Dtype::BF16, X)?.shape()[1];
    let top_k = tensor(&file, "topk_ids.0", type_of_ids(&file, 0), ENTRIES)?.shape()[1];
    let weights = weighted > 0;
    let inputs = (0..ranks)
        .map(|rank| parse_rank(&file, rank, hidden, top_k, weights))
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
        residual: parse_rows(&file, &problem, RESIDUAL)?,
        initial: [
            parse_rows(&file, &problem, INITIAL[0])?,
            parse_rows(&file, &problem, INITIAL[1])?,
        ],
        encoded: match places {
            Some(places) => encoded::parse(&file, &problem, places)?,
            None => None,
        },
        problem,
        scale,
        weights,
        input_scale,
        shared_scale: parse_scalar(&file, "shared_scale")?,
    })
}

/// Every rank's rows of this name, as many as it has tokens; `None` if no rank has any.
fn parse_rows(
    file: &SafeTensors<'_>,
    problem: &Problem,
    prefix: &str,
) -> Result<Option<Vec<Vec<bf16>>>> {
    if ranks_of(file, prefix)? == 0 {
        return Ok(None);
    }
    let inputs = problem.inputs.iter().enumerate();
    let of_rank = |(rank, input): (usize, &RankInput)| {
        let sizes = [input.tokens, problem.hidden];
        let view = sized(file, &format!("{prefix}{rank}"), Dtype::BF16, X, sizes)?;
        Ok(values(&view, bf16::from_le_bytes))
    };
    inputs.map(of_rank).collect::<Result<_>>().map(Some)
}

/// Type of a rank's expert ids: i64 if the file has these, else i32.
fn type_of_ids(file: &SafeTensors<'_>, rank: usize) -> Dtype {
    match file.tensor(&format!("topk_ids.{rank}")) {
        Ok(view) if view.dtype() == Dtype::I64 => Dtype::I64,
        _ => Dtype::I32,
    }
}

/// A rank's expert ids.
fn parse_ids(file: &SafeTensors<'_>, rank: usize, sizes: [usize; 2]) -> Result<Vec<i32>> {
    let name = format!("topk_ids.{rank}");
    let dtype = type_of_ids(file, rank);
    let view = sized(file, &name, dtype, ENTRIES, sizes)?;
    if dtype == Dtype::I32 {
        return Ok(values(&view, i32::from_le_bytes));
    }
    let wide = values(&view, i64::from_le_bytes);
    let narrow = wide.iter().map(|&id| {
        let narrow = i32::try_from(id).ok();
        narrow.with_context(|| format!("tensor {name}: there is no expert {id}"))
    });
    narrow.collect()
}

fn parse_input_scale(file: &SafeTensors<'_>) -> Result<Option<f32>> {
    const NAME: &str = "input_scale";
    let Some(scale) = parse_scalar(file, NAME)? else {
        return Ok(None);
    };
    let both = [scale, 1.0 / scale];
    ensure!(
        scale > 0.0 && both.iter().all(|x| x.is_normal()),
        "tensor {NAME} is {scale:e}, wanted 2^-126 to 2^126"
    );
    Ok(Some(scale))
}

/// An f32 `[1]`, if the file has it.
fn parse_scalar(file: &SafeTensors<'_>, name: &str) -> Result<Option<f32>> {
    if !file.names().into_iter().any(|other| other == name) {
        return Ok(None);
    }
    let view = tensor(file, name, Dtype::F32, &["1"])?;
    let &[value] = &values(&view, f32::from_le_bytes)[..] else {
        bail!("tensor {name} has shape {:?}, wanted [1]", view.shape())
    };
    Ok(Some(value))
}

/// Checks that all ranks have the same tokens, experts and weights.
pub fn require_same(problem: &Problem) -> Result<()> {
    let first = &problem.inputs[0];
    for (rank, input) in problem.inputs.iter().enumerate() {
        let bits = |input: &RankInput| -> Vec<u32> {
            let weights = input.topk_weights.iter();
            weights.map(|weight| weight.to_bits()).collect()
        };
        let x = |input: &RankInput| -> Vec<u16> { input.x.iter().map(|x| x.to_bits()).collect() };
        let is_same = [
            ("x", x(input) == x(first)),
            ("topk_ids", input.topk_ids == first.topk_ids),
            ("topk_weights", bits(input) == bits(first)),
        ];
        for (name, is_same) in is_same {
            ensure!(
                is_same,
                "with --skip-a2a every rank has the same tokens, but tensor {name}.{rank} is not {name}.0"
            );
        }
    }
    Ok(())
}

fn parse_rank(
    file: &SafeTensors<'_>,
    rank: usize,
    hidden: usize,
    top_k: usize,
    weights: bool,
) -> Result<RankInput> {
    let named = |name: &str| format!("{name}.{rank}");
    let x = tensor(file, &named("x"), Dtype::BF16, X)?;
    let tokens = x.shape()[0];
    let x = sized(file, &named("x"), Dtype::BF16, X, [tokens, hidden])?;
    let entries = [tokens, top_k];
    let topk_ids = parse_ids(file, rank, entries)?;
    let topk_weights = if weights {
        let view = sized(file, &named("topk_weights"), Dtype::F32, ENTRIES, entries)?;
        values(&view, f32::from_le_bytes)
    } else {
        vec![1.0; tokens * top_k]
    };
    Ok(RankInput {
        tokens,
        x: values(&x, bf16::from_le_bytes),
        topk_ids,
        topk_weights,
    })
}

/// Tensors that a rank's round left, without the rows that are not in use.
pub fn tensors(output: &RankOutputs, problem: &Problem, settings: &Settings) -> Tensors {
    let rank = output.rank;
    let (tokens, hidden, top_k) = (problem.inputs[rank].tokens, problem.hidden, problem.top_k);
    let mut all = match &output.received {
        Contents::ByExpert(received) => tensors_by_expert(received, settings),
        Contents::Rows(rows) => rows::tensors(rows, settings),
    };
    let sums = bytes_of(&output.combined, bf16::to_le_bytes);
    let combined = if settings.how() == Return::Apart {
        vec![tokens, top_k, hidden]
    } else {
        vec![tokens, hidden]
    };
    all.push(("combined", (Dtype::BF16, combined, sums)));
    if settings.config.receive.fields().combine_weights {
        let weights = bytes_of(&output.combined_weights, u32::to_le_bytes);
        let weights = (Dtype::F32, vec![tokens, top_k], weights);
        all.push(("combined_weights", weights));
    }
    let named = all.into_iter();
    named
        .map(|(name, tensor)| (format!("{name}.{rank}"), tensor))
        .collect()
}

/// Outputs of a dispatch by expert, with their names.
fn tensors_by_expert(received: &Received, settings: &Settings) -> Vec<(&'static str, Stored)> {
    let rows = rows(received);
    let words = |words: &[u32]| {
        let bytes = bytes_of(words, u32::to_le_bytes);
        (Dtype::U32, vec![words.len()], bytes)
    };
    let ids = bytes_of(&received.expert_ids, i32::to_le_bytes);
    let mut all = vec![
        ("tokens", codes(received)),
        ("row_offsets", words(&received.row_offsets)),
        (
            "expert_ids",
            (Dtype::I32, vec![received.expert_ids.len()], ids),
        ),
    ];
    all.extend(groups::tables(received, rows, &settings.config));
    let format = settings.config.format;
    if format.sizes().group > 0 {
        all.push(("scales", scales(received)));
    }
    if format.scale_layout() == Some(ScaleLayout::Tiled) {
        all.push(("scales_offsets", words(&received.scales_offsets)));
    }
    if format.sizes().has_row_scale {
        let inverses = bytes_of(&received.row_scales[..rows], u16::to_le_bytes);
        all.push(("row_scales", (Dtype::BF16, vec![rows], inverses)));
    }
    all
}

/// Rows that are in use, padding included.
fn rows(received: &Received) -> usize {
    received.row_offsets.last().copied().unwrap_or(0) as usize
}

fn codes(received: &Received) -> Stored {
    let Layout { format, hidden, .. } = received.layout;
    let (rows, row_bytes) = (rows(received), received.layout.row_bytes());
    let bytes = received.tokens[..rows * row_bytes].to_vec();
    match format {
        TokenFormat::Bf16 => (Dtype::BF16, vec![rows, hidden], bytes),
        _ => (Dtype::U8, vec![rows, row_bytes], bytes),
    }
}

fn scales(received: &Received) -> Stored {
    let layout = received.layout;
    let (rows, groups) = (rows(received), layout.groups());
    match (layout.format.scale_layout(), layout.blocks) {
        // Blocks have all rows of the outputs.
        (None, Some(blocks)) if blocks.transposed => {
            let experts = layout.capacity.rows / blocks.rows;
            let dims = vec![experts * groups, blocks.rows];
            (Dtype::F32, dims, received.scales.clone())
        }
        (None, Some(_)) => (Dtype::F32, vec![rows, groups], received.scales.clone()),
        (None, None) => {
            let stride = 4 * layout.capacity.rows;
            let used = (0..groups).flat_map(|group| &received.scales[group * stride..][..4 * rows]);
            (Dtype::F32, vec![groups, rows], used.copied().collect())
        }
        (Some(ScaleLayout::RowMajor), _) => {
            let used = &received.scales[..rows * groups];
            (Dtype::U8, vec![rows, groups], used.to_vec())
        }
        (Some(ScaleLayout::Tiled), _) => {
            let blocks = formats::first_blocks(&received.row_offsets);
            let blocks = blocks.last().copied().unwrap_or(0);
            let used = &received.scales[..blocks * groups * 128];
            (Dtype::U8, vec![blocks, groups / 4, 32, 4, 4], used.to_vec())
        }
    }
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
