//! Until which entry each buffer of a run was live: what a compile needs to know beyond the tape.
//!
//! ```text
//!   entry       0    1    2    3    4           the end of an alloc is the number of the first
//!   alloc       A    B    C    A    D           entry before which it was freed
//!   freed            ^A        ^B
//!   end         1    3    5    5    5           5: live when the run's last alloc was made
//! ```
//!
//! Frees are not on the tape, and the hot path writes nothing down. While a run records, each of its
//! own entries brings the placer up to date anyway, and what it learns has ended is noted here. Where a
//! followed tape was left, what is live then is noted instead, as the frees in between went unseen.
//! Within a piece of a tape the frees are those of that tape: equal states have equal buffers.
//!
//! [`ends`] checks every state's hash against the buffers that it thinks are live. A run for which they
//! disagree has no ends, and its branch is left out of a compile.
//!
//! May import: `tape`, `mix`.

use std::collections::HashMap;

use super::tape::{Branch, Entry, Piece, SURVIVOR};
use crate::mix::MixBuild;

/// What was seen just before an entry of the run's own.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// `(own entry, placement that has ended)`.
    ended: Vec<(u32, u32)>,
    /// `(own entry, all placements that are live)`.
    live: Vec<(u32, Vec<u32>)>,
}

impl Notes {
    pub fn clear(&mut self) {
        self.ended.clear();
        self.live.clear();
    }

    pub fn end(&mut self, own: usize, placement: u32) {
        self.ended.push((own as u32, placement));
    }

    pub fn live(&mut self, own: usize, placements: Vec<u32>) {
        self.live.push((own as u32, placements));
    }
}

/// The buffers that are live at a point of the run.
#[derive(Debug, Default)]
struct Live {
    /// The entry of each placement, and its mix.
    entries: HashMap<u32, (u32, u128), MixBuild>,
    hash: u128,
    ends: Vec<u32>,
}

impl Live {
    fn end(&mut self, placement: u32) {
        let now = self.ends.len() as u32;
        if let Some((entry, mix)) = self.entries.remove(&placement) {
            self.ends[entry as usize] = now;
            self.hash ^= mix;
        }
    }

    /// Whether the entry's state is the one that is thought to be.
    fn begin(&mut self, entry: &Entry) -> bool {
        let agrees = entry.state == self.hash;
        self.ends.push(u32::MAX);
        if entry.edge != SURVIVOR {
            let number = self.ends.len() as u32 - 1;
            if self
                .entries
                .insert(entry.placement, (number, entry.mix))
                .is_some()
            {
                return false;
            }
            self.hash ^= entry.mix;
        }
        agrees
    }
}

/// The end of each entry of a run that is given by its pieces; `None` if the notes do not fit.
pub(crate) fn ends(
    pieces: &[Piece],
    own: &[Entry],
    notes: &Notes,
    branches: &[Branch],
) -> Option<Vec<u32>> {
    let mut live = Live::default();
    // For each branch, its placements by the entry before which they ended.
    let mut by_end: HashMap<u32, Vec<(u32, u32)>, MixBuild> = HashMap::default();
    let (mut next_ended, mut next_live) = (0, 0);
    for piece in pieces {
        match *piece {
            Piece::Own { from, to } => {
                for at in from..to {
                    let known = notes.live.get(next_live).filter(|note| note.0 == at);
                    if let Some((_, known)) = known {
                        next_live += 1;
                        let gone: Vec<u32> = live.entries.keys().copied().collect();
                        let kept: std::collections::HashSet<u32, MixBuild> =
                            known.iter().copied().collect();
                        gone.into_iter()
                            .filter(|number| !kept.contains(number))
                            .for_each(|n| live.end(n));
                    }
                    while let Some(&(own, placement)) = notes.ended.get(next_ended)
                        && own <= at
                    {
                        next_ended += 1;
                        if known.is_none() {
                            live.end(placement);
                        }
                    }
                    if !live.begin(&own[at as usize]) {
                        return None;
                    }
                }
            }
            Piece::Tape { branch, from, to } => {
                let of = &branches[branch as usize];
                // Its buffers before the piece are this run's: the states are equal.
                if of.ends.len() != of.tape.len() {
                    return None;
                }
                let ended = by_end.entry(branch).or_insert_with(|| {
                    let ends = of.ends.iter().zip(&of.tape);
                    // Also of entries that are served from the survivors' space only since: their
                    // placements may be live here by way of another edge.
                    let mut ended: Vec<_> =
                        ends.map(|(&end, entry)| (end, entry.placement)).collect();
                    ended.sort_unstable();
                    ended
                });
                let mut next = ended.partition_point(|&(end, _)| end < from);
                for at in from..to {
                    while let Some(&(_, placement)) = ended.get(next).filter(|ended| ended.0 == at)
                    {
                        next += 1;
                        live.end(placement);
                    }
                    if !live.begin(&of.tape[at as usize]) {
                        return None;
                    }
                }
            }
        }
    }
    let last = live.ends.len() as u32;
    live.ends.iter_mut().for_each(|end| *end = (*end).min(last));
    Some(live.ends)
}

/// Whether the states on a tape are those of the buffers that its ends say are live: not so after an
/// entry that is served from the survivors' space only since the tape was made.
pub(crate) fn fit(tape: &[Entry], ends: &[u32]) -> bool {
    if tape.len() != ends.len() {
        return false;
    }
    // The mixes that leave the hash before each entry.
    let mut leaving = vec![0; tape.len() + 1];
    let mut hash = 0;
    (0..).zip(tape.iter().zip(ends)).all(|(at, (entry, &end))| {
        let at: usize = at;
        hash ^= leaving[at];
        let agrees = entry.state == hash && end as usize > at && end as usize <= tape.len();
        if agrees && entry.edge != SURVIVOR {
            hash ^= entry.mix;
            leaving[end as usize] ^= entry.mix;
        }
        agrees
    })
}
