//! Which pages leave when memory is short, and how many are looked at for it.
//!
//! ```text
//!   short of 2   | x  x | x  x  x  x | x  o  x  o  -  -  -  - |      x may not leave, o leaves, - is left alone
//!   asked for    |  2   |     4      |           8            |
//! ```
//!
//! Each turn waits for the device once, and may look at twice as many pages as the one before: so there are few turns,
//! however many pages may not leave. Pages leave in order, and no more of them than are needed.
//!
//! May import: what `books` may.

use std::collections::HashSet;

use super::{Books, Own, Spot};
use crate::mix::MixBuild;
use crate::pager::range::Range;
use crate::pages::Refused;

/// Pages that could not leave.
pub(super) type Staying = HashSet<Spot, MixBuild>;

/// How many pages a turn asks for that is `short` of some, after one that asked for `asked`.
pub(super) fn twice(asked: u64, short: u64) -> u64 {
    short.max(asked.saturating_mul(2))
}

impl Books {
    /// The first `limit` pages to go: for pages of a range, or for a step.
    pub(super) fn victims(
        &self,
        whose: Option<(u64, Own)>,
        limit: u64,
        refused: &Staying,
    ) -> Vec<Spot> {
        if matches!(whose, Some((_, Own::Nothing))) {
            return Vec::new();
        }
        let mut ranges: Vec<(&u64, &Range)> = self.ranges.iter().collect();
        ranges.sort_by_key(|(_, range)| range.priority);
        let mut victims = Vec::new();
        for (&id, range) in ranges {
            let own = whose.filter(|&(own, _)| own == id).map(|(_, own)| own);
            let may_go = |page: u32| match own {
                None => true,
                Some(Own::From(first)) => page >= first,
                Some(Own::Except(kept)) => kept.binary_search(&page).is_err(),
                Some(Own::Nothing) => false,
            };
            let unpinned = (0..range.slots.len() as u32).rev().filter(|&page| {
                let slot = &range.slots[page as usize];
                slot.page.is_some()
                    && slot.pins == 0
                    && may_go(page)
                    && !refused.contains(&(id, page))
            });
            if range.resident > 0 {
                let left = limit as usize - victims.len();
                victims.extend(unpinned.take(left).map(|page| (id, page)));
            }
            if victims.len() as u64 == limit || matches!(own, Some(Own::From(_))) {
                break;
            }
        }
        victims
    }

    /// Takes pages out of memory, until `count` left, with one synchronisation. Returns how many the device got
    /// back; those that could not leave are added to `refused`.
    pub(super) fn evict(
        &mut self,
        victims: &[Spot],
        mut count: u64,
        refused: &mut Staying,
    ) -> Result<u64, Refused> {
        let Some(&(first, _)) = victims.first() else {
            return Ok(0);
        };
        self.range(first).pages.synchronise()?;
        self.stats.evicting += 1;
        let before = self.held();
        for &(id, page) in victims {
            if count == 0 {
                break;
            }
            let range = self.range(id);
            if range.leave(page) {
                range.watermark = range.watermark.min(page);
                self.stats.evictions += 1;
                count -= 1;
            } else {
                refused.insert((id, page));
            }
        }
        self.shed();
        // Only this lock's holder changes it.
        Ok(before - self.held())
    }

    /// Tries again to give up what the device refused to take back.
    pub(super) fn shed(&mut self) {
        self.ranges
            .values_mut()
            .for_each(|range| range.pages.shed());
    }

    /// Pages that the ranges own, resident or not.
    pub(super) fn held(&self) -> u64 {
        let held = |range: &Range| range.pages.held().0 / range.pages.granule.0;
        self.ranges.values().map(held).sum()
    }

    /// Evicts until `count` pages were given back, or none is left to evict; returns how many were.
    pub fn relieve(&mut self, count: u64) -> u64 {
        let before = self.held();
        self.shed();
        let mut given = before - self.held();
        let (mut refused, mut asked) = (Staying::default(), 0);
        while given < count {
            asked = twice(asked, count - given);
            let victims = self.victims(None, asked, &refused);
            if victims.is_empty() {
                break;
            }
            match self.evict(&victims, count - given, &mut refused) {
                Ok(more) => given += more,
                Err(error) => {
                    tracing::warn!(%error, "no weights evicted");
                    break;
                }
            }
        }
        given
    }

    /// Evicts what is unpinned of one range; it may come back at once.
    pub fn empty(&mut self, id: u64) -> Result<u64, Refused> {
        let count = self.range(id).slots.len() as u32;
        let slots = &self.range(id).slots;
        let victims: Vec<Spot> = (0..count)
            .rev()
            .filter(|&page| {
                let slot = &slots[page as usize];
                slot.page.is_some() && slot.pins == 0
            })
            .map(|page| (id, page))
            .collect();
        let watermark = self.range(id).watermark;
        let given = self.evict(&victims, u64::MAX, &mut Staying::default());
        self.range(id).watermark = watermark;
        self.budget.note_return();
        given
    }
}
