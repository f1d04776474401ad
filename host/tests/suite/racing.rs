//! Inputs that change while kernels read them, as an early `upload` changes them. Rows and sums are undefined
//! then, and ranks may time out; but no access leaves its tensor, no warp loads what its block has not
//! stored, and none is missed at a barrier: the simulation would end with an error.

use std::array;
use std::ops::Range;
use std::time::Duration;

use crate::support::STREAM;
use ferry::simulator::Options;
use ferry::*;

const TOP_K: usize = 3;
const HIDDEN: usize = 128;
const MXFP8: TokenFormat = TokenFormat::Mxfp8(ScaleLayout::Tiled);

/// The input that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Racing {
    Ids,
    WideIds,
    Number,
    Weights,
}

impl Racing {
    /// Contents that take turns: ids of experts of both ranks, and of none; numbers below and above the
    /// rows of `x`.
    fn contents(self, config: &Config) -> Vec<Vec<u8>> {
        let (tokens, experts) = (config.max_tokens_per_rank, config.experts as i64);
        let ids = [1, 3, i64::MAX / 4].map(|factor| {
            let slots = 0..(tokens * TOP_K) as i64;
            slots.map(move |slot| slot.wrapping_mul(factor) % (experts + 2) - 1)
        });
        match self {
            Self::Ids => ids.map(|ids| ids.flat_map(|id| (id as i32).to_le_bytes()).collect()),
            Self::WideIds => ids.map(|ids| ids.flat_map(i64::to_le_bytes).collect()),
            Self::Number => {
                [0, tokens / 8, 2 * tokens].map(|number| (number as u32).to_le_bytes().into())
            }
            Self::Weights => {
                [0_f32, 2.0, f32::NAN].map(|weight| weight.to_le_bytes().repeat(tokens * TOP_K))
            }
        }
        .into()
    }
}

/// A rank's tensors.
struct Tensors {
    rows: DispatchBuffers,
    input: DispatchInput,
    answers: CombineInput,
    sums: CombineBuffers,
    /// The input that changes.
    racing: DevicePtr,
}

impl Tensors {
    fn new(rank: &Communicator, racing: Racing) -> Result<Self, Error> {
        let (device, plan) = (rank.device(), rank.plan());
        let config = plan.config();
        let capacity = Capacity {
            wide_ids: racing == Racing::WideIds && config.receive.keeps_rows(),
            ..Capacity::max(plan)
        };
        let mut rows = DispatchBuffers::with_capacity(device, plan, capacity)?;
        let tokens = config.max_tokens_per_rank;
        let x = vec![0x3f80_u16; tokens * HIDDEN];
        let weights = vec![1.0; tokens * TOP_K];
        let ids: Vec<i32> = (0..tokens * TOP_K)
            .map(|slot| (slot % config.experts) as i32)
            .collect();
        let wide: Vec<i64> = ids.iter().copied().map(i64::from).collect();
        let mut input = match racing {
            Racing::WideIds => rows.upload(&x, &wide, Some(&weights))?,
            _ => rows.upload(&x, &ids, Some(&weights))?,
        };
        let racing = match racing {
            Racing::Ids | Racing::WideIds => input.topk_ids.at,
            Racing::Weights => input.topk_weights.expect("uploaded").at,
            Racing::Number => {
                let number = device.upload_tensor([1], &[tokens as u32])?;
                input.tokens_on_device = Some(number);
                number.at
            }
        };
        let mut sums = CombineBuffers::new(device, plan)?;
        let most = plan.max_rows();
        let mut answers = sums.upload(rows.output(), &vec![0x3f80_u16; most * HIDDEN])?;
        if config.receive.layout() == ReceiveLayout::Padded {
            answers.row_weights = Some(device.upload_tensor([most], &vec![1_f32; most])?);
        }
        Ok(Self {
            rows,
            input,
            answers,
            sums,
            racing,
        })
    }
}

/// Whether a call ended as one may whose rank's inputs change, or a peer's.
fn is_right<T>(result: &Result<T, Error>) -> bool {
    use Error::{Fault, PeerGaveUp, Poisoned};
    matches!(
        result,
        Ok(_) | Err(Fault(_) | Poisoned(_) | PeerGaveUp { .. })
    )
}

/// Rounds of both ranks, until one gives up.
fn rounds(ranks: &mut [Communicator], tensors: &[Tensors]) -> Result<(), Error> {
    for _ in 0..3 {
        for (rank, t) in ranks.iter_mut().zip(tensors) {
            let tokens = t.input.x.dims[0];
            let sent = rank.dispatch(STREAM, &t.input, t.rows.output());
            let mut summed = || rank.combine(STREAM, &t.answers, &t.sums.output(tokens)?);
            let enqueued = sent.and_then(|()| summed());
            if !is_right(&enqueued) {
                return enqueued;
            }
        }
        for rank in &*ranks {
            let waited = rank.synchronize(STREAM);
            if !is_right(&waited) {
                return waited.map(drop);
            }
        }
    }
    Ok(())
}

/// Rounds during which an input of the first rank changes.
fn race(config: Config, racing: Racing, seed: u64) -> Result<(), Error> {
    let options = Options {
        warps: [2, 4, 6, 8][seed as usize % 4],
        patience: Some(Duration::from_millis(1)),
        // Blocks that read other numbers send more rows than their peers wait for.
        allow_late_signals: racing == Racing::Number,
        ..Options::new(2, seed)
    };
    let group = Group::simulated_with(options.clone())?;
    let plan = Plan::new(&group, config)?;
    let mut ranks = Communicator::new(&group, &plan)?;
    let tensors = ranks.iter().map(|rank| Tensors::new(rank, racing));
    let tensors: Vec<Tensors> = tensors.collect::<Result<_, _>>()?;
    let at = tensors[0].racing.address();
    options.racing.begin(at, racing.contents(&config));
    rounds(&mut ranks, &tensors)
}

/// Races of each of these inputs in plans of each configuration.
fn races(racings: &[Racing], configs: &[Config], seeds: Range<u64>) {
    for (seed, config) in seeds.zip(configs.iter().cycle()) {
        let racing = racings[seed as usize / configs.len() % racings.len()];
        let result = race(*config, racing, seed);
        assert!(
            result.is_ok(),
            "{racing:?}, seed {seed}, {config:?}: {result:?}"
        );
    }
}

fn config() -> Config {
    Config {
        deadline: Duration::from_millis(1),
        options: true,
        ..Config::new(6, TOP_K, HIDDEN, 9)
    }
}

/// Configurations without travel: tiled scales, and tables of rows, follow from the ids.
fn without_travel() -> Vec<Config> {
    let config = Config {
        skip_a2a: true,
        ..config()
    };
    let tables = Config {
        receive: Receive::ByExpert(ByExpert {
            alignment: 8,
            clear_padding: true,
            row_sources: true,
            m_indices: true,
        }),
        ..config
    };
    let shared = Config {
        shared_expert: true,
        debug_checks: true,
        ..tables
    };
    let formats = [MXFP8, TokenFormat::Bf16, TokenFormat::BlockwiseFp8];
    let with = |config: Config| formats.map(|format| Config { format, ..config });
    [config, tables, shared]
        .into_iter()
        .flat_map(with)
        .collect()
}

/// Configurations with travel, in every layout.
fn with_travel() -> Vec<Config> {
    let config = config();
    let mut all = vec![
        Config {
            format: MXFP8,
            ..config
        },
        Config {
            shared_expert: true,
            receive: Receive::ByExpert(ByExpert {
                row_sources: true,
                m_indices: true,
                ..ByExpert::PLAIN
            }),
            ..config
        },
        Config {
            receive: Receive::Padded(Padded {
                m_indices: true,
                ..Padded::default()
            }),
            format: MXFP8,
            ..config
        },
    ];
    let format = TokenFormat::Mxfp8(ScaleLayout::RowMajor);
    for receive in [
        ReceiveLayout::View,
        ReceiveLayout::Strided,
        ReceiveLayout::Compact,
    ]
    .map(Receive::of)
    {
        all.push(Config { receive, ..config });
        all.push(Config {
            receive,
            format,
            debug_checks: true,
            ..config
        });
    }
    all
}

#[test]
fn ids_that_change_lead_to_no_access_outside_without_travel() {
    races(&[Racing::Ids, Racing::WideIds], &without_travel(), 0..180);
}

/// A block has no room for the ids of all its tokens, and reads them again.
#[test]
fn ids_that_a_block_does_not_keep_lead_to_no_access_outside() {
    let configs: [Config; 3] = array::from_fn(|index| Config {
        experts: 2 * 2_680,
        max_tokens_per_rank: 24,
        ..without_travel()[index]
    });
    races(&[Racing::Ids], &configs, 180..186);
}

#[test]
fn a_number_of_tokens_that_changes_is_one_for_all_warps_of_a_block() {
    races(&[Racing::Number], &without_travel(), 200..300);
    races(&[Racing::Number], &with_travel(), 300..500);
}

/// A block numbers few tokens for itself, and waits for the others' tiles if there are many.
#[test]
fn a_number_of_tokens_that_changes_between_few_and_many_leads_to_no_access_outside() {
    let many = |config| Config {
        max_tokens_per_rank: 2_049 / TOP_K,
        ..config
    };
    let all = with_travel().into_iter().chain(without_travel());
    let configs: Vec<Config> = all.map(many).collect();
    races(&[Racing::Number], &configs, 500..518);
}

#[test]
fn other_inputs_that_change_lead_to_no_access_outside() {
    let racings = [Racing::Ids, Racing::WideIds, Racing::Weights];
    races(&racings, &with_travel(), 600..735);
}
