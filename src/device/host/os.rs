//! The system calls under [`Host`](super::Host), and every unsafe block of it.
//!
//! ```text
//!   PageFile   | piece 0 | piece 1 | piece 2 |     memfd: the physical pages
//!                   |  \_________
//!   Range      | ---- | rw-s | rw-s | ---- |       mmap: piece 0 twice, the rest without access
//! ```
//!
//! A [`Range`] only ever changes addresses that it reserved itself, so its methods are safe: whoever
//! turns such an address into a reference answers for the memory behind it. Errors are `errno`s.
//!
//! May import: `units`, `host/cgroup` for reading small files, `libc`.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::cgroup::read;
use crate::units::{Address, Bytes};

/// A value of `errno`.
pub(super) type Errno = i32;

/// The value that the last failed system call of this thread left.
pub(super) fn last_errno() -> Errno {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// `0` is success and everything else is in `errno`, as most of section 2 of the manual has it.
fn checked(status: libc::c_int) -> Result<(), Errno> {
    if status == 0 {
        Ok(())
    } else {
        Err(last_errno())
    }
}

/// A place as the pointer that `mmap` gave for it.
fn pointer(at: Address) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(at.0 as usize)
}

/// The smallest page of the operating system.
pub(super) fn page_size() -> Bytes {
    // SAFETY: sysconf reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Bytes(u64::try_from(size).expect("sysconf(3) knows the page size"))
}

/// Free and total memory by sysinfo(2). Free excludes the page cache that the kernel could drop.
pub(super) fn free_and_total() -> Result<(Bytes, Bytes), Errno> {
    // SAFETY: sysinfo is a struct of integers, for which zeroes are a value.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `sysinfo` to the address of one.
    checked(unsafe { libc::sysinfo(&raw mut info) })?;
    #[allow(
        clippy::unnecessary_cast,
        reason = "c_ulong has 32 bits on some targets"
    )]
    let bytes = |units: libc::c_ulong| Bytes(units as u64 * u64::from(info.mem_unit));
    Ok((bytes(info.freeram), bytes(info.totalram)))
}

/// How long a file may become (`ulimit -f`): growing it further ends the process by a signal. `u64::MAX` for any length.
pub(super) fn file_limit() -> Bytes {
    limit(libc::RLIMIT_FSIZE)
}

/// How many addresses the process may have (`ulimit -v`); `u64::MAX` for any number.
pub(super) fn address_limit() -> Bytes {
    limit(libc::RLIMIT_AS)
}

/// The soft limit of getrlimit(2).
fn limit(resource: libc::__rlimit_resource_t) -> Bytes {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the kernel writes one `rlimit` to the address of one. If it does not, there is no limit.
    let _ = unsafe { libc::getrlimit(resource, &raw mut limit) };
    match limit.rlim_cur {
        libc::RLIM_INFINITY => Bytes(u64::MAX),
        #[allow(
            clippy::useless_conversion,
            reason = "rlim_t has 32 bits on some targets"
        )]
        current => Bytes(current.into()),
    }
}

/// How many addresses the process has (the first number of `/proc/self/statm`); none where nobody says.
pub(super) fn addresses_in_use() -> Bytes {
    let mut text = [0; 128];
    let text = read(Path::new("/proc/self/statm"), &mut text).unwrap_or_default();
    let count = text.split(|&byte| byte == b' ').next().unwrap_or_default();
    let count = std::str::from_utf8(count)
        .ok()
        .and_then(|count| count.parse::<u64>().ok());
    Bytes(count.unwrap_or(0).saturating_mul(page_size().0))
}

/// An unnamed file in memory, whose pages are the physical pages of the device.
#[derive(Debug)]
pub(super) struct PageFile(File);

impl PageFile {
    /// An empty file (memfd_create(2)). It goes away with its descriptor and its last mapping.
    pub(super) fn new() -> Result<Self, Errno> {
        // SAFETY: the name is a C string that outlives the call.
        let descriptor =
            unsafe { libc::memfd_create(c"memory-compiler".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(last_errno());
        }
        // SAFETY: the descriptor is open, and new, so nobody else owns it.
        Ok(Self(unsafe { File::from_raw_fd(descriptor) }))
    }

    /// Backs `size` bytes at `offset` with memory, growing the file where it is shorter. After that
    /// a touch of a mapping cannot fail for want of memory, which would be a SIGBUS.
    pub(super) fn back(&self, offset: Bytes, size: Bytes) -> Result<(), Errno> {
        self.fallocate(0, offset, size)
    }

    /// Gives the memory of `size` bytes at `offset` to the system; the file keeps its length.
    pub(super) fn punch(&self, offset: Bytes, size: Bytes) -> Result<(), Errno> {
        self.fallocate(
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            offset,
            size,
        )
    }

    /// fallocate(2), again when a signal interrupted it.
    fn fallocate(&self, mode: libc::c_int, offset: Bytes, size: Bytes) -> Result<(), Errno> {
        let offset = libc::off_t::try_from(offset.0).map_err(|_| libc::EFBIG)?;
        let size = libc::off_t::try_from(size.0).map_err(|_| libc::EFBIG)?;
        loop {
            // SAFETY: the descriptor is open as long as `self` lives; no memory is passed.
            match checked(unsafe { libc::fallocate(self.0.as_raw_fd(), mode, offset, size) }) {
                Err(libc::EINTR) => {}
                done => return done,
            }
        }
    }

    /// Memory that the file holds (`st_blocks` of stat(3type), in units of 512 bytes).
    pub(super) fn resident(&self) -> Result<Bytes, Errno> {
        let metadata = self
            .0
            .metadata()
            .map_err(|error| error.raw_os_error().unwrap_or(0))?;
        Ok(Bytes(metadata.blocks() * 512))
    }
}

/// A reserved range of addresses: a mapping without access, so that no other `mmap` takes its place.
///
/// It is a record and has no `Drop`: its owner calls [`give_back`](Range::give_back).
#[derive(Debug)]
pub(super) struct Range {
    base: Address,
    size: Bytes,
    /// What `mmap` gave: up to a granule more than `size`, for the alignment of `base`.
    outer_base: Address,
    outer_size: usize,
}

impl Range {
    /// Reserves `size` bytes aligned to `granule`; both are multiples of the page size.
    pub(super) fn new(size: Bytes, granule: Bytes) -> Result<Self, Errno> {
        let slack = granule.saturating_sub(page_size());
        let outer_size = size.checked_add(slack).ok_or(libc::ENOMEM)?;
        let outer_size = usize::try_from(outer_size.0).map_err(|_| libc::ENOMEM)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing uses.
        let outer = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                outer_size,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            )
        };
        if outer == libc::MAP_FAILED {
            return Err(last_errno());
        }
        let outer_base = Address(outer.expose_provenance() as u64);
        let base = Address(outer_base.0.next_multiple_of(granule.0));
        Ok(Self {
            base,
            size,
            outer_base,
            outer_size,
        })
    }

    /// How many bytes were asked for.
    pub(super) fn size(&self) -> Bytes {
        self.size
    }

    /// Where the range starts.
    pub(super) fn base(&self) -> Address {
        self.base
    }

    /// Whether `at .. at + size` lies inside.
    pub(super) fn contains(&self, at: Address, size: Bytes) -> bool {
        let end = at
            .checked_offset_from(self.base)
            .and_then(|offset| offset.checked_add(size));
        end.is_some_and(|end| end <= self.size)
    }

    /// Puts `size` bytes of `file` at `at`, without access.
    ///
    /// # Panics
    /// When the place is not inside this range, as all methods here do.
    pub(super) fn map(
        &self,
        at: Address,
        size: Bytes,
        file: &PageFile,
        offset: Bytes,
    ) -> Result<(), Errno> {
        assert!(self.contains(at, size), "{at} is inside {self:?}");
        let offset = libc::off_t::try_from(offset.0).map_err(|_| libc::EOVERFLOW)?;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let descriptor = file.0.as_raw_fd();
        // SAFETY: MAP_FIXED replaces addresses of this range only (asserted).
        let place = unsafe {
            libc::mmap(
                pointer(at),
                size.0 as usize,
                libc::PROT_NONE,
                flags,
                descriptor,
                offset,
            )
        };
        let done = if place == libc::MAP_FAILED {
            Err(last_errno())
        } else {
            Ok(())
        };
        if done.is_err() {
            // A failed MAP_FIXED may leave a hole (mmap(2), on overlapping ranges): close it. If
            // that fails too, the address stays unused until the range is given back.
            let _ = self.clear(at, size);
        }
        done
    }

    /// Takes what is mapped at `at .. at + size` away; the addresses stay reserved.
    pub(super) fn clear(&self, at: Address, size: Bytes) -> Result<(), Errno> {
        assert!(self.contains(at, size), "{at} is inside {self:?}");
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: MAP_FIXED replaces addresses of this range only (asserted).
        let place =
            unsafe { libc::mmap(pointer(at), size.0 as usize, libc::PROT_NONE, flags, -1, 0) };
        if place == libc::MAP_FAILED {
            Err(last_errno())
        } else {
            Ok(())
        }
    }

    /// Lets the process read and write `at .. at + size`, which is mapped.
    pub(super) fn allow(&self, at: Address, size: Bytes) -> Result<(), Errno> {
        self.protect(at, size, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Lets nobody access `at .. at + size`.
    pub(super) fn forbid(&self, at: Address, size: Bytes) -> Result<(), Errno> {
        self.protect(at, size, libc::PROT_NONE)
    }

    /// mprotect(2).
    fn protect(&self, at: Address, size: Bytes, access: libc::c_int) -> Result<(), Errno> {
        assert!(self.contains(at, size), "{at} is inside {self:?}");
        // SAFETY: the addresses belong to this range (asserted), so no memory of Rust's changes.
        checked(unsafe { libc::mprotect(pointer(at), size.0 as usize, access) })
    }

    /// Gives the addresses to the system, with all that is mapped there. On success the range is
    /// used no more.
    pub(super) fn give_back(&self) -> Result<(), Errno> {
        // SAFETY: these are the addresses that `mmap` gave to this range, and nobody else's.
        checked(unsafe { libc::munmap(pointer(self.outer_base), self.outer_size) })
    }
}

/// A mapping that is there to be given up.
///
/// Where a process has all the mappings that the kernel allows, `mmap` fails even when it would leave
/// fewer of them, as taking a place away does. Giving this one up first makes it pass.
#[derive(Debug)]
pub(super) struct Spare(Address);

impl Spare {
    /// One page of shared anonymous memory, never touched: it merges with no other mapping.
    pub(super) fn new() -> Result<Self, Errno> {
        let size = page_size().0 as usize;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing uses.
        let place =
            unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_NONE, flags, -1, 0) };
        if place == libc::MAP_FAILED {
            return Err(last_errno());
        }
        Ok(Self(Address(place.expose_provenance() as u64)))
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        // SAFETY: the page was mapped by `new`, for this value alone. A whole mapping cannot fail to go.
        let _ = unsafe { libc::munmap(pointer(self.0), page_size().0 as usize) };
    }
}

/// Maps `size` bytes of `file` anew at `at` so that they are read as they are and written to by this process alone;
/// where that fails, so that they are only read.
///
/// # Safety
/// - `at .. at + size` is one or more whole places that a [`Range`] of this process, or of the one that it was forked
///   from, has mapped there from these bytes of `file`, readable and writable;
/// - no other thread runs.
pub(super) unsafe fn make_private(
    file: &PageFile,
    at: Address,
    size: Bytes,
    offset: Bytes,
) -> Result<(), Errno> {
    let offset = libc::off_t::try_from(offset.0).map_err(|_| libc::EOVERFLOW)?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let (place, size) = (pointer(at), size.0 as usize);
    // SAFETY: MAP_FIXED replaces what the caller says is there, by the same bytes.
    let new = unsafe { libc::mmap(place, size, access, flags, file.0.as_raw_fd(), offset) };
    if new != libc::MAP_FAILED {
        return Ok(());
    }
    // SAFETY: the caller says that these are places; a write then faults, which is what is wanted.
    checked(unsafe { libc::mprotect(place, size, libc::PROT_READ) })
}

/// Copies `bytes` to `at`.
///
/// # Safety
/// - `at .. at + bytes.len()` is mapped and allowed, and stays so during the call;
/// - nobody else accesses it during the call. `bytes` itself may lie there.
pub(super) unsafe fn copy_in(at: Address, bytes: &[u8]) {
    // SAFETY: the source is a slice; the target is the caller's promise; `copy` lets them overlap.
    unsafe { std::ptr::copy(bytes.as_ptr(), pointer(at).cast(), bytes.len()) }
}

/// Copies what is at `at` into `bytes`.
///
/// # Safety
/// - `at .. at + bytes.len()` is mapped and allowed, and stays so during the call;
/// - nobody else writes to it during the call. `bytes` itself may lie there.
pub(super) unsafe fn copy_out(at: Address, bytes: &mut [u8]) {
    // SAFETY: the target is a slice; the source is the caller's promise; `copy` lets them overlap.
    unsafe { std::ptr::copy(pointer(at).cast(), bytes.as_mut_ptr(), bytes.len()) }
}

/// Sets `size` bytes at `at` to `value`.
///
/// # Safety
/// - `at .. at + size` is mapped and allowed, and stays so during the call;
/// - nobody else accesses it during the call.
pub(super) unsafe fn fill(at: Address, size: Bytes, value: u8) {
    // SAFETY: the target is the caller's promise, and bytes need no alignment.
    unsafe { std::ptr::write_bytes(pointer(at).cast::<u8>(), value, size.0 as usize) }
}
