//! The reference model: what a compiler must do, written as naively as it can be said.
//!
//! Sets are `BTreeSet`s, edges are looked up by the whole set of live placements, the owner of every
//! physical byte is written down, and nothing is incremental. The model does not choose addresses: it
//! predicts *how* an allocation is answered ([`Expect`]) and accepts any recorded address that is
//! disjoint, byte of frame by byte of frame, from every live buffer.
//!
//! [`pair`] drives an engine and this model side by side, [`program`] makes programs of events.
//! This folder uses the public API only and shares no code with the engine.

#![allow(dead_code, reason = "each test binary uses its own part of this folder")]

pub mod devices;
pub mod pair;
pub mod program;

use std::collections::{BTreeMap, BTreeSet};

use memory_compiler::{Snapshot, Stats};

/// Address and size class of a live buffer.
pub type Placement = (u64, u64);
/// Scope path, size class, n-th allocation of that class in the scope's run.
pub type Position = (String, u64, u64);

/// How an allocation must be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// From an edge: at this address.
    Replayed(u64),
    /// Placed anew, anywhere that is disjoint from every live buffer.
    Recorded,
    /// From the survivor region.
    Survivor,
    /// Not by the compiler.
    Elsewhere,
    /// Not at all: a strict break.
    Refused,
}

/// What a live buffer is to the running step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    InState,
    /// Made by an earlier step, before its position was known to survive.
    Obstacle,
    SurvivorRegion,
}

#[derive(Clone, Debug)]
pub struct Buffer {
    pub class: u64,
    pub home: Home,
    pub step: u64,
    pub position: Position,
}

#[derive(Clone, Debug)]
pub struct ScopeRun {
    name: String,
    strict: bool,
    counts: BTreeMap<u64, u64>,
}

/// The naive compiler.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub granule: u64,
    pub strict: bool,
    pub live: BTreeMap<u64, Buffer>,
    /// Numbers that `Stats` must show; fields that the model does not predict stay zero.
    pub stats: Stats,
    /// Events of the step, and most bytes live in it.
    pub events: u64,
    pub step_peak: u64,
    pub step_survivors: u64,
    /// Source state and class to address and the tick at which it was recorded.
    edges: BTreeMap<(BTreeSet<Placement>, u64), (u64, u64)>,
    /// Frame of each virtual page that an edge mentions: must never change.
    pinned: BTreeMap<u64, u32>,
    /// Owner of each physical byte: (frame, first byte in it) to (end, buffer).
    owners: BTreeMap<(u32, u64), (u64, u64)>,
    base: u64,
    frames: BTreeMap<u64, u32>,
    marked: BTreeSet<Position>,
    finished: BTreeSet<String>,
    clock: u64,
    run: Option<u64>,
    pub scopes: Vec<ScopeRun>,
    pub paused: u32,
    aborted: bool,
}

impl Model {
    pub fn new(granule: u64, strict: bool) -> Self {
        Self { granule, strict, ..Self::default() }
    }

    pub fn class(size: u64) -> u64 {
        size.next_multiple_of(512)
    }

    /// The live placements of the step.
    pub fn state(&self) -> BTreeSet<Placement> {
        let in_state = self.live.iter().filter(|(_, buffer)| buffer.home == Home::InState);
        in_state.map(|(&address, buffer)| (address, buffer.class)).collect()
    }

    pub fn path(&self) -> String {
        self.scopes.iter().map(|scope| scope.name.as_str()).collect::<Vec<_>>().join("/")
    }

    fn position(&self, class: u64) -> Position {
        let n = self.scopes.last().and_then(|scope| scope.counts.get(&class));
        (self.path(), class, n.copied().unwrap_or(0))
    }

    /// Classes that have an edge in the present state.
    pub fn answered(&self) -> BTreeSet<u64> {
        let state = self.state();
        self.edges.keys().filter(|(from, _)| *from == state).map(|&(_, class)| class).collect()
    }

    pub fn predict(&self, size: u64) -> Expect {
        let class = Self::class(size);
        if size == 0 || self.paused > 0 {
            return Expect::Elsewhere;
        }
        if self.marked.contains(&self.position(class)) {
            return Expect::Survivor;
        }
        if let Some(&(address, _)) = self.edges.get(&(self.state(), class))
            && !self.obstructed(address, class)
        {
            return Expect::Replayed(address);
        }
        let strict = self.strict || self.scopes.iter().any(|scope| scope.strict);
        if strict && self.finished.contains(&self.scopes[0].name) {
            return Expect::Refused;
        }
        Expect::Recorded
    }

    /// Does a buffer of an earlier step own a byte of this placement?
    fn obstructed(&self, address: u64, class: u64) -> bool {
        self.pieces(address, class).iter().any(|&(frame, from, to)| {
            let mut owners = self.owners.range((frame, 0)..(frame, to)).filter(|(_, owner)| owner.0 > from);
            owners.any(|(_, (_, owner))| self.live[owner].home == Home::Obstacle)
        })
    }

    /// The frame bytes under a placement, page by page.
    fn pieces(&self, address: u64, class: u64) -> Vec<(u32, u64, u64)> {
        let (start, end) = (address - self.base, address - self.base + class);
        let pages = start / self.granule..end.div_ceil(self.granule);
        let piece = |page: u64| {
            let frame = *self.frames.get(&page).unwrap_or_else(|| panic!("page {page} of {address:#x} has no frame"));
            let first = page * self.granule;
            (frame, start.max(first) - first, end.min(first + self.granule) - first)
        };
        pages.map(piece).collect()
    }

    /// Takes over which frames the engine has mapped where.
    pub fn look(&mut self, snapshot: &Snapshot) {
        self.base = snapshot.base.0;
        self.frames = snapshot.frames.iter().map(|&(page, frame)| (page.into(), frame)).collect();
        for (page, frame) in &self.pinned {
            assert_eq!(self.frames.get(page), Some(frame), "the frame of page {page} changed although an edge mentions it");
        }
    }

    /// The engine answered as [`predict`](Self::predict) said. `after` is what it looks like since.
    pub fn allocated(&mut self, expect: Expect, size: u64, address: u64, after: Option<&Snapshot>) {
        let (class, key) = (Self::class(size), (self.state(), Self::class(size)));
        let mut position = self.position(class);
        self.clock += 1;
        self.events += 1;
        if expect == Expect::Recorded && self.edges.remove(&key).is_some() {
            self.stats.obstructed += 1;
            self.pin();
        }
        if let Some(snapshot) = after {
            self.look(snapshot);
        }
        match expect {
            Expect::Replayed(recorded) => {
                assert_eq!(address, recorded, "a replayed buffer moved");
                self.stats.replayed_step += 1;
                self.stats.replayed_total += 1;
                if self.run.is_some_and(|start| self.edges[&key].1 < start) {
                    self.run = None;
                }
            }
            Expect::Recorded => {
                if self.run.is_none() {
                    self.run = Some(self.clock);
                    let counts = u64::from(self.finished.contains(&self.scopes[0].name));
                    self.stats.breaks_step += counts;
                    self.stats.breaks_total += counts;
                }
                self.stats.recorded_step += 1;
                self.stats.recorded_total += 1;
                self.edges.insert(key, (address, self.clock));
                self.pin();
            }
            Expect::Survivor => self.step_survivors += 1,
            Expect::Elsewhere | Expect::Refused => unreachable!("nothing was allocated"),
        }
        self.own(address, class);
        let scope = self.scopes.last_mut().expect("a step is active");
        position.2 = *scope.counts.entry(class).and_modify(|n| *n += 1).or_insert(1) - 1;
        let home = if expect == Expect::Survivor { Home::SurvivorRegion } else { Home::InState };
        self.live.insert(address, Buffer { class, home, step: self.stats.steps, position });
        if expect == Expect::Survivor || expect == Expect::Recorded {
            self.survivors_are_apart();
        }
        self.count_live();
    }

    /// No byte of a frame may belong to two buffers, and no frame may stand twice under one.
    fn own(&mut self, address: u64, class: u64) {
        let pieces = self.pieces(address, class);
        let frames: BTreeSet<u32> = pieces.iter().map(|piece| piece.0).collect();
        assert_eq!(frames.len(), pieces.len(), "a frame stands twice under the buffer at {address:#x}");
        for (frame, from, to) in pieces {
            let other = self.owners.range((frame, 0)..(frame, to)).find(|(_, owner)| owner.0 > from);
            assert_eq!(other, None, "bytes {from}..{to} of frame {frame}, wanted by {address:#x}, have an owner");
            self.owners.insert((frame, from), (to, address));
        }
    }

    fn pin(&mut self) {
        let pages = self.edges.iter().flat_map(|((_, class), &(address, _))| {
            ((address - self.base) / self.granule..).zip(self.pieces(address, *class))
        });
        self.pinned = pages.map(|(page, piece)| (page, piece.0)).collect();
    }

    /// The frames of the survivor region appear in no edge.
    fn survivors_are_apart(&self) {
        let in_edges: BTreeSet<u32> = self.pinned.values().copied().collect();
        for (address, buffer) in self.live.iter().filter(|(_, buffer)| buffer.home == Home::SurvivorRegion) {
            for (frame, ..) in self.pieces(*address, buffer.class) {
                assert!(!in_edges.contains(&frame), "an edge mentions frame {frame} of the survivor {address:#x}");
            }
        }
    }

    /// Whether a buffer was live there; it no longer is.
    pub fn freed(&mut self, address: u64) -> bool {
        let live = self.live.remove(&address).is_some();
        self.owners.retain(|_, owner| owner.1 != address);
        self.stats.bad_frees += u64::from(!live);
        self.events += u64::from(live);
        self.count_live();
        live
    }

    fn count_live(&mut self) {
        let old = self.live.values().filter(|buffer| buffer.step < self.stats.steps);
        let live: u64 = self.live.values().map(|buffer| buffer.class).sum();
        self.stats.survivors = old.clone().count() as u64;
        self.stats.survivor_bytes.0 = old.map(|buffer| buffer.class).sum();
        self.stats.live.0 = live;
        self.stats.peak.0 = self.stats.peak.0.max(live);
        self.step_peak = self.step_peak.max(live);
        self.stats.edges = self.edges.len() as u64;
        self.stats.survivor_positions = self.marked.len() as u64;
    }

    pub fn begin(&mut self, name: &str) {
        for buffer in self.live.values_mut().filter(|buffer| buffer.home == Home::InState) {
            buffer.home = Home::Obstacle;
            if !self.aborted {
                self.marked.insert(buffer.position.clone());
            }
        }
        self.stats.steps += 1;
        (self.stats.breaks_step, self.stats.recorded_step, self.stats.replayed_step) = (0, 0, 0);
        (self.events, self.step_peak, self.step_survivors) = (0, 0, 0);
        (self.run, self.paused, self.aborted) = (None, 0, false);
        self.scopes.clear();
        self.open(name, false);
        self.count_live();
    }

    pub fn open(&mut self, name: &str, strict: bool) {
        self.scopes.push(ScopeRun { name: name.to_owned(), strict, counts: BTreeMap::new() });
    }

    pub fn end(&mut self, finished: bool) {
        if finished {
            self.finished.insert(self.scopes[0].name.clone());
        }
        self.aborted = !finished;
        self.stats.aborts += u64::from(!finished);
    }
}
