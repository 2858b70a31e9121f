//! Which placement is live at which address: one slot for each place that a buffer ever started at.
//!
//! ```text
//!   page  ->  slot of its first unit            (every page that a buffer starts at)
//!         ->  slots of its other units          (only pages with small buffers)
//!   slot  ->  the placement that is live there, or none; whether the placer knows
//! ```
//!
//! A replayed alloc or free writes one slot. The placer learns of it later, from the list of slots
//! that changed.
//!
//! May import: nothing of this crate.

const NONE: u32 = u32::MAX;
const DIRTY: u32 = 1 << 31;

#[derive(Clone, Copy, Debug)]
struct PageSlots {
    first: u32,
    others: u32,
}

/// See the module's page.
#[derive(Debug)]
pub(crate) struct LiveTable {
    /// A page has 2 to this many units.
    shift: u32,
    /// First page of the upper half, whose pages are counted from there.
    split: u32,
    pages: [Vec<PageSlots>; 2],
    /// Number of the live placement + 1, 0 for none; the top bit says that the slot is in `dirty`.
    slots: Vec<u32>,
    /// What the placer knows of each slot: number + 1.
    known: Vec<u32>,
    dirty: Vec<u32>,
}

impl LiveTable {
    pub fn new(page_units: u32, split: u32) -> Self {
        Self {
            shift: page_units.trailing_zeros(),
            split,
            pages: [Vec::new(), Vec::new()],
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
        let slot = match (unit, page.others) {
            (0, _) => page.first,
            (_, NONE) => NONE,
            (unit, others) => others + unit,
        };
        (slot != NONE).then_some(slot)
    }

    /// The slot of a unit, made if need be.
    pub fn slot(&mut self, start: u32) -> u32 {
        let (half, number, unit) = self.index(start);
        let pages = &mut self.pages[half];
        if number >= pages.len() {
            pages.resize(number + 1, PageSlots { first: NONE, others: NONE });
        }
        let page = &mut pages[number];
        let next = self.slots.len() as u32;
        let (slot, grow) = match (unit, &mut page.first, &mut page.others) {
            (0, first, _) if *first == NONE => {
                *first = next;
                (next, 1)
            }
            (0, first, _) => (*first, 0),
            (unit, _, others) if *others == NONE => {
                *others = next;
                (next + unit, 1 << self.shift)
            }
            (unit, _, others) => (*others + unit, 0),
        };
        self.slots.resize(self.slots.len() + grow, 0);
        self.known.resize(self.slots.len(), 0);
        // A replay never grows it: each slot is in the list at most once.
        let room = self.slots.len() - self.dirty.len();
        self.dirty.reserve(room);
        slot
    }

    /// The placement that is live in a slot.
    #[inline]
    pub fn get(&self, slot: u32) -> Option<u32> {
        (self.slots[slot as usize] & !DIRTY).checked_sub(1)
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

    /// Tells the placer what changed: every end first, then every beginning.
    pub fn sync(&mut self, mut end: impl FnMut(u32), mut begin: impl FnMut(u32)) {
        for &slot in &self.dirty {
            let (now, known) = (self.slots[slot as usize] & !DIRTY, self.known[slot as usize]);
            if now != known && known != 0 {
                end(known - 1);
            }
        }
        for slot in self.dirty.drain(..) {
            let now = &mut self.slots[slot as usize];
            *now &= !DIRTY;
            if *now != self.known[slot as usize] && *now != 0 {
                begin(*now - 1);
            }
            self.known[slot as usize] = *now;
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
        self.slots.iter().filter_map(|&entry| (entry & !DIRTY).checked_sub(1))
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
        assert_eq!([table.find(16), table.find(19), table.find(800)], [Some(page), Some(small), Some(upper)]);
        assert_eq!(table.slot(16), page);
        assert_eq!((table.find(17).map(|slot| table.get(slot)), table.find(8)), (Some(None), None));
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
