//! Groups that are used in turn become one.
//!
//! ```text
//!   order     | e | x0 | c0 | x0 | c0 | x1 | c1 | x1 | c1 | …      two halves of each block
//!   merged    | e |        b0         |        b1         | …
//! ```
//!
//! Who named the groups does not know in which order a model uses them. What comes again after a few others would
//! come in twice a round, since the frames of what was left are the first to be taken; together they come in once, as
//! long as that is a small part of the memory.
//!
//! May import: what `ahead` may.

use std::collections::{BTreeMap, BTreeSet};

use super::{Ahead, Group};
use crate::error::Error;

/// After how many turns a group comes again at most, to be one with those between.
const NEAR: usize = 8;

/// A merged group takes at most one in this many of the frames.
const PART: u64 = 4;

impl Ahead {
    /// The group that it is part of, or itself.
    pub(super) fn whole(&self, group: Group) -> Group {
        self.groups[group.number as usize].part_of.unwrap_or(group)
    }

    /// Merges what was used in turn since the first group was; whether there was any. Nothing is entered.
    pub(super) fn merge(&mut self, frames: u64) -> Result<bool, Error> {
        let turns = std::mem::take(&mut self.turns);
        if self.is_parted {
            return Ok(false);
        }
        let mut seen: BTreeMap<Group, usize> = BTreeMap::new();
        let mut is_merged = false;
        for (at, &group) in turns.iter().enumerate() {
            let before = seen.insert(group, at);
            let Some(before) = before.filter(|before| at - before <= NEAR) else {
                continue;
            };
            let turn = turns[before..at].iter();
            let wholes: BTreeSet<Group> = turn.map(|&group| self.whole(group)).collect();
            let pages = wholes.iter().flat_map(|&whole| self.pages_of(whole));
            let pages: BTreeSet<u32> = pages.copied().collect();
            if wholes.len() < 2 || pages.len() as u64 > frames / PART {
                continue;
            }
            if !is_merged {
                // The pages of what is expected are counted.
                self.settle()?;
                self.let_go_all();
                is_merged = true;
            }
            let into = self.whole(group);
            for books in &mut self.groups {
                if books.part_of.is_some_and(|whole| wholes.contains(&whole)) {
                    books.part_of = Some(into);
                }
            }
            for whole in wholes {
                let books = &mut self.groups[whole.number as usize];
                books.part_of = (whole != into).then_some(into);
                books.pages.clear();
            }
            self.groups[into.number as usize].pages = pages.into_iter().collect();
        }
        if is_merged {
            let first = self.first.map(|first| self.whole(first));
            self.unlearn();
            self.first = first;
        }
        Ok(is_merged)
    }

    /// Takes what was merged apart for good, since memory became short; whether there was any. Not while anything is
    /// entered.
    pub(super) fn part(&mut self) -> Result<bool, Error> {
        let is_merged = self.groups.iter().any(|books| books.part_of.is_some());
        if !is_merged || !self.active.is_empty() {
            return Ok(false);
        }
        self.settle()?;
        self.let_go_all();
        self.stop_clock();
        for books in &mut self.groups {
            books.part_of = None;
            books.pages.clone_from(&books.own);
        }
        self.unlearn();
        self.is_parted = true;
        Ok(true)
    }

    /// Forgets what is said in other groups.
    fn unlearn(&mut self) {
        self.follows.clear();
        self.last = (None, None);
        self.first = None;
        self.round.clear();
        self.in_round.clear();
        (self.arranged, self.timed) = (None, None);
    }
}
