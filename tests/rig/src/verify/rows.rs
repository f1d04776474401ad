//! Rows that stay as they came: the contents of a rank's outputs.

use ferry::ReceiveLayout;
use ferry::{Config, TokenFormat};
use ferry_reference::{ReceivedRows, RowNumbers, bf16, round_to_bf16};

use super::values::POISON;
use crate::formats;

/// Layout of a rank's outputs whose rows stay as they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// Place of the rows.
    pub receive: ReceiveLayout,
    /// Format of the rows.
    pub format: TokenFormat,
    /// Elements of a row.
    pub hidden: usize,
    /// Top-k slots of a row.
    pub top_k: usize,
    /// Most tokens of a rank.
    pub max_tokens: usize,
    /// Number of rows.
    pub rows: usize,
    /// Whether scales are `[groups, rows]`.
    pub transposed_scales: bool,
    /// Whether rows without a token are cleared.
    pub clear_absent: bool,
}

impl RowLayout {
    /// Layout of outputs for so many rows.
    pub const fn of(config: &Config, rows: usize) -> Self {
        let fields = config.receive.fields();
        Self {
            receive: fields.layout,
            format: config.format,
            hidden: config.hidden,
            top_k: config.top_k,
            max_tokens: config.max_tokens_per_rank,
            rows,
            transposed_scales: fields.transposed_scales,
            clear_absent: fields.clear_absent,
        }
    }

    /// Numbers of the rows.
    pub fn numbers(&self) -> RowNumbers {
        match self.receive {
            ReceiveLayout::Compact => RowNumbers::Compact {
                capacity: self.rows,
            },
            _ => RowNumbers::Strided {
                max_tokens: self.max_tokens,
            },
        }
    }

    /// Bytes of a row without scales.
    pub fn row_bytes(&self) -> usize {
        formats::row_bytes(self.format, self.hidden)
    }

    /// Scales of a row.
    pub fn groups(&self) -> usize {
        formats::groups(self.format, self.hidden)
    }

    /// Bytes of a row's scales.
    pub fn scale_bytes(&self) -> usize {
        self.groups() * self.format.sizes().scale_bytes as usize
    }

    /// Bytes of a row's own scale: 0 if it has none.
    pub const fn row_scale_bytes(&self) -> usize {
        if self.format.sizes().has_row_scale {
            2
        } else {
            0
        }
    }
}

/// Contents of the outputs of a rank's dispatch whose rows stayed as they came: every tensor, all of it. Of a
/// view, the window's rows take the place of the tensors; rows without a token are [`POISON`] there.
#[derive(Clone, PartialEq, Eq)]
pub struct Rows {
    /// Layout of the tensors.
    pub layout: RowLayout,
    /// Whether `tokens`, and what else of the window is part of a view, were read. They are empty otherwise.
    pub is_read: bool,
    /// `[rows, row bytes]`.
    pub tokens: Vec<u8>,
    /// `[rows, scale bytes]`, or f32 `[groups, rows]`.
    pub scales: Vec<u8>,
    /// BF16 `[rows]`, if rows have scales of their own.
    pub row_scales: Vec<u8>,
    /// `[rows, top_k]`.
    pub ids: Vec<i64>,
    /// f32 bits, `[rows, top_k]`.
    pub weights: Vec<u32>,
    /// `[rows]`.
    pub src_info: Vec<[i32; 2]>,
    /// `[ranks]`.
    pub source_counts: Vec<i32>,
    /// `[local experts]`.
    pub expert_counts: Vec<i32>,
}

/// Rows of a view, as they were in the window, those without a token among them.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Viewed {
    /// `[rows, row bytes]`.
    pub tokens: Vec<u8>,
    /// `[rows, scale bytes]`; empty if they are transposed in a tensor.
    pub scales: Vec<u8>,
    /// BF16 `[rows]`, if rows have scales of their own.
    pub row_scales: Vec<u8>,
}

impl Rows {
    /// Takes the rows that were read of the window. Those without a token become [`POISON`].
    pub(super) fn take_view(&mut self, viewed: &Viewed) {
        let layout = self.layout;
        self.is_read = true;
        self.tokens.clone_from(&viewed.tokens);
        self.row_scales.clone_from(&viewed.row_scales);
        // Transposed ones are in a tensor.
        let mut scales = viewed.scales.clone();
        let scale_bytes = match layout.transposed_scales {
            true => 0,
            false => layout.scale_bytes(),
        };
        for (row, info) in self.src_info.iter().enumerate() {
            if *info == [-1, -1] {
                let parts = [
                    (&mut self.tokens, layout.row_bytes()),
                    (&mut scales, scale_bytes),
                    (&mut self.row_scales, layout.row_scale_bytes()),
                ];
                for (part, width) in parts {
                    part[row * width..(row + 1) * width].fill(POISON);
                }
            }
        }
        if !layout.transposed_scales {
            self.scales = scales;
        }
    }

    /// Describes rows as the oracle does, without their payload.
    pub fn described(layout: RowLayout, rows: &ReceivedRows) -> Self {
        Self {
            layout,
            is_read: false,
            tokens: Vec::new(),
            scales: Vec::new(),
            row_scales: Vec::new(),
            ids: rows.ids.clone(),
            weights: rows.weights.iter().map(|weight| weight.to_bits()).collect(),
            src_info: rows.src_info.clone(),
            source_counts: rows.source_counts.clone(),
            expert_counts: rows.expert_counts.clone(),
        }
    }

    /// Source rank and token of each row that has a token, with the row's number.
    pub fn present(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let rows = self.src_info.iter().enumerate();
        rows.filter_map(|(row, &[source, token])| {
            let (source, token) = (usize::try_from(source).ok()?, usize::try_from(token).ok()?);
            Some((row, source, token))
        })
    }

    /// Answers of the experts of rank `rank` to the rows that are here, BF16 `[rows, hidden]`: the sum over a
    /// row's experts of weight times (element times the expert's factor in `scale`), everything rounded as in
    /// Ferry's own sums, so that results are those of reduced mode by expert. NaN in rows without a token.
    /// `element` returns the elements of a row that has a token, given its number, source rank and token.
    pub fn answers<'a>(
        &'a self,
        scale: &[f32],
        rank: usize,
        elements: impl Fn(usize, usize, usize) -> &'a [bf16],
    ) -> Vec<bf16> {
        let RowLayout { hidden, top_k, .. } = self.layout;
        let first = rank * self.expert_counts.len();
        let mut answers = vec![bf16::NAN; self.layout.rows * hidden];
        for (row, source, token) in self.present() {
            let slots = row * top_k..(row + 1) * top_k;
            let factors: Vec<_> = self.ids[slots.clone()]
                .iter()
                .zip(&self.weights[slots])
                .filter_map(|(&id, &weight)| {
                    let factor = scale.get(first + usize::try_from(id).ok()?)?;
                    Some((*factor, f32::from_bits(weight)))
                })
                .collect();
            let answer = &mut answers[row * hidden..][..hidden];
            for (answer, x) in answer.iter_mut().zip(elements(row, source, token)) {
                let mut sum = 0.0;
                for &(factor, weight) in &factors {
                    let product = weight * round_to_bf16(x.to_f32() * factor).to_f32();
                    sum += product;
                }
                *answer = round_to_bf16(sum);
            }
        }
        answers
    }
}
