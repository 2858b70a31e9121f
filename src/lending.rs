//! Layer 5: what a compiler that is in no step lends to one that is.
//!
//! ```text
//!   between steps    Shared::idle has the engine     who is short locks it, and has idle frames trimmed
//!   in a step        the thread has it (`current`)   nothing to lend
//!   compiler gone    Shared::handover has it         the same as between steps
//! ```
//!
//! The lender's addresses stay recorded, as after [`Compiler::trim`](crate::Compiler::trim): its next step maps pages
//! under them again, which are counted there.
//!
//! Invariants:
//! - who holds the lock of `idle` takes no memory and waits for no other compiler; an owner waits for whoever is
//!   borrowing, a borrower for nobody for long ([`lock_soon`]);
//! - a layout is pinned under that lock, and a pinned one lends nothing.
//!
//! May import: `engine`, `current`, and below.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use crate::accounts::{Lender, lock_soon};
use crate::bookkeeping::Bookkeeping;
use crate::current;
use crate::engine::{Engine, Shared};
use crate::units::Bytes;

impl Lender for Shared {
    fn lend(&self, wanted: Bytes) {
        if let Some(mut idle) = lock_soon(&self.idle)
            && let Some(engine) = &mut *idle
        {
            engine.lend(wanted);
            return;
        }
        current::reap_lending(self, wanted);
    }
}

/// Keeps a new compiler's engine, and lends from it.
pub(crate) fn offer(shared: &Arc<Shared>, engine: Box<Engine>) {
    let lender: Weak<Shared> = Arc::downgrade(shared);
    engine.account().set_lender(lender);
    Idle::lock(shared).put(engine);
}

/// The engine of a compiler between steps, held by its compiler: nobody borrows from it meanwhile.
pub(crate) struct Idle<'s>(MutexGuard<'s, Option<Box<Engine>>>);

impl<'s> Idle<'s> {
    pub fn lock(shared: &'s Shared) -> Self {
        let _bookkeeping = Bookkeeping::begin();
        Self(shared.idle.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn is_none(&self) -> bool {
        self.0.is_none()
    }

    pub fn put(&mut self, engine: Box<Engine>) {
        *self.0 = Some(engine);
    }

    /// For a step, or the end. What is given back before this goes, those have who would borrow.
    pub fn take(&mut self) -> Box<Engine> {
        self.0.take().expect("looked for where this is made")
    }
}

impl Deref for Idle<'_> {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        self.0.as_deref().expect("looked for where this is made")
    }
}

impl DerefMut for Idle<'_> {
    fn deref_mut(&mut self) -> &mut Engine {
        self.0
            .as_deref_mut()
            .expect("looked for where this is made")
    }
}
