//! Tokens of a replay that are encoded already.

use anyhow::{Context, Result, bail, ensure};
use ferry::TokenFormat;
use ferry_reference::{Problem, RankInput};
use safetensors::{Dtype, SafeTensors};

use super::stored::ranks_of;
use ferry_rig::Places;
use ferry_rig::formats::given::Given;
use ferry_rig::formats::{Encoded, groups, row_bytes};

/// Prefixes of the names of codes and scales.
pub const PREFIXES: [&str; 2] = ["codes.", "x_scales."];

/// Tokens of all ranks, as a file has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Codes and scales of each rank's tokens.
    pub of_rank: Vec<Vec<Encoded>>,
    /// Type of the scales.
    dtype: Dtype,
    /// Bytes of codes, and number of scales, of a token.
    widths: [usize; 2],
    /// Places of the scales.
    places: Places,
}

/// Reads every rank's codes and scales; `None` if the file has none.
pub fn parse(file: &SafeTensors<'_>, problem: &Problem, places: Places) -> Result<Option<Tokens>> {
    if PREFIXES.iter().try_fold(0, |most, prefix| {
        Ok::<_, anyhow::Error>(ranks_of(file, prefix)?.max(most))
    })? == 0
    {
        return Ok(None);
    }
    let first = |prefix: &str| {
        let name = format!("{prefix}0");
        let view = file.tensor(&name).ok();
        view.with_context(|| format!("tensor {name} is missing"))
    };
    let (codes, scales) = (first(PREFIXES[0])?, first(PREFIXES[1])?);
    let last = |shape: &[usize]| shape.last().copied().unwrap_or(0);
    let scales_of_token = match places {
        Places::RowMajor => last(scales.shape()),
        Places::Transposed => scales.shape().first().copied().unwrap_or(0),
    };
    let mut tokens = Tokens {
        of_rank: Vec::new(),
        dtype: scales.dtype(),
        widths: [last(codes.shape()), scales_of_token],
        places,
    };
    for (rank, input) in problem.inputs.iter().enumerate() {
        let of_rank = tokens.parse_rank(file, rank, input)?;
        tokens.of_rank.push(of_rank);
    }
    Ok(Some(tokens))
}

impl Tokens {
    fn parse_rank(
        &self,
        file: &SafeTensors<'_>,
        rank: usize,
        input: &RankInput,
    ) -> Result<Vec<Encoded>> {
        let [codes, scales] = PREFIXES.map(|prefix| format!("{prefix}{rank}"));
        let [bytes, width] = self.widths;
        let codes = rows(file, &codes, Dtype::U8, [input.tokens, bytes])?;
        let (dtype, tokens) = (self.dtype, input.tokens);
        let scales = match self.places {
            Places::RowMajor => rows(file, &scales, dtype, [tokens, width])
                .context("--pass-through takes scales as [tokens, scales of a token]")?,
            Places::Transposed => columns(file, &scales, dtype, [width, tokens])
                .context("--pass-through transposed takes scales as [scales of a token, tokens]")?,
        };
        let rows = codes.into_iter().zip(scales);
        Ok(rows
            .map(|(payload, scales)| Encoded {
                payload,
                scales,
                row_scale: None,
            })
            .collect())
    }

    /// Form of the tokens, in which a plan of this format takes them.
    pub fn form(&self, format: TokenFormat, hidden: usize) -> Result<Given> {
        let groups = groups(format, hidden);
        let takes_words = format == TokenFormat::BlockwiseFp8;
        ensure!(
            takes_words || groups == 0 || self.places == Places::RowMajor,
            "--pass-through transposed: dispatch takes transposed scales in fp8, in {} only row-major ones",
            format.name()
        );
        let (given, dtypes, width) = match self.dtype {
            Dtype::I32 | Dtype::U32 if takes_words => (Given::Packed, "I32", groups / 4),
            _ if takes_words => (Given::AnyBits, "F32", groups),
            _ => (Given::AnyBits, "U8", groups),
        };
        let fits = match given {
            Given::Packed => hidden.is_multiple_of(512),
            _ => format!("{:?}", self.dtype) == dtypes,
        };
        let wanted = [row_bytes(format, hidden), width];
        ensure!(
            given.in_format(format, hidden) == given,
            "--pass-through: --format {} takes no scales",
            format.name()
        );
        ensure!(
            fits && self.widths == wanted,
            "--pass-through: codes and x_scales of a token are U8 [{}] and {:?} [{}], and format {} of \
             hidden {hidden} takes U8 [{}] and {dtypes} [{}]",
            self.widths[0],
            self.dtype,
            self.widths[1],
            format.name(),
            wanted[0],
            wanted[1]
        );
        Ok(given)
    }
}

/// Bytes of the rows of a tensor.
fn rows(
    file: &SafeTensors<'_>,
    name: &str,
    dtype: Dtype,
    wanted: [usize; 2],
) -> Result<Vec<Vec<u8>>> {
    let Ok(view) = file.tensor(name) else {
        bail!("tensor {name} is missing")
    };
    ensure!(
        view.dtype() == dtype && view.shape() == wanted,
        "tensor {name} is {:?} {:?}, wanted {dtype:?} {wanted:?}",
        view.dtype(),
        view.shape()
    );
    let bytes = (view.data().len() / wanted[0].max(1)).max(1);
    Ok(view.data().chunks(bytes).map(<[u8]>::to_vec).collect())
}

/// Bytes of the columns of a tensor of scales, one for each token.
fn columns(
    file: &SafeTensors<'_>,
    name: &str,
    dtype: Dtype,
    wanted: [usize; 2],
) -> Result<Vec<Vec<u8>>> {
    let rows = rows(file, name, dtype, wanted)?;
    let bytes = dtype.bitsize() / 8;
    let column = |token: usize| {
        let scales = rows.iter().map(|row| &row[token * bytes..][..bytes]);
        scales.collect::<Vec<_>>().concat()
    };
    Ok((0..wanted[1]).map(column).collect())
}
