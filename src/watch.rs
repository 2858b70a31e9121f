//! Layer 5: who wants to know which scopes are open: weights that are pinned while their scope runs.
//!
//! Inside and outside of steps: a model runs the same without a compiler.
//!
//! Opening a scope returns no error, and models have scopes deep inside. So a watch that cannot do its work
//! unwinds up to the step, or [`catch_scopes`], which returns the error; elsewhere it is a panic.
//!
//! A watch is lent the names of the open scopes, so that opening one costs the same at any depth.
//!
//! May import: layer 0; `bookkeeping`, `device/fork`.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, Weak};

use crate::bookkeeping::Bookkeeping;
use crate::device::fork::Section;
use crate::error::Error;
use crate::path;

/// Why a watch could not do its work.
pub type Refusal = Box<dyn std::error::Error + Send + Sync>;

/// Is told when a scope opens.
pub trait ScopeWatch: Send + Sync {
    /// A scope has opened on this thread; `path` has the names of all that are open, the outermost
    /// first, without the step. What is returned is dropped when the scope closes.
    ///
    /// What it allocates is served by no step. It may not open scopes: of those that it does, no watch is told.
    ///
    /// # Errors
    /// When the scope's work cannot run: the step then ends with [`Error::Scope`] and this as its reason.
    fn opened(&self, path: &[String]) -> Result<Option<Box<dyn Any>>, Refusal>;
}

static WATCHES: RwLock<Vec<Weak<dyn ScopeWatch>>> = RwLock::new(Vec::new());
static ANY: AtomicBool = AtomicBool::new(false);

/// The scopes of a thread, the outermost first. One that was closed before those in it stays, marked, until the next
/// one opens; the last one is open.
struct Scopes {
    names: Vec<String>,
    /// As long as `names`, but while those are lent.
    opened: Vec<Opened>,
    closed: usize,
    /// Whether watches are being told, and have the names.
    is_lent: bool,
}

/// A scope that was opened while somebody watches.
struct Opened {
    number: u64,
    /// What watches keep until it closes; `None` when it has.
    kept: Option<Vec<Box<dyn Any>>>,
}

impl Scopes {
    const fn new() -> Self {
        Self {
            names: Vec::new(),
            opened: Vec::new(),
            closed: 0,
            is_lent: false,
        }
    }

    /// Forgets the closed ones: those at the end, or all where another one is about to open.
    fn tidy(&mut self, all: bool) {
        if self.is_lent || self.closed == 0 {
            return;
        }
        let is_closed = |opened: &Opened| opened.kept.is_none();
        while self.opened.last().is_some_and(is_closed) {
            self.opened.pop();
            self.names.pop();
            self.closed -= 1;
        }
        if all && self.closed > 0 {
            let mut opened = self.opened.iter();
            self.names.retain(|_| !opened.next().is_some_and(is_closed));
            self.opened.retain(|opened| !is_closed(opened));
            self.closed = 0;
        }
    }
}

/// The names of a thread's open scopes, which go back when this is dropped.
struct Lent(Vec<String>);

impl Drop for Lent {
    fn drop(&mut self) {
        OPEN.with(|all| {
            let mut all = all.borrow_mut();
            all.names = std::mem::take(&mut self.0);
            all.is_lent = false;
            all.tidy(false);
        });
    }
}

/// Scopes opened so far; 0 is none.
static NUMBER: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static OPEN: ManuallyDrop<RefCell<Scopes>> =
        const { ManuallyDrop::new(RefCell::new(Scopes::new())) };
    /// How many callers up the stack return the error of a scope.
    static CATCHING: Cell<u32> = const { Cell::new(0) };
}

/// What unwinds from a scope that could not open.
struct Unwinding(Error);

/// Runs `f` and returns the error of a scope that could not open inside, as a step does: for work on weights that
/// is no step.
///
/// The error comes here by unwinding, on this thread: a scope that cannot open on another thread panics there, and in a
/// program that aborts on panics it aborts, with the error as its text.
///
/// # Errors
/// [`Error::Scope`].
///
/// # Panics
/// When `f` does.
pub fn catch_scopes<T>(f: impl FnOnce() -> T) -> Result<T, Error> {
    CATCHING.set(CATCHING.get() + 1);
    // What `f` had borrowed is left as an early return leaves it.
    let result = catch_unwind(AssertUnwindSafe(f));
    CATCHING.set(CATCHING.get() - 1);
    result.or_else(|payload| match payload.downcast::<Unwinding>() {
        Ok(unwinding) => Err(unwinding.0),
        Err(payload) => resume_unwind(payload),
    })
}

/// Leaves everything up to the step that returns the error.
///
/// # Panics
/// Where nobody catches it, or the program aborts on panics: with the error as its text.
pub(crate) fn unwind(error: Error) -> ! {
    if CATCHING.get() == 0 || cfg!(panic = "abort") {
        panic!("{error}");
    }
    resume_unwind(Box::new(Unwinding(error)))
}

/// Has `watch` told of scopes that open from now on, on all threads, until it is dropped.
pub fn watch_scopes(watch: Weak<dyn ScopeWatch>) {
    let _bookkeeping = Bookkeeping::begin();
    let _section = Section::begin();
    let mut watches = WATCHES.write().unwrap_or_else(PoisonError::into_inner);
    watches.retain(|other| other.strong_count() > 0);
    watches.push(watch);
    ANY.store(true, Ordering::Release);
}

/// Tells that a scope opened; returns its number, 0 where nobody watches.
///
/// # Errors
/// The refusal of a watch; the scope is closed again.
pub(crate) fn opened(name: &str) -> Result<u64, Error> {
    /// Closes the scope again when a watch refuses or panics.
    struct Undo(u64);
    impl Drop for Undo {
        fn drop(&mut self) {
            closed(self.0);
        }
    }

    if !ANY.load(Ordering::Acquire) || OPEN.with(|all| all.borrow().is_lent) {
        return Ok(0);
    }
    let _bookkeeping = Bookkeeping::begin();
    let watches = {
        let _section = Section::begin();
        let watches = WATCHES.read().unwrap_or_else(PoisonError::into_inner);
        watches.clone()
    };
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let names = OPEN.with(|all| {
        let mut all = all.borrow_mut();
        all.tidy(true);
        let kept = Some(Vec::new());
        all.opened.push(Opened { number, kept });
        all.names.push(name.to_owned());
        all.is_lent = true;
        std::mem::take(&mut all.names)
    });
    // Dropped in this order where a watch refuses or panics: first the names go back.
    let undo = Undo(number);
    let lent = Lent(names);
    for watch in watches.iter().filter_map(Weak::upgrade) {
        let kept = watch.opened(&lent.0).map_err(|reason| Error::Scope {
            path: path::text_of(&lent.0),
            reason: reason.to_string(),
        })?;
        OPEN.with(|all| {
            let mut all = all.borrow_mut();
            if let Some(all_kept) = all.opened.last_mut().and_then(|last| last.kept.as_mut()) {
                all_kept.extend(kept);
            }
        });
    }
    drop(lent);
    std::mem::forget(undo);
    Ok(number)
}

/// Closes a scope, in whatever order.
pub(crate) fn closed(number: u64) {
    let _bookkeeping = Bookkeeping::begin();
    let kept = OPEN.with(|all| {
        let mut all = all.borrow_mut();
        // A thread's scopes are numbered as they open.
        let at = all
            .opened
            .binary_search_by_key(&number, |opened| opened.number);
        let kept = all.opened[at.ok()?].kept.take()?;
        all.closed += 1;
        all.tidy(false);
        Some(kept)
    });
    // Outside of the borrow: what was kept is foreign.
    drop(kept);
}
