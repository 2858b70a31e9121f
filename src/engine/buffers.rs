//! The buffers of all branches, for a report.
//!
//! May import: what `engine` may, and `report`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use super::Engine;
use crate::graph::ends;
use crate::graph::tape::{Entry, SURVIVOR};
use crate::mix::MixBuild;
use crate::path;
use crate::placer::NO_FRAME;
use crate::report::{Branch, Buffer, Report};
use crate::units::{ALIGNMENT, Bytes};

impl Engine {
    /// Where the memory goes; no step is active.
    pub fn buffers(&mut self) -> Report {
        let stats = self.stats();
        let ranks = self.ranks();
        let mut scopes = Vec::new();
        let mut scope_of: HashMap<u32, usize, MixBuild> = HashMap::default();
        let branches = self.tapes.latest_first().into_iter().map(|at| {
            let branch = &self.tapes.branches[at];
            let is_known = ends::fit(&branch.tape, &branch.ends);
            let known = if is_known { &branch.tape[..] } else { &[] };
            let buffers = (0..).zip(known.iter().zip(&branch.ends));
            let buffers = buffers.map(|(number, (entry, &end))| {
                let path = self.scopes.path_of(entry.counter);
                let outlives = entry.edge == SURVIVOR;
                Buffer {
                    scope: *scope_of.entry(path).or_insert_with(|| {
                        scopes.push(self.scopes.path_text(path));
                        scopes.len() - 1
                    }),
                    nth: entry.nth,
                    size: Bytes(u64::from(entry.len) * ALIGNMENT.0),
                    lifespan: number..u64::from(end),
                    pieces: if outlives {
                        Vec::new()
                    } else {
                        self.pieces(entry, &ranks)
                    },
                    outlives,
                }
            });
            Branch {
                name: path::of_name(self.scopes.name(branch.name)).into_owned(),
                buffers: buffers.collect(),
            }
        });
        let branches = branches.collect();
        Report {
            stats,
            scopes,
            branches,
        }
    }

    /// The frames under what is on tapes, each with its rank among them.
    fn ranks(&self) -> BTreeMap<u32, u64> {
        let branches = self.tapes.branches.iter();
        let entries = branches.flat_map(|branch| &branch.tape);
        let used = entries.filter(|entry| entry.edge != SURVIVOR);
        let pages: BTreeSet<u32> = used.flat_map(|entry| self.pages_under(entry)).collect();
        let frames = pages
            .into_iter()
            .map(|page| self.arena.placer.frame_of(page));
        let frames: BTreeSet<u32> = frames.filter(|&frame| frame != NO_FRAME).collect();
        frames.into_iter().zip(0..).collect()
    }

    fn pages_under(&self, entry: &Entry) -> Range<u32> {
        let units = (self.arena.granule().0 / ALIGNMENT.0) as u32;
        let end = u64::from(entry.start) + u64::from(entry.len);
        entry.start / units..end.div_ceil(u64::from(units)) as u32
    }

    /// Its bytes in the frames, which are numbered by rank; what lies side by side is one.
    fn pieces(&self, entry: &Entry, ranks: &BTreeMap<u32, u64>) -> Vec<Range<Bytes>> {
        let granule = self.arena.granule().0;
        let begin = u64::from(entry.start) * ALIGNMENT.0;
        let end = begin + u64::from(entry.len) * ALIGNMENT.0;
        let mut pieces: Vec<Range<Bytes>> = Vec::new();
        for page in self.pages_under(entry) {
            let Some(rank) = ranks.get(&self.arena.placer.frame_of(page)) else {
                continue;
            };
            let first = u64::from(page) * granule;
            let within = |address: u64| rank * granule + (address - first);
            let from = Bytes(within(begin.max(first)));
            let to = Bytes(within(end.min(first + granule)));
            match pieces.last_mut() {
                Some(last) if last.end == from => last.end = to,
                _ => pieces.push(from..to),
            }
        }
        pieces
    }
}
