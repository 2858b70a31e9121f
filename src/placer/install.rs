//! A whole new layout of the step's space at once, under edges that are made afresh.
//!
//! May import: what `placer` may.

use super::{NO_FRAME, Place, Placer, Space, split};
use crate::bits::BitSet;

impl Placer {
    /// The space of a place.
    pub fn space_of_place(&self, place: Place) -> Space {
        self.space_of(place.start >> self.shift)
    }

    /// Frames of the step's space.
    pub fn step_frames(&self) -> impl Iterator<Item = u32> + '_ {
        let frames = (0..).zip(&self.frames);
        frames
            .filter(|(_, frame)| frame.space == Space::Step as usize && !frame.aliases.is_empty())
            .map(|(number, _)| number)
    }

    /// First of `count` virtual pages of the step's space in a row that have no frame.
    pub fn room(&self, count: u32) -> Option<u32> {
        self.room_in(Space::Step, count)
    }

    /// The same in any space; looks at every page.
    pub(super) fn room_in(&self, space: Space, count: u32) -> Option<u32> {
        let books = &self.spaces[space as usize];
        let mut first = 0;
        for (page, &frame) in (0..).zip(&books.frame_of) {
            if frame != NO_FRAME {
                first = page + 1;
            } else if page + 1 - first == count {
                break;
            }
        }
        (first.checked_add(count)? <= books.page_limit).then_some(books.first_page + first)
    }

    /// Puts `frames` under the pages from `first` on and takes every other page of the step's space away
    /// but those under `kept`, which are the only used places. No edge is left. Returns the pages taken
    /// away with their frames, and the frames that have no page any more and are forgotten.
    pub fn install(
        &mut self,
        first: u32,
        frames: &[u32],
        kept: &[Place],
    ) -> (Vec<(u32, u32)>, Vec<u32>) {
        let mut stays = BitSet::default();
        for page in kept
            .iter()
            .flat_map(|&place| split(place, self.shift))
            .map(|piece| piece.0)
        {
            stays.insert(page);
        }
        let old: Vec<u32> = self.step_frames().collect();
        let mut away = Vec::new();
        for &number in &old {
            let frame = &mut self.frames[number as usize];
            frame.mentions = 0;
            frame.aliases.retain(|&page| {
                let is_kept = stays.contains(page);
                if !is_kept {
                    away.push((page, number));
                }
                is_kept
            });
        }
        let books = &mut self.spaces[Space::Step as usize];
        for &(page, _) in &away {
            books.frame_of[(page - books.first_page) as usize] = NO_FRAME;
        }
        books.grow((first - books.first_page) as usize + frames.len());
        for (page, &frame) in (first..).zip(frames) {
            self.mappings += 1;
            books.set_frame((page - books.first_page) as usize, frame, self.mappings);
            self.frames[frame as usize].aliases.push(page);
        }
        books.freed.clear();
        let gone = self.forget_unmapped(Space::Step, old);
        (away, gone)
    }

    /// Makes the window of a place one to try first.
    pub fn offer(&mut self, place: Place) {
        if let Some((space, count, start)) = self.window(place) {
            self.spaces[space]
                .freed
                .entry(count)
                .or_default()
                .insert(start);
        }
    }
}
