//! Layer 5: who wants to know which scopes are open: weights that are pinned while their scope runs.
//!
//! Inside and outside of steps: a model runs the same without a compiler.
//!
//! May import: `bookkeeping`.

use std::any::Any;
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, Weak};

use crate::bookkeeping::Bookkeeping;

/// Is told when a scope opens.
pub trait ScopeWatch: Send + Sync {
    /// A scope has opened on this thread; `path` has the names of all that are open, the outermost
    /// first, without the step. What is returned is dropped when the scope closes.
    ///
    /// What it allocates is served by no step. It may not open scopes.
    fn opened(&self, path: &[String]) -> Option<Box<dyn Any>>;
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
}

/// Has `watch` told of scopes that open from now on, on all threads, until it is dropped.
pub fn watch_scopes(watch: Weak<dyn ScopeWatch>) {
    let _bookkeeping = Bookkeeping::begin();
    let mut watches = WATCHES.write().unwrap_or_else(PoisonError::into_inner);
    watches.retain(|other| other.strong_count() > 0);
    watches.push(watch);
    ANY.store(true, Ordering::Release);
}

/// Tells that a scope opened; returns its number, 0 where nobody watches.
pub(crate) fn opened(name: &str) -> u64 {
    /// Closes the scope again when a watch panics.
    struct Undo(u64);
    impl Drop for Undo {
        fn drop(&mut self) {
            closed(self.0);
        }
    }

    if !ANY.load(Ordering::Acquire) {
        return 0;
    }
    let _bookkeeping = Bookkeeping::begin();
    let watches = WATCHES
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
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
        let kept = watch.opened(&path);
        OPEN.with(|all| {
            if let Some(open) = all.borrow_mut().last_mut() {
                open.kept.extend(kept);
            }
        });
    }
    std::mem::forget(undo);
    number
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
