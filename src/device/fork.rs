//! What fork(2) may not tear: who made a thing, and work that no child may find half done.
//!
//! ```text
//!   fork     prepare: waits for every section | child                       | parent
//!   child    Process of all that it inherited is_ancestor(): refused, and its drop does nothing
//!            places of each Host become the child's own copies, its active steps are forgotten
//! ```
//!
//! A child has one thread. What its parent's other threads held at the fork is held for ever there, so
//! whatever a child needs is changed inside of a [`Section`]: the fork waits for those to end. All other
//! locks belong to things of one [`Process`], and a child asks that first.
//!
//! Invariants:
//! - a section is short and a leaf: inside of it no lock is taken that anybody holds while entering one, and
//!   nothing foreign is called or dropped;
//! - between the two halves of a fork its thread passes into sections freely: handlers of other libraries,
//!   which may free buffers, run there.
//!
//! A clone(2) that copies the address space and runs no handlers is told by [`Process`] too, but the
//! memory of a `Host` stays its parent's there, and a step that was active still serves the CPU hook. One
//! that shares the address space (vfork(2), posix_spawn(3)) is the same process here.
//!
//! May import: `device/host`.

#![cfg_attr(
    not(target_os = "linux"),
    allow(dead_code, unused_imports, reason = "no handler runs at a fork there")
)]

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

#[cfg(target_os = "linux")]
use super::host::{at_fork, mark, own_what_was_inherited};

/// A process that made something: this one, or one that it was forked from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u64);

#[cfg(target_os = "linux")]
impl Process {
    /// This process. From the first call on, forks of it are seen.
    pub fn this() -> Self {
        if !mark::is_set() {
            // Two threads may both come here: the handlers of the second one find everything done.
            at_fork(prepare, in_parent, in_child);
        }
        Self(mark::this())
    }

    /// Whether this process is a forked child of that one, or a child's child. It costs a load.
    #[inline]
    pub fn is_ancestor(self) -> bool {
        mark::now() != self.0
    }
}

/// Without a `Host` only what was made is told apart; no handler runs at a fork.
#[cfg(not(target_os = "linux"))]
impl Process {
    pub fn this() -> Self {
        Self(std::process::id().into())
    }

    pub fn is_ancestor(self) -> bool {
        Self::this() != self
    }
}

static GATE: RwLock<()> = RwLock::new(());
static FORGET: OnceLock<fn()> = OnceLock::new();

type Held = Cell<Option<RwLockWriteGuard<'static, ()>>>;

thread_local! {
    /// Sections that this thread is in; a fork is one.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Whether this thread forks.
    static IS_FORKING: Cell<bool> = const { Cell::new(false) };
    /// The gate, while it does.
    static HELD: ManuallyDrop<Held> = const { ManuallyDrop::new(Cell::new(None)) };
}

/// While it lives, no other thread forks. They nest.
#[derive(Debug)]
pub(crate) struct Section {
    _gate: Option<RwLockReadGuard<'static, ()>>,
}

impl Section {
    pub fn begin() -> Self {
        let is_outermost = DEPTH.replace(DEPTH.get() + 1) == 0;
        let gate = || GATE.read().unwrap_or_else(PoisonError::into_inner);
        Self {
            _gate: is_outermost.then(gate),
        }
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Has `forget` called in a child, on its only thread, before anything else of this crate runs there. It may
/// not allocate, lock or panic. One function for all; later ones are ignored.
pub(crate) fn forget_in_child(forget: fn()) {
    let _section = Section::begin();
    let _ = FORGET.set(forget);
}

#[cfg(target_os = "linux")]
extern "C" fn prepare() {
    if IS_FORKING.replace(true) {
        return;
    }
    // From within a section (foreign code that should not run there) its own gate would be waited for.
    if DEPTH.replace(DEPTH.get() + 1) == 0 {
        let gate = GATE.write().unwrap_or_else(PoisonError::into_inner);
        HELD.with(|held| held.set(Some(gate)));
    }
}

#[cfg(target_os = "linux")]
extern "C" fn in_parent() {
    if IS_FORKING.replace(false) {
        let_go();
    }
}

/// Only system calls, and memory that is there already.
#[cfg(target_os = "linux")]
extern "C" fn in_child() {
    if IS_FORKING.replace(false) {
        mark::wipe();
        own_what_was_inherited();
        if let Some(forget) = FORGET.get() {
            forget();
        }
        let_go();
    }
}

#[cfg(target_os = "linux")]
fn let_go() {
    DEPTH.set(DEPTH.get() - 1);
    drop(HELD.with(|held| held.take()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_nest_and_a_process_is_no_ancestor_of_its_own() {
        let process = Process::this();
        let outer = Section::begin();
        let inner = Section::begin();
        drop(inner);
        assert_eq!(DEPTH.get(), 1);
        drop(outer);
        assert_eq!(DEPTH.get(), 0);
        assert!(!process.is_ancestor());
        assert_eq!(process, Process::this());
    }
}
