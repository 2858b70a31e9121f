//! Layer 4: weights that give way. A [`WeightRange`] reserves addresses and no memory; pinning makes
//! pages of it resident, and unpinned pages leave when a step, or weights of higher priority, need
//! memory.
//!
//! ```text
//!   WeightRange   | w0  | w1  | w2  | w3  |      addresses never change
//!   resident        ##    ##    ..    ..         what lies there may leave, with a new stamp when
//!   pinned          ##                           it comes back
//! ```
//!
//! One [`Pager`] serves one device. A compiler made with
//! [`Compiler::with_pager`](crate::Compiler::with_pager) shares its budget: recording a step evicts
//! weights page by page; a replayed step asks for nothing, so it never evicts.
//!
//! What weights may take of the budget is bounded by [`Pager::with_limit`], so that the rest is for steps.
//!
//! [`Ahead`] does all of this for weights that are used in an order that repeats: it fills them through a
//! [`Carrier`], the next group beside the work of this one, and arranges pages over shared frames, so that a
//! step of a model that does not fit makes no memory call.
//!
//! The contents are the caller's: [`Pinned::stale`] names the parts that came in since the caller
//! filled them last, by [`Stamp`].
//!
//! ```
//! use std::sync::Arc;
//! use memory_compiler::Bytes;
//! use memory_compiler::device::{Device, Host};
//! use memory_compiler::pager::{Pager, Pin, Stamp};
//!
//! let device = Arc::new(Host::new(Bytes::kib(64))?);
//! let pager = Pager::new(device.clone(), Some(Bytes::kib(128)))?;
//! let weights = pager.range(Bytes::mib(1))?;
//!
//! let mut filled = Stamp::NEVER;
//! for _ in 0..3 {
//!     match weights.pin(Bytes::ZERO, Bytes::kib(64), filled)? {
//!         Pin::Resident(pinned) => {
//!             for part in pinned.stale() {
//!                 device.fill(part.address, part.size, 7)?;
//!             }
//!             filled = pinned.stamp();
//!         }
//!         Pin::Stream => unreachable!("64 KiB fit"),
//!     }
//! }
//! assert_eq!(pager.stats().arrivals, 1);
//! assert!(matches!(weights.pin(Bytes::ZERO, Bytes::kib(256), Stamp::NEVER)?, Pin::Stream));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! In a forked child a pager of the parent and all that hangs on it refuse their work ([`Error::Forked`]), and
//! their drops do nothing: evicted weights cannot come in there. What was resident at the fork may be read.
//!
//! May import: layers 0 and 3, `pages`, `budget`, `accounts`.

mod ahead;
mod books;
mod carrier;
mod clock;
mod plan;
mod range;
mod short;

pub use ahead::{Ahead, AheadStats, Group};
pub use carrier::{AtOnce, Carrier, OnStream, OnThread};

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use self::books::Books;
use crate::accounts::{Account, Owner};
use crate::bookkeeping::Bookkeeping;
use crate::budget::{Budget, Relief};
use crate::device::fork::Process;
use crate::device::{Device, heap_allows};
use crate::error::Error;
use crate::pages::Refused;
use crate::units::{Address, Bytes};

/// When a page became resident, by a number that no other page of this process ever gets. A weight's
/// stamp is the latest of its pages': while it stays, so does every byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(u64);

impl Stamp {
    /// Before anything was resident: of a weight that was never filled.
    pub const NEVER: Self = Self(0);
}

/// A page that is about to leave, still readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// Where it begins in its range.
    pub offset: Bytes,
    /// Where it lies.
    pub address: Address,
    /// One granule.
    pub size: Bytes,
}

/// Saves a page of writable weights before it leaves; `false` keeps it in memory. Work on the device
/// is done when it is called. It runs inside the pager and may not call it.
pub struct PageOut(Box<dyn FnMut(Leaving) -> bool + Send>);

impl PageOut {
    /// Calls `save` for each page that leaves under pressure, but not when the range is dropped.
    pub fn new(save: impl FnMut(Leaving) -> bool + Send + 'static) -> Self {
        Self(Box::new(save))
    }
}

impl fmt::Debug for PageOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageOut(..)")
    }
}

/// What is in memory of a part of a range, in whole pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// Bytes in memory.
    pub resident: Bytes,
    /// Bytes not in memory.
    pub evicted: Bytes,
    /// Bytes in memory that are pinned.
    pub pinned: Bytes,
}

/// Numbers of a pager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagerStats {
    /// Addresses of all ranges.
    pub reserved: Bytes,
    /// Bytes of weights in memory.
    pub resident: Bytes,
    /// Bytes of those that are pinned.
    pub pinned: Bytes,
    /// Bytes of the budget that weights and steps use.
    pub used: Bytes,
    /// The budget.
    pub limit: Bytes,
    /// What weights may have of it.
    pub weights_limit: Bytes,
    /// Pages that became resident so far.
    pub arrivals: u64,
    /// Pages evicted so far.
    pub evictions: u64,
    /// Batches of evictions so far, each of which waited for the device once.
    pub evicting: u64,
    /// Pins that did not fit.
    pub streamed: u64,
    /// Most bytes that [`WeightRange::pin_beyond`] went past the limit of weights at once.
    pub beyond_peak: Bytes,
    /// Device memory calls made for weights.
    pub device_calls: u64,
}

/// Weights of one device, and the budget that they share with steps. Clones are the same pager; it
/// lives as long as any of them, or of its ranges.
#[derive(Clone, Debug)]
pub struct Pager(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Who made it: in a forked child the lock may be held for ever.
    process: Process,
    device: Arc<dyn Device>,
    budget: Budget,
    books: Mutex<Books>,
    /// Without pages, to see those of others.
    account: Arc<Account>,
}

/// How often weights that miss memory ask idle compilers for theirs: others may be quicker.
const BORROWING: usize = 3;

/// Marks the thread for as long as the books are locked: what they allocate belongs to no step.
struct Locked<'p> {
    books: MutexGuard<'p, Books>,
    _busy: Bookkeeping,
}

impl Shared {
    /// Comes before the lock wherever the program may call from.
    fn check_process(&self) -> Result<(), Error> {
        if self.process.is_ancestor() {
            return Err(Error::Forked);
        }
        Ok(())
    }

    fn lock(&self) -> Locked<'_> {
        Locked {
            _busy: Bookkeeping::begin(),
            // The books are whole whenever foreign code (a device, a callback) can panic.
            books: self.books.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl Relief for Shared {
    fn relieve(&self, wanted: Bytes) -> Bytes {
        let granule = self.device.granule().0;
        Bytes(self.lock().books.relieve(wanted.0.div_ceil(granule)) * granule)
    }
}

fn failed(refused: Refused) -> Error {
    match refused {
        Refused::Device { call, source } => Error::refused(call, source),
        // Whoever takes pages looks at this one, and says `None`: see `Books::bring`.
        Refused::Budget => Error::WeightBudget(Box::default()),
    }
}

impl Pager {
    /// A pager on `device` that, with the compilers that share it, owns at most `budget` bytes; `None`
    /// for what the device has.
    ///
    /// # Errors
    /// [`Error::Option`] for a budget below one page.
    pub fn new(device: Arc<dyn Device>, budget: Option<Bytes>) -> Result<Self, Error> {
        Self::with_limit(device, budget, None)
    }

    /// The same where weights own at most `weights` of the budget, so that the rest is for steps.
    ///
    /// # Errors
    /// As [`new`](Self::new), for either number.
    pub fn with_limit(
        device: Arc<dyn Device>,
        budget: Option<Bytes>,
        weights: Option<Bytes>,
    ) -> Result<Self, Error> {
        let granule = device.granule();
        for (option, limit) in [("budget", budget), ("weights", weights)] {
            if let Some(limit) = limit.filter(|&limit| limit < granule) {
                return Err(Error::Option {
                    option,
                    reason: format!("{limit:#} is less than one page of {granule}"),
                });
            }
        }
        let budget = Budget::new(budget);
        let shared = Arc::new(Shared {
            account: Account::open(&*device, &budget, Owner::Weights),
            process: Process::this(),
            device,
            budget: budget.clone(),
            books: Mutex::new(Books::new(budget.part(weights))),
        });
        let relief: Weak<Shared> = Arc::downgrade(&shared);
        shared.budget.add_relief(relief);
        Ok(Self(shared))
    }

    /// Reserves addresses for at least `size` bytes of weights, and no memory. The newest range has the
    /// highest priority.
    ///
    /// # Errors
    /// [`Error::Device`] when the device refuses, [`Error::Option`] for no bytes or too many, [`Error::Forked`] in a
    /// forked child.
    pub fn range(&self, size: Bytes) -> Result<WeightRange, Error> {
        self.add(size, None)
    }

    /// The same for weights that are written to: `page_out` saves each page before it leaves.
    ///
    /// # Errors
    /// As [`range`](Self::range).
    pub fn writable_range(&self, size: Bytes, page_out: PageOut) -> Result<WeightRange, Error> {
        self.add(size, Some(page_out))
    }

    fn add(&self, size: Bytes, page_out: Option<PageOut>) -> Result<WeightRange, Error> {
        self.0.check_process()?;
        let granule = self.0.device.granule();
        let page_count = u32::try_from(size.0.div_ceil(granule.0)).unwrap_or(0);
        if page_count == 0 {
            return Err(Error::Option {
                option: "size",
                reason: format!("{size} is not 1 to {} pages of {granule}", u32::MAX),
            });
        }
        let books = u64::from(page_count).saturating_mul(Books::BYTES_A_PAGE.0);
        if !heap_allows(Bytes(books)) {
            return Err(Error::Option {
                option: "size",
                reason: format!(
                    "the books of {size} in pages of {granule} are {}, and the machine has not so much left (make \
                     the pages larger)",
                    Bytes(books)
                ),
            });
        }
        let device = Arc::clone(&self.0.device);
        let added = self.0.lock().books.add(device, page_count, page_out);
        let (id, base) = added.map_err(failed)?;
        Ok(WeightRange(Arc::new(Reserved {
            pager: Arc::clone(&self.0),
            id,
            base,
            page_count,
        })))
    }

    /// The numbers of now; all zero in a forked child.
    #[must_use]
    pub fn stats(&self) -> PagerStats {
        if self.0.check_process().is_err() {
            return PagerStats::default();
        }
        self.0.lock().books.stats()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.0.device
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.0.budget
    }
}

/// Addresses for weights. Clones are the same range; its memory goes back with the last of them and of
/// its pins.
#[derive(Clone, Debug)]
pub struct WeightRange(Arc<Reserved>);

#[derive(Debug)]
struct Reserved {
    pager: Arc<Shared>,
    id: u64,
    base: Address,
    page_count: u32,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.pager.check_process().is_ok() {
            self.pager.lock().books.remove(self.id);
        }
    }
}

/// What a pin came to.
#[derive(Debug)]
#[must_use]
pub enum Pin {
    /// In memory until the guard is dropped.
    Resident(Pinned),
    /// It does not fit, and nothing was taken from others: bring the bytes in another way, or go on
    /// without.
    Stream,
}

/// Part of a range that is in memory and stays there until this is dropped.
#[derive(Debug)]
pub struct Pinned {
    range: WeightRange,
    pages: Range<u32>,
    stamp: Stamp,
    stale: Vec<Part>,
}

/// Some bytes of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where they begin in the range.
    pub offset: Bytes,
    /// Where they lie.
    pub address: Address,
    /// How many they are.
    pub size: Bytes,
}

impl WeightRange {
    /// First address.
    #[must_use]
    pub fn base(&self) -> Address {
        self.0.base
    }

    /// Addresses reserved: whole pages.
    #[must_use]
    pub fn size(&self) -> Bytes {
        Bytes(u64::from(self.0.page_count) * self.granule().0)
    }

    /// Whether its addresses are ones of this process.
    #[must_use]
    pub fn is_host_memory(&self) -> bool {
        self.0.pager.device.is_host_memory()
    }

    /// Whether this process is a forked child of the one that made it.
    pub(crate) fn is_inherited(&self) -> bool {
        self.0.pager.process.is_ancestor()
    }

    fn granule(&self) -> Bytes {
        self.0.pager.device.granule()
    }

    /// Pages that `offset .. offset + size` touches.
    fn pages(&self, offset: Bytes, size: Bytes) -> Result<Range<u32>, Error> {
        let granule = self.granule().0;
        let end = offset
            .checked_add(size)
            .filter(|&end| end <= self.size())
            .ok_or_else(|| Error::Option {
                option: "offset",
                reason: format!(
                    "{size} at {offset} do not lie in {} of weights",
                    self.size()
                ),
            })?;
        if size == Bytes::ZERO {
            return Ok(0..0);
        }
        // Both are at most the page count of the range, which is a `u32`.
        Ok((offset.0 / granule) as u32..end.0.div_ceil(granule) as u32)
    }

    /// Makes the pages under `offset .. offset + size` resident and keeps them so. `since` is the stamp
    /// of the last time that the caller filled all of these bytes, [`Stamp::NEVER`] if it did not.
    ///
    /// Memory comes from what is free, then from unpinned pages of ranges of lower priority and from
    /// higher addresses of this one. Not from idle pages of compilers: their next step would take them back
    /// and evict the weights for it, while bytes that stream in cost nobody anything.
    ///
    /// # Errors
    /// [`Error::Option`] for bytes outside the range, [`Error::Forked`] in a forked child, [`Error::Device`] when the
    /// device refuses: then nothing is pinned, and all that was resident and not evicted still is.
    pub fn pin(&self, offset: Bytes, size: Bytes, since: Stamp) -> Result<Pin, Error> {
        Ok(match self.pin_pages(offset, size, since, false)? {
            Some(pinned) => Pin::Resident(pinned),
            None => Pin::Stream,
        })
    }

    /// The same for bytes that cannot be brought in another way: where they do not fit into what weights may
    /// have ([`Pager::with_limit`]) they take of the rest of the budget, as the step's buffers do, and leave
    /// with their last pin. [`PagerStats::beyond_peak`] says how far. Where that is used up too they take the
    /// place of any page that is not pinned, and at last of idle pages of compilers that are in no step.
    ///
    /// # Errors
    /// As [`pin`](Self::pin); [`Error::WeightBudget`] where the whole budget, or the device, has not so much
    /// beside what is pinned.
    pub fn pin_beyond(&self, offset: Bytes, size: Bytes, since: Stamp) -> Result<Pinned, Error> {
        for _ in 0..BORROWING {
            if let Some(pinned) = self.pin_pages(offset, size, since, true)? {
                return Ok(pinned);
            }
            let short = self.together(self.pages(offset, size)?);
            if !self.borrow(&short) {
                return Err(Error::WeightBudget(Box::new(short)));
            }
        }
        match self.pin_pages(offset, size, since, true)? {
            Some(pinned) => Ok(pinned),
            None => {
                let short = self.together(self.pages(offset, size)?);
                Err(Error::WeightBudget(Box::new(short)))
            }
        }
    }

    fn pin_pages(
        &self,
        offset: Bytes,
        size: Bytes,
        since: Stamp,
        beyond: bool,
    ) -> Result<Option<Pinned>, Error> {
        let _bookkeeping = Bookkeeping::begin();
        self.0.pager.check_process()?;
        let pages = self.pages(offset, size)?;
        let brought = self
            .0
            .pager
            .lock()
            .books
            .pin(self.0.id, &pages, since, beyond);
        let Some(brought) = brought.map_err(failed)? else {
            return Ok(None);
        };
        let granule = self.granule().0;
        let parts = brought.stale.into_iter().map(|run| {
            let from = (u64::from(run.start) * granule).max(offset.0);
            let to = (u64::from(run.end) * granule).min(offset.0 + size.0);
            Part {
                offset: Bytes(from),
                address: Address(self.0.base.0 + from),
                size: Bytes(to - from),
            }
        });
        Ok(Some(Pinned {
            range: self.clone(),
            pages,
            stamp: brought.stamp,
            stale: parts.collect(),
        }))
    }

    /// Makes this range the last one to give memory up, and lets all of it come back.
    pub fn prioritise(&self) {
        if self.0.pager.check_process().is_ok() {
            self.0.pager.lock().books.prioritise(self.0.id);
        }
    }

    /// Evicts what is unpinned; returns the bytes that the device got back.
    ///
    /// # Errors
    /// [`Error::Device`] when the device cannot be waited for, [`Error::Forked`] in a forked child; then nothing was
    /// evicted.
    pub fn evict(&self) -> Result<Bytes, Error> {
        self.0.pager.check_process()?;
        let given = self.0.pager.lock().books.empty(self.0.id).map_err(failed)?;
        Ok(Bytes(given * self.granule().0))
    }

    /// What is in memory of the pages under `offset .. offset + size`.
    ///
    /// # Errors
    /// [`Error::Option`] for bytes outside the range, [`Error::Forked`] in a forked child.
    pub fn residency(&self, offset: Bytes, size: Bytes) -> Result<Residency, Error> {
        self.0.pager.check_process()?;
        let pages = self.pages(offset, size)?;
        Ok(self.0.pager.lock().books.residency(self.0.id, &pages))
    }
}

impl Pinned {
    /// When the latest of its pages came in.
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// What the caller has to fill, in ascending order: all that came in since its stamp.
    #[must_use]
    pub fn stale(&self) -> &[Part] {
        &self.stale
    }

    /// Lets the pages leave when they are needed; the same as dropping it.
    pub fn unpin(self) {}
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let reserved = &self.range.0;
        if reserved.pager.check_process().is_err() {
            return;
        }
        reserved.pager.lock().books.unpin(reserved.id, &self.pages);
    }
}
