//! Layer 0: what a device is asked and how it refuses, as data; [`device`](crate::device) shows these.
//!
//! May import: `units`, `codes`.

use crate::codes;
use crate::units::Bytes;

/// Physical memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that a `create` could still get.
    pub free: Bytes,
    /// All bytes that the device has.
    pub total: Bytes,
}

/// Mappings of this process, as its kernel counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mappings {
    /// Those of the process's devices. It has others too.
    pub count: u64,
    /// How many the process may have (`vm.max_map_count` on Linux).
    pub limit: u64,
}

/// The call of a device, for counting, for failing and for naming in an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each variant is the method of the same name")]
pub enum Call {
    Reserve,
    Unreserve,
    Create,
    Release,
    Map,
    Allow,
    Unmap,
    Synchronise,
    Fence,
    Wait,
    Memory,
    TrimPool,
    Write,
    Read,
    Fill,
}

impl Call {
    /// How many calls there are: `call as usize` is below it.
    pub const COUNT: usize = Self::Fill as usize + 1;

    /// The calls that change what is reserved, created or mapped: the ones that a replayed step must
    /// not make.
    pub const MEMORY: [Self; 7] = [
        Self::Reserve,
        Self::Unreserve,
        Self::Create,
        Self::Release,
        Self::Map,
        Self::Allow,
        Self::Unmap,
    ];

    /// Whether the call is one of [`Call::MEMORY`].
    #[must_use]
    pub fn is_memory(self) -> bool {
        Self::MEMORY.contains(&self)
    }
}

/// Why a device refused a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device has no page left.
    #[error("out of memory: {info_free} free of {info_total}", info_free = info.free, info_total = info.total)]
    OutOfMemory {
        /// Memory at the time of the call.
        info: MemoryInfo,
    },
    /// The process may not have so many addresses.
    #[error(
        "RLIMIT_AS (ulimit -v) lets the process have {limit} of addresses, {used} are in use: {asked} more leave \
         no room beside them"
    )]
    NoAddresses {
        /// Addresses that were to be reserved.
        asked: Bytes,
        /// Addresses that the process has.
        used: Bytes,
        /// Addresses that it may have.
        limit: Bytes,
    },
    /// Work still runs; the same call may succeed later (CUDA's `NOT_READY`).
    #[error("not ready")]
    NotReady,
    /// The kernel allows the process no further mapping.
    #[error(
        "{call:?}: no mapping left, {count} of {limit} are the device's (sysctl vm.max_map_count raises the \
         limit; larger pages need fewer)",
        count = mappings.count, limit = mappings.limit
    )]
    Mappings {
        /// The call.
        call: Call,
        /// Mappings at the time of the call.
        mappings: Mappings,
    },
    /// The arguments name no such range, page or fence, or break a rule of [`Device`](crate::device::Device).
    #[error("{call:?}: {reason}")]
    Invalid {
        /// The call.
        call: Call,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The process is a forked child of the one whose device it is. Nothing was done.
    #[error(
        "{call:?}: the device belongs to the process that this one was forked from; make a device of this process's \
         own"
    )]
    Forked {
        /// The call.
        call: Call,
    },
    /// The driver of a GPU refused.
    #[error("{call:?} failed with {}", codes::cuda(*code))]
    Driver {
        /// The call.
        call: Call,
        /// A `CUresult`.
        code: i32,
    },
    /// The operating system refused.
    #[error("{call:?} failed with {}", codes::errno(*code))]
    System {
        /// The call.
        call: Call,
        /// An `errno`.
        code: i32,
    },
}
