//! The errors of this library.

pub(crate) mod bootstrap;
pub(crate) mod input_fault;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod kernels;
pub(crate) mod leak;
pub(crate) mod links;
pub(crate) mod notice;
pub(crate) mod round;
#[cfg(test)]
pub(crate) mod warnings_tests;

use std::path::PathBuf;

use ferry_layout::{Fault, FaultPage, MAX_RANKS, Rank, ReceiveLayout, TokenFormat};

use self::mismatch::Mismatch;
use self::text::{green_context, in_its_place, paths};
use crate::error::round::Round;

mod cuda;
mod driver;
mod epilogue;
pub(crate) mod local_ranks;
mod mismatch;
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
pub use links::LinksError;
pub use local_ranks::LocalRanksError;
pub use mismatch::Difference;
pub use node::NodeError;
pub use nvshmem::NvshmemError;
pub use plan::{PlanError, Problem};
pub use shared_gpu::SharedGpuError;
pub use tensor::TensorError;

/// Error of a call of this library. A call that fails has launched nothing, except with
/// [`LocalRanksError::NotLaunched`]; [`Fault`](Self::Fault) is about a kernel that was launched earlier.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The outputs of a dispatch have other scales than the format has: some, none, or in another layout.
    #[error("the format is {format:?}, and the dispatch's outputs have {given}, not {wanted}")]
    WrongScales {
        /// Scales in the outputs, in words: "no scales".
        given: &'static str,
        /// Scales that the format and the receive layout have, in words.
        wanted: &'static str,
        /// The plan's format.
        format: TokenFormat,
    },
    /// A dispatch or a fused SiLU was given a global scale that its format does not use.
    #[error("the format is {format:?}, which takes no input scale")]
    UnusedInputScale {
        /// The plan's format.
        format: TokenFormat,
    },
    /// A fused SiLU was given numbers of rows, columns or experts that it does not take.
    #[error(
        "a fused SiLU of {capacity} rows, {columns} columns and {experts} experts: it takes columns that are \
         a multiple of {multiple} above 0 in this format, at least 1 expert, and less than 2^31 experts and \
         rows"
    )]
    SiluColumns {
        /// Columns of the output.
        columns: usize,
        /// Required divisor of the columns.
        multiple: usize,
        /// Rows of the output.
        capacity: usize,
        /// Experts: one less than the row offsets.
        experts: usize,
    },
    /// A fused SiLU with a limit that is not above 0.
    #[error("the activation's limit is {limit}, but it must be above 0")]
    SiluLimit {
        /// The limit of [`Activation::Clamped`](crate::Activation).
        limit: f32,
    },
    /// A call that takes a feature of the crate which this build lacks.
    #[error("{call} needs the feature `{feature}` of the crate ferry-ep, which this build lacks")]
    NotBuilt {
        /// The call: "Group::local".
        call: &'static str,
        /// The feature: "cuda".
        feature: &'static str,
    },
    /// The given PTX does not fit.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Kernels(#[from] crate::error::kernels::KernelsError),
    /// The configuration does not work; every problem is listed.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A group without ranks, or with more than [`MAX_RANKS`].
    #[error("ranks is {ranks}, but a group has 1 to {MAX_RANKS}")]
    RankCount {
        /// Ranks of the group.
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
    /// A device that is listed twice in a group.
    #[error("device {device} is listed twice (positions {first} and {second}); see share_gpus")]
    DeviceListedTwice {
        /// The device's number.
        device: usize,
        /// Its first position.
        first: usize,
        /// Its second position.
        second: usize,
    },
    /// A device that this machine does not have.
    #[error("there is no device {device}; this machine has {devices}")]
    NoSuchDevice {
        /// The device's number.
        device: usize,
        /// Number of devices.
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
        /// The device that it would write to.
        to: usize,
    },
    /// A GPU that two processes of a group were given.
    #[error(
        "ranks {} and {} were given the same GPU, {device}; if that is intended, all of them set share_gpus",
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
    /// Ranks cannot share a GPU as they would.
    #[error(transparent)]
    SharedGpu(#[from] SharedGpuError),
    /// A rank that this process does not drive.
    #[error("rank {} is not driven by this process, which drives {local:?}", rank.0)]
    NotLocal {
        /// The rank.
        rank: Rank,
        /// The ranks that it drives.
        local: Vec<u32>,
    },
    /// A half of a split call with [`skip_a2a`](crate::Config::skip_a2a).
    #[error(
        "{call} is half a call, but the plan's skip_a2a is true, and nothing is sent: make the whole call"
    )]
    SplitWithoutTravel {
        /// The call.
        call: &'static str,
    },
    /// Counts of a dispatch in a graph: their ticket would be that of the capture in every launch.
    #[error(
        "dispatch_counts is in a capture: a graph cannot tell the host of counts, as each launch has a \
         ticket of its own; capture the dispatch without it"
    )]
    CountsInGraph,
    /// Counts of a dispatch that were not asked for.
    #[error(
        "received has no counts of rank {}: call dispatch_counts between dispatch_async and dispatch_wait",
        rank.0
    )]
    NoCounts {
        /// The rank.
        rank: Rank,
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
        /// Ranks per node, by the plan.
        p2p_world_size: u32,
        /// Ranks of the plan and of the group.
        ranks: u32,
        /// The group's kind: "local".
        group: &'static str,
    },
    /// A fabric whose answer does not suffice for a communicator.
    #[error("{call} of the {fabric} fabric returned {given} {unit}, but {wanted} are needed")]
    FabricAnswer {
        /// The fabric's name.
        fabric: &'static str,
        /// The call: "alloc_windows".
        call: &'static str,
        /// Unit of the numbers: "windows", or "bytes of a window".
        unit: &'static str,
        /// Number that is needed.
        wanted: u64,
        /// Number that it returned.
        given: u64,
    },
    /// The processes did not find each other.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// Ranks were configured differently, or come from incompatible builds.
    #[error("{}", Mismatch { ranks: [*rank, *peer], fingerprints: [*ours, *theirs], fields })]
    ShapeMismatch {
        /// A rank of this process.
        rank: Rank,
        /// The first one that differs.
        peer: Rank,
        /// The fingerprint here.
        ours: u64,
        /// The fingerprint there.
        theirs: u64,
        /// Fields of the configuration in which the two differ. None if builds do, or if the ranks could not
        /// compare them.
        fields: Vec<Difference>,
    },
    /// Processes that cannot be a node group.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Initialization failed on another rank, whose own error says why.
    #[error("initialization failed on rank {}, in: {step}; its own error says why", rank.0)]
    PeerFailed {
        /// The first rank that failed.
        rank: Rank,
        /// The step that failed.
        step: &'static str,
    },
    /// Links between ranks are bad, or cannot be checked.
    #[error(transparent)]
    Links(#[from] LinksError),
    /// A tensor that does not fit.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Device memory that is too short for a copy or a fill.
    #[error("{call} of {wanted} bytes at {address:#x}, where {given} bytes may be used")]
    MemoryTooShort {
        /// The call: "upload".
        call: &'static str,
        /// Address of the memory.
        address: u64,
        /// Bytes that the call takes.
        wanted: u64,
        /// Bytes of the memory.
        given: u64,
    },
    /// More scales in a dispatch's outputs than kernels can count: their words are numbered in 32 bits.
    #[error(
        "scales has {given} {unit}, and at most {max} can be written in this format and hidden size; \
         give fewer"
    )]
    TooManyScales {
        /// Unit of the numbers: "rows", or "blocks" of 128 rows.
        unit: &'static str,
        /// Number in the outputs.
        given: usize,
        /// Largest number.
        max: u64,
    },
    /// A capacity that a dispatch's outputs cannot have, or one that does not even suffice for the shared
    /// expert's rows. Nothing was allocated.
    #[error("the capacity of a dispatch's outputs does not work: {0}")]
    Capacity(Problem),
    /// A number of multiprocessors that the calls of a communicator cannot have.
    #[error("the multiprocessors of later calls stay as they were: {0}")]
    MaxSms(Problem),
    /// A deadline that the calls of a communicator cannot have.
    #[error("the deadline of later calls stays as it was: {0}")]
    Deadline(Problem),
    /// Two tensors of one call that overlap and must not.
    #[error("tensor {first} overlaps tensor {second}; give each memory of its own")]
    TensorsOverlap {
        /// The tensor that is written.
        first: &'static str,
        /// The tensor that is read, or written as well.
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
    /// Weights for a combine in reduced mode, where the experts' rank has applied the dispatch's weights.
    #[error(
        "combine was given topk_weights, but in reduced mode the dispatch's weights count; pass \
         them to the dispatch, or configure the exact mode"
    )]
    WeightsInReducedMode,
    /// Summed output without weights, or separate output with weights, in exact mode.
    #[error(
        "combine in exact mode {}",
        if *.weights {
            "was given topk_weights: its output is then summed, [tokens, hidden]"
        } else {
            "was given no topk_weights: its output then has the rows apart, [tokens, top_k, hidden]"
        }
    )]
    WrongCombineOutput {
        /// Whether weights were given.
        weights: bool,
    },
    /// Separate output in reduced mode.
    #[error(
        "combine in reduced mode writes sums, [tokens, hidden]; rows are kept apart, \
         [tokens, top_k, hidden], only in exact mode"
    )]
    ApartInReducedMode,
    /// A call that does not come next in its rank's round.
    #[error("{call} is out of order: {open}")]
    WrongOrder {
        /// The call.
        call: &'static str,
        /// The rank.
        rank: Rank,
        /// State of its round.
        open: Round,
    },
    /// A view of received rows in another receive layout.
    #[error("view needs a plan whose receive is view, and this one's is {receive}")]
    NoView {
        /// The plan's receive layout.
        receive: ReceiveLayout,
    },
    /// A communicator cannot be closed while its round is open. Nothing was freed, and nothing is closed:
    /// finish the round, then close the communicator that [`CloseError`](crate::CloseError) returned.
    #[error(
        "rank {}'s communicator cannot be closed: {open}; enqueue the rest of the round, then close it; if a \
         peer is lost, drop it, or close it after synchronize has returned the fault",
        rank.0
    )]
    RoundOpen {
        /// The rank.
        rank: Rank,
        /// State of its round.
        open: Round,
    },
    /// A kernel gave up for this reason: the communicator is poisoned. A fault of the input is no error but
    /// an [`InputFault`](crate::InputFault).
    #[error("{0}")]
    Fault(Fault),
    /// The communicator gave up earlier and must be built anew. The fault is the reason; an
    /// input fault preceded the reason and took its place.
    #[error("the communicator gave up and must be built anew{}: {}", in_its_place(.0), .0)]
    Poisoned(Fault),
    /// A peer has given up on this rank, which came late: the communicator is poisoned, and every later call
    /// returns this error. Of several late ranks only those learn of it that a peer named as
    /// [`Fault::culprit`]. The rows that this rank has received so far may be complete.
    #[error(
        "rank {} came late, and rank {} had given up on it; the communicator must be built anew",
        rank.0, peer.0
    )]
    PeerGaveUp {
        /// This rank.
        rank: Rank,
        /// The lowest rank that gave up on this one.
        peer: Rank,
    },
    /// A call for all ranks of the process failed, on one of them or for all.
    #[error(transparent)]
    LocalRanks(#[from] LocalRanksError),
    /// A fault page that does not read as a fault.
    #[error("rank {}'s fault page is damaged: {page:?}", rank.0)]
    FaultPageDamaged {
        /// The rank.
        rank: Rank,
        /// Its contents.
        page: Box<FaultPage>,
    },
    /// The simulator failed.
    #[cfg(feature = "simulator")]
    #[error(transparent)]
    Simulator(#[from] ferry_simulator::SimulatorError),
    /// A call of the CUDA driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The CUDA driver, or the device, does not fit the kernels.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A shared library that could not be loaded.
    #[error("{library} could not be loaded ({reason}); looked for {}", paths(.tried))]
    LibraryMissing {
        /// Name of the library: "the CUDA driver", "the NVSHMEM host library".
        library: &'static str,
        /// Paths that were tried.
        tried: Vec<PathBuf>,
        /// Error of the loader.
        reason: String,
    },
    /// A stream, memory or a context of another device than the one that it is used for.
    #[error("{what} belongs to {owner}, and is used for {device}")]
    OtherDevice {
        /// Kind of the object: "the stream".
        what: &'static str,
        /// Its owner: "cuda:1", or another context of the same device.
        owner: String,
        /// The device.
        device: String,
    },
    /// A call of NVSHMEM failed, or its library does not fit.
    #[error(transparent)]
    Nvshmem(#[from] NvshmemError),
    /// A communicator cannot be closed while graphs may launch it. Nothing was freed, and nothing is
    /// closed: drop the graphs, then close the communicator that [`CloseError`](crate::CloseError) returned.
    #[error(
        "rank {}'s communicator cannot be closed: {graphs} CUDA graphs that were captured of it are alive; \
         drop them first",
        rank.0
    )]
    GraphsAlive {
        /// The rank.
        rank: Rank,
        /// Number of live graphs of `CudaDevice::capture`.
        graphs: usize,
    },
    /// A communicator cannot be closed while
    /// [graphs of others](crate::Communicator::assume_no_foreign_graphs) may launch it: destroy them first.
    #[error(
        "rank {}'s communicator cannot be closed: others made a graph of its calls; destroy it, then call \
         assume_no_foreign_graphs",
        rank.0
    )]
    ForeignGraphs {
        /// The rank.
        rank: Rank,
    },
    /// A group cannot be closed while it has open communicators, or graphs of them. Nothing was done.
    #[error(
        "the group cannot be closed: {communicators} of its communicators in this process are open, or \
         graphs that were captured of them are alive; close them and drop the graphs first"
    )]
    CommunicatorsOpen {
        /// Number of communicators that are open or have graphs.
        communicators: usize,
    },
    /// A call with an option, on a communicator whose plan has [`options`](crate::Config::options) unset.
    #[error(
        "the call has {option}, but the plan's `options` is false: set it in the configuration"
    )]
    WithoutOptions {
        /// The option: "tokens_on_device".
        option: &'static str,
    },
    /// The epilogue, the row weights or the output element of a combine do not fit.
    #[error("combine: {0}")]
    Epilogue(#[from] EpilogueError),
    /// A stream whose green context has fewer multiprocessors than the launch takes.
    #[error("{}", green_context(*max_sms, *multiprocessors))]
    GreenContext {
        /// [`Config::max_sms`](crate::Config).
        max_sms: Option<u32>,
        /// Multiprocessors in the green context.
        multiprocessors: u32,
    },
    /// The group was closed.
    #[error("the group was closed; make a new one")]
    GroupClosed,
    /// A call of the operating system failed.
    #[error("{doing}: {source}")]
    Io {
        /// The attempt, in words.
        doing: String,
        /// Error of the call.
        source: std::io::Error,
    },
}
