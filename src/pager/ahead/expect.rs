//! Which groups are expected next, and have their bytes come in before they are entered.
//!
//! ```text
//!   entered    a b c a b | now c: what followed (b, c)? a. What followed (c, a)? b. …
//!   expected                 a | b | …                as deep as frames are free
//! ```
//!
//! May import: what `ahead` may.

use super::{Ahead, Expected, Group};
use crate::error::Error;

/// How many rounds the first group of one may not come.
const PATIENCE: usize = 4;

/// The most turns of a round in which groups are looked for that are used in turn.
const TURNS: usize = 1 << 14;

/// How many groups come in ahead at most, where others may have their memory meanwhile.
const DEPTH: usize = 64;

impl Ahead {
    /// Lets go of what came in for others than `group` before it, when its copies are done.
    pub(super) fn forget_unless(&mut self, group: Group) -> Result<(), Error> {
        if self.next.front().is_none_or(|first| first.group == group) {
            return Ok(());
        }
        if self.next.iter().any(|next| !next.pinned.is_empty()) {
            self.settle()?;
        }
        while self.next.front().is_some_and(|first| first.group != group) {
            self.let_go_first();
        }
        Ok(())
    }

    pub(super) fn let_go_first(&mut self) {
        let first = self.next.pop_front();
        first.into_iter().for_each(|first| self.let_go(first));
    }

    pub(super) fn let_go_all(&mut self) {
        while !self.next.is_empty() {
            self.let_go_first();
        }
    }

    fn let_go(&mut self, expected: Expected) {
        for &page in &self.groups[expected.group.number as usize].pages {
            self.pages[page as usize].expected -= 1;
        }
        if !expected.pinned.is_empty() {
            let mut locked = self.range.0.pager.lock();
            let pinned = expected.pinned.into_iter();
            locked.books.unpin_all(self.range.0.id, pinned);
        }
    }

    pub(super) fn learn(&mut self, group: Group) {
        if let (before, Some(last)) = self.last {
            self.follows.insert((before, last), group);
            self.follows.insert((None, last), group);
        }
        self.last = (self.last.1, Some(group));
        self.since_first += 1;
        let is_first = self.first == Some(group);
        if !is_first && self.since_first > PATIENCE * (self.round.len() + 1) {
            // It was of no round: another one begins here.
            self.first = None;
            self.round.clear();
            self.in_round.clear();
            self.turns.clear();
            self.stop_clock();
        }
        if *self.first.get_or_insert(group) == group {
            self.since_first = 0;
            self.in_round.clear();
            self.in_round.extend(self.round.iter().copied());
            self.turns.clear();
        }
        if self.turns.len() < TURNS {
            self.turns.push(group);
        }
        if self.in_round.insert(group) {
            self.round.push(group);
        }
    }

    /// Has the groups come in that follow, as far as there is room beside what is entered.
    pub(super) fn look_ahead(&mut self) {
        if !self.carrier.is_beside() {
            return;
        }
        // Who holds pages for what is only expected keeps them from steps.
        let depth = if self.carrier.is_work_of_the_device() {
            DEPTH
        } else {
            1
        };
        // What came in by half is looked at again.
        if let Some(half) = self.next.pop_back_if(|last| !last.is_whole) {
            self.let_go(half);
        }
        let mut last = self.last;
        for expected in &self.next {
            last = (last.1, Some(expected.group));
        }
        while self.next.len() < depth {
            let (before, Some(group)) = last else { break };
            let next = self.follows.get(&(before, group));
            let next = next.or_else(|| self.follows.get(&(None, group))).copied();
            let is_new = |next: &Group| {
                !self.active.contains(next) && self.next.iter().all(|other| other.group != *next)
            };
            let Some(next) = next.filter(is_new) else {
                break;
            };
            if !self.bring_ahead(next) {
                break;
            }
            last = (Some(group), Some(next));
        }
    }

    /// Has a group come in behind those that are expected already; whether all of it does.
    fn bring_ahead(&mut self, group: Group) -> bool {
        let reached = {
            let keeps = |page: u32| self.pages[page as usize].expected > 0;
            let mut locked = self.range.0.pager.lock();
            let pages = &self.groups[group.number as usize].pages;
            locked.books.enter_ahead(self.range.0.id, pages, keeps)
        };
        let filled = self.fill(&reached);
        let is_filled = filled.is_ok();
        match filled {
            Ok(copied) => self.stats.copied_ahead.0 += copied.0,
            Err(error) => {
                // Whoever enters it asks again, and is told.
                tracing::warn!(%error, "no weights ahead of their use");
                self.is_unordered = true;
            }
        }
        let mut pinned: Vec<u32> = reached.stamps.into_iter().map(|(page, _)| page).collect();
        let is_whole = is_filled && pinned.len() == self.pages_of(group).len();
        if self.carrier.is_work_of_the_device() {
            // A step or another model may have them before they are used.
            let mut locked = self.range.0.pager.lock();
            locked.books.unpin_all(self.range.0.id, pinned.drain(..));
        }
        for &page in &self.groups[group.number as usize].pages {
            self.pages[page as usize].expected += 1;
        }
        self.next.push_back(Expected {
            group,
            pinned,
            is_whole,
        });
        is_whole
    }
}
