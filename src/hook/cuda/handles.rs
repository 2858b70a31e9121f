//! Calls after which a handle means another thing, seen on their way to the driver.
//!
//! ```text
//!   cuCtxCreate_v2, …_v3, …_v4,   from now on 0, 1 and 2 may name streams of another context on the GPU that a
//!   cuCtxFromGreenCtx             compiler serves: the current context is asked for at each of their allocations
//!   cuStreamDestroy_v2            the next stream may get the handle of this one: a compiler that serves it waits
//!                                 for its work, and asks the handle nothing any more
//! ```
//!
//! **Two contexts on one GPU.** A compiler's memory, its fences and its waits are those of the GPU's primary context.
//! An allocation for a default stream of another context passes through. A stream with a handle of its own is of one
//! context for life, so the handle alone tells it from the one that a step serves, and no compiler is told to serve
//! one of another context ([`Device::check_stream`](crate::device::Device::check_stream)). Memory of a step may be used by
//! work of another context, as every mapped address may, but the order of that work is not the compiler's: a free on
//! such a stream is refused by the driver at the fence, as an event and a stream of two contexts, and the buffer
//! stays. Contexts that are made past these calls (a library's own, through pointers that it got from the driver)
//! are seen where they are current when a compiler's device is made.
//!
//! **Other ends.** A context that is destroyed takes its own streams with it: those of a second context are served by
//! nobody. Resetting the primary context takes the compiler's pages and addresses too; nothing of the GPU in this
//! process works any more, and the driver says so at the next call.
//!
//! May import: `bookkeeping`, `current`, `device`.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

#[cfg(not(test))]
use cudarc::driver::sys;

use super::{Code, NOT_INITIALIZED};
use crate::bookkeeping::Bookkeeping;
use crate::current;
use crate::device::{Cuda, StreamId};

const UNKNOWN: u8 = 0;
const ONE: u8 = 1;
const SEVERAL: u8 = 2;

/// Whether a default stream's handle may name streams of several contexts; never less again.
static CONTEXTS: AtomicU8 = AtomicU8::new(UNKNOWN);
static DESTROYED: AtomicU64 = AtomicU64::new(0);

/// Another context than the GPUs' primary ones exists.
fn note_context() {
    CONTEXTS.store(SEVERAL, Ordering::Release);
}

/// Looks whether this thread works in another context than `primary`: one that was made before, or past the calls
/// above.
pub(super) fn look_at_current(primary: u64) {
    let current = current_context();
    if current != 0 && current != primary {
        note_context();
    }
}

#[cold]
fn count_gpus() -> u8 {
    let found = if Cuda::count() > 1 { SEVERAL } else { ONE };
    let noted = CONTEXTS.compare_exchange(UNKNOWN, found, Ordering::AcqRel, Ordering::Acquire);
    noted.map_or_else(|before| before, |_| found)
}

/// The current context where a stream's handle alone does not tell the context: 0, 1 and 2 name a stream of the
/// current one. Else `None`: the handle is a stream's own, or the process has one GPU and its primary context only.
#[inline]
pub(super) fn context_of(stream: *mut c_void) -> Option<u64> {
    if stream.addr() > 2 {
        return None;
    }
    match CONTEXTS.load(Ordering::Relaxed) {
        ONE => None,
        SEVERAL => Some(current_context()),
        _ => (count_gpus() == SEVERAL).then(current_context),
    }
}

#[cfg(test)]
use super::tests::current_context;

#[cfg(not(test))]
fn current_context() -> u64 {
    let mut context = ptr::null_mut();
    // SAFETY: `context` is writable.
    let code = unsafe { sys::cuCtxGetCurrent(&raw mut context) };
    if code == sys::CUresult::CUDA_SUCCESS {
        context.addr() as u64
    } else {
        0
    }
}

/// Whether a stream's handle names, on this thread now, one of `context`, as far as that can be in doubt: 0, 1 and 2
/// name a stream of the current context.
#[must_use]
pub fn is_of_context(stream: StreamId, context: u64) -> bool {
    let handle = ptr::without_provenance_mut(stream.0 as usize);
    context_of(handle).is_none_or(|current| current == context)
}

/// Streams that this program destroyed so far: while it stays, a handle means the same stream.
#[must_use]
pub fn streams_destroyed() -> u64 {
    DESTROYED.load(Ordering::Acquire)
}

/// The driver's own definition of a call.
fn exported(found: &OnceLock<usize>, name: &CStr) -> Option<*const c_void> {
    let at = *found.get_or_init(|| {
        let _bookkeeping = Bookkeeping::begin();
        super::symbol(name).expose_provenance()
    });
    (at != 0).then(|| ptr::with_exposed_provenance(at))
}

/// Calls the driver's definition.
macro_rules! pass {
    ($name:literal: $kind:ty, ($($argument:expr),+)) => {{
        static FOUND: OnceLock<usize> = OnceLock::new();
        let Some(call) = exported(&FOUND, $name) else {
            return NOT_INITIALIZED;
        };
        // SAFETY: it is the function of this signature in cuda.h.
        let call = unsafe { std::mem::transmute::<*const c_void, $kind>(call) };
        // SAFETY: the caller keeps the contract of the driver's call.
        unsafe { call($($argument),+) }
    }};
}

/// What `cuCtxCreate_v2` is in a program with [`interpose_cuda!`](crate::interpose_cuda).
///
/// # Safety
/// As the driver's call.
pub unsafe fn create_context(at: *mut *mut c_void, flags: u32, device: i32) -> Code {
    type Create = unsafe extern "C" fn(*mut *mut c_void, u32, i32) -> Code;
    note_context();
    pass!(c"cuCtxCreate_v2": Create, (at, flags, device))
}

/// What `cuCtxCreate_v3` is in a program with [`interpose_cuda!`](crate::interpose_cuda).
///
/// # Safety
/// As the driver's call.
pub unsafe fn create_context_v3(
    at: *mut *mut c_void,
    affinities: *mut c_void,
    count: i32,
    flags: u32,
    device: i32,
) -> Code {
    type Create = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, i32, u32, i32) -> Code;
    note_context();
    pass!(c"cuCtxCreate_v3": Create, (at, affinities, count, flags, device))
}

/// What `cuCtxCreate_v4` is in a program with [`interpose_cuda!`](crate::interpose_cuda).
///
/// # Safety
/// As the driver's call.
pub unsafe fn create_context_v4(
    at: *mut *mut c_void,
    parameters: *mut c_void,
    flags: u32,
    device: i32,
) -> Code {
    type Create = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, u32, i32) -> Code;
    note_context();
    pass!(c"cuCtxCreate_v4": Create, (at, parameters, flags, device))
}

/// What `cuCtxFromGreenCtx` is in a program with [`interpose_cuda!`](crate::interpose_cuda).
///
/// # Safety
/// As the driver's call.
pub unsafe fn context_of_green(at: *mut *mut c_void, green: *mut c_void) -> Code {
    type From = unsafe extern "C" fn(*mut *mut c_void, *mut c_void) -> Code;
    note_context();
    pass!(c"cuCtxFromGreenCtx": From, (at, green))
}

/// What `cuStreamDestroy_v2` is in a program with [`interpose_cuda!`](crate::interpose_cuda): where a compiler serves
/// the stream, the device is waited for first.
///
/// What a step frees is used again on its stream, behind the work of before. The driver destroys a stream at once,
/// and its work goes on; the next stream that it makes may get the handle, and would be served as if it were behind
/// that work.
///
/// # Safety
/// As the driver's call.
pub unsafe fn destroy_stream(stream: *mut c_void) -> Code {
    type Destroy = unsafe extern "C" fn(*mut c_void) -> Code;
    current::leave_stream(StreamId(stream.addr() as u64));
    // Before the handle can come back.
    DESTROYED.fetch_add(1, Ordering::AcqRel);
    pass!(c"cuStreamDestroy_v2": Destroy, (stream))
}
