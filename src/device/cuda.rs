//! Memory of an NVIDIA GPU: the driver's virtual-memory calls.
//!
//! ```text
//!   reserve  cuMemAddressReserve      map    cuMemMap          fence  cuEventCreate, cuEventRecord
//!   create   cuMemCreate              allow  cuMemSetAccess    wait   cuStreamWaitEvent, cuEventDestroy
//!   release  cuMemRelease             unmap  cuMemUnmap        memory cuMemGetInfo
//! ```
//!
//! [`books`] says who is where and refuses what breaks a rule of [`Device`]; [`driver`] holds the calls
//! and all unsafe code.
//!
//! Invariants:
//! - the primary context is retained while the device lives, and is current during each call that
//!   needs one; what was current before is current again after it;
//! - the lock is held across the driver's calls, none of which calls back, except across those that
//!   wait for work.
//!
//! May import: `device`, `units`.

mod books;
mod driver;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::books::{Books, check_granules, invalid};
pub(super) use self::driver::Locked;
use self::driver::{Current, Gpu};
use super::{
    Call, Device, DeviceError, Fence, HostMemory, MemoryInfo, Moment, OUTSIDE, PageId, StreamId,
    heap_allows,
};
use crate::units::{Address, Bytes};

/// Pages from which on the driver is asked for its memory before the first is created.
const MANY: u64 = 64;

/// Memory of an NVIDIA GPU: pages of the driver's granule (2 MiB) that can stand under many addresses.
///
/// A [`StreamId`] is the driver's handle of a stream as a number: 0 or 1 for the legacy default
/// stream, 2 for the calling thread's, else a `CUstream`. Addresses are valid in every context of the
/// device and on no other device.
///
/// Several of them may stand for one GPU; each has pages and ranges of its own.
///
/// `create` synchronises and asks the driver's own pool for what it keeps unused before it says that
/// there is no memory left.
///
/// The driver serves no forked child of a process that has used it: there every call is refused
/// ([`Forked`](DeviceError::Forked)), and dropping the device does nothing.
///
/// # Panics
/// In debug builds, dropping it panics when something is still reserved or created, unless the thread
/// panics already.
///
/// # Example
/// ```
/// use memory_compiler::device::{Cuda, Device};
///
/// for ordinal in 0..Cuda::count() {
///     let gpu = Cuda::new(ordinal)?;
///     println!("{ordinal}: pages of {}, {} free", gpu.granule(), gpu.memory()?.free);
/// }
/// # Ok::<(), memory_compiler::device::DeviceError>(())
/// ```
pub struct Cuda {
    ordinal: usize,
    granule: Bytes,
    has_pools: bool,
    books: Mutex<Books>,
    gpu: Gpu,
}

impl Cuda {
    /// How many GPUs the driver shows to this process (`CUDA_VISIBLE_DEVICES` hides some); 0 without a
    /// driver.
    #[must_use]
    pub fn count() -> usize {
        if driver::is_present() {
            driver::device_count()
        } else {
            0
        }
    }

    /// The GPU number `ordinal`, as `cuDeviceGet` counts them.
    ///
    /// # Errors
    /// [`Invalid`](DeviceError::Invalid) without a driver, without such a GPU, and for one without
    /// virtual-memory management; [`Driver`](DeviceError::Driver) with the driver's code else.
    pub fn new(ordinal: usize) -> Result<Self, DeviceError> {
        if !driver::is_present() {
            return Err(invalid(
                Call::Reserve,
                "the NVIDIA driver (libcuda.so.1) is not installed",
            ));
        }
        if ordinal >= driver::device_count() {
            return Err(invalid(
                Call::Reserve,
                "the driver shows no GPU of this number",
            ));
        }
        let gpu = Gpu::new(ordinal)?;
        if !gpu.has_virtual_memory()? {
            return Err(invalid(
                Call::Reserve,
                "the GPU has no virtual-memory management",
            ));
        }
        Ok(Self {
            ordinal,
            granule: gpu.granule()?,
            has_pools: gpu.has_pools()?,
            books: Mutex::default(),
            gpu,
        })
    }

    /// The GPU's number.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Whether the driver has stream-ordered allocation for this GPU (`cuMemAllocAsync`). Where it has
    /// not, frameworks use the synchronous calls.
    #[must_use]
    pub fn has_pools(&self) -> bool {
        self.has_pools
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // Books are changed after the last thing that can panic: a poisoned lock guards good ones.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, call: Call) -> Result<Current, DeviceError> {
        self.gpu.enter(call)
    }

    /// Takes the mappings of granules away; those before one that is refused are put back.
    fn unmap_all(&self, granules: &[(Address, books::Page, bool)]) -> Result<(), DeviceError> {
        for (done, &(at, ..)) in granules.iter().enumerate() {
            let Err(error) = self.gpu.unmap(at, self.granule) else {
                continue;
            };
            for &(at, page, allowed) in &granules[..done] {
                let back = self.gpu.map(at, self.granule, page.handle);
                if let Err(error) = back.and_then(|()| {
                    if allowed {
                        self.gpu.allow(at, self.granule)
                    } else {
                        Ok(())
                    }
                }) {
                    tracing::error!(%error, %at, "a mapping could not be put back");
                }
            }
            return Err(error);
        }
        Ok(())
    }
}

// SAFETY: ranges, pages and mappings are the driver's, which hands no address out twice; the books refuse to
// give a range or a page back while a mapping of it is left. None of it is memory of this machine.
unsafe impl Device for Cuda {
    fn granule(&self) -> Bytes {
        self.granule
    }

    fn is_host_memory(&self) -> bool {
        false
    }

    fn gpu(&self) -> Option<super::GpuIdentity> {
        Some(super::GpuIdentity {
            context: self.gpu.context(),
            has_pools: self.has_pools,
        })
    }

    /// All that stand for one GPU have one memory. A handle of the driver is no address of a device.
    fn memory_source(&self) -> u64 {
        self.gpu.context()
    }

    fn reserve(&self, size: Bytes) -> Result<Address, DeviceError> {
        check_granules(Call::Reserve, Address(0), size, self.granule)?;
        let _current = self.enter(Call::Reserve)?;
        let base = self.gpu.reserve(size, self.granule)?;
        self.books().ranges.insert(base, size);
        Ok(base)
    }

    fn unreserve(&self, base: Address, size: Bytes) -> Result<(), DeviceError> {
        let _current = self.enter(Call::Unreserve)?;
        let mut books = self.books();
        if books.ranges.get(&base) != Some(&size) {
            return Err(invalid(Call::Unreserve, "no such range is reserved"));
        }
        if books
            .places
            .range(base..Address(base.0 + size.0))
            .next()
            .is_some()
        {
            return Err(invalid(
                Call::Unreserve,
                "a range goes after all of its mappings",
            ));
        }
        self.gpu.unreserve(base, size)?;
        books.ranges.remove(&base);
        Ok(())
    }

    fn create(&self) -> Result<PageId, DeviceError> {
        let _current = self.enter(Call::Create)?;
        match self.gpu.create(self.granule) {
            Ok(handle) => Ok(self.books().add_page(handle)),
            Err(DeviceError::OutOfMemory { .. }) => Err(DeviceError::OutOfMemory {
                info: self.gpu.memory()?,
            }),
            Err(error) => Err(error),
        }
    }

    fn release(&self, page: PageId) -> Result<(), DeviceError> {
        let _current = self.enter(Call::Release)?;
        let mut books = self.books();
        let books::Page {
            handle,
            place_count,
        } = books.page(Call::Release, page)?;
        if place_count > 0 {
            return Err(invalid(Call::Release, "a page goes after its last mapping"));
        }
        self.gpu.release(handle)?;
        books.pages.remove(&page);
        Ok(())
    }

    fn map(&self, at: Address, page: PageId) -> Result<(), DeviceError> {
        let end = check_granules(Call::Map, at, self.granule, self.granule)?;
        let _current = self.enter(Call::Map)?;
        let mut books = self.books();
        books.check_inside(Call::Map, at, end)?;
        if books.places.contains_key(&at) {
            return Err(invalid(Call::Map, "the place is mapped already"));
        }
        let handle = books.page(Call::Map, page)?.handle;
        self.gpu.map(at, self.granule, handle)?;
        books.add_place(at, page);
        Ok(())
    }

    fn allow(&self, at: Address, size: Bytes) -> Result<(), DeviceError> {
        let end = check_granules(Call::Allow, at, size, self.granule)?;
        let _current = self.enter(Call::Allow)?;
        let mut books = self.books();
        books.check_inside(Call::Allow, at, end)?;
        books.check_mapped(
            Call::Allow,
            at,
            end,
            self.granule,
            |_| true,
            "every granule is mapped",
        )?;
        self.gpu.allow(at, size)?;
        books
            .places
            .range_mut(at..end)
            .for_each(|(_, place)| place.allowed = true);
        Ok(())
    }

    fn unmap(&self, at: Address, size: Bytes) -> Result<(), DeviceError> {
        let end = check_granules(Call::Unmap, at, size, self.granule)?;
        let _current = self.enter(Call::Unmap)?;
        let mut books = self.books();
        books.check_inside(Call::Unmap, at, end)?;
        books.check_mapped(
            Call::Unmap,
            at,
            end,
            self.granule,
            |_| true,
            "every granule is mapped",
        )?;
        let granules: Vec<_> = books
            .places
            .range(at..end)
            .map(|(&at, place)| (at, books.pages[&place.page], place.allowed))
            .collect();
        self.unmap_all(&granules)?;
        granules.iter().for_each(|&(at, ..)| books.remove_place(at));
        Ok(())
    }

    fn synchronise(&self) -> Result<(), DeviceError> {
        let _current = self.enter(Call::Synchronise)?;
        self.gpu.synchronise()
    }

    fn fence(&self, stream: StreamId) -> Result<Fence, DeviceError> {
        let _current = self.enter(Call::Fence)?;
        let event = self.gpu.record(stream)?;
        Ok(Fence(self.books().add_fence(event)))
    }

    fn wait(&self, stream: StreamId, fence: Fence) -> Result<(), DeviceError> {
        let _current = self.enter(Call::Wait)?;
        let mut books = self.books();
        let reason = "the fence was issued and not yet waited for";
        let event = books
            .fences
            .remove(&fence.0)
            .ok_or(invalid(Call::Wait, reason))?;
        let waited = self.gpu.wait(stream, event);
        if waited.is_err() {
            // An error changes nothing: the fence may be waited for again.
            books.fences.insert(fence.0, event);
            return waited;
        }
        self.gpu.destroy(event);
        Ok(())
    }

    fn check_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        if self.gpu.may_have(stream) {
            return Ok(());
        }
        Err(invalid(
            Call::Wait,
            "the stream is one of the GPU's primary context",
        ))
    }

    fn is_capturing(&self, stream: StreamId) -> bool {
        self.enter(Call::Wait)
            .is_ok_and(|_current| self.gpu.is_capturing(stream))
    }

    fn trim_pool(&self) -> Result<(), DeviceError> {
        let _current = self.enter(Call::TrimPool)?;
        if self.has_pools {
            self.gpu.trim_pool()
        } else {
            Ok(())
        }
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        let _current = self.enter(Call::Memory)?;
        self.gpu.memory()
    }

    /// What the driver's pool keeps may be given back before the last page is created: so only what is more than the
    /// GPU has at all is refused, and it is asked where many pages are wanted, which cost far more than asking.
    fn check_room(&self, size: Bytes) -> Result<(), DeviceError> {
        if size.0 / self.granule.0 < MANY {
            return Ok(());
        }
        match self.memory() {
            Ok(info) if size > info.total => Err(DeviceError::OutOfMemory { info }),
            _ => Ok(()),
        }
    }

    fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        let _current = self.enter(Call::Write)?;
        let books = self.books();
        books.check_access(Call::Write, at, Bytes(bytes.len() as u64), self.granule)?;
        self.gpu.write(at, bytes)
    }

    fn read(&self, at: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let _current = self.enter(Call::Read)?;
        let books = self.books();
        books.check_access(Call::Read, at, Bytes(bytes.len() as u64), self.granule)?;
        self.gpu.read(at, bytes)
    }

    fn fill(&self, at: Address, size: Bytes, value: u8) -> Result<(), DeviceError> {
        let _current = self.enter(Call::Fill)?;
        let books = self.books();
        books.check_access(Call::Fill, at, size, self.granule)?;
        self.gpu.fill(at, size, value)
    }

    /// Page-locked memory; ordinary memory, from which copies are slower, where the system locks no more.
    fn host_memory(&self, size: Bytes) -> Result<HostMemory, DeviceError> {
        let gpu = Gpu::new(self.ordinal)?;
        if !heap_allows(size) {
            return Err(invalid(Call::Write, "the host has not so much memory"));
        }
        match gpu.lock_host_memory(size) {
            Ok(locked) => Ok(HostMemory::locked(locked)),
            Err(error) => {
                tracing::warn!(%error, %size, "the driver locks no host memory");
                HostMemory::ordinary(size).ok_or(error)
            }
        }
    }

    fn copy_stream(&self) -> Result<StreamId, DeviceError> {
        let _current = self.enter(Call::Write)?;
        let mut books = self.books();
        if let Some(stream) = books.copy_stream {
            return Ok(stream);
        }
        let stream = self.gpu.new_stream()?;
        books.copy_stream = Some(stream);
        Ok(stream)
    }

    fn enqueue_copy(
        &self,
        stream: StreamId,
        at: Address,
        from: &Arc<HostMemory>,
        offset: Bytes,
        size: Bytes,
    ) -> Result<(), DeviceError> {
        let bytes = from.part(offset, size).ok_or(OUTSIDE)?;
        let _current = self.enter(Call::Write)?;
        let books = self.books();
        books.check_access(Call::Write, at, size, self.granule)?;
        if !from.is_locked() {
            // Nothing would wait for the copy before ordinary memory is given back.
            drop(books);
            self.gpu.synchronise()?;
            return self.gpu.write(at, bytes);
        }
        from.note_copy();
        self.gpu.enqueue_write(stream, at, bytes)
    }

    fn moment(&self, stream: StreamId) -> Result<Moment, DeviceError> {
        let _current = self.enter(Call::Fence)?;
        let event = self.gpu.record_time(stream)?;
        Ok(Moment(self.books().add_moment(event)))
    }

    fn elapsed(&self, from: Moment, to: Moment) -> Result<Duration, DeviceError> {
        let _current = self.enter(Call::Fence)?;
        let ends = {
            let mut books = self.books();
            let mut take = |moment: Moment| books.moments.remove(&moment.0);
            (take(from), take(to))
        };
        let elapsed = match ends {
            (Some(from), Some(to)) => self.gpu.elapsed(from, to),
            _ => Err(invalid(
                Call::Fence,
                "the moment was taken and not asked for",
            )),
        };
        let events = [ends.0, ends.1].into_iter().flatten();
        events.for_each(|event| self.gpu.destroy(event));
        elapsed
    }
}

impl fmt::Debug for Cuda {
    /// Counts only: a busy device has thousands of places.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Cuda");
        shown
            .field("ordinal", &self.ordinal)
            .field("granule", &self.granule);
        if let Ok(books) = self.books.try_lock() {
            shown
                .field("range_count", &books.ranges.len())
                .field("page_count", &books.pages.len())
                .field("place_count", &books.places.len());
        }
        shown.finish_non_exhaustive()
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let current = self.enter(Call::Release);
        let books = self.books.get_mut().unwrap_or_else(PoisonError::into_inner);
        if current.is_ok() {
            let moments = std::mem::take(&mut books.moments);
            for (_, event) in std::mem::take(&mut books.fences).into_iter().chain(moments) {
                self.gpu.destroy(event);
            }
            if let Some(stream) = books.copy_stream {
                self.gpu.destroy_stream(stream);
            }
        }
        debug_assert!(
            self.gpu.is_inherited()
                || std::thread::panicking()
                || (books.ranges.is_empty() && books.pages.is_empty()),
            "{} ranges and {} pages were given back before their device was dropped",
            books.ranges.len(),
            books.pages.len(),
        );
    }
}
