//! Which placement is live at which address: one slot for each place that a buffer ever started at.
//!
//! ```text
//!   start  --index-->  slot: the placement that is live there (or none), what its end does to the state
//!                            and to the live bytes, and the placement that the placer knows of
//! ```
//!
//! A replayed alloc or free writes one slot, which has all that a free needs. The placer learns of it
//! later, from the list of slots that changed.
//!
//! May import: `prefetch`.

use crate::prefetch::prefetch;

const NONE: u32 = u32::MAX;
const DIRTY: u32 = 1 << 31;
/// A hook served the buffer to a framework: only a hook may free it.
const HOOKED: u32 = 1 << 30;
/// The rest: a placement + 1.
const NUMBER: u32 = HOOKED - 1;
/// Placements that a slot can name.
pub(crate) const PLACEMENT_LIMIT: u32 = NUMBER;

/// A placement as a slot keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    pub number: u32,
    /// Units of the buffer.
    pub len: u32,
    /// What it is to a state's hash.
    pub mix: u128,
}

/// Half a cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(32))]
struct Slot {
    mix: u128,
    len: u32,
    /// Number of the live placement + 1, 0 for none; the top bit says that the slot is in `dirty`, the
    /// next that the buffer is hooked.
    live: u32,
    /// What the placer knows: number + 1.
    known: u32,
}

/// See the module's page.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct LiveTable {
    slots: Vec<Slot>,
    /// Slots whose `known` may be out of date.
    dirty: Vec<u32>,
    /// Start and slot, at the start's hash or behind it; a power of two of them, at least half empty.
    index: Vec<(u32, u32)>,
    /// Bits of a hash that are no part of an index.
    shift: u32,
}

impl Default for LiveTable {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            dirty: Vec::new(),
            index: vec![(0, NONE); 2],
            shift: 31,
        }
    }
}

impl LiveTable {
    /// Where in the index the search for a start begins: Fibonacci hashing (Knuth, The Art of Computer
    /// Programming 3, 6.4), since starts are multiples of a page more often than not.
    #[inline]
    fn first_try(&self, start: u32) -> usize {
        (start.wrapping_mul(0x9E37_79B1) >> self.shift) as usize
    }

    /// The slot of a unit, if a buffer ever started there.
    #[inline]
    pub fn find(&self, start: u32) -> Option<u32> {
        let mut at = self.first_try(start);
        loop {
            match self.index[at] {
                (_, NONE) => return None,
                (key, slot) if key == start => return Some(slot),
                _ => at = (at + 1) & (self.index.len() - 1),
            }
        }
    }

    /// The slot of a unit, made if need be.
    pub fn slot(&mut self, start: u32) -> u32 {
        if let Some(slot) = self.find(start) {
            return slot;
        }
        let slot = self.slots.len() as u32;
        self.slots.push(Slot::default());
        if self.slots.len() * 2 > self.index.len() {
            let larger = vec![(0, NONE); self.index.len() * 2];
            self.shift -= 1;
            for (start, slot) in std::mem::replace(&mut self.index, larger) {
                if slot != NONE {
                    self.enter(start, slot);
                }
            }
        }
        self.enter(start, slot);
        // A replay never grows it: each slot is in the list at most once.
        let room = self.slots.len() - self.dirty.len();
        self.dirty.reserve(room);
        slot
    }

    fn enter(&mut self, start: u32, slot: u32) {
        let mut at = self.first_try(start);
        while self.index[at].1 != NONE {
            at = (at + 1) & (self.index.len() - 1);
        }
        self.index[at] = (start, slot);
    }

    /// The placement that is live in a slot.
    #[inline]
    pub fn get(&self, slot: u32) -> Option<Live> {
        let slot = &self.slots[slot as usize];
        let number = (slot.live & NUMBER).checked_sub(1)?;
        Some(Live {
            number,
            len: slot.len,
            mix: slot.mix,
        })
    }

    /// Whether a placement is live in a slot.
    pub fn holds(&self, slot: u32, number: u32) -> bool {
        self.slots[slot as usize].live & NUMBER == number + 1
    }

    /// Makes a placement live in its slot; hooked, as a hook serves it.
    #[inline]
    pub fn set(&mut self, slot: u32, live: Live, is_hooked: bool) {
        let entry = &mut self.slots[slot as usize];
        if entry.live & DIRTY == 0 {
            self.dirty.push(slot);
        }
        (entry.mix, entry.len) = (live.mix, live.len);
        entry.live = DIRTY | (live.number + 1) | if is_hooked { HOOKED } else { 0 };
    }

    /// Makes no placement live in a slot.
    #[inline]
    pub fn clear(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        if entry.live & DIRTY == 0 {
            self.dirty.push(slot);
        }
        entry.live = DIRTY;
    }

    /// Marks the live buffer of a slot as served by a hook.
    #[inline]
    pub fn mark_hooked(&mut self, slot: u32) {
        self.slots[slot as usize].live |= HOOKED;
    }

    /// Whether a hook served the live buffer of a slot.
    #[inline]
    pub fn is_hooked(&self, slot: u32) -> bool {
        self.slots[slot as usize].live & HOOKED != 0
    }

    /// Tells the placer what changed: every end first, then every beginning.
    pub fn sync(&mut self, mut end: impl FnMut(u32), mut begin: impl FnMut(u32)) {
        for &slot in &self.dirty {
            let slot = &self.slots[slot as usize];
            if slot.live & NUMBER != slot.known && slot.known != 0 {
                end(slot.known - 1);
            }
        }
        for slot in self.dirty.drain(..) {
            let slot = &mut self.slots[slot as usize];
            slot.live &= !DIRTY;
            let number = slot.live & NUMBER;
            if number != slot.known && number != 0 {
                begin(number - 1);
            }
            slot.known = number;
        }
    }

    /// Makes a placement live that the placer has marked itself.
    pub fn set_known(&mut self, slot: u32, live: Live) {
        let entry = &mut self.slots[slot as usize];
        (entry.mix, entry.len) = (live.mix, live.len);
        entry.live = entry.live & DIRTY | (live.number + 1);
        entry.known = live.number + 1;
    }

    /// Placements that are live.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.live().map(|(_, number)| number)
    }

    /// Slots with the placements that are live there.
    pub fn live(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let slots = (0..).zip(&self.slots);
        slots.filter_map(|(at, slot)| Some((at, (slot.live & NUMBER).checked_sub(1)?)))
    }

    /// Brings what an alloc at a slot and the free of it will touch nearer to the processor.
    #[inline]
    pub fn prefetch(&self, slot: u32, start: u32) {
        prefetch(&self.slots, slot as usize);
        prefetch(&self.index, self.first_try(start));
    }
}

#[cfg(test)]
mod tests {
    use super::{Live, LiveTable};

    fn live(number: u32) -> Live {
        let (len, mix) = (number + 1, u128::from(number) << 64);
        Live { number, len, mix }
    }

    #[test]
    fn every_start_keeps_its_slot_while_the_index_grows() {
        let mut table = LiveTable::default();
        let starts =
            || (0..2_000_u32).flat_map(|at| [at * 4096, at * 4096 + 1 + at % 7, u32::MAX - at]);
        let slots: Vec<u32> = starts().map(|start| table.slot(start)).collect();
        for (start, slot) in starts().zip(&slots) {
            assert_eq!(table.find(start), Some(*slot));
            assert_eq!(table.slot(start), *slot);
        }
        assert_eq!((table.find(4095), table.find(4097 * 4096)), (None, None));
        let distinct: std::collections::HashSet<_> = slots.iter().collect();
        assert_eq!(distinct.len(), slots.len());
    }

    #[test]
    fn sync_reports_only_what_differs_from_what_the_placer_knows() {
        let mut table = LiveTable::default();
        let (a, b) = (table.slot(0), table.slot(8));
        table.set_known(a, live(7));
        table.clear(a);
        table.set(b, live(9), false);
        table.set(a, live(7), true);
        let (mut ends, mut begins) = (Vec::new(), Vec::new());
        table.sync(|number| ends.push(number), |number| begins.push(number));
        assert_eq!((ends, begins), (vec![], vec![9]));
        table.set(a, live(3), false);
        let (mut ends, mut begins) = (Vec::new(), Vec::new());
        table.sync(|number| ends.push(number), |number| begins.push(number));
        assert_eq!((ends, begins), (vec![7], vec![3]));
        assert_eq!(table.iter().collect::<Vec<_>>(), [3, 9]);
        assert_eq!(table.get(a), Some(live(3)));
        table.clear(a);
        assert_eq!((table.get(a), table.holds(b, 9)), (None, true));
    }
}
