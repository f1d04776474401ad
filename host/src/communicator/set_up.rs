//! Creation of communicators.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

use ferry_layout::{Common, Rank};

use super::open::Open;
use super::seat::{Seat, seats};
use super::streams::Streams;
use super::{Communicator, Launchable};
use crate::communicator::memory::{Private, Windows, agree, give_up, require_windows};
use crate::error::{Difference, Error};
use crate::group::Group;
use crate::group::Member;
use crate::group::fabric::Fabric;
use crate::plan::Plan;
use crate::tensor::handles::DevicePtr;

impl Communicator {
    /// Allocates windows and workspaces, exchanges their addresses between the ranks, and compares their
    /// configurations. Returns one communicator for each rank of this process, ascending. Collective.
    /// Synchronizes.
    ///
    /// Threads that make communicators of one group take turns. Their order must be the same in all
    /// processes.
    ///
    /// If a rank is lost, the others return an error as soon as the group's bootstrap does;
    /// memory that they had allocated is freed, except windows that only all ranks can free: those are
    /// leaked, with a warning. In an NVSHMEM group a rank that is lost while the windows are
    /// allocated can keep the others waiting for ever, see [`Group::close`].
    ///
    /// # Errors
    /// [`Error::PlanForOtherGroup`], [`Error::PlanSpansNodes`], [`Error::GroupClosed`],
    /// [`Error::ShapeMismatch`], [`Error::PeerFailed`], [`Error::FabricAnswer`], [`Error::Bootstrap`] that
    /// names the lost rank, and errors of the group's devices; [`Error::SharedGpu`] if ranks share a GPU
    /// whose multiprocessors do not suffice for all communicators of this process.
    pub fn new(group: &Group, plan: &Plan) -> Result<Vec<Self>, Error> {
        let (fabric, shape) = (&group.fabric, plan.shape());
        if plan.ranks() != group.ranks() {
            return Err(Error::PlanForOtherGroup {
                plan: plan.ranks(),
                group: group.ranks(),
            });
        }
        if shape.spans_nodes() && !group.reaches_other_nodes() {
            return Err(Error::PlanSpansNodes {
                p2p_world_size: shape.p2p_world_size,
                ranks: shape.ranks,
                group: group.name(),
            });
        }
        let ranks = fabric.local_ranks();
        // Before anything is allocated, so that the group cannot be closed meanwhile.
        let members: Vec<Member> =
            (ranks.iter().map(|_| group.enter())).collect::<Result<_, _>>()?;
        let _turn = group.turn();
        compare_shapes(&**fabric, plan)?;
        let alloc = |seat: Seat| Ok((Private::alloc(&**fabric, seat.rank, plan)?, seat));
        let memory = seats(group, plan)
            .and_then(|seats| seats.into_iter().map(alloc).collect::<Result<Vec<_>, _>>());
        let memory = agree(&**fabric, "allocating device memory", memory)??;
        let (mut memory, seats): (Vec<_>, Vec<_>) = memory.into_iter().unzip();
        let at = fabric.alloc_windows(plan.window_bytes())?;
        for (memory, &window) in memory.iter_mut().zip(&at) {
            memory.window = window;
        }
        let set_up = set_up(&**fabric, plan, &memory, &at);
        // Also a barrier: nobody signals before all signals are clear.
        let agreed = agree(&**fabric, "setting up device memory", set_up)
            .inspect_err(|_| give_up(&**fabric, &at))?;
        if let Err(error) = agreed {
            // SAFETY: `alloc_windows` returned them above, and no rank has launched a kernel yet.
            if let Err(error) = unsafe { fabric.free_windows(&at) } {
                tracing::warn!(%error, "cannot free windows");
            }
            return Err(error);
        }
        let windows = Arc::new(Windows::new(fabric.clone(), at));
        let all = seats.into_iter().zip(members).zip(memory);
        Ok(all
            .map(|((seat, member), memory)| {
                Self::of_rank(seat, member, plan, memory, windows.clone())
            })
            .collect())
    }

    fn of_rank(
        seat: Seat,
        member: Member,
        plan: &Plan,
        memory: Private,
        windows: Arc<Windows>,
    ) -> Self {
        let rank = seat.rank;
        let common = Common {
            rank: if plan.config().skip_a2a {
                0
            } else {
                rank.0 as u16
            },
            debug_checks: u16::from(plan.config().debug_checks),
            deadline_ns: plan.deadline_ns(),
            peers: memory.peers.address(),
            own_window: memory.window.address(),
            workspace: memory.workspace.address(),
            fault_page: memory.page.as_ref().map_or(0, |page| page.address()),
            ..plan.common()
        };
        let (open, poison, told) = (Open::Idle, OnceLock::new(), Mutex::default());
        let member = Arc::new(Launchable {
            _member: member,
            _residence: seat.residence,
            _windows: windows.clone(),
        });
        Self {
            plan: *plan,
            rank,
            max_sms: seat.max_sms,
            most_sms: seat.max_sms,
            gpu_ranks: seat.gpu_ranks,
            turn: seat.turn,
            common,
            open,
            tickets: AtomicU64::new(0),
            memory,
            windows,
            member,
            streams: Streams::default(),
            poison,
            told,
            closed: false,
        }
    }
}

/// Sets up the memory of the ranks of this process, after checking the fabric's windows.
fn set_up(
    fabric: &dyn Fabric,
    plan: &Plan,
    memory: &[Private],
    windows: &[DevicePtr],
) -> Result<(), Error> {
    let (shape, bytes) = (plan.shape(), plan.window_bytes());
    require_windows(fabric, "alloc_windows", windows, memory.len(), bytes)?;
    let all = fabric.local_ranks().into_iter().zip(memory).zip(windows);
    for ((rank, memory), &own) in all {
        if plan.config().skip_a2a {
            memory.set_up(plan, own, &[own])?;
            continue;
        }
        let peers = fabric.peer_windows(rank, windows, shape)?;
        let count = shape.ranks as usize;
        require_windows(fabric, "peer_windows", &peers, count, bytes)?;
        memory.set_up(plan, own, &peers)?;
    }
    Ok(())
}

/// Checks that all ranks were configured alike. Collective.
fn compare_shapes(fabric: &dyn Fabric, plan: &Plan) -> Result<(), Error> {
    // With `skip_a2a` all ranks have all tokens, and divide the shared expert's among them.
    let shares = plan.config().skip_a2a && plan.config().shared_expert;
    let ours = plan.fingerprint() ^ u64::from(shares);
    let all = fabric.all_gather(ours)?;
    let rank = fabric.local_ranks().first().copied().unwrap_or(Rank(0));
    match all.iter().position(|&theirs| theirs != ours) {
        Some(at) => Err(Error::ShapeMismatch {
            rank,
            peer: Rank(at as u32),
            ours,
            theirs: all[at],
            fields: differences(fabric, plan, at),
        }),
        None => Ok(()),
    }
}

/// The fields in which the plan and that of rank `at` differ. All ranks have seen that some do, so all
/// compare, except one of an older build: then there are none. Collective.
fn differences(fabric: &dyn Fabric, plan: &Plan, at: usize) -> Vec<Difference> {
    let mut fields = Vec::new();
    for agreed in plan.agreed() {
        let Ok(all) = fabric.all_gather(agreed.value) else {
            return Vec::new();
        };
        fields.extend(agreed.difference(all[at]));
    }
    fields
}
