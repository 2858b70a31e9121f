//! What passes between an engine and other threads: frees and ends of pins that wait for it, and the engine
//! itself once its compiler is gone.
//!
//! ```text
//!   another thread:   push ─────────────┐ then reap: is the engine an orphan? serve it
//!                                       v
//!                     queue of frees ───┴──> take: the owner, at its next event
//!   compiler dropped: leave, then reap: with the last buffer the engine goes
//! ```
//!
//! Whoever finishes last ends the engine, exactly once, and nobody waits for anybody: `reap` finds the
//! engine held and goes away, because the holder looks again after letting go. Checked by `loom` under
//! every interleaving of small programs: `RUSTFLAGS="--cfg loom" cargo test --release --lib handover`.
//!
//! May import: nothing of this crate.

#[cfg(all(loom, test))]
use loom::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering, fence},
};
#[cfg(not(all(loom, test)))]
use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering, fence},
};
use std::sync::{PoisonError, TryLockError};

/// See the module's page. `F` is a free, `E` an engine.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Handover<F, E> {
    /// Length of `queue`, so that the engine looks without a lock.
    waiting: AtomicUsize,
    queue: Mutex<Vec<F>>,
    /// The engine, from its compiler's drop to its last buffer.
    orphan: Mutex<Option<E>>,
}

impl<F, E> Handover<F, E> {
    pub fn new() -> Self {
        Self {
            waiting: AtomicUsize::new(0),
            queue: Mutex::new(Vec::new()),
            orphan: Mutex::new(None),
        }
    }

    /// Whether frees wait. A free that another thread is making at this moment may be missed; it is
    /// seen at the next call.
    #[inline]
    pub fn has_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) != 0
    }

    /// Queues a free. [`reap`](Self::reap) comes next, unless the caller is the owner.
    pub fn push(&self, freed: F) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push(freed);
        self.waiting.store(queue.len(), Ordering::Release);
    }

    /// Takes all frees that wait.
    pub fn take(&self) -> Vec<F> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.store(0, Ordering::Release);
        std::mem::take(&mut *queue)
    }

    /// Leaves the engine to whoever frees its last buffer. [`reap`](Self::reap) comes next.
    pub fn leave(&self, engine: E) {
        *self.orphan.lock().unwrap_or_else(PoisonError::into_inner) = Some(engine);
    }

    /// Lets an orphaned engine take its frees; hands it out when `serve` says that it has no buffer left.
    ///
    /// Never waits: whoever holds the engine looks again after letting go of it, and the fences order that
    /// look behind every free whose thread found the engine held. So a free that comes out of the engine's
    /// own work (a logger's buffer, say) cannot wait for itself.
    pub fn reap(&self, mut serve: impl FnMut(&mut E) -> bool) -> Option<E> {
        loop {
            fence(Ordering::SeqCst);
            let mut orphan = match self.orphan.try_lock() {
                Ok(orphan) => orphan,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            let is_done = serve(orphan.as_mut()?);
            if is_done {
                return orphan.take();
            }
            drop(orphan);
            fence(Ordering::SeqCst);
            if !self.has_waiting() {
                return None;
            }
        }
    }
}

#[cfg(all(loom, test))]
mod tests {
    //! An engine here is the number of its live buffers and of the guards that pin it; a free is worth one, and
    //! so is the end of a guard.

    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use super::Handover;

    struct World {
        handover: Handover<(), usize>,
        ended: AtomicUsize,
        /// Touched where a thread may be interrupted that loom would not: it does not switch between
        /// taking frees and letting go of the engine. Relaxed, so that it orders nothing.
        point: AtomicUsize,
    }

    impl World {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                handover: Handover::new(),
                ended: AtomicUsize::new(0),
                point: AtomicUsize::new(0),
            })
        }

        fn free(&self) {
            self.handover.push(());
            self.point.fetch_add(1, Ordering::Relaxed);
            self.reap();
        }

        fn reap(&self) {
            let done = self.handover.reap(|live| {
                *live -= self.handover.take().len();
                self.point.fetch_add(1, Ordering::Relaxed);
                *live == 0
            });
            if done.is_some() {
                self.ended.fetch_add(1, Ordering::SeqCst);
            }
        }

        fn orphan(&self, live: usize) {
            self.handover.leave(live);
            self.reap();
        }
    }

    /// Every interleaving with at most three switches that no thread asked for, and every value that a
    /// load may then see.
    fn model(program: impl Fn() + Send + Sync + 'static) {
        let count = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let counted = std::sync::Arc::clone(&count);
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            program();
        });
        println!("{count:?} executions");
    }

    fn ends_once(world: &World) {
        assert_eq!(world.ended.load(Ordering::SeqCst), 1, "the engine ended");
        assert!(!world.handover.has_waiting(), "no free is left");
    }

    #[test]
    fn two_threads_free_the_last_buffers_of_an_orphan() {
        model(|| {
            let world = World::new();
            world.orphan(2);
            let threads = [(); 2].map(|()| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.free())
            });
            threads.map(|thread| thread.join().unwrap());
            ends_once(&world);
        });
    }

    #[test]
    fn a_buffer_is_freed_while_the_compiler_is_dropped() {
        model(|| {
            let world = World::new();
            let threads = [(); 2].map(|()| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.free())
            });
            world.orphan(2);
            threads.map(|thread| thread.join().unwrap());
            ends_once(&world);
        });
    }

    #[test]
    fn the_owner_takes_frees_and_then_goes() {
        model(|| {
            let world = World::new();
            let other = {
                let world = Arc::clone(&world);
                thread::spawn(move || {
                    world.free();
                    world.free();
                })
            };
            let mut live = 2;
            for _event in 0..2 {
                if world.handover.has_waiting() {
                    live -= world.handover.take().len();
                }
            }
            world.orphan(live);
            other.join().unwrap();
            ends_once(&world);
        });
    }

    #[test]
    fn a_free_from_within_the_engines_own_work_does_not_wait_for_itself() {
        model(|| {
            let world = World::new();
            world.orphan(2);
            let other = {
                let world = Arc::clone(&world);
                thread::spawn(move || world.free())
            };
            let mut nested = false;
            world.handover.push(());
            let done = world.handover.reap(|live| {
                *live -= world.handover.take().len();
                if *live > 0 && !std::mem::replace(&mut nested, true) {
                    // As a logger's buffer would: the engine is held by this very thread.
                    assert!(world.handover.reap(|_| true).is_none());
                }
                *live == 0
            });
            if done.is_some() {
                world.ended.fetch_add(1, Ordering::SeqCst);
            }
            other.join().unwrap();
            ends_once(&world);
        });
    }
}
