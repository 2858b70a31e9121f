//! Devices around a device: each takes its upstream first and is a [`Device`] itself.
//!
//! ```text
//!   Failing::new(Counting::new(Limiting::new(Host::new(granule)?, Bytes::gib(1))))
//!   a failed call is not counted; a refused one is
//! ```
//!
//! | adaptor | what it adds |
//! |---|---|
//! | [`Counting`] | books of every call and of what is alive |
//! | [`Limiting`] | at most so many bytes of pages |
//! | [`Failing`] | the n-th call fails, and never reaches upstream |
//! | [`Streams`] | streams whose work runs when a test says so |
//!
//! An `Arc` of a device is a device too, so that a test keeps a handle on the adaptor that it gives
//! away. No adaptor holds its lock while it calls upstream.
//!
//! May import: `device`, `units`.

mod counting;
mod failing;
mod limiting;
mod streams;

pub use counting::{Books, Counting};
pub use failing::{Failing, Repeat};
pub use limiting::Limiting;
pub use streams::{Streams, Work};

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{
    Device, DeviceError, Fence, GpuIdentity, HostMemory, Mappings, MemoryInfo, Moment, PageId,
    RowRefused, StreamId,
};
use crate::units::{Address, Bytes};

/// Implements the named methods of [`Device`] by calling them on an upstream: `forward!(self =>
/// self.upstream; granule, map)`.
macro_rules! forward {
    ($self:ident => $upstream:expr; $($method:ident),+ $(,)?) => {
        $( forward!(@ $method $self $upstream); )+
    };
    (@ granule $self:ident $upstream:expr) => { forward!(@@ granule() -> Bytes, $self $upstream); };
    (@ is_host_memory $self:ident $upstream:expr) => {
        forward!(@@ is_host_memory() -> bool, $self $upstream);
    };
    (@ gpu $self:ident $upstream:expr) => {
        forward!(@@ gpu() -> Option<GpuIdentity>, $self $upstream);
    };
    (@ memory_source $self:ident $upstream:expr) => {
        forward!(@@ memory_source() -> u64, $self $upstream);
    };
    (@ reserve $self:ident $upstream:expr) => {
        forward!(@@ reserve(size: Bytes) -> Result<Address, DeviceError>, $self $upstream);
    };
    (@ unreserve $self:ident $upstream:expr) => {
        forward!(@@ unreserve(base: Address, size: Bytes) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ create $self:ident $upstream:expr) => {
        forward!(@@ create() -> Result<PageId, DeviceError>, $self $upstream);
    };
    (@ release $self:ident $upstream:expr) => {
        forward!(@@ release(page: PageId) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ map $self:ident $upstream:expr) => {
        forward!(@@ map(at: Address, page: PageId) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ map_row $self:ident $upstream:expr) => {
        forward!(@@ map_row(at: Address, pages: &[PageId]) -> Result<(), RowRefused>, $self $upstream);
    };
    (@ begin_row $self:ident $upstream:expr) => {
        forward!(@@ begin_row(count: u64) -> (), $self $upstream);
    };
    (@ mappings $self:ident $upstream:expr) => {
        forward!(@@ mappings() -> Option<Mappings>, $self $upstream);
    };
    (@ allow $self:ident $upstream:expr) => {
        forward!(@@ allow(at: Address, size: Bytes) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ unmap $self:ident $upstream:expr) => {
        forward!(@@ unmap(at: Address, size: Bytes) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ synchronise $self:ident $upstream:expr) => {
        forward!(@@ synchronise() -> Result<(), DeviceError>, $self $upstream);
    };
    (@ fence $self:ident $upstream:expr) => {
        forward!(@@ fence(stream: StreamId) -> Result<Fence, DeviceError>, $self $upstream);
    };
    (@ wait $self:ident $upstream:expr) => {
        forward!(@@ wait(stream: StreamId, fence: Fence) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ check_stream $self:ident $upstream:expr) => {
        forward!(@@ check_stream(stream: StreamId) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ is_capturing $self:ident $upstream:expr) => {
        forward!(@@ is_capturing(stream: StreamId) -> bool, $self $upstream);
    };
    (@ trim_pool $self:ident $upstream:expr) => {
        forward!(@@ trim_pool() -> Result<(), DeviceError>, $self $upstream);
    };
    (@ memory $self:ident $upstream:expr) => {
        forward!(@@ memory() -> Result<MemoryInfo, DeviceError>, $self $upstream);
    };
    (@ check_room $self:ident $upstream:expr) => {
        forward!(@@ check_room(size: Bytes) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ write $self:ident $upstream:expr) => {
        forward!(@@ write(at: Address, bytes: &[u8]) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ read $self:ident $upstream:expr) => {
        forward!(@@ read(at: Address, bytes: &mut [u8]) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ fill $self:ident $upstream:expr) => {
        forward!(@@ fill(at: Address, size: Bytes, value: u8) -> Result<(), DeviceError>, $self $upstream);
    };
    (@ host_memory $self:ident $upstream:expr) => {
        forward!(@@ host_memory(size: Bytes) -> Result<HostMemory, DeviceError>, $self $upstream);
    };
    (@ moment $self:ident $upstream:expr) => {
        forward!(@@ moment(stream: StreamId) -> Result<Moment, DeviceError>, $self $upstream);
    };
    (@ elapsed $self:ident $upstream:expr) => {
        forward!(@@ elapsed(from: Moment, to: Moment) -> Result<Duration, DeviceError>, $self $upstream);
    };
    (@ copy_stream $self:ident $upstream:expr) => {
        forward!(@@ copy_stream() -> Result<StreamId, DeviceError>, $self $upstream);
    };
    (@ enqueue_copy $self:ident $upstream:expr) => {
        forward!(@@ enqueue_copy(
            stream: StreamId, at: Address, from: &Arc<HostMemory>, offset: Bytes, size: Bytes
        ) -> Result<(), DeviceError>, $self $upstream);
    };
    (@@ $method:ident($($name:ident: $kind:ty),*) -> $result:ty, $self:ident $upstream:expr) => {
        fn $method(&$self, $($name: $kind),*) -> $result {
            $upstream.$method($($name),*)
        }
    };
}
use forward;

// SAFETY: every method is that of the device itself, which keeps the contract.
unsafe impl<D: Device + ?Sized> Device for Arc<D> {
    forward!(self => (**self);
        granule, is_host_memory, gpu, memory_source, reserve, unreserve, create, release, map, map_row, begin_row,
        mappings, allow, unmap, synchronise, fence, wait, check_stream, is_capturing, trim_pool, memory, check_room,
        write, read, fill, host_memory, copy_stream, enqueue_copy, moment, elapsed);
}

/// Locks what no adaptor leaves half-changed when a panic passes.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
