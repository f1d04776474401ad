//! Tensors of a dispatch and a combine.

use ferry::{CombineInput, CombineOutput, DispatchInput, DispatchOutput, Plan};

use crate::status::Failure;
use crate::structs::{empty, sized};
use crate::tensor::{all, ferry_tensor, shown};

/// A rank's input to a dispatch. The number of tokens is x.dims[0], 0 to max_tokens_per_rank; it may
/// differ from rank to rank and from round to round.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_dispatch_input {
    /// sizeof(ferry_dispatch_input).
    pub size: usize,
    /// FERRY_BF16 [tokens, hidden], 16-byte aligned. Rows may be apart: strides[0] is a multiple of 16 bytes.
    /// With x_scales: codes of the plan's format, FERRY_E4M3 or FERRY_E2M1 [tokens, hidden].
    pub x: ferry_tensor,
    /// FERRY_I32 or FERRY_I64 [tokens, top_k], each rank's and call's own choice (by expert FERRY_I64 needs
    /// ferry_config.options): the experts of each token, or -1 for "not routed". An id outside
    /// -1..experts is not routed either, and is an input fault. An expert listed twice receives the token
    /// twice, in the order of the slots.
    pub topk_ids: ferry_tensor,
    /// FERRY_F32 [tokens, top_k]: the router's weights, applied in reduced mode. None: all are 1.
    pub topk_weights: ferry_tensor,
    /// FERRY_F32 [1], NVFP4 without row scales only: the global scale, usually 448 * 6 / amax.
    /// None: 1. The same on every rank.
    pub input_scale: ferry_tensor,
    /// FERRY_U32 [1]: number of tokens, the first ones of x; read when the kernel begins. None: all of x.
    /// Needs ferry_config.options.
    pub tokens_on_device: ferry_tensor,
    /// Scales of an x that is encoded already, 4-byte aligned. None: x is FERRY_BF16, and dispatch encodes
    /// it. Each rank's and call's own choice; by expert it needs ferry_config.options. Blockwise FP8:
    /// FERRY_F32 [tokens, hidden / 128] with any strides, for example {1, tokens} if they are transposed;
    /// or FERRY_I32 [tokens, hidden / 512] with any strides: four powers of two (E8M0) in each, the first in
    /// the lowest byte, which arrive as f32. MXFP8, MXFP4: FERRY_E8M0 [tokens, hidden / 32]; NVFP4 without
    /// row scales: FERRY_E4M3 [tokens, hidden / 16]; strides[0] is a multiple of 4. Not with input_scale.
    /// Codes and scales arrive with the bits that they have, but for two 32-bit words: four FERRY_E4M3 codes
    /// 0xff arrive as 0x7f 0xff 0xff 0xff, all NaN, and a word of scales 0xfffffffe arrives as 0xffffffff,
    /// all NaN, and is an input fault, FERRY_FAULT_LOST_SCALES.
    pub x_scales: ferry_tensor,
}
sized!(ferry_dispatch_input, 528);

/// A rank's outputs of a dispatch. ferry_plan_dispatch_layout fills in shapes, types and bytes,
/// ferry_dispatch_buffers_output the addresses too. No tensor may overlap another one of the call. With
/// ferry_config.receive VIEW, STRIDED or COMPACT there is a row for each source rank and token with an expert
/// here: the guide, "Which layout do I want". Padded blocks have the tensors of rows by expert, and "by
/// expert" means them, too, where nothing else is said.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_dispatch_output {
    /// sizeof(ferry_dispatch_output).
    pub size: usize,
    /// [capacity, hidden] in the plan's format, 16-byte aligned: rows by expert, then source rank, then
    /// token, then top-k slot. With a shared expert this rank's own tokens come first. Strided: row source *
    /// max_tokens_per_rank + token. Compact: by source rank, then token. View: none, see
    /// ferry_communicator_view.
    pub tokens: ferry_tensor,
    /// Scales of the rows: in blockwise FP8 FERRY_F32 [hidden / 128, capacity]; in other layouts than
    /// BY_EXPERT [capacity, hidden / 128], unless transposed_scales is 1; padded blocks then have
    /// [local_experts * hidden / 128, ranks * max_tokens_per_rank]; one byte each [blocks, hidden / (4 *
    /// group), 32, 4, 4] if tiled, [capacity, hidden / group] if row-major; none in BF16, and of a view
    /// unless transposed.
    pub scales: ferry_tensor,
    /// FERRY_U32 [groups], tiled scales only: each group's first block.
    pub scale_offsets: ferry_tensor,
    /// FERRY_BF16 [capacity], NVFP4 with row scales only: the inverse of each row's own scale. View: none.
    pub row_scales: ferry_tensor,
    /// FERRY_U32 [groups + 1], by expert: the first row of each group, and the end of the last one. A
    /// group is an expert of this rank; a shared expert is the first group. Rows that pad a group to a
    /// multiple of ferry_plan_info.row_alignment count here; combine does not read padding rows. Never above
    /// the capacity.
    pub row_offsets: ferry_tensor,
    /// FERRY_I32 [groups], by expert: 0, 1, .., the numbers of the groups. Group g is this rank's expert
    /// g, or g - 1 with a shared expert; rank r has the experts from r * local_experts on.
    pub expert_ids: ferry_tensor,
    /// FERRY_I32 [capacity, 2]: each row's token on its source rank, and its top-k slot there. Not written
    /// for rows of the shared expert (row i is this rank's token i) or padding rows: fill with -1 before each
    /// dispatch to tell these apart. View, strided and compact: each row's source rank and token, -1
    /// and -1 in rows without a token. By expert with ferry_config.row_sources FERRY_I32 [capacity, 3]:
    /// source rank, token and top-k slot; -1 three times in rows without a token, those that pad a group and
    /// those from the last row_offsets on. Slot -1 in the shared expert's rows, whose source is this rank;
    /// with skip_a2a all rows' source is this rank.
    pub src_info: ferry_tensor,
    /// [capacity, top_k] of the type of the call's topk_ids, if not by expert: this rank's expert of each
    /// top-k slot, from 0; -1 in other slots and in rows without a token.
    pub ids: ferry_tensor,
    /// FERRY_F32 [capacity, top_k], if not by expert: the router's weights, 0 where ids is -1. By expert with
    /// ferry_config.row_sources FERRY_F32 [capacity, 1]: each row's weight, 1 in the shared expert's rows, 0
    /// in rows without a token.
    pub weights: ferry_tensor,
    /// FERRY_I32 [ranks], if not by expert: rows from each source rank.
    pub source_counts: ferry_tensor,
    /// FERRY_I32 [local_experts], if not by expert: number of ids that name each expert. By expert with
    /// ferry_config.expert_alignment above 1, and in padded blocks, FERRY_I32 [groups]: rows of each group,
    /// without padding.
    pub expert_counts: ferry_tensor,
    /// FERRY_U32 [groups], by expert with ferry_config.expert_alignment above 1, and in padded blocks: the
    /// row after the last one of each group, without padding.
    pub row_ends: ferry_tensor,
    /// FERRY_I32 [capacity], with ferry_config.m_indices: the group of each row, -1 in rows without a token.
    pub m_indices: ferry_tensor,
    /// FERRY_I64 [local_experts, ranks], of padded blocks: the rows of each source rank in each expert's
    /// block, in the lower 32 bits their number, in the upper ones the row of the block at which they begin.
    pub source_ranges: ferry_tensor,
}
sized!(ferry_dispatch_output, 736);

/// A rank's input to a combine. By expert, row_weights, row_scales, bias_0, bias_1 and residual need
/// ferry_config.options. row_scales, bias_0, bias_1 and residual are applied to the sums in this order, in
/// f32, after a shared expert's row is added and before the result is rounded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_combine_input {
    /// sizeof(ferry_combine_input).
    pub size: usize,
    /// FERRY_BF16 [capacity, hidden], 16-byte aligned: the experts' outputs in the order of the
    /// dispatch's tokens, with the same capacity. View, strided and compact: for each row the sum
    /// over this rank's experts, each output times its weight; rows without a token are not read.
    pub expert_rows: ferry_tensor,
    /// FERRY_F32 [tokens, top_k], exact mode only: the weights of this rank's own tokens. None: the rows
    /// of a token are not summed. Padded blocks need it in exact mode.
    pub topk_weights: ferry_tensor,
    /// FERRY_F32 [capacity], reduced mode, by expert and in padded blocks, which need it: weights of the
    /// expert rows, instead of the router's.
    pub row_weights: ferry_tensor,
    /// FERRY_F32 [tokens]: a factor for each token's sum.
    pub row_scales: ferry_tensor,
    /// FERRY_BF16 [hidden], 16-byte aligned: added to each token.
    pub bias_0: ferry_tensor,
    /// A second bias like bias_0, added after it.
    pub bias_1: ferry_tensor,
    /// FERRY_BF16 [tokens, hidden], 16-byte aligned: added.
    pub residual: ferry_tensor,
    /// FERRY_BF16 [tokens, hidden], 16-byte aligned, if not by expert: sums begin with it, in f32.
    pub initial_0: ferry_tensor,
    /// A second one like initial_0, added after it.
    pub initial_1: ferry_tensor,
    /// FERRY_F32 [capacity, top_k], if ferry_config.combine_weights is 1: weights that return with the rows.
    pub received_weights: ferry_tensor,
}
sized!(ferry_combine_input, 736);

/// A rank's output of a combine.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_combine_output {
    /// sizeof(ferry_combine_output).
    pub size: usize,
    /// Sums, which begin at +0: [tokens, hidden] in FERRY_BF16, or with options FERRY_F16 or FERRY_F32. In
    /// exact mode without weights the rows themselves: FERRY_BF16 [tokens, top_k, hidden]. 16-byte aligned;
    /// may not overlap an input.
    pub combined: ferry_tensor,
    /// FERRY_F32 [tokens, top_k], if ferry_config.combine_weights is 1: for each slot the received_weights of
    /// its token's row on the rank of its expert; 0 in slots that are not routed.
    pub weights: ferry_tensor,
}
sized!(ferry_combine_output, 112);

impl ferry_dispatch_input {
    /// Its tensors, in the order of the library's table, of which C has no `kept_ids`.
    const fn tensors(&self) -> [&ferry_tensor; 7] {
        [
            &self.x,
            &self.topk_ids,
            &self.topk_weights,
            &self.input_scale,
            &self.tokens_on_device,
            &self.x_scales,
            &ferry_tensor::NONE,
        ]
    }

    /// # Safety
    /// The rule of memory.
    pub(crate) unsafe fn get(&self) -> Result<DispatchInput, Failure> {
        // SAFETY: the rule of memory.
        let given = unsafe { all(DispatchInput::ARGUMENTS, self.tensors())? };
        Ok(DispatchInput::of(given)?)
    }
}

impl ferry_dispatch_output {
    /// Its tensors, in the order of the library's table.
    const fn tensors(&mut self) -> [&mut ferry_tensor; 14] {
        [
            &mut self.tokens,
            &mut self.scales,
            &mut self.scale_offsets,
            &mut self.row_scales,
            &mut self.row_offsets,
            &mut self.expert_ids,
            &mut self.src_info,
            &mut self.ids,
            &mut self.weights,
            &mut self.source_counts,
            &mut self.expert_counts,
            &mut self.row_ends,
            &mut self.m_indices,
            &mut self.source_ranges,
        ]
    }

    /// # Safety
    /// The rule of memory.
    pub(crate) unsafe fn get(mut self, plan: &Plan) -> Result<DispatchOutput, Failure> {
        let tensors = self.tensors().map(|tensor| &*tensor);
        // SAFETY: the rule of memory.
        let given = unsafe { all(DispatchOutput::ARGUMENTS, tensors)? };
        Ok(DispatchOutput::of(plan, given)?)
    }

    /// The C form of a dispatch's outputs, in the order of the library's table.
    pub(crate) fn of(tensors: [Option<ferry_tensor>; 14]) -> Self {
        let mut made: Self = empty();
        for (place, tensor) in made.tensors().into_iter().zip(tensors) {
            *place = tensor.unwrap_or(ferry_tensor::NONE);
        }
        made
    }
}

impl ferry_combine_input {
    /// Its tensors, in the order of the library's table.
    const fn tensors(&self) -> [&ferry_tensor; 10] {
        [
            &self.expert_rows,
            &self.topk_weights,
            &self.row_weights,
            &self.row_scales,
            &self.bias_0,
            &self.bias_1,
            &self.residual,
            &self.initial_0,
            &self.initial_1,
            &self.received_weights,
        ]
    }

    /// # Safety
    /// The rule of memory.
    pub(crate) unsafe fn get(&self) -> Result<CombineInput, Failure> {
        // SAFETY: the rule of memory.
        let given = unsafe { all(CombineInput::ARGUMENTS, self.tensors())? };
        Ok(CombineInput::of(given)?)
    }
}

impl ferry_combine_output {
    /// Its tensors, in the order of the library's table.
    const fn tensors(&self) -> [&ferry_tensor; 2] {
        [&self.combined, &self.weights]
    }

    /// # Safety
    /// The rule of memory.
    pub(crate) unsafe fn get(&self) -> Result<CombineOutput, Failure> {
        // SAFETY: the rule of memory.
        let given = unsafe { all(CombineOutput::ARGUMENTS, self.tensors())? };
        Ok(CombineOutput::of(given)?)
    }

    /// The C form of a combine's output.
    pub(crate) fn of(output: &CombineOutput) -> Self {
        let [combined, weights] = output
            .tensors()
            .map(|tensor| tensor.as_ref().map_or(ferry_tensor::NONE, shown));
        Self {
            size: 0,
            combined,
            weights,
        }
    }
}

#[cfg(test)]
mod tests {
    use ferry::Argument;

    use super::*;
    use crate::status::with_fields_of_c;
    use crate::structs::Sized0;

    /// Checks that the fields of a struct in ferry.h are its size and the arguments of a table, and that its
    /// tensors, from `at` on, are in this order.
    fn fields_are<T: Sized0>(table: &[Argument], at: usize, tensors: &[usize]) {
        let header = include_str!("../include/ferry.h");
        let (all, _) = header.split_once(&format!("}} {};", T::NAME)).unwrap();
        let (_, all) = all.rsplit_once("typedef struct").unwrap();
        let lines = all.lines().map(str::trim);
        let fields = lines.filter(|line| line.ends_with(';') && !line.starts_with("//"));
        let names = fields.map(|line| line.trim_end_matches(';').rsplit(' ').next().unwrap());
        let wanted = table.iter().map(|of| with_fields_of_c(of.name.to_owned()));
        let wanted: Vec<_> = std::iter::once("size".to_owned()).chain(wanted).collect();
        assert_eq!(names.collect::<Vec<_>>(), wanted);
        let places = (0..table.len()).map(|number| at + number * size_of::<ferry_tensor>());
        assert_eq!(tensors, places.collect::<Vec<_>>(), "{}", T::NAME);
    }

    fn at(tensor: &ferry_tensor) -> usize {
        (&raw const *tensor).addr()
    }

    #[test]
    fn the_fields_of_structs_are_the_arguments_of_the_tables() {
        let [table @ .., kept_ids] = DispatchInput::ARGUMENTS;
        assert_eq!(kept_ids.name, "kept_ids");
        let input: ferry_dispatch_input = empty();
        let tensors = input.tensors().map(at);
        fields_are::<ferry_dispatch_input>(table, at(&input.x), &tensors[..6]);
        let mut output: ferry_dispatch_output = empty();
        let tensors = output.tensors().map(|tensor| at(tensor));
        let table = DispatchOutput::ARGUMENTS;
        fields_are::<ferry_dispatch_output>(table, at(&output.tokens), &tensors);
        let input: ferry_combine_input = empty();
        let (table, tensors) = (CombineInput::ARGUMENTS, input.tensors().map(at));
        fields_are::<ferry_combine_input>(table, at(&input.expert_rows), &tensors);
        let output: ferry_combine_output = empty();
        let (table, tensors) = (CombineOutput::ARGUMENTS, output.tensors().map(at));
        fields_are::<ferry_combine_output>(table, at(&output.combined), &tensors);
    }
}
