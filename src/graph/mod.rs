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
//! A placement is a place *over certain pages*: where a window was taken away and its addresses were mapped
//! anew, the same place has a new identity, and no state or edge of before is reached through it.
//!
//! Invariants:
//! - no two placements ever have one identity, and no placement's pages change while it has its own;
//! - the placement of a living edge shares no byte of a frame with any placement of its source state
//!   (tests and `validate` check it, nothing here can);
//! - a state has at most one living edge for a size.
//!
//! May import: `mix`, `placer` for `Place`.

pub(crate) mod ends;
pub(crate) mod live;
pub(crate) mod tape;

use std::collections::HashMap;

use crate::mix::{Key, MixBuild};
use crate::placer::{Place, Units};

const NONE: u32 = u32::MAX;

/// One place over one row of pages that buffers were put at, at one time or many.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement {
    /// What it is to a state's hash: made from an identity of its own, so that it stays true when a compile
    /// moves the place.
    pub mix: u128,
    pub place: Place,
    /// Number of the latest mapping under the place. Where the pages were mapped anew since, the place is
    /// another placement, with another identity: states are sets of bytes of frames, not of offsets.
    pub since: u64,
    /// Its entry in the live table.
    pub slot: u32,
    pub kind: Kind,
}

impl Placement {
    /// The placement as the live table keeps it; `number` is its own.
    pub fn live(&self, number: u32) -> live::Live {
        live::Live {
            number,
            len: self.place.len,
            mix: self.mix,
        }
    }
}

/// What a buffer at a placement is to the state, while it is live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Part of the state.
    Own,
    /// In the step's space, but outlived its step: in the way, and in no state.
    Obstacle,
    /// In the survivors' space, and from an earlier step: in no state.
    Survivor,
    /// In the survivors' space, and made in this step.
    Young,
}

/// Where an allocation goes from a state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    pub placement: u32,
    /// Branch and index of a tape entry that was made from this edge; checked before use.
    pub hint: (u32, u32),
    pub dead: bool,
}

/// The identity of no placement; keys of answers are made from it.
const NOWHERE: u64 = 0;

/// States, edges and placements; see the module's page.
#[derive(Debug)]
pub(crate) struct Graph {
    key: Key,
    /// The edge that was recorded last in each state; by half of the hash, since it is only shown.
    states: HashMap<u64, u32, MixBuild>,
    /// The living edge for a size in a state, by [`key`].
    answers: HashMap<u128, u32, MixBuild>,
    pub edges: Vec<Edge>,
    pub placements: Vec<Placement>,
    by_place: HashMap<Place, u32, MixBuild>,
    dead: usize,
    /// Identities that were ever given, here or in the graph before; none is given twice.
    identities: u64,
}

impl Graph {
    pub fn new(key: Key) -> Self {
        Self {
            key,
            states: HashMap::default(),
            answers: HashMap::default(),
            edges: Vec::new(),
            placements: Vec::new(),
            by_place: HashMap::default(),
            dead: 0,
            identities: NOWHERE,
        }
    }

    /// Leaves an empty graph that goes on numbering where this one ended; returns this one.
    pub fn after(graph: &mut Self) -> Self {
        let new = Self {
            identities: graph.identities,
            ..Self::new(graph.key)
        };
        std::mem::replace(graph, new)
    }

    pub fn state_count(&self) -> u64 {
        self.states.len() as u64
    }

    pub fn edge_count(&self) -> u64 {
        (self.edges.len() - self.dead) as u64
    }

    /// The edge for an allocation of `len` in `state`.
    pub fn edge(&self, state: u128, len: Units) -> Option<u32> {
        self.answers.get(&self.question(state, len)).copied()
    }

    /// A size that is recorded for a state, the latest.
    pub fn size(&self, state: u128) -> Option<Units> {
        self.states
            .get(&(state as u64))
            .map(|&edge| self.len_of(edge))
    }

    fn len_of(&self, edge: u32) -> Units {
        self.placements[self.edges[edge as usize].placement as usize]
            .place
            .len
    }

    /// The number of a placement that was made before, over the pages that have been there `since`.
    pub fn placement_at(&self, place: Place, since: u64) -> Option<u32> {
        let number = self.by_place.get(&place).copied()?;
        (self.placements[number as usize].since == since).then_some(number)
    }

    /// Adds a placement, over pages that have been there `since`, with an identity that none ever had.
    pub fn add_placement(&mut self, place: Place, since: u64, slot: u32, kind: Kind) -> u32 {
        let number = u32::try_from(self.placements.len()).expect("placements are numbered by u32");
        assert!(
            number < live::PLACEMENT_LIMIT,
            "the live table numbers 2^30 placements"
        );
        // 2^64 of them are not used up: one each nanosecond would take 500 years.
        self.identities += 1;
        self.placements.push(Placement {
            mix: self.key.mix(self.identities, place.len),
            place,
            since,
            slot,
            kind,
        });
        self.by_place.insert(place, number);
        number
    }

    /// Adds an edge; a former one for this size is dead.
    pub fn add_edge(&mut self, state: u128, placement: u32) -> u32 {
        let number = u32::try_from(self.edges.len()).expect("edges are numbered by u32");
        self.edges.push(Edge {
            placement,
            hint: (NONE, 0),
            dead: false,
        });
        self.states.insert(state as u64, number);
        let question = self.question(state, self.len_of(number));
        if let Some(dead) = self.answers.insert(question, number) {
            debug_assert!(self.edges[dead as usize].dead);
        }
        number
    }

    /// Adds an edge as it was in another graph.
    pub fn keep_edge(&mut self, state: u128, placement: u32, hint: (u32, u32)) -> u32 {
        let number = self.add_edge(state, placement);
        self.edges[number as usize].hint = hint;
        number
    }

    /// Adds a placement as it was in another graph.
    pub fn keep_placement(&mut self, placement: Placement) -> u32 {
        let number = self.placements.len() as u32;
        self.placements.push(placement);
        self.by_place.insert(placement.place, number);
        number
    }

    /// Takes an edge out of use; its number is not given out again.
    pub fn kill_edge(&mut self, edge: u32) {
        self.edges[edge as usize].dead = true;
        self.dead += 1;
    }

    /// Names a size in a state: the hash of a state in which a buffer of that size lies nowhere.
    fn question(&self, state: u128, len: Units) -> u128 {
        state ^ self.key.mix(NOWHERE, len)
    }
}
