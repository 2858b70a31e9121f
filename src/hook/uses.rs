//! Weights of a GPU at the moment of their use: the calls that enqueue work, looked at on their way.
//!
//! ```text
//!   cuLaunchKernel, cuMemcpyDtoDAsync, cuMemcpyDtoHAsync, cublasGemmStridedBatchedEx, …
//!     └─ an address in a watched range among the arguments? ──> its watch makes the bytes be there
//!     └─ then the driver, or cuBLAS
//! ```
//!
//! Unmodified models name no scopes, but every kernel that reads a weight is given its address. So weights can
//! be brought in for exactly the work that uses them, whatever the model. Like the hook for allocations it is
//! one line in the program:
//!
//! ```
//! memory_compiler::page_cuda_weights!();
//! # fn main() {}
//! ```
//!
//! What is seen: the calls above, from whoever makes them as plain external symbols (cudarc with
//! `dynamic-linking`, which Candle uses). Arguments are looked at word by word as the driver describes a
//! kernel's parameters, so that a structure with an address in it is seen too, and a number that looks like an
//! address brings in weights for nothing. What is *not* seen: addresses that lie in the GPU's memory themselves,
//! and libraries that launch through a runtime of their own (cuDNN, flash attention). Weights may not go there.
//!
//! What is known of a kernel's parameters is asked of the driver at each launch ([`parameters`]).
//!
//! **Streams.** A watch is told on which stream the work is going to run, also where the call does not name it, as
//! cuBLAS's: its bytes have to arrive before the work of *that* stream, and may leave behind it.
//!
//! **Locks.** No lock is held while a watch is told: it may watch more, drop ranges, or wait for another thread that
//! does. Between [`UseWatch::used`] and [`UseWatch::enqueued`] the work is handed to the driver, on the same thread.
//!
//! May import: `bookkeeping`, `device`, `error`, `units`.

mod calls;
mod parameters;
#[cfg(test)]
mod tests;

pub use calls::{Gemm, copy_on_device, copy_to_host, gemm, gemm_f64, launch_kernel};

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};

use crate::bookkeeping::Bookkeeping;
use crate::device::StreamId;
use crate::error::Error;
use crate::units::{Address, Bytes};

/// Is told of addresses before work uses them.
pub trait UseWatch: Send + Sync {
    /// This thread is about to enqueue work on `stream` that uses these addresses, all of them in the watched range.
    ///
    /// The stream is the driver's handle as a number; 0, 1 and 2 name what they name on this thread in its current
    /// context. It lives during the call; afterwards its handle may be destroyed, and come back for another stream.
    ///
    /// # Errors
    /// Why the work may not run; the call then fails.
    fn used(&self, addresses: &[Address], stream: StreamId) -> Result<(), Error>;

    /// What this thread was about to enqueue when [`used`](Self::used) returned `Ok` is enqueued, or was refused.
    /// Until then another thread that makes bytes leave is not behind that work.
    fn enqueued(&self) {}
}

struct Watched {
    base: Address,
    size: Bytes,
    watch: Weak<dyn UseWatch>,
}

static WATCHED: RwLock<Vec<Watched>> = RwLock::new(Vec::new());
/// All of them lie in between.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);

/// Has `watch` told of the uses of a range until it is dropped.
pub fn watch_uses(base: Address, size: Bytes, watch: Weak<dyn UseWatch>) {
    let _bookkeeping = Bookkeeping::begin();
    let mut all = WATCHED.write().unwrap_or_else(PoisonError::into_inner);
    all.retain(|other| other.watch.strong_count() > 0);
    all.push(Watched { base, size, watch });
    bound(&all);
}

/// Looks no more for the ranges whose watches are dropped: once there is none, work costs what it costs without
/// watches. For the end of a watch, from its `drop`.
pub fn forget_dropped() {
    let _bookkeeping = Bookkeeping::begin();
    let mut all = WATCHED.write().unwrap_or_else(PoisonError::into_inner);
    all.retain(|other| other.watch.strong_count() > 0);
    bound(&all);
}

/// Says between which addresses all ranges lie. Whoever looks meanwhile may see one bound of before: either is far
/// enough for the ranges that stay.
fn bound(all: &[Watched]) {
    let lowest = all.iter().map(|range| range.base.0).min();
    let highest = all.iter().map(|range| range.base.0 + range.size.0).max();
    LOWEST.store(lowest.unwrap_or(u64::MAX), Ordering::Release);
    HIGHEST.store(highest.unwrap_or(0), Ordering::Release);
}

thread_local! {
    /// Why a call of this thread failed last.
    static FAILED: RefCell<Option<Error>> = const { RefCell::new(None) };
    /// While [`check`] looks: whether a call arrived.
    static PROBE: Cell<Option<bool>> = const { Cell::new(None) };
    /// Whether a watch runs on this thread: what it enqueues is its own.
    static WATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Why the last call of this thread that was refused was refused.
#[must_use]
pub fn take_error() -> Option<Error> {
    FAILED.with_borrow_mut(Option::take)
}

/// Whether `call`, with arguments that do nothing, arrives here.
pub fn probe(call: impl FnOnce()) -> bool {
    PROBE.set(Some(false));
    call();
    PROBE.replace(None) == Some(true)
}

fn is_probe() -> bool {
    let probing = PROBE.get().is_some();
    if probing {
        PROBE.set(Some(true));
    }
    probing
}

/// Whether the driver's calls that cudarc makes in this program arrive here.
///
/// # Errors
/// [`Error::CudaUsesMissing`], whose text is the line to add.
pub fn check() -> Result<(), Error> {
    use cudarc::driver::sys;
    let null = std::ptr::null_mut();
    let is_here = next(c"cuFuncGetParamInfo").is_some()
        && probe(|| {
            let params = std::ptr::null_mut();
            // SAFETY: no function: refused by the driver, nothing is launched.
            let _ = unsafe {
                sys::cuLaunchKernel(
                    null,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    0,
                    std::ptr::null_mut(),
                    params,
                    params,
                )
            };
        })
        && probe(|| {
            // SAFETY: no bytes are copied.
            let _ = unsafe { sys::cuMemcpyDtoDAsync_v2(0, 0, 0, std::ptr::null_mut()) };
        })
        && probe(|| {
            // SAFETY: no bytes are copied.
            let _ = unsafe {
                sys::cuMemcpyDtoHAsync_v2(std::ptr::null_mut(), 0, 0, std::ptr::null_mut())
            };
        });
    if is_here {
        Ok(())
    } else {
        Err(Error::CudaUsesMissing)
    }
}

#[cfg(test)]
use tests::next;

/// The definition of a symbol behind this program's own: the driver's, or cuBLAS's.
#[cfg(not(test))]
fn next(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let mut found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if found.is_null() {
        // SAFETY: the name is a C string; the library is the driver's, which the program uses anyway.
        let library =
            unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !library.is_null() {
            // SAFETY: the library is open and stays so; the name is a C string.
            found = unsafe { libc::dlsym(library, name.as_ptr()) };
        }
    }
    (!found.is_null()).then_some(found)
}

/// A function behind this program's own definition, looked for once.
struct Upstream(OnceLock<usize>, &'static CStr);

impl Upstream {
    const fn new(name: &'static CStr) -> Self {
        Self(OnceLock::new(), name)
    }

    fn get(&self) -> Option<*const c_void> {
        let at = *self.0.get_or_init(|| {
            let _bookkeeping = Bookkeeping::begin();
            next(self.1).map_or(0, |found| found.expose_provenance())
        });
        (at != 0).then(|| std::ptr::with_exposed_provenance(at))
    }
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Upstream").field(&self.1).finish()
    }
}

/// Words that may be addresses of watched ranges.
#[derive(Default)]
struct Words {
    few: [u64; 8],
    count: usize,
    more: Vec<u64>,
}

impl Words {
    fn add(&mut self, word: u64) {
        let is_in =
            word >= LOWEST.load(Ordering::Relaxed) && word < HIGHEST.load(Ordering::Relaxed);
        if !is_in {
            return;
        }
        match self.few.get_mut(self.count) {
            Some(place) => {
                *place = word;
                self.count += 1;
            }
            None => self.more.push(word),
        }
    }

    /// Tells the watches of work on a stream. What is returned lives until the work is handed to the driver.
    ///
    /// # Errors
    /// What the call returns instead: `refused` where a watch refuses.
    fn tell(
        self,
        stream: impl FnOnce() -> Result<*mut c_void, u32>,
        refused: u32,
    ) -> Result<Told, u32> {
        if self.count == 0 || WATCHING.get() {
            return Ok(Told::default());
        }
        let stream = StreamId(stream()?.addr() as u64);
        let words = self.few[..self.count].iter().chain(&self.more);
        tell(words.copied().map(Address), stream).ok_or(refused)
    }
}

/// While it lives, this thread runs a watch.
struct Watching(bool);

impl Watching {
    fn begin() -> Self {
        Self(WATCHING.replace(true))
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        WATCHING.set(self.0);
    }
}

/// Watches that were told of work, and are told that it is enqueued when this is dropped.
#[derive(Default)]
#[must_use]
struct Told(Vec<Arc<dyn UseWatch>>);

impl Drop for Told {
    fn drop(&mut self) {
        if self.0.is_empty() {
            return;
        }
        let _bookkeeping = Bookkeeping::begin();
        let _watching = Watching::begin();
        // The last of a watch's handles may go here: no lock is held.
        self.0.drain(..).for_each(|watch| watch.enqueued());
    }
}

#[cold]
fn tell(words: impl Iterator<Item = Address>, stream: StreamId) -> Option<Told> {
    let _bookkeeping = Bookkeeping::begin();
    let words: Vec<Address> = words.collect();
    let of = |watched: &Watched| {
        let is_in = |word: &&Address| word.0.wrapping_sub(watched.base.0) < watched.size.0;
        let used: Vec<Address> = words.iter().filter(is_in).copied().collect();
        let watch = watched.watch.upgrade().filter(|_| !used.is_empty());
        watch.map(|watch| (watch, used))
    };
    let all = WATCHED.read().unwrap_or_else(PoisonError::into_inner);
    let used: Vec<(Arc<dyn UseWatch>, Vec<Address>)> = all.iter().filter_map(of).collect();
    // A watch is foreign: it may want the list for itself, or wait for who does.
    drop(all);
    let _watching = Watching::begin();
    let mut told = Told::default();
    for (watch, addresses) in used {
        if let Err(error) = watch.used(&addresses, stream) {
            tracing::error!(%error, "work on weights was refused");
            FAILED.with_borrow_mut(|failed| *failed = Some(error));
            return None;
        }
        told.0.push(watch);
    }
    Some(told)
}

fn is_idle() -> bool {
    HIGHEST.load(Ordering::Relaxed) == 0
}
