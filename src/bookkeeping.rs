//! Layer 0: the mark of a thread that works on the books of this crate, whose allocations no step may serve.
//!
//! The thread-local is initialised at compile time and is never dropped, so that an allocator may ask at any
//! time in a thread's life.
//!
//! May import: nothing of this crate.

use std::cell::Cell;

thread_local! {
    /// Guards of this thread.
    static BUSY: Cell<u32> = const { Cell::new(0) };
}

/// While it lives, nothing that this thread allocates is served by a step.
#[derive(Debug)]
pub(crate) struct Bookkeeping(());

impl Bookkeeping {
    pub fn begin() -> Self {
        BUSY.set(BUSY.get() + 1);
        Self(())
    }

    /// Whether this thread has one.
    #[inline]
    pub fn is_going_on() -> bool {
        BUSY.get() > 0
    }
}

impl Drop for Bookkeeping {
    fn drop(&mut self) {
        BUSY.set(BUSY.get() - 1);
    }
}
