//! Layer 2: the step graph. States are sets of live placements, known by their hash; edges say where
//! an allocation of a size goes in a state.
//!
//! ```text
//!   {}  --alloc 8-->  {A}  --alloc 16-->  {A,B}  --free A, free B (any order)-->  {}
//!                      \--alloc 24-->  {A,C}          another branch from the same state
//! ```
//!
//! A state stores no set: its hash is the XOR of its placements' mixes, and the compiler keeps the
//! live bits ([`live::LiveTable`]). Frees need no edge. Where a recorded path reaches a known hash it
//! has joined the graph.
//!
//! Invariants:
//! - the placement of a living edge shares no byte of a frame with any placement of its source state
//!   (tests and `validate` check it, nothing here can);
//! - a state has at most one living edge for a size.
//!
//! May import: `mix`, `placer` for `Place`.

pub(crate) mod live;
pub(crate) mod tape;

use std::collections::HashMap;

use crate::mix::{self, MixBuild};
use crate::placer::{Place, Units};

const NONE: u32 = u32::MAX;

/// One place that buffers were put at, at one time or many.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement {
    pub mix: u128,
    pub place: Place,
    /// Its entry in the live table.
    pub slot: u32,
    pub kind: Kind,
}

/// What a buffer at a placement is to the state, while it is live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Part of the state.
    Own,
    /// In the step's space, but outlived its step: in the way, and in no state.
    Obstacle,
    /// In the survivors' space: in no state.
    Survivor,
}

/// Where an allocation goes from a state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    pub placement: u32,
    next: u32,
    /// Branch and index of a tape entry that was made from this edge; checked before use.
    pub hint: (u32, u32),
    pub dead: bool,
}

/// States, edges and placements; see the module's page.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    /// First edge of each state.
    states: HashMap<u128, u32, MixBuild>,
    pub edges: Vec<Edge>,
    pub placements: Vec<Placement>,
    by_place: HashMap<Place, u32, MixBuild>,
    dead: usize,
}

impl Graph {
    pub fn state_count(&self) -> u64 {
        self.states.len() as u64
    }

    pub fn edge_count(&self) -> u64 {
        (self.edges.len() - self.dead) as u64
    }

    /// The edge for an allocation of `len` in `state`.
    pub fn edge(&self, state: u128, len: Units) -> Option<u32> {
        self.edges_of(state).find(|&edge| self.len_of(edge) == len)
    }

    /// The sizes that are recorded for a state.
    pub fn sizes(&self, state: u128) -> impl Iterator<Item = Units> + '_ {
        self.edges_of(state).map(|edge| self.len_of(edge))
    }

    fn edges_of(&self, state: u128) -> impl Iterator<Item = u32> + '_ {
        let mut next = self.states.get(&state).copied().unwrap_or(NONE);
        std::iter::from_fn(move || {
            let here = next;
            next = self.edges.get(here as usize)?.next;
            Some(here)
        })
        .filter(|&edge| !self.edges[edge as usize].dead)
    }

    fn len_of(&self, edge: u32) -> Units {
        self.placements[self.edges[edge as usize].placement as usize].place.len
    }

    /// The number of a placement that was made before.
    pub fn placement_at(&self, place: Place) -> Option<u32> {
        self.by_place.get(&place).copied()
    }

    pub fn add_placement(&mut self, place: Place, slot: u32, kind: Kind) -> u32 {
        let number = u32::try_from(self.placements.len()).expect("placements are numbered by u32");
        self.placements.push(Placement { mix: mix::mix(place.start, place.len), place, slot, kind });
        self.by_place.insert(place, number);
        number
    }

    /// Adds an edge; there is no living one for this size.
    pub fn add_edge(&mut self, state: u128, placement: u32) -> u32 {
        let number = u32::try_from(self.edges.len()).expect("edges are numbered by u32");
        let first = self.states.entry(state).or_insert(NONE);
        self.edges.push(Edge { placement, next: *first, hint: (NONE, 0), dead: false });
        *first = number;
        number
    }

    /// Takes an edge out of use; its number is not given out again.
    pub fn kill_edge(&mut self, edge: u32) {
        self.edges[edge as usize].dead = true;
        self.dead += 1;
    }
}
