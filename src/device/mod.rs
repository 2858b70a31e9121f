//! Layer 3: where address ranges and physical pages come from.
//!
//! ```text
//!   virtual range   | v0 | v1 | v2 | v3 |      reserve: addresses, no memory
//!                      \    |    /             map: a page under a place; a page may stand
//!   physical pages      [ p0 ] [ p1 ]          under many places at once (an alias)
//! ```
//!
//! [`Device`] is the driver's virtual-memory interface and nothing more; it knows nothing of steps
//! or plans. Methods take `&self`, so that a test and a compiler can share one device through an
//! `Arc`. The trait is unsafe to implement: safe code is given the memory behind its addresses.
//!
//! [`Host`] backs it with memory of this machine, [`adaptor`] wraps any device to count, to limit or to
//! fail its calls. `Cuda` (feature `cuda`) is an NVIDIA GPU's. `tests/device_contract.rs` holds every
//! implementation to this page.
//!
//! `Host` needs Linux (`memfd_create`, `fallocate`); elsewhere the crate builds without it, and the
//! trait and the adaptors remain.
//!
//! May import: `units`, `device_error`, `bookkeeping`, `options` for what a granule may be.

pub mod adaptor;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod fork;
#[cfg(target_os = "linux")]
mod host;
mod memory;

#[cfg(feature = "cuda")]
pub use cuda::Cuda;
#[cfg(target_os = "linux")]
pub use host::Host;
#[cfg(target_os = "linux")]
pub(crate) use host::heap_allows;
pub use memory::HostMemory;

/// Whether the heap may grow by so many bytes that will all be written: nobody says elsewhere.
#[cfg(not(target_os = "linux"))]
pub(crate) fn heap_allows(_: Bytes) -> bool {
    true
}

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

pub use crate::device_error::{Call, DeviceError, Mappings, MemoryInfo};
pub use crate::options::check_granule;
use crate::units::{Address, Bytes};

/// One physical page of a device: memory without an address. Numbered by the device, never reused
/// while it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u64);

/// A stream of work on a device. `Host` has simulated ones: any number names a stream. On a GPU it is
/// the driver's handle as a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StreamId(pub u64);

/// Why not all pages of a [row](Device::map_row) are mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowRefused {
    /// How many of its pages are mapped, from the first on.
    pub mapped: usize,
    /// What the device said to the next one.
    pub source: DeviceError,
}

/// A point on a stream after which everything enqueued before it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence(pub u64);

/// A point on a stream whose time is taken when the stream gets there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Moment(pub u64);

/// What a hook must know of a GPU to tell whose allocation it sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuIdentity {
    /// The driver's handle of its primary context.
    pub context: u64,
    /// Whether frameworks allocate on streams there; else they use the synchronous calls.
    pub has_pools: bool,
}

/// The driver's virtual-memory interface.
///
/// Rules that callers keep and implementations may check:
/// - places and sizes are multiples of [`granule`](Device::granule);
/// - `map` only under an unmapped place inside a reserved range; `unmap` only what is mapped;
/// - a page is released only after its last mapping is gone; a range only after all of its mappings;
/// - memory is accessed only where it is mapped *and* allowed;
/// - a call that returns an error has changed nothing, unless its page says otherwise.
///
/// Who shares a device with a compiler leaves the compiler's own range alone: where the CPU hook hands that
/// memory out, values of safe code lie in it, and an `unmap` or `write` there breaks them as a write to
/// `/proc/self/mem` would.
///
/// # Safety
/// The compiler hands out addresses of the device as memory, through the CPU hook to safe code. An
/// implementation guarantees:
/// - a range that [`reserve`](Device::reserve) returned belongs to nobody else until it is given back;
/// - two pages that are alive share no byte, and a page stands only where it was mapped;
/// - what is mapped and allowed stays so, and keeps what was written there, until an `unmap` of it;
/// - [`is_host_memory`](Device::is_host_memory) is true only where the CPU can read and write allowed memory
///   through the same addresses.
pub unsafe trait Device: Debug + Send + Sync {
    /// The smallest page that can be mapped, a power of two of at least 512 bytes.
    fn granule(&self) -> Bytes;

    /// Whether the CPU can read and write its memory through the same addresses: only then may the
    /// CPU hook hand them out.
    fn is_host_memory(&self) -> bool;

    /// Which GPU's memory it is, so that the GPU hook may hand it out; `None` for other memory.
    fn gpu(&self) -> Option<GpuIdentity> {
        None
    }

    /// A number for the memory that its pages come from: where two devices give the same, a page that one
    /// gives back is one that the other may get. Its own address, unless it says more.
    fn memory_source(&self) -> u64 {
        std::ptr::from_ref(self).cast::<()>().addr() as u64
    }

    /// Reserves `size` bytes of addresses, aligned to the granule, without memory.
    fn reserve(&self, size: Bytes) -> Result<Address, DeviceError>;

    /// Gives a whole reserved range back.
    fn unreserve(&self, base: Address, size: Bytes) -> Result<(), DeviceError>;

    /// Creates one physical page of one granule. Its contents are unspecified. Pages with consecutive numbers
    /// are neighbours, as far as it matters to the device.
    fn create(&self) -> Result<PageId, DeviceError>;

    /// Gives a physical page back.
    fn release(&self, page: PageId) -> Result<(), DeviceError>;

    /// Puts a page under the granule that starts at `at`. A page may stand under many places.
    fn map(&self, at: Address, page: PageId) -> Result<(), DeviceError>;

    /// Puts pages under the granules from `at` on, in their order: what as many calls of
    /// [`map`](Device::map) do, and counts as so many, at once where the device can. Unlike any other call it
    /// may have done a part of its work when it is refused.
    fn map_row(&self, at: Address, pages: &[PageId]) -> Result<(), RowRefused> {
        let places = (at.0..).step_by(self.granule().0 as usize).map(Address);
        for ((mapped, &page), at) in pages.iter().enumerate().zip(places) {
            self.map(at, page)
                .map_err(|source| RowRefused { mapped, source })?;
        }
        Ok(())
    }

    /// Says that the next `count` pages to be created will be mapped in a row: where neighbours take fewer
    /// of the [mappings](Device::mappings), the device makes them neighbours if it can.
    fn begin_row(&self, count: u64) {
        let _ = count;
    }

    /// How many mappings the process has of this kind of device, and how many it may have in all; `None` where
    /// nothing limits them.
    fn mappings(&self) -> Option<Mappings> {
        None
    }

    /// Makes the mapped granules in `at .. at + size` readable and writable by this device.
    fn allow(&self, at: Address, size: Bytes) -> Result<(), DeviceError>;

    /// Takes the mappings in `at .. at + size` away; each granule in it is mapped.
    fn unmap(&self, at: Address, size: Bytes) -> Result<(), DeviceError>;

    /// Waits for all work on the device.
    fn synchronise(&self) -> Result<(), DeviceError>;

    /// A fence behind everything enqueued on `stream` by the calling thread so far.
    fn fence(&self, stream: StreamId) -> Result<Fence, DeviceError>;

    /// Makes work that is enqueued on `stream` from now on wait for `fence`, and forgets the fence.
    fn wait(&self, stream: StreamId, fence: Fence) -> Result<(), DeviceError>;

    /// Refuses a stream whose work this device can neither order nor wait for: on a GPU one of another context than
    /// the primary one. The stream lives.
    fn check_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        let _ = stream;
        Ok(())
    }

    /// Whether work that is enqueued on `stream` is captured into a graph instead of run. A captured stream
    /// may not wait for a fence of a stream that is not.
    fn is_capturing(&self, stream: StreamId) -> bool {
        let _ = stream;
        false
    }

    /// Lets the driver give back what its own pool keeps of memory that was freed to it, so that `create` may
    /// get it. Work that was enqueued before is waited for first, by the caller. A device without a pool has
    /// nothing to do; one that stands on another asks it.
    fn trim_pool(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Physical memory, free and in total.
    fn memory(&self) -> Result<MemoryInfo, DeviceError>;

    /// Whether `size` bytes of pages could be created now, where a device can tell at once and for certain that
    /// they could not: a caller that needs many pages asks before it creates the first. That nothing is refused here
    /// promises nothing.
    ///
    /// # Errors
    /// [`OutOfMemory`](DeviceError::OutOfMemory).
    fn check_room(&self, size: Bytes) -> Result<(), DeviceError> {
        let _ = size;
        Ok(())
    }

    /// Copies `bytes` into mapped and allowed memory at `at`. For tests and small transfers.
    fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies mapped and allowed memory at `at` into `bytes`.
    fn read(&self, at: Address, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Sets `size` bytes at `at` to `value`.
    fn fill(&self, at: Address, size: Bytes, value: u8) -> Result<(), DeviceError>;

    /// Memory of the host from which this device copies best; ordinary memory where it does not matter.
    fn host_memory(&self, size: Bytes) -> Result<HostMemory, DeviceError> {
        HostMemory::ordinary(size).ok_or(DeviceError::Invalid {
            call: Call::Write,
            reason: "the host has not so much memory",
        })
    }

    /// A stream for copies beside the work of others: one for each device.
    fn copy_stream(&self) -> Result<StreamId, DeviceError> {
        Ok(StreamId(u64::MAX))
    }

    /// Enqueues on `stream` a copy of `size` bytes of `from`, which begin at `offset`, to mapped and allowed
    /// memory at `at`. Where work is done when its call returns, it is done then.
    fn enqueue_copy(
        &self,
        stream: StreamId,
        at: Address,
        from: &Arc<HostMemory>,
        offset: Bytes,
        size: Bytes,
    ) -> Result<(), DeviceError> {
        let _ = stream;
        let bytes = from.part(offset, size).ok_or(OUTSIDE)?;
        self.write(at, bytes)
    }

    /// Takes the time when `stream` gets here. Refused where work is done when its call returns.
    fn moment(&self, stream: StreamId) -> Result<Moment, DeviceError> {
        let _ = stream;
        Err(NO_TIME)
    }

    /// The time between two moments of a stream, which it waits for and forgets.
    fn elapsed(&self, from: Moment, to: Moment) -> Result<Duration, DeviceError> {
        let _ = (from, to);
        Err(NO_TIME)
    }
}

const NO_TIME: DeviceError = DeviceError::Invalid {
    call: Call::Fence,
    reason: "no time is taken on this device",
};

/// A copy from where no host memory is.
const OUTSIDE: DeviceError = DeviceError::Invalid {
    call: Call::Write,
    reason: "the bytes lie in the host memory",
};
