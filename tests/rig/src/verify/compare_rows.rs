//! Comparison of rows that stayed as they came with the oracle.

use ferry_reference::{ReceivedRows, combine_weights, receive_rows};

use super::mismatch::{Mismatch, Subject};
use super::oracle::Oracle;
use super::rows::{RowLayout, Rows};
use super::values::POISON;
use crate::formats::Encoded;

impl Oracle {
    /// Rows that a rank receives, in outputs of this layout.
    pub fn received_rows(&self, rank: usize, layout: &RowLayout) -> ReceivedRows {
        receive_rows(self.routing(), rank, layout.numbers())
    }

    /// Compares the weights that came back to a rank, if any did, with those that all ranks had received.
    pub fn verify_returned(
        &self,
        rank: usize,
        layout: &RowLayout,
        given: &[u32],
    ) -> Result<(), Mismatch> {
        if given.is_empty() {
            return Ok(());
        }
        let ranks = 0..self.routing().ranks;
        let received: Vec<_> = ranks.map(|rank| self.received_rows(rank, layout)).collect();
        let weights: Vec<_> = received.iter().map(|rows| rows.weights.clone()).collect();
        let wanted = &combine_weights(self.routing(), &received, &weights)[rank];
        let wanted: Vec<u32> = wanted.iter().map(|weight| weight.to_bits()).collect();
        let subject = Subject {
            rank,
            tensor: "combined_weights",
        };
        subject.numbers(&wanted, given, layout.top_k)
    }

    /// Compares what a dispatch left on a rank in outputs that were full of [`POISON`].
    pub fn verify_rows(&self, rank: usize, given: &Rows) -> Result<(), Mismatch> {
        let (subject, layout) = (|tensor| Subject { rank, tensor }, &given.layout);
        let wanted = self.received_rows(rank, layout);
        let info = wanted.src_info.as_flattened();
        subject("src_info").numbers(info, given.src_info.as_flattened(), 2)?;
        subject("ids").numbers(&wanted.ids, &given.ids, layout.top_k)?;
        let weights: Vec<u32> = wanted.weights.iter().map(|w| w.to_bits()).collect();
        subject("weights").numbers(&weights, &given.weights, layout.top_k)?;
        subject("source_counts").numbers(&wanted.source_counts, &given.source_counts, 1)?;
        subject("expert_counts").numbers(&wanted.expert_counts, &given.expert_counts, 1)?;

        let image = |width: usize| vec![POISON; width * layout.rows];
        let part = |part: fn(&Encoded) -> Vec<u8>, given: &[u8], width: usize| {
            let held = given.to_vec();
            let token = |row: usize| wanted.tokens[row].and_then(|(s, t)| self.encoded(s, t));
            move |row: usize| match token(row) {
                Some(token) => part(token),
                None => held[row * width..(row + 1) * width].to_vec(),
            }
        };
        let clear = layout.clear_absent;
        let (bytes, scale_bytes) = (layout.row_bytes(), layout.scale_bytes());
        if given.is_read {
            let mut tokens = image(bytes);
            let payload = part(|token| token.payload.clone(), &given.tokens, bytes);
            wanted.write(&mut tokens, bytes, clear, payload);
            subject("tokens").numbers(&tokens, &given.tokens, bytes)?;
            let (mut own, width) = (image(layout.row_scale_bytes()), layout.row_scale_bytes());
            let row_scale = part(row_scale, &given.row_scales, width);
            wanted.write(&mut own, width, clear, row_scale);
            subject("row_scales").numbers(&own, &given.row_scales, width)?;
        }
        let mut scales = image(scale_bytes);
        if layout.transposed_scales {
            let across = transposed(&given.scales, layout.groups());
            let of_row = part(|token| token.scales.clone(), &across, scale_bytes);
            wanted.write_transposed(&mut scales, layout.groups(), clear, of_row);
            subject("scales").numbers(&scales, &given.scales, 4 * layout.rows)
        } else if given.is_read {
            let of_row = part(|token| token.scales.clone(), &given.scales, scale_bytes);
            wanted.write(&mut scales, scale_bytes, clear, of_row);
            subject("scales").numbers(&scales, &given.scales, scale_bytes)
        } else {
            Ok(())
        }
    }
}

/// Bytes of a row's own scale.
fn row_scale(token: &Encoded) -> Vec<u8> {
    token
        .row_scale
        .map_or_else(Vec::new, |scale| scale.to_ne_bytes().to_vec())
}

/// f32 `[rows, groups]` of f32 `[groups, rows]`.
fn transposed(scales: &[u8], groups: usize) -> Vec<u8> {
    let rows = scales.len() / (4 * groups).max(1);
    let places = (0..rows).flat_map(|row| (0..groups).map(move |group| group * rows + row));
    places
        .flat_map(|at| scales[4 * at..4 * (at + 1)].to_vec())
        .collect()
}
