//! Which frames are neighbours: pages with consecutive numbers that stand in a row are one mapping of the kernel.
//!
//! A frame keeps the number of its page as its *order*, and the free frames of a space are also kept in that
//! order. A new window takes them from the lowest on: whole rows of them, and a part of one at most.
//!
//! Invariant: `in_order` holds the frames of `free`, each at its order.
//!
//! May import: what `placer` may.

use super::{NO_FRAME, Place, Placer, SpaceBooks};

impl SpaceBooks {
    pub(super) fn add_free(&mut self, number: u32, order: u64) {
        self.free.insert(number);
        self.in_order.insert((order, number));
    }

    pub(super) fn remove_free(&mut self, number: u32, order: u64) {
        self.free.remove(number);
        self.in_order.remove(&(order, number));
    }
}

impl Placer {
    /// A frame has a page with this number.
    pub fn set_order(&mut self, frame: u32, order: u64) {
        let old = std::mem::replace(&mut self.frames[frame as usize].order, order);
        let books = &mut self.spaces[self.frames[frame as usize].space];
        if books.in_order.remove(&(old, frame)) {
            books.in_order.insert((order, frame));
        }
    }

    /// Mappings that the window of a place is, if no neighbour is one with it.
    pub fn mapping_count(&self, place: Place) -> u64 {
        let orders = self
            .pieces(place)
            .filter(|&(frame, ..)| frame != NO_FRAME)
            .map(|(frame, ..)| self.frames[frame as usize].order);
        row_count(orders)
    }
}

/// How many rows of consecutive numbers there are.
pub(crate) fn row_count(numbers: impl Iterator<Item = u64>) -> u64 {
    let mut next = None;
    let starts = numbers.filter(|&number| next.replace(number + 1) != Some(number));
    starts.count() as u64
}
