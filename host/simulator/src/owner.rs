//! Owners of the tensors of a launch.

use ferry_layout::{Args, Arguments, SiluArgs, Table, Tensor};

use crate::addresses::{Machine, rank_of};
use crate::error::SimulatorError;

/// Refuses a launch of `rank`, of `ranks`, whose tensors are in the memory of others. An address of nobody is
/// found when it is used.
pub fn require_own(
    machine: Machine,
    seed: u64,
    [rank, ranks]: [u32; 2],
    args: &Args,
) -> Result<(), SimulatorError> {
    for (tensor, address) in tensors(args) {
        let owner = rank_of(address).filter(|&owner| owner < ranks as usize);
        let owner = match owner {
            _ if machine.is_of_another(address) => "another group".to_owned(),
            Some(owner) if owner != rank as usize && machine.has(address) => {
                format!("rank {owner}")
            }
            _ => continue,
        };
        return Err(SimulatorError::ForeignTensor {
            seed,
            rank,
            tensor,
            address,
            owner,
        });
    }
    Ok(())
}

/// Names and addresses of the user's tensors, 0 of one that there is not.
fn tensors(args: &Args) -> Vec<(&'static str, u64)> {
    match args {
        Args::Dispatch(args) => named(args),
        Args::Combine(args) => named(args),
        Args::Counts(_) | Args::GiveUp(_) | Args::Links(_) => Vec::new(),
        Args::Silu(silu) => {
            let SiluArgs {
                input,
                row_offsets,
                output,
                scales,
                scales_offsets,
                input_scales,
                ..
            } = *silu;
            vec![
                ("input", input),
                ("row_offsets", row_offsets),
                ("output", output),
                ("scales", scales),
                ("offsets of scales", scales_offsets),
                ("input_scales", input_scales),
            ]
        }
    }
}

fn named(args: &impl Arguments) -> Vec<(&'static str, u64)> {
    let tensors = [
        (Tensor::Input, "x"),
        (Tensor::Output, "tokens"),
        (Tensor::Expert, "expert_rows"),
        (Tensor::Combined, "combined"),
        (Tensor::Initial, "initial"),
        (Tensor::SecondInitial, "initial"),
    ];
    let tables = [
        (Table::TopkIds, "topk_ids"),
        (Table::TopkWeights, "topk_weights"),
        (Table::InputScale, "input_scale"),
        (Table::InputScales, "x_scales"),
        (Table::TokensOnDevice, "tokens_on_device"),
        (Table::RowOffsets, "row_offsets"),
        (Table::ExpertIds, "expert_ids"),
        (Table::SrcInfo, "src_info"),
        (Table::Scales, "scales"),
        (Table::ScalesOffsets, "offsets of scales"),
        (Table::RowScales, "row_scales"),
        (Table::ReceivedIds, "ids"),
        (Table::ReceivedWeights, "weights"),
        (Table::SourceRows, "source_counts"),
        (Table::ExpertRows, "expert_counts"),
        (Table::GroupCounts, "expert_counts"),
        (Table::GroupEnds, "row_ends"),
        (Table::WeightsOfRows, "weights"),
        (Table::GroupsOfRows, "m_indices"),
        (Table::SourceRanges, "source_ranges"),
        (Table::RowWeights, "row_weights"),
        (Table::ReturnedWeights, "received_weights"),
        (Table::CombinedWeights, "weights"),
        (Table::Routes, "kept_ids"),
    ];
    let tensors = tensors.map(|(tensor, name)| (name, args.tensor(tensor)));
    let tables = tables.map(|(table, name)| (name, args.table(table)));
    tensors.into_iter().chain(tables).collect()
}
