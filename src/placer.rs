//! Layer 2: where a new buffer goes while a step is recorded.
//!
//! ```text
//!   virtual pages   | v0 | v1 | v2 | v3 | v4 | v5 |   a window = consecutive virtual pages
//!                     f0   f1   f2   f1   f0   f3     the frame under each; v1 and v3 alias f1
//!                      \   whole: free or used   /
//!   inside a frame  [#######····####]                 small buffers live between each other, and
//!                    used   gap  used                 in the slack of a large buffer's last page
//! ```
//!
//! A buffer of at least a page gets a window whose frames are free and pairwise distinct, from the
//! first that is found of: a free window as long, a longer one, one that starts
//! where a shorter one did, addresses that a sweep won back, the free tail of the range (extended as needed), new virtual pages over
//! free frames, new frames. Free frames are taken in the order of their pages ([`rows`]). A smaller one goes into the best fitting gap. Physical memory grows only
//! when no frame is free, so fragmentation of addresses never costs memory.
//!
//! Two spaces share the frame numbers and nothing else: `Step`, whose placements edges mention, and
//! `Survivors`, whose placements none does. A frame belongs to one of them.
//!
//! Choosing ([`Placer::plan`]) changes nothing; [`Placer::commit`] takes the plan over once the
//! device has done its part. So a failed device call leaves no trace here.
//!
//! Invariants:
//! - `frames[f].aliases` is the inverse of `frame_of`;
//! - a frame with no used unit is in its space's `free`, and only such frames are, unless it is locked;
//! - the gaps of a partly used frame are sorted, not empty, not adjacent, and all in `gaps`, unless it is
//!   locked.
//!
//! May import: `bits`.

mod install;
mod rows;
mod sweep;

pub(crate) use rows::row_count;

use std::collections::{BTreeMap, BTreeSet};

use crate::bits::BitSet;

/// A number of 512 B units.
pub(crate) type Units = u32;

/// Which placements a frame may serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// Placements that edges mention.
    Step = 0,
    /// Placements that no edge mentions.
    Survivors = 1,
}

/// A place in the virtual range: first unit and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place {
    pub start: Units,
    pub len: Units,
}

/// What stands under a virtual page that a plan maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A frame of the same space.
    Frame(u32),
    /// A frame yet to be made.
    New,
}

/// A chosen place and what it needs from the device first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub place: Place,
    pub space: Space,
    /// Virtual pages to map, ascending and consecutive.
    pub maps: Vec<(u32, Source)>,
}

#[derive(Clone, Debug, Default)]
struct Frame {
    aliases: Vec<u32>,
    used: Units,
    /// Free pieces `(start, len)` of a partly used frame.
    gaps: Vec<(Units, Units)>,
    /// Virtual pages over this frame that an edge mentions, counted once an edge.
    mentions: u32,
    space: usize,
    stamp: u64,
    /// No new place may lie in it; what an edge leads to still may.
    is_locked: bool,
    /// The number of its page: those of neighbours follow one another.
    order: u64,
}

#[derive(Clone, Debug, Default)]
struct SpaceBooks {
    /// Number of the first virtual page of this space.
    first_page: u32,
    /// Most virtual pages that this space may have.
    page_limit: u32,
    frame_of: Vec<u32>,
    /// For each page, the number of the mapping that put its frame there.
    since: Vec<u64>,
    /// Frames with no used unit.
    free: BitSet,
    /// The same by the order of their pages.
    in_order: BTreeSet<(u64, u32)>,
    /// Gaps of partly used frames: `(len, frame, start)`.
    gaps: BTreeSet<(Units, u32, Units)>,
    /// Windows that were used and are not, by page count and start. Buffers in other windows over the
    /// same frames may still be in their way.
    freed: BTreeMap<u32, BTreeSet<u32>>,
    /// Runs of pages without a frame that a sweep left between others: `(count, first)`.
    holes: BTreeSet<(u32, u32)>,
    /// Pages at which the windows are worth looking through.
    crowded_at: u32,
}

impl SpaceBooks {
    /// Has as many pages at least, those behind the present ones without a frame.
    fn grow(&mut self, page_count: usize) {
        if page_count > self.frame_of.len() {
            self.frame_of.resize(page_count, NO_FRAME);
            self.since.resize(page_count, 0);
        }
    }

    /// Forgets the pages behind the last one that has a frame.
    fn shrink(&mut self) {
        let used = self.frame_of.iter().rposition(|&frame| frame != NO_FRAME);
        let page_count = used.map_or(0, |last| last + 1);
        self.frame_of.truncate(page_count);
        self.frame_of.shrink_to_fit();
        self.since.truncate(page_count);
        self.since.shrink_to_fit();
    }

    /// Makes a gap one to be found, unless it is in a locked frame.
    fn offer_gap(&mut self, is_locked: bool, gap: (Units, u32, Units)) {
        if !is_locked {
            self.gaps.insert(gap);
        }
    }

    /// Puts a frame under a page, counted from the first.
    fn set_frame(&mut self, page: usize, frame: u32, mapping: u64) {
        self.frame_of[page] = frame;
        self.since[page] = mapping;
    }
}

/// Windows that are tried, as long or longer and then shorter, before new virtual pages are taken.
const TRIES: usize = 32;

/// No frame: the page is not mapped.
pub(crate) const NO_FRAME: u32 = u32::MAX;

/// Chooses places; see the module's page.
#[derive(Clone, Debug)]
pub(crate) struct Placer {
    page_units: Units,
    /// `page_units` is 2 to this power.
    shift: u32,
    frames: Vec<Frame>,
    /// Numbers of frames that were forgotten.
    retired: Vec<u32>,
    spaces: [SpaceBooks; 2],
    epoch: u64,
    /// Frames that were put under a page so far.
    mappings: u64,
}

impl Placer {
    /// For pages of `page_units`, with `page_limit` virtual pages in all: the lower half for the
    /// step, the upper for survivors.
    pub fn new(page_units: Units, page_limit: u32) -> Self {
        let split = page_limit / 2;
        let space = |first_page, page_limit| SpaceBooks {
            first_page,
            page_limit,
            crowded_at: page_limit / 2,
            ..SpaceBooks::default()
        };
        debug_assert!(page_units.is_power_of_two());
        Self {
            page_units,
            shift: page_units.trailing_zeros(),
            frames: Vec::new(),
            retired: Vec::new(),
            spaces: [space(0, split), space(split, page_limit - split)],
            epoch: 0,
            mappings: 0,
        }
    }

    /// Frames so far; they are numbered from 0.
    pub fn frame_count(&self) -> u32 {
        u32::try_from(self.frames.len()).expect("frames are numbered by u32")
    }

    /// Virtual pages with a frame.
    pub fn page_count(&self) -> u32 {
        self.frames
            .iter()
            .map(|frame| frame.aliases.len())
            .sum::<usize>() as u32
    }

    /// First page and count of each space's virtual pages.
    pub fn page_ranges(&self) -> [(u32, u32); 2] {
        [0, 1].map(|space| {
            let space: &SpaceBooks = &self.spaces[space];
            (space.first_page, space.frame_of.len() as u32)
        })
    }

    /// Most virtual pages that the step's space may have.
    pub fn step_limit(&self) -> u64 {
        u64::from(self.spaces[Space::Step as usize].page_limit)
    }

    /// The space that a virtual page belongs to.
    pub fn space_of(&self, page: u32) -> Space {
        if page >= self.spaces[1].first_page {
            Space::Survivors
        } else {
            Space::Step
        }
    }

    /// The frame under a virtual page, [`NO_FRAME`] where there is none.
    pub fn frame_of(&self, page: u32) -> u32 {
        let space = &self.spaces[self.space_of(page) as usize];
        space
            .frame_of
            .get((page - space.first_page) as usize)
            .copied()
            .unwrap_or(NO_FRAME)
    }

    /// Number of the latest mapping under a place, all of whose pages have a frame: while it stays, so do
    /// the frames.
    pub fn since(&self, place: Place) -> u64 {
        let first = place.start >> self.shift;
        let books = &self.spaces[self.space_of(first) as usize];
        let pages = split(place, self.shift).map(|(page, ..)| (page - books.first_page) as usize);
        pages.map(|page| books.since[page]).max().unwrap_or(0)
    }

    /// The virtual pages over a frame.
    pub fn aliases(&self, frame: u32) -> &[u32] {
        &self.frames[frame as usize].aliases
    }

    /// Frames with no used unit.
    pub fn idle_frames(&self) -> impl Iterator<Item = u32> + '_ {
        self.spaces.iter().flat_map(|space| space.free.iter())
    }

    /// The frames under a place, with the used piece of each: `(frame, start, len)`.
    pub fn pieces(&self, place: Place) -> impl Iterator<Item = (u32, Units, Units)> + '_ {
        split(place, self.shift).map(|(page, start, len)| (self.frame_of(page), start, len))
    }

    /// Whether no unit under `place` is used and all of its pages are mapped.
    pub fn is_free(&self, place: Place) -> bool {
        self.pieces(place)
            .all(|(frame, start, len)| frame != NO_FRAME && self.piece_is_free(frame, start, len))
    }

    fn piece_is_free(&self, frame: u32, start: Units, len: Units) -> bool {
        let frame = &self.frames[frame as usize];
        frame.used == 0
            || frame.used < self.page_units
                && frame
                    .gaps
                    .iter()
                    .any(|&(gap, gap_len)| gap <= start && start + len <= gap + gap_len)
    }

    /// Marks the units under `place` as used.
    pub fn occupy(&mut self, place: Place) {
        self.each_piece(place, Self::take);
        if let Some((space, count, start)) = self.window(place)
            && let Some(freed) = self.spaces[space].freed.get_mut(&count)
        {
            freed.remove(&start);
        }
    }

    /// Marks the units under `place` as free, and the window as one to try first.
    pub fn vacate(&mut self, place: Place) {
        self.each_piece(place, Self::give);
        if let Some((space, count, start)) = self.window(place) {
            self.spaces[space]
                .freed
                .entry(count)
                .or_default()
                .insert(start);
        }
    }

    /// Space, page count and first page of the window that a buffer of a page or more stands in.
    fn window(&self, place: Place) -> Option<(usize, u32, u32)> {
        let start = place.start >> self.shift;
        let window = (
            self.space_of(start) as usize,
            place.len.div_ceil(self.page_units),
            start,
        );
        (place.len >= self.page_units).then_some(window)
    }

    /// An edge that leads to `place` was added.
    pub fn mention(&mut self, place: Place) {
        self.each_piece(place, |placer, frame, _, _| {
            placer.frames[frame as usize].mentions += 1
        });
    }

    /// An edge that led to `place` was dropped.
    pub fn unmention(&mut self, place: Place) {
        self.each_piece(place, |placer, frame, _, _| {
            placer.frames[frame as usize].mentions -= 1
        });
    }

    fn each_piece(&mut self, place: Place, mut visit: impl FnMut(&mut Self, u32, Units, Units)) {
        for (page, start, len) in split(place, self.shift) {
            let frame = self.frame_of(page);
            visit(self, frame, start, len);
        }
    }

    fn take(&mut self, number: u32, start: Units, len: Units) {
        let frame = &mut self.frames[number as usize];
        let space = &mut self.spaces[frame.space];
        if frame.used == 0 {
            space.remove_free(number, frame.order);
            if len < self.page_units {
                for (gap, gap_len) in [(0, start), (start + len, self.page_units - start - len)] {
                    if gap_len > 0 {
                        frame.gaps.push((gap, gap_len));
                        space.offer_gap(frame.is_locked, (gap_len, number, gap));
                    }
                }
            }
        } else {
            let at = frame.gaps.partition_point(|&(gap, _)| gap <= start) - 1;
            let (gap, gap_len) = frame.gaps[at];
            debug_assert!(start + len <= gap + gap_len, "taken units were free");
            space.gaps.remove(&(gap_len, number, gap));
            let before = (gap, start - gap);
            let after = (start + len, gap + gap_len - start - len);
            let kept = [before, after]
                .into_iter()
                .filter(|&(_, gap_len)| gap_len > 0);
            for (gap, gap_len) in kept.clone() {
                space.offer_gap(frame.is_locked, (gap_len, number, gap));
            }
            frame.gaps.splice(at..=at, kept);
        }
        frame.used += len;
    }

    fn give(&mut self, number: u32, start: Units, len: Units) {
        let frame = &mut self.frames[number as usize];
        let space = &mut self.spaces[frame.space];
        frame.used -= len;
        if frame.used == 0 {
            for (gap, gap_len) in frame.gaps.drain(..) {
                space.gaps.remove(&(gap_len, number, gap));
            }
            if !frame.is_locked {
                space.add_free(number, frame.order);
            }
            return;
        }
        let at = frame.gaps.partition_point(|&(gap, _)| gap < start);
        let (mut from, mut to) = (start, start + len);
        let (mut first, mut last) = (at, at);
        if at > 0 && frame.gaps[at - 1].0 + frame.gaps[at - 1].1 == start {
            first -= 1;
            from = frame.gaps[first].0;
        }
        if at < frame.gaps.len() && frame.gaps[at].0 == to {
            to += frame.gaps[at].1;
            last += 1;
        }
        for (gap, gap_len) in frame.gaps.splice(first..last, [(from, to - from)]) {
            space.gaps.remove(&(gap_len, number, gap));
        }
        space.offer_gap(frame.is_locked, (to - from, number, from));
    }

    /// Lets no new place lie in these frames, until [`unlock_all`](Self::unlock_all).
    pub fn lock(&mut self, frames: impl Iterator<Item = u32>) {
        for number in frames {
            let frame = &mut self.frames[number as usize];
            let space = &mut self.spaces[frame.space];
            frame.is_locked = true;
            space.remove_free(number, frame.order);
            for &(gap, gap_len) in &frame.gaps {
                space.gaps.remove(&(gap_len, number, gap));
            }
        }
    }

    /// Lets places lie in all frames again.
    pub fn unlock_all(&mut self) {
        for (number, frame) in (0..).zip(&mut self.frames) {
            if !std::mem::take(&mut frame.is_locked) {
                continue;
            }
            let space = &mut self.spaces[frame.space];
            if frame.used == 0 {
                space.add_free(number, frame.order);
            }
            for &(gap, gap_len) in &frame.gaps {
                space.gaps.insert((gap_len, number, gap));
            }
        }
    }

    /// Frames under what an edge leads to.
    pub fn mentioned(&self) -> impl Iterator<Item = u32> + '_ {
        let frames = (0..).zip(&self.frames);
        frames
            .filter(|(_, frame)| frame.mentions > 0)
            .map(|(number, _)| number)
    }

    /// Chooses a place of `len` units; `None` when the space has no addresses left.
    pub fn plan(&mut self, len: Units, space: Space) -> Option<Plan> {
        if len < self.page_units {
            self.plan_small(len, space)
        } else {
            self.plan_large(len, space)
        }
    }

    fn plan_small(&mut self, len: Units, space: Space) -> Option<Plan> {
        let books = &self.spaces[space as usize];
        let page_units = self.page_units;
        let at = |page: u32, start: Units, maps| {
            Some(Plan {
                place: Place {
                    start: page.checked_mul(page_units)? + start,
                    len,
                },
                space,
                maps,
            })
        };
        if let Some(&(_, frame, start)) = books.gaps.range((len, 0, 0)..).next() {
            return at(self.frames[frame as usize].aliases[0], start, Vec::new());
        }
        if let Some(frame) = books.free.next(0)
            && let Some(&page) = self.frames[frame as usize].aliases.first()
        {
            return at(page, 0, Vec::new());
        }
        let page = self
            .hole(space, 1)
            .or_else(|| self.next_page(space, 1))
            .or_else(|| self.room_in(space, 1))?;
        at(page, 0, vec![(page, Source::New)])
    }

    fn plan_large(&mut self, len: Units, space: Space) -> Option<Plan> {
        let count = len.div_ceil(self.page_units);
        let rest = len - (count - 1) * self.page_units;
        let plan = |page: u32, page_units: Units, maps| {
            Some(Plan {
                place: Place {
                    start: page.checked_mul(page_units)?,
                    len,
                },
                space,
                maps,
            })
        };
        if let Some(page) = self.freed_window(count, rest, space) {
            return plan(page, self.page_units, Vec::new());
        }
        // What a sweep left, or else the free tail of the range, then new virtual pages behind it.
        self.epoch += 1;
        let hole = self.hole(space, count);
        let books = &self.spaces[space as usize];
        let mut tail = 0;
        for &frame in books.frame_of.iter().rev().take(count as usize) {
            if hole.is_some()
                || frame == NO_FRAME
                || !books.free.contains(frame)
                || self.frames[frame as usize].stamp == self.epoch
            {
                break;
            }
            self.frames[frame as usize].stamp = self.epoch;
            tail += 1;
        }
        let page = match hole.or_else(|| self.next_page(space, count - tail)) {
            Some(page) => page - tail,
            None => {
                // Behind the last one no addresses are left; between others there may be.
                tail = 0;
                self.epoch += 1;
                self.room_in(space, count)?
            }
        };
        let mut maps = Vec::with_capacity((count - tail) as usize);
        // In the order of their pages, so that neighbours stay neighbours.
        let free = self.spaces[space as usize].in_order.iter();
        let mut free = free.filter(|&&(_, frame)| self.frames[frame as usize].stamp != self.epoch);
        for page in page + tail..page + count {
            let source = free
                .next()
                .map_or(Source::New, |&(_, frame)| Source::Frame(frame));
            maps.push((page, source));
        }
        plan(page, self.page_units, maps)
    }

    /// First of `count` new virtual pages behind the last one of `space`.
    fn next_page(&self, space: Space, count: u32) -> Option<u32> {
        let books = &self.spaces[space as usize];
        let used = books.frame_of.len() as u32;
        (used.checked_add(count)? <= books.page_limit).then(|| books.first_page + used)
    }

    /// A free frame of the step's space that no edge mentions: its page may serve elsewhere.
    pub fn loose_frame(&self) -> Option<u32> {
        self.spaces[Space::Step as usize]
            .free
            .iter()
            .find(|&frame| self.frames[frame as usize].mentions == 0)
    }

    /// A mapped window of `count` free and distinct frames, the last one free for `rest` units.
    fn freed_window(&mut self, count: u32, rest: Units, space: Space) -> Option<u32> {
        let index = space as usize;
        let equal_or_longer: Vec<u32> = self.spaces[index]
            .freed
            .range(count..)
            .take(TRIES)
            .map(|(&pages, _)| pages)
            .collect();
        let shorter: Vec<u32> = self.spaces[index]
            .freed
            .range(..count)
            .rev()
            .take(TRIES)
            .map(|(&pages, _)| pages)
            .collect();
        for lengths in [equal_or_longer, shorter] {
            let mut tries = TRIES;
            for pages in lengths {
                let list = std::mem::take(
                    self.spaces[index]
                        .freed
                        .get_mut(&pages)
                        .expect("listed length"),
                );
                let found = list
                    .iter()
                    .copied()
                    .take(tries)
                    .find(|&start| self.window_is_free(start, count, rest, space));
                tries -= list.len().min(tries);
                *self.spaces[index]
                    .freed
                    .get_mut(&pages)
                    .expect("listed length") = list;
                if found.is_some() || tries == 0 {
                    return found;
                }
            }
        }
        None
    }

    fn window_is_free(&mut self, start: u32, count: u32, rest: Units, space: Space) -> bool {
        self.epoch += 1;
        let books = &self.spaces[space as usize];
        let first = (start - books.first_page) as usize;
        let Some(window) = books.frame_of.get(first..first + count as usize) else {
            return false;
        };
        for (i, &frame) in window.iter().enumerate() {
            if frame == NO_FRAME
                || self.frames[frame as usize].stamp == self.epoch
                || self.frames[frame as usize].is_locked
            {
                return false;
            }
            let len = if i + 1 == count as usize {
                rest
            } else {
                self.page_units
            };
            let free = if len == self.page_units {
                self.frames[frame as usize].used == 0
            } else {
                self.piece_is_free(frame, 0, len)
            };
            if !free {
                return false;
            }
            self.frames[frame as usize].stamp = self.epoch;
        }
        true
    }

    /// Takes a plan over whose mappings the device has made. Returns the numbers of the frames under
    /// `plan.maps`.
    pub fn commit(&mut self, plan: &Plan) -> Vec<u32> {
        let index = plan.space as usize;
        let mut numbers = Vec::with_capacity(plan.maps.len());
        self.fill_hole(plan);
        for &(page, source) in &plan.maps {
            let number = match source {
                Source::Frame(frame) => frame,
                Source::New => {
                    let frame = self.retired.pop().unwrap_or_else(|| {
                        self.frames.push(Frame::default());
                        self.frame_count() - 1
                    });
                    self.frames[frame as usize].space = index;
                    self.spaces[index].add_free(frame, self.frames[frame as usize].order);
                    frame
                }
            };
            self.frames[number as usize].aliases.push(page);
            let books = &mut self.spaces[index];
            let at = (page - books.first_page) as usize;
            books.grow(at + 1);
            debug_assert_eq!(books.frame_of[at], NO_FRAME);
            self.mappings += 1;
            books.set_frame(at, number, self.mappings);
            numbers.push(number);
        }
        self.occupy(plan.place);
        numbers
    }

    /// Forgets a free frame that no edge mentions; its virtual pages are left without a frame, its
    /// number is given out again.
    pub fn retire(&mut self, frame: u32) {
        let books = &mut self.spaces[self.frames[frame as usize].space];
        debug_assert!(books.free.contains(frame) && self.frames[frame as usize].mentions == 0);
        books.remove_free(frame, self.frames[frame as usize].order);
        for page in std::mem::take(&mut self.frames[frame as usize].aliases) {
            books.frame_of[(page - books.first_page) as usize] = NO_FRAME;
            // Windows over it are windows no more.
            for (&count, starts) in &mut books.freed {
                starts.retain(|&start| !(start..start + count).contains(&page));
            }
        }
        self.retired.push(frame);
    }
}

/// The pieces of a place by page: `(page, start in it, len)`.
fn split(place: Place, shift: u32) -> impl Iterator<Item = (u32, Units, Units)> {
    let page_units = 1u64 << shift;
    let (mut at, end) = (
        u64::from(place.start),
        u64::from(place.start) + u64::from(place.len),
    );
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let start = at & (page_units - 1);
        let len = (page_units - start).min(end - at);
        let page = at >> shift;
        at += len;
        Some((page as u32, start as u32, len as u32))
    })
}
