//! Layer 0: the address ranges that somebody of this crate owns, so that a free is told foreign without a lock.
//!
//! ```text
//!   lowest ........................................ highest      two compares tell most frees foreign; of the rest
//!      [ a )          malloc's          [ b )   [ c )            this table says which lie between two ranges
//! ```
//!
//! Sorted by address, and read while it may be changed: a reader that notices a change says "perhaps", and whoever
//! asked looks where there is a lock.
//!
//! Invariant: a range is in the table from before its first address is given to anybody until after the last one came
//! back, and gone from it before the addresses are given back to the system: so ranges in it never overlap.
//!
//! May import: `units`.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use crate::units::{Address, Bytes};

/// Ranges that have room; with more, every answer is "perhaps".
const ROOM: usize = 512;

/// See the module's page.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// Odd while the rest changes.
    version: AtomicU64,
    count: AtomicUsize,
    starts: [AtomicU64; ROOM],
    ends: [AtomicU64; ROOM],
    /// Ranges that found no room. Whoever changes anything holds this.
    left_out: Mutex<usize>,
    has_left_out: AtomicU64,
}

impl Ranges {
    pub const fn new() -> Self {
        Self {
            version: AtomicU64::new(0),
            count: AtomicUsize::new(0),
            starts: [const { AtomicU64::new(0) }; ROOM],
            ends: [const { AtomicU64::new(0) }; ROOM],
            left_out: Mutex::new(0),
            has_left_out: AtomicU64::new(0),
        }
    }

    /// Whether an address lies in a range; perhaps in none where the answer is yes, never in one where it is no.
    pub fn may_contain(&self, address: Address) -> bool {
        let version = self.version.load(Ordering::Acquire);
        let count = self.count.load(Ordering::Relaxed).min(ROOM);
        let starts = &self.starts[..count];
        let behind = starts.partition_point(|start| start.load(Ordering::Relaxed) <= address.0);
        let is_in = behind
            .checked_sub(1)
            .is_some_and(|at| address.0 < self.ends[at].load(Ordering::Relaxed));
        let is_whole = self.has_left_out.load(Ordering::Relaxed) == 0;
        // What was read before is of the version read first if that is still the version.
        fence(Ordering::Acquire);
        let is_same = self.version.load(Ordering::Relaxed) == version && version.is_multiple_of(2);
        is_in || !is_same || !is_whole
    }

    /// Enters a range, which overlaps none.
    pub fn add(&self, base: Address, size: Bytes) {
        self.change(|left_out| {
            let count = self.count.load(Ordering::Relaxed);
            if count == ROOM {
                *left_out += 1;
                return;
            }
            let at = self.position(count, base);
            for to in (at + 1..=count).rev() {
                self.copy(to - 1, to);
            }
            self.starts[at].store(base.0, Ordering::Relaxed);
            self.ends[at].store(base.0.saturating_add(size.0), Ordering::Relaxed);
            self.count.store(count + 1, Ordering::Relaxed);
        });
    }

    /// Takes a range out that was entered, once.
    pub fn remove(&self, base: Address) {
        self.change(|left_out| {
            let count = self.count.load(Ordering::Relaxed);
            let at = self.position(count, base);
            if at == count || self.starts[at].load(Ordering::Relaxed) != base.0 {
                debug_assert!(*left_out > 0, "only what was entered is taken out");
                *left_out = left_out.saturating_sub(1);
                return;
            }
            for to in at..count - 1 {
                self.copy(to + 1, to);
            }
            self.count.store(count - 1, Ordering::Relaxed);
        });
    }

    fn position(&self, count: usize, base: Address) -> usize {
        self.starts[..count].partition_point(|start| start.load(Ordering::Relaxed) < base.0)
    }

    fn copy(&self, from: usize, to: usize) {
        for column in [&self.starts, &self.ends] {
            column[to].store(column[from].load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    fn change(&self, change: impl FnOnce(&mut usize)) {
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        // Whoever reads one of the changes that follow reads the odd version, or a later one, behind its own fence.
        fence(Ordering::Release);
        change(&mut left_out);
        self.has_left_out.store(*left_out as u64, Ordering::Relaxed);
        self.version.store(version + 2, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn an_address_is_found_in_its_range_and_nowhere_else() {
        let ranges = Ranges::new();
        assert!(!ranges.may_contain(Address(0)));
        for base in [500, 100, 300, 200] {
            ranges.add(Address(base), Bytes(50));
        }
        let found = |ranges: &Ranges| {
            let found = (0..700).filter(|&at| ranges.may_contain(Address(at)));
            found.collect::<Vec<u64>>()
        };
        let expected = |bases: &[u64]| {
            let all = bases.iter().flat_map(|&base| base..base + 50);
            all.collect::<Vec<u64>>()
        };
        assert_eq!(found(&ranges), expected(&[100, 200, 300, 500]));
        ranges.remove(Address(200));
        ranges.remove(Address(500));
        assert_eq!(found(&ranges), expected(&[100, 300]));
        ranges.add(Address(200), Bytes(50));
        ranges.remove(Address(100));
        assert_eq!(found(&ranges), expected(&[200, 300]));
    }

    #[test]
    fn with_more_ranges_than_there_is_room_for_every_answer_is_perhaps() {
        let ranges = Ranges::new();
        let all = ROOM as u64 + 3;
        (0..all).for_each(|nth| ranges.add(Address(nth * 100), Bytes(10)));
        assert!(ranges.may_contain(Address(50)));
        // In any order: those that were left out, and others.
        [all - 1, 4, all - 3, 0, all - 2]
            .into_iter()
            .for_each(|nth| ranges.remove(Address(nth * 100)));
        assert!(!ranges.may_contain(Address(50)));
        assert!(!ranges.may_contain(Address(405)));
        assert!(ranges.may_contain(Address(505)));
    }

    #[test]
    fn a_range_that_stays_is_always_found_while_others_come_and_go() {
        let ranges = Ranges::new();
        ranges.add(Address(5_000), Bytes(10));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let changes = scope.spawn(|| {
                for round in 0..20_000_u64 {
                    let base = Address(round % 97 * 100 + 20);
                    ranges.add(base, Bytes(10));
                    ranges.remove(base);
                }
                is_over.store(true, Ordering::SeqCst);
            });
            let mut asked = 0_u64;
            while !is_over.load(Ordering::SeqCst) {
                assert!(ranges.may_contain(Address(5_003)));
                asked += 1;
            }
            changes.join().expect("it ends well");
            println!("asked {asked} times");
        });
        assert!(!ranges.may_contain(Address(5_020)));
    }
}
