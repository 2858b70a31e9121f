//! What all threads may touch of an engine: its range of addresses and the frees that wait for it.
//!
//! May import: layers 0 and 3, `handover`, and `engine`, which it keeps once orphaned.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Engine;
use super::handover::Handover;
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
    /// Guards that hold the layout.
    pins: AtomicUsize,
    /// Frees that wait for the engine; the engine, once its compiler was dropped before its last buffer.
    pub handover: Handover<Freed, Box<Engine>>,
}

impl Shared {
    pub fn new(base: Address, size: Bytes, device: Arc<dyn Device>) -> Self {
        Self {
            base,
            size,
            device,
            pins: AtomicUsize::new(0),
            handover: Handover::new(),
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
}
