//! What all threads may touch of an engine: its range of addresses, the frees and ends of pins that wait for it,
//! and between steps the engine itself.
//!
//! A free needs a fence unless it comes from the engine's *home*, the thread and stream of its steps,
//! where the next use of the memory is enqueued behind the last. A free without a fence is queued under
//! the lock of the home: it is in the queue before the engine can move.
//!
//! May import: layers 0 and 3, `handover`, and `engine`, which it keeps between steps and once orphaned.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::handover::Handover;
use super::{By, Engine};
use crate::device::fork::Process;
use crate::device::{Device, DeviceError, Fence, StreamId};
use crate::units::{ALIGNMENT, Address, Bytes};

/// What was done where the engine is not.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Remote {
    Freed(Freed),
    /// A guard that pinned the layout is gone.
    Unpinned,
}

/// A free that was made where the engine is not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub address: Address,
    /// Reuse waits for it.
    pub fence: Option<Fence>,
    pub by: By,
}

/// Number of the calling thread; never reused.
pub(crate) fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! { static NUMBER: Cell<u64> = const { Cell::new(0) } }
    if NUMBER.get() == 0 {
        NUMBER.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    NUMBER.get()
}

/// Where an engine's steps run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Home {
    /// 0 before the first step.
    pub thread: u64,
    pub stream: StreamId,
}

/// See the module's page.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Shared {
    // What every event touches comes first.
    pub base: Address,
    pub size: Bytes,
    /// What waits for the engine; the engine, once its compiler was dropped before its last buffer or guard.
    pub handover: Handover<Remote, Box<Engine>>,
    pub device: Arc<dyn Device>,
    home: Mutex<Home>,
    /// The engine between steps, for its compiler and for others who are short of memory (`lending`).
    pub idle: Mutex<Option<Box<Engine>>>,
    /// Who made it.
    process: Process,
    /// Whether the steps' stream was destroyed since it was named: its work is done, and its handle may be another
    /// stream's by now.
    is_stream_gone: AtomicBool,
}

impl Shared {
    pub fn new(base: Address, size: Bytes, device: Arc<dyn Device>) -> Self {
        Self {
            base,
            size,
            device,
            idle: Mutex::new(None),
            home: Mutex::default(),
            is_stream_gone: AtomicBool::new(false),
            handover: Handover::new(),
            process: Process::this(),
        }
    }

    /// Whether this process is a forked child of the one that made it: then the rest is the parent's, and what locks
    /// it has may be held for ever.
    pub fn is_inherited(&self) -> bool {
        self.process.is_ancestor()
    }

    /// The address of a unit of the range.
    #[inline]
    pub fn address(&self, start: u32) -> Address {
        Address(self.base.0 + u64::from(start) * ALIGNMENT.0)
    }

    /// The unit of the range at an address in it.
    pub fn unit(&self, address: Address) -> u32 {
        ((address.0 - self.base.0) / ALIGNMENT.0) as u32
    }

    #[inline]
    pub fn contains(&self, address: Address) -> bool {
        address.0.wrapping_sub(self.base.0) < self.size.0
    }

    /// Queues a free; work on `stream`, where one is named, may still use the memory.
    pub fn push_free(
        &self,
        address: Address,
        stream: Option<StreamId>,
        by: By,
    ) -> Result<(), DeviceError> {
        let home = self.home.lock().unwrap_or_else(PoisonError::into_inner);
        let thread = this_thread();
        let abroad = stream.filter(|&stream| *home != Home { thread, stream });
        let Some(stream) = abroad else {
            let fence = None;
            let freed = Freed { address, fence, by };
            self.handover.push(Remote::Freed(freed));
            return Ok(());
        };
        drop(home);
        let fence = Some(self.device.fence(stream)?);
        let freed = Freed { address, fence, by };
        self.handover.push(Remote::Freed(freed));
        Ok(())
    }

    /// Says where the steps run from now on.
    pub fn set_home(&self, home: Home) {
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = home;
    }

    /// A stream is about to be destroyed; if it is the steps', its work is waited for, so that a stream which gets its
    /// handle need not come behind that.
    #[cfg(feature = "cuda")]
    pub fn leave_stream(&self, stream: StreamId) {
        let home = *self.home.lock().unwrap_or_else(PoisonError::into_inner);
        if home.stream != stream || self.device.gpu().is_none() {
            return;
        }
        if let Err(error) = self.device.synchronise() {
            // Where an error stays, nothing runs any more; else this is the last that is known of the stream.
            tracing::warn!(%error, "a stream goes, and its work was not waited for");
        }
        self.is_stream_gone.store(true, Ordering::Release);
    }

    /// Whether the steps' stream was destroyed: then its handle is asked nothing.
    pub fn is_stream_gone(&self) -> bool {
        self.is_stream_gone.load(Ordering::Acquire)
    }

    /// The steps' stream was named again, and lives.
    pub fn stream_is_there(&self) {
        self.is_stream_gone.store(false, Ordering::Release);
    }
}
