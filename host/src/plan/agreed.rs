//! Fields of a configuration that all ranks must agree on, as numbers.

use ferry_layout::{CombineMode, ReceiveLayout, TokenFormat};

use crate::error::Difference;
use crate::plan::Plan;

/// A field, and its value as a number that travels between ranks.
#[derive(Clone, Copy)]
pub(crate) struct Agreed {
    field: &'static str,
    pub(crate) value: u64,
    /// Text of a value.
    name: fn(u64) -> String,
}

impl Plan {
    /// The fields that ranks compare, in the order of [`Config`](crate::Config).
    pub(crate) fn agreed(&self) -> Vec<Agreed> {
        let (config, shape) = (self.config(), self.shape());
        let field = |field, value, name| Agreed { field, value, name };
        let number = |name, value: usize| field(name, value as u64, |value| value.to_string());
        let flag = |name, value: bool| field(name, value.into(), |value| (value != 0).to_string());
        let mode = shape.combine_mode.into();
        vec![
            number("experts", config.experts),
            number("top_k", config.top_k),
            number("hidden", config.hidden),
            number("max_tokens_per_rank", config.max_tokens_per_rank),
            number("p2p_world_size", shape.p2p_world_size as usize),
            field("format", shape.token_format.into(), name_of_format),
            field("combine", mode, name_of_mode),
            field(
                "receive",
                config.receive.layout().number().into(),
                name_of_layout,
            ),
            flag("combine_weights", self.receive().combine_weights),
            flag("skip_a2a", config.skip_a2a),
            // Ranks that send their tokens may differ in it.
            flag("shared_expert", config.skip_a2a && config.shared_expert),
            number("expert_alignment", self.row_alignment() as usize),
        ]
    }
}

impl Agreed {
    /// The difference to another rank, whose value is `theirs`.
    pub(crate) fn difference(self, theirs: u64) -> Option<Difference> {
        let Self { field, value, name } = self;
        let keeps_rows = |value: u64| ReceiveLayout::of_number(value as u32).keeps_rows();
        let is_same = match field {
            "receive" => keeps_rows(value) == keeps_rows(theirs),
            _ => value == theirs,
        };
        (!is_same).then(|| Difference {
            field,
            ours: name(value),
            theirs: name(theirs),
        })
    }
}

fn name_of_format(number: u64) -> String {
    let format = TokenFormat::of_number(number as u32);
    match format.scale_layout() {
        Some(layout) => format!("{}:{}", format.name(), layout.name()),
        None => format.name().to_owned(),
    }
}

fn name_of_mode(number: u64) -> String {
    let mode = match number {
        0 => CombineMode::Reduced,
        _ => CombineMode::Exact,
    };
    mode.name().to_owned()
}

fn name_of_layout(number: u64) -> String {
    ReceiveLayout::of_number(number as u32).name().to_owned()
}
