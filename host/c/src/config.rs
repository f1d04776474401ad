//! The configuration.

use std::time::Duration;

use ferry::layout::OutputElement;
use ferry::{CombineMode, Config, ReceiveFields, ReceiveLayout, TokenFormat};

use crate::status::Failure;
use crate::structs::{flag, sized};
use crate::tensor::ferry_type;

/// Format of the rows of a dispatch. TILED and ROW_MAJOR are layouts of the scales. The guide, "Formats", has
/// the bytes and errors of each.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_format {
    /// BF16, no scales.
    FERRY_FORMAT_BF16 = 0,
    /// e4m3 with an f32 scale per 128 elements, transposed.
    FERRY_FORMAT_BLOCKWISE_FP8 = 1,
    /// e4m3 with an e8m0 scale per 32 elements.
    FERRY_FORMAT_MXFP8_TILED = 2,
    /// The same, scales row by row.
    FERRY_FORMAT_MXFP8_ROW_MAJOR = 3,
    /// e2m1 with an e8m0 scale per 32 elements.
    FERRY_FORMAT_MXFP4_TILED = 4,
    /// The same, scales row by row.
    FERRY_FORMAT_MXFP4_ROW_MAJOR = 5,
    /// e2m1 with an e4m3 scale per 16 elements and one input_scale.
    FERRY_FORMAT_NVFP4_TILED = 6,
    /// The same, scales row by row.
    FERRY_FORMAT_NVFP4_ROW_MAJOR = 7,
    /// e2m1 with an e4m3 scale per 16 elements and a BF16 scale per row.
    FERRY_FORMAT_NVFP4_ROW_SCALED_TILED = 8,
    /// The same, scales row by row.
    FERRY_FORMAT_NVFP4_ROW_SCALED_ROW_MAJOR = 9,
}

/// Way in which the experts' outputs come back.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_combine_mode {
    /// One row for each token and rank: the experts' rank applies the router's weights and sums.
    FERRY_COMBINE_REDUCED = 0,
    /// One row for each token and top-k slot: the token's rank applies weights and sums, or keeps the rows.
    FERRY_COMBINE_EXACT = 1,
}

/// Layout of the rows that a dispatch leaves on the experts' rank. BY_EXPERT and PADDED have a row for each
/// assignment. VIEW, STRIDED and COMPACT keep one row for each source rank and token, and combine takes one
/// row for each; they exclude skip_a2a, shared_expert, FERRY_COMBINE_EXACT and tiled scales. PADDED excludes
/// skip_a2a, shared_expert, an expert_alignment, and FERRY_COMBINE_EXACT between nodes; its combine is given
/// weights. All but BY_EXPERT need no ferry_config.options.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_receive_layout {
    /// A row for each assignment, by expert.
    FERRY_RECEIVE_BY_EXPERT = 0,
    /// Rows stay in the receive window, at source * max_tokens_per_rank + token: ferry_communicator_view says
    /// where.
    FERRY_RECEIVE_VIEW = 1,
    /// Rows are copied to the same places of a tensor of yours.
    FERRY_RECEIVE_STRIDED = 2,
    /// Rows are copied to a tensor of yours without gaps.
    FERRY_RECEIVE_COMPACT = 3,
    /// Rows by expert, each expert's in a block of ranks * max_tokens_per_rank rows.
    FERRY_RECEIVE_PADDED = 4,
}

/// Sizes and behaviour of a communicator. All ranks of a group agree on everything but deadline_ns,
/// debug_checks, max_sms, specialise, options, transposed_scales, clear_absent, clear_padding, row_sources,
/// m_indices, which layout keeps rows if receive does, whether rows by expert are in padded blocks and,
/// without skip_a2a, shared_expert.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_config {
    /// sizeof(ferry_config).
    pub size: usize,
    /// Number of experts in the group, 1 to 65,535, divisible by the number of ranks. Rank r has experts
    /// r * experts / ranks and up.
    pub experts: u64,
    /// Experts per token, 1 to 32 and at most experts.
    pub top_k: u64,
    /// Elements per token, a multiple of 8; in formats with scales of 64 (NVFP4) or 128.
    pub hidden: u64,
    /// Most tokens of one rank in a dispatch.
    pub max_tokens_per_rank: u64,
    /// Ranks per node; divides the number of ranks. 0: all ranks are on one node.
    pub p2p_world_size: u64,
    /// Longest time that a kernel waits, in nanoseconds from its start. 0: 10 seconds.
    /// ferry_communicator_set_deadline sets that of later calls. On one node a dispatch waits for ranks whose
    /// combine has not yet read the previous round, but only until the deadline of this rank's own previous
    /// combine (of its wait, if it was split), and not at all after that.
    pub deadline_ns: u64,
    /// A ferry_format.
    pub format: u32,
    /// A ferry_combine_mode.
    pub combine: u32,
    /// Most multiprocessors used by a kernel. 0: all.
    pub max_sms: u32,
    /// 1: every token also goes to a shared expert, whose rows come first in dispatch's outputs. Combine
    /// adds them in f32: in reduced mode to the unrounded sum, in exact mode to the sum rounded to BF16.
    pub shared_expert: u32,
    /// 1: kernels check for experts that a token lists twice.
    pub debug_checks: u32,
    /// 1: all ranks have the same tokens, and nothing is sent. At most 2,680 experts per rank. Each rank's
    /// partial sums are formed in f32 and rounded once, in both modes; in exact mode also before a shared
    /// expert's row, which a token has on one rank (ferry_plan_shared_tokens). The caller adds the partial
    /// sums of the ranks.
    pub skip_a2a: u32,
    /// 1: kernels are compiled for this shape when the communicator is made.
    pub specialise: u32,
    /// 1: kernels with options are loaded too (epilogues, other output types, late weights, tokens counted
    /// on the device). shared_expert, skip_a2a, an expert_alignment above 1, clear_padding, row_sources and
    /// m_indices imply it.
    pub options: u32,
    /// A ferry_receive_layout.
    pub receive: u32,
    /// 1: scales of FERRY_FORMAT_BLOCKWISE_FP8 are [hidden / 128, rows] in views, strided and compact rows;
    /// in padded blocks [hidden / 128, ranks * max_tokens_per_rank] for each expert.
    pub transposed_scales: u32,
    /// 1: dispatch writes zeros to rows without a token; FERRY_RECEIVE_STRIDED only.
    pub clear_absent: u32,
    /// 1: combine also returns weights: received_weights of ferry_combine_input to weights of
    /// ferry_combine_output. Only if receive is VIEW, STRIDED or COMPACT.
    pub combine_weights: u32,
    /// Number of which the first row of each group is a multiple, BY_EXPERT only: a power of two up to 256. 0
    /// and 1: that of the format, 4 in blockwise FP8 and 1 in others. Above 1, outputs have expert_counts and
    /// row_ends. Exact mode between nodes takes only that of the format.
    pub expert_alignment: u32,
    /// 1: dispatch writes zeros to the payload and scales of rows that pad a group, BY_EXPERT and PADDED
    /// only. Otherwise they keep their bits. BY_EXPERT refuses it where no row pads a group: with an
    /// expert_alignment of 1 in formats but blockwise FP8.
    pub clear_padding: u32,
    /// 1: src_info has a third column and outputs have a weight for each row, BY_EXPERT and PADDED only.
    pub row_sources: u32,
    /// 1: outputs have m_indices, BY_EXPERT and PADDED only.
    pub m_indices: u32,
}
sized!(ferry_config, 88);

impl ferry_config {
    /// Converts to the library's configuration, whose layout is apart.
    pub(crate) fn get(&self) -> Result<(Config, ReceiveFields), Failure> {
        // `Plan::new` refuses numbers that are out of range, and names the range.
        let number = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let some = |value: u64| (value != 0).then(|| number(value));
        let sizes = Config::new(
            number(self.experts),
            number(self.top_k),
            number(self.hidden),
            number(self.max_tokens_per_rank),
        );
        let config = Config {
            p2p_world_size: some(self.p2p_world_size),
            format: format("config->format", self.format)?,
            combine: combine_mode(self.combine)?,
            shared_expert: flag("config->shared_expert", self.shared_expert)?,
            deadline: match self.deadline_ns {
                0 => sizes.deadline,
                nanoseconds => Duration::from_nanos(nanoseconds),
            },
            debug_checks: flag("config->debug_checks", self.debug_checks)?,
            max_sms: (self.max_sms != 0).then_some(self.max_sms),
            skip_a2a: flag("config->skip_a2a", self.skip_a2a)?,
            specialise: flag("config->specialise", self.specialise)?,
            options: flag("config->options", self.options)?,
            ..sizes
        };
        Ok((config, self.receive()?))
    }

    fn receive(&self) -> Result<ReceiveFields, Failure> {
        Ok(ReceiveFields {
            layout: receive_layout(self.receive)?,
            transposed_scales: flag("config->transposed_scales", self.transposed_scales)?,
            clear_absent: flag("config->clear_absent", self.clear_absent)?,
            combine_weights: flag("config->combine_weights", self.combine_weights)?,
            expert_alignment: self.expert_alignment.max(1) as usize,
            clear_padding: flag("config->clear_padding", self.clear_padding)?,
            row_sources: flag("config->row_sources", self.row_sources)?,
            m_indices: flag("config->m_indices", self.m_indices)?,
        })
    }
}

/// Finds a format by its number: `ferry_format` numbers formats as the library does.
pub(crate) fn format(name: &str, number: u32) -> Result<TokenFormat, Failure> {
    let format = TokenFormat::ALL.get(number as usize).copied();
    format.ok_or_else(|| Failure::value(name, number, "no ferry_format"))
}

fn combine_mode(number: u32) -> Result<CombineMode, Failure> {
    const REDUCED: u32 = ferry_combine_mode::FERRY_COMBINE_REDUCED as u32;
    const EXACT: u32 = ferry_combine_mode::FERRY_COMBINE_EXACT as u32;
    match number {
        REDUCED => Ok(CombineMode::Reduced),
        EXACT => Ok(CombineMode::Exact),
        other => Err(Failure::value(
            "config->combine",
            other,
            "no ferry_combine_mode",
        )),
    }
}

/// Finds a layout by its number: `ferry_receive_layout` numbers layouts as the library does.
fn receive_layout(number: u32) -> Result<ReceiveLayout, Failure> {
    let layout = ReceiveLayout::ALL.get(number as usize).copied();
    layout.ok_or_else(|| Failure::value("config->receive", number, "no ferry_receive_layout"))
}

/// Finds the element type of sums by a tensor's `ferry_type`.
pub(crate) fn output_element(name: &str, element: u32) -> Result<OutputElement, Failure> {
    match ferry_type::of(name, element)? {
        ferry_type::FERRY_BF16 | ferry_type::FERRY_U16 => Ok(OutputElement::Bf16),
        ferry_type::FERRY_F16 => Ok(OutputElement::F16),
        ferry_type::FERRY_F32 => Ok(OutputElement::F32),
        other => {
            let rule = "sums are FERRY_BF16, FERRY_F16 or FERRY_F32";
            Err(Failure::value(name, format!("{other:?}"), rule))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ferry_format::*;
    use super::ferry_receive_layout::*;
    use super::*;
    use ferry::ScaleLayout;

    #[test]
    fn formats_have_ferrys_own_numbers() {
        let named = [
            (FERRY_FORMAT_BF16, TokenFormat::Bf16),
            (FERRY_FORMAT_BLOCKWISE_FP8, TokenFormat::BlockwiseFp8),
            (
                FERRY_FORMAT_MXFP8_TILED,
                TokenFormat::Mxfp8(ScaleLayout::Tiled),
            ),
            (
                FERRY_FORMAT_MXFP8_ROW_MAJOR,
                TokenFormat::Mxfp8(ScaleLayout::RowMajor),
            ),
            (
                FERRY_FORMAT_MXFP4_TILED,
                TokenFormat::Mxfp4(ScaleLayout::Tiled),
            ),
            (
                FERRY_FORMAT_MXFP4_ROW_MAJOR,
                TokenFormat::Mxfp4(ScaleLayout::RowMajor),
            ),
            (
                FERRY_FORMAT_NVFP4_TILED,
                TokenFormat::Nvfp4(ScaleLayout::Tiled),
            ),
            (
                FERRY_FORMAT_NVFP4_ROW_MAJOR,
                TokenFormat::Nvfp4(ScaleLayout::RowMajor),
            ),
            (
                FERRY_FORMAT_NVFP4_ROW_SCALED_TILED,
                TokenFormat::Nvfp4RowScaled(ScaleLayout::Tiled),
            ),
            (
                FERRY_FORMAT_NVFP4_ROW_SCALED_ROW_MAJOR,
                TokenFormat::Nvfp4RowScaled(ScaleLayout::RowMajor),
            ),
        ];
        for (number, wanted) in named {
            assert_eq!(format("format", number as u32).unwrap(), wanted);
        }
        assert!(format("format", named.len() as u32).is_err());
    }

    #[test]
    fn layouts_have_ferrys_own_numbers() {
        for (number, layout) in [
            (FERRY_RECEIVE_BY_EXPERT, ReceiveLayout::ByExpert),
            (FERRY_RECEIVE_VIEW, ReceiveLayout::View),
            (FERRY_RECEIVE_STRIDED, ReceiveLayout::Strided),
            (FERRY_RECEIVE_COMPACT, ReceiveLayout::Compact),
            (FERRY_RECEIVE_PADDED, ReceiveLayout::Padded),
        ] {
            assert_eq!(receive_layout(number as u32).unwrap(), layout);
        }
        assert!(receive_layout(5).is_err());
    }
}
