//! Who is resident, and who goes when memory is short.
//!
//! ```text
//!   priority   lowest range            ...            highest range
//!   pages      | low ........ high |                | low ........ high |
//!   leave              3rd  2nd 1st |                         5th   4th |
//! ```
//!
//! Invariants, also after any call of the device failed:
//! - a slot has a page only while that page is mapped under it, accessible, and its contents are the
//!   slot's;
//! - a pinned slot has a page; only unpinned slots lose theirs;
//! - a slot that gets a page gets a stamp that no slot of this process ever had;
//! - a range never takes pages from one of higher priority, nor from its own lower addresses: so a
//!   model that is too large keeps its low part and never cycles. What must be in at once
//!   ([`Books::enter`], `beyond`) may take any page that is not pinned.
//!
//! May import: layers 0 and 3, `pages`, `budget`, `accounts`.

mod beyond;
mod evict;

use std::collections::BTreeMap;
use std::ops::Range as Pages32;
use std::sync::Arc;

use self::evict::{Staying, twice};
use super::range::{Range, Slot};
use super::{PageOut, PagerStats, Residency, Stamp};
use crate::accounts::Owner;
use crate::budget::Budget;
use crate::device::{Device, DeviceError, PageId};
use crate::pages::{Pages, Refused};
use crate::units::{Address, Bytes};

/// How often a pin goes on after the device was out of memory although pages had been given back.
const ROUNDS: u32 = 2;

/// A page of a range: the range's number and the page's.
type Spot = (u64, u32);

/// What a pin came to: the stamp, and the runs of pages that are newer than the caller's.
pub(super) struct Brought {
    pub stamp: Stamp,
    pub stale: Vec<Pages32<u32>>,
}

/// What became of pages that are to be used together.
#[derive(Debug, Default)]
pub(super) struct Reached {
    /// The pages that are in memory and were pinned, and their stamps.
    pub stamps: Vec<(u32, u64)>,
    /// Pages that lost a shared frame to them, and that nobody waited for.
    pub taken: Vec<u32>,
}

/// Which pages of its own range somebody may take.
#[derive(Clone, Copy)]
enum Own<'a> {
    /// Those from this one on.
    From(u32),
    /// All but these, which ascend.
    Except(&'a [u32]),
    /// None, and none of other ranges either.
    Nothing,
}

/// See the module's page.
#[derive(Debug)]
pub(super) struct Books {
    ranges: BTreeMap<u64, Range>,
    next_range: u64,
    next_priority: u64,
    budget: Budget,
    stats: PagerStats,
}

impl Books {
    /// What is written down of each page of a range.
    pub const BYTES_A_PAGE: Bytes = Bytes(size_of::<Slot>() as u64);

    pub fn new(budget: Budget) -> Self {
        Self {
            ranges: BTreeMap::new(),
            next_range: 0,
            next_priority: 0,
            budget,
            stats: PagerStats::default(),
        }
    }

    /// Reserves a range of `page_count` pages, of the highest priority.
    pub fn add(
        &mut self,
        device: Arc<dyn Device>,
        page_count: u32,
        page_out: Option<PageOut>,
    ) -> Result<(u64, Address), Refused> {
        let size = Bytes(u64::from(page_count) * device.granule().0);
        let pages = Pages::reserve(
            device,
            size,
            page_count,
            self.budget.clone(),
            Owner::Weights,
        )?;
        let base = pages.base;
        let id = self.next_range;
        self.next_range += 1;
        let range = Range {
            priority: 0,
            pages,
            slots: vec![Slot::default(); page_count as usize],
            rings: Vec::new(),
            is_disturbed: false,
            resident: 0,
            arrivals: 0,
            watermark: page_count,
            seen_returns: 0,
            page_out,
        };
        self.ranges.insert(id, range);
        self.prioritise(id);
        Ok((id, base))
    }

    /// Gives a range back with everything in it; nothing of it is pinned.
    pub fn remove(&mut self, id: u64) {
        let Some(mut range) = self.ranges.remove(&id) else {
            return;
        };
        debug_assert!(range.slots.iter().all(|slot| slot.pins == 0));
        let pages = range.slots.iter_mut().filter_map(|slot| slot.page.take());
        let pages: Vec<PageId> = pages.collect();
        range.pages.close(pages.into_iter());
        self.stats.device_calls += range.pages.calls();
        self.stats.arrivals += range.arrivals;
        self.budget.note_return();
    }

    fn range(&mut self, id: u64) -> &mut Range {
        self.ranges
            .get_mut(&id)
            .expect("a range lives as long as its handles")
    }

    /// Makes a range the last one to give pages up, and lets all of it come back.
    pub fn prioritise(&mut self, id: u64) {
        let (priority, returns) = (self.next_priority, self.budget.returns());
        self.next_priority += 1;
        let range = self.range(id);
        range.priority = priority;
        range.seen_returns = returns;
        range.watermark = range.slots.len() as u32;
    }

    /// Makes pages resident and pins them; `None` when they do not fit, nor `beyond` if they may go there.
    pub fn pin(
        &mut self,
        id: u64,
        pages: &Pages32<u32>,
        since: Stamp,
        beyond: bool,
    ) -> Result<Option<Brought>, Refused> {
        let returns = self.budget.returns();
        if self.is_hopeless(id, pages.len()) {
            self.stats.streamed += 1;
            return Ok(None);
        }
        let range = self.range(id);
        if range.seen_returns != returns {
            range.seen_returns = returns;
            range.watermark = range.slots.len() as u32;
        }
        let all: Vec<u32> = pages.clone().collect();
        let missing = range.missing(&all);
        if !missing.is_empty() {
            if missing
                .iter()
                .any(|&page| range.slots[page as usize].is_alias)
            {
                range.pages.synchronise()?;
                missing.iter().for_each(|&page| range.leave_ring(page));
            }
            let mut took = false;
            let is_refused = pages.end > range.watermark;
            if self.over() > Bytes::ZERO {
                // A page past the limit that the device did not take back may not stay as a spare one.
                self.shed();
            }
            let brought = if is_refused {
                Ok(false)
            } else {
                self.bring(id, Own::From(pages.end), &missing, &mut took)
            };
            if took && brought != Ok(true) {
                // Others lost pages for nothing: they may have them back.
                self.budget.note_return();
            }
            if !brought? {
                self.stats.streamed += 1;
                if !beyond || !self.bring_beyond(id, &all, &missing)? {
                    return Ok(None);
                }
            }
        }
        let slots = &mut self.range(id).slots[pages.start as usize..pages.end as usize];
        let stamp = slots.iter().map(|slot| slot.stamp).max().unwrap_or(0);
        for slot in slots.iter_mut() {
            slot.pins += 1;
            slot.handed_out = true;
        }
        let mut stale: Vec<Pages32<u32>> = Vec::new();
        for (page, slot) in pages.clone().zip(slots) {
            if slot.stamp <= since.0 {
                continue;
            }
            match stale.last_mut() {
                Some(run) if run.end == page => run.end += 1,
                _ => stale.push(page..page + 1),
            }
        }
        Ok(Some(Brought {
            stamp: Stamp(stamp),
            stale,
        }))
    }

    /// Whether so many pages cannot be in at once whatever leaves for them, as far as that can be told without
    /// looking at each.
    fn is_hopeless(&mut self, id: u64, count: usize) -> bool {
        let whole = self.budget.outermost();
        let (limit, used) = (whole.limit(), whole.used());
        let pages = &self.range(id).pages;
        let size = Bytes((count as u64).saturating_mul(pages.granule.0));
        let more = size.saturating_sub(used);
        let is_refused = || {
            let room = pages.device.check_room(more);
            matches!(room, Err(DeviceError::OutOfMemory { .. }))
        };
        size > limit || more > Bytes::ZERO && is_refused()
    }

    /// Makes pages that are used together resident and pins them, whatever unpinned page has to go for it:
    /// of lower ranges, of this one, then of higher ones. `None` when they do not fit. `pages` ascend.
    pub fn enter(&mut self, id: u64, pages: &[u32]) -> Result<Option<Reached>, Refused> {
        let range = self.range(id);
        let taken = range.take_over(pages, |_| false);
        let missing = range.missing(pages);
        if !missing.is_empty() {
            if missing
                .iter()
                .any(|&page| range.slots[page as usize].is_alias)
            {
                // Work that is enqueued may still read through the addresses.
                range.pages.synchronise()?;
            }
            missing.iter().for_each(|&page| range.leave_ring(page));
            let mut took = false;
            let brought = self.bring(id, Own::Except(pages), &missing, &mut took);
            if took && brought != Ok(true) {
                self.budget.note_return();
            }
            if !brought? {
                self.stats.streamed += 1;
                return Ok(None);
            }
        }
        let stamps = self.range(id).pin_all(pages.iter().copied());
        Ok(Some(Reached { stamps, taken }))
    }

    /// Makes as many of the pages resident as can be without taking one from what is in use, from what `keeps`
    /// names or from others, and pins those. `pages` ascend.
    pub fn enter_ahead(&mut self, id: u64, pages: &[u32], keeps: impl Fn(u32) -> bool) -> Reached {
        let budget = self.budget.free();
        let range = self.range(id);
        let taken = range.take_over(pages, keeps);
        let room = budget.0 / range.pages.granule.0 + range.pages.spare_count();
        let mut missing = range.missing(pages);
        missing.retain(|&page| !range.is_ring_taken(page));
        missing.truncate(room as usize);
        if !missing.is_empty() {
            // Whoever needs them asks again: a refusal is told then.
            drop(self.bring(id, Own::Nothing, &missing, &mut false));
        }
        let range = self.range(id);
        let is_in = |&page: &u32| range.slots[page as usize].page.is_some();
        let resident: Vec<u32> = pages.iter().copied().filter(is_in).collect();
        let stamps = range.pin_all(resident.into_iter());
        Reached { stamps, taken }
    }

    /// Lets pages that were entered go when they are needed.
    pub fn unpin_all(&mut self, id: u64, pages: impl Iterator<Item = u32>) {
        let range = self.range(id);
        for page in pages {
            let slot = &mut range.slots[page as usize];
            debug_assert!(slot.pins > 0, "only pinned pages are unpinned");
            slot.pins -= 1;
        }
    }

    /// Has the pages of each ring share one frame from now on; the others have their own. `false` while
    /// something is pinned.
    pub fn arrange(&mut self, id: u64, rings: Vec<Vec<u32>>) -> Result<bool, Refused> {
        let range = self.range(id);
        if range.slots.iter().any(|slot| slot.pins > 0) {
            return Ok(false);
        }
        range.pages.synchronise()?;
        range.arrange(rings);
        Ok(true)
    }

    /// Pages that a range owns or could own, if it took all from others that is not pinned.
    pub fn capacity(&mut self, id: u64) -> u64 {
        let others = self.ranges.iter().filter(|&(&other, _)| other != id);
        let unpinned = |slot: &&Slot| slot.page.is_some() && slot.pins == 0;
        let takeable: usize = others
            .map(|(_, range)| range.slots.iter().filter(unpinned).count())
            .sum();
        let free = self.budget.free();
        let range = self.range(id);
        let granule = range.pages.granule.0;
        let device = range.pages.device.memory().map(|info| info.free);
        let free = device.map_or(free, |device| device.min(free));
        range.pages.held().0 / granule + free.0 / granule + takeable as u64
    }

    /// Whether a page had to leave its ring since the last arrangement.
    pub fn is_disturbed(&mut self, id: u64) -> bool {
        self.range(id).is_disturbed
    }

    /// Whether a range is the last one to give pages up.
    pub fn is_first(&mut self, id: u64) -> bool {
        self.range(id).priority + 1 == self.next_priority
    }

    /// Lets pinned pages go when they are needed.
    pub fn unpin(&mut self, id: u64, pages: &Pages32<u32>) {
        let mut leaving = Vec::new();
        let range = self.range(id);
        for page in pages.clone() {
            let slot = &mut range.slots[page as usize];
            debug_assert!(slot.pins > 0, "only pinned pages are unpinned");
            slot.pins -= 1;
            if slot.pins == 0 && slot.beyond {
                leaving.push((id, page));
            }
        }
        if !leaving.is_empty() {
            // What the device refuses stays, unpinned, for the next one who is short.
            let watermark = range.watermark;
            drop(self.evict(&leaving, u64::MAX, &mut Staying::default()));
            self.range(id).watermark = watermark;
        }
    }

    /// Puts pages under `missing`, all or none but for a device that fails half-way. Whether they fit;
    /// `took` says whether others lost pages.
    fn bring(
        &mut self,
        id: u64,
        own: Own,
        missing: &[u32],
        took: &mut bool,
    ) -> Result<bool, Refused> {
        let granule = self.range(id).pages.granule;
        let mut taken: Vec<PageId> = Vec::with_capacity(missing.len());
        let mut refused = Staying::default();
        let (mut rounds, mut asked) = (0, 0);
        let spare = self.range(id).pages.spare_count();
        if self.budget.free().0 / granule.0 + spare < missing.len() as u64 {
            self.shed();
        }
        // Before the first one is created, and after each time that something was given up for them.
        let mut has_room = false;
        let fits = loop {
            let wanted = missing.len() - taken.len();
            if wanted == 0 {
                break Ok(true);
            }
            let pages = &mut self.range(id).pages;
            let mut room = pages.budget.free().0 / granule.0;
            if room + pages.spare_count() < wanted as u64
                && let Ok(info) = pages.device.memory()
            {
                // Where the device has even less, all of the shortfall is looked for at once.
                room = room.min(info.free.0 / granule.0);
            } else if !has_room && let Some((_, info)) = pages.lacking(wanted) {
                room = room.min(info.free.0 / granule.0);
            }
            has_room = true;
            let mut short = (wanted as u64).saturating_sub(room + pages.spare_count());
            if short == 0 {
                match pages.take() {
                    Ok(page) => {
                        taken.push(page);
                        continue;
                    }
                    Err(error) if !error.is_out_of_memory() => break Err(error),
                    Err(_) if rounds < ROUNDS => {
                        rounds += 1;
                        short = wanted as u64;
                    }
                    Err(_) => break Ok(false),
                }
            }
            has_room = false;
            // What others have beyond the limit has to leave room too.
            short += self.over().0.div_ceil(granule.0);
            asked = twice(asked, short);
            let victims = self.victims(Some((id, own)), asked, &refused);
            if (victims.len() as u64) < short {
                break Ok(false);
            }
            // Each turn has fewer pages to choose from: it ends, whatever the device refuses.
            match self.evict(&victims, short, &mut refused) {
                Ok(_) => *took = true,
                Err(error) => break Err(error),
            }
        };
        if fits != Ok(true) {
            self.give_back(id, taken);
            return fits;
        }
        self.settle(id, missing, taken, missing.len())?;
        Ok(true)
    }

    fn give_back(&mut self, id: u64, taken: Vec<PageId>) {
        let pages = &mut self.range(id).pages;
        for page in taken {
            // A refused page is spare.
            drop(pages.give_back(page));
        }
    }

    /// Maps `taken` under `missing`, of which the first `within` are within the budget. A refusal leaves whole runs in, and gives the rest back.
    fn settle(
        &mut self,
        id: u64,
        missing: &[u32],
        taken: Vec<PageId>,
        within: usize,
    ) -> Result<(), Refused> {
        let beyond_from = missing.get(within).copied().unwrap_or(u32::MAX);
        let range = self.range(id);
        let mut taken = taken.into_iter();
        for run in missing.chunk_by(|a, b| a + 1 == *b) {
            let ids: Vec<PageId> = taken.by_ref().take(run.len()).collect();
            if let Err(error) = range.pages.map(run[0], &ids) {
                range.pages.discard(run[0], &ids);
                self.give_back(id, taken.collect());
                return Err(error);
            }
            range.arrived(run, &ids, beyond_from);
        }
        Ok(())
    }

    /// What is in memory of some pages.
    pub fn residency(&mut self, id: u64, pages: &Pages32<u32>) -> Residency {
        let range = self.range(id);
        let granule = range.pages.granule.0;
        let slots = &range.slots[pages.start as usize..pages.end as usize];
        let bytes = |count: usize| Bytes(count as u64 * granule);
        let resident = slots.iter().filter(|slot| slot.page.is_some()).count();
        Residency {
            resident: bytes(resident),
            evicted: bytes(slots.len() - resident),
            pinned: bytes(slots.iter().filter(|slot| slot.pins > 0).count()),
        }
    }

    pub fn stats(&self) -> PagerStats {
        let mut stats = self.stats;
        let whole = self.budget.outermost();
        (stats.used, stats.limit) = (whole.used(), whole.limit());
        stats.weights_limit = self.budget.limit().min(whole.limit());
        for range in self.ranges.values() {
            let granule = range.pages.granule.0;
            let pinned = range.slots.iter().filter(|slot| slot.pins > 0).count();
            stats.reserved.0 += range.pages.reserved.0;
            stats.resident.0 += u64::from(range.resident) * granule;
            stats.pinned.0 += pinned as u64 * granule;
            stats.device_calls += range.pages.calls();
            stats.arrivals += range.arrivals;
        }
        stats
    }
}
