//! The slow path of an allocation: everything but the next tape entry.
//!
//! May import: what `engine` may.

use super::{Allocation, Engine, OnError, Recording};
use crate::arena::Refusal;
use crate::error::{Error, Expected};
use crate::graph::Kind;
use crate::graph::tape::{Entry, SURVIVOR};
use crate::placer::{Space, Units};
use crate::scopes::Position;
use crate::units::{ALIGNMENT, Bytes};

impl Engine {
    /// Serves an allocation that the tape does not answer.
    #[cold]
    pub fn alloc_slow(&mut self, size: Bytes, on_error: OnError) -> Result<Allocation, Error> {
        if self.shared.handover.has_waiting() {
            self.drain();
            if let Some(address) = self.replay(size, on_error) {
                return Ok(Allocation::Here(address));
            }
        }
        if self.paused > 0 {
            self.totals.passed_through += 1;
            return Ok(Allocation::Elsewhere);
        }
        if size == Bytes::ZERO {
            return Ok(Allocation::Elsewhere);
        }
        self.count_replayed();
        // More units than 32 bits count are more than any range has.
        let result = match Units::try_from(size.0.div_ceil(ALIGNMENT.0)) {
            Ok(len) => self.serve(len, on_error),
            Err(_) => Err(self.too_large(size)),
        };
        // Only hooks ask for another thing than the error.
        if on_error != OnError::Fail
            && let Ok(Allocation::Here(address)) = result
            && let Some(slot) = self.table.find(self.shared.unit(address))
        {
            self.table.mark_hooked(slot);
        }
        match result {
            Err(error) if on_error == OnError::Postpone => {
                self.postpone(error);
                self.totals.passed_through += 1;
                Ok(Allocation::Elsewhere)
            }
            result => result,
        }
    }

    /// Why a buffer of more units than 32 bits count is refused.
    fn too_large(&self, size: Bytes) -> Error {
        let hopeless = self.arena.check_hopeless(size);
        self.error_of(hopeless.err().unwrap_or(Refusal::AddressSpace), size)
    }

    /// Lets the step return an error at its end, unless it has one already.
    pub fn postpone(&mut self, error: Error) {
        if let Some(active) = &mut self.active {
            active.error.get_or_insert(error);
        }
    }

    fn serve(&mut self, len: Units, on_error: OnError) -> Result<Allocation, Error> {
        let position = self.scopes.position(len);
        if self.is_pinned() {
            return self.serve_pinned(len, position);
        }
        if self.survivors.contains(&position) {
            return self.serve_survivor(len, position);
        }
        let mut obstructed = None;
        if let Some(edge) = self.graph.edge(self.hash, len) {
            if self.is_usable(edge)? {
                return Ok(self.take_edge(edge, position));
            }
            obstructed = Some(edge);
        }
        let is_break = obstructed.is_none()
            && self
                .recording
                .map_or(self.is_graded(), |recording| recording.is_break);
        if is_break && (self.strict || self.scopes.is_strict()) {
            let error = Error::Strict {
                scope: self.scopes.path(),
                event: self.step.events,
                asked: Bytes(u64::from(len) * ALIGNMENT.0),
                expected: self.expected(),
            };
            if on_error == OnError::Fail {
                return Err(error);
            }
            // Served where no edge looks, so that the graph stays as it was.
            self.postpone(error);
            return self.serve_survivor(len, position);
        }
        self.record(len, position, obstructed)
    }

    fn is_graded(&self) -> bool {
        self.active.as_ref().is_some_and(|active| active.graded)
    }

    /// What is recorded at this place, for the error of a strict break.
    fn expected(&self) -> Expected {
        let size = |len: Units| Expected::Size(Bytes(u64::from(len) * ALIGNMENT.0));
        match self.tapes.tape.get(self.tapes.cursor) {
            Some(entry)
                if entry.state == self.hash
                    && (entry.edge != SURVIVOR || entry.context == self.scopes.context) =>
            {
                size(entry.len)
            }
            None if self.tapes.cursor == self.tapes.tape.len() && self.tapes.cursor > 0 => {
                Expected::End
            }
            _ => self.graph.size(self.hash).map_or(Expected::Nothing, size),
        }
    }

    pub(super) fn serve_survivor(
        &mut self,
        len: Units,
        position: Position,
    ) -> Result<Allocation, Error> {
        let number = self.place(len, Space::Survivors)?;
        let placement = self.graph.placements[number as usize];
        let followed = self.tapes.tape.get(self.tapes.cursor).is_some_and(|entry| {
            entry.edge == SURVIVOR
                && entry.len == len
                && entry.context == self.scopes.context
                && entry.state == self.hash
        });
        if followed {
            self.tapes.cursor += 1;
            self.tapes.counted = self.tapes.cursor;
        } else {
            let entry = self.entry(number, SURVIVOR, position);
            self.push(entry);
        }
        self.scopes.count(position, len);
        self.fold_peak();
        self.live += u64::from(len);
        self.outside += u64::from(len);
        self.outside_count += 1;
        self.graph.placements[number as usize].kind = Kind::Young;
        self.young.push(number);
        self.young_count += 1;
        self.young_len += u64::from(len);
        self.fold_peak();
        self.step.events += 1;
        self.step.allocs += 1;
        self.step.survivors += 1;
        Ok(Allocation::Here(self.shared.address(placement.place.start)))
    }

    fn entry(&self, number: u32, edge: u32, (counter, nth): Position) -> Entry {
        let placement = self.graph.placements[number as usize];
        Entry {
            state: self.hash,
            mix: placement.mix,
            start: placement.place.start,
            len: placement.place.len,
            context: self.scopes.context,
            placement: number,
            slot: placement.slot,
            edge,
            counter,
            nth,
        }
    }

    /// Whether nothing lies in the way of an edge's placement; completes its frames. It is asked of every
    /// edge that is looked up: a step seldom does, and what is wrong with a graph ends here.
    pub(super) fn is_usable(&mut self, edge: u32) -> Result<bool, Error> {
        self.sync_placer();
        let place = self.graph.placements[self.graph.edges[edge as usize].placement as usize].place;
        if !self.arena.placer.is_free(place) {
            debug_assert!(self.obstacles > 0, "an edge is disjoint from its state");
            return Ok(false);
        }
        self.arena.is_pinned = self.is_pinned();
        let completed = self.arena.complete(place);
        self.note_trims();
        completed.map_err(|refusal| self.error(refusal, place.len))?;
        Ok(true)
    }

    /// Serves from a recorded edge, and goes on with the tape that it was last seen on.
    pub(super) fn take_edge(&mut self, edge: u32, position: Position) -> Allocation {
        if self
            .recording
            .is_some_and(|recording| edge < recording.first_edge)
        {
            self.recording = None;
        }
        let number = self.graph.edges[edge as usize].placement;
        // Known to the placer at once, or a free before the next look would go unseen. It is up to date.
        let placement = self.graph.placements[number as usize];
        self.arena.placer.occupy(placement.place);
        self.set_known(number);
        let address = self.begin_own(number, edge, position);
        let (branch, index) = self.graph.edges[edge as usize].hint;
        if !self.is_pinned()
            && self
                .tapes
                .entry(branch, index)
                .is_some_and(|entry| entry.edge == edge)
            && self.tapes.branches[branch as usize].epoch == self.epoch
        {
            self.tapes.follow(branch, index as usize + 1);
        }
        Allocation::Here(address)
    }

    fn record(
        &mut self,
        len: Units,
        position: Position,
        obstructed: Option<u32>,
    ) -> Result<Allocation, Error> {
        self.check_uncaptured(len)?;
        let number = self.place(len, Space::Step)?;
        if let Some(edge) = obstructed {
            let old =
                self.graph.placements[self.graph.edges[edge as usize].placement as usize].place;
            self.graph.kill_edge(edge);
            self.arena.placer.unmention(old);
            self.totals.obstructed += 1;
            // Tapes may hold the dead edge.
            self.epoch += 1;
        }
        self.arena
            .placer
            .mention(self.graph.placements[number as usize].place);
        let edge = self.graph.add_edge(self.hash, number);
        if self.recording.is_none() {
            let is_break = self.is_graded() && obstructed.is_none();
            self.recording = Some(Recording {
                first_edge: edge,
                is_break,
            });
            if is_break {
                self.step.breaks += 1;
                self.totals.breaks += 1;
                self.scopes.add_break();
            }
        }
        self.step.recorded += 1;
        self.totals.recorded += 1;
        let address = self.begin_own(number, edge, position);
        Ok(Allocation::Here(address))
    }

    /// Leaves the tape for an entry of the run's own. The placer is up to date.
    fn push(&mut self, entry: Entry) {
        if self.tapes.missed_frees() {
            let placements = &self.graph.placements;
            let in_state = |number: &u32| {
                *number != entry.placement && placements[*number as usize].kind == Kind::Own
            };
            self.tapes
                .note_live(self.table.iter().filter(in_state).collect());
        }
        self.tapes.leave();
        self.tapes.push(entry);
    }

    /// A buffer of the step's own begins at a placement, off the tape.
    fn begin_own(&mut self, number: u32, edge: u32, position: Position) -> crate::units::Address {
        let entry = self.entry(number, edge, position);
        self.push(entry);
        self.scopes.count(position, entry.len);
        self.hash ^= entry.mix;
        self.own_count += 1;
        self.live += u64::from(entry.len);
        self.recent_peak = self.recent_peak.max(self.live);
        self.step.events += 1;
        self.step.allocs += 1;
        self.shared.address(entry.start)
    }
}
