//! Layer 5: who wants to know which scopes are open: weights that are pinned while their scope runs.
//!
//! Inside and outside of steps: a model runs the same without a compiler.
//!
//! Opening a scope returns no error, and models have scopes deep inside. So a watch that cannot do its work
//! unwinds up to the step, or [`catch_scopes`], which returns the error; elsewhere it is a panic.
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

/// Why a watch could not do its work.
pub type Refusal = Box<dyn std::error::Error + Send + Sync>;

/// Is told when a scope opens.
pub trait ScopeWatch: Send + Sync {
    /// A scope has opened on this thread; `path` has the names of all that are open, the outermost
    /// first, without the step. What is returned is dropped when the scope closes.
    ///
    /// What it allocates is served by no step. It may not open scopes.
    ///
    /// # Errors
    /// When the scope's work cannot run: the step then ends with [`Error::Scope`] and this as its reason.
    fn opened(&self, path: &[String]) -> Result<Option<Box<dyn Any>>, Refusal>;
}

static WATCHES: RwLock<Vec<Weak<dyn ScopeWatch>>> = RwLock::new(Vec::new());
static ANY: AtomicBool = AtomicBool::new(false);

/// A scope that is open while somebody watches.
struct Open {
    number: u64,
    name: String,
    /// What watches keep until it closes.
    kept: Vec<Box<dyn Any>>,
}

/// Scopes opened so far; 0 is none.
static NUMBER: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// Open scopes, the outermost first.
    static OPEN: ManuallyDrop<RefCell<Vec<Open>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };
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

    if !ANY.load(Ordering::Acquire) {
        return Ok(0);
    }
    let _bookkeeping = Bookkeeping::begin();
    let watches = {
        let _section = Section::begin();
        let watches = WATCHES.read().unwrap_or_else(PoisonError::into_inner);
        watches.clone()
    };
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let open = Open {
        number,
        name: name.to_owned(),
        kept: Vec::new(),
    };
    let path: Vec<String> = OPEN.with(|all| {
        let mut all = all.borrow_mut();
        all.push(open);
        all.iter().map(|open| open.name.clone()).collect()
    });
    let undo = Undo(number);
    for watch in watches.iter().filter_map(Weak::upgrade) {
        let kept = watch.opened(&path).map_err(|reason| Error::Scope {
            path: path.join("/"),
            reason: reason.to_string(),
        })?;
        OPEN.with(|all| {
            if let Some(open) = all.borrow_mut().last_mut() {
                open.kept.extend(kept);
            }
        });
    }
    std::mem::forget(undo);
    Ok(number)
}

/// Closes a scope, in whatever order.
pub(crate) fn closed(number: u64) {
    let _bookkeeping = Bookkeeping::begin();
    let open = OPEN.with(|all| {
        let mut all = all.borrow_mut();
        let at = all.iter().rposition(|open| open.number == number)?;
        Some(all.remove(at))
    });
    // Outside of the borrow: what was kept is foreign.
    drop(open);
}
