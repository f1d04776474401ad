//! Rounds whose windows a peer has damaged. Wrong values may come of it, and faults; no access
//! outside of what was allocated, and no wait beyond the deadline.

pub mod guarded;
pub mod sweep;
mod words;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ferry::layout::Shape;
use ferry::simulator::Options;
use ferry::{Config, Error, Group};
use ferry_layout::Window;

use ferry_rig::{Case, Dice, HALVES, Session, any_case, inline_case, some_keep_rows};
use guarded::GuardedGroup;
use words::Damage;

/// Longest wait of a kernel.
const DEADLINE: Duration = Duration::from_millis(20);
/// Time after which everybody is back at the latest, on a machine with other things to do.
const SLACK: Duration = Duration::from_millis(500);

/// Rounds to be damaged, all of them drawn from the seed.
pub struct DamagedCase {
    /// The rounds.
    pub case: Case,
    /// A rank that launches nothing: all that is waited for of it comes from the damage.
    absent: Option<usize>,
    /// Half rounds before anything is damaged.
    calm: usize,
}

impl DamagedCase {
    /// Draws a case. `ranks`: how many ranks, all on one node, if the group is already there.
    pub fn of(seed: u64, ranks: Option<usize>) -> Self {
        let mut dice = Dice::new(seed ^ 0x6461_6d61_6765);
        let mut case = match dice.below(8) {
            0..4 => any_case(seed),
            4..7 => inline_case(seed),
            _ => many_tokens(seed),
        };
        if dice.below(4) == 0 {
            // More rows than can come: a position that the outputs have may be one that a window has not.
            let most = case.tokens.iter().flatten().max().copied().unwrap_or(0);
            case.spare_rows = case.ranks * most * case.top_k + dice.below(64);
        }
        if let Some(ranks) = ranks {
            case = case.on_one_node(ranks);
        }
        case = some_keep_rows(case);
        case.tokens.truncate(3);
        let absent = dice.below(2 * case.ranks);
        let absent = (absent < case.ranks).then_some(absent);
        Self {
            calm: absent.map_or_else(|| dice.below(2 * HALVES), |_| 0),
            absent,
            case,
        }
    }

    /// Runs it on simulated ranks of its own. Gives the windows that were damaged.
    pub fn simulate(&self) -> Result<u64> {
        let case = &self.case;
        let group = Group::simulated_with(Options {
            warps: case.warps,
            stall_one_in: case.stall_one_in,
            patience: Some(Duration::ZERO),
            allow_late_signals: true,
            ..Options::new(case.ranks as u32, case.seed)
        })?;
        // SAFETY: neither group is closed.
        let guarded = unsafe { GuardedGroup::new(&group, 0)? };
        self.run(&guarded, None)
    }

    /// Runs it on the GPUs of a group. Gives the windows that were damaged.
    pub fn run_on(&self, group: &Group, guard_bytes: u64) -> Result<u64> {
        // SAFETY: the caller closes the group after its last case, which closes its communicators,
        // and nobody closes the guarded one.
        let guarded = unsafe { GuardedGroup::new(group, guard_bytes)? };
        self.run(&guarded, Some(DEADLINE + SLACK))
    }

    /// `longest`: how long a half round may take.
    fn run(&self, guarded: &GuardedGroup, longest: Option<Duration>) -> Result<u64> {
        let (case, problems) = (&self.case, self.case.problems());
        let config = Config {
            deadline: DEADLINE,
            ..case.config()
        };
        let settings = case.settings(config, &problems);
        let mut session = Session::new(&guarded.group, &settings)?;
        let mut dice = Dice::new(!case.seed);
        let mut windows = 0;
        for (round, problem) in problems.iter().enumerate() {
            session.upload(0, problem)?;
            session.poison()?;
            for half in 0..HALVES {
                if HALVES * round + half >= self.calm {
                    windows += self.damage(guarded, &session, round, &mut dice)?;
                }
                let start = Instant::now();
                let goes_on = self.half(&mut session, half)?;
                let took = start.elapsed();
                ensure!(
                    longest.is_none_or(|longest| took <= longest),
                    "half {half} of round {round} took {took:?}, the deadline is {DEADLINE:?}"
                );
                if let Some(damage) = guarded.damage()? {
                    bail!("half {half} of round {round}: {damage}");
                }
                if !goes_on {
                    session.close_after_fault()?;
                    return Ok(windows);
                }
            }
        }
        session.close()?;
        Ok(windows)
    }

    /// Half a round on all ranks that are there; whether all can go on.
    fn half(&self, session: &mut Session, half: usize) -> Result<bool> {
        let locals = session.local_ranks();
        for (index, &rank) in locals.iter().enumerate() {
            if self.absent != Some(rank) {
                session.launch_half(index, half)?;
            }
        }
        let mut goes_on = true;
        for (rank, outcome) in session.outcomes() {
            match outcome {
                Ok(_) => {}
                Err(Error::Fault(_) | Error::Poisoned(_) | Error::PeerGaveUp { .. }) => {
                    goes_on = false;
                }
                Err(error) => {
                    return Err(error).with_context(|| format!("rank {rank}, half {half}"));
                }
            }
        }
        Ok(goes_on)
    }

    /// Damages the windows of the ranks that are present; if none is absent, skips one in four. Returns the
    /// number of windows damaged.
    fn damage(
        &self,
        guarded: &GuardedGroup,
        session: &Session,
        round: usize,
        dice: &mut Dice,
    ) -> Result<u64> {
        let mut damaged = 0;
        let shape: &Shape = session.plan().shape();
        let layout = Window::with(shape, self.case.combine_weights);
        let windows = guarded.windows();
        for (rank, at) in guarded.group.local_ranks().into_iter().zip(windows) {
            let skips = dice.below(4) == 0 && self.absent.is_none();
            if self.absent == Some(rank.0 as usize) || skips {
                continue;
            }
            let device = guarded.group.device(rank)?;
            let mut bytes = vec![0; layout.bytes as usize];
            device.download(at, &mut bytes)?;
            let mut damage = Damage {
                shape,
                window: layout,
                epoch: round as u64 + 1,
                tokens: &self.case.tokens[round],
                rows: session.capacity().rows as u32,
                bytes: &mut bytes,
                dice,
            };
            damage.run(self.absent.is_some());
            device.upload(at, &bytes)?;
            damaged += 1;
        }
        Ok(damaged)
    }
}

/// Many tokens for few warps: combine sends several rows together, or in pieces.
fn many_tokens(seed: u64) -> Case {
    let case = any_case(seed);
    let mut dice = Dice::new(!seed);
    // Of 16 ranks with more than 128 tokens, combine's rows are not bare.
    let ranks = dice.pick(&[2, 3, 16]);
    let mut tokens = vec![dice.below(3); ranks];
    tokens[dice.below(ranks)] = 130 + dice.below(60);
    Case {
        ranks,
        p2p_world_size: ranks,
        experts: 2 * ranks,
        top_k: dice.pick(&[1, 3, 4]),
        hidden: 128,
        tokens: vec![tokens; 2],
        warps: 2 + dice.below(3) as u32,
        ..case
    }
}
