//! The CPU hook: a global allocator by which the step of the current thread serves large buffers.
//!
//! ```text
//!   alloc ──large, a step is active on this thread──> its compiler
//!     └──────────────anything else──────────────────> the wrapped allocator
//!   dealloc ──the address lies in a compiler's range──> that compiler, from any thread
//!     └──────────────anything else──────────────────> the wrapped allocator
//! ```
//!
//! It works for every framework that keeps tensors in memory from Rust's allocator. A program adds
//! one line:
//!
//! ```
//! #[global_allocator]
//! static MEMORY: memory_compiler::hook::host::ScopedAllocator =
//!     memory_compiler::hook::host::ScopedAllocator::new();
//! # assert!(memory_compiler::hook::host::is_installed());
//! ```
//!
//! Rules:
//! - who owns a buffer follows from its address, never from its layout (only `realloc` asks the layout,
//!   how much to copy);
//! - what the compiler itself allocates is never served: its entries mark the thread as busy or have
//!   the engine borrowed, and either sends the allocation on;
//! - nothing here fails or unwinds (a panic inside ends the process): a strict break is served, a step
//!   without memory passes on to the wrapped allocator, and the step returns the error at its end;
//! - a forked child is served nothing by its parent's steps, and a buffer that it inherited is freed by doing nothing;
//! - threads that a kernel uses (rayon's) have no step, so their scratch memory passes through. A step
//!   that itself runs on a rayon worker may execute stolen jobs of others; run steps outside the pool.
//!
//! May import: `compiler`, `current`, `device`, `engine` for who frees, `options`, `hook/weights`, `units`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr;
use std::sync::Arc;

use crate::compiler::Compiler;
use crate::current::{self, Probe};
use crate::device::{Call, Host, check_granule};
use crate::engine::By;
use crate::error::Error;
use crate::hook::weights;
use crate::options::Options;
use crate::units::{ALIGNMENT, Address, Bytes};

pub use crate::options::SMALLEST_THRESHOLD;

/// A global allocator that serves the large buffers of a step from its compiler and the rest from `A`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScopedAllocator<A = System> {
    upstream: A,
}

impl ScopedAllocator {
    /// Over the system's allocator.
    #[must_use]
    pub const fn new() -> Self {
        Self::over(System)
    }
}

impl<A> ScopedAllocator<A> {
    /// Over another allocator.
    #[must_use]
    pub const fn over(upstream: A) -> Self {
        Self { upstream }
    }
}

#[inline]
fn address(pointer: *mut u8) -> Address {
    Address(pointer.expose_provenance() as u64)
}

/// Ends the process when a panic (of a device, or of whoever listens to `tracing`) would unwind through
/// an allocator, which the contract of `GlobalAlloc` forbids. Costs nothing where there is none.
struct NoUnwind;

impl Drop for NoUnwind {
    fn drop(&mut self) {
        std::process::abort();
    }
}

fn without_unwinding<T>(f: impl FnOnce() -> T) -> T {
    let guard = NoUnwind;
    let result = f();
    std::mem::forget(guard);
    result
}

/// Serves an allocation from the step of this thread, if it is one for it.
#[inline]
fn serve(layout: Layout) -> Option<*mut u8> {
    if layout.size() as u64 >= SMALLEST_THRESHOLD.0
        && let Some(weights) = weights::serve(layout)
    {
        return Some(ptr::with_exposed_provenance_mut(weights.0 as usize));
    }
    if (layout.size() as u64) < SMALLEST_THRESHOLD.0 || layout.align() as u64 > ALIGNMENT.0 {
        return None;
    }
    let served = without_unwinding(|| current::alloc_host(Bytes(layout.size() as u64)))?;
    Some(ptr::with_exposed_provenance_mut(served.0 as usize))
}

/// Frees a buffer of a compiler; `false` when the address is none's.
#[inline]
fn take_back(pointer: *mut u8) -> bool {
    let address = address(pointer);
    // A bad free of a compiler's address is counted there and must not reach the wrapped allocator.
    current::may_own(address)
        && without_unwinding(|| match current::free_here(address, By::Hook) {
            Some(_) => true,
            None => {
                current::is_in_a_range(address)
                    && (current::free_elsewhere(address, None, By::Hook).is_ok()
                        || weights::take_back(address))
            }
        })
}

// SAFETY: the contract of `GlobalAlloc`, with the reason for each clause:
// - a served pointer is valid for `layout.size()` bytes until it is freed: the engine's placements are
//   disjoint while they are live, mapped, and never unmapped while a buffer is live;
// - the memory of weights may be away for a while, which whoever made the vector has promised to heed
//   (`VecRange::vec`); nothing here touches it: `alloc_zeroed` and `realloc` are not what makes or
//   resizes one;
// - it is aligned to 512 B, and layouts that want more are not served;
// - `dealloc` finds the owner by address, so each block goes back to whoever made it;
// - nothing unwinds: the engine returns errors, and a panic of a device ends the process.
unsafe impl<A: GlobalAlloc> GlobalAlloc for ScopedAllocator<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if let Some(served) = serve(layout) {
            return served;
        }
        // SAFETY: the caller keeps the contract of `alloc`, which is the same upstream.
        unsafe { self.upstream.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if let Some(served) = serve(layout) {
            // SAFETY: `served` is valid for `layout.size()` bytes and nobody else has it yet. The
            // bytes are those of earlier buffers.
            unsafe { ptr::write_bytes(served, 0, layout.size()) };
            return served;
        }
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, which is the same upstream.
        unsafe { self.upstream.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if !take_back(pointer) {
            // SAFETY: no compiler owns the block, so upstream made it, with this layout.
            unsafe { self.upstream.dealloc(pointer, layout) };
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let ours = current::owns(address(pointer)) || weights::owns(address(pointer));
        if ours && layout.size().div_ceil(512) == new_size.div_ceil(512) && new_size > 0 {
            return pointer;
        }
        // SAFETY: the alignment is the old one; the caller guarantees that `new_size`, rounded up to
        // it, does not overflow.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        let new = match serve(new_layout) {
            Some(served) => served,
            // SAFETY: upstream made the block, with this layout; the caller keeps the rest.
            None if !ours => return unsafe { self.upstream.realloc(pointer, layout, new_size) },
            // SAFETY: `new_size` is not zero by the contract of `realloc`.
            None => unsafe { self.upstream.alloc(new_layout) },
        };
        if !new.is_null() {
            let kept = layout.size().min(new_size);
            // SAFETY: both blocks are live, at least `kept` bytes long, and different.
            unsafe { ptr::copy_nonoverlapping(pointer, new, kept) };
            // SAFETY: the block is live and the caller gives it up on success.
            unsafe { self.dealloc(pointer, layout) };
        }
        new
    }
}

/// Whether this binary's global allocator is a [`ScopedAllocator`]: makes an allocation and looks
/// whether it came past here.
#[must_use]
pub fn is_installed() -> bool {
    let probe = Probe::begin();
    drop(std::hint::black_box(Vec::<u8>::with_capacity(
        SMALLEST_THRESHOLD.0 as usize,
    )));
    probe.was_seen()
}

/// The memory of this machine, in pages of `granule`, for a program whose large buffers come past this hook.
///
/// # Errors
/// [`Error::HookMissing`], whose text is the line to add, when they do not; [`Error::Option`] for a granule
/// that cannot work; [`Error::Device`] when the system refuses.
pub fn device(granule: Bytes) -> Result<Arc<Host>, Error> {
    if !is_installed() {
        return Err(Error::HookMissing);
    }
    check_granule(granule, Host::smallest_granule())?;
    let host = Host::new(granule).map_err(|source| Error::Device {
        call: Call::Create,
        source,
    })?;
    Ok(Arc::new(host))
}

/// A compiler for the memory of this machine, in pages of `granule`, for a program whose large buffers come
/// past this hook.
///
/// # Errors
/// As [`device`]; [`Error::Option`] for an option that cannot work; [`Error::Device`] when the system refuses.
pub fn compiler(granule: Bytes, options: Options) -> Result<Compiler, Error> {
    Compiler::new(device(granule)?, options)
}
