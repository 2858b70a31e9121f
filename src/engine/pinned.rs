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
//! Invariants: while pinned,
//! - a buffer in a frame that a recorded edge leads to was captured there, or lives there since before;
//! - no edge is added, none dies, and no window goes.
//!
//! May import: what `engine` may.

use super::{Allocation, Engine};
use crate::error::Error;
use crate::placer::Units;
use crate::scopes::Position;
use crate::units::{ALIGNMENT, Bytes};

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
            // In a step that began before, what is captured has no more claims.
            self.captured.clear();
        }
    }

    fn is_capturing(&self) -> bool {
        self.arena.device().is_capturing(self.stream)
    }

    fn captured_error(&self, len: Units) -> Error {
        Error::Captured {
            scope: self.scopes.path(),
            asked: Bytes(u64::from(len) * ALIGNMENT.0),
        }
    }

    /// Refuses to record what is being captured: its memory might be mapped, moved or given away at once.
    pub(super) fn check_uncaptured(&self, len: Units) -> Result<(), Error> {
        if self.is_capturing() {
            return Err(self.captured_error(len));
        }
        Ok(())
    }

    /// Serves an allocation of a step while the layout is pinned.
    pub(super) fn serve_pinned(
        &mut self,
        len: Units,
        position: Position,
    ) -> Result<Allocation, Error> {
        if !self.is_capturing() {
            self.lock_captured();
            return self.serve_survivor(len, position);
        }
        if self.survivors.contains(&position) {
            let served = self.serve_survivor(len, position);
            if served.is_ok() {
                self.captured.extend(self.young.last());
            }
            return served;
        }
        match self.graph.edge(self.hash, len) {
            Some(edge) if self.is_usable(edge)? => Ok(self.take_edge(edge, position)),
            _ => Err(self.captured_error(len)),
        }
    }

    /// Locks what was captured outside of the state.
    pub(super) fn lock_captured(&mut self) {
        if self.captured.is_empty() {
            return;
        }
        self.sync_placer();
        for number in std::mem::take(&mut self.captured) {
            let place = self.graph.placements[number as usize].place;
            let frames: Vec<u32> = self
                .arena
                .placer
                .pieces(place)
                .map(|piece| piece.0)
                .collect();
            self.arena.placer.lock(frames.into_iter());
        }
    }
}
