//! Which placement is live at which address: one slot for each place that a buffer ever started at.
//!
//! ```text
//!   page  ->  slot of its first unit                  (every page that a buffer starts at)
//!         ->  unit -> number -> slot of that unit     (only pages with small buffers)
//!   slot  ->  the placement that is live there, or none; whether the placer knows
//! ```
//!
//! A replayed alloc or free writes one slot. The placer learns of it later, from the list of slots
//! that changed.
//!
//! May import: nothing of this crate.

const NONE: u32 = u32::MAX;
const DIRTY: u32 = 1 << 31;
/// The buffer is a block of the global allocator: only that may free it.
const HOOKED: u32 = 1 << 30;
/// The rest: a placement + 1.
const NUMBER: u32 = HOOKED - 1;
/// Placements that an entry can name.
pub(crate) const PLACEMENT_LIMIT: u32 = NUMBER;

#[derive(Clone, Copy, Debug)]
struct PageSlots {
    first: u32,
    /// Index in `inner`.
    inner: u32,
}

/// The slots of a page's units but the first. Two steps, because most units have none.
#[derive(Debug)]
struct InnerSlots {
    /// For each unit, index in `slots` + 1.
    numbers: Box<[u16]>,
    slots: Vec<u32>,
}

/// Most units of a page: what `InnerSlots` can number.
pub(crate) const PAGE_UNITS_LIMIT: u32 = 1 << 16;

/// See the module's page.
#[derive(Debug)]
pub(crate) struct LiveTable {
    /// A page has 2 to this many units.
    shift: u32,
    /// First page of the upper half, whose pages are counted from there.
    split: u32,
    pages: [Vec<PageSlots>; 2],
    inner: Vec<InnerSlots>,
    /// Number of the live placement + 1, 0 for none; the top bit says that the slot is in `dirty`, the
    /// next that the buffer is hooked.
    slots: Vec<u32>,
    /// What the placer knows of each slot: number + 1.
    known: Vec<u32>,
    dirty: Vec<u32>,
}

impl LiveTable {
    pub fn new(page_units: u32, split: u32) -> Self {
        debug_assert!(page_units <= PAGE_UNITS_LIMIT);
        Self {
            shift: page_units.trailing_zeros(),
            split,
            pages: [Vec::new(), Vec::new()],
            inner: Vec::new(),
            slots: Vec::new(),
            known: Vec::new(),
            dirty: Vec::new(),
        }
    }

    #[inline]
    fn index(&self, start: u32) -> (usize, usize, u32) {
        let page = start >> self.shift;
        let half = usize::from(page >= self.split);
        let in_half = if half == 1 { page - self.split } else { page };
        (half, in_half as usize, start & ((1 << self.shift) - 1))
    }

    /// The slot of a unit, if a buffer ever started there.
    #[inline]
    pub fn find(&self, start: u32) -> Option<u32> {
        let (half, page, unit) = self.index(start);
        let page = self.pages[half].get(page)?;
        if unit == 0 {
            return (page.first != NONE).then_some(page.first);
        }
        let inner = self.inner.get(page.inner as usize)?;
        let number = usize::from(inner.numbers[unit as usize]).checked_sub(1)?;
        Some(inner.slots[number])
    }

    /// The slot of a unit, made if need be.
    pub fn slot(&mut self, start: u32) -> u32 {
        if let Some(slot) = self.find(start) {
            return slot;
        }
        let slot = self.slots.len() as u32;
        let (half, number, unit) = self.index(start);
        let pages = &mut self.pages[half];
        if number >= pages.len() {
            pages.resize(
                number + 1,
                PageSlots {
                    first: NONE,
                    inner: NONE,
                },
            );
        }
        let page = &mut pages[number];
        if unit == 0 {
            page.first = slot;
        } else {
            if page.inner == NONE {
                page.inner = self.inner.len() as u32;
                let numbers = vec![0; 1 << self.shift].into_boxed_slice();
                self.inner.push(InnerSlots {
                    numbers,
                    slots: Vec::new(),
                });
            }
            let inner = &mut self.inner[page.inner as usize];
            inner.slots.push(slot);
            inner.numbers[unit as usize] = inner.slots.len() as u16;
        }
        self.slots.push(0);
        self.known.push(0);
        // A replay never grows it: each slot is in the list at most once.
        let room = self.slots.len() - self.dirty.len();
        self.dirty.reserve(room);
        slot
    }

    /// The placement that is live in a slot.
    #[inline]
    pub fn get(&self, slot: u32) -> Option<u32> {
        (self.slots[slot as usize] & NUMBER).checked_sub(1)
    }

    /// Makes a placement live in its slot, or none.
    #[inline]
    pub fn set(&mut self, slot: u32, placement: Option<u32>) {
        let entry = &mut self.slots[slot as usize];
        if *entry & DIRTY == 0 {
            self.dirty.push(slot);
        }
        *entry = DIRTY | placement.map_or(0, |number| number + 1);
    }

    /// Marks the live buffer of a slot as a block of the global allocator.
    #[inline]
    pub fn mark_hooked(&mut self, slot: u32) {
        self.slots[slot as usize] |= HOOKED;
    }

    /// Whether the live buffer of a slot is a block of the global allocator.
    #[inline]
    pub fn is_hooked(&self, slot: u32) -> bool {
        self.slots[slot as usize] & HOOKED != 0
    }

    /// Tells the placer what changed: every end first, then every beginning.
    pub fn sync(&mut self, mut end: impl FnMut(u32), mut begin: impl FnMut(u32)) {
        for &slot in &self.dirty {
            let (now, known) = (
                self.slots[slot as usize] & NUMBER,
                self.known[slot as usize],
            );
            if now != known && known != 0 {
                end(known - 1);
            }
        }
        for slot in self.dirty.drain(..) {
            let now = &mut self.slots[slot as usize];
            *now &= !DIRTY;
            let number = *now & NUMBER;
            if number != self.known[slot as usize] && number != 0 {
                begin(number - 1);
            }
            self.known[slot as usize] = number;
        }
    }

    /// Makes a placement live that the placer has marked itself.
    pub fn set_known(&mut self, slot: u32, placement: u32) {
        let dirty = self.slots[slot as usize] & DIRTY;
        self.slots[slot as usize] = dirty | (placement + 1);
        self.known[slot as usize] = placement + 1;
    }

    /// Placements that are live.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.live().map(|(_, number)| number)
    }

    /// Slots with the placements that are live there.
    pub fn live(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let slots = (0..).zip(&self.slots);
        slots.filter_map(|(slot, &entry)| Some((slot, (entry & NUMBER).checked_sub(1)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::LiveTable;

    #[test]
    fn small_and_page_sized_places_keep_their_slots_when_a_page_gets_both() {
        let mut table = LiveTable::new(8, 100);
        let page = table.slot(16);
        let small = table.slot(19);
        let upper = table.slot(800);
        assert_eq!(
            [table.find(16), table.find(19), table.find(800)],
            [Some(page), Some(small), Some(upper)]
        );
        assert_eq!(table.slot(16), page);
        assert_eq!((table.find(17), table.find(8)), (None, None));
    }

    #[test]
    fn sync_reports_only_what_differs_from_what_the_placer_knows() {
        let mut table = LiveTable::new(8, 100);
        let (a, b) = (table.slot(0), table.slot(8));
        table.set_known(a, 7);
        table.set(a, None);
        table.set(b, Some(9));
        table.set(a, Some(7));
        let (mut ends, mut begins) = (Vec::new(), Vec::new());
        table.sync(|number| ends.push(number), |number| begins.push(number));
        assert_eq!((ends, begins), (vec![], vec![9]));
        table.set(a, Some(3));
        let (mut ends, mut begins) = (Vec::new(), Vec::new());
        table.sync(|number| ends.push(number), |number| begins.push(number));
        assert_eq!((ends, begins), (vec![7], vec![3]));
        assert_eq!(table.iter().collect::<Vec<_>>(), [3, 9]);
    }
}
