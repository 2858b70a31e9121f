//! Layer 4: a virtual range under a step graph, and the frames in it.
//!
//! ```text
//!   Placer (which place)  +  Pages (which memory)  =  Arena: a place that can be written to
//! ```
//!
//! A frame is *complete* when it has a page and all of its virtual pages are mapped. Trim makes
//! frames incomplete, a failed call may; [`Arena::complete`] makes one whole again under the same
//! virtual pages, so that recorded addresses stay true.
//!
//! What could not be had whatever is given up for it is refused before it is planned, what the device has not before
//! its first page is created: nobody pays for an absurd request, in time or in memory. Where pages come from, and
//! what is done when they are short, is in `supply`.
//!
//! May import: layers 0, 2 (`placer`), 3, `pages`, `budget`, `accounts`.

mod supply;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use crate::accounts::{Account, Of, Owner};
use crate::bits::BitSet;
use crate::budget::Budget;
use crate::device::{Call, Device, DeviceError, Mappings, PageId};
use crate::error::Error;
use crate::pages::{Pages, Refused};
use crate::placer::{NO_FRAME, Place, Placer, Plan, Source, Space, Units, row_count};
use crate::shortage::Shortage;
use crate::units::{ALIGNMENT, Address, Bytes};

/// Why the arena has no memory for a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The scope and what is live are the engine's to add, as in the next one.
    OverBudget(Box<Shortage>),
    OutOfMemory(Box<Shortage>),
    AddressSpace,
    Mappings(Mappings),
    Device {
        call: Call,
        source: DeviceError,
    },
}

/// Why an arena has no addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NotReserved {
    /// What was asked for last.
    least: Bytes,
    refused: Refused,
}

impl NotReserved {
    /// What it means to who asked for `asked` bytes of addresses.
    pub fn error(self, asked: Bytes) -> Error {
        let Self { least, refused } = self;
        let is_limit = refused.is_for_want_of_addresses();
        match refused {
            Refused::Device { source, .. } if is_limit => Error::Reservation {
                asked,
                least,
                source,
            },
            Refused::Device { call, source } => Error::refused(call, source),
            Refused::Budget => unreachable!("addresses are claimed of no budget"),
        }
    }
}

/// From this size on a place is refused before it is planned, where it cannot be had.
const LARGE: Bytes = Bytes::mib(32);

/// Fewer addresses are not worth trying where more were asked for.
const LEAST_ADDRESSES: Bytes = Bytes::gib(1);

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Device {
                source: DeviceError::Mappings { mappings, .. },
                ..
            } => Self::Mappings(mappings),
            Refused::Device { call, source } => Self::Device { call, source },
            // Only a page is claimed, and `supply` says what became of that.
            Refused::Budget => Self::OverBudget(Box::default()),
        }
    }
}

/// See the module's page.
#[derive(Debug)]
pub(crate) struct Arena {
    pub placer: Placer,
    pages: Pages,
    /// The page of each frame.
    page_of: Vec<Option<PageId>>,
    /// Frames without a page, or with an unmapped virtual page.
    incomplete: BitSet,
    /// Grows when a frame becomes incomplete.
    pub trims: u64,
    /// No page is given back, whatever is missing elsewhere.
    pub is_pinned: bool,
}

impl Arena {
    /// Reserves `address_space` bytes, rounded down to granules; half of them where so many are refused for
    /// want of addresses, and half again, but not less than 1 GiB.
    pub fn new(
        device: Arc<dyn Device>,
        address_space: Bytes,
        budget: Budget,
    ) -> Result<Self, NotReserved> {
        let granule = device.granule();
        let page_units = u32::try_from(granule.0 / ALIGNMENT.0).expect("a granule is below 2 TiB");
        // Places are counted in 32-bit units: 2 TiB of addresses.
        let most = u64::from(u32::MAX / page_units) * granule.0;
        let wanted = address_space.min(Bytes(most));
        let mut size = wanted;
        let (pages, page_count) = loop {
            let page_count = (size.0 / granule.0) as u32;
            let whole = Bytes(u64::from(page_count) * granule.0);
            match Pages::reserve(
                Arc::clone(&device),
                whole,
                page_count / 2,
                budget.clone(),
                Owner::Steps,
            ) {
                Ok(pages) => break (pages, page_count),
                Err(refused) if refused.is_for_want_of_addresses() && size > LEAST_ADDRESSES => {
                    size = Bytes(size.0 / 2).max(LEAST_ADDRESSES);
                }
                Err(refused) => {
                    let least = whole;
                    return Err(NotReserved { least, refused });
                }
            }
        };
        if size < wanted {
            let reserved = pages.reserved;
            tracing::warn!(%wanted, %reserved, "fewer addresses than Options::address_space");
        }
        Ok(Self {
            placer: Placer::new(page_units, page_count),
            pages,
            page_of: Vec::new(),
            incomplete: BitSet::default(),
            trims: 0,
            is_pinned: false,
        })
    }

    pub fn base(&self) -> Address {
        self.pages.base
    }

    pub fn reserved(&self) -> Bytes {
        self.pages.reserved
    }

    pub fn granule(&self) -> Bytes {
        self.pages.granule
    }

    pub fn held(&self) -> Bytes {
        self.pages.held()
    }

    /// What others see of it.
    pub fn account(&self) -> &Account {
        &self.pages.account
    }

    pub fn calls(&self) -> u64 {
        self.pages.calls()
    }

    pub fn device(&self) -> &Arc<dyn Device> {
        &self.pages.device
    }

    /// Whether any frame is incomplete.
    pub fn is_trimmed(&self) -> bool {
        self.incomplete.len() > 0
    }

    /// Units in a page.
    fn page_units(&self) -> Units {
        (self.granule().0 / ALIGNMENT.0) as Units
    }

    /// The frames under a place that has some.
    fn frames_under(&self, place: Place) -> Vec<u32> {
        let frames = self.placer.pieces(place).map(|(frame, _, _)| frame);
        frames.filter(|&frame| frame != NO_FRAME).collect()
    }

    /// The frames that a plan stands over, and how many pages it needs beside them.
    fn frames_of(&self, plan: &Plan) -> (Vec<u32>, usize) {
        let mut frames = self.frames_under(plan.place);
        let sources = plan.maps.iter().map(|&(_, source)| source);
        frames.extend(sources.clone().filter_map(|source| match source {
            Source::Frame(frame) => Some(frame),
            Source::New => None,
        }));
        (
            frames,
            sources.filter(|source| *source == Source::New).count(),
        )
    }

    /// Whether every frame under `place` is complete.
    pub fn is_complete(&self, place: Place) -> bool {
        !self.is_trimmed()
            || self
                .placer
                .pieces(place)
                .all(|(frame, _, _)| !self.incomplete.contains(frame))
    }

    /// Chooses a place, makes it accessible and marks it used. A refusal changes nothing.
    pub fn place(&mut self, len: Units, space: Space) -> Result<Place, Refusal> {
        self.check_hopeless(Bytes(u64::from(len) * ALIGNMENT.0))?;
        let placed = self.try_place(len, space);
        placed.map_err(|refusal| self.advise(refusal, len, space))
    }

    fn try_place(&mut self, len: Units, space: Space) -> Result<Place, Refusal> {
        let plan = self.placer.plan(len, space).ok_or(Refusal::AddressSpace)?;
        if plan.maps.is_empty() {
            self.complete_frames(&self.frames_under(plan.place), 0)?;
            self.placer.occupy(plan.place);
            return Ok(plan.place);
        }
        let (frames, new_count) = self.frames_of(&plan);
        self.complete_frames(&frames, new_count)?;
        if space == Space::Survivors {
            self.reuse_loose(new_count)?;
        }
        let new = self.take_pages(new_count, 0, &frames)?;
        match self.map_plan(&plan, &new) {
            Ok(()) => Ok(plan.place),
            Err(refusal) => {
                let news = plan
                    .maps
                    .iter()
                    .filter(|(_, source)| *source == Source::New);
                for (&(page, _), &id) in news.zip(&new) {
                    self.pages.discard(page, &[id]);
                }
                Err(refusal)
            }
        }
    }

    /// Refuses what could not be had if all that weights and steps own were given up for it, at once: a plan
    /// takes time and memory for each page.
    pub fn check_hopeless(&self, size: Bytes) -> Result<(), Refusal> {
        if size <= self.granule() {
            return Ok(());
        }
        let whole = size.checked_round_up(self.granule());
        let whole = whole.unwrap_or(Bytes(u64::MAX));
        if whole > self.pages.budget.limit() {
            return Err(Refusal::OverBudget(self.hopeless(Of::Budget, whole)));
        }
        // Smaller ones are planned in no time, and then have all that others give up for them.
        if whole < LARGE {
            return Ok(());
        }
        let owned = || {
            let holdings = self.account().holdings(Of::Memory);
            Bytes(holdings.compilers.0 + holdings.weights.0)
        };
        let before = owned();
        if self.pages.device.check_room(whole).is_ok() {
            return Ok(());
        }
        // A place needs that many pages at once; each that is owned already may come to be one of them, also where
        // it is on its way from one owner to another.
        let more = whole.saturating_sub(before.max(owned()));
        if more == Bytes::ZERO {
            return Ok(());
        }
        match self.pages.device.check_room(more) {
            Err(DeviceError::OutOfMemory { .. }) => {
                Err(Refusal::OutOfMemory(self.hopeless(Of::Memory, whole)))
            }
            _ => Ok(()),
        }
    }

    fn map_plan(&mut self, plan: &Plan, new: &[PageId]) -> Result<(), Refusal> {
        let mut new = new.iter().copied();
        let ids: Vec<PageId> = plan
            .maps
            .iter()
            .map(|&(_, source)| match source {
                Source::Frame(frame) => self.page_of[frame as usize].expect("completed above"),
                Source::New => new.next().expect("one page for each new frame"),
            })
            .collect();
        self.map_row(plan.maps[0].0, &ids)?;
        let frames = self.placer.commit(plan);
        self.page_of
            .resize(self.placer.frame_count() as usize, None);
        for (frame, id) in frames.into_iter().zip(ids) {
            self.page_of[frame as usize] = Some(id);
            self.placer.set_order(frame, id.0);
        }
        Ok(())
    }

    /// Maps pages under consecutive virtual pages, where that leaves the rest of the process mappings enough.
    fn map_row(&mut self, first: u32, ids: &[PageId]) -> Result<(), Refusal> {
        if let Some(mappings) = self.mappings() {
            // What they are, and the gap that they part.
            let more = row_count(ids.iter().map(|id| id.0)) + 2;
            if mappings.count + more > mappings.limit / 4 * 3 {
                return Err(Refusal::Mappings(mappings));
            }
        }
        Ok(self.pages.map(first, ids)?)
    }

    /// Mappings of the process, where something limits them.
    pub fn mappings(&self) -> Option<Mappings> {
        self.pages.device.mappings()
    }

    /// Virtual pages of the step's space that are mapped, and how many it may have.
    pub fn step_pages(&self) -> (u64, u64) {
        (self.pages.lower_count(), self.placer.step_limit())
    }

    /// Gives pages back that stand nowhere and lie apart from each other.
    pub fn shed_scattered(&mut self) {
        self.pages.shed_scattered();
    }

    /// Frees pages of frames that no edge mentions for survivors, so that they cost nothing new.
    fn reuse_loose(&mut self, count: usize) -> Result<(), Refusal> {
        let mut waited = false;
        while self.pages.spare_count() < count as u64 && !self.is_pinned {
            let Some(frame) = self.placer.loose_frame() else {
                break;
            };
            if !waited {
                self.pages.synchronise()?;
                waited = true;
            }
            self.incomplete.insert(frame);
            self.trims += 1;
            self.unmap_frame(frame)?;
            self.incomplete.remove(frame);
            self.placer.retire(frame);
            if let Some(id) = self.page_of[frame as usize].take() {
                self.pages.keep(id);
            }
        }
        Ok(())
    }

    fn unmap_frame(&mut self, frame: u32) -> Result<(), Refused> {
        for i in 0..self.placer.aliases(frame).len() {
            let page = self.placer.aliases(frame)[i];
            if self.pages.is_mapped(page) {
                self.pages.unmap(page)?;
            }
        }
        Ok(())
    }

    /// Gives up to `limit` pages of idle frames back, but none of `keep`; returns how many.
    fn trim_idle(&mut self, limit: u64, keep: &[u32]) -> u64 {
        if self.is_pinned {
            return 0;
        }
        let idle: Vec<u32> = self
            .placer
            .idle_frames()
            .filter(|&frame| self.page_of[frame as usize].is_some() && !keep.contains(&frame))
            .take(usize::try_from(limit).unwrap_or(usize::MAX))
            .collect();
        let before = self.held().0;
        self.trim_frames(&idle).ok();
        (before - self.held().0) / self.granule().0
    }

    fn trim_frames(&mut self, frames: &[u32]) -> Result<(), Refused> {
        if frames.is_empty() {
            return Ok(());
        }
        self.pages.synchronise()?;
        // A stray may be the last mapping of one of these frames.
        self.pages.tidy();
        for &frame in frames {
            self.incomplete.insert(frame);
            self.trims += 1;
            self.unmap_frame(frame)?;
            if let Some(id) = self.page_of[frame as usize].take() {
                self.pages.give_back(id)?;
            }
        }
        Ok(())
    }

    /// Frames of the step's space that have a page and are not under `kept`.
    pub fn usable_frames(&self, kept: &[Place]) -> Vec<u32> {
        let mut taken = BitSet::default();
        for &place in kept {
            self.placer
                .pieces(place)
                .for_each(|(frame, _, _)| taken.insert(frame));
        }
        self.placer
            .step_frames()
            .filter(|&frame| self.page_of[frame as usize].is_some() && !taken.contains(frame))
            .collect()
    }

    /// Puts windows over usable frames, whose numbers in `frames` count from 0, and takes all other
    /// windows of the step's space away but those under `kept`. Returns the first page of the new ones.
    /// A refusal changes nothing.
    pub fn install(&mut self, frames: &[u32], kept: &[Place]) -> Result<u32, Refusal> {
        let usable = self.usable_frames(kept);
        let count = u32::try_from(frames.len()).map_err(|_| Refusal::AddressSpace)?;
        let first = self.placer.room(count).ok_or(Refusal::AddressSpace)?;
        let frames: Vec<u32> = frames.iter().map(|&frame| usable[frame as usize]).collect();
        let ids: Vec<PageId> = frames
            .iter()
            .map(|&frame| self.page_of[frame as usize].expect("usable frames have pages"))
            .collect();
        // Work may still use the old windows.
        self.pages.synchronise()?;
        if !ids.is_empty() {
            self.map_row(first, &ids)?;
        }
        let (away, gone) = self.placer.install(first, &frames, kept);
        for id in self.take_away(away, gone).0 {
            // A page that the device does not take stays spare.
            drop(self.pages.give_back(id));
        }
        for frame in frames {
            self.incomplete.remove(frame);
        }
        self.pages.budget.note_return();
        Ok(first)
    }

    /// Takes mappings away that the placer has forgotten, and the pages of frames that it has. Returns the
    /// pages that stand nowhere now, and whether every mapping is gone.
    fn take_away(&mut self, away: Vec<(u32, u32)>, gone: Vec<u32>) -> (Vec<PageId>, bool) {
        let mut pages: Vec<u32> = away.iter().map(|&(page, _)| page).collect();
        pages.sort_unstable();
        let stuck = self.pages.unmap_all_or_stray(&pages);
        // The last page of each frame whose mapping the device did not take away.
        let stuck: HashMap<u32, u32> = match stuck.is_empty() {
            true => HashMap::new(),
            false => {
                let stuck: HashSet<u32> = stuck.into_iter().collect();
                let is_stuck = |&(page, _): &(u32, u32)| stuck.contains(&page);
                let stays = away.into_iter().filter(is_stuck);
                stays.map(|(page, frame)| (frame, page)).collect()
            }
        };
        let mut free = Vec::new();
        for frame in gone {
            self.incomplete.remove(frame);
            if let Some(id) = self.page_of[frame as usize].take() {
                match stuck.get(&frame) {
                    Some(&page) => self.pages.discard(page, &[id]),
                    None => free.push(id),
                }
            }
        }
        (free, stuck.is_empty())
    }

    /// Takes the windows of a space away of which no page is among `used`, and leaves their memory to
    /// whoever needs the next page. `used` has all pages under live buffers and under what edges mention,
    /// counted from the first of the space. A refusal changes nothing.
    pub fn sweep(&mut self, space: Space, used: &BitSet) -> Result<(), Refusal> {
        if self.placer.unused_count(space, used) > 0 {
            // Work may still use them.
            self.pages.synchronise()?;
            let (away, gone) = self.placer.sweep(space, used);
            let (free, is_clear) = self.take_away(away, gone);
            free.into_iter().for_each(|id| self.pages.keep(id));
            if !is_clear {
                // Places that are still mapped are for the time when no others are left.
                self.placer.forget_holes(space);
            }
        }
        Ok(())
    }

    /// Gives the memory of all idle frames back; their virtual pages and numbers stay.
    pub fn trim(&mut self) -> Result<Bytes, Refusal> {
        let before = self.held().0;
        let idle: Vec<u32> = self
            .placer
            .idle_frames()
            .filter(|&f| self.page_of[f as usize].is_some())
            .collect();
        let trimmed = self.trim_frames(&idle);
        self.pages.shed();
        self.pages.budget.note_return();
        trimmed?;
        Ok(Bytes(before - self.held().0))
    }

    /// Makes the frames under `place` complete. Where there is no memory for all of them nothing changes;
    /// another refusal leaves what it could complete.
    pub fn complete(&mut self, place: Place) -> Result<(), Refusal> {
        if self.is_complete(place) {
            return Ok(());
        }
        let completed = self.complete_frames(&self.frames_under(place), 0);
        let space = self.placer.space_of(place.start / self.page_units());
        completed.map_err(|refusal| self.advise(refusal, place.len, space))
    }

    /// The same for frames; `more` new pages are needed beside them.
    fn complete_frames(&mut self, frames: &[u32], more: usize) -> Result<(), Refusal> {
        if !self.is_trimmed() {
            return Ok(());
        }
        let missing: Vec<u32> = frames
            .iter()
            .copied()
            .filter(|&frame| self.incomplete.contains(frame))
            .collect();
        let without = missing
            .iter()
            .filter(|&&frame| self.page_of[frame as usize].is_none())
            .count();
        // In their order.
        let mut new = VecDeque::from(self.take_pages(without, more, frames)?);
        for frame in missing {
            let page = &mut self.page_of[frame as usize];
            let id =
                *page.get_or_insert_with(|| new.pop_front().expect("one page for each without"));
            self.placer.set_order(frame, id.0);
            if let Err(refusal) = self.map_frame(frame, id) {
                new.into_iter()
                    .for_each(|id| drop(self.pages.give_back(id)));
                return Err(refusal);
            }
            self.incomplete.remove(frame);
        }
        Ok(())
    }

    /// Maps a page under all virtual pages of a frame.
    fn map_frame(&mut self, frame: u32, id: PageId) -> Result<(), Refusal> {
        for i in 0..self.placer.aliases(frame).len() {
            let page = self.placer.aliases(frame)[i];
            if !self.pages.is_mapped(page) {
                self.map_row(page, &[id])?;
            }
        }
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let pages = std::mem::take(&mut self.page_of);
        self.pages.close(pages.into_iter().flatten());
        self.pages.budget.note_return();
    }
}
