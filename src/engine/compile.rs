//! Compiling: all branches are planned again with their lifespans known, and the plan is installed if
//! it holds fewer pages.
//!
//! ```text
//!   tapes + ends --> planner --> windows mapped behind the old ones --> old windows unmapped
//!                                 over the same pages                    pages left over given back
//! ```
//!
//! **What is planned.** The tapes of all branches, laid end to end, are one time line. Each placement is
//! one item; it is live wherever a branch had it live. Edges on no tape (of aborted steps, of branches
//! that were forgotten) are dropped, as they are when the graph is too large.
//!
//! **Why it is sound.** A placement is an identity with a mix of its own; a compile moves places and
//! touches neither identities nor states. Every edge that stays lies on a tape, so the buffers that are
//! live in its source state are items that were live with its placement there, and the plan keeps those
//! disjoint. A state that is reached in another way has the same identities live, hence the same
//! places. Two placements may get one place: then no recorded state has both, and each is found by its
//! place only while it is the live one. A new allocation at a place that placements share takes the
//! identity of any of them: it is not live (its place is free), and states only ever say which
//! identities are live. Identities are numbered, not made from places, so that one recorded later is
//! never taken for one that was moved away.
//!
//! **Memory.** At a step's boundary no buffer of the state is live, so new windows stand over the pages
//! that are there. A plan is installed only if it needs fewer, so nothing is created and the change
//! never holds more than before it. Windows of buffers that outlived their step stay with their pages,
//! out of the plan's reach, until they go. Mapping is all or nothing; what cannot be unmapped
//! afterwards belongs to nobody and is taken away later. So whatever fails, one layout works.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Engine;
use super::rebuild::Numbers;
use crate::error::Error;
use crate::graph::ends;
use crate::graph::tape::SURVIVOR;
use crate::placer::{Place, Space, Units};
use crate::planner::{self, Problem, Rules};
use crate::stats::Compiled;
use crate::units::{ALIGNMENT, Bytes};

impl Engine {
    /// Plans all branches anew and installs the plan if it holds fewer bytes; no step is active.
    pub fn compile(&mut self, time_limit: Duration) -> Result<Compiled, Error> {
        self.lay_out(time_limit, false)
    }

    /// The same for the sake of addresses: installs a plan also if it holds as much, since windows that
    /// no edge mentions go with it.
    pub(super) fn reclaim_addresses(&mut self, time_limit: Duration) -> Result<Compiled, Error> {
        self.lay_out(time_limit, true)
    }

    fn lay_out(&mut self, time_limit: Duration, for_addresses: bool) -> Result<Compiled, Error> {
        let began = Instant::now();
        debug_assert!(self.active.is_none());
        if self.shared.is_pinned() {
            return Err(Error::Pinned);
        }
        self.drain();
        self.end_young();
        self.settle_survivors(false);
        self.sync_placer();
        let (held_before, calls_before) = (self.arena.held(), self.arena.calls());
        let mut report = Compiled {
            held_before,
            held_after: held_before,
            ..Compiled::default()
        };
        let branches = self.compilable();
        let (items, problem) = self.problem(&branches);
        let obstacles: Vec<Place> = self
            .table
            .iter()
            .map(|number| self.graph.placements[number as usize].place)
            .filter(|place| self.arena.placer.space_of_place(*place) == Space::Step)
            .collect();
        // A problem that cannot be stated is too large for the range anyway.
        if let Some(problem) = problem {
            let rules = Rules {
                time_limit,
                ..Rules::default()
            };
            let plan = planner::plan(&problem, rules).plan;
            report.planned = plan.held(&problem);
            report.strategy = plan.strategy;
            let usable = self.arena.usable_frames(&obstacles).len() as u64;
            if plan.frame_count < usable || for_addresses && plan.frame_count == usable {
                let frames: Option<Vec<u32>> = (0..plan.page_count)
                    .map(|page| plan.frame_at(page))
                    .collect();
                let first = self
                    .arena
                    .install(&frames.unwrap_or_default(), &obstacles)
                    .map_err(|refusal| self.error(refusal, 0))?;
                let base = u64::from(first) * (self.arena.granule().0 / ALIGNMENT.0);
                let starts = plan.starts.iter().map(|start| (base + start) as Units);
                let starts: Numbers = items.into_iter().zip(starts).collect();
                self.rebuild(&branches, Some(&starts));
                self.epoch += 1;
                report.is_installed = true;
            }
        }
        report.held_after = self.arena.held();
        report.device_calls = self.arena.calls() - calls_before;
        report.time = began.elapsed();
        self.compiled = Some(report);
        Ok(report)
    }

    /// Branches whose every edge is in use and whose buffers' ends are known.
    fn compilable(&self) -> Vec<usize> {
        let branches = self.tapes.branches.iter().enumerate();
        branches
            .filter(|(_, branch)| {
                ends::fit(&branch.tape, &branch.ends)
                    && branch.tape.iter().all(|entry| {
                        entry.edge == SURVIVOR || !self.graph.edges[entry.edge as usize].dead
                    })
            })
            .map(|(at, _)| at)
            .collect()
    }

    /// The placements of these branches, and the problem whose items they are.
    fn problem(&self, branches: &[usize]) -> (Vec<u32>, Option<Problem>) {
        let mut lifespans: BTreeMap<u32, Vec<std::ops::Range<u64>>> = BTreeMap::new();
        let mut base = 0;
        for &at in branches {
            let branch = &self.tapes.branches[at];
            for (number, (entry, &end)) in (0..).zip(branch.tape.iter().zip(&branch.ends)) {
                if entry.edge != SURVIVOR {
                    lifespans
                        .entry(entry.placement)
                        .or_default()
                        .push(base + number..base + u64::from(end));
                }
            }
            base += branch.tape.len() as u64;
        }
        let items: Vec<u32> = lifespans.keys().copied().collect();
        let sized = lifespans.into_iter().map(|(number, lifespans)| {
            let len = self.graph.placements[number as usize].place.len;
            (Bytes(u64::from(len) * ALIGNMENT.0), lifespans)
        });
        (items, Problem::new(self.arena.granule(), sized).ok())
    }
}
