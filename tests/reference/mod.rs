//! The reference model: what a compiler must do, written as naively as it can be said.
//!
//! Sets are `BTreeSet`s, edges are looked up by the whole set of live placements, the owner of every
//! physical byte is written down, and nothing is incremental. The model does not choose addresses: it
//! predicts *how* an allocation is answered ([`Expect`]) and accepts any recorded address that is
//! disjoint, byte of frame by byte of frame, from every live buffer.
//!
//! [`pair`] drives an engine and this model side by side; this folder uses the public API only and shares no code with the engine.

#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod child;
pub mod devices;
pub mod faulty;
pub mod many;
mod memory;
pub mod pair;
pub mod program;
pub mod storm;
pub mod weights;

use std::collections::{BTreeMap, BTreeSet};

use memory::Memory;
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
pub enum Part {
    InState,
    /// Made by an earlier step, before its position was known to survive.
    Obstacle,
    SurvivorRegion,
}

#[derive(Clone, Debug)]
pub struct Buffer {
    pub class: u64,
    pub part: Part,
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
    memory: Memory,
    marked: BTreeSet<Position>,
    finished: BTreeSet<String>,
    clock: u64,
    /// The break that is going on: when it began, and whether it counts.
    run: Option<(u64, bool)>,
    pub scopes: Vec<ScopeRun>,
    pub paused: u32,
    aborted: bool,
}

impl Model {
    pub fn new(granule: u64, strict: bool) -> Self {
        Self {
            strict,
            memory: Memory::new(granule),
            ..Self::default()
        }
    }

    pub fn class(size: u64) -> u64 {
        size.next_multiple_of(512)
    }

    /// The live placements of the step.
    pub fn state(&self) -> BTreeSet<Placement> {
        let live = self.live.iter();
        let in_state = live.filter(|(_, buffer)| buffer.part == Part::InState);
        in_state.map(|(&at, buffer)| (at, buffer.class)).collect()
    }

    pub fn path(&self) -> String {
        let names = self.scopes.iter().map(|scope| scope.name.as_str());
        names.collect::<Vec<_>>().join("/")
    }

    fn position(&self, class: u64) -> Position {
        let scope = self.scopes.last();
        let n = scope.and_then(|scope| scope.counts.get(&class));
        (self.path(), class, n.copied().unwrap_or(0))
    }

    /// Classes that have an edge in the present state.
    pub fn answered(&self) -> BTreeSet<u64> {
        let state = self.state();
        let here = self.edges.keys().filter(|(from, _)| *from == state);
        here.map(|&(_, class)| class).collect()
    }

    /// Does a buffer of an earlier step own a byte of this placement?
    fn obstructed(&self, address: u64, class: u64) -> bool {
        let mut owners = self.memory.owners_in(address, class).into_iter();
        owners.any(|owner| self.live[&owner].part == Part::Obstacle)
    }

    fn pin(&mut self) {
        let edges = self.edges.iter();
        let places = edges.map(|((_, class), &(address, _))| (address, *class));
        self.memory.pin(places);
    }

    pub fn predict(&self, size: u64) -> Expect {
        let class = Self::class(size);
        if size == 0 || self.paused > 0 {
            return Expect::Elsewhere;
        }
        if self.marked.contains(&self.position(class)) {
            return Expect::Survivor;
        }
        let edge = self.edges.get(&(self.state(), class));
        match edge {
            Some(&(address, _)) if !self.obstructed(address, class) => Expect::Replayed(address),
            None if self.is_strict() && self.run.is_none_or(|(_, counts)| counts) => {
                Expect::Refused
            }
            _ => Expect::Recorded,
        }
    }

    fn is_strict(&self) -> bool {
        let strict = self.strict || self.scopes.iter().any(|scope| scope.strict);
        strict && self.finished.contains(&self.scopes[0].name)
    }

    /// The engine answered as [`predict`](Self::predict) said. `after` is what it looks like since.
    pub fn allocated(&mut self, expect: Expect, size: u64, address: u64, after: Option<&Snapshot>) {
        let (class, key) = (Self::class(size), (self.state(), Self::class(size)));
        let position = self.position(class);
        self.clock += 1;
        self.events += 1;
        let moved = expect == Expect::Recorded && self.edges.remove(&key).is_some();
        if moved {
            self.stats.obstructed += 1;
            self.pin();
        }
        if let Some(snapshot) = after {
            self.memory.look(snapshot);
        }
        match expect {
            Expect::Replayed(recorded) => {
                assert_eq!(address, recorded, "a replayed buffer moved");
                self.stats.replayed_step += 1;
                self.stats.replayed_total += 1;
                if self
                    .run
                    .is_some_and(|(start, _)| self.edges[&key].1 < start)
                {
                    self.run = None;
                }
            }
            Expect::Recorded => {
                if self.run.is_none() {
                    let counts = !moved && self.finished.contains(&self.scopes[0].name);
                    self.run = Some((self.clock, counts));
                    self.stats.breaks_step += u64::from(counts);
                    self.stats.breaks_total += u64::from(counts);
                }
                self.stats.recorded_step += 1;
                self.stats.recorded_total += 1;
                self.edges.insert(key, (address, self.clock));
                self.pin();
            }
            Expect::Survivor => self.step_survivors += 1,
            Expect::Elsewhere | Expect::Refused => unreachable!("nothing was allocated"),
        }
        self.memory.own(address, class);
        let scope = self.scopes.last_mut().expect("a step is active");
        scope.counts.insert(class, position.2 + 1);
        let part = if expect == Expect::Survivor {
            Part::SurvivorRegion
        } else {
            Part::InState
        };
        let step = self.stats.steps;
        self.live.insert(
            address,
            Buffer {
                class,
                part,
                step,
                position,
            },
        );
        if expect == Expect::Survivor || expect == Expect::Recorded {
            // The frames of the survivor region appear in no edge.
            for (&address, buffer) in &self.live {
                if buffer.part == Part::SurvivorRegion {
                    self.memory.is_apart(address, buffer.class);
                }
            }
        }
        self.count_live();
    }

    /// Whether a buffer was live there; it no longer is.
    pub fn freed(&mut self, address: u64) -> bool {
        let live = self.live.remove(&address).is_some();
        self.memory.disown(address);
        self.stats.bad_frees += u64::from(!live);
        self.events += u64::from(live);
        self.count_live();
        live
    }

    fn count_live(&mut self) {
        let old = self
            .live
            .values()
            .filter(|buffer| buffer.step < self.stats.steps);
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
        for buffer in self.live.values_mut() {
            if buffer.part == Part::InState
                && !self.aborted
                && self.marked.insert(buffer.position.clone())
            {
                // The next run of that step goes another way, and records it.
                let name = buffer.position.0.split('/').next();
                self.finished.remove(name.unwrap_or_default());
            }
            if buffer.part == Part::InState {
                buffer.part = Part::Obstacle;
            }
        }
        self.stats.steps += 1;
        (self.stats.breaks_step, self.stats.recorded_step) = (0, 0);
        self.stats.replayed_step = 0;
        (self.events, self.step_peak, self.step_survivors) = (0, 0, 0);
        (self.run, self.paused, self.aborted) = (None, 0, false);
        self.scopes.clear();
        self.open(name, false);
        self.count_live();
    }

    pub fn open(&mut self, name: &str, strict: bool) {
        self.scopes.push(ScopeRun {
            name: name.to_owned(),
            strict,
            counts: BTreeMap::new(),
        });
    }

    pub fn end(&mut self, finished: bool) {
        if finished {
            self.finished.insert(self.scopes[0].name.clone());
        }
        self.aborted = !finished;
        self.stats.aborts += u64::from(!finished);
    }
}
