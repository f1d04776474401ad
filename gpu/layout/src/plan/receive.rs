//! Layouts of the rows that a rank receives in a dispatch.

/// Layout of the rows that dispatch leaves on the experts' rank.
///
/// All but [`ByExpert`](Self::ByExpert) and [`Padded`](Self::Padded) have one row for each (source rank,
/// token) with an expert on this rank, by source rank, then token. Combine then takes one row for each of
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ReceiveLayout {
    /// A row for each assignment, by expert, source rank, token and top-k slot.
    #[default]
    ByExpert = 0,
    /// Rows stay in the receive window, at row `source * max_tokens_per_rank + token`.
    View = 1,
    /// Rows are copied to a tensor of the user, to row `source * max_tokens_per_rank + token`, as in a view.
    Strided = 2,
    /// Rows are copied to a tensor of the user's without gaps.
    Compact = 3,
    /// Rows by expert, each expert in a block of `ranks * max_tokens_per_rank` rows.
    Padded = 4,
}

impl ReceiveLayout {
    /// Every layout.
    pub const ALL: [Self; 5] = [
        Self::ByExpert,
        Self::View,
        Self::Strided,
        Self::Compact,
        Self::Padded,
    ];

    /// The layout as a number, for kernels.
    #[inline(always)]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Layout of a [`number`](Self::number); [`ByExpert`](Self::ByExpert) for any other.
    #[inline(always)]
    pub const fn of_number(number: u32) -> Self {
        match number {
            1 => Self::View,
            2 => Self::Strided,
            3 => Self::Compact,
            4 => Self::Padded,
            _ => Self::ByExpert,
        }
    }

    /// Whether rows stay as they came: one for each (source rank, token).
    #[inline(always)]
    pub const fn keeps_rows(self) -> bool {
        !matches!(self, Self::ByExpert | Self::Padded)
    }

    /// Its name in options and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ByExpert => "by-expert",
            Self::View => "view",
            Self::Strided => "strided",
            Self::Compact => "compact",
            Self::Padded => "padded",
        }
    }
}
