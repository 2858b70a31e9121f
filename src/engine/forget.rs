//! A limit to what is remembered: beyond it, the branches that ran longest ago are forgotten, and the
//! scope paths and positions that no branch is left of.
//!
//! Every edge that a finished run took lies on the tape of its branch, so "recently used" is a property of
//! branches (edges of aborted runs, and of branches that were dropped, are on no tape and go first), and
//! the hot path has nothing to write down. At the beginning of a step nothing of the state is live, so
//! edges may go in any number: the graph is built afresh from the tapes that stay.
//! Placements of live buffers stay too, whatever they are. Forgetting can cost a recording, never an
//! overlap: an edge that stays is as disjoint from its state as before.
//!
//! May import: what `engine` may.

use super::Engine;
use crate::bits::BitSet;
use crate::graph::tape::SURVIVOR;
use crate::mix::MixBuild;

impl Engine {
    /// Forgets branches, and edges on no tape, once there are more edges than the limit, or more scope
    /// paths and positions than that; and places of survivors that are gone.
    pub(super) fn forget_oldest(&mut self) {
        let is_full =
            self.graph.edges.len() > self.edge_limit || self.scopes.remembered() > self.scope_limit;
        // Of those most are survivors' places, which go with no branch.
        let has_places = self.graph.placements.len() > self.place_limit;
        if !(is_full || has_places) || self.is_pinned() {
            return;
        }
        debug_assert_eq!(self.own_count, 0);
        self.sync_placer();
        let kept = self.newest_branches(self.edge_limit / (1 + usize::from(is_full)));
        self.forget_all_but(&kept);
        self.sweep_idle();
    }

    /// Forgets all other branches, and edges on no tape; positions and scope paths that none of these has; and
    /// places of survivors that are gone. A step begins, and the placer is up to date.
    pub(super) fn forget_all_but(&mut self, kept: &[usize]) {
        // A name without a branch records as for the first time, also in strict mode.
        let branches = &self.tapes.branches;
        self.finished
            .retain(|&name| kept.iter().any(|&at| branches[at].name == name));
        let edges_before = self.graph.edge_count();
        self.rebuild(kept, None);
        self.totals.forgotten += edges_before - self.graph.edge_count();
        // Live buffers alone may be more than the limit: not to be looked through every time.
        self.place_limit = self.edge_limit.max(self.graph.placements.len()) * 2;
        self.forget_positions();
        self.forget_paths();
    }

    /// The branches that ran last, as many as have `limit` edges together, and the last one if only it
    /// fits the whole limit; of those only whose tapes hold no dead edge.
    fn newest_branches(&self, limit: usize) -> Vec<usize> {
        let branches = &self.tapes.branches;
        let mut newest: Vec<usize> = (0..branches.len()).collect();
        newest.sort_by_key(|&at| std::cmp::Reverse(branches[at].last_run));
        let mut kept = Vec::new();
        let mut edges = BitSet::default();
        for at in newest {
            let of_branch = || {
                branches[at]
                    .tape
                    .iter()
                    .filter(|entry| entry.edge != SURVIVOR)
            };
            if of_branch().any(|entry| self.graph.edges[entry.edge as usize].dead) {
                continue;
            }
            let mut with = edges.clone();
            of_branch().for_each(|entry| with.insert(entry.edge));
            if with.len()
                <= if kept.is_empty() {
                    self.edge_limit
                } else {
                    limit
                }
            {
                edges = with;
                kept.push(at);
            }
        }
        kept
    }

    /// Forgets survivors' positions and counters that no tape holds.
    fn forget_positions(&mut self) {
        let entries = || self.tapes.branches.iter().flat_map(|branch| &branch.tape);
        let mut used = BitSet::default();
        entries().for_each(|entry| used.insert(entry.counter));
        let new = self
            .scopes
            .retain_counters(|counter| used.contains(counter));
        let survivors = entries().filter(|entry| entry.edge == SURVIVOR);
        let kept: std::collections::HashSet<_, MixBuild> = survivors
            .map(|entry| (new[&entry.counter], entry.nth))
            .collect();
        self.survivors = kept;
        for entry in self
            .tapes
            .branches
            .iter_mut()
            .flat_map(|branch| &mut branch.tape)
        {
            entry.counter = new[&entry.counter];
        }
    }

    /// Forgets scope paths and names of steps that no branch is left of.
    fn forget_paths(&mut self) {
        self.scopes.count_survivors(self.survivors.iter().copied());
        let names = self.tapes.branches.iter().map(|branch| branch.name);
        self.scopes.retain_paths(names);
        // One step may enter more scopes than the limit: not to be looked through every time.
        self.scope_limit = self.edge_limit.max(self.scopes.remembered() * 2);
    }
}
