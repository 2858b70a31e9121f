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
//! A function's handle is taken to mean the same function while any range is watched.
//!
//! May import: `bookkeeping`, `error`, `units`.

mod calls;

pub use calls::{Gemm, copy_on_device, copy_to_host, gemm, gemm_f64, launch_kernel};

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock, Weak};

use crate::bookkeeping::Bookkeeping;
use crate::error::Error;
use crate::units::{Address, Bytes};

/// Is told of addresses before work uses them.
pub trait UseWatch: Send + Sync {
    /// This thread is about to enqueue work that uses these addresses, all of them in the watched range.
    ///
    /// # Errors
    /// Why the work may not run; the call then fails.
    fn used(&self, addresses: &[Address]) -> Result<(), Error>;
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
/// Grows when a range is added: what is known of functions may be out of date then.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Has `watch` told of the uses of a range until it is dropped.
pub fn watch_uses(base: Address, size: Bytes, watch: Weak<dyn UseWatch>) {
    let _bookkeeping = Bookkeeping::begin();
    let mut all = WATCHED.write().unwrap_or_else(PoisonError::into_inner);
    all.retain(|other| other.watch.strong_count() > 0);
    all.push(Watched { base, size, watch });
    GENERATION.fetch_add(1, Ordering::Release);
    LOWEST.fetch_min(base.0, Ordering::Release);
    HIGHEST.fetch_max(base.0 + size.0, Ordering::Release);
}

/// What is known of kernels.
#[derive(Default)]
struct Kernels {
    generation: u64,
    /// Bytes of each parameter, by the kernel's handle.
    sizes: HashMap<usize, Box<[usize]>>,
}

thread_local! {
    static KERNELS: RefCell<Kernels> = RefCell::default();
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

/// The definition of a symbol behind this program's own: the driver's, or cuBLAS's.
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

    /// Tells the watches; whether the work may run.
    fn tell(self) -> bool {
        if self.count == 0 || WATCHING.get() {
            return true;
        }
        let words = self.few[..self.count].iter().chain(&self.more);
        tell(words.copied().map(Address))
    }
}

#[cold]
fn tell(words: impl Iterator<Item = Address>) -> bool {
    let _bookkeeping = Bookkeeping::begin();
    let words: Vec<Address> = words.collect();
    let all = WATCHED.read().unwrap_or_else(PoisonError::into_inner);
    let mut told = Ok(());
    WATCHING.set(true);
    for watched in all.iter() {
        let is_in = |word: &&Address| word.0.wrapping_sub(watched.base.0) < watched.size.0;
        let used: Vec<Address> = words.iter().filter(is_in).copied().collect();
        if let (false, Some(watch)) = (used.is_empty(), watched.watch.upgrade()) {
            told = told.and_then(|()| watch.used(&used));
        }
    }
    WATCHING.set(false);
    drop(all);
    let Err(error) = told else {
        return true;
    };
    tracing::error!(%error, "work on weights was refused");
    FAILED.with_borrow_mut(|failed| *failed = Some(error));
    false
}

fn is_idle() -> bool {
    HIGHEST.load(Ordering::Relaxed) == 0
}

type ParamInfo = unsafe extern "C" fn(*mut c_void, usize, *mut usize, *mut usize) -> u32;

/// How many bytes each parameter of a kernel has.
fn sizes_of(function: *mut c_void) -> Box<[usize]> {
    static INFO: Upstream = Upstream::new(c"cuFuncGetParamInfo");
    let Some(info) = INFO.get() else {
        return Box::default();
    };
    // SAFETY: it is the function of this signature in cuda.h (12.4 and later).
    let info = unsafe { std::mem::transmute::<*const c_void, ParamInfo>(info) };
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is the one that is about to be launched; the others are writable. An index
        // past the last parameter is refused.
        let code = unsafe { info(function, sizes.len(), &raw mut offset, &raw mut size) };
        if code != 0 {
            return sizes.into();
        }
        sizes.push(size);
    }
}

/// Adds the words of a kernel's parameters.
///
/// # Safety
/// As of the launch: `params`, if not null, has an address of each parameter of `function`.
unsafe fn add_parameters(words: &mut Words, function: *mut c_void, params: *mut *mut c_void) {
    KERNELS.with_borrow_mut(|kernels| {
        let _bookkeeping = Bookkeeping::begin();
        let now = GENERATION.load(Ordering::Acquire);
        if kernels.generation != now {
            kernels.sizes.clear();
            kernels.generation = now;
        }
        let sizes = kernels
            .sizes
            .entry(function.addr())
            .or_insert_with(|| sizes_of(function));
        for (index, &size) in sizes.iter().enumerate() {
            // SAFETY: the driver knows that many parameters, and the caller gives each.
            let param = unsafe { params.add(index).read() };
            for word in 0..size / 8 {
                // SAFETY: the parameter has `size` bytes; alignment is not asked for.
                words.add(unsafe { param.cast::<u64>().add(word).read_unaligned() });
            }
        }
    });
}

/// Adds the words of parameters that are passed as one buffer.
///
/// # Safety
/// As of the launch: `extra` is null or a list of names and values that ends with null.
unsafe fn add_extra(words: &mut Words, mut extra: *mut *mut c_void) {
    const POINTER: usize = 1;
    const SIZE: usize = 2;
    let (mut buffer, mut size) = (std::ptr::null_mut::<c_void>(), 0);
    while !extra.is_null() {
        // SAFETY: the list has not ended.
        let name = unsafe { extra.read() }.addr();
        if name != POINTER && name != SIZE {
            break;
        }
        // SAFETY: each name has a value.
        let value = unsafe { extra.add(1).read() };
        if name == POINTER {
            buffer = value;
        } else {
            // SAFETY: the value is the address of a size.
            size = unsafe { value.cast::<usize>().read() };
        }
        // SAFETY: another name, or the end, follows.
        extra = unsafe { extra.add(2) };
    }
    for word in 0..size / 8 {
        // SAFETY: the buffer has `size` bytes.
        words.add(unsafe { buffer.cast::<u64>().add(word).read_unaligned() });
    }
}
