//! Addresses that were captured: a launch of a graph writes there, whoever has the memory by then.
//!
//! ```text
//!   pinned      frames that an edge leads to are locked: no new place lies there
//!   a step      captured:  served by edges alone, at locked addresses; what survives it in the other
//!                          space is locked too, once the step is over
//!               not:       served in the survivors' space, beside all that is locked, and not learnt from
//!   unpinned    all frames are open again
//! ```
//!
//! Whether an allocation is captured only the device knows, at that moment: a step that is pinned follows
//! no tape, and asks each time.
//!
//! Two captured steps may write the same bytes, one after the other, as two branches do. What outlives one of
//! them for the first time lies in its state, where the other may write: the step is told so at its end
//! ([`Uncapturable::Overwritten`]), and one that is captured later finds it in its way.
//!
//! Invariants: while pinned,
//! - a buffer in a frame that a recorded edge leads to was captured there, or lives there since before;
//! - no edge is added, none dies, and no window goes.
//!
//! May import: what `engine` may.

use std::collections::HashMap;

use super::{Allocation, Engine};
use crate::error::{Error, Uncapturable};
use crate::graph::Kind;
use crate::mix::MixBuild;
use crate::placer::Units;
use crate::scopes::Position;
use crate::units::{ALIGNMENT, Bytes};

/// What was captured since the layout was pinned.
#[derive(Debug, Default)]
pub(super) struct Captured {
    /// Placements of the step that is active.
    step: Vec<u32>,
    /// Of steps before that ended well: what they write of each frame, `(start, len)`.
    written: HashMap<u32, Vec<(Units, Units)>, MixBuild>,
}

impl Engine {
    /// Whether addresses may have been captured.
    pub fn is_pinned(&self) -> bool {
        self.pins > 0
    }

    /// Keeps addresses for what is captured there; no step is active.
    pub fn pin(&mut self) {
        debug_assert!(self.active.is_none());
        self.pins += 1;
        self.sync_placer();
        let mentioned: Vec<u32> = self.arena.placer.mentioned().collect();
        self.arena.placer.lock(mentioned.into_iter());
    }

    /// Undoes one [`pin`](Self::pin).
    pub(super) fn unpin(&mut self) {
        self.pins -= 1;
        if !self.is_pinned() {
            self.sync_placer();
            self.arena.placer.unlock_all();
            self.captured = Captured::default();
        }
    }

    fn uncapturable(&self, len: Units, reason: Uncapturable) -> Error {
        Error::Captured {
            scope: self.scopes.path(),
            size: Bytes(u64::from(len) * ALIGNMENT.0),
            reason,
        }
    }

    /// Refuses to record what is being captured: its memory might be mapped, moved or given away at once.
    pub(super) fn check_uncaptured(&self, len: Units) -> Result<(), Error> {
        if self.is_captured() {
            return Err(self.uncapturable(len, Uncapturable::NotRecorded));
        }
        Ok(())
    }

    /// Serves an allocation of a step while the layout is pinned.
    pub(super) fn serve_pinned(
        &mut self,
        len: Units,
        position: Position,
    ) -> Result<Allocation, Error> {
        if !self.is_captured() {
            self.lock_captured();
            return self.serve_survivor(len, position);
        }
        if self.survivors.contains(&position) {
            let served = self.serve_survivor(len, position);
            if served.is_ok() {
                self.captured.step.extend(self.young.last());
            }
            return served;
        }
        match self.graph.edge(self.hash, len) {
            Some(edge) if self.is_usable(edge)? => {
                self.captured
                    .step
                    .push(self.graph.edges[edge as usize].placement);
                Ok(self.take_edge(edge, position))
            }
            _ => Err(self.uncapturable(len, Uncapturable::NotRecorded)),
        }
    }

    /// Locks what was captured of the step so far; of what edges lead to, it was before.
    fn lock_captured(&mut self) {
        let captured = self.captured.step.iter();
        let frames: Vec<u32> = captured
            .flat_map(|&number| self.pieces_of(number))
            .map(|piece| piece.0)
            .collect();
        if !frames.is_empty() {
            self.sync_placer();
            self.arena.placer.lock(frames.into_iter());
        }
    }

    /// The step is over: from now on nothing else comes where it writes. An error for what outlives it where
    /// a step that was captured before it writes.
    pub(super) fn end_captured(&mut self) -> Result<(), Error> {
        if self.captured.step.is_empty() {
            return Ok(());
        }
        let outlives = self
            .table
            .iter()
            .filter(|&number| self.kind_of(number) == Kind::Own);
        let overwritten = outlives.filter(|&number| {
            self.pieces_of(number).any(|(frame, start, len)| {
                let mut written = self.captured.written.get(&frame).into_iter().flatten();
                written.any(|&(from, of)| from < start + len && start < from + of)
            })
        });
        let len_of = |number: u32| self.graph.placements[number as usize].place.len;
        if let Some(len) = overwritten.map(len_of).max() {
            self.give_up_captured();
            return Err(self.uncapturable(len, Uncapturable::Overwritten));
        }
        self.lock_captured();
        let step = std::mem::take(&mut self.captured.step);
        let pieces: Vec<_> = step
            .iter()
            .flat_map(|&number| self.pieces_of(number))
            .collect();
        for (frame, start, len) in pieces {
            let written = self.captured.written.entry(frame).or_default();
            if !written.contains(&(start, len)) {
                written.push((start, len));
            }
        }
        Ok(())
    }

    /// The graph of the step is given up.
    pub(super) fn give_up_captured(&mut self) {
        self.captured.step.clear();
    }

    fn kind_of(&self, number: u32) -> Kind {
        self.graph.placements[number as usize].kind
    }

    fn pieces_of(&self, number: u32) -> impl Iterator<Item = (u32, Units, Units)> + '_ {
        let place = self.graph.placements[number as usize].place;
        self.arena.placer.pieces(place)
    }
}
