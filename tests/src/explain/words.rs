//! The names of tactics, in the words of gpu/protocol/DESIGN.md.

use ferry::CombineMode;
use ferry_protocol::tactics::{Numbering, Split, Wire};

/// Name of a way in which rows travel.
pub const fn wire(wire: Wire) -> &'static str {
    match wire {
        Wire::Inline => "inline flags",
        Wire::Flagged => "flagged",
        Wire::FlaggedByBlock => "flagged by block",
        Wire::Remote => "remote",
    }
}

/// Name of a way to number assignments.
pub const fn numbering(numbering: Numbering) -> &'static str {
    match numbering {
        Numbering::InBlock => "in the block",
        Numbering::Tiles => "tiles",
    }
}

/// Name of a way in which warps share the work.
pub const fn split(split: Split) -> &'static str {
    match split {
        Split::Shared => "shared",
        Split::SenderHalf => "sender half",
        Split::AllSend => "all send",
        Split::Specialised => "specialised",
        Split::SpecialisedBySm => "specialised by SM",
    }
}

/// Name of a mode of combine.
pub const fn mode(mode: CombineMode) -> &'static str {
    match mode {
        CombineMode::Reduced => "reduced",
        CombineMode::Exact => "exact",
    }
}
