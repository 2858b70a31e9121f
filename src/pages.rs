//! Layer 4: physical pages and the mappings over them, kept straight whatever the device refuses.
//!
//! Every device memory call of a compiler is made here, counted, and retried where the device says
//! "not ready". A call that fails half-way through a larger change leaves *strays*: mappings that
//! belong to nothing. They are taken away at the next chance, so a failure never leaks and never
//! blocks an address.
//!
//! Each page is claimed from the budget before it is created, and entered in the account that others see.
//!
//! Nothing is unmapped or given back that work may still use: whoever takes a mapping away has waited for the
//! device, and where waiting failed, everything stays as it is. At the end too ([`Pages::close`]): then pages,
//! mappings and addresses are kept until the process ends.
//!
//! May import: `units`, `device`, `budget`, `accounts`.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::accounts::{Account, Owner};
use crate::bits::BitSet;
use crate::budget::Budget;
use crate::device::fork::Process;
use crate::device::{Call, Device, DeviceError, MemoryInfo, PageId, RowRefused};
use crate::units::{Address, Bytes};

/// How often a call that is "not ready" is tried.
const TRIES: usize = 4;

/// Pages in a row that are not worth giving back to have a longer one: at this length a half of the mappings
/// that Linux allows by default are more than twice the memory of a machine of 200 GiB in pages of 64 KiB.
const LONG_ROW: usize = 256;

/// What was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// A page, by the budget: others were quicker.
    Budget,
    /// A call, by the device.
    Device { call: Call, source: DeviceError },
}

impl Refused {
    /// Whether less memory in use would have helped.
    pub fn is_out_of_memory(&self) -> bool {
        *self == Self::Budget || self.is_device_full()
    }

    /// Whether the device has no page left.
    pub fn is_device_full(&self) -> bool {
        matches!(
            self,
            Self::Device {
                source: DeviceError::OutOfMemory { .. },
                ..
            }
        )
    }

    /// Whether fewer addresses may have been had: what the process may have is used up, or the system or the
    /// driver says no more than that it has not so many.
    pub fn is_for_want_of_addresses(&self) -> bool {
        let Self::Device { call, source } = self else {
            return false;
        };
        *call == Call::Reserve
            && match source {
                DeviceError::NoAddresses { .. } | DeviceError::OutOfMemory { .. } => true,
                DeviceError::Driver { call, .. } => *call == Call::Reserve,
                _ => false,
            }
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Budget => f.write_str("the budget is used up"),
            Self::Device { call, source } => write!(f, "{call:?}: {source}"),
        }
    }
}

/// The device's side of an arena: one reserved range, pages, mappings.
#[derive(Debug)]
pub(crate) struct Pages {
    pub device: Arc<dyn Device>,
    /// Who made it: a forked child changes nothing of its parent's.
    process: Process,
    pub base: Address,
    pub reserved: Bytes,
    pub granule: Bytes,
    /// Where each owned page is claimed.
    pub budget: Budget,
    /// What others see of it.
    pub account: Arc<Account>,
    /// Virtual pages that have a mapping: those of the lower half of the range, and of the upper one.
    mapped: [BitSet; 2],
    /// First page of the upper half.
    split: u32,
    /// Pages owned and not mapped anywhere. The first to be made are the first to be used, so that rows of
    /// pages stay together.
    spare: BTreeSet<PageId>,
    /// Mappings that belong to nothing, and the page to keep once it is gone.
    strays: Vec<(u32, Option<PageId>)>,
    owned: u64,
    calls: u64,
}

impl Pages {
    pub fn reserve(
        device: Arc<dyn Device>,
        size: Bytes,
        split: u32,
        budget: Budget,
        owner: Owner,
    ) -> Result<Self, Refused> {
        let granule = device.granule();
        let account = Account::open(&*device, &budget, owner);
        let mut pages = Self {
            device,
            process: Process::this(),
            base: Address(0),
            reserved: size,
            granule,
            budget,
            account,
            mapped: [BitSet::default(), BitSet::default()],
            split,
            spare: BTreeSet::new(),
            strays: Vec::new(),
            owned: 0,
            calls: 0,
        };
        pages.base = pages.call(Call::Reserve, |device| device.reserve(size))?;
        Ok(pages)
    }

    /// Device memory calls so far.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Physical bytes owned.
    pub fn held(&self) -> Bytes {
        Bytes(self.owned * self.granule.0)
    }

    /// Pages owned that stand nowhere.
    pub fn spare_count(&self) -> u64 {
        self.spare.len() as u64
    }

    /// Virtual pages of the lower half that have a mapping.
    pub fn lower_count(&self) -> u64 {
        self.mapped[0].len() as u64
    }

    /// Whether a virtual page has a mapping that belongs to its frame.
    pub fn is_mapped(&self, number: u32) -> bool {
        self.has_mapping(number) && !self.strays.iter().any(|stray| stray.0 == number)
    }

    fn has_mapping(&self, number: u32) -> bool {
        if number < self.split {
            self.mapped[0].contains(number)
        } else {
            self.mapped[1].contains(number - self.split)
        }
    }

    fn set_mapped(&mut self, number: u32, mapped: bool) {
        let (half, number) = if number < self.split {
            (0, number)
        } else {
            (1, number - self.split)
        };
        if mapped {
            self.mapped[half].insert(number);
        } else {
            self.mapped[half].remove(number);
        }
    }

    fn call<T>(
        &mut self,
        call: Call,
        make: impl Fn(&dyn Device) -> Result<T, DeviceError>,
    ) -> Result<T, Refused> {
        if self.process.is_ancestor() {
            let source = DeviceError::Forked { call };
            return Err(Refused::Device { call, source });
        }
        let mut tries = TRIES;
        loop {
            self.calls += 1;
            tries -= 1;
            match make(&*self.device) {
                Ok(made) => return Ok(made),
                Err(DeviceError::NotReady) if tries > 0 => self.synchronise()?,
                Err(source) => return Err(Refused::Device { call, source }),
            }
        }
    }

    /// Waits for all work on the device: before anything that work may use is unmapped.
    pub fn synchronise(&self) -> Result<(), Refused> {
        let mut tries = TRIES;
        loop {
            tries -= 1;
            match self.device.synchronise() {
                Ok(()) => return Ok(()),
                Err(DeviceError::NotReady) if tries > 0 => {}
                Err(source) => {
                    return Err(Refused::Device {
                        call: Call::Synchronise,
                        source,
                    });
                }
            }
        }
    }

    fn at(&self, page: u32) -> Address {
        Address(self.base.0 + u64::from(page) * self.granule.0)
    }

    /// A page: a spare one, or one from the device, which gives first what its driver keeps for itself.
    pub fn take(&mut self) -> Result<PageId, Refused> {
        match self.take_free() {
            Err(refused) if refused.is_device_full() => {
                self.reclaim()?;
                self.take_free()
            }
            taken => taken,
        }
    }

    /// A page that needs nothing to be given up: a spare one, or one that the device has.
    pub fn take_free(&mut self) -> Result<PageId, Refused> {
        self.tidy();
        if let Some(page) = self.spare.pop_first() {
            return Ok(page);
        }
        let claimed = self.budget.claim(self.granule);
        self.create_claimed(claimed)
    }

    /// How many of `count` pages there are not, where the device can tell that these do not fit, and what it has.
    pub fn lacking(&self, count: usize) -> Option<(u64, MemoryInfo)> {
        let more = (count as u64).saturating_sub(self.spare_count());
        if more == 0 {
            return None;
        }
        let size = Bytes(more.saturating_mul(self.granule.0));
        match self.device.check_room(size) {
            Err(DeviceError::OutOfMemory { info }) => {
                let free = info.free.0 / self.granule.0;
                Some((more.saturating_sub(free).max(1), info))
            }
            _ => None,
        }
    }

    /// As [`take`](Self::take), past the limit of a budget that is part of another.
    pub fn take_beyond(&mut self) -> Result<PageId, Refused> {
        for tries in 0.. {
            let claimed = self.budget.claim_beyond(self.granule);
            match self.create_claimed(claimed) {
                Err(refused) if tries == 0 && refused.is_device_full() => self.reclaim()?,
                taken => return taken,
            }
        }
        unreachable!("the second try is the last")
    }

    /// Waits for work that may still hold memory which is free already in program order, and lets the driver
    /// give back what it keeps of that.
    pub fn reclaim(&self) -> Result<(), Refused> {
        self.synchronise()?;
        let refused = |source| Refused::Device {
            call: Call::TrimPool,
            source,
        };
        self.device.trim_pool().map_err(refused)
    }

    fn create_claimed(&mut self, claimed: bool) -> Result<PageId, Refused> {
        if !claimed {
            return Err(Refused::Budget);
        }
        let page = self.call(Call::Create, |device| device.create());
        match page {
            Ok(_) => {
                self.owned += 1;
                self.account.add(self.granule);
            }
            Err(_) => self.budget.give(self.granule),
        }
        page
    }

    /// Gives an unmapped page back to the device. A refused page stays spare.
    pub fn give_back(&mut self, page: PageId) -> Result<(), Refused> {
        match self.call(Call::Release, |device| device.release(page)) {
            Ok(()) => {
                self.owned -= 1;
                self.account.take(self.granule);
                self.budget.give(self.granule);
                Ok(())
            }
            Err(error) => {
                self.spare.insert(page);
                Err(error)
            }
        }
    }

    /// Keeps an unmapped page for the next [`take`](Self::take).
    pub fn keep(&mut self, page: PageId) {
        self.spare.insert(page);
    }

    /// Maps pages under consecutive virtual pages from `first` on and makes them accessible: all of
    /// them or none.
    pub fn map(&mut self, first: u32, pages: &[PageId]) -> Result<(), Refused> {
        self.tidy();
        if let Err((mapped, error)) = self.map_row(first, pages) {
            self.undo(first, mapped);
            return Err(error);
        }
        let (at, size) = (self.at(first), Bytes(pages.len() as u64 * self.granule.0));
        if let Err(error) = self.call(Call::Allow, |device| device.allow(at, size)) {
            self.undo(first, pages.len() as u32);
            return Err(error);
        }
        Ok(())
    }

    /// Maps pages under consecutive virtual pages; how many are mapped, where it is not all. Each page is a
    /// call, tried as often as any.
    fn map_row(&mut self, first: u32, pages: &[PageId]) -> Result<(), (u32, Refused)> {
        let (mut mapped, mut tries) = (0, TRIES);
        loop {
            let next = first + mapped as u32;
            let row = self.device.map_row(self.at(next), &pages[mapped..]);
            let (count, source) = match row {
                Ok(()) => (pages.len() - mapped, None),
                Err(RowRefused { mapped, source }) => (mapped, Some(source)),
            };
            self.calls += count as u64;
            (next..)
                .take(count)
                .for_each(|number| self.set_mapped(number, true));
            mapped += count;
            let Some(source) = source else {
                return Ok(());
            };
            self.calls += 1;
            if count > 0 {
                tries = TRIES;
            }
            tries -= 1;
            let refused = match source {
                DeviceError::NotReady if tries > 0 => self.synchronise().err(),
                source => Some(Refused::Device {
                    call: Call::Map,
                    source,
                }),
            };
            if let Some(refused) = refused {
                return Err((mapped as u32, refused));
            }
        }
    }

    fn undo(&mut self, first: u32, count: u32) {
        for number in first..first + count {
            if self.unmap(number).is_err() {
                self.strays.push((number, None));
            }
        }
    }

    /// Takes the mapping of one virtual page away. The caller has waited for the device.
    pub fn unmap(&mut self, number: u32) -> Result<(), Refused> {
        let (at, granule) = (self.at(number), self.granule);
        self.call(Call::Unmap, |device| device.unmap(at, granule))?;
        self.set_mapped(number, false);
        Ok(())
    }

    /// The same for a mapping that nothing needs: what the device refuses is tried again later.
    /// Returns whether it is gone.
    pub fn unmap_or_stray(&mut self, number: u32) -> bool {
        let is_stuck = self.is_mapped(number) && self.unmap(number).is_err();
        if is_stuck {
            self.strays.push((number, None));
        }
        !is_stuck
    }

    /// The same for many, which are sorted: neighbours go in one call. Returns those that are stuck.
    pub fn unmap_all_or_stray(&mut self, numbers: &[u32]) -> Vec<u32> {
        let mut stuck = Vec::new();
        let mapped: Vec<u32> = numbers
            .iter()
            .copied()
            .filter(|&number| self.is_mapped(number))
            .collect();
        for row in mapped.chunk_by(|a, b| a + 1 == *b) {
            let (at, size) = (self.at(row[0]), Bytes(row.len() as u64 * self.granule.0));
            if row.len() > 1
                && self
                    .call(Call::Unmap, |device| device.unmap(at, size))
                    .is_ok()
            {
                row.iter()
                    .for_each(|&number| self.set_mapped(number, false));
            } else {
                // One bad mapping must not keep the others.
                stuck.extend(row.iter().filter(|&&number| !self.unmap_or_stray(number)));
            }
        }
        stuck
    }

    /// Gives those spare pages back that have too few neighbours among them; what is made instead may lie
    /// in a row.
    pub fn shed_scattered(&mut self) {
        let spare: Vec<PageId> = self.spare.iter().copied().collect();
        let rows = spare.chunk_by(|a, b| a.0 + 1 == b.0);
        for page in rows.filter(|row| row.len() < LONG_ROW).flatten() {
            self.spare.remove(page);
            // A refused page is spare again.
            drop(self.give_back(*page));
        }
    }

    /// Gives pages back that were made for a change that failed: those still under a stray mapping
    /// once that is gone.
    pub fn discard(&mut self, first: u32, pages: &[PageId]) {
        for (i, &page) in pages.iter().enumerate() {
            let number = first + i as u32;
            match self
                .strays
                .iter_mut()
                .find(|stray| stray.0 == number && stray.1.is_none())
            {
                Some(stray) => stray.1 = Some(page),
                None => drop(self.give_back(page)),
            }
        }
    }

    /// Takes strays away, as far as the device lets us.
    pub fn tidy(&mut self) {
        if self.strays.is_empty() {
            return;
        }
        for (number, page) in std::mem::take(&mut self.strays) {
            if self.has_mapping(number) && self.unmap(number).is_err() {
                self.strays.push((number, page));
            } else if let Some(page) = page {
                drop(self.give_back(page));
            }
        }
    }

    /// Takes strays away and gives spare pages back, as far as the device lets us.
    pub fn shed(&mut self) {
        self.tidy();
        self.shed_spare(u64::MAX);
    }

    /// Gives up to `count` spare pages back.
    pub fn shed_spare(&mut self, count: u64) {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let pages: Vec<PageId> = self.spare.iter().rev().take(count).copied().collect();
        for page in pages {
            self.spare.remove(&page);
            // A refused page is spare again.
            drop(self.give_back(page));
        }
    }

    /// Gives everything back: mappings, then `pages` and the spare ones, then the range. Where the device cannot be
    /// waited for, nothing.
    pub fn close(&mut self, pages: impl Iterator<Item = PageId>) {
        if self.process.is_ancestor() {
            return;
        }
        // What was refused once is tried once more.
        if let Err(refused) = self.synchronise().or_else(|_| self.synchronise()) {
            self.keep_for_good(&refused);
            return;
        }
        let mut failed = None;
        self.tidy();
        let split = self.split;
        let upper = self.mapped[1].iter().map(|number| number + split);
        let mapped: Vec<u32> = self.mapped[0].iter().chain(upper).collect();
        for run in mapped.chunk_by(|a, b| a + 1 == *b) {
            let (at, size) = (self.at(run[0]), Bytes(run.len() as u64 * self.granule.0));
            match self.call(Call::Unmap, |device| device.unmap(at, size)) {
                Ok(()) => run
                    .iter()
                    .for_each(|&number| self.set_mapped(number, false)),
                // One bad mapping must not keep the others.
                Err(error) => {
                    failed = Some(error);
                    for &number in run {
                        if self.unmap(number).is_err() {
                            drop(self.unmap(number));
                        }
                    }
                }
            }
        }
        let strays: Vec<PageId> = self.strays.drain(..).filter_map(|stray| stray.1).collect();
        for page in pages.chain(std::mem::take(&mut self.spare)).chain(strays) {
            failed = self.give_back(page).err().or(failed);
        }
        // What was refused once is tried once more, then left to the device.
        for page in std::mem::take(&mut self.spare) {
            drop(self.give_back(page));
        }
        let (base, reserved) = (self.base, self.reserved);
        for _ in 0..2 {
            match self.call(Call::Unreserve, |device| device.unreserve(base, reserved)) {
                Ok(()) => break,
                Err(refused) => failed = Some(refused),
            }
        }
        if let Some(refused) = failed {
            tracing::warn!(%refused, owned = self.owned, "device refused to take memory back");
        }
    }

    /// Leaves pages, mappings and addresses as they are, and the device with them, until the process ends.
    ///
    /// Work that could not be waited for may run and use them. An error that stays, as that of a kernel which
    /// crashed, says the opposite: its context runs nothing any more. But the driver then refuses to unmap and
    /// release too ("any further CUDA work will return the same error", says its manual of
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`), and takes all of it back with the process, which has to end before the GPU
    /// can be used again. So every error is met in the same way, and no list of codes decides what is safe.
    ///
    /// What is kept stays claimed in the budget: it is in use.
    fn keep_for_good(&mut self, refused: &Refused) {
        // Dropping the device would end the context, or give the memory back, under that work.
        std::mem::forget(Arc::clone(&self.device));
        let (held, reserved) = (self.held(), self.reserved);
        tracing::warn!(%refused, %held, %reserved,
            "the device cannot be waited for: memory that its work may still use is kept until the process ends");
    }
}
