//! The layout of received rows, with what only that layout has.

use std::fmt;

use ferry_layout::ReceiveLayout;

use crate::error::{PlanError, Problem};

/// Layout of the rows that dispatch leaves on the experts' rank, with what only that layout has.
///
/// [`ByExpert`](Self::ByExpert) and [`Padded`](Self::Padded) have a row for each assignment. All others keep
/// one row for each (source rank, token), and combine takes one row for each; they exclude `skip_a2a`,
/// `shared_expert`, exact mode and tiled scales. Padded blocks exclude `skip_a2a` and `shared_expert`, and
/// exact mode between nodes. [Which layout do I want](crate::guide::receive) has a picture of each.
///
/// ```
/// use ferry::{ByExpert, Config, Receive, ReceiveLayout};
///
/// let aligned = ByExpert { alignment: 128, m_indices: true, ..ByExpert::default() };
/// let config = Config { receive: Receive::ByExpert(aligned), ..Config::new(256, 8, 7168, 128) };
/// assert_eq!(config.receive.layout(), ReceiveLayout::ByExpert);
/// let config = Config { receive: Receive::of(ReceiveLayout::View), ..config };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Receive {
    /// A row for each assignment, by expert, source rank, token and top-k slot.
    ByExpert(ByExpert),
    /// Rows by expert, each expert in a block of `ranks * max_tokens_per_rank` rows.
    Padded(Padded),
    /// Rows stay in the receive window, at row `source * max_tokens_per_rank + token`.
    View(KeptRows),
    /// Rows are copied to a tensor of the user, to row `source * max_tokens_per_rank + token`, as in a view.
    Strided(StridedRows),
    /// Rows are copied to a tensor of the user without gaps.
    Compact(KeptRows),
}

/// Rows by expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByExpert {
    /// Number of which each group's first row is a multiple: a power of two, 1 to
    /// [`MAX_EXPERT_ALIGNMENT`](crate::MAX_EXPERT_ALIGNMENT). Rows between a group's last one and the next
    /// group's first one pad the group. Blockwise FP8 aligns groups to 4 rows in any case. Above 1, outputs
    /// have [`expert_counts`](crate::DispatchOutput::expert_counts) and
    /// [`row_ends`](crate::DispatchOutput::row_ends), too. [The guide](crate::guide::receive) has a picture.
    /// Exact mode between nodes takes only that of the format.
    pub alignment: usize,
    /// Whether dispatch writes zeros to the payload and scales of rows that pad a group. Otherwise they keep
    /// their bits. Refused where no row pads a group: with an [`alignment`](Self::alignment) of 1 in formats
    /// but blockwise FP8.
    pub clear_padding: bool,
    /// Whether [`src_info`](crate::DispatchOutput::src_info) has a source rank for each row, and outputs have
    /// its router's weight ([`weights`](crate::DispatchOutput::weights)).
    pub row_sources: bool,
    /// Whether outputs have the group of each row ([`m_indices`](crate::DispatchOutput::m_indices)).
    pub m_indices: bool,
}

impl ByExpert {
    /// No alignment beyond the format's, and no tables.
    pub const PLAIN: Self = Self {
        alignment: 1,
        clear_padding: false,
        row_sources: false,
        m_indices: false,
    };
}

impl Default for ByExpert {
    /// [`PLAIN`](Self::PLAIN).
    fn default() -> Self {
        Self::PLAIN
    }
}

/// Rows by expert in blocks of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Padded {
    /// Whether the scales of [`TokenFormat::BlockwiseFp8`](crate::TokenFormat::BlockwiseFp8) are transposed
    /// in each block.
    pub transposed_scales: bool,
    /// Whether dispatch writes zeros to the payload and scales of rows without an assignment. Otherwise they
    /// keep their bits.
    pub clear_padding: bool,
    /// The same as [`ByExpert::row_sources`].
    pub row_sources: bool,
    /// The same as [`ByExpert::m_indices`].
    pub m_indices: bool,
}

/// One row for each (source rank, token), as it came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct KeptRows {
    /// Whether the scales of [`TokenFormat::BlockwiseFp8`](crate::TokenFormat::BlockwiseFp8) are
    /// `[hidden / 128, rows]` rather than `[rows, hidden / 128]`.
    pub transposed_scales: bool,
    /// Whether combine also returns f32 weights with the rows, one for each top-k slot:
    /// [`CombineInput::received_weights`](crate::CombineInput::received_weights) to
    /// [`CombineOutput::Weighted`](crate::CombineOutput::Weighted).
    pub combine_weights: bool,
}

/// One row for each (source rank, token), at its own place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StridedRows {
    /// The same as [`KeptRows::transposed_scales`].
    pub transposed_scales: bool,
    /// The same as [`KeptRows::combine_weights`].
    pub combine_weights: bool,
    /// Whether dispatch writes zeros to the payload and scales of rows without a token. Otherwise they keep
    /// their bits.
    pub clear_absent: bool,
}

/// A [`Receive`] as files, C and Python say it: the layout, and fields of which each layout takes some.
/// [`Receive`]'s variants document them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReceiveFields {
    /// The layout: `receive` in files.
    pub layout: ReceiveLayout,
    /// All layouts but by expert.
    pub transposed_scales: bool,
    /// Strided rows only.
    pub clear_absent: bool,
    /// View, strided and compact rows.
    pub combine_weights: bool,
    /// Rows by expert only; 1 in others.
    pub expert_alignment: usize,
    /// Rows by expert and padded blocks.
    pub clear_padding: bool,
    /// Rows by expert and padded blocks.
    pub row_sources: bool,
    /// Rows by expert and padded blocks.
    pub m_indices: bool,
}

impl ReceiveFields {
    /// A layout whose other fields are their defaults.
    pub const fn new(layout: ReceiveLayout) -> Self {
        Self {
            layout,
            transposed_scales: false,
            clear_absent: false,
            combine_weights: false,
            expert_alignment: 1,
            clear_padding: false,
            row_sources: false,
            m_indices: false,
        }
    }

    /// The layout with the fields that it takes, and the problems of all others that are set.
    pub fn taken(self) -> (Receive, Vec<Problem>) {
        let receive = self.layout;
        let keeps_rows = receive.keeps_rows();
        let by_expert = receive == ReceiveLayout::ByExpert;
        let set = |is_set: bool| is_set.then(|| true.to_string());
        let aligns = self.expert_alignment != 1;
        let of_groups = "and only rows by expert and padded blocks take it";
        let wrong = [
            (
                "transposed_scales",
                set(self.transposed_scales && by_expert),
                "where the scales of fp8 are transposed anyway",
            ),
            (
                "clear_absent",
                set(self.clear_absent && receive != ReceiveLayout::Strided),
                "and only strided rows can be cleared",
            ),
            (
                "combine_weights",
                set(self.combine_weights && !keeps_rows),
                "and weights return only with rows that stay as they came",
            ),
            (
                "expert_alignment",
                (aligns && !by_expert).then(|| self.expert_alignment.to_string()),
                "and only rows by expert take it",
            ),
            (
                "clear_padding",
                set(self.clear_padding && keeps_rows),
                of_groups,
            ),
            (
                "row_sources",
                set(self.row_sources && keeps_rows),
                of_groups,
            ),
            ("m_indices", set(self.m_indices && keeps_rows), of_groups),
        ];
        let problem = |(field, value, why): (_, Option<String>, _)| {
            let rule = format!("receive is {receive}, {why}");
            value.map(|value| Problem { field, value, rule })
        };
        (
            self.of_layout(),
            wrong.into_iter().filter_map(problem).collect(),
        )
    }

    /// The layout with those of the fields that it has.
    const fn of_layout(self) -> Receive {
        let Self {
            layout,
            transposed_scales,
            clear_absent,
            combine_weights,
            expert_alignment: alignment,
            clear_padding,
            row_sources,
            m_indices,
        } = self;
        let kept = KeptRows {
            transposed_scales,
            combine_weights,
        };
        match layout {
            ReceiveLayout::ByExpert => Receive::ByExpert(ByExpert {
                alignment,
                clear_padding,
                row_sources,
                m_indices,
            }),
            ReceiveLayout::Padded => Receive::Padded(Padded {
                transposed_scales,
                clear_padding,
                row_sources,
                m_indices,
            }),
            ReceiveLayout::View => Receive::View(kept),
            ReceiveLayout::Strided => Receive::Strided(StridedRows {
                transposed_scales,
                combine_weights,
                clear_absent,
            }),
            ReceiveLayout::Compact => Receive::Compact(kept),
        }
    }
}

impl TryFrom<ReceiveFields> for Receive {
    type Error = PlanError;

    /// Refuses fields that the layout does not take, all at once.
    fn try_from(fields: ReceiveFields) -> Result<Self, PlanError> {
        match fields.taken() {
            (receive, problems) if problems.is_empty() => Ok(receive),
            (_, problems) => Err(PlanError { problems }),
        }
    }
}

impl Receive {
    /// Rows by expert, without alignment and tables: the default.
    pub const BY_EXPERT: Self = Self::ByExpert(ByExpert::PLAIN);

    /// A layout whose other fields are their defaults.
    pub const fn of(layout: ReceiveLayout) -> Self {
        ReceiveFields::new(layout).of_layout()
    }

    /// The layout alone.
    pub const fn layout(&self) -> ReceiveLayout {
        match self {
            Self::ByExpert(_) => ReceiveLayout::ByExpert,
            Self::Padded(_) => ReceiveLayout::Padded,
            Self::View(_) => ReceiveLayout::View,
            Self::Strided(_) => ReceiveLayout::Strided,
            Self::Compact(_) => ReceiveLayout::Compact,
        }
    }

    /// Whether rows stay as they came: one for each (source rank, token).
    pub const fn keeps_rows(&self) -> bool {
        self.layout().keeps_rows()
    }

    /// All fields, those that the layout does not take at their defaults.
    pub const fn fields(&self) -> ReceiveFields {
        let fields = ReceiveFields::new(self.layout());
        match *self {
            Self::ByExpert(of) => ReceiveFields {
                expert_alignment: of.alignment,
                clear_padding: of.clear_padding,
                row_sources: of.row_sources,
                m_indices: of.m_indices,
                ..fields
            },
            Self::Padded(of) => ReceiveFields {
                transposed_scales: of.transposed_scales,
                clear_padding: of.clear_padding,
                row_sources: of.row_sources,
                m_indices: of.m_indices,
                ..fields
            },
            Self::View(of) | Self::Compact(of) => ReceiveFields {
                transposed_scales: of.transposed_scales,
                combine_weights: of.combine_weights,
                ..fields
            },
            Self::Strided(of) => ReceiveFields {
                transposed_scales: of.transposed_scales,
                combine_weights: of.combine_weights,
                clear_absent: of.clear_absent,
                ..fields
            },
        }
    }
}

impl Default for Receive {
    /// [`BY_EXPERT`](Self::BY_EXPERT).
    fn default() -> Self {
        Self::BY_EXPERT
    }
}

impl fmt::Display for Receive {
    /// The layout's [name](ReceiveLayout::name).
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.layout().name())
    }
}
