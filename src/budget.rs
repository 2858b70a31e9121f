//! Layer 4: how many bytes of a device steps and weights may own together.
//!
//! ```text
//!   arena of a step graph ──claim, give──┐
//!   weight range          ──claim, give──┤  Budget: used <= limit, at every moment
//!   weight range          ──claim, give──┘
//!        arena short of memory ──relieve──> weights are evicted, lowest priority first
//! ```
//!
//! A page is claimed before it is created and given after it was released, so what the device holds
//! never exceeds what is claimed, whatever fails in between.
//!
//! A budget may lie within another: weights that may take only a part of what they and the steps own
//! together. What is claimed of the inner one is claimed of the outer one too. Only
//! [`WeightRange::pin_beyond`](crate::pager::WeightRange::pin_beyond) goes past the inner limit, never
//! past the outer one.
//!
//! Invariant: `relieve` is called by arenas only and locks the pager; while the pager is locked nothing calls an
//! arena. So the two cannot wait for each other. (Weights that miss memory have idle compilers asked for theirs
//! before they lock the pager again, and an arena that gives memory up asks nobody for any.)
//!
//! May import: `units`.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::units::Bytes;

/// Something that can give memory back when a step needs it.
pub(crate) trait Relief: Debug + Send + Sync {
    /// Gives at least `wanted` bytes back, or as much as it can; returns how many.
    fn relieve(&self, wanted: Bytes) -> Bytes;
}

/// A limit of physical bytes that several owners share. Clones are the same budget.
#[derive(Clone, Debug)]
pub(crate) struct Budget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// `u64::MAX` for none.
    limit: u64,
    used: AtomicU64,
    /// The budget that this one is a part of.
    outer: Option<Budget>,
    /// Grows when an owner gave memory back that others were refused.
    returns: AtomicU64,
    relief: Mutex<Vec<Weak<dyn Relief>>>,
}

impl Budget {
    pub fn new(limit: Option<Bytes>) -> Self {
        Self::part_of(None, limit)
    }

    /// A budget of which all that is claimed is claimed of this one too.
    pub fn part(&self, limit: Option<Bytes>) -> Self {
        Self::part_of(Some(self.clone()), limit)
    }

    fn part_of(outer: Option<Self>, limit: Option<Bytes>) -> Self {
        Self(Arc::new(Inner {
            limit: limit.map_or(u64::MAX, |limit| limit.0),
            used: AtomicU64::new(0),
            outer,
            returns: AtomicU64::new(0),
            relief: Mutex::default(),
        }))
    }

    pub fn limit(&self) -> Bytes {
        Bytes(self.0.limit)
    }

    /// The budget that bounds all: this one, or the one that it is a part of.
    pub fn outermost(&self) -> &Self {
        self.0.outer.as_ref().map_or(self, Self::outermost)
    }

    /// Whether the same bytes bound both.
    pub fn is_part_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.outermost().0, &other.outermost().0)
    }

    /// Bytes that could be claimed now.
    pub fn free(&self) -> Bytes {
        let free = self.limit().saturating_sub(self.used());
        let outer = self.0.outer.as_ref().map(Self::free);
        outer.map_or(free, |outer| outer.min(free))
    }

    pub fn used(&self) -> Bytes {
        Bytes(self.0.used.load(Ordering::Acquire))
    }

    /// Takes `bytes` of the budget, if so many are free.
    pub fn claim(&self, bytes: Bytes) -> bool {
        let limit = self.0.limit;
        let claimed = self
            .0
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                used.checked_add(bytes.0).filter(|&sum| sum <= limit)
            });
        let is_claimed = claimed.is_ok();
        match &self.0.outer {
            Some(outer) if is_claimed && !outer.claim(bytes) => {
                self.0.used.fetch_sub(bytes.0, Ordering::AcqRel);
                false
            }
            _ => is_claimed,
        }
    }

    /// Takes `bytes` past the limit of this part, if the whole has so many free; for memory that is given
    /// back as soon as the work that needs it at once is done.
    pub fn claim_beyond(&self, bytes: Bytes) -> bool {
        let Some(outer) = &self.0.outer else {
            return self.claim(bytes);
        };
        let is_claimed = outer.claim(bytes);
        if is_claimed {
            self.0.used.fetch_add(bytes.0, Ordering::AcqRel);
        }
        is_claimed
    }

    /// Gives claimed bytes back.
    pub fn give(&self, bytes: Bytes) {
        let before = self.0.used.fetch_sub(bytes.0, Ordering::AcqRel);
        debug_assert!(before >= bytes.0, "only claimed bytes are given");
        if let Some(outer) = &self.0.outer {
            outer.give(bytes);
        }
    }

    /// Tells those who were refused that it is worth asking again.
    pub fn note_return(&self) {
        self.outermost().0.returns.fetch_add(1, Ordering::AcqRel);
    }

    /// How often [`note_return`](Self::note_return) was called.
    pub fn returns(&self) -> u64 {
        self.outermost().0.returns.load(Ordering::Acquire)
    }

    /// Has `relief` asked when a step is short of memory.
    pub fn add_relief(&self, relief: Weak<dyn Relief>) {
        let mut all = self.0.relief.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(relief);
    }

    /// Has weights evicted until `wanted` bytes were given back; returns how many were.
    pub fn relieve(&self, wanted: Bytes) -> Bytes {
        let all = self
            .0
            .relief
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut given = Bytes::ZERO;
        for relief in all.iter().filter_map(Weak::upgrade) {
            if given < wanted {
                given.0 += relief.relieve(wanted.saturating_sub(given)).0;
            }
        }
        given
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_past_the_limit_takes_nothing() {
        let budget = Budget::new(Some(Bytes(10)));
        assert!(budget.claim(Bytes(6)));
        assert!(!budget.clone().claim(Bytes(5)));
        assert_eq!(budget.free(), Bytes(4));
        budget.give(Bytes(6));
        assert!(budget.claim(Bytes(10)));
        let unlimited = Budget::new(None);
        assert!(unlimited.claim(Bytes(u64::MAX)));
        assert!(!unlimited.claim(Bytes(1)));
    }
    #[test]
    fn a_part_is_bounded_by_itself_and_by_the_whole() {
        let whole = Budget::new(Some(Bytes(10)));
        let part = whole.part(Some(Bytes(6)));
        assert!(part.claim(Bytes(4)));
        assert_eq!((whole.used(), part.free()), (Bytes(4), Bytes(2)));
        assert!(!part.claim(Bytes(3)));
        assert!(whole.claim(Bytes(5)));
        assert_eq!(part.free(), Bytes(1));
        assert!(!part.claim(Bytes(2)));
        assert_eq!((whole.used(), part.used()), (Bytes(9), Bytes(4)));
        whole.give(Bytes(3));
        assert!(part.claim_beyond(Bytes(4)));
        assert!(!part.claim_beyond(Bytes(1)));
        part.give(Bytes(8));
        assert_eq!((whole.used(), part.used()), (Bytes(2), Bytes::ZERO));
        // A budget that is part of none has nothing beyond it.
        assert!(!whole.claim_beyond(Bytes(9)));
    }
}
