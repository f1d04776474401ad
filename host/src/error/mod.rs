//! Everything that can go wrong, as types.

pub(crate) mod bootstrap;
pub(crate) mod input_fault;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod kernels;
pub(crate) mod leak;
pub(crate) mod notice;
pub(crate) mod round;
#[cfg(test)]
pub(crate) mod warnings_tests;

use std::path::PathBuf;

use ferry_layout::{Fault, FaultPage, MAX_RANKS, PROTOCOL_VERSION, Rank, TokenFormat};

use self::text::{green_context, in_its_place, paths};
use crate::error::round::Round;

mod cuda;
mod driver;
mod epilogue;
pub(crate) mod local_ranks;
mod node;
mod nvshmem;
mod plan;
mod shared_gpu;
mod tensor;
mod text;

pub use bootstrap::BootstrapError;
pub use cuda::CudaError;
pub use driver::DriverError;
pub use epilogue::EpilogueError;
#[cfg(feature = "cuda")]
pub use kernels::KernelsError;
pub use local_ranks::LocalRanksError;
pub use node::NodeError;
pub use nvshmem::NvshmemError;
pub use plan::{PlanError, Problem};
pub use shared_gpu::SharedGpuError;
pub use tensor::TensorError;

/// What a call of this library can fail with. Nothing was launched by a call that fails, except
/// where [`Fault`](Self::Fault) says what a kernel launched earlier met, and of
/// `LocalRanksError::NotLaunched`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The outputs of a dispatch have scales although the format has none, or the other way round,
    /// or in another layout than the format's.
    #[error("the format is {format:?}, and the dispatch's outputs have {given}")]
    WrongScales {
        /// What there is.
        given: &'static str,
        /// The plan's format.
        format: TokenFormat,
    },
    /// The outputs of a dispatch have scales of rows although the format has none, or the other way
    /// round.
    #[error(
        "the format is {format:?}, and the dispatch's outputs have {}row_scales",
        if *given { "" } else { "no " }
    )]
    WrongRowScales {
        /// Whether there are scales of rows.
        given: bool,
        /// The plan's format.
        format: TokenFormat,
    },
    /// A dispatch or a fused SiLU was given a global scale that its format does not use.
    #[error("the format is {format:?}, which takes no input scale")]
    UnusedInputScale {
        /// The plan's format.
        format: TokenFormat,
    },
    /// A fused SiLU whose sizes do not work.
    #[error(
        "a fused SiLU of {capacity} rows, {columns} columns and {experts} experts: it takes columns that are \
         a multiple of {multiple} above 0 in this format, at least 1 expert, and less than 2^31 rows"
    )]
    SiluColumns {
        /// Columns of the output.
        columns: usize,
        /// What they must be a multiple of.
        multiple: usize,
        /// Rows of the output.
        capacity: usize,
        /// Experts: one less than row offsets.
        experts: usize,
    },
    /// A fused SiLU that clamps to nothing.
    #[error("the activation's limit is {limit}, but it must be above 0")]
    SiluLimit {
        /// [`Activation::Clamped`](crate::Activation)'s.
        limit: f32,
    },
    /// PTX that was given does not fit.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Kernels(#[from] crate::error::kernels::KernelsError),
    /// The configuration does not work; every problem is listed.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A group without ranks, or of more than a window is laid out for.
    #[error("ranks is {ranks}, but a group has 1 to {MAX_RANKS}")]
    RankCount {
        /// Number of its ranks.
        ranks: u32,
    },
    /// A fabric that has ranks, but none in this process.
    #[error(
        "local_ranks is [], but each of the group's processes drives at least 1 of its {ranks} ranks"
    )]
    NoLocalRanks {
        /// Ranks of the group.
        ranks: u32,
    },
    /// A device that stands twice in a group.
    #[error("device {device} is listed twice (positions {first} and {second}); see share_gpus")]
    DeviceListedTwice {
        /// The device's number.
        device: usize,
        /// Where it stands first.
        first: usize,
        /// Where it stands again.
        second: usize,
    },
    /// A device that this machine does not have.
    #[error("there is no device {device}; this machine has {devices}")]
    NoSuchDevice {
        /// The device's number.
        device: usize,
        /// How many there are.
        devices: usize,
    },
    /// Two devices that cannot write each other's memory.
    #[error(
        "device {from} cannot access the memory of device {to}; a local group needs peer access between \
         every two of its devices"
    )]
    NoPeerAccess {
        /// The device that would write.
        from: usize,
        /// The device it would write to.
        to: usize,
    },
    /// A GPU that two processes of a group were given.
    #[error(
        "ranks {} and {} were given the same GPU, {device}; where that is meant, all of them say share_gpus",
        first.0, second.0
    )]
    GpuShared {
        /// The first rank that has it.
        first: Rank,
        /// The next one.
        second: Rank,
        /// The GPU, as the driver's tools name it.
        device: String,
    },
    /// Ranks that share a GPU, and cannot so.
    #[error(transparent)]
    SharedGpu(#[from] SharedGpuError),
    /// A rank that this process does not drive.
    #[error("rank {} is not driven by this process, which drives {local:?}", rank.0)]
    NotLocal {
        /// The rank.
        rank: Rank,
        /// Those that it drives.
        local: Vec<u32>,
    },
    /// A half of a split call where nothing travels.
    #[error(
        "{call} sends and does not wait, but the plan's skip_a2a is true, and nothing is sent: call the whole"
    )]
    SplitWithoutTravel {
        /// What was called.
        call: &'static str,
    },
    /// A plan that was made for a group of another size.
    #[error("the plan was made for {plan} ranks, but the group has {group}")]
    PlanForOtherGroup {
        /// Ranks of the plan.
        plan: u32,
        /// Ranks of the group.
        group: u32,
    },
    /// A plan whose ranks are on several nodes, for a group whose ranks are all on one.
    #[error(
        "the plan's p2p_world_size is {p2p_world_size}, fewer than its {ranks} ranks, but a {group} group \
         reaches no other nodes"
    )]
    PlanSpansNodes {
        /// Ranks of a node, by the plan.
        p2p_world_size: u32,
        /// Ranks of the plan and of the group.
        ranks: u32,
        /// The group's kind: "local".
        group: &'static str,
    },
    /// A fabric whose answer is not what a communicator needs.
    #[error("{call} of the {fabric} fabric gave {given} {unit}, but {wanted} are needed")]
    FabricAnswer {
        /// The fabric's name.
        fabric: &'static str,
        /// What was asked: "alloc_windows".
        call: &'static str,
        /// What is counted: "windows", or "bytes of a window".
        unit: &'static str,
        /// How many it must give.
        wanted: u64,
        /// How many it gave.
        given: u64,
    },
    /// The processes did not find each other.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// Ranks were configured differently, or are of builds that do not understand each other.
    #[error(
        "rank {} and rank {} were configured differently, or built from different versions of ferry: \
         fingerprints {ours:#018x} and {theirs:#018x} of sizes, memory layout and protocol version (here \
         {PROTOCOL_VERSION}); compare their Config, the number of ranks, and the builds",
        rank.0, peer.0
    )]
    ShapeMismatch {
        /// A rank of this process.
        rank: Rank,
        /// The first one that differs.
        peer: Rank,
        /// The fingerprint here.
        ours: u64,
        /// The fingerprint there.
        theirs: u64,
    },
    /// Processes that cannot be a node group.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Initialisation failed on another rank, whose own error says why.
    #[error("initialisation failed on rank {}, in: {step}; its own error says why", rank.0)]
    PeerFailed {
        /// The first rank that failed.
        rank: Rank,
        /// What it was doing.
        step: &'static str,
    },
    /// A tensor that does not fit.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Device memory that is shorter than what was asked of it.
    #[error("{call} of {wanted} bytes at {address:#x}, where {given} bytes may be used")]
    MemoryTooShort {
        /// What was asked: "upload".
        call: &'static str,
        /// Where.
        address: u64,
        /// Bytes that it takes.
        wanted: u64,
        /// Bytes that there are.
        given: u64,
    },
    /// More scales in a dispatch's outputs than kernels can count: their words are numbered in 32 bits.
    #[error(
        "scales has {given} {unit}, and at most {max} can be written in this format and hidden size; \
         give fewer"
    )]
    TooManyScales {
        /// What is counted: "rows", or "blocks" of 128 rows.
        unit: &'static str,
        /// How many there are.
        given: usize,
        /// How many there may be.
        max: u64,
    },
    /// Buffers for a dispatch that cannot be: nothing was allocated. Or outputs that do not even hold the
    /// shared expert's rows.
    #[error("the capacity of a dispatch's outputs does not work: {0}")]
    Capacity(Problem),
    /// Two tensors of one call that must be apart.
    #[error("tensor {first} overlaps tensor {second}; give them memory of their own")]
    TensorsOverlap {
        /// The one that is written.
        first: &'static str,
        /// The one that is read, or written as well.
        second: &'static str,
    },
    /// More tokens than the plan allows.
    #[error("{given} tokens given, but the plan allows max_tokens_per_rank = {max}")]
    TooManyTokens {
        /// Rows of `x`.
        given: usize,
        /// `max_tokens_per_rank`.
        max: usize,
    },
    /// Weights for a combine whose mode applied them at the experts already.
    #[error(
        "combine was given topk_weights, but in reduced mode the dispatch's weights count; give \
         them to the dispatch, or configure the exact mode"
    )]
    WeightsInReducedMode,
    /// Summed output without weights, or separate output with weights, in exact mode.
    #[error(
        "combine in exact mode {}; {}",
        if *.weights { "was given topk_weights" } else { "was given no topk_weights" },
        if *.weights {
            "its output is then [tokens, hidden] (CombineOutput::Summed)"
        } else {
            "its output is then [tokens, top_k, hidden] (CombineOutput::Apart)"
        }
    )]
    WrongCombineOutput {
        /// Whether weights were given.
        weights: bool,
    },
    /// Separate output in reduced mode.
    #[error(
        "combine in reduced mode gives sums, [tokens, hidden] (CombineOutput::Summed); rows are \
         kept apart only in exact mode"
    )]
    ApartInReducedMode,
    /// A call that does not come next in its rank's round.
    #[error("{call} is out of order: {open}")]
    WrongOrder {
        /// The call.
        call: &'static str,
        /// The rank.
        rank: Rank,
        /// How far its round is.
        open: Round,
    },
    /// A communicator whose round is open was to be closed. Nothing was freed, and nothing is closed: finish
    /// the round, then close the communicator that [`CloseError`](crate::CloseError) returned.
    #[error(
        "rank {}'s communicator cannot be closed: {open}; if a peer is lost, synchronize finds it, and then \
         it can",
        rank.0
    )]
    RoundOpen {
        /// Whose.
        rank: Rank,
        /// How far its round is.
        open: Round,
    },
    /// A kernel met this and gave up: the communicator is poisoned. A fault of the input is no error but
    /// an [`InputFault`](crate::InputFault).
    #[error("{0}")]
    Fault(Fault),
    /// The communicator gave up earlier and must be built anew. The fault says why; if it is an
    /// input fault, it came before the reason and took its place.
    #[error("the communicator gave up and must be built anew{}: {}", in_its_place(.0), .0)]
    Poisoned(Fault),
    /// A peer has given up on this rank, which came late: the communicator is poisoned, and this is
    /// what every later call gives. Of several late ranks only those are told that a peer named as
    /// [`Fault::culprit`]. What this rank has received so far may be whole.
    #[error(
        "rank {} came late, and rank {} had given up on it; the communicator must be built anew",
        rank.0, peer.0
    )]
    PeerGaveUp {
        /// This rank.
        rank: Rank,
        /// The lowest rank that has told this one.
        peer: Rank,
    },
    /// A call for all ranks of the process failed, on one of them or for all.
    #[error(transparent)]
    LocalRanks(#[from] LocalRanksError),
    /// A fault page that does not read as a fault.
    #[error("rank {}'s fault page is damaged: {page:?}", rank.0)]
    FaultPageDamaged {
        /// Whose.
        rank: Rank,
        /// What it holds.
        page: Box<FaultPage>,
    },
    /// The simulator refused.
    #[cfg(feature = "simulator")]
    #[error(transparent)]
    Simulator(#[from] ferry_simulator::SimulatorError),
    /// The CUDA driver refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The CUDA driver, or the device, does not fit the kernels.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A shared library that is not there.
    #[error("{library} could not be loaded ({reason}); looked for {}", paths(.tried))]
    LibraryMissing {
        /// What it is: "the CUDA driver", "the NVSHMEM host library".
        library: &'static str,
        /// Where it was looked for.
        tried: Vec<PathBuf>,
        /// What the loader said.
        reason: String,
    },
    /// A stream, memory or a context that belongs elsewhere than to the device it is for.
    #[error("{what} belongs to {owner}, and is used for {device}")]
    OtherDevice {
        /// What it is: "the stream".
        what: &'static str,
        /// What it belongs to: "cuda:1", or another context of the same device.
        owner: String,
        /// The device.
        device: String,
    },
    /// NVSHMEM refused, or does not fit.
    #[error(transparent)]
    Nvshmem(#[from] NvshmemError),
    /// A communicator that graphs will launch was to be closed. Nothing was freed, and nothing is
    /// closed: drop the graphs, then close what [`CloseError`](crate::CloseError) gave back.
    #[error(
        "rank {}'s communicator cannot be closed: {graphs} CUDA graphs that were captured of it are alive; \
         drop them first",
        rank.0
    )]
    GraphsAlive {
        /// Whose.
        rank: Rank,
        /// Graphs that `CudaDevice::capture` gave.
        graphs: usize,
    },
    /// The same, of [graphs of others](crate::Communicator::assume_no_foreign_graphs): destroy them first.
    #[error(
        "rank {}'s communicator cannot be closed: others made a graph of its calls; destroy it, and say so \
         by Communicator::assume_no_foreign_graphs",
        rank.0
    )]
    ForeignGraphs {
        /// Whose.
        rank: Rank,
    },
    /// A group with open communicators was to be closed, or with graphs of them. Nothing was done.
    #[error(
        "the group cannot be closed: {communicators} of its communicators in this process are open, or \
         graphs that were captured of them are alive; close them and drop the graphs first"
    )]
    CommunicatorsOpen {
        /// How many.
        communicators: usize,
    },
    /// A call with an option, of a communicator whose plan has none.
    #[error(
        "the call gives an option (see Config::options), but the plan's `options` is false: set it"
    )]
    WithoutOptions,
    /// The epilogue, the row weights or the output element of a combine do not fit.
    #[error("combine: {0}")]
    Epilogue(#[from] EpilogueError),
    /// A stream whose green context has fewer multiprocessors than the launch takes.
    #[error("{}", green_context(*max_sms, *multiprocessors))]
    GreenContext {
        /// [`Config::max_sms`](crate::Config).
        max_sms: Option<u32>,
        /// Multiprocessors of the green context.
        multiprocessors: u32,
    },
    /// The group was closed.
    #[error("the group was closed; make a new one")]
    GroupClosed,
    /// The operating system refused.
    #[error("{doing}: {source}")]
    Io {
        /// What was attempted.
        doing: String,
        /// What it said.
        source: std::io::Error,
    },
}
