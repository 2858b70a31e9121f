//! What all threads may touch of an engine: its range of addresses and the frees that wait for it.
//!
//! May import: layers 0 and 3; `engine`, which it keeps once orphaned.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::device::{Device, Fence};
use crate::units::{ALIGNMENT, Address, Bytes};

/// A free that was made where the engine is not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub address: Address,
    /// Reuse waits for it.
    pub fence: Option<Fence>,
}

/// See the module's page.
#[derive(Debug)]
pub(crate) struct Shared {
    pub base: Address,
    pub size: Bytes,
    pub device: Arc<dyn Device>,
    /// Length of `queue`, so that the engine looks without a lock.
    waiting: AtomicUsize,
    /// Guards that hold the layout.
    pins: AtomicUsize,
    queue: Mutex<Vec<Freed>>,
    /// The engine, once its compiler was dropped before its last buffer.
    pub orphan: Mutex<Option<Box<super::Engine>>>,
}

impl Shared {
    pub fn new(base: Address, size: Bytes, device: Arc<dyn Device>) -> Self {
        Self {
            base,
            size,
            device,
            waiting: AtomicUsize::new(0),
            pins: AtomicUsize::new(0),
            queue: Mutex::new(Vec::new()),
            orphan: Mutex::new(None),
        }
    }

    /// The address of a unit of the range.
    #[inline]
    pub fn address(&self, start: u32) -> Address {
        Address(self.base.0 + u64::from(start) * ALIGNMENT.0)
    }

    #[inline]
    pub fn contains(&self, address: Address) -> bool {
        address.0.wrapping_sub(self.base.0) < self.size.0
    }

    pub fn pin(&self) {
        self.pins.fetch_add(1, Ordering::Relaxed);
    }

    pub fn unpin(&self) {
        self.pins.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether the layout must stay as it is.
    pub fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::Relaxed) > 0
    }

    /// Whether frees wait. A free that another thread is making at this moment may be missed; it is
    /// seen at the next call.
    #[inline]
    pub fn has_frees(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) != 0
    }

    pub fn push_free(&self, freed: Freed) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push(freed);
        self.waiting.store(queue.len(), Ordering::Release);
    }

    pub fn take_frees(&self) -> Vec<Freed> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.store(0, Ordering::Release);
        std::mem::take(&mut *queue)
    }
}
