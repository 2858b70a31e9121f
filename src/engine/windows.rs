//! Windows given up before mappings or addresses run out, and what was recorded over them.
//!
//! ```text
//!   mappings of the process  0 ......... 1/2 ......... 3/4 ........... limit
//!                            nothing is   windows are   refused with    the rest of the process:
//!                            given up     given up      an error        threads, malloc, libraries
//! ```
//!
//! A program whose sizes never repeat, as a cache that grows by concatenation, records windows over the same
//! pages in every step and never asks for the old ones again. Edges mention them, so that no sweep takes them
//! away. So when a step begins and half of the mappings would be passed before the next one does, the branches
//! that nobody asked for lately are forgotten, and their windows go with them. The same is done for addresses.
//!
//! **Which branches.** The one that ran last stays, and before it as many as have an eighth of the mappings
//! together, or three eighths if they were ever replayed: what has come once only comes as a rule never again.
//!
//! **Rows.** What is live cannot be given up; if it lies on pages from everywhere, it alone may need more
//! mappings than there are. So pages that nothing stands over any more go back to the device where they have
//! no neighbours, and what the device makes instead lies in a row. That happens each time windows are given up,
//! so that a program that replaces its buffers is in order after a few times.
//!
//! May import: what `engine` may.

use super::Engine;
use crate::bits::BitSet;
use crate::device::Mappings;
use crate::graph::tape::SURVIVOR;
use crate::placer::Space;

/// Of mappings and of addresses: one part in so many for branches that ran once only …
const ONCE: u64 = 8;
/// … and so many such parts for those that were replayed.
const REPLAYED: u64 = 3;
/// A new attempt comes when one part in so many has been used since the last one.
const AGAIN: u64 = 32;
/// Allocations without memory between two sweeps within a step that win nothing.
const PATIENCE: u32 = 1_000;

/// What is known of the need for windows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pressure {
    /// Mappings when the last step began, and most that a step has taken since windows were given up.
    mappings: u64,
    growth: u64,
    /// Mappings and virtual pages below which another attempt is in vain.
    mappings_again: u64,
    pages_again: u64,
    /// Allocations that do not sweep.
    patience: u32,
}

impl Pressure {
    /// Whether a half of the mappings may be passed before the next step begins, by what steps took.
    fn is_short(&mut self, Mappings { count, limit }: Mappings) -> bool {
        let last = std::mem::replace(&mut self.mappings, count);
        self.growth = self.growth.max(count.saturating_sub(last));
        count + 2 * self.growth >= limit / 2 && count >= self.mappings_again
    }
}

/// What the branches that stay may have together.
#[derive(Clone, Copy, Debug)]
struct Room {
    mappings: u64,
    pages: u64,
}

impl Engine {
    /// Gives windows up that neither a live buffer nor a recent branch needs, if mappings or addresses are
    /// running out; a step begins.
    pub(super) fn give_windows_up(&mut self) {
        let (pages, page_limit) = self.arena.step_pages();
        let mappings = self.arena.mappings();
        let is_short = mappings.is_some_and(|mappings| self.pressure.is_short(mappings));
        let is_crowded = pages >= page_limit / 2 && pages >= self.pressure.pages_again;
        if !(is_short || is_crowded) || self.is_pinned() {
            return;
        }
        debug_assert_eq!(self.own_count, 0);
        self.sync_placer();
        let room = Room {
            mappings: mappings.map_or(u64::MAX, |mappings| mappings.limit / ONCE),
            pages: page_limit / ONCE,
        };
        let kept = self.recent_branches(room);
        // Addresses alone can be had without forgetting, if all branches are of use.
        if is_short || kept.len() < self.tapes.branches.len() {
            self.forget_all_but(&kept);
            let swept = self.sweep_forgotten() && self.sweep_survivors();
            if is_short && swept {
                self.arena.shed_scattered();
            }
        }
        let before = pages;
        let pages = self.arena.step_pages().0;
        self.pressure.pages_again = pages + page_limit / AGAIN;
        if let Some(Mappings { count, limit }) = self.arena.mappings().filter(|_| is_short) {
            self.pressure.mappings = count;
            self.pressure.growth = 0;
            self.pressure.mappings_again = count + limit / AGAIN;
        }
        tracing::debug!(?mappings, ?self.pressure, before, pages, "windows were given up");
    }

    /// The last branch, and those before it that have room.
    fn recent_branches(&self, room: Room) -> Vec<usize> {
        let branches = &self.tapes.branches;
        let is_whole = |&at: &usize| {
            let mut entries = branches[at].tape.iter();
            entries
                .all(|entry| entry.edge == SURVIVOR || !self.graph.edges[entry.edge as usize].dead)
        };
        let mut newest: Vec<usize> = (0..branches.len()).filter(is_whole).collect();
        newest.sort_by_key(|&at| std::cmp::Reverse(branches[at].last_run));
        let mut kept: Vec<usize> = Vec::new();
        let mut seen = BitSet::default();
        let (mut mappings, mut pages) = (0, 0);
        // Those that ran once and longer ago than one that has no room have none either.
        let mut is_full = false;
        for at in newest {
            let parts = match branches[at].replays {
                0 if is_full => continue,
                0 => 1,
                _ => REPLAYED,
            };
            let (mut new, mut more, mut more_pages) = (Vec::new(), 0, 0);
            for entry in &branches[at].tape {
                if entry.edge != SURVIVOR && !seen.contains(entry.placement) {
                    seen.insert(entry.placement);
                    new.push(entry.placement);
                    let place = self.graph.placements[entry.placement as usize].place;
                    more += self.arena.placer.mapping_count(place);
                    more_pages += self.arena.placer.pieces(place).count() as u64;
                }
            }
            let fits = mappings + more <= room.mappings.saturating_mul(parts)
                && pages + more_pages <= room.pages.saturating_mul(parts);
            if fits || kept.is_empty() {
                kept.push(at);
                (mappings, pages) = (mappings + more, pages + more_pages);
                continue;
            }
            new.into_iter().for_each(|placement| seen.remove(placement));
            if parts == REPLAYED {
                break;
            }
            is_full = true;
        }
        kept
    }

    /// Takes every window of the step's space away that no placement of the graph stands in; also within a
    /// step. The placer is up to date. Returns whether the device let it.
    pub(super) fn sweep_forgotten(&mut self) -> bool {
        let placements = self.graph.placements.iter();
        let places = placements.map(|placement| placement.place);
        let used = self.arena.placer.pages_under(Space::Step, places);
        let swept = self.arena.sweep(Space::Step, &used);
        if let Err(refusal) = &swept {
            tracing::warn!(?refusal, "windows that nothing uses stay");
        }
        swept.is_ok()
    }

    /// Makes room for mappings within a step, where every edge may be needed yet. Returns whether another
    /// attempt to place is worth while.
    pub(super) fn find_mappings(&mut self) -> bool {
        if self.arena.is_pinned || self.pressure.patience > 0 {
            self.pressure.patience = self.pressure.patience.saturating_sub(1);
            return false;
        }
        let count = |engine: &Self| engine.arena.mappings().map(|mappings| mappings.count);
        let before = count(self);
        let swept = self.sweep_forgotten() && self.sweep_survivors();
        let wins = swept && count(self) < before;
        if !wins {
            self.pressure.patience = PATIENCE;
        }
        wins
    }
}
