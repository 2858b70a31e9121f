//! Pages that have to be in at once: past the limit of weights, then for whatever is not pinned.
//!
//! May import: what `books` may.

use super::evict::{Staying, twice};
use super::{Books, Own, ROUNDS, Spot};
use crate::pages::Refused;
use crate::units::Bytes;

impl Books {
    /// Puts pages under `missing`, those of `pages` that are out: past the limit of weights where it is used
    /// up, and in place of any page that is not pinned where the whole budget, or the device, is. Whether they
    /// fit. `pages` ascend.
    pub(super) fn bring_beyond(
        &mut self,
        id: u64,
        pages: &[u32],
        missing: &[u32],
    ) -> Result<bool, Refused> {
        self.shed();
        let mut taken = Vec::with_capacity(missing.len());
        let mut refused = Staying::default();
        if let Some((lacking, _)) = self.range(id).pages.lacking(missing.len()) {
            // Where all that could go is too little, none is created.
            let victims = self.victims(Some((id, Own::Except(pages))), lacking, &refused);
            if (victims.len() as u64) < lacking {
                return Ok(false);
            }
        }
        let (mut took, mut rounds, mut asked) = (false, 0, 0);
        let fits = loop {
            let wanted = (missing.len() - taken.len()) as u64;
            if wanted == 0 {
                break Ok(true);
            }
            let own = &mut self.range(id).pages;
            let page = match own.take_free() {
                Err(refused) if refused.is_out_of_memory() => own.take_beyond(),
                page => page,
            };
            match page {
                Ok(page) => taken.push(page),
                Err(error) if !error.is_out_of_memory() => break Err(error),
                Err(_) => {
                    asked = twice(asked, wanted);
                    let victims = self.victims(Some((id, Own::Except(pages))), asked, &refused);
                    if (victims.len() as u64) < wanted || rounds == ROUNDS {
                        break Ok(false);
                    }
                    match self.evict_for(id, &victims, wanted, &mut refused) {
                        Ok(given) => rounds += u32::from(given >= wanted),
                        Err(error) => break Err(error),
                    }
                    took = true;
                }
            }
        };
        if fits != Ok(true) {
            self.give_back(id, taken);
            if took {
                // Others lost pages for nothing: they may have them back.
                self.budget.note_return();
            }
            return fits;
        }
        let granule = self.range(id).pages.granule;
        let over = self.over();
        let slots = self.ranges.values().flat_map(|range| &range.slots);
        let leaving = slots.filter(|slot| slot.page.is_some() && slot.beyond);
        let beyond = (over.0.div_ceil(granule.0) as usize).saturating_sub(leaving.count());
        self.settle(id, missing, taken, missing.len().saturating_sub(beyond))?;
        self.stats.beyond_peak = self.stats.beyond_peak.max(over);
        Ok(true)
    }

    /// Bytes past the limit of weights.
    pub(super) fn over(&self) -> Bytes {
        self.budget.used().saturating_sub(self.budget.limit())
    }

    /// Evicts pages that a range takes without being entitled to them: what it takes of itself and of ranges
    /// of higher priority may come back.
    fn evict_for(
        &mut self,
        id: u64,
        victims: &[Spot],
        count: u64,
        refused: &mut Staying,
    ) -> Result<u64, Refused> {
        let priority = self.range(id).priority;
        let entitled = self.ranges.iter().filter(|(_, of)| of.priority >= priority);
        let marks: Vec<(u64, u32)> = entitled.map(|(&id, of)| (id, of.watermark)).collect();
        let given = self.evict(victims, count, refused);
        for (id, watermark) in marks {
            self.range(id).watermark = watermark;
        }
        given
    }

    /// Bytes that have to be in memory together once `pages` are pinned as well, and those that all weights
    /// could have, as far as the whole budget and the device go.
    pub fn together(&mut self, id: u64, pages: impl Iterator<Item = u32>) -> (Bytes, Bytes) {
        let granule = self.range(id).pages.granule.0;
        let slots = &self.range(id).slots;
        let more = pages.filter(|&page| slots[page as usize].pins == 0).count() as u64;
        let free = self.budget.outermost().free();
        let device = self.range(id).pages.device.memory().map(|info| info.free);
        let free = device.map_or(free, |device| device.min(free)).0 / granule;
        (
            Bytes(self.stats().pinned.0 + more * granule),
            Bytes((self.held() + free) * granule),
        )
    }
}
