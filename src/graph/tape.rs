//! Tapes: the last run of each branch, alloc by alloc, so that a replay is one compare.
//!
//! ```text
//!   tape of "cond"     | a0 | a1 | a2 | a3 | a4 |
//!   this run            ^^^^^^^^^^^^^^  |               pieces: cond 0..3,
//!                                       x  x  x         three entries of its own,
//!   tape of "uncond"                       ^^^^^^^      uncond 7..9
//! ```
//!
//! A run follows a tape as long as each entry's state, size and context agree. Where one does not,
//! the run is kept as pieces of tapes and entries of its own; at the end they become the tape of its
//! branch. Frees are not on the tape: they only change the state, which every entry checks.
//!
//! May import: `ends`, `live`, `mix`, `placer` for units.

use std::cmp::Reverse;
use std::time::Duration;

use super::ends::{self, Notes};
use super::live::Live;
use crate::mix;
use crate::placer::Units;

/// The edge number of an entry that was served from the survivors' space.
pub(crate) const SURVIVOR: u32 = u32::MAX;
/// Branches that are kept; the one that ran longest ago goes first.
const BRANCH_LIMIT: usize = 64;

/// One alloc of a run. One cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Entry {
    /// Hash of the state that it starts from.
    pub state: u128,
    /// Mix of the placement.
    pub mix: u128,
    pub start: Units,
    pub len: Units,
    /// Hash of the scope path and of the sizes so far in this run of the innermost scope.
    pub context: u32,
    pub placement: u32,
    pub slot: u32,
    pub edge: u32,
    /// Number of (path, size), and which allocation of that size in the scope's run this is.
    pub counter: u32,
    pub nth: u32,
}

const _: () = assert!(size_of::<Entry>() == 64);

impl Entry {
    /// Its buffer, for the live table.
    #[inline]
    pub fn live(&self) -> Live {
        Live {
            number: self.placement,
            len: self.len,
            mix: self.mix,
        }
    }
}

/// A distinct path of a step: its name and its sequence of sizes.
#[derive(Debug, Default)]
pub(crate) struct Branch {
    pub name: u32,
    pub key: u64,
    pub tape: Vec<Entry>,
    /// For each entry, the first one before which its buffer was freed; empty where that is not known.
    pub ends: Vec<u32>,
    /// Value of the engine's epoch at which every entry was found safe to follow.
    pub epoch: u64,
    pub last_run: u64,
    pub events: u64,
    pub runs: u64,
    pub replays: u64,
    pub breaks: u64,
    pub last_breaks: u64,
    pub device_calls: u64,
    pub last_device_calls: u64,
    pub peak: u64,
    pub time: Duration,
}

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Entries of a branch's tape.
    Tape { branch: u32, from: u32, to: u32 },
    /// Entries of the run's own.
    Own { from: u32, to: u32 },
}

/// All branches, and the run that is going on.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Tapes {
    /// The tape that is followed, taken out of its branch.
    pub tape: Vec<Entry>,
    /// Next entry of `tape`; `usize::MAX` while none is followed.
    pub cursor: usize,
    /// Entries before this one are counted in their scopes; the engine keeps it.
    pub counted: usize,
    pub branches: Vec<Branch>,
    pieces: Vec<Piece>,
    own: Vec<Entry>,
    /// Frees that were seen while this run recorded.
    notes: Notes,
    branch: Option<u32>,
    from: usize,
}

impl Tapes {
    /// Begins a run, on a tape or on none.
    pub fn begin(&mut self, branch: Option<u32>) {
        self.pieces.clear();
        self.own.clear();
        self.notes.clear();
        self.branch = None;
        self.cursor = usize::MAX;
        if let Some(branch) = branch {
            self.follow(branch, 0);
        }
    }

    /// Follows the tape of a branch from an entry on.
    pub fn follow(&mut self, branch: u32, from: usize) {
        debug_assert!(self.branch.is_none());
        self.tape = std::mem::take(&mut self.branches[branch as usize].tape);
        (self.branch, self.from, self.cursor) = (Some(branch), from, from);
        self.counted = from;
    }

    /// Leaves the tape that is followed.
    pub fn leave(&mut self) {
        let Some(branch) = self.branch.take() else {
            return;
        };
        self.branches[branch as usize].tape = std::mem::take(&mut self.tape);
        if self.cursor > self.from {
            self.pieces.push(Piece::Tape {
                branch,
                from: self.from as u32,
                to: self.cursor as u32,
            });
        }
        self.cursor = usize::MAX;
    }

    /// Adds an entry that no followed tape holds.
    pub fn push(&mut self, entry: Entry) {
        let at = self.own.len() as u32;
        self.own.push(entry);
        match self.pieces.last_mut() {
            Some(Piece::Own { to, .. }) => *to += 1,
            _ => self.pieces.push(Piece::Own {
                from: at,
                to: at + 1,
            }),
        }
    }

    /// Notes that a buffer was freed since the last entry of the run's own.
    pub fn note_end(&mut self, placement: u32) {
        self.notes.end(self.own.len(), placement);
    }

    /// Whether frees since the last entry of the run's own went unseen: a tape was followed.
    pub fn missed_frees(&self) -> bool {
        let followed = self.branch.is_some() && self.cursor_was_used();
        followed || matches!(self.pieces.last(), Some(Piece::Tape { .. }))
    }

    fn cursor_was_used(&self) -> bool {
        self.cursor != usize::MAX && self.cursor > self.from
    }

    /// Notes what is live before the next entry of the run's own.
    pub fn note_live(&mut self, placements: Vec<u32>) {
        self.notes.live(self.own.len(), placements);
    }

    /// Empties the tapes of all branches but these. Branches keep their numbers: hints name them.
    pub fn keep_only(&mut self, kept: &[usize]) {
        debug_assert!(self.branch.is_none());
        for (at, branch) in self.branches.iter_mut().enumerate() {
            if !kept.contains(&at) {
                (branch.tape, branch.ends) = (Vec::new(), Vec::new());
            }
        }
    }

    /// Forgets what the last run was made of.
    pub fn forget_run(&mut self) {
        debug_assert!(self.branch.is_none());
        self.pieces.clear();
        self.own = Vec::new();
    }

    /// The entry that a hint names, if there is one. No tape may be followed.
    pub fn entry(&self, branch: u32, index: u32) -> Option<&Entry> {
        debug_assert!(self.branch.is_none());
        self.branches.get(branch as usize)?.tape.get(index as usize)
    }

    /// Entries on the tape of a branch.
    pub fn len_of(&self, branch: usize) -> usize {
        if self.branch == Some(branch as u32) {
            self.tape.len()
        } else {
            self.branches[branch].tape.len()
        }
    }

    /// The entries of the run so far (or of the last one), in order. No tape may be followed.
    pub fn run(&self) -> impl Iterator<Item = &Entry> + '_ {
        debug_assert!(self.branch.is_none());
        self.pieces.iter().flat_map(|piece| match *piece {
            Piece::Tape { branch, from, to } => {
                &self.branches[branch as usize].tape[from as usize..to as usize]
            }
            Piece::Own { from, to } => &self.own[from as usize..to as usize],
        })
    }

    /// Ends the run: finds or makes its branch and makes the run its tape. The second value says
    /// whether the run came from that branch's tape alone.
    pub fn end(&mut self, name: u32, now: u64) -> (u32, bool) {
        self.leave();
        if let [
            Piece::Tape {
                branch,
                from: 0,
                to,
            },
        ] = self.pieces[..]
        {
            let replayed = &self.branches[branch as usize];
            if to as usize == replayed.tape.len() && replayed.name == name {
                return (branch, true);
            }
        }
        let ends = ends::ends(&self.pieces, &self.own, &self.notes, &self.branches);
        self.notes = Notes::default();
        // Either way the run's own entries take no memory from here on.
        let tape = match self.pieces[..] {
            [Piece::Own { .. }] => {
                let mut own = std::mem::take(&mut self.own);
                own.shrink_to_fit();
                own
            }
            _ => self.run().copied().collect(),
        };
        self.own = Vec::new();
        let key = tape.iter().fold(tape.len() as u64, |key, entry| {
            u64::from(mix::chain(key as u32, entry.len))
                | (key.rotate_left(7) ^ u64::from(entry.len)) << 32
        });
        let found = self
            .branches
            .iter()
            .position(|branch| branch.name == name && branch.key == key);
        let branch = found.unwrap_or_else(|| self.new_branch(name, key));
        self.branches[branch].tape = tape;
        self.branches[branch].ends = ends.unwrap_or_default();
        let len = self.branches[branch].tape.len() as u32;
        self.pieces.clear();
        let branch = branch as u32;
        self.pieces.push(Piece::Tape {
            branch,
            from: 0,
            to: len,
        });
        self.branches[branch as usize].last_run = now;
        (branch, false)
    }

    fn new_branch(&mut self, name: u32, key: u64) -> usize {
        let new = Branch {
            name,
            key,
            ..Branch::default()
        };
        if self.branches.len() < BRANCH_LIMIT {
            self.branches.push(new);
            return self.branches.len() - 1;
        }
        let oldest = (0..BRANCH_LIMIT)
            .min_by_key(|&at| self.branches[at].last_run)
            .expect("not empty");
        self.branches[oldest] = new;
        oldest
    }

    /// The branches by number, the one that ran last first.
    pub fn latest_first(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.branches.len()).collect();
        order.sort_by_key(|&at| Reverse(self.branches[at].last_run));
        order
    }

    /// The branch of a name that ran last.
    pub fn last_of(&self, name: u32) -> Option<u32> {
        let of_name = (0..self.branches.len()).filter(|&at| self.branches[at].name == name);
        of_name
            .max_by_key(|&at| self.branches[at].last_run)
            .map(|at| at as u32)
    }
}
