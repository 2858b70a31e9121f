//! Layer 0: everything that can go wrong, with the numbers that a person needs to act on it.
//!
//! May import: `units`, `device_error`.

use crate::device_error::{Call, DeviceError};
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
    #[error(
        "over the budget of {budget:#}{}: asked for {asked}, held {held}, live {live}, \
         free {free} (raise the budget, or make the step smaller)",
        within(scope)
    )]
    OverBudget {
        /// Path of the innermost open scope; empty outside of steps.
        scope: String,
        /// Size of the allocation that failed.
        asked: Bytes,
        /// Physical bytes that the compiler owns.
        held: Bytes,
        /// Bytes in live buffers.
        live: Bytes,
        /// Bytes of the budget that are not held.
        free: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// Weights that are used at once need more memory than weights may have.
    #[error(
        "weights that are used at once need {needed:#}, and {limit:#} is what they can have (raise the budget, \
         or use them in smaller scopes)"
    )]
    WeightBudget {
        /// Bytes that must be in memory together, in whole pages.
        needed: Bytes,
        /// Bytes that they can have.
        limit: Bytes,
    },
    /// A scope could not open, since who watches scopes could not do its work: weights are missing.
    #[error("scope {path}: {reason}")]
    Scope {
        /// Names of the open scopes, the outermost first, without the step.
        path: String,
        /// What the watch said.
        reason: String,
    },
    /// The device has no memory left. What had been taken for this allocation was given back.
    #[error(
        "device out of memory{}: asked for {asked}, held {held}, live {live}, free {free}",
        within(scope)
    )]
    OutOfMemory {
        /// Path of the innermost open scope; empty outside of steps.
        scope: String,
        /// Size of the allocation that failed.
        asked: Bytes,
        /// Physical bytes that the compiler owns.
        held: Bytes,
        /// Bytes in live buffers.
        live: Bytes,
        /// Bytes that the device says are free.
        free: Bytes,
    },
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
    /// The process has nearly all the mappings that its kernel allows, and every window that this compiler has
    /// mapped is needed: by a live buffer, by a recorded edge, or by a pinned layout. The rest is left to the
    /// process, whose threads and allocator need mappings too.
    #[error(
        "{count} of the {limit} mappings that the kernel allows a process are in use{}: asked for {asked} in \
         pages of {granule} (choose a larger granule, which needs fewer, or raise the sysctl vm.max_map_count)",
        within(scope)
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
    #[error("device call {call:?} failed: {source}")]
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
    /// The operation needs a step that is active on this thread.
    #[error("no step is active on this thread")]
    NoStep,
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

fn within(scope: &str) -> String {
    match scope {
        "" => String::new(),
        scope => format!(" in {scope}"),
    }
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

/// Why a free is bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFree {
    /// The address belongs to no compiler of this process.
    #[error("not an address of any compiler")]
    Unknown,
    /// The buffer is a block of the global allocator, and a value may still own it.
    #[error("the CPU hook served it: drop the value that owns it instead")]
    Hooked,
    /// The address lies in a compiler's range, but no live buffer starts there: a double free, an
    /// interior pointer, or an address that was never handed out.
    #[error("no live buffer starts there (freed twice, or inside a buffer)")]
    NotLive,
}
