//! The mark of this process: a number in a page that a forked child finds wiped (`MADV_WIPEONFORK` of madvise(2)),
//! and the handlers that run at a fork. All unsafe code of [`fork`](super::super::fork).
//!
//! ```text
//!   parent   MARK -> | 1 |       fork      child   MARK -> | 0 |      the child's first own thing: | 2 |
//! ```
//!
//! Where the kernel wipes no page (before Linux 4.14, and under some emulators) the handler wipes it, and the process's
//! number is compared for whoever copies a process without handlers.
//!
//! May import: `host/os`, `libc`.

use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use super::os::{Errno, page_size};

/// What lies in the page.
struct Mark {
    /// 0 in a process that has made nothing yet.
    number: AtomicU64,
    /// The process that set the number; 0 where the kernel wipes the page.
    pid: AtomicI32,
}

/// Where there is no memory for a page.
static ORDINARY: Mark = Mark {
    number: AtomicU64::new(0),
    pid: AtomicI32::new(-1),
};

/// Null before the first call of [`this`].
static MARK: AtomicPtr<Mark> = AtomicPtr::new(std::ptr::null_mut());

/// Numbers that this process and those that it was forked from have had; not wiped.
static LAST: AtomicU64 = AtomicU64::new(0);

fn pid() -> i32 {
    // SAFETY: getpid reads a number of this process.
    unsafe { libc::getpid() }
}

/// A page that is all zeroes, and in a child again.
fn page() -> Result<*mut Mark, Errno> {
    let size = page_size().0 as usize;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing uses.
    let place = unsafe { libc::mmap(std::ptr::null_mut(), size, access, flags, -1, 0) };
    if place == libc::MAP_FAILED {
        return Err(super::os::last_errno());
    }
    // SAFETY: the mapping was made just now; the advice changes what a child inherits only.
    if unsafe { libc::madvise(place, size, libc::MADV_WIPEONFORK) } != 0 {
        let failed = super::os::last_errno();
        give_back(place.cast());
        return Err(failed);
    }
    Ok(place.cast())
}

fn give_back(page: *mut Mark) {
    // SAFETY: the page was mapped by `page` and shown to nobody.
    let _ = unsafe { libc::munmap(page.cast(), page_size().0 as usize) };
}

/// Whether there is a mark already.
pub(in super::super) fn is_set() -> bool {
    !MARK.load(Ordering::Acquire).is_null()
}

fn mark() -> &'static Mark {
    let mut mark = MARK.load(Ordering::Acquire);
    if mark.is_null() {
        // No lock: a fork may come here between any two instructions of another thread.
        let new = page().unwrap_or((&raw const ORDINARY).cast_mut());
        let first = std::ptr::null_mut();
        mark = match MARK.compare_exchange(first, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new,
            Err(other) => {
                if !std::ptr::eq(new, &raw const ORDINARY) {
                    give_back(new);
                }
                other
            }
        };
    }
    // SAFETY: a mark that was published is never given back; its fields are atomics, for which a page of zeroes
    // is a value.
    unsafe { &*mark }
}

/// The number of this process, which gets one here if it has none.
pub(in super::super) fn this() -> u64 {
    let mark = mark();
    let now = now();
    if now != 0 {
        return now;
    }
    if mark.pid.load(Ordering::Relaxed) != 0 {
        wipe();
        mark.pid.store(pid(), Ordering::Relaxed);
    }
    let new = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    let set = mark
        .number
        .compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
    set.err().unwrap_or(new)
}

/// The number of this process; 0 where it has none yet.
#[inline]
pub(in super::super) fn now() -> u64 {
    let mark = mark();
    let set_by = mark.pid.load(Ordering::Relaxed);
    if set_by != 0 && set_by != pid() {
        return 0;
    }
    mark.number.load(Ordering::Acquire)
}

/// Takes the number away, in a child.
pub(in super::super) fn wipe() {
    mark().number.store(0, Ordering::Release);
}

/// What pthread_atfork(3) takes.
type Handler = extern "C" fn();

/// Calls `prepare` before each fork(2), and after it one of the others in the process that it names.
pub(in super::super) fn at_fork(prepare: Handler, in_parent: Handler, in_child: Handler) {
    unsafe extern "C" {
        /// As the manual has it; it returns an `errno`.
        fn pthread_atfork(
            prepare: Option<Handler>,
            in_parent: Option<Handler>,
            in_child: Option<Handler>,
        ) -> libc::c_int;
    }
    // SAFETY: the handlers are functions of this program, which do not unwind.
    let status = unsafe { pthread_atfork(Some(prepare), Some(in_parent), Some(in_child)) };
    if status != 0 {
        tracing::warn!(
            status,
            "no memory for handlers of forks: a child must exec at once"
        );
    }
}
