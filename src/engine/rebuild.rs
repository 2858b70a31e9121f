//! The graph made afresh from the branches that stay: what a limit and a compile have in common; and the
//! windows that nothing uses after that.
//!
//! ```text
//!   old graph    live buffers ──────────────> kept, at their places
//!                tapes of kept branches ────> their placements and edges, each once, at their places or
//!                                             at those of a plan
//!                all else ──────────────────> gone, with its slots in the live table
//! ```
//!
//! **Sweeping.** A window is in use where a buffer is live or an edge mentions it. The others are taken away
//! once they are most of a space, so that the books are as large as what is remembered; when half of a space
//! has been given out; and, among survivors, before the addresses are said to be used up. Survivors' windows
//! are mentioned by no edge, so that in their space any moment will do, also within a step.
//!
//! May import: what `engine` may.

use std::collections::HashMap;

use super::Engine;
use crate::graph::tape::SURVIVOR;
use crate::graph::{Graph, Kind};
use crate::mix::MixBuild;
use crate::placer::{Place, Space};

pub(super) type Numbers = HashMap<u32, u32, MixBuild>;

/// Pages of a space that may be idle before they are worth taking away, however few are in use;
const IDLE_PAGES: usize = 1_024;
/// … and so many times as many as are in use.
const IDLE_SHARE: usize = 3;

impl Engine {
    /// Makes the graph of these branches afresh; with the new start of each of their placements, if these
    /// move. No step is active, nothing of a state is live, and the placer is up to date.
    pub(super) fn rebuild(&mut self, branches: &[usize], starts: Option<&Numbers>) {
        debug_assert_eq!(self.own_count, 0);
        let old = Graph::after(&mut self.graph);
        let old_table = std::mem::take(&mut self.table);
        let (mut placements, mut edges) = (Numbers::default(), Numbers::default());
        // What is live stays where it is.
        for (old_slot, old_number) in old_table.live() {
            let mut placement = old.placements[old_number as usize];
            let slot = self.table.slot(placement.place.start);
            placement.slot = slot;
            let is_obstacle = matches!(placement.kind, Kind::Obstacle | Kind::Own);
            let number = if is_obstacle && starts.is_some() {
                // Its identity moves away: it is never again what it was to the state.
                let (place, since) = (placement.place, placement.since);
                self.graph.add_placement(place, since, slot, Kind::Obstacle)
            } else {
                let number = self.graph.keep_placement(placement);
                placements.insert(old_number, number);
                number
            };
            self.set_known(number);
            if old_table.is_hooked(old_slot) {
                self.table.mark_hooked(slot);
            }
        }
        self.arena.placer.unmention_all();
        self.tapes.keep_only(branches);
        for entry in self
            .tapes
            .branches
            .iter_mut()
            .flat_map(|branch| &mut branch.tape)
        {
            if entry.edge == SURVIVOR {
                // Its place is chosen anew each time.
                (entry.placement, entry.slot) = (u32::MAX, u32::MAX);
                continue;
            }
            let number = *placements.entry(entry.placement).or_insert_with(|| {
                let mut placement = old.placements[entry.placement as usize];
                if let Some(starts) = starts {
                    placement.place.start = starts[&entry.placement];
                    placement.since = self.arena.placer.since(placement.place);
                    placement.kind = Kind::Own;
                    self.arena.placer.offer(placement.place);
                }
                placement.slot = self.table.slot(placement.place.start);
                self.graph.keep_placement(placement)
            });
            let placement = self.graph.placements[number as usize];
            let edge = *edges.entry(entry.edge).or_insert_with(|| {
                self.arena.placer.mention(placement.place);
                let hint = old.edges[entry.edge as usize].hint;
                self.graph.keep_edge(entry.state, number, hint)
            });
            (entry.placement, entry.edge) = (number, edge);
            (entry.start, entry.slot) = (placement.place.start, placement.slot);
        }
        self.tapes.forget_run();
        self.recording = None;
    }

    /// Takes windows away that nothing uses, where they are most of a space; no step is active.
    pub(super) fn sweep_idle(&mut self) {
        for space in [Space::Step, Space::Survivors] {
            let placements = self.graph.placements.iter();
            // Placements of survivors that went are not in use.
            let used = match space {
                Space::Step => {
                    let places = placements.map(|placement| placement.place);
                    self.arena.placer.pages_under(space, places)
                }
                Space::Survivors => self.arena.placer.pages_under(space, self.live_places()),
            };
            let idle = self.arena.placer.unused_count(space, &used);
            if idle > IDLE_PAGES + IDLE_SHARE * used.len()
                && let Err(refusal) = self.arena.sweep(space, &used)
            {
                tracing::warn!(?refusal, "windows that nothing uses stay");
            }
        }
    }

    /// Takes every window of survivors away that no live buffer stands in; also within a step. The placer is
    /// up to date. Returns whether the device let it.
    pub(super) fn sweep_survivors(&mut self) -> bool {
        let used = self
            .arena
            .placer
            .pages_under(Space::Survivors, self.live_places());
        let swept = self.arena.sweep(Space::Survivors, &used);
        self.arena.placer.look_again_later(Space::Survivors);
        if let Err(refusal) = &swept {
            tracing::warn!(?refusal, "windows that nothing uses stay");
        }
        swept.is_ok()
    }

    fn live_places(&self) -> impl Iterator<Item = Place> + '_ {
        let live = self.table.iter();
        live.map(|number| self.graph.placements[number as usize].place)
    }
}
