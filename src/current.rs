//! Layer 5: which compilers serve this thread, and who owns an address.
//!
//! ```text
//!   Compiler::begin  --engine-->  ACTIVE of this thread (innermost step last)  --engine-->  end
//!   free(address):  an active step of this thread?  else the registry: queue it for its engine;
//!                   a compiler that was dropped left its engine behind it, its last free ends it
//! ```
//!
//! During a step the engine lies in a thread-local and nobody else can reach it, so it needs no lock.
//! The thread-locals are initialised at compile time and are never dropped, so that an allocator may
//! use them at any time in a thread's life, also in destructors of other thread-locals. Every entry
//! borrows for the length of one call: what the engine itself allocates finds it borrowed (or the mark of
//! [`Bookkeeping`]) and passes through.
//!
//! A forked child begins without active steps, and frees of buffers that it inherited do nothing: what it has are
//! copies. It asks [`Shared::is_inherited`] before it touches what another thread of its parent may have locked; the
//! registry is locked inside of a [`Section`] only.
//!
//! May import: layers 0 to 4, `engine`.

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::bookkeeping::Bookkeeping;
use crate::device::fork::{self, Section};
use crate::device::{Call, Fence, StreamId};
use crate::engine::{Allocation, By, Engine, OnError, Remote, Shared};
use crate::error::{BadFree, Error};
use crate::ranges::Ranges;
use crate::units::{Address, Bytes};

/// Boxed: an engine is large and changes hands at every step.
type Active = RefCell<Vec<Box<Engine>>>;

thread_local! {
    static ACTIVE: ManuallyDrop<Active> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    static PROBE: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread holds the registry's lock for writing: what is freed then is the registry's.
    static REGISTERING: Cell<bool> = const { Cell::new(false) };
}

/// Engines that own addresses; never dropped.
static REGISTRY: RwLock<Vec<Arc<Shared>>> = RwLock::new(Vec::new());
/// All their ranges lie in between, so that most frees are told foreign in two compares.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);
/// The ranges themselves, for the frees of what lies between two of them.
static RANGES: Ranges = Ranges::new();

/// Makes an engine's addresses known.
pub(crate) fn register(shared: &Arc<Shared>) {
    fork::forget_in_child(forget_active);
    change_registry(|registry| registry.push(Arc::clone(shared)));
    add_range(shared.base, shared.size);
}

/// Lets [`may_own`] and [`is_in_a_range`] say yes to these addresses too.
pub(crate) fn add_range(base: Address, size: Bytes) {
    let _section = Section::begin();
    RANGES.add(base, size);
    LOWEST.fetch_min(base.0, Ordering::Release);
    HIGHEST.fetch_max(base.0 + size.0, Ordering::Release);
}

/// Lets [`is_in_a_range`] say no to them again, before they are given back. The bounds stay: addresses are often
/// handed out again.
pub(crate) fn remove_range(base: Address) {
    let _section = Section::begin();
    RANGES.remove(base);
}

/// Forgets an engine's addresses.
fn deregister(shared: &Shared) {
    remove_range(shared.base);
    change_registry(|registry| registry.retain(|other| !std::ptr::eq(&**other, shared)));
}

fn change_registry(change: impl FnOnce(&mut Vec<Arc<Shared>>)) {
    let _bookkeeping = Bookkeeping::begin();
    let _section = Section::begin();
    REGISTERING.set(true);
    change(&mut REGISTRY.write().unwrap_or_else(PoisonError::into_inner));
    REGISTERING.set(false);
}

fn owner(address: Address) -> Option<Arc<Shared>> {
    let _section = Section::begin();
    let registry = REGISTRY.read().unwrap_or_else(PoisonError::into_inner);
    registry
        .iter()
        .find(|shared| shared.contains(address))
        .cloned()
}

/// Whether any compiler may own the address.
#[inline]
pub(crate) fn may_own(address: Address) -> bool {
    address.0 >= LOWEST.load(Ordering::Relaxed)
        && address.0 < HIGHEST.load(Ordering::Relaxed)
        && !REGISTERING.get()
}

/// Whether the address, which [`may_own`] says yes to, lies in the range of a compiler or of weights; without a lock,
/// and perhaps in none while ranges come and go. Asked last: what an active step owns is found sooner.
#[inline]
pub(crate) fn is_in_a_range(address: Address) -> bool {
    RANGES.may_contain(address)
}

/// In a forked child, whose steps are its parent's: nothing is served from them, and their engines stay as they are.
fn forget_active() {
    ACTIVE.with(|active| {
        // Borrowed where foreign code forked inside of a call of the engine.
        if let Ok(mut active) = active.try_borrow_mut() {
            std::mem::forget(std::mem::take(&mut *active));
        }
    });
}

/// Makes an engine the innermost one of this thread.
pub(crate) fn install(engine: Box<Engine>) {
    ACTIVE.with(|active| active.borrow_mut().push(engine));
}

/// Takes the engine of a step off this thread.
pub(crate) fn uninstall(serial: u64) -> Option<Box<Engine>> {
    ACTIVE.with(|active| {
        let mut active = active.borrow_mut();
        let at = active.iter().position(|engine| engine.serial == serial)?;
        Some(active.remove(at))
    })
}

/// Calls `f` with the engine of a step, if it is active on this thread.
pub(crate) fn with_step<T>(serial: u64, f: impl FnOnce(&mut Engine) -> T) -> Option<T> {
    ACTIVE.with(|active| {
        let mut active = active.try_borrow_mut().ok()?;
        active
            .iter_mut()
            .find(|engine| engine.serial == serial)
            .map(|engine| f(engine))
    })
}

/// Calls `f` with the innermost engine of this thread.
#[inline]
pub(crate) fn with_innermost<T>(f: impl FnOnce(&mut Engine) -> T) -> Option<T> {
    ACTIVE.with(|active| {
        active
            .try_borrow_mut()
            .ok()?
            .last_mut()
            .map(|engine| f(engine))
    })
}

/// Serves an allocation of host memory from the innermost step of this thread that has any to give;
/// `None` where there is none, for buffers below its threshold, and while the compiler itself
/// allocates.
#[inline]
pub(crate) fn alloc_host(size: Bytes) -> Option<Address> {
    if Bookkeeping::is_going_on() {
        PROBE.set(false);
        return None;
    }
    ACTIVE.with(|active| {
        let mut active = active.try_borrow_mut().ok()?;
        let engine = active
            .iter_mut()
            .rev()
            .find(|engine| engine.host_threshold <= size)?;
        match engine.alloc(size, OnError::Postpone) {
            Ok(Allocation::Here(address)) => Some(address),
            Ok(Allocation::Elsewhere) | Err(_) => None,
        }
    })
}

/// Whether a step serves allocations of GPU memory for a stream.
#[cfg(feature = "cuda")]
#[inline]
fn serves(engine: &Engine, stream: Option<StreamId>, context: impl Fn() -> Option<u64>) -> bool {
    engine.gpu.is_some_and(|gpu| {
        stream.map_or(!gpu.has_pools, |stream| stream == engine.stream)
            && context().is_none_or(|context| context == gpu.context)
    })
}

/// What [`alloc_gpu`] does where the innermost step serves the stream and its tape answers; else nothing
/// has happened.
#[cfg(feature = "cuda")]
#[inline]
pub(crate) fn replay_gpu(
    stream: Option<StreamId>,
    size: Bytes,
    context: impl Fn() -> Option<u64>,
) -> Option<Address> {
    if Bookkeeping::is_going_on() {
        return None;
    }
    ACTIVE.with(|active| {
        let mut active = active.try_borrow_mut().ok()?;
        let engine = active.last_mut()?;
        if !serves(engine, stream, context) {
            return None;
        }
        engine.replay(size, OnError::Refuse)
    })
}

/// Serves an allocation of GPU memory from the innermost step of this thread that serves `stream` (none
/// for the synchronous call) of the device that `context` names, where it must be told; `Ok(None)` where
/// there is none. An error is for the step of that serial, if nobody else has memory.
#[cfg(feature = "cuda")]
#[cold]
pub(crate) fn alloc_gpu(
    stream: Option<StreamId>,
    size: Bytes,
    context: impl Fn() -> Option<u64>,
) -> Result<Option<Address>, (u64, Error)> {
    if Bookkeeping::is_going_on() {
        return Ok(None);
    }
    let serves = |engine: &Engine| serves(engine, stream, &context);
    ACTIVE.with(|active| {
        let Ok(mut active) = active.try_borrow_mut() else {
            return Ok(None);
        };
        let Some(engine) = active.iter_mut().rev().find(|engine| serves(engine)) else {
            if let Some(engine) = active.iter_mut().rev().find(|engine| engine.gpu.is_some()) {
                engine.count_passed_through();
            }
            return Ok(None);
        };
        match engine.alloc(size, OnError::Refuse) {
            Ok(Allocation::Here(address)) => Ok(Some(address)),
            Ok(Allocation::Elsewhere) => Ok(None),
            Err(error) => Err((engine.serial, error)),
        }
    })
}

/// A stream is about to be destroyed: compilers that serve it wait for its work. Its handle may come back.
#[cfg(feature = "cuda")]
pub(crate) fn leave_stream(stream: StreamId) {
    let _bookkeeping = Bookkeeping::begin();
    let registry = REGISTRY.read().unwrap_or_else(PoisonError::into_inner);
    let all: Vec<Arc<Shared>> = registry.clone();
    // Waiting may take a while.
    drop(registry);
    all.iter().for_each(|shared| shared.leave_stream(stream));
}

/// Lets an active step of this thread return an error at its end.
#[cfg(feature = "cuda")]
pub(crate) fn fail_step(serial: u64, error: Error) {
    with_step(serial, |engine| {
        engine.count_passed_through();
        engine.postpone(error);
    });
}

/// Whether a compiler owns the address.
pub(crate) fn owns(address: Address) -> bool {
    may_own(address) && is_in_a_range(address) && owner(address).is_some()
}

/// Finds out whether this thread's allocations come past the CPU hook.
#[derive(Debug)]
pub(crate) struct Probe(Bookkeeping);

impl Probe {
    pub fn begin() -> Self {
        PROBE.set(true);
        Self(Bookkeeping::begin())
    }

    pub fn was_seen(&self) -> bool {
        !PROBE.replace(false)
    }
}

/// Frees a buffer that an active step of this thread owns; `None` where none owns the address.
#[inline]
pub(crate) fn free_here(address: Address, by: By) -> Option<Result<(), Error>> {
    ACTIVE.with(|active| {
        let mut active = active.try_borrow_mut().ok()?;
        let engine = active
            .iter_mut()
            .rev()
            .find(|engine| engine.shared.contains(address))?;
        Some(engine.free(address, by))
    })
}

/// Frees a buffer of any compiler of this process: from any thread, during a step or outside, also
/// after the compiler was dropped. No work may still use the memory; [`free_on`] is for that.
///
/// On the thread of the step that owns the buffer the free takes effect at once; elsewhere it waits
/// for the owner's next event, and a bad free is counted in the owner's
/// [`Stats`](crate::Stats::bad_frees).
///
/// # Errors
/// [`Error::BadFree`] when no compiler owns the address, or when its step is active on this thread
/// and no buffer is live there, or one that a value owns which a hook served, on the CPU or a GPU.
///
/// In a forked child nothing happens to a buffer that it inherited, and that is no error: what is dropped there was a
/// copy.
pub fn free(address: Address) -> Result<(), Error> {
    free_here(address, By::Program).unwrap_or_else(|| free_elsewhere(address, None, By::Program))
}

/// The same for memory that work on `stream` may still use: reuse waits for a fence behind it.
///
/// # Errors
/// As [`free`], and [`Error::Device`] when the device refuses a fence (the buffer then stays live).
pub fn free_on(stream: StreamId, address: Address) -> Result<(), Error> {
    if free_replayed(stream, address, By::Program) {
        return Ok(());
    }
    free_on_any(stream, address, By::Program)
}

/// What [`free_on`] does for a buffer of the innermost step of this thread and its stream; else nothing
/// has happened.
#[inline]
pub(crate) fn free_replayed(stream: StreamId, address: Address, by: By) -> bool {
    ACTIVE.with(|active| {
        let Ok(mut active) = active.try_borrow_mut() else {
            return false;
        };
        active.last_mut().is_some_and(|engine| {
            engine.stream == stream
                && engine.shared.contains(address)
                && engine.free_live(address, by)
        })
    })
}

/// The same for any other buffer.
#[cold]
pub(crate) fn free_on_any(stream: StreamId, address: Address, by: By) -> Result<(), Error> {
    let here = ACTIVE.with(|active| {
        let mut active = active.try_borrow_mut().ok()?;
        let engine = active
            .iter_mut()
            .rev()
            .find(|engine| engine.shared.contains(address))?;
        if engine.stream != stream {
            if engine.is_captured() {
                // It waits for the end of the capture, as those of other threads do.
                return None;
            }
            let ordered = order(&engine.shared, stream).and_then(|fence| {
                let waited = engine.wait_for(fence);
                waited.map_err(|source| Error::Device {
                    call: Call::Wait,
                    source,
                })
            });
            if let Err(error) = ordered {
                return Some(Err(error));
            }
        }
        Some(engine.free(address, by))
    });
    here.unwrap_or_else(|| free_elsewhere(address, Some(stream), by))
}

/// The same for the GPU hook's caller that names no stream: a GPU without stream-ordered allocation is waited for, as
/// its driver would; elsewhere the caller has waited.
#[cfg(feature = "cuda")]
pub(crate) fn free_synchronous(address: Address) -> Result<(), Error> {
    let shared = owner(address).ok_or(Error::BadFree {
        address,
        reason: BadFree::Unknown,
    })?;
    if !shared.is_inherited() && shared.device.gpu().is_some_and(|gpu| !gpu.has_pools) {
        let waited = shared.device.synchronise();
        waited.map_err(|source| Error::Device {
            call: Call::Synchronise,
            source,
        })?;
    }
    drop(shared);
    free_here(address, By::Hook).unwrap_or_else(|| free_elsewhere(address, None, By::Hook))
}

fn order(shared: &Shared, stream: StreamId) -> Result<Fence, Error> {
    shared.device.fence(stream).map_err(|source| Error::Device {
        call: Call::Fence,
        source,
    })
}

/// Queues a free for the engine that owns the address, or applies it where the compiler is gone.
#[cold]
pub(crate) fn free_elsewhere(
    address: Address,
    stream: Option<StreamId>,
    by: By,
) -> Result<(), Error> {
    let _bookkeeping = Bookkeeping::begin();
    let shared = owner(address).ok_or(Error::BadFree {
        address,
        reason: BadFree::Unknown,
    })?;
    if shared.is_inherited() {
        return Ok(());
    }
    shared
        .push_free(address, stream, by)
        .map_err(|source| Error::Device {
            call: Call::Fence,
            source,
        })?;
    // In this order: either the compiler's drop sees the free, or we see that it was dropped.
    reap(&shared);
    Ok(())
}

/// Ends a compiler: at once, or with its last buffer or guard.
pub(crate) fn orphan(mut engine: Box<Engine>) {
    let _bookkeeping = Bookkeeping::begin();
    engine.drain_orphan();
    if engine.live_count() > 0 {
        // No step of its own will need them any more.
        engine.lend(Bytes(u64::MAX));
    }
    let shared = Arc::clone(&engine.shared);
    shared.handover.leave(engine);
    reap(&shared);
}

/// Tells an engine that a guard of its layout is gone; not the engine of a forked child's parent.
pub(crate) fn unpin(shared: &Shared) {
    if shared.is_inherited() {
        return;
    }
    let _bookkeeping = Bookkeeping::begin();
    shared.handover.push(Remote::Unpinned);
    reap(shared);
}

/// Applies what waits for a compiler that was dropped; its last buffer or guard ends its engine. One of a forked
/// child's parent is left alone.
fn reap(shared: &Shared) {
    reap_lending(shared, Bytes::ZERO);
}

/// The same, and has the engine give up to `wanted` bytes of what lies idle back.
pub(crate) fn reap_lending(shared: &Shared, mut wanted: Bytes) {
    if shared.is_inherited() {
        return;
    }
    let ended = shared.handover.reap(|engine| {
        let was_pinned = engine.is_pinned();
        engine.drain_orphan();
        if was_pinned && !engine.is_pinned() {
            wanted = Bytes(u64::MAX);
        }
        if wanted > Bytes::ZERO {
            engine.lend(wanted);
        }
        let is_empty = engine.live_count() == 0 && !engine.is_pinned();
        if is_empty {
            deregister(shared);
        }
        is_empty
    });
    drop(ended);
}
