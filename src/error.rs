//! Layer 0: everything that can go wrong, with the numbers that a person needs to act on it.
//!
//! Paths of scopes are shown by both ends where they have more than 32 names, and long names too: an error is small,
//! wherever it arises.
//!
//! May import: `units`, `device_error`, `shortage`.

use crate::device_error::{Call, DeviceError};
use crate::shortage::{OfBudget, OfDevice, Shortage, WeightShortage};
use crate::units::{Address, Bytes};

/// What the memory compiler could not do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A strict step or scope met an allocation that no recorded edge answers.
    #[error(
        "strict step broke at {scope}, event {event}: asked for {asked:#}, expected {expected}"
    )]
    Strict {
        /// Path of the innermost open scope, from the step's name down: `step/down.0/attention`.
        scope: String,
        /// Number of the event in its step, from 0.
        event: u64,
        /// The size that was asked for, rounded up to 512 B.
        asked: Bytes,
        /// What the recorded steps allow here.
        expected: Expected,
    },
    /// The step needs more bytes than the budget allows. Nothing was taken from the device.
    #[error("{}", OfBudget(_0))]
    OverBudget(Box<Shortage>),
    /// Weights that are used at once need more memory than weights may have.
    #[error("{_0}")]
    WeightBudget(Box<WeightShortage>),
    /// A scope could not open, since who watches scopes could not do its work: weights are missing.
    #[error("scope {path}: {reason}")]
    Scope {
        /// Names of the open scopes, the outermost first, without the step.
        path: String,
        /// What the watch said.
        reason: String,
    },
    /// The device has no memory left. What had been taken for this allocation was given back.
    #[error("{}", OfDevice(_0))]
    OutOfMemory(Box<Shortage>),
    /// The reserved address range is used up.
    #[error(
        "address space of {reserved} is used up: asked for {asked} \
         (raise Options::address_space; addresses cost no memory)"
    )]
    AddressSpace {
        /// Size of the allocation that failed.
        asked: Bytes,
        /// Size of the reserved range.
        reserved: Bytes,
    },
    /// So many addresses, and fewer of them down to 1 GiB, could not be reserved.
    #[error(
        "option address_space: {asked:#} of addresses were refused{}: {source} (raise that limit, or make \
         Options::address_space smaller)",
        down_to(asked, least)
    )]
    Reservation {
        /// `Options::address_space`.
        asked: Bytes,
        /// The least that was tried.
        least: Bytes,
        /// What refused it.
        source: DeviceError,
    },
    /// The process has nearly all the mappings that its kernel allows, and every window that this compiler has
    /// mapped is needed: by a live buffer, by a recorded edge, or by a pinned layout. The rest is left to the
    /// process, whose threads and allocator need mappings too.
    #[error(
        "{count} of the {limit} mappings that the kernel allows a process are in use{}: asked for {asked} in \
         pages of {granule} (choose a larger granule, which needs fewer, or raise the sysctl vm.max_map_count)",
        crate::shortage::within(scope)
    )]
    Mappings {
        /// Path of the innermost open scope; empty outside of steps.
        scope: String,
        /// Size of the allocation that failed.
        asked: Bytes,
        /// The page of the device.
        granule: Bytes,
        /// Mappings that the devices of the process have.
        count: u64,
        /// Mappings that the kernel allows the process.
        limit: u64,
    },
    /// A device call failed for another reason.
    #[error("device call failed: {}", Named { call: *call, source })]
    Device {
        /// The call.
        call: Call,
        /// What the device said.
        source: DeviceError,
    },
    /// An address was freed at which no buffer is live.
    #[error("bad free of {address}: {reason}")]
    BadFree {
        /// The address.
        address: Address,
        /// Why it is bad.
        reason: BadFree,
    },
    /// The hook that a compiler of host memory needs is not this binary's global allocator.
    #[error(
        "large buffers of this program do not reach the memory compiler; add to its main.rs:\n\
         #[global_allocator]\n\
         static MEMORY: memory_compiler::hook::host::ScopedAllocator = \
         memory_compiler::hook::host::ScopedAllocator::new();"
    )]
    HookMissing,
    /// The hook that a compiler of GPU memory needs is not in this binary, or without effect.
    #[error(
        "GPU allocations of this program do not reach the memory compiler; add to its main.rs (for a \
         test, bench or example: to that file):\n\
         memory_compiler::interpose_cuda!();"
    )]
    CudaHookMissing,
    /// The hook that paged weights of a GPU need is not in this binary, or without effect.
    #[error(
        "work on the GPU of this program does not go past the memory compiler; add to its main.rs (for a \
         test, bench or example: to that file):\n\
         memory_compiler::page_cuda_weights!();"
    )]
    CudaUsesMissing,
    /// A compiler, step, pager or range was used in a forked child of the process that made it. Nothing was done, in
    /// neither of the two.
    #[error(
        "the process that made this has forked, and this is the child: make a device and a compiler of the child's \
         own, or start a program (exec); buffers that were live at the fork may be read and dropped here"
    )]
    Forked,
    /// The operation needs a step that is active on this thread.
    #[error("no step is active on this thread")]
    NoStep,
    /// A step was captured into a graph that cannot be launched rightly.
    #[error("{size:#} in {scope} cannot be captured: {reason}")]
    Captured {
        /// Path of the innermost open scope; of the step, at its end.
        scope: String,
        /// Size of the allocation that was asked for, or of the buffer that outlived the step.
        size: Bytes,
        /// Why it cannot.
        reason: Uncapturable,
    },
    /// The layout is pinned: addresses and the memory under them must stay.
    #[error("the layout is pinned (a `PinnedLayout` of this compiler lives)")]
    Pinned,
    /// A step of this compiler is already active.
    #[error("a step of this compiler is already active")]
    StepActive,
    /// An option has a value that cannot work.
    #[error("option {option}: {reason}")]
    Option {
        /// Name of the field of `Options`.
        option: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

impl Error {
    /// What a call means that the device refused.
    pub(crate) fn refused(call: Call, source: DeviceError) -> Self {
        match source {
            DeviceError::Forked { .. } => Self::Forked,
            source => Self::Device { call, source },
        }
    }
}

/// What a device said, with the name of its call once.
struct Named<'e> {
    call: Call,
    source: &'e DeviceError,
}

impl std::fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.source {
            DeviceError::NotReady | DeviceError::OutOfMemory { .. } => {
                write!(f, "{:?}: {}", self.call, self.source)
            }
            named => write!(f, "{named}"),
        }
    }
}

fn down_to(asked: &Bytes, least: &Bytes) -> String {
    if asked == least {
        return String::new();
    }
    format!(", and fewer down to {least:#}")
}

/// What the recorded steps allow at the place of a strict break.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// An allocation of this size (a multiple of 512 B).
    Size(Bytes),
    /// No further allocation: the recorded step ends here.
    End,
    /// Nothing is recorded for this state.
    Nothing,
}

impl std::fmt::Display for Expected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Size(size) => write!(f, "{size:#}"),
            Self::End => f.write_str("the end of the step"),
            Self::Nothing => f.write_str("nothing (this state was never recorded)"),
        }
    }
}

/// Why a step cannot be captured into a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Uncapturable {
    /// The allocation is not recorded; a step is captured as it was replayed. The call fails.
    #[error(
        "it is not recorded (run the same step to its end without a capture, pin the layout, then capture it)"
    )]
    NotRecorded,
    /// The buffer outlived the captured step for the first time, and lies where another captured step writes:
    /// a launch of that one would overwrite it. The step returns it at its end, and its graph must go.
    #[error(
        "it outlives its step where another captured step writes (before the layout is pinned, run its step once \
         with what it returns kept until the next step has begun)"
    )]
    Overwritten,
}

/// Why a free is bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFree {
    /// The address belongs to no compiler of this process.
    #[error("not an address of any compiler")]
    Unknown,
    /// A hook served the buffer, and a value may still own it: on the CPU a block of the global allocator, on a
    /// GPU a framework's tensor.
    #[error("a hook served it: drop the value that owns it instead")]
    Hooked,
    /// The address lies in a compiler's range, but no live buffer starts there: a double free, an
    /// interior pointer, or an address that was never handed out.
    #[error("no live buffer starts there (freed twice, or inside a buffer)")]
    NotLive,
}
