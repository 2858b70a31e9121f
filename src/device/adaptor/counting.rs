//! Books of every call and of what is alive.
//!
//! May import: `device`, `units`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{forward, lock};
use crate::device::{
    Call, Device, DeviceError, Fence, GpuIdentity, HostMemory, Mappings, MemoryInfo, Moment,
    PageId, RowRefused, StreamId,
};
use crate::units::{Address, Bytes};

/// Counts the calls that reach a device, and what they leave reserved, created and mapped.
///
/// A call is counted before it goes upstream, also when it fails there; what is alive changes only by
/// calls that succeeded.
#[derive(Debug)]
pub struct Counting<D> {
    upstream: D,
    books: Mutex<Books>,
}

/// What [`Counting`] knows at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Books {
    /// Calls so far, by [`Call`]; read it through [`Books::calls`].
    calls: [u64; Call::COUNT],
    /// Bytes of address ranges that are reserved.
    pub reserved: Bytes,
    /// Pages created so far.
    pub pages_created: u64,
    /// Pages created and not released.
    pub pages_alive: u64,
    /// Granules that are mapped.
    pub mappings_alive: u64,
    /// Physical bytes: living pages of one granule each.
    pub held: Bytes,
    /// The largest `held` so far. While threads create and release at once, it may be too large by a
    /// page for each of them.
    pub held_peak: Bytes,
}

impl Books {
    /// How often `call` was made.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.calls[call as usize]
    }

    /// How many calls of [`Call::MEMORY`] were made: what a replayed step does without.
    #[must_use]
    pub fn memory_calls(&self) -> u64 {
        Call::MEMORY.iter().map(|&call| self.calls(call)).sum()
    }

    /// Whether nothing is reserved, created or mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.reserved == Bytes::ZERO && self.pages_alive == 0 && self.mappings_alive == 0
    }
}

impl<D: Device> Counting<D> {
    /// Empty books over `upstream`, of which nothing is reserved or created yet.
    #[must_use]
    pub fn new(upstream: D) -> Self {
        Self {
            upstream,
            books: Mutex::default(),
        }
    }

    /// The device under the books.
    #[must_use]
    pub fn upstream(&self) -> &D {
        &self.upstream
    }

    /// The books as they are now: a copy, to compare with a later one.
    #[must_use]
    pub fn books(&self) -> Books {
        *lock(&self.books)
    }

    /// [`Books::calls`] of now.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.books().calls(call)
    }

    /// [`Books::memory_calls`] of now.
    #[must_use]
    pub fn memory_calls(&self) -> u64 {
        self.books().memory_calls()
    }

    /// [`Books::is_empty`] of now.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.books().is_empty()
    }

    /// Counts `call`, makes it, and enters what it changed when it succeeded.
    fn counted<T>(
        &self,
        call: Call,
        make: impl FnOnce(&D) -> Result<T, DeviceError>,
        enter: impl FnOnce(&mut Books),
    ) -> Result<T, DeviceError> {
        lock(&self.books).calls[call as usize] += 1;
        let made = make(&self.upstream)?;
        enter(&mut lock(&self.books));
        Ok(made)
    }

    fn granules(&self, size: Bytes) -> u64 {
        size.0 / self.upstream.granule().0
    }
}

/// For calls that leave nothing behind.
fn no_change(_: &mut Books) {}

// SAFETY: every method that reserves, creates, maps or allows is upstream's, which keeps the contract; a
// call that is refused here has changed nothing there.
unsafe impl<D: Device> Device for Counting<D> {
    forward!(self => self.upstream;
        granule, is_host_memory, gpu, memory_source, check_stream, begin_row, mappings, is_capturing, check_room,
        host_memory, moment, elapsed, copy_stream);

    fn reserve(&self, size: Bytes) -> Result<Address, DeviceError> {
        self.counted(
            Call::Reserve,
            |d| d.reserve(size),
            |books| books.reserved.0 += size.0,
        )
    }

    fn unreserve(&self, base: Address, size: Bytes) -> Result<(), DeviceError> {
        self.counted(
            Call::Unreserve,
            |d| d.unreserve(base, size),
            |books| books.reserved.0 -= size.0,
        )
    }

    fn create(&self) -> Result<PageId, DeviceError> {
        let granule = self.granule();
        self.counted(Call::Create, Device::create, |books| {
            books.pages_created += 1;
            books.pages_alive += 1;
            books.held.0 += granule.0;
            books.held_peak = books.held_peak.max(books.held);
        })
    }

    fn release(&self, page: PageId) -> Result<(), DeviceError> {
        let granule = self.granule();
        self.counted(
            Call::Release,
            |d| d.release(page),
            |books| {
                books.pages_alive -= 1;
                books.held.0 -= granule.0;
            },
        )
    }

    fn map(&self, at: Address, page: PageId) -> Result<(), DeviceError> {
        self.counted(
            Call::Map,
            |d| d.map(at, page),
            |books| books.mappings_alive += 1,
        )
    }

    /// Counts a call of [`Call::Map`] for each page that is mapped, and for the one that is refused.
    fn map_row(&self, at: Address, pages: &[PageId]) -> Result<(), RowRefused> {
        let made = self.upstream.map_row(at, pages);
        let (mapped, calls) = match &made {
            Ok(()) => (pages.len(), pages.len()),
            Err(refused) => (refused.mapped, refused.mapped + 1),
        };
        let mut books = lock(&self.books);
        books.calls[Call::Map as usize] += calls as u64;
        books.mappings_alive += mapped as u64;
        drop(books);
        made
    }

    fn allow(&self, at: Address, size: Bytes) -> Result<(), DeviceError> {
        self.counted(Call::Allow, |d| d.allow(at, size), no_change)
    }

    fn unmap(&self, at: Address, size: Bytes) -> Result<(), DeviceError> {
        let gone = self.granules(size);
        self.counted(
            Call::Unmap,
            |d| d.unmap(at, size),
            |books| books.mappings_alive -= gone,
        )
    }

    fn synchronise(&self) -> Result<(), DeviceError> {
        self.counted(Call::Synchronise, Device::synchronise, no_change)
    }

    fn fence(&self, stream: StreamId) -> Result<Fence, DeviceError> {
        self.counted(Call::Fence, |d| d.fence(stream), no_change)
    }

    fn wait(&self, stream: StreamId, fence: Fence) -> Result<(), DeviceError> {
        self.counted(Call::Wait, |d| d.wait(stream, fence), no_change)
    }

    fn trim_pool(&self) -> Result<(), DeviceError> {
        self.counted(Call::TrimPool, Device::trim_pool, no_change)
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.counted(Call::Memory, Device::memory, no_change)
    }

    fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.counted(Call::Write, |d| d.write(at, bytes), no_change)
    }

    fn read(&self, at: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.counted(Call::Read, |d| d.read(at, bytes), no_change)
    }

    fn fill(&self, at: Address, size: Bytes, value: u8) -> Result<(), DeviceError> {
        self.counted(Call::Fill, |d| d.fill(at, size, value), no_change)
    }

    fn enqueue_copy(
        &self,
        stream: StreamId,
        at: Address,
        from: &Arc<HostMemory>,
        offset: Bytes,
        size: Bytes,
    ) -> Result<(), DeviceError> {
        self.counted(
            Call::Write,
            |d| d.enqueue_copy(stream, at, from, offset, size),
            no_change,
        )
    }
}
