//! Flags of rounds that several programs have.

use ferry::ReceiveFields;

use crate::formats::given::Strides;

/// Padding and tables of rows by expert.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct GroupFlags {
    /// Begin each expert's rows at a multiple of this, a power of two up to 256; by expert. Outputs have the
    /// experts' numbers of rows, and their ends without padding [default: that of the format, 1 or 4]
    #[arg(long, value_name = "ROWS")]
    alignment: Option<usize>,
    /// Write zeros to the rows that pad an expert; by expert
    #[arg(long)]
    clear_padding: bool,
    /// Have source rank, token, slot and weight of each row; by expert
    #[arg(long)]
    row_sources: bool,
    /// Have the expert of each row; by expert
    #[arg(long)]
    m_indices: bool,
}

impl GroupFlags {
    /// The fields with these.
    pub const fn put(self, fields: ReceiveFields) -> ReceiveFields {
        ReceiveFields {
            expert_alignment: match self.alignment {
                Some(rows) => rows,
                None => 1,
            },
            clear_padding: self.clear_padding,
            row_sources: self.row_sources,
            m_indices: self.m_indices,
            ..fields
        }
    }
}

/// Places of the scales that dispatch is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Places {
    /// Token by token.
    RowMajor,
    /// A scale of all tokens after the other.
    Transposed,
}

impl Places {
    /// Strides of the tensors.
    pub const fn strides(self) -> Strides {
        match self {
            Self::RowMajor => Strides::RowMajor,
            Self::Transposed => Strides::Transposed,
        }
    }
}
