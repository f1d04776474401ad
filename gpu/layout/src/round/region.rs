//! Data that faults are about.

/// Data that a kernel was waiting for or reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// Assignment counts of a source.
    Counts,
    /// Presence bits of a source's tokens.
    Presence,
    /// A dispatch row.
    DispatchRow,
    /// A peer's word that it has read its dispatch rows.
    Credit,
    /// A combine row.
    CombineRow,
    /// Ranks within experts that other warps of this GPU compute.
    RanksInExpert,
    /// Row offsets that another warp of this GPU computes.
    Offsets,
    /// The user's expert ids.
    TopkIds,
    /// The user's output tensors.
    Output,
    /// The user's number of tokens on the device.
    TokensOnDevice,
    /// Blocks of 128 rows of the user's tiled scales.
    ScaleBlocks,
    /// The last launch of this rank.
    LastLaunch,
    /// The user's scales of tokens that are encoded already.
    InputScales,
    /// An expert's block of the user's output tensors.
    ExpertBlock,
    /// NVSHMEM's channel of requests for ranks of other nodes.
    Channel,
}

impl Region {
    pub(super) const ALL: [Self; 15] = [
        Self::Counts,
        Self::Presence,
        Self::DispatchRow,
        Self::Credit,
        Self::CombineRow,
        Self::RanksInExpert,
        Self::Offsets,
        Self::TopkIds,
        Self::Output,
        Self::TokensOnDevice,
        Self::ScaleBlocks,
        Self::LastLaunch,
        Self::InputScales,
        Self::ExpertBlock,
        Self::Channel,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Counts => "assignment counts",
            Self::Presence => "token presence bits",
            Self::DispatchRow => "dispatch row",
            Self::Credit => "word that it has read its dispatch rows",
            Self::CombineRow => "combine row",
            Self::RanksInExpert => "ranks within experts",
            Self::Offsets => "row offsets",
            Self::TopkIds => "topk_ids",
            Self::Output => "rows",
            Self::TokensOnDevice => "tokens_on_device",
            Self::ScaleBlocks => "blocks of tiled scales",
            Self::LastLaunch => "last launch",
            Self::InputScales => "x_scales",
            Self::ExpertBlock => "rows of an expert",
            Self::Channel => "channel to other nodes",
        }
    }
}
