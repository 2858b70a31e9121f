//! The GPU hook: the driver's allocation calls, taken over at link time.
//!
//! ```text
//!   cuMemAllocAsync ──a step on this thread, for this stream and device──> its compiler
//!   cuMemAlloc_v2     └────────anything else────────> the driver (libcuda.so.1)
//!   cuMemFreeAsync  ──the address lies in a compiler's range──> that compiler, from any thread
//!   cuMemFree_v2      └────────anything else────────> the driver
//! ```
//!
//! It works for every framework whose calls of the driver are plain external symbols: cudarc with
//! `dynamic-linking`, which Candle uses. Like a global allocator it is one line in the program:
//!
//! ```
//! memory_compiler::interpose_cuda!();
//! # fn main() {}
//! ```
//!
//! [`check`] proves that the line is there and has its effect.
//!
//! A framework that loads the driver at run time does not ask the linker. There, whoever integrates it
//! patches the exported calls so that they jump to the four functions here, and says with [`pass_on_to`] how the
//! originals are reached; all else is the same, `check` included.
//!
//! Rules:
//! - whose allocation it is: the thread has a step, the step serves that stream, and, where the handle
//!   alone cannot tell the context (0, 1 and 2 name a stream of the *current* one) and there is more than
//!   one, the current context is the step's ([`handles`]);
//! - the synchronous calls are served only for a GPU without stream-ordered allocation;
//! - a free is resolved by its address, whoever makes it. Another thread or stream than the step's may
//!   still use the memory: a fence is recorded there and waited for before reuse;
//! - a strict break is served, and the step returns the error at its end. A call fails only when there
//!   is no memory: over the budget at once, else when the driver has none either;
//! - what was served here is freed here: [`free`](crate::free) and its like are safe code, and refuse a buffer
//!   that a framework's tensor may own;
//! - zero bytes, and null pointers, get the driver's answer.
//!
//! The calls for streams that are per-thread by default (`…_ptsz`) are not taken over: cudarc makes
//! none. On Windows the driver is a DLL whose calls go through an import library, so that a program's
//! own definition wins there too, but passing on is written for `dlopen`: there everything that no step
//! claims fails with `NOT_INITIALIZED`, and [`check`] refuses. Other processors need nothing special;
//! only `x86_64` has been tried.
//!
//! While a step is captured into a CUDA graph, frees from other threads and streams wait for the capture's
//! end. A step that is replayed makes no call that a capture forbids, and one that is not is told that it can
//! not be captured; pin the layout ([`Compiler::pin_layout`](crate::Compiler::pin_layout)) before the capture
//! and for as long as the graph is launched.
//!
//! May import: `bookkeeping`, `compiler`, `current`, `device`, `engine` for who frees, `error`, `options`, `units`.

mod handles;
#[cfg(test)]
mod tests;

pub use handles::{
    context_of_green, create_context, create_context_v3, create_context_v4, destroy_stream,
    is_of_context, streams_destroyed,
};

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use handles::context_of;

use crate::bookkeeping::Bookkeeping;
use crate::compiler::Compiler;
use crate::current;
use crate::device::{Call, Cuda, Device, DeviceError, StreamId};
use crate::engine::By;
use crate::error::{BadFree, Error};
use crate::options::Options;
use crate::units::{Address, Bytes};

/// Puts the memory compiler between this program and the NVIDIA driver's allocation calls. Goes into
/// `main.rs`, or into the root of a test, a bench or an example, once.
///
/// It defines `cuMemAllocAsync`, `cuMemFreeAsync`, `cuMemAlloc_v2` and `cuMemFree_v2`. What no step
/// claims reaches the driver. To know what a stream's handle means it defines `cuCtxCreate_v2`, `_v3`, `_v4`,
/// `cuCtxFromGreenCtx` and `cuStreamDestroy_v2` too. See [`hook::cuda`](crate::hook::cuda).
#[macro_export]
macro_rules! interpose_cuda {
    () => {
        #[allow(
            unsafe_code,
            reason = "defines symbols that the linker finds before the driver's"
        )]
        const _: () = {
            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuMemAllocAsync(
                at: *mut u64,
                size: usize,
                stream: *mut ::core::ffi::c_void,
            ) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { $crate::hook::cuda::alloc_async(at, size, stream) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuMemFreeAsync(at: u64, stream: *mut ::core::ffi::c_void) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { $crate::hook::cuda::free_async(at, stream) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuMemAlloc_v2(at: *mut u64, size: usize) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { $crate::hook::cuda::alloc(at, size) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuMemFree_v2(at: u64) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { $crate::hook::cuda::free(at) }
            }

            use ::core::ffi::c_void;

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuCtxCreate_v2(
                at: *mut *mut c_void,
                flags: u32,
                device: i32,
            ) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { $crate::hook::cuda::create_context(at, flags, device) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuCtxCreate_v3(
                at: *mut *mut c_void,
                affinities: *mut c_void,
                count: i32,
                flags: u32,
                device: i32,
            ) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe {
                    $crate::hook::cuda::create_context_v3(at, affinities, count, flags, device)
                }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuCtxCreate_v4(
                at: *mut *mut c_void,
                parameters: *mut c_void,
                flags: u32,
                device: i32,
            ) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { $crate::hook::cuda::create_context_v4(at, parameters, flags, device) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuCtxFromGreenCtx(
                at: *mut *mut c_void,
                green: *mut c_void,
            ) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { $crate::hook::cuda::context_of_green(at, green) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { $crate::hook::cuda::destroy_stream(stream) }
            }
        };
    };
}

/// `CUresult`, as a number: the driver may return codes that no header of ours knows.
pub type Code = u32;

const SUCCESS: Code = 0;
const INVALID_VALUE: Code = 1;
const OUT_OF_MEMORY: Code = 2;
const NOT_INITIALIZED: Code = 3;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
const CAPTURE_UNSUPPORTED: Code = 900;

/// Calls that no step claimed and that went to the driver, since the program began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Allocations.
    pub allocs: u64,
    /// Frees.
    pub frees: u64,
    /// Bytes of those allocations together.
    pub alloc_bytes: Bytes,
}

static ALLOCS: AtomicU64 = AtomicU64::new(0);
static FREES: AtomicU64 = AtomicU64::new(0);
static ALLOC_BYTES: AtomicU64 = AtomicU64::new(0);

/// The calls that went to the driver so far.
#[must_use]
pub fn counts() -> Counts {
    Counts {
        allocs: ALLOCS.load(Ordering::Relaxed),
        frees: FREES.load(Ordering::Relaxed),
        alloc_bytes: Bytes(ALLOC_BYTES.load(Ordering::Relaxed)),
    }
}

/// The type of `cuMemAllocAsync`.
pub type AllocAsync = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> Code;
/// The type of `cuMemFreeAsync`.
pub type FreeAsync = unsafe extern "C" fn(u64, *mut c_void) -> Code;
/// The type of `cuMemAlloc_v2`.
pub type Alloc = unsafe extern "C" fn(*mut u64, usize) -> Code;
/// The type of `cuMemFree_v2`.
pub type Free = unsafe extern "C" fn(u64) -> Code;

/// The driver's allocation calls; `None` for one that it does not have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Driver {
    /// `cuMemAllocAsync`.
    pub alloc_async: Option<AllocAsync>,
    /// `cuMemFreeAsync`.
    pub free_async: Option<FreeAsync>,
    /// `cuMemAlloc_v2`.
    pub alloc: Option<Alloc>,
    /// `cuMemFree_v2`.
    pub free: Option<Free>,
}

impl Driver {
    /// The calls as the driver's library exports them; none where there is no driver.
    #[must_use]
    pub fn exported() -> Self {
        let _bookkeeping = Bookkeeping::begin();
        load()
    }
}

/// What the driver's library exports under a name; null for nothing.
#[cfg(unix)]
fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: the name is a C string; the library is the driver's, which the program uses anyway.
    let library =
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: the library is open and stays so; the name is a C string. A search in one library finds that
    // library's symbol, never the program's.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

#[cfg(not(unix))]
fn symbol(_: &CStr) -> *mut c_void {
    ptr::null_mut()
}

fn load() -> Driver {
    let (alloc_async, free_async) = (symbol(c"cuMemAllocAsync"), symbol(c"cuMemFreeAsync"));
    let (alloc, free) = (symbol(c"cuMemAlloc_v2"), symbol(c"cuMemFree_v2"));
    Driver {
        // SAFETY: null becomes `None`; else it is the function of this signature in cuda.h.
        alloc_async: unsafe { std::mem::transmute::<*mut c_void, Option<AllocAsync>>(alloc_async) },
        // SAFETY: as above.
        free_async: unsafe { std::mem::transmute::<*mut c_void, Option<FreeAsync>>(free_async) },
        // SAFETY: as above.
        alloc: unsafe { std::mem::transmute::<*mut c_void, Option<Alloc>>(alloc) },
        // SAFETY: as above.
        free: unsafe { std::mem::transmute::<*mut c_void, Option<Free>>(free) },
    }
}

/// Where what no step claims goes.
static DRIVER: OnceLock<Driver> = OnceLock::new();

fn driver() -> &'static Driver {
    DRIVER.get_or_init(Driver::exported)
}

/// From now on, what no step claims goes to `upstream`: for a program that patches the driver's exported
/// calls so that they arrive here, and would meet its own patch again.
///
/// # Safety
/// Each does what the driver's call of its name does, for as long as the program runs.
///
/// # Errors
/// When calls were passed on, or looked for, before: `upstream` then changes nothing.
pub unsafe fn pass_on_to(upstream: Driver) -> Result<(), Driver> {
    DRIVER.set(upstream)
}

thread_local! {
    /// While [`check`] looks: which of the four calls arrived, one bit each.
    static PROBE: Cell<Option<u8>> = const { Cell::new(None) };
}

thread_local! {
    /// The stream of the last stream-ordered allocation that this thread passed on, by its handle.
    static LAST_STREAM: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Runs `f`, and says on which stream it allocated last, if no step served that: a framework that keeps its
/// streams to itself tells by it which one a compiler is to serve.
pub fn stream_of<T>(f: impl FnOnce() -> T) -> (T, Option<StreamId>) {
    LAST_STREAM.set(None);
    let result = f();
    (result, LAST_STREAM.take().map(StreamId))
}

const PROBE_ALLOC_ASYNC: u8 = 1;
const PROBE_FREE_ASYNC: u8 = 2;
const PROBE_ALLOC: u8 = 4;
const PROBE_FREE: u8 = 8;
const PROBE_ALL: u8 = 15;

/// Whether the null pointer in a call is [`check`]'s.
#[cold]
fn is_probe(bit: u8) -> bool {
    let seen = PROBE.get();
    if let Some(seen) = seen {
        PROBE.set(Some(seen | bit));
    }
    seen.is_some()
}

/// Whether the driver's allocation calls that cudarc makes in this program arrive here: makes each of
/// them with arguments that do nothing, and looks.
///
/// # Errors
/// [`Error::CudaHookMissing`], whose text is the line to add.
pub fn check() -> Result<(), Error> {
    if driver().alloc.is_none() {
        // Nothing to pass on to; and cudarc panics without the driver's library.
        return Err(Error::CudaHookMissing);
    }
    PROBE.set(Some(0));
    // SAFETY: a null pointer for the result: refused by the driver, never written to.
    let _ = unsafe { sys::cuMemAllocAsync(ptr::null_mut(), 0, ptr::null_mut()) };
    if PROBE.get() == Some(PROBE_ALLOC_ASYNC) {
        // SAFETY: freeing null does nothing.
        let _ = unsafe { sys::cuMemFreeAsync(0, ptr::null_mut()) };
        // SAFETY: a null pointer for the result: refused by the driver, never written to.
        let _ = unsafe { sys::cuMemAlloc_v2(ptr::null_mut(), 0) };
        // SAFETY: freeing null does nothing.
        let _ = unsafe { sys::cuMemFree_v2(0) };
    }
    match PROBE.replace(None) {
        Some(PROBE_ALL) => Ok(()),
        _ => Err(Error::CudaHookMissing),
    }
}

/// What `cuMemAllocAsync` is in a program with [`interpose_cuda!`](crate::interpose_cuda).
///
/// # Safety
/// As the driver's call: `at` is null or writable, `stream` is a stream of the current context.
#[inline]
pub unsafe fn alloc_async(at: *mut u64, size: usize, stream: *mut c_void) -> Code {
    if at.is_null() && is_probe(PROBE_ALLOC_ASYNC) {
        return INVALID_VALUE;
    }
    let on = Some(StreamId(stream.addr() as u64));
    serve(
        at,
        size,
        on,
        || context_of(stream),
        || {
            let Some(call) = driver().alloc_async else {
                return NOT_INITIALIZED;
            };
            LAST_STREAM.set(Some(stream.addr() as u64));
            // SAFETY: the caller keeps the contract of the driver's call.
            unsafe { call(at, size, stream) }
        },
    )
}

/// What `cuMemAlloc_v2` is in a program with [`interpose_cuda!`](crate::interpose_cuda).
///
/// # Safety
/// As the driver's call: `at` is null or writable.
#[inline]
pub unsafe fn alloc(at: *mut u64, size: usize) -> Code {
    if at.is_null() && is_probe(PROBE_ALLOC) {
        return INVALID_VALUE;
    }
    serve(
        at,
        size,
        None,
        || context_of(ptr::null_mut()),
        || {
            let Some(call) = driver().alloc else {
                return NOT_INITIALIZED;
            };
            // SAFETY: the caller keeps the contract of the driver's call.
            unsafe { call(at, size) }
        },
    )
}

/// Serves an allocation from the step that it is for, else from the driver.
#[inline]
fn serve(
    at: *mut u64,
    size: usize,
    stream: Option<StreamId>,
    context: impl Fn() -> Option<u64>,
    upstream: impl FnOnce() -> Code,
) -> Code {
    if at.is_null() {
        return pass_on(size, upstream);
    }
    let size_bytes = Bytes(size as u64);
    if let Some(address) = current::replay_gpu(stream, size_bytes, &context) {
        // SAFETY: not null, so writable by the caller's contract.
        unsafe { at.write(address.0) };
        return SUCCESS;
    }
    serve_slow(at, size, stream, context, upstream)
}

/// An allocation that no tape answers.
#[cold]
fn serve_slow(
    at: *mut u64,
    size: usize,
    stream: Option<StreamId>,
    context: impl Fn() -> Option<u64>,
    upstream: impl FnOnce() -> Code,
) -> Code {
    match current::alloc_gpu(stream, Bytes(size as u64), context) {
        Ok(Some(address)) => {
            // SAFETY: not null, so writable by the caller's contract.
            unsafe { at.write(address.0) };
            SUCCESS
        }
        Ok(None) => pass_on(size, upstream),
        Err((step, error)) => {
            let code = match error {
                Error::OverBudget { .. } => OUT_OF_MEMORY,
                Error::Captured { .. } => CAPTURE_UNSUPPORTED,
                _ => pass_on(size, upstream),
            };
            if code != SUCCESS {
                current::fail_step(step, error);
            }
            code
        }
    }
}

fn pass_on(size: usize, upstream: impl FnOnce() -> Code) -> Code {
    ALLOCS.fetch_add(1, Ordering::Relaxed);
    let code = upstream();
    if code == SUCCESS {
        ALLOC_BYTES.fetch_add(size as u64, Ordering::Relaxed);
    }
    code
}

/// What `cuMemFreeAsync` is in a program with [`interpose_cuda!`](crate::interpose_cuda).
///
/// # Safety
/// As the driver's call: `at` was allocated and not freed since, `stream` is a stream of the current
/// context, and work on other streams that uses it is ordered before.
#[inline]
pub unsafe fn free_async(at: u64, stream: *mut c_void) -> Code {
    if at == 0 && is_probe(PROBE_FREE_ASYNC) {
        return SUCCESS;
    }
    let (address, on) = (Address(at), StreamId(stream.addr() as u64));
    if current::may_own(address) {
        if current::free_replayed(on, address, By::Hook) {
            return SUCCESS;
        }
        if current::is_in_a_range(address) {
            let freed = code_of(current::free_on_any(on, address, By::Hook));
            if let Some(code) = freed.or_else(|| weight_freed(address)) {
                return code;
            }
        }
    }
    FREES.fetch_add(1, Ordering::Relaxed);
    let Some(call) = driver().free_async else {
        return NOT_INITIALIZED;
    };
    // SAFETY: the address is no compiler's, so the driver's; the caller keeps the rest.
    unsafe { call(at, stream) }
}

/// What `cuMemFree_v2` is in a program with [`interpose_cuda!`](crate::interpose_cuda).
///
/// # Safety
/// As the driver's call: `at` was allocated and not freed since; where the driver does not wait for
/// work that uses it, that work is done.
#[inline]
pub unsafe fn free(at: u64) -> Code {
    if at == 0 && is_probe(PROBE_FREE) {
        return SUCCESS;
    }
    let address = Address(at);
    if current::may_own(address)
        && current::is_in_a_range(address)
        && let Some(code) =
            code_of(current::free_synchronous(address)).or_else(|| weight_freed(address))
    {
        return code;
    }
    FREES.fetch_add(1, Ordering::Relaxed);
    let Some(call) = driver().free else {
        return NOT_INITIALIZED;
    };
    // SAFETY: the address is no compiler's, so the driver's; the caller keeps the rest.
    unsafe { call(at) }
}

/// What a free of a paged weight returns; `None` when it is none.
#[cold]
fn weight_freed(address: Address) -> Option<Code> {
    super::weights::take_back(address).then_some(SUCCESS)
}

/// What a free returns; `None` when no compiler owns the address.
#[cold]
fn code_of(freed: Result<(), Error>) -> Option<Code> {
    match freed {
        Ok(()) => Some(SUCCESS),
        Err(Error::BadFree {
            reason: BadFree::Unknown,
            ..
        }) => None,
        Err(Error::Device {
            source: DeviceError::Driver { code, .. },
            ..
        }) => Some(code.cast_unsigned()),
        Err(_) => Some(INVALID_VALUE),
    }
}

/// The memory of the GPU number `ordinal`, for a program whose allocation calls arrive at this hook.
///
/// # Errors
/// [`Error::CudaHookMissing`], whose text is the line to add, when they do not; [`Error::Device`] when the driver
/// refuses.
pub fn device(ordinal: usize) -> Result<Arc<Cuda>, Error> {
    check()?;
    let gpu = Cuda::new(ordinal).map_err(|source| Error::Device {
        call: Call::Reserve,
        source,
    })?;
    if let Some(identity) = gpu.gpu() {
        handles::look_at_current(identity.context);
    }
    Ok(Arc::new(gpu))
}

/// A compiler for the GPU number `ordinal` that serves `stream`, for a program whose allocation calls arrive at
/// this hook.
///
/// # Errors
/// As [`device`]; [`Error::Option`] for an option that cannot work.
pub fn compiler(ordinal: usize, stream: StreamId, options: Options) -> Result<Compiler, Error> {
    let mut compiler = Compiler::new(device(ordinal)?, options)?;
    compiler.use_stream(stream)?;
    Ok(compiler)
}
