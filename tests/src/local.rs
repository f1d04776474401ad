//! Rounds where every rank has the same tokens and nothing travels, on any group.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferry::*;
use ferry_reference::workload::{Routing, WorkloadSpec, generate};
use ferry_reference::{
    Problem, RankInput, apply_expert_scale, bf16, combine_with, dispatch, part_of, share_of,
};

use crate::formats::{self, INPUT_SCALE};
use crate::session::strict;
use crate::simulated::finish::{Given, Options, Subject};
use crate::simulated::{Dice, Return, short_of};
use crate::verify::{Compared, Oracle, POISON, Received, without_overflow};

/// Everything that decides a run but the group. Its `Debug` text is what a failing test prints.
#[derive(Clone, Debug)]
pub struct LocalCase {
    /// Of the tokens.
    pub seed: u64,
    /// How many ranks.
    pub ranks: usize,
    /// Experts of all ranks.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Elements of a token.
    pub hidden: usize,
    /// By round.
    pub tokens: Vec<usize>,
    /// Most tokens of a round, for the plan.
    pub most_tokens: usize,
    /// How tokens find their experts.
    pub routing: Routing,
    /// Of the tokens.
    pub format: TokenFormat,
    /// How rows become results.
    pub how: Return,
    /// Rows of the outputs that are not needed.
    pub spare_rows: usize,
    /// As in the plan's configuration.
    pub debug_checks: bool,
    /// As in the plan's configuration.
    pub shared_expert: bool,
    /// Whether the kernels are made for the shape.
    pub specialise: bool,
    /// The device says how many tokens there are, and the inputs have so many rows more.
    pub counted: Option<usize>,
    /// What combines are given beside the rows.
    pub finish: Option<Options>,
    /// Outputs hold fewer rows, or blocks of scales, than come: the seed says how many.
    pub short: bool,
}

/// A round of a rank.
struct Round {
    oracle: Oracle,
    /// The bytes of the results.
    wanted: Vec<u8>,
    input: DispatchInput,
    output: DispatchOutput,
    expert_rows: CombineInput,
    combined: CombineOutput,
}

impl LocalCase {
    /// A case whose every parameter comes from its seed.
    pub fn any(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let ranks = dice.pick(&[1, 2, 3, 4, 8]);
        let experts = ranks * (1 + dice.below(40));
        // Fewer tokens than blocks, which then share a token, and more.
        let most_tokens = dice.pick(&[1, 3, 12, 40, 300]);
        let format = dice.pick(&TokenFormat::ALL);
        let how = dice.pick(&Return::ALL);
        let tokens = (0..3).map(|_| dice.below(most_tokens + 1)).collect();
        Self {
            seed,
            ranks,
            experts,
            top_k: (1 + dice.below(10)).min(experts),
            hidden: match format {
                TokenFormat::Bf16 => 8 * dice.pick(&[1, 3, 16, 40, 161]),
                TokenFormat::Nvfp4(_) | TokenFormat::Nvfp4RowScaled(_) => {
                    64 * dice.pick(&[1, 3, 9])
                }
                _ => 128 * dice.pick(&[1, 3, 9]),
            },
            tokens,
            most_tokens,
            routing: match dice.below(4) {
                0 => Routing::Uniform,
                1 => Routing::Zipf { exponent: 1.0 },
                2 => Routing::Duplicates,
                _ => Routing::Holes { probability: 0.4 },
            },
            format,
            how,
            spare_rows: dice.below(3),
            debug_checks: false,
            shared_expert: dice.below(3) == 0 && how != Return::Apart,
            specialise: false,
            counted: None,
            finish: None,
            short: false,
        }
    }

    /// The tokens that all ranks have in a round.
    pub fn problem(&self, round: usize) -> Problem {
        generate(WorkloadSpec {
            ranks: 1,
            experts: self.experts,
            top_k: self.top_k,
            hidden: self.hidden,
            tokens: vec![self.tokens[round]],
            routing: self.routing.clone(),
            seed: self.seed.wrapping_mul(16).wrapping_add(round as u64),
        })
    }

    /// The plan's configuration.
    pub fn config(&self, deadline: Duration) -> Config {
        Config {
            format: self.format,
            combine: self.how.mode(),
            deadline,
            debug_checks: self.debug_checks,
            shared_expert: self.shared_expert,
            skip_a2a: true,
            specialise: self.specialise,
            ..Config::new(
                self.experts,
                self.top_k,
                self.hidden,
                self.most_tokens + self.counted.unwrap_or(0),
            )
        }
    }

    /// Runs all rounds on the ranks of this process, enqueued at once, and compares all that they left.
    /// Making and closing communicators is collective.
    ///
    /// # Errors
    /// What the library reports; the first difference.
    pub fn run(&self, group: &Group, deadline: Duration) -> Result<()> {
        let about = || format!("{self:?}");
        let plan = Plan::new(group, self.config(deadline)).with_context(about)?;
        let ranks = Communicator::new(group, &plan).with_context(about)?;
        for rank in ranks {
            let (rank, result) = self.run_on(rank).with_context(about)?;
            result.with_context(about)?;
            rank.close().map_err(Error::from).with_context(about)?;
        }
        Ok(())
    }

    /// All rounds on a rank.
    fn run_on(&self, mut rank: Communicator) -> Result<(Communicator, Result<()>)> {
        let stream = rank.device().stream()?;
        let rounds: Vec<_> = (0..self.tokens.len())
            .map(|round| self.round(&rank, round))
            .collect::<Result<_>>()?;
        for round in &rounds {
            rank.dispatch(stream, &round.input, &round.output)?;
            rank.combine(stream, &round.expert_rows, &round.combined)?;
        }
        match rank.synchronize(stream)? {
            Some(fault) if self.short && fault.kind == FaultKind::OutputTooSmall => {}
            other => strict(Ok(other))?,
        }
        let mut all = rounds.iter().enumerate();
        let result = all.try_for_each(|(number, round)| {
            round
                .verify(&rank, self.format)
                .with_context(|| format!("rank {}, round {number}", rank.rank().0))
        });
        Ok((rank, result))
    }

    /// Tensors and what they must become. The experts' answers are there beforehand.
    fn round(&self, rank: &Communicator, round: usize) -> Result<Round> {
        let (device, plan) = (rank.device(), rank.plan());
        let share = share_of(&self.problem(round), self.ranks, rank.rank().0 as usize);
        let scale = self.scale_of(rank.rank().0 as usize);
        let compared = Compared {
            part: Some((rank.rank().0 as usize, self.ranks)),
            ..Compared::with_shared(self.shared_expert)
        };
        let oracle_of = |problem| Oracle::of(problem, &scale, self.format, compared);
        let oracle = oracle_of(&share);
        let more = self.counted.unwrap_or(0);
        let index = rank.rank().0 as usize;
        let shared = part_of(self.tokens[round] + more, index, self.ranks).len();
        let needed = oracle.placement(0).capacity();
        let mut dice = Dice::new(self.seed ^ (round as u64) << 32 ^ (index as u64) << 16);
        let capacity = self.capacity(needed, shared, &mut dice);
        let held = without_overflow(&share, self.format, oracle.placements(), &[capacity]);
        let answering = match self.short {
            true => &oracle_of(&held),
            false => &oracle,
        };
        let wanted = answering.combined(self.how.mode(), self.how != Return::Apart);
        let buffers = DispatchBuffers::with_capacity(device, plan, capacity)?;
        buffers.fill(POISON)?;
        let sums = match self.how {
            Return::Apart => CombineBuffers::apart(device, plan)?,
            Return::Reduced | Return::Exact => CombineBuffers::new(device, plan)?,
        };
        sums.fill(POISON)?;
        let answers = oracle.placement(0).cut(self.format, capacity).expert_rows(
            &share,
            &scale,
            0,
            capacity.rows,
        );
        let problem = self.problem(round);
        let (tokens, given) = (self.tokens[round], &problem.inputs[0]);
        let input = self.input(device, given)?;
        let (tokens, weights) = (tokens + more, input.topk_weights);
        let mut made = Round {
            wanted: wanted
                .iter()
                .flatten()
                .flat_map(|x| x.to_le_bytes())
                .collect(),
            input: DispatchInput {
                // In exact mode combine's count.
                topk_weights: weights.filter(|_| self.how == Return::Reduced),
                ..input
            },
            output: *buffers.output(),
            expert_rows: CombineInput {
                topk_weights: weights.filter(|_| self.how == Return::Exact),
                ..CombineInput::new(device.upload_tensor([capacity.rows, self.hidden], &answers)?)
            },
            combined: sums.output(tokens)?,
            oracle,
        };
        if let Some(options) = &self.finish {
            let subject = Subject {
                seed: self.seed ^ u64::from(rank.rank().0),
                problem: &share,
                rank: 0,
                compared,
                format: self.format,
                mode: self.how.mode(),
                rows: tokens,
            };
            options.give(&subject, rank, &mut made.expert_rows, &mut made.combined);
            made.wanted = finished(options.draw(&subject), &share, &scale);
        }
        Ok(made)
    }

    /// What outputs hold that must hold `needed`, on a rank that has `shared` rows of the shared expert, if
    /// there is one.
    fn capacity(&self, mut needed: Capacity, shared: usize, dice: &mut Dice) -> Capacity {
        let alignment = self.format.sizes().row_alignment as usize;
        let mut room = 0;
        if self.shared_expert {
            room = shared.next_multiple_of(alignment);
            // The host asks for room for all rows of `x`.
            let more = self.counted.unwrap_or(0);
            needed.rows += more;
            needed.scale_blocks += more.div_ceil(128);
        }
        if self.short {
            return short_of(needed, room, alignment, dice);
        }
        let rows = formats::with_spare_rows(needed, self.format, self.spare_rows);
        Capacity {
            scale_blocks: needed.scale_blocks + self.spare_rows,
            ..rows
        }
    }

    /// What dispatch takes, with the router's weights.
    fn input(&self, device: &Arc<dyn Device>, given: &RankInput) -> Result<DispatchInput> {
        let more = self.counted.unwrap_or(0);
        let tokens = given.tokens;
        // What stands behind the tokens that are counted would be seen in the results.
        let count = [tokens as u32];
        let tokens = tokens + more;
        let x = [&given.x[..], &vec![bf16::NAN; more * self.hidden]].concat();
        let ids = [&given.topk_ids[..], &vec![0; more * self.top_k]].concat();
        let weights = [&given.topk_weights[..], &vec![f32::NAN; more * self.top_k]].concat();
        let weights = device.upload_tensor([tokens, self.top_k], &weights)?;
        let tokens_on_device = match self.counted {
            Some(_) => Some(device.upload_tensor([1], &count)?),
            None => None,
        };
        // Ids are read otherwise where they begin at no multiple of 16 bytes.
        let lead = (self.seed % 3).saturating_sub(1) * (1 + self.seed / 3 % 3);
        let ids = [&vec![-1; lead as usize][..], &ids].concat();
        let ids = device.upload_tensor([ids.len()], &ids)?;
        let ids = ids.at.plus(4 * lead);
        let takes_scale = matches!(self.format, TokenFormat::Nvfp4(_));
        let input_scale = match takes_scale {
            true => Some(device.upload_tensor([1], &[INPUT_SCALE])?),
            false => None,
        };
        Ok(DispatchInput {
            topk_weights: Some(weights),
            input_scale,
            tokens_on_device,
            ..DispatchInput::new(
                device.upload_tensor([tokens, self.hidden], &x)?,
                Tensor::contiguous(ids, DataType::I32, [tokens, self.top_k]),
            )
        })
    }

    /// What the experts of a rank multiply by.
    fn scale_of(&self, rank: usize) -> Vec<f32> {
        let here = self.experts / self.ranks;
        (rank * here..(rank + 1) * here)
            .map(|expert| 1.0 + (expert % 7) as f32 / 8.0)
            .collect()
    }
}

impl Round {
    /// Compares what a round left.
    fn verify(&self, rank: &Communicator, format: TokenFormat) -> Result<()> {
        let device = &**rank.device();
        let received = Received::download(device, &self.output, format)?;
        self.oracle.verify_dispatch(0, &received)?;
        let rows = self.combined.rows();
        let mut given: Vec<u8> = device.download_tensor(&rows)?;
        ensure!(
            given.len() >= self.wanted.len(),
            "combined: {} bytes",
            given.len()
        );
        let beyond = given.split_off(self.wanted.len());
        ensure!(
            beyond.iter().all(|&byte| byte == POISON),
            "combine wrote behind the tokens that are counted"
        );
        let differs = given
            .iter()
            .zip(&self.wanted)
            .position(|(given, wanted)| given != wanted);
        match differs {
            None => Ok(()),
            Some(at) => bail!(
                "combined: byte {at} of {} is {}, wanted {}",
                given.len(),
                given[at],
                self.wanted[at]
            ),
        }
    }
}

/// The bytes of a rank's part of the results, of sums that are not rounded before.
fn finished(given: Given, share: &Problem, scale: &[f32]) -> Vec<u8> {
    let rows = apply_expert_scale(share, &dispatch(share), scale);
    let weights = given.row_weights.map(|weights| vec![weights]);
    let mode = ferry_reference::CombineMode::Exact;
    combine_with(share, &rows, weights.as_deref(), mode, &[given.finish]).concat()
}

/// What `ferry-tests gpu` runs on so many ranks: every format and way, from no token to thousands. `quick`:
/// fewer tokens, smaller rows.
pub fn gpu_cases(ranks: usize, quick: bool) -> Vec<LocalCase> {
    let (most, hidden, experts) = if quick {
        (40, 256, 6 * ranks)
    } else {
        (4096, 7168, 64 * ranks)
    };
    let mut cases = Vec::new();
    for (number, &format) in TokenFormat::ALL.iter().enumerate() {
        for (way, how) in Return::ALL.into_iter().enumerate() {
            let seed = (3 * number + way) as u64;
            let case = LocalCase {
                seed,
                ranks,
                experts,
                top_k: 8.min(experts),
                hidden,
                tokens: vec![128, 1, 0, 1024, 7]
                    .into_iter()
                    .map(|tokens: usize| tokens.min(most))
                    .collect(),
                most_tokens: most.min(1024),
                routing: match seed % 3 {
                    0 => Routing::Uniform,
                    1 => Routing::Duplicates,
                    _ => Routing::Holes { probability: 0.4 },
                },
                format,
                how,
                spare_rows: way,
                debug_checks: false,
                shared_expert: how != Return::Apart && seed.is_multiple_of(2),
                specialise: false,
                counted: None,
                finish: None,
                short: false,
            };
            cases.push(case.clone());
            // Rows that no tile divides, of tokens many of which have no expert, long and short ones in turn.
            if how == Return::Reduced {
                cases.push(LocalCase {
                    hidden: case.hidden + 128,
                    top_k: 2.min(case.experts),
                    tokens: vec![most.min(4096), most.min(300)],
                    most_tokens: most.min(4096),
                    routing: Routing::Holes { probability: 0.6 },
                    ..case.clone()
                });
            }
            // The largest take long to work out.
            if how == Return::Reduced && !quick {
                cases.push(LocalCase {
                    tokens: vec![4096],
                    most_tokens: 4096,
                    specialise: true,
                    ..case
                });
            }
        }
    }
    cases
}
