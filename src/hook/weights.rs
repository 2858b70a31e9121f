//! Vectors whose memory lies in a weight range, so that a framework's CPU tensors can be evicted.
//!
//! ```text
//!   VecRange::vec(offset, n):   the next allocation of this thread ──> range.base() + offset
//!   dealloc of such a vector ──by address──> its range; the last one of a range that was dropped
//!                                            gives the addresses back
//! ```
//!
//! The vector is an ordinary allocation of the global allocator: whoever drops it, on whatever thread,
//! drops it rightly. Only its memory comes and goes, which is the contract of [`VecRange::vec`].
//!
//! Invariant: while a vector is live, its range is in `RANGES`, so its addresses stay reserved: touching
//! an evicted page is a `SIGSEGV` at an address of that range and never reads anything else.
//!
//! May import: `pager`, `current`, `bookkeeping`, `device/fork`, `hook/host`, `units`, `error`.

use std::alloc::Layout;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::bookkeeping::Bookkeeping;
use crate::current;
use crate::device::fork::Section;
use crate::error::Error;
use crate::hook::host::is_installed;
use crate::pager::WeightRange;
use crate::units::{ALIGNMENT, Address, Bytes};

thread_local! {
    /// Where the next allocation of exactly this many bytes goes; no bytes for none.
    static NEXT: Cell<(Address, usize)> = const { Cell::new((Address(0), 0)) };
    /// Whether this thread changes `RANGES`: what is freed then is the list's own memory.
    static CHANGING: Cell<bool> = const { Cell::new(false) };
}

static RANGES: RwLock<Vec<Arc<Placed>>> = RwLock::new(Vec::new());

#[derive(Debug)]
struct Placed {
    range: WeightRange,
    /// Values in it that were not dropped.
    live: AtomicU64,
    /// Whether its [`Open`] was dropped.
    closed: AtomicBool,
}

/// A range whose values find it when they are freed. Dropping it lets the addresses go with the last of them.
#[derive(Debug)]
struct Open(Arc<Placed>);

impl Open {
    fn new(range: WeightRange) -> Self {
        current::add_range(range.base(), range.size());
        let placed = Arc::new(Placed {
            range,
            live: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        change(|ranges| ranges.push(Arc::clone(&placed)));
        Self(placed)
    }

    /// Counts a value that is about to live at `offset`, and says where that is; `None` when the bytes are
    /// not in the range or not aligned to 512 bytes there.
    fn place(&self, offset: Bytes, size: Bytes) -> Option<Address> {
        let range = &self.0.range;
        let end = offset.checked_add(size)?;
        if range.is_inherited() {
            return None;
        }
        if end > range.size() || !offset.0.is_multiple_of(ALIGNMENT.0) {
            return None;
        }
        self.0.live.fetch_add(1, Ordering::SeqCst);
        Some(Address(range.base().0 + offset.0))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.0.end_if_last();
    }
}

/// A range of host memory in which vectors are made.
#[derive(Debug)]
pub struct VecRange(Open);

impl VecRange {
    /// Makes vectors in `range`, which serves nothing else.
    ///
    /// # Errors
    /// [`Error::HookMissing`] when the global allocator of this binary is not a
    /// [`ScopedAllocator`](super::host::ScopedAllocator); [`Error::Option`] for memory of another device
    /// than the host; [`Error::Forked`] for a range of this process's parent.
    pub fn new(range: WeightRange) -> Result<Self, Error> {
        if !is_installed() {
            return Err(Error::HookMissing);
        }
        if range.is_inherited() {
            return Err(Error::Forked);
        }
        if !range.is_host_memory() {
            return Err(Error::Option {
                option: "range",
                reason: "vectors lie in memory of the host".to_owned(),
            });
        }
        Ok(Self(Open::new(range)))
    }

    /// The range.
    #[must_use]
    pub fn range(&self) -> &WeightRange {
        &self.0.0.range
    }

    /// An empty vector with room for exactly `len` elements at `offset`; `None` in a forked child, when the bytes are
    /// not in the range, not aligned to 512 bytes there, or fewer than
    /// [`SMALLEST_THRESHOLD`](super::host::SMALLEST_THRESHOLD).
    ///
    /// # Safety
    /// - No other live vector overlaps these bytes.
    /// - The vector's elements are written and read only while the bytes are
    ///   [pinned](WeightRange::pin), and read only after they were filled as
    ///   [`Pinned::stale`](crate::pager::Pinned::stale) says.
    /// - While any reference to its elements lives, the bytes stay pinned.
    #[must_use]
    pub unsafe fn vec<T: Copy>(&self, offset: Bytes, len: usize) -> Option<Vec<T>> {
        let size = len.checked_mul(size_of::<T>()).filter(|&size| size > 0)?;
        let at = self.0.place(offset, Bytes(size as u64))?;
        NEXT.set((at, size));
        // Through a pointer that the compiler cannot see through: it may assume that an allocator reads
        // no variable of the program.
        let make = std::hint::black_box(Vec::<T>::with_capacity as fn(usize) -> Vec<T>);
        let vector = make(len);
        NEXT.set((Address(0), 0));
        if vector.as_ptr().addr() as u64 == at.0 {
            return Some(vector);
        }
        // Small or over-aligned ones go past: the vector is an ordinary one.
        self.0.0.live.fetch_sub(1, Ordering::SeqCst);
        None
    }
}

/// A range of GPU memory in which a framework's buffers lie at fixed places. A buffer there is freed as any
/// other one, by the driver's calls, which the [GPU hook](super::cuda) takes over.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct SliceRange(Open);

#[cfg(feature = "cuda")]
impl SliceRange {
    /// Buffers in `range`, which serves nothing else.
    ///
    /// # Errors
    /// [`Error::CudaHookMissing`] when the driver's calls do not reach the hook; [`Error::Option`] for memory of
    /// the host; [`Error::Forked`] for a range of this process's parent.
    pub fn new(range: WeightRange) -> Result<Self, Error> {
        super::cuda::check()?;
        if range.is_inherited() {
            return Err(Error::Forked);
        }
        if range.is_host_memory() {
            return Err(Error::Option {
                option: "range",
                reason: "these buffers lie in memory of a GPU".to_owned(),
            });
        }
        Ok(Self(Open::new(range)))
    }

    /// The range.
    #[must_use]
    pub fn range(&self) -> &WeightRange {
        &self.0.0.range
    }

    /// The address of a buffer at `offset`, for a value that frees it once; `None` when the bytes are not in
    /// the range or not aligned to 512 bytes there, and in a forked child.
    #[must_use]
    pub fn place(&self, offset: Bytes, size: Bytes) -> Option<Address> {
        self.0.place(offset, size)
    }
}

impl Placed {
    /// In a forked child the list stays: addresses that it inherited are told from others by it.
    fn end_if_last(self: &Arc<Self>) {
        if self.range.is_inherited() {
            return;
        }
        if self.closed.load(Ordering::SeqCst) && self.live.load(Ordering::SeqCst) == 0 {
            // Whoever finds it here takes it away, and its addresses with it.
            change(|ranges| {
                let at = ranges.iter().position(|other| Arc::ptr_eq(other, self));
                if let Some(at) = at {
                    current::remove_range(self.range.base());
                    ranges.remove(at);
                }
            });
        }
    }

    fn contains(&self, address: Address) -> bool {
        address.0.wrapping_sub(self.range.base().0) < self.range.size().0
    }
}

fn change(change: impl FnOnce(&mut Vec<Arc<Placed>>)) {
    let _bookkeeping = Bookkeeping::begin();
    let _section = Section::begin();
    CHANGING.set(true);
    change(&mut RANGES.write().unwrap_or_else(PoisonError::into_inner));
    CHANGING.set(false);
}

fn owner(address: Address) -> Option<Arc<Placed>> {
    if CHANGING.get() {
        return None;
    }
    let _section = Section::begin();
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    ranges
        .iter()
        .find(|placed| placed.contains(address))
        .cloned()
}

/// Serves the allocation that [`VecRange::vec`] makes.
#[inline]
pub(super) fn serve(layout: Layout) -> Option<Address> {
    let (at, size) = NEXT.get();
    (size == layout.size() && size > 0 && layout.align() as u64 <= ALIGNMENT.0).then(|| {
        NEXT.set((Address(0), 0));
        at
    })
}

/// Whether an address lies in a range of vectors.
pub(super) fn owns(address: Address) -> bool {
    current::may_own(address) && current::is_in_a_range(address) && owner(address).is_some()
}

/// Takes a vector's memory back; `false` when it lies in no range of vectors.
#[cold]
pub(super) fn take_back(address: Address) -> bool {
    let Some(placed) = owner(address) else {
        return false;
    };
    let _bookkeeping = Bookkeeping::begin();
    placed.live.fetch_sub(1, Ordering::SeqCst);
    placed.end_if_last();
    true
}
