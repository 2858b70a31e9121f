//! Several virtual pages over one frame: fragmentation of addresses costs no memory.
//!
//! ```text
//!   virtual pages  | v0 | v1 | v2 | v3 | v4 | v5 |      a large item has a window of pages
//!   frames           f0   f1   f2   f1   f0   f3
//!   a frame        [ rest of one |··| small |··| rest of another ]
//!                    at its start                  at its end
//! ```
//!
//! Items are placed in the order in which they begin. A whole page goes over any frame that is free:
//! in this order that takes no more frames than are live at once, as intervals are coloured. What
//! costs memory is the slack in partly used frames, so the rest of a large item (what is left over of
//! its whole pages) and small items go into the tightest gap of a frame that is in use already.
//!
//! An item with several lifespans must also keep clear of items that are placed, not live now, and
//! live with it later; only items with several lifespans can be that, on one side or the other.
//! Those are *later* pieces: they block a frame for one decision without being live in it.

use std::collections::HashMap;

use super::overlaps::Overlaps;
use super::problem::Problem;
use super::{Limits, Plan, Strategy};
use crate::bits::BitSet;

/// Freed windows of a length that are tried before a new one is made.
const TRIES: usize = 32;

#[derive(Debug)]
pub(super) struct Aliasing {
    /// The rest of a large item may lie at the end of a frame too, not only at its start.
    pub both_ends: bool,
}

impl Strategy for Aliasing {
    fn plan(&self, problem: &Problem, limits: &Limits<'_>) -> Option<Plan> {
        let frame_limit = limits
            .best
            .map_or(u64::from(u32::MAX), |best| best.frame_count);
        let mut run = Run::new(problem, self);
        // Ends first, then returns of placed items, then new items, the large ones first.
        let mut events: Vec<(u32, u8, u32, u32)> = Vec::new();
        for item in 0..problem.len() as u32 {
            for (nth, &(begin, end)) in problem.lifespans(item).iter().enumerate() {
                events.push((end, 0, 0, item));
                events.push((
                    begin,
                    if nth == 0 { 2 } else { 1 },
                    u32::MAX - problem.size(item),
                    item,
                ));
            }
        }
        events.sort_unstable();
        for (count, &(_, kind, _, item)) in events.iter().enumerate() {
            if count % 64 == 0 && limits.is_over() {
                return None;
            }
            match kind {
                0 => run.end(item),
                1 => run.occupy(item),
                _ => {
                    run.place(item)?;
                    run.occupy(item);
                }
            }
            if run.frames.len() as u64 > frame_limit {
                return None;
            }
        }
        Some(Plan {
            strategy: "page aliasing",
            starts: run.starts,
            page_count: run.frame_of.len() as u64,
            frames: Some(run.frame_of),
            frame_count: run.frames.len() as u64,
        })
    }
}

/// A part of an item in one frame, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    from: u32,
    to: u32,
    item: u32,
}

#[derive(Clone, Debug, Default)]
struct Frame {
    /// A virtual page over it.
    page: u32,
    /// Live pieces, ascending.
    live: Vec<Piece>,
    used: u32,
    /// Decision for which `later` holds.
    stamp: u32,
    /// Pieces that become live later, while the item that is being placed is live.
    later: Vec<Piece>,
}

#[derive(Debug)]
struct Run<'p> {
    problem: &'p Problem,
    rules: &'p Aliasing,
    page_units: u32,
    starts: Vec<u64>,
    frame_of: Vec<u32>,
    frames: Vec<Frame>,
    /// Frames with no live piece.
    free: BitSet,
    /// Frames with a live piece and room for another.
    partial: BitSet,
    /// First pages of windows that are not in use, by page count; the latest freed is last.
    freed: HashMap<u32, Vec<u32>>,
    /// Placed items with several lifespans.
    returning: Overlaps,
    decision: u32,
    /// Frames with later pieces in this decision.
    touched: Vec<u32>,
}

/// Where a piece could go.
#[derive(Clone, Copy, Debug)]
struct Gap {
    /// What it would leave over.
    left: u32,
    frame: u32,
    from: u32,
}

/// Which gaps a piece may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    Anywhere,
    /// At the start of a frame, or, by the rule, at its end.
    Ends,
}

impl<'p> Run<'p> {
    fn new(problem: &'p Problem, rules: &'p Aliasing) -> Self {
        Self {
            problem,
            rules,
            page_units: problem.page_units(),
            starts: vec![0; problem.len()],
            frame_of: Vec::new(),
            frames: Vec::new(),
            free: BitSet::default(),
            partial: BitSet::default(),
            freed: HashMap::new(),
            returning: Overlaps::new(problem),
            decision: 0,
            touched: Vec::new(),
        }
    }

    /// The parts of a placed item by frame: `(frame, from, to)`.
    fn pieces(&self, item: u32) -> impl Iterator<Item = (u32, u32, u32)> + use<> {
        let page_units = u64::from(self.page_units);
        let start = self.starts[item as usize];
        let end = start + u64::from(self.problem.size(item));
        let (first, last) = (start / page_units, (end - 1) / page_units);
        let frames: Vec<u32> = self.frame_of[first as usize..=last as usize].to_vec();
        frames.into_iter().enumerate().map(move |(i, frame)| {
            let page = first + i as u64;
            let from = start.saturating_sub(page * page_units) as u32;
            (
                frame,
                from,
                (end - page * page_units).min(page_units) as u32,
            )
        })
    }

    fn occupy(&mut self, item: u32) {
        for (number, from, to) in self.pieces(item) {
            let frame = &mut self.frames[number as usize];
            let at = frame.live.partition_point(|piece| piece.from < from);
            frame.live.insert(at, Piece { from, to, item });
            frame.used += to - from;
            self.refile(number);
        }
    }

    fn end(&mut self, item: u32) {
        for (number, from, to) in self.pieces(item) {
            let frame = &mut self.frames[number as usize];
            frame.live.retain(|piece| piece.item != item);
            frame.used -= to - from;
            self.refile(number);
        }
        let size = self.problem.size(item);
        if size >= self.page_units {
            let page = (self.starts[item as usize] / u64::from(self.page_units)) as u32;
            self.freed
                .entry(size.div_ceil(self.page_units))
                .or_default()
                .push(page);
        }
    }

    fn refile(&mut self, number: u32) {
        let used = self.frames[number as usize].used;
        if used == 0 {
            self.free.insert(number)
        } else {
            self.free.remove(number)
        }
        if used > 0 && used < self.page_units {
            self.partial.insert(number)
        } else {
            self.partial.remove(number)
        }
    }

    /// Notes the pieces of placed items that will be live with `item`, though they are not live now.
    fn mark_later(&mut self, item: u32) {
        self.decision += 1;
        self.touched.clear();
        let mut others = Vec::new();
        self.returning
            .query(self.problem, item, |other| others.push(other));
        for other in others {
            for (number, from, to) in self.pieces(other) {
                let frame = &mut self.frames[number as usize];
                if frame.stamp != self.decision {
                    frame.stamp = self.decision;
                    frame.later.clear();
                    self.touched.push(number);
                }
                frame.later.push(Piece {
                    from,
                    to,
                    item: other,
                });
            }
        }
    }

    /// Whether no live or later piece is in the frame.
    fn is_free(&self, frame: u32) -> bool {
        let frame = &self.frames[frame as usize];
        frame.used == 0 && frame.stamp != self.decision
    }

    fn piece_fits(&self, frame: u32, from: u32, to: u32) -> bool {
        let frame = &self.frames[frame as usize];
        let clear = |pieces: &[Piece]| {
            pieces
                .iter()
                .all(|piece| to <= piece.from || piece.to <= from)
        };
        clear(&frame.live) && (frame.stamp != self.decision || clear(&frame.later))
    }

    /// Places an item that begins now; `None` when 2³² pages are not enough.
    fn place(&mut self, item: u32) -> Option<()> {
        self.mark_later(item);
        let size = self.problem.size(item);
        let start = if size < self.page_units {
            self.place_small(size)
        } else {
            self.place_large(size)?
        };
        self.starts[item as usize] = start;
        if self.problem.lifespans(item).len() > 1 {
            self.returning.insert(self.problem, item);
        }
        u32::try_from(self.frame_of.len()).ok().map(|_| ())
    }

    fn place_small(&mut self, size: u32) -> u64 {
        let (frame, from) = match self.gap(size, Fit::Anywhere) {
            Some(gap) => (gap.frame, gap.from),
            None => {
                let free = self.free.iter().find(|&frame| self.is_free(frame));
                let frame = free.unwrap_or_else(|| {
                    let frame = self.new_frame();
                    self.map(frame);
                    frame
                });
                (frame, 0)
            }
        };
        u64::from(self.frames[frame as usize].page) * u64::from(self.page_units) + u64::from(from)
    }

    fn place_large(&mut self, size: u32) -> Option<u64> {
        let (whole, rest) = (size / self.page_units, size % self.page_units);
        let count = whole + u32::from(rest > 0);
        let gap = if rest > 0 {
            self.gap(rest, Fit::Ends)
        } else {
            None
        };
        let to_start = |page: u32, at_end: bool, page_units: u32| {
            let from = if at_end && rest > 0 {
                page_units - rest
            } else {
                0
            };
            u64::from(page) * u64::from(page_units) + u64::from(from)
        };
        if let Some((page, at_end)) = self.freed_window(count, rest, gap.is_none()) {
            return Some(to_start(page, at_end, self.page_units));
        }
        let at_end = gap.is_some_and(|gap| gap.from > 0);
        let partial = gap.map(|gap| gap.frame);
        let page = u32::try_from(self.frame_of.len()).ok()?;
        let mut next = 0;
        for i in 0..count {
            let is_rest = rest > 0 && i == if at_end { 0 } else { count - 1 };
            let frame = match partial {
                Some(frame) if is_rest => frame,
                _ => {
                    let mut found = None;
                    while let Some(frame) = self.free.next(next) {
                        next = frame + 1;
                        if self.is_free(frame) && Some(frame) != partial {
                            found = Some(frame);
                            break;
                        }
                    }
                    found.unwrap_or_else(|| {
                        // Numbers go up, so a frame made here is not found again.
                        let frame = self.new_frame();
                        next = frame + 1;
                        frame
                    })
                }
            };
            self.map(frame);
        }
        Some(to_start(page, at_end, self.page_units))
    }

    fn new_frame(&mut self) -> u32 {
        let number = self.frames.len() as u32;
        self.frames.push(Frame {
            page: u32::MAX,
            ..Frame::default()
        });
        self.free.insert(number);
        number
    }

    /// Puts a frame under the next virtual page.
    fn map(&mut self, frame: u32) {
        let page = self.frame_of.len() as u32;
        self.frame_of.push(frame);
        let known = &mut self.frames[frame as usize].page;
        *known = (*known).min(page);
    }

    /// A freed window that takes `count` pages, the last (or, second answer, the first) of them only
    /// for `rest` units. Unless `may_open`, that one must be in use already.
    fn freed_window(&mut self, count: u32, rest: u32, may_open: bool) -> Option<(u32, bool)> {
        let windows = self.freed.get(&count)?;
        let ends: &[bool] = if rest > 0 && self.rules.both_ends {
            &[false, true]
        } else {
            &[false]
        };
        let mut found = None;
        'windows: for (at, &page) in windows.iter().enumerate().rev().take(TRIES) {
            for &at_end in ends {
                let rest_at = if at_end { 0 } else { count - 1 };
                let fits = (0..count).all(|i| {
                    let frame = self.frame_of[(page + i) as usize];
                    if rest > 0 && i == rest_at {
                        let from = if at_end { self.page_units - rest } else { 0 };
                        let in_use = self.frames[frame as usize].used > 0;
                        self.piece_fits(frame, from, from + rest) && (may_open || in_use)
                    } else {
                        self.is_free(frame)
                    }
                });
                if fits {
                    found = Some((at, page, at_end));
                    break 'windows;
                }
            }
        }
        let (at, page, at_end) = found?;
        self.freed.get_mut(&count).expect("seen above").remove(at);
        Some((page, at_end))
    }

    /// The best gap of `len` units in a frame that is in use, or will be.
    fn gap(&self, len: u32, fit: Fit) -> Option<Gap> {
        let mut best: Option<Gap> = None;
        let mut taken: Vec<Piece> = Vec::new();
        let later = self
            .touched
            .iter()
            .copied()
            .filter(|&frame| self.frames[frame as usize].used == 0);
        for number in self.partial.iter().chain(later) {
            let frame = &self.frames[number as usize];
            if frame.used + len > self.page_units {
                continue;
            }
            taken.clear();
            taken.extend_from_slice(&frame.live);
            if frame.stamp == self.decision {
                taken.extend_from_slice(&frame.later);
                taken.sort_unstable();
            }
            let mut try_gap = |from: u32, to: u32| {
                let gap_len = to - from;
                if gap_len < len {
                    return;
                }
                let from = match fit {
                    Fit::Anywhere => from,
                    Fit::Ends if from == 0 => 0,
                    Fit::Ends if to == self.page_units && self.rules.both_ends => to - len,
                    Fit::Ends => return,
                };
                let left = gap_len - len;
                if best.is_none_or(|best| left < best.left) {
                    best = Some(Gap {
                        left,
                        frame: number,
                        from,
                    });
                }
            };
            let mut top = 0;
            for piece in &taken {
                if piece.from > top {
                    try_gap(top, piece.from);
                }
                top = top.max(piece.to);
            }
            if top < self.page_units {
                try_gap(top, self.page_units);
            }
        }
        best
    }
}
