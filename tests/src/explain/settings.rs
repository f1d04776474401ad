//! Answers for users: what a plan takes, and which settings go with how many tokens.

use std::fmt::Write;

use anyhow::Result;
use ferry::{Capacity, Config, Group, Plan, Receive, ReceiveLayout, TokenFormat};
use ferry_protocol::tactics::{Phase, Wire};

use super::{Case, words, wrapped};

/// Most tokens of a rank in the table of plans.
const PLANS: [usize; 7] = [1, 8, 32, 128, 512, 1024, 4096];

/// A plan that is asked about, and the tokens that each rank brings.
pub struct Answer<'a> {
    /// The group, which a plan asks for its size alone.
    pub group: &'a Group,
    /// The plan.
    pub plan: &'a Plan,
    /// Tokens of each rank.
    pub tokens: u32,
    /// Multiprocessors of the GPU.
    pub multiprocessors: u32,
}

impl Answer<'_> {
    /// Text for people.
    ///
    /// # Errors
    /// Those of [`Case::new`].
    pub fn text(&self) -> Result<String> {
        let mut text = String::new();
        self.introduce(&mut text)?;
        self.outputs(&mut text)?;
        self.settings(&mut text)?;
        self.plans(&mut text)?;
        wrapped(
            &mut text,
            "more      ",
            "--tokens N for the settings of few or many tokens; --kernels for what the kernels do and why; \
             --help for formats, modes and sizes; the guide, \"How large outputs must be\", for formulas and \
             smaller outputs",
        )?;
        Ok(text)
    }

    fn introduce(&self, text: &mut String) -> Result<()> {
        let (config, shape) = (self.plan.config(), self.plan.shape());
        let plan = format!(
            "{} ranks, {} on each node; {} experts, top-{}; at most {} tokens a rank, of {} elements in {}; \
             {} mode",
            shape.ranks,
            shape.p2p_world_size,
            config.experts,
            config.top_k,
            grouped(config.max_tokens_per_rank as u64),
            grouped(config.hidden as u64),
            config.format.name(),
            words::mode(config.combine),
        );
        wrapped(text, "plan      ", &plan)?;
        let memory = format!(
            "of each rank, for a communicator: window {} bytes, workspace {} bytes. Two rounds at once \
             (micro-batches) take two communicators, and twice that",
            grouped(self.plan.window_bytes()),
            grouped(self.plan.workspace_bytes()),
        );
        wrapped(text, "memory    ", &memory)?;
        let wire = format!(
            "{} bytes there and {} back, once for each rank that has one of a token's experts{}",
            grouped(shape.dispatch_row_bytes().into()),
            grouped(shape.combine_row_bytes().into()),
            match config.combine {
                ferry::CombineMode::Reduced => "",
                ferry::CombineMode::Exact => "; back for each of its experts",
            },
        );
        wrapped(text, "wire      ", &wire)
    }

    /// Bytes of a dispatch's outputs in every layout that goes with the plan.
    fn outputs(&self, text: &mut String) -> Result<()> {
        let mut sizes = Vec::new();
        for receive in ReceiveLayout::ALL {
            let given = *self.plan.config();
            let config = match receive == given.receive.layout() {
                true => given,
                false => Config {
                    receive: Receive::of(receive),
                    ..given
                },
            };
            let Ok(plan) = Plan::new(self.group, config) else {
                continue;
            };
            let name = receive.name();
            sizes.push(format!("{name} {}", bytes(&plan, Capacity::max(&plan))?));
            let distinct = Capacity::max_distinct(&plan);
            if receive == ReceiveLayout::ByExpert && distinct != Capacity::max(&plan) {
                let bytes = bytes(&plan, distinct)?;
                sizes.push(format!("{name} if no token names an expert twice {bytes}"));
            }
        }
        let outputs = format!(
            "of a dispatch, in bytes, whatever the routing: {}",
            sizes.join("; ")
        );
        wrapped(text, "outputs   ", &outputs)
    }

    fn case(&self) -> Result<Case> {
        Ok(Case::new(self.plan, self.tokens, self.multiprocessors)?)
    }

    /// Settings that go with the number of tokens.
    fn settings(&self, text: &mut String) -> Result<()> {
        let case = self.case()?;
        let most = self.plan.config().max_tokens_per_rank as u64;
        writeln!(
            text,
            "settings  for {} tokens of each rank",
            grouped(self.tokens.into())
        )?;
        let mut tell = |line: &str| wrapped(text, "          - ", line);
        if is_short(&case) {
            tell(
                "specialise: true. Latency counts, not bytes: kernels for the shape have the fewest \
                 instructions. They are compiled when the communicator is made, in seconds",
            )?;
            if most > u64::from(self.tokens) {
                tell(
                    "a plan and a communicator of its own for decoding, with max_tokens_per_rank as small as \
                     its steps: such kernels have no code for many tokens, and the window is small",
                )?;
            }
        } else {
            tell(&self.bytes_count())?;
            tell(
                "outputs: Capacity::max_distinct if no token names an expert twice; Capacity::of_rows is a \
                 bet on the routing; dispatch_counts tells the host the exact number",
            )?;
            tell(
                "to overlap: split calls around other work, max_sms so that a GEMM has multiprocessors \
                 beside them; two micro-batches have a communicator each",
            )?;
        }
        Ok(())
    }

    /// Effect of the format on rows for the wire.
    fn bytes_count(&self) -> String {
        let row = grouped(self.plan.shape().dispatch_row_bytes().into());
        let config = Config {
            format: TokenFormat::BlockwiseFp8,
            ..*self.plan.config()
        };
        match Plan::new(self.group, config) {
            Ok(fp8) if self.plan.config().format == TokenFormat::Bf16 => format!(
                "format: bytes count. A row of fp8 has {} bytes instead of {row}, if your experts take it",
                grouped(fp8.shape().dispatch_row_bytes().into())
            ),
            _ => format!("format: bytes count, and a row has {row}"),
        }
    }

    /// Table of plans for other numbers of tokens.
    fn plans(&self, text: &mut String) -> Result<()> {
        writeln!(
            text,
            "plans     of other sizes, in bytes, with rows by expert"
        )?;
        let head = ["most tokens", "window", "workspace", "outputs"];
        writeln!(
            text,
            "          {:>11}  {:>15}  {:>12}  {:>15}  tokens",
            head[0], head[1], head[2], head[3]
        )?;
        for max_tokens_per_rank in PLANS {
            let config = Config {
                max_tokens_per_rank,
                receive: Receive::BY_EXPERT,
                ..*self.plan.config()
            };
            let Ok(plan) = Plan::new(self.group, config) else {
                continue;
            };
            let case = Case::new(&plan, max_tokens_per_rank as u32, self.multiprocessors)?;
            writeln!(
                text,
                "          {:>11}  {:>15}  {:>12}  {:>15}  {}",
                grouped(max_tokens_per_rank as u64),
                grouped(plan.window_bytes()),
                grouped(plan.workspace_bytes()),
                bytes(&plan, Capacity::max(&plan))?,
                match is_short(&case) {
                    true => "few",
                    false => "many",
                }
            )?;
        }
        Ok(())
    }
}

/// Whether latency counts: rows have inline flags on their way there or back.
fn is_short(case: &Case) -> bool {
    let senders = super::roles::of_dispatch(case, Phase::Fused).senders;
    let there = case.dispatch(Phase::Fused).wire(senders);
    there == Wire::Inline || case.combine().wire == Wire::Inline
}

/// Bytes of a dispatch's outputs of this capacity.
fn bytes(plan: &Plan, capacity: Capacity) -> Result<String> {
    let layout = plan.output_layout(capacity)?;
    Ok(grouped(layout.iter().map(|tensor| tensor.bytes).sum()))
}

/// `12345` as `12,345`.
fn grouped(number: u64) -> String {
    match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", grouped(number / 1000), number % 1000),
    }
}
