//! Windows that nothing uses any more are taken away, before new ones use the addresses up.
//!
//! ```text
//!   virtual pages   | v0 | v1 | v2 | v3 | v4 | v5 |      v1 and v4 are under what is in use
//!                     f0   f1   f2   f0   f2   f3
//!   swept           | .. | v1 | .. | .. | v4 |           f0 and f3 stand nowhere and are forgotten;
//!                          f1             f2              their pages are free for any space
//! ```
//!
//! In use are the places of live buffers and those that an edge mentions, which in the survivors' space is
//! none: a window there is only ever in use by the buffer in it.
//!
//! May import: what `placer` may.

use super::{NO_FRAME, Place, Placer, Plan, Space, SpaceBooks, split};
use crate::bits::BitSet;

impl SpaceBooks {
    /// One past the last virtual page that has, or once had, a frame.
    fn extent(&self) -> u32 {
        self.frame_of.len() as u32
    }

    fn find_holes(&mut self) {
        self.holes.clear();
        let mut first = 0;
        for (at, &frame) in (0..).zip(&self.frame_of) {
            if frame != NO_FRAME {
                if first < at {
                    self.holes.insert((at - first, self.first_page + first));
                }
                first = at + 1;
            }
        }
    }
}

impl Placer {
    /// Whether a space has come as far as [`look_again_later`](Self::look_again_later) said.
    pub fn is_crowded(&self, space: Space) -> bool {
        let books = &self.spaces[space as usize];
        books.extent() >= books.crowded_at
    }

    /// The space is crowded again when half of what is left of it is used, and half of it at least.
    pub fn look_again_later(&mut self, space: Space) {
        let books = &mut self.spaces[space as usize];
        let (used, limit) = (books.extent(), books.page_limit);
        books.crowded_at = (limit / 2).max(used + (limit - used).div_ceil(2));
    }

    /// Virtual pages of a space, counted from its first, that are under one of these places.
    pub fn pages_under(&self, space: Space, places: impl Iterator<Item = Place>) -> BitSet {
        let mut pages = BitSet::default();
        let first = self.spaces[space as usize].first_page;
        for place in places.filter(|&place| self.space_of_place(place) == space) {
            split(place, self.shift).for_each(|(page, ..)| pages.insert(page - first));
        }
        pages
    }

    /// How many virtual pages of a space have a frame and are not among `used`.
    pub fn unused_count(&self, space: Space, used: &BitSet) -> usize {
        let pages = (0..).zip(&self.spaces[space as usize].frame_of);
        pages
            .filter(|&(page, &frame)| frame != NO_FRAME && !used.contains(page))
            .count()
    }

    /// Takes the virtual pages of a space away that are not among `used`, which holds all pages under live
    /// buffers and under what edges mention. Returns the pages taken away with their frames, and the frames
    /// that have no page any more and are forgotten.
    pub fn sweep(&mut self, space: Space, used: &BitSet) -> (Vec<(u32, u32)>, Vec<u32>) {
        let mut away = Vec::new();
        let mut touched = BitSet::default();
        let books = &mut self.spaces[space as usize];
        for (at, frame) in (0..).zip(&mut books.frame_of) {
            if *frame != NO_FRAME && !used.contains(at) {
                away.push((books.first_page + at, *frame));
                touched.insert(*frame);
                *frame = NO_FRAME;
            }
        }
        let (first, frame_of) = (books.first_page, &books.frame_of);
        for frame in touched.iter() {
            let aliases = &mut self.frames[frame as usize].aliases;
            aliases.retain(|&page| frame_of[(page - first) as usize] != NO_FRAME);
            aliases.shrink_to_fit();
        }
        let is_whole = |start: u32, count: u32| {
            let at = (start - first) as usize;
            let window = frame_of.get(at..at + count as usize);
            window.is_some_and(|window| window.iter().all(|&frame| frame != NO_FRAME))
        };
        books.freed.retain(|&count, starts| {
            starts.retain(|&start| is_whole(start, count));
            !starts.is_empty()
        });
        let gone = self.forget_unmapped(space, touched.iter().collect());
        (away, gone)
    }

    /// Forgets those of these frames that stand nowhere any more, and the pages behind the last one in use.
    pub(super) fn forget_unmapped(&mut self, space: Space, frames: Vec<u32>) -> Vec<u32> {
        let books = &mut self.spaces[space as usize];
        books.shrink();
        books.find_holes();
        let gone: Vec<u32> = frames
            .into_iter()
            .filter(|&frame| self.frames[frame as usize].aliases.is_empty())
            .collect();
        for &frame in &gone {
            debug_assert!(books.free.contains(frame) && self.frames[frame as usize].mentions == 0);
            books.remove_free(frame, self.frames[frame as usize].order);
            self.retired.push(frame);
        }
        gone
    }

    /// First of `count` pages in a row that a sweep left without a frame; of the shortest such run.
    pub(super) fn hole(&self, space: Space, count: u32) -> Option<u32> {
        let holes = &self.spaces[space as usize].holes;
        holes.range((count, 0)..).next().map(|hole| hole.1)
    }

    /// Takes the pages of a plan out of the hole that they were planned in.
    pub(super) fn fill_hole(&mut self, plan: &Plan) {
        let Some(&(page, _)) = plan.maps.first() else {
            return;
        };
        let count = plan.maps.len() as u32;
        let is_behind = page >= self.first_behind(plan.space);
        let holes = &mut self.spaces[plan.space as usize].holes;
        match holes.range((count, 0)..).next().copied() {
            _ if is_behind => {}
            Some(hole @ (len, first)) if first == page => {
                holes.remove(&hole);
                if len > count {
                    holes.insert((len - count, first + count));
                }
            }
            // Found by looking at every page: what the holes are is not known any more.
            _ => holes.clear(),
        }
    }

    /// Looks for addresses behind the last ones first, until the next sweep.
    pub fn forget_holes(&mut self, space: Space) {
        self.spaces[space as usize].holes.clear();
    }

    fn first_behind(&self, space: Space) -> u32 {
        let books = &self.spaces[space as usize];
        books.first_page + books.extent()
    }

    /// Forgets every mention: the edges that stay are mentioned anew.
    pub fn unmention_all(&mut self) {
        for frame in &mut self.frames {
            frame.mentions = 0;
        }
    }
}
