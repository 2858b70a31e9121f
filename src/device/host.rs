//! Memory of this machine as a device, on Linux.
//!
//! ```text
//!   places   | p0 | p2 |    | p0 |     reserved with mmap(PROT_NONE), mapped with MAP_FIXED
//!              |    |         |
//!   pieces   | 0  | 1  | 2  |          one memfd; piece = page = one granule of it
//!              p0   p2   free
//! ```
//!
//! One page under two places is one piece of a file mapped twice with `MAP_SHARED`, so an alias is
//! the same memory, not a copy. The books (who is mapped where) are kept here and checked before
//! the kernel is asked; [`os`] holds the system calls and all unsafe code. [`pieces`] knows which pieces are
//! free, [`mappings`] how many mappings all this is to the kernel.
//!
//! Invariants:
//! - a piece belongs to at most one living page; free pieces hold no memory;
//! - a page counts exactly the places that it stands under;
//! - an address of a range is always mapped to something, so no other `mmap` can take it;
//! - the kernel has a mapping wherever the books have a place, and where a *ghost* is ([`mappings`]);
//! - the lock is held across the system calls but never while calling what could call back: no
//!   upstream, no log. The books are B-trees, whose nodes are a few hundred bytes: an allocator that
//!   serves *large* buffers from this device is not entered from here;
//! - it is held in a [`Section`](super::fork::Section) only, so that a fork waits for it. A child has the places as
//!   its own copies ([`inherit`]), and what would change anything of its parent's is refused there.
//!
//! May import: `device`, `units`.

mod cgroup;
mod inherit;
mod limits;
mod mappings;
pub(super) mod mark;
mod os;
mod pieces;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use self::inherit::Locked;
pub(super) use self::inherit::own_what_was_inherited;
use self::limits::Limits;
pub(crate) use self::limits::allows as heap_allows;
use self::mappings::Hand;
pub(super) use self::mark::at_fork;
use self::os::{Errno, PageFile, Range};
use self::pieces::Pieces;
use super::fork::{Process, Section};
use super::{Call, Device, DeviceError, Fence, Mappings, MemoryInfo, PageId, RowRefused, StreamId};
use crate::units::{Address, Bytes};

/// Memory of this machine: pages that can stand under many addresses at once.
///
/// An address of it is an address of this process. Memory that is mapped but not yet
/// [allowed](Device::allow) has no access rights, so that touching it is a `SIGSEGV` and a forgotten
/// `allow` is found.
///
/// A child made by fork(2) may read and write what is allowed at the fork, and what it writes is its own. It is no
/// snapshot: a page that the child has not written to shows what the parent writes there later. Calls that would
/// change what is reserved, created or mapped are refused ([`Forked`](DeviceError::Forked)), and dropping
/// the device in a child does nothing. A child of a clone(2) that runs no handlers of pthread_atfork(3) shares the
/// memory with its parent: it must not write there.
///
/// A page is backed when it is created, so that want of memory is an error there and not a `SIGBUS`
/// later. The kernel refuses nothing where memory is short: it ends processes. So a page is refused before, as
/// [`OutOfMemory`](DeviceError::OutOfMemory), where the machine (`MemAvailable`), a control group of this process
/// or of those around it (`memory.max`, cgroups(7)), or `ulimit -f` has not so much left; a 32nd of the first two,
/// 4 to 256 MiB, stays for others. Addresses are refused, as [`NoAddresses`](DeviceError::NoAddresses), where
/// `ulimit -v` has not so many left beside a 16th for others, 64 MiB at most.
///
/// The kernel allows a process 65,530 mappings by default (`vm.max_map_count`, proc_sys_vm(5));
/// neighbouring places over neighbouring pages count as one. `create` therefore takes the lowest free
/// piece of the file, or that of a [row](Device::begin_row): pages created in a row and mapped in a row stay
/// one mapping. [`mappings`](Device::mappings) says how many there are, of all `Host`s of the process
/// together, without the up to six that each has for itself and for the alignment of a range. At the
/// limit `map`, and an `allow` that would split a mapping, fail with [`Mappings`](DeviceError::Mappings) and
/// change nothing. `unmap`, `release` and `unreserve` work there too.
///
/// Its streams are idle: work on the CPU is done when the call returns, so fences are checked but
/// nothing waits. [`Streams`](super::adaptor::Streams) simulates busy ones.
///
/// # Panics
/// In debug builds, dropping it panics when something is still reserved or created, unless the thread
/// panics already. Everything goes back to the system either way.
///
/// # Example
/// ```
/// use memory_compiler::device::{Device, Host};
/// use memory_compiler::units::Address;
///
/// let host = Host::new(Host::default_granule())?;
/// let granule = host.granule();
/// let base = host.reserve(memory_compiler::units::Bytes(2 * granule.0))?;
/// let (left, right) = (base, Address(base.0 + granule.0));
///
/// let page = host.create()?;
/// host.map(left, page)?;
/// host.map(right, page)?;
/// host.allow(left, granule)?;
/// host.allow(right, granule)?;
///
/// host.write(left, b"one page")?;
/// let mut seen = [0; 8];
/// host.read(right, &mut seen)?;
/// assert_eq!(&seen, b"one page");
///
/// host.unmap(left, granule)?;
/// host.unmap(right, granule)?;
/// host.release(page)?;
/// host.unreserve(base, memory_compiler::units::Bytes(2 * granule.0))?;
/// # Ok::<(), memory_compiler::device::DeviceError>(())
/// ```
pub struct Host {
    /// A power of two and a multiple of the operating system's page.
    granule: Bytes,
    /// Who made it.
    process: Process,
    file: Arc<PageFile>,
    /// Mappings that the kernel allows, as last read.
    mapping_limit: AtomicU64,
    books: Arc<Mutex<Books>>,
}

/// Who is where.
#[derive(Debug)]
struct Books {
    /// Reserved ranges by their base.
    ranges: BTreeMap<Address, Range>,
    /// Mapped granules.
    places: BTreeMap<Address, Place>,
    /// Living pages.
    pages: BTreeMap<PageId, Page>,
    /// Pieces of the file that belong to no page.
    pieces: Pieces,
    /// The next page's number: every page ever created has a smaller one.
    next_page: u64,
    /// Fences issued and not yet waited for.
    fences: BTreeSet<u64>,
    next_fence: u64,
    /// What the kernel has of all this.
    hand: Hand,
    limits: Limits,
    /// Whether these are a forked child's, and what is mapped its own.
    is_own_copy: bool,
}

/// A granule of a range that the kernel has a piece mapped at.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// `None` for a ghost.
    page: Option<PageId>,
    piece: u64,
    allowed: bool,
}

impl Place {
    /// As it is mapped: without access.
    fn of(page: PageId, piece: u64) -> Self {
        Self {
            page: Some(page),
            piece,
            allowed: false,
        }
    }

    /// Whether it and the granule behind it are one mapping.
    fn is_one_with(self, next: Self) -> bool {
        self.piece + 1 == next.piece && self.allowed == next.allowed
    }
}

/// A piece of the file, and under how many places it stands.
#[derive(Debug)]
struct Page {
    piece: u64,
    place_count: u64,
}

impl Books {
    /// The reserved range that holds all of `at .. at + size`.
    fn range(&self, call: Call, at: Address, size: Bytes) -> Result<&Range, DeviceError> {
        let below = self.ranges.range(..=at).next_back();
        below
            .map(|(_, range)| range)
            .filter(|range| range.contains(at, size))
            .ok_or(invalid(call, "the place is not inside one reserved range"))
    }

    /// How many granules of `at .. at + size` are mapped.
    fn mapped_count(&self, at: Address, size: Bytes) -> u64 {
        let places = self.places.range(at..Address(at.0 + size.0));
        places.filter(|(_, place)| place.page.is_some()).count() as u64
    }
}

fn invalid(call: Call, reason: &'static str) -> DeviceError {
    DeviceError::Invalid { call, reason }
}

/// For `map_err`: the system call under `call` failed.
fn driver(call: Call) -> impl Fn(Errno) -> DeviceError {
    move |code| DeviceError::System { call, code }
}

impl Host {
    /// A device with pages of `granule` bytes and as much memory as the machine has.
    ///
    /// # Errors
    /// [`Invalid`](DeviceError::Invalid) unless `granule` is a power of two and a multiple of the
    /// operating system's page; [`System`](DeviceError::System) when `memfd_create` or `mmap` fails.
    pub fn new(granule: Bytes) -> Result<Self, DeviceError> {
        if !granule.0.is_power_of_two() || granule < os::page_size() {
            let reason = "the granule is a power of two and a multiple of the system's page";
            return Err(invalid(Call::Create, reason));
        }
        let process = Process::this();
        let file = PageFile::new().map_err(driver(Call::Create))?;
        let mut books = Books {
            ranges: BTreeMap::new(),
            places: BTreeMap::new(),
            pages: BTreeMap::new(),
            pieces: Pieces::default(),
            next_page: 0,
            fences: BTreeSet::new(),
            next_fence: 0,
            hand: Hand::default(),
            limits: Limits::new(),
            is_own_copy: false,
        };
        books.hand.fill();
        let (file, books) = (Arc::new(file), Arc::new(Mutex::new(books)));
        inherit::enter(granule, &file, &books);
        Ok(Self {
            granule,
            process,
            file,
            mapping_limit: AtomicU64::new(mappings::kernel_limit()),
            books,
        })
    }

    /// The smallest page that this machine can map.
    #[must_use]
    pub fn smallest_granule() -> Bytes {
        os::page_size()
    }

    /// 2 MiB, a GPU's granule and a huge page of most CPUs; more where the system's page is larger.
    #[must_use]
    pub fn default_granule() -> Bytes {
        Bytes::mib(2).max(os::page_size())
    }

    /// Memory that the kernel keeps for this device's pages.
    ///
    /// # Errors
    /// [`System`](DeviceError::System) when `fstat` fails.
    pub fn resident(&self) -> Result<Bytes, DeviceError> {
        self.file.resident().map_err(driver(Call::Memory))
    }

    fn books(&self) -> Locked<'_> {
        Locked::new(&self.books)
    }

    /// The books, for a change of what is reserved, created or mapped: in a forked child that is the parent's.
    fn books_to_change(&self, call: Call) -> Result<Locked<'_>, DeviceError> {
        self.check_process(call)?;
        Ok(self.books())
    }

    fn check_process(&self, call: Call) -> Result<(), DeviceError> {
        if self.process.is_ancestor() {
            return Err(DeviceError::Forked { call });
        }
        Ok(())
    }

    /// The books, after checking that bytes of `at .. at + size` may be written and are this process's to write.
    fn writable(&self, call: Call, at: Address, size: Bytes) -> Result<Locked<'_>, DeviceError> {
        let books = self.accessible(call, at, size)?;
        if !books.is_own_copy {
            self.check_process(call)?;
        }
        Ok(books)
    }

    /// Checks that `at .. at + size` is a non-empty row of granules.
    fn check_granules(&self, call: Call, at: Address, size: Bytes) -> Result<(), DeviceError> {
        if !at.0.is_multiple_of(self.granule.0) || !size.0.is_multiple_of(self.granule.0) {
            return Err(invalid(call, "place and size are multiples of the granule"));
        }
        if size == Bytes::ZERO {
            return Err(invalid(call, "the size is not zero"));
        }
        at.checked_add(size)
            .map(|_| ())
            .ok_or(invalid(call, "the end is an address"))
    }

    /// The books, after checking that every byte of `at .. at + size` may be accessed. The memory
    /// stays accessible, and no other call of this device touches it, while the guard lives.
    fn accessible(&self, call: Call, at: Address, size: Bytes) -> Result<Locked<'_>, DeviceError> {
        let books = self.books();
        if size == Bytes::ZERO {
            return Ok(books);
        }
        let end = at
            .checked_add(size)
            .ok_or(invalid(call, "the end is an address"))?;
        let first = Address(at.0 - at.0 % self.granule.0);
        let granule_count = (end.0 - first.0).div_ceil(self.granule.0);
        let allowed = books
            .places
            .range(first..end)
            .filter(|(_, place)| place.allowed && place.page.is_some());
        if allowed.count() as u64 != granule_count {
            return Err(invalid(
                call,
                "memory is accessed only where it is mapped and allowed",
            ));
        }
        Ok(books)
    }

    /// The kernel refused to map, or to change the access of, what lies in a range: it has memory for
    /// that, so that what it lacks is mappings.
    fn unmapped(&self, call: Call, code: Errno) -> DeviceError {
        match (code, self.mappings()) {
            (libc::ENOMEM, Some(mappings)) => DeviceError::Mappings { call, mappings },
            _ => DeviceError::System { call, code },
        }
    }

    fn offset(&self, piece: u64) -> Bytes {
        Bytes(piece * self.granule.0)
    }

    /// Bytes of pages that the file can still have (`ulimit -f`), and that it can have at most.
    fn file_room(&self, books: &Books) -> MemoryInfo {
        let total = os::file_limit();
        let free = total.saturating_sub(self.offset(books.pieces.end()));
        let pieces = self.offset(books.pieces.free_count());
        MemoryInfo {
            free: free.checked_add(pieces).unwrap_or(free),
            total,
        }
    }

    /// Whether `size` bytes of pages can be created: nothing that ends the process, or the machine, is tried.
    fn check_free(&self, books: &mut Books, size: Bytes) -> Result<(), DeviceError> {
        let is_in_file = size <= self.offset(books.pieces.free_count());
        let of_file = if is_in_file {
            None
        } else {
            Some(self.file_room(books))
        };
        let tighter = |info: MemoryInfo| match of_file {
            Some(file) => MemoryInfo {
                free: info.free.min(file.free),
                total: info.total.min(file.total),
            },
            None => info,
        };
        let checked = books.limits.check(size);
        let refused = match (checked, of_file) {
            (Err(info), _) => tighter(info),
            (Ok(()), Some(file)) if size > file.free => {
                tighter(books.limits.look().unwrap_or(file))
            }
            (Ok(()), _) => return Ok(()),
        };
        Err(DeviceError::OutOfMemory { info: refused })
    }
}

// SAFETY: a range is one that the kernel has just reserved for this process, and stays reserved until
// `unreserve`, which is refused while anything is mapped in it; a page is a piece of a file that no other
// living page has; a place is readable and writable from `allow` to `unmap`, which are the only calls that
// change its access. The books check each before the kernel is asked.
unsafe impl Device for Host {
    fn granule(&self) -> Bytes {
        self.granule
    }

    fn is_host_memory(&self) -> bool {
        true
    }

    /// All of them have the memory of the machine.
    fn memory_source(&self) -> u64 {
        static MACHINE: u8 = 0;
        std::ptr::from_ref(&MACHINE).addr() as u64
    }

    fn reserve(&self, size: Bytes) -> Result<Address, DeviceError> {
        self.check_process(Call::Reserve)?;
        self.check_granules(Call::Reserve, Address(0), size)?;
        limits::check_addresses(size)?;
        let range = Range::new(size, self.granule).map_err(driver(Call::Reserve))?;
        let base = range.base();
        let mut books = self.books();
        books.ranges.insert(base, range);
        books.count_range();
        Ok(base)
    }

    fn unreserve(&self, base: Address, size: Bytes) -> Result<(), DeviceError> {
        let mut books = self.books_to_change(Call::Unreserve)?;
        let range = books.ranges.get(&base).filter(|range| range.size() == size);
        range.ok_or(invalid(Call::Unreserve, "no such range is reserved"))?;
        if books.mapped_count(base, size) > 0 {
            return Err(invalid(
                Call::Unreserve,
                "a range goes after all of its mappings",
            ));
        }
        let Books { ranges, hand, .. } = &mut *books;
        let range = &ranges[&base];
        // All at once: of what is in the middle nothing is split.
        hand.lend(|| range.give_back())
            .map_err(driver(Call::Unreserve))?;
        books.uncount_range(base, size, self.granule);
        books.ranges.remove(&base);
        Ok(())
    }

    fn create(&self) -> Result<PageId, DeviceError> {
        let mut books = self.books_to_change(Call::Create)?;
        self.check_free(&mut books, self.granule)?;
        let mut piece = books.pieces.next();
        // A row may lie behind what `ulimit -f` lets the file have, where growing it would end the process.
        if books.pieces.is_in_row() && self.offset(piece + 1) > os::file_limit() {
            books.pieces.end_row();
            piece = books.pieces.next();
        }
        match self.file.back(self.offset(piece), self.granule) {
            Ok(()) => {}
            Err(libc::ENOSPC | libc::ENOMEM) => {
                drop(books);
                return Err(DeviceError::OutOfMemory {
                    info: self.memory()?,
                });
            }
            Err(code) => {
                return Err(DeviceError::System {
                    call: Call::Create,
                    code,
                });
            }
        }
        books.pieces.take(piece);
        books.limits.take(self.granule);
        let page = PageId(books.next_page);
        books.next_page += 1;
        books.pages.insert(
            page,
            Page {
                piece,
                place_count: 0,
            },
        );
        Ok(page)
    }

    fn release(&self, page: PageId) -> Result<(), DeviceError> {
        let mut books = self.books_to_change(Call::Release)?;
        let Page { piece, place_count } = *books
            .pages
            .get(&page)
            .ok_or(invalid(Call::Release, "no such page lives"))?;
        if place_count > 0 {
            return Err(invalid(Call::Release, "a page goes after its last mapping"));
        }
        self.file
            .punch(self.offset(piece), self.granule)
            .map_err(driver(Call::Release))?;
        books.pages.remove(&page);
        books.give_piece(piece);
        books.limits.give(self.granule);
        Ok(())
    }

    fn map(&self, at: Address, page: PageId) -> Result<(), DeviceError> {
        self.map_row(at, &[page]).map_err(|refused| refused.source)
    }

    /// One call of the kernel for pages that are neighbours.
    fn map_row(&self, at: Address, pages: &[PageId]) -> Result<(), RowRefused> {
        if pages.is_empty() {
            return Ok(());
        }
        let mut mapped = 0;
        let refused = |mapped, source| RowRefused { mapped, source };
        let size = Bytes(self.granule.0.saturating_mul(pages.len() as u64));
        self.check_granules(Call::Map, at, size)
            .map_err(|source| refused(0, source))?;
        let mut books = self
            .books_to_change(Call::Map)
            .map_err(|source| refused(0, source))?;
        while let rest @ [_, ..] = &pages[mapped..] {
            let at = Address(at.0 + self.offset(mapped as u64).0);
            let row = books.neighbours(at, rest, self.granule);
            let (piece, count) = row.map_err(|source| refused(mapped, source))?;
            let size = self.offset(count);
            let range = books.range(Call::Map, at, size);
            let range = range.map_err(|source| refused(mapped, source))?;
            range
                .map(at, size, &self.file, self.offset(piece))
                .map_err(|code| refused(mapped, self.unmapped(Call::Map, code)))?;
            let row = &rest[..count as usize];
            books.counted(at, size, self.granule, |books| {
                for ((index, &page), piece) in (0..).zip(row).zip(piece..) {
                    let at = Address(at.0 + self.offset(index).0);
                    // Mapped over, if it was a ghost.
                    books.take_out(at);
                    books.places.insert(at, Place::of(page, piece));
                }
            });
            for page in row {
                books.pages.get_mut(page).expect("found above").place_count += 1;
            }
            mapped += count as usize;
        }
        Ok(())
    }

    fn allow(&self, at: Address, size: Bytes) -> Result<(), DeviceError> {
        self.check_granules(Call::Allow, at, size)?;
        let mut books = self.books_to_change(Call::Allow)?;
        let range = books.range(Call::Allow, at, size)?;
        if books.mapped_count(at, size) != size.0 / self.granule.0 {
            return Err(invalid(Call::Allow, "every granule is mapped"));
        }
        let end = Address(at.0 + size.0);
        if let Err(code) = range.allow(at, size) {
            // mprotect(2) may stop half-way. If taking the rights back fails as well, the books still
            // say that the place is not allowed, and only a stray access goes unnoticed.
            for (&place, _) in books
                .places
                .range(at..end)
                .filter(|(_, place)| !place.allowed)
            {
                let _ = range.forbid(place, self.granule);
            }
            return Err(self.unmapped(Call::Allow, code));
        }
        books.counted(at, size, self.granule, |books| {
            let places = books.places.range_mut(at..end);
            places.for_each(|(_, place)| place.allowed = true);
        });
        Ok(())
    }

    fn unmap(&self, at: Address, size: Bytes) -> Result<(), DeviceError> {
        self.check_granules(Call::Unmap, at, size)?;
        let mut books = self.books_to_change(Call::Unmap)?;
        books.range(Call::Unmap, at, size)?;
        if books.mapped_count(at, size) != size.0 / self.granule.0 {
            return Err(invalid(Call::Unmap, "every granule is mapped"));
        }
        books
            .clear(at, size, self.granule)
            .map_err(driver(Call::Unmap))
    }

    fn begin_row(&self, count: u64) {
        self.books().pieces.begin_row(count);
    }

    /// Of all ranges of all `Host`s of this process.
    fn mappings(&self) -> Option<Mappings> {
        let count = mappings::in_process();
        let mut limit = self.mapping_limit.load(Ordering::Relaxed);
        if count >= limit / 2 {
            // Somebody may have followed the advice.
            limit = mappings::kernel_limit();
            self.mapping_limit.store(limit, Ordering::Relaxed);
        }
        Some(Mappings { count, limit })
    }

    /// Work on the CPU is done when its call returns.
    fn synchronise(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn fence(&self, _stream: StreamId) -> Result<Fence, DeviceError> {
        let mut books = self.books();
        let fence = books.next_fence;
        books.next_fence += 1;
        books.fences.insert(fence);
        Ok(Fence(fence))
    }

    fn wait(&self, _stream: StreamId, fence: Fence) -> Result<(), DeviceError> {
        if self.books().fences.remove(&fence.0) {
            Ok(())
        } else {
            Err(invalid(
                Call::Wait,
                "the fence was issued and not yet waited for",
            ))
        }
    }

    /// By the tightest of the limits that a page is checked against. Without swap, the page cache that the kernel
    /// would drop is free; without `/proc`, by sysinfo(2), it is not.
    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        let mut books = self.books();
        let info = books.limits.look().map_err(driver(Call::Memory))?;
        let of_file = self.file_room(&books);
        Ok(MemoryInfo {
            free: info.free.min(of_file.free),
            total: info.total.min(of_file.total),
        })
    }

    fn check_room(&self, size: Bytes) -> Result<(), DeviceError> {
        self.check_free(&mut self.books(), size)
    }

    fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        let _books = self.writable(Call::Write, at, Bytes(bytes.len() as u64))?;
        // SAFETY: the place is mapped and allowed, and the guard keeps other calls out. Whoever reads
        // it through a pointer at the same time answers for that race.
        unsafe { os::copy_in(at, bytes) }
        Ok(())
    }

    fn read(&self, at: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let _books = self.accessible(Call::Read, at, Bytes(bytes.len() as u64))?;
        // SAFETY: the place is mapped and allowed, and the guard keeps other calls out. Whoever writes
        // to it through a pointer at the same time answers for that race.
        unsafe { os::copy_out(at, bytes) }
        Ok(())
    }

    fn fill(&self, at: Address, size: Bytes, value: u8) -> Result<(), DeviceError> {
        let _books = self.writable(Call::Fill, at, size)?;
        // SAFETY: the place is mapped and allowed, and the guard keeps other calls out. Whoever reads
        // it through a pointer at the same time answers for that race.
        unsafe { os::fill(at, size, value) }
        Ok(())
    }
}

impl fmt::Debug for Host {
    /// Counts only: a busy device has thousands of places.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Host");
        shown.field("granule", &self.granule);
        let _section = Section::begin();
        if let Ok(books) = self.books.try_lock() {
            shown
                .field("range_count", &books.ranges.len())
                .field("page_count", &books.pages.len())
                .field("place_count", &books.places.len())
                .field("mapping_count", &books.hand.count());
        }
        shown.finish_non_exhaustive()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        inherit::leave(&self.books);
        if self.process.is_ancestor() {
            return;
        }
        let mut books = self.books();
        let Books { ranges, hand, .. } = &mut *books;
        for range in ranges.values() {
            // Fails only at the kernel's limit of mappings; the addresses then stay reserved.
            let _ = hand.lend(|| range.give_back());
        }
        debug_assert!(
            std::thread::panicking() || (books.ranges.is_empty() && books.pages.is_empty()),
            "{} ranges and {} pages were given back before their device was dropped",
            books.ranges.len(),
            books.pages.len(),
        );
    }
}
