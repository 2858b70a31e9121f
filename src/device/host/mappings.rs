//! How many mappings of the kernel the ranges of [`Host`](super::Host) are, and how a place goes where the
//! kernel allows no further one.
//!
//! ```text
//!   places     | .. | p4 | p5 | p6 | .. | p9 | p4 |       gap, 4..7, gap, 9, 4: five mappings, the gap
//!                 gap \___one____/  gap                    at the end of the range is the sixth
//! ```
//!
//! Neighbours are one mapping where both are gaps, or where both have the same access and the pieces under
//! them follow one another. So the count changes by the borders at the ends of what changed and inside it.
//! `tests/host_mappings.rs` holds it to `/proc/self/maps`.
//!
//! **Ghosts.** Taking a place out of the middle of a mapping leaves two more of them, and at its limit the
//! kernel refuses. Then the place is gone from the books and the kernel's mapping stays: a *ghost*. It goes
//! when something is mapped over it, when its neighbours go, or with the range, which one call takes away
//! whatever is in it. Its memory goes as that of any page does; its piece is no other page's until then.
//! So `unmap`, `release` and `unreserve` never fail for want of mappings.
//!
//! May import: `os`, `device`, `units`.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use super::os::{Errno, Spare};
use super::{Books, Call, DeviceError, PageId, Place, invalid};
use crate::units::{Address, Bytes};

/// Mappings that the ranges of all `Host`s of the process are.
static IN_PROCESS: AtomicU64 = AtomicU64::new(0);

/// Mappings kept to be given up: a place in the middle of a mapping takes two more for good, and a third while
/// the kernel is at it; one is left after that.
const SPARES: usize = 4;

/// The limit of proc_sys_vm(5), or the kernel's default where it cannot be read.
pub(super) fn kernel_limit() -> u64 {
    const DEFAULT: u64 = 65_530;
    let text = fs::read_to_string("/proc/sys/vm/max_map_count");
    text.ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(DEFAULT)
}

/// Mappings of all ranges of the process.
pub(super) fn in_process() -> u64 {
    IN_PROCESS.load(Ordering::Relaxed)
}

/// What is in hand for the time when the kernel allows no further mapping, and who haunts.
#[derive(Debug, Default)]
pub(super) struct Hand {
    spares: Vec<Spare>,
    /// Pieces under ghosts: how many there are, and whether the page has been released since.
    haunted: BTreeMap<u64, (u64, bool)>,
    /// Mappings that these ranges are.
    count: u64,
}

impl Hand {
    /// Takes as many spare mappings in hand as there should be; fewer, where the kernel has no more.
    pub(super) fn fill(&mut self) {
        while self.spares.len() < SPARES
            && let Ok(spare) = Spare::new()
        {
            self.spares.push(spare);
        }
    }

    /// Gives all spare mappings up, in a forked child, which needs none. No allocation.
    pub(super) fn give_all(&mut self) {
        self.spares.clear();
    }

    /// Makes a call that takes mappings away, and may need some for that.
    pub(super) fn lend(&mut self, make: impl Fn() -> Result<(), Errno>) -> Result<(), Errno> {
        let mut made = make();
        // One is lent for a moment where nothing is split: `mmap` wants room before it looks. More, for a split,
        // only if one is left after it, so that the former always works.
        let few = self.spares.len().saturating_sub(1);
        let many = if few + 1 == SPARES { 1 } else { few };
        for left in [few, many] {
            if made == Err(libc::ENOMEM) && self.spares.len() > left {
                self.spares.truncate(left);
                made = make();
            }
        }
        self.fill();
        made
    }

    /// Mappings that the ranges of this device are.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    fn change(&mut self, before: u64, after: u64) {
        self.count = self.count + after - before;
        // Wrapping, as an unsigned counter does.
        IN_PROCESS.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        self.change(self.count, 0);
    }
}

impl Books {
    /// Counts what `change` does to the mappings at `at .. at + size`, which lies in one range.
    pub(super) fn counted<T>(
        &mut self,
        at: Address,
        size: Bytes,
        granule: Bytes,
        change: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let before = self.borders(at, size, granule);
        let made = change(self);
        let after = self.borders(at, size, granule);
        self.hand.change(before, after);
        made
    }

    /// A range was reserved: one gap.
    pub(super) fn count_range(&mut self) {
        self.hand.change(0, 1);
    }

    /// A range went, and with it the ghosts in it.
    pub(super) fn uncount_range(&mut self, base: Address, size: Bytes, granule: Bytes) {
        let end = Address(base.0 + size.0);
        let ghosts: Vec<Address> = self.places.range(base..end).map(|(&at, _)| at).collect();
        self.counted(base, size, granule, |books| {
            ghosts.iter().for_each(|&at| books.take_out(at));
        });
        self.hand.change(1, 0);
    }

    /// The piece under the first of these pages, and how many of them follow one another there and can be
    /// mapped from `at` on.
    pub(super) fn neighbours(
        &self,
        at: Address,
        pages: &[PageId],
        granule: Bytes,
    ) -> Result<(u64, u64), DeviceError> {
        let piece = |page| self.pages.get(page).map(|page| page.piece);
        let first = piece(&pages[0]).ok_or(invalid(Call::Map, "no such page lives"))?;
        let row = (first..).zip(pages);
        let pieces = row.take_while(|&(next, page)| piece(page) == Some(next));
        let count = pieces.count() as u64;
        let mut places = self.places.range(at..Address(at.0 + count * granule.0));
        let taken = places.find(|(_, place)| place.page.is_some());
        let free = taken.map_or(count, |(place, _)| (place.0 - at.0) / granule.0);
        if free == 0 {
            return Err(invalid(Call::Map, "the place is mapped already"));
        }
        Ok((first, free))
    }

    /// Borders of mappings inside `at .. at + size` and at its ends, the ends of a range left out: they are
    /// borders in any case.
    fn borders(&self, at: Address, size: Bytes, granule: Bytes) -> u64 {
        let range = self.ranges.range(..=at).next_back();
        let (_, range) = range.expect("the caller has found the range");
        let (base, end) = (range.base().0, range.base().0 + range.size().0);
        let first = at.0.saturating_sub(granule.0).max(base);
        let last = (at.0 + size.0 + granule.0).min(end);
        let mut borders = 0;
        let mut left: Option<Place> = None;
        // Where `left` ends; gaps between places are skipped.
        let mut next = first;
        for (&place, seen) in self.places.range(Address(first)..Address(last)) {
            let is_neighbour = place.0 == next;
            borders += match left.filter(|_| is_neighbour) {
                Some(left) => u64::from(!left.is_one_with(*seen)),
                // A gap ends here, and began where the place before it ended.
                None => u64::from(place.0 > first) + u64::from(left.is_some()),
            };
            left = Some(*seen);
            next = place.0 + granule.0;
        }
        borders + u64::from(left.is_some() && next < last)
    }

    /// Takes the mappings at `at .. at + size` away, which are all of one range, with the ghosts beside them.
    pub(super) fn clear(&mut self, at: Address, size: Bytes, granule: Bytes) -> Result<(), Errno> {
        let Self {
            ranges,
            places,
            hand,
            ..
        } = self;
        let (_, range) = ranges
            .range(..=at)
            .next_back()
            .expect("the caller found it");
        let is_ghost = |at: u64| {
            let place = places.get(&Address(at));
            range.contains(Address(at), granule) && place.is_some_and(|place| place.page.is_none())
        };
        let (mut first, mut end) = (at.0, at.0 + size.0);
        while is_ghost(first - granule.0) {
            first -= granule.0;
        }
        while is_ghost(end) {
            end += granule.0;
        }
        let (first, whole) = (Address(first), Bytes(end - first));
        match hand.lend(|| range.clear(first, whole)) {
            Ok(()) => self.counted(first, whole, granule, |books| {
                for at in (first.0..end).step_by(granule.0 as usize) {
                    books.take_out(Address(at));
                }
            }),
            Err(libc::ENOMEM) => self.haunt(at, size),
            Err(code) => return Err(code),
        }
        Ok(())
    }

    /// A mapping is gone: one that stands in the books, or a ghost.
    pub(super) fn take_out(&mut self, at: Address) {
        match self.places.remove(&at) {
            Some(Place {
                page: Some(page), ..
            }) => self.take_down(page),
            Some(Place { piece, .. }) => {
                let haunted = self.hand.haunted.get_mut(&piece);
                let (ghosts, is_released) = haunted.expect("a ghost is counted");
                *ghosts -= 1;
                if *ghosts == 0 {
                    if *is_released {
                        self.pieces.give(piece);
                    }
                    self.hand.haunted.remove(&piece);
                }
            }
            None => {}
        }
    }

    fn take_down(&mut self, page: PageId) {
        let page = self.pages.get_mut(&page);
        page.expect("a mapped page lives").place_count -= 1;
    }

    /// The kernel keeps what the books forget.
    fn haunt(&mut self, at: Address, size: Bytes) {
        let mut pages = Vec::new();
        for (_, place) in self.places.range_mut(at..Address(at.0 + size.0)) {
            pages.push(place.page.take().expect("every granule is mapped"));
            self.hand.haunted.entry(place.piece).or_default().0 += 1;
        }
        pages.into_iter().for_each(|page| self.take_down(page));
    }

    /// A piece belongs to no page any more; to the next one only when no ghost has it.
    pub(super) fn give_piece(&mut self, piece: u64) {
        match self.hand.haunted.get_mut(&piece) {
            Some((_, is_released)) => *is_released = true,
            None => self.pieces.give(piece),
        }
    }
}
