//! What a forked child has of its parent's devices: the same bytes under the same addresses, and its own to write to.
//!
//! ```text
//!   parent   | p0 | p2 |    | p0 |     shared with the file
//!   child    | p0 | p2 |    | p0 |     private: the file's bytes until the child writes, then a page of its own
//! ```
//!
//! Each run of neighbouring places over neighbouring pieces is mapped anew with one call, before anything else of
//! the child can write there. A place that cannot be mapped anew (the child's limits) may be read only.
//!
//! Invariant: [`DEVICES`] and the books are only locked inside of a [`Section`], so that a child finds them whole
//! and free.
//!
//! May import: `device`, `host`, `host/os`, `bookkeeping`, `units`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::Books;
use super::os::{self, PageFile};
use crate::bookkeeping::Bookkeeping;
use crate::device::fork::Section;
use crate::units::{Address, Bytes};

/// What a child needs of a device, wherever the device itself lies.
struct Living {
    granule: Bytes,
    file: Arc<PageFile>,
    books: Arc<Mutex<Books>>,
}

/// Devices of this process that were not dropped, inherited ones included.
static DEVICES: Mutex<Vec<Living>> = Mutex::new(Vec::new());

fn change(change: impl FnOnce(&mut Vec<Living>)) {
    // Of a long list too nothing is served by a step.
    let _bookkeeping = Bookkeeping::begin();
    let _section = Section::begin();
    change(&mut DEVICES.lock().unwrap_or_else(PoisonError::into_inner));
}

/// Has children of this process own what they inherit of a device.
pub(super) fn enter(granule: Bytes, file: &Arc<PageFile>, books: &Arc<Mutex<Books>>) {
    let (file, books) = (Arc::clone(file), Arc::clone(books));
    let living = Living {
        granule,
        file,
        books,
    };
    change(|devices| devices.push(living));
}

/// Forgets a device that is being dropped.
pub(super) fn leave(books: &Arc<Mutex<Books>>) {
    let mut left = None;
    change(|devices| {
        let at = devices
            .iter()
            .position(|living| Arc::ptr_eq(&living.books, books));
        left = at.map(|at| devices.swap_remove(at));
    });
    drop(left);
}

/// Books that are locked, which no fork finds half changed.
#[derive(Debug)]
pub(super) struct Locked<'h> {
    books: MutexGuard<'h, Books>,
    _section: Section,
}

impl<'h> Locked<'h> {
    pub fn new(books: &'h Mutex<Books>) -> Self {
        let section = Section::begin();
        Self {
            // Books are changed after the last thing that can panic: a poisoned lock guards good ones.
            books: books.lock().unwrap_or_else(PoisonError::into_inner),
            _section: section,
        }
    }
}

impl std::ops::Deref for Locked<'_> {
    type Target = Books;

    fn deref(&self) -> &Books {
        &self.books
    }
}

impl std::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Books {
        &mut self.books
    }
}

/// Neighbouring places over neighbouring pieces.
#[derive(Clone, Copy, Debug)]
struct Run {
    at: Address,
    size: Bytes,
    offset: Bytes,
}

/// In a child, before anything else runs there: makes all inherited places its own. No allocation, and no lock that is
/// waited for.
pub(in super::super) fn own_what_was_inherited() {
    let Some(devices) = locked(&DEVICES) else {
        return;
    };
    for living in devices.iter() {
        if let Some(mut books) = locked(&living.books)
            && !books.is_own_copy
        {
            // At the kernel's limit of mappings this makes room for the first call, and each call then takes as many
            // as it leaves.
            books.hand.give_all();
            own(living, &books);
            books.is_own_copy = true;
        }
    }
}

/// Locks what the fork has waited for. `None` only where a fork was made from within a section.
fn locked<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        // As everywhere else: a panic left them whole.
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn own(living: &Living, books: &Books) {
    let mut run: Option<Run> = None;
    for (&at, place) in &books.places {
        if !place.allowed || place.page.is_none() {
            // Nobody can read or write there, nor be allowed to.
            continue;
        }
        let (size, offset) = (living.granule, Bytes(place.piece * living.granule.0));
        run = Some(match run {
            Some(Run {
                at: first,
                size: before,
                offset: from,
            }) if first.0 + before.0 == at.0 && from.0 + before.0 == offset.0 => Run {
                at: first,
                size: Bytes(before.0 + size.0),
                offset: from,
            },
            ended => {
                own_run(&living.file, ended);
                Run { at, size, offset }
            }
        });
    }
    own_run(&living.file, run);
}

fn own_run(file: &PageFile, run: Option<Run>) {
    let Some(Run { at, size, offset }) = run else {
        return;
    };
    // SAFETY: a device of the parent mapped this range from this file; the child has nothing else there, and one
    // thread, which holds no reference that the same bytes at the same address would not keep true.
    if unsafe { os::make_private(file, at, size, offset) }.is_err() {
        // Better a child that dies than a parent whose buffers change.
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_a_panic_has_passed_is_taken_and_a_held_one_is_not_waited_for() {
        let mutex = Mutex::new(1);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _guard = mutex.lock();
            std::panic::resume_unwind(Box::new(()));
        }));
        assert!(panicked.is_err() && mutex.is_poisoned());
        let held = locked(&mutex);
        assert_eq!(held.as_deref(), Some(&1));
        assert!(locked(&mutex).is_none());
    }
}
