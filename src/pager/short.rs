//! Weights that miss memory: what others lend, who has it, and what would help.
//!
//! The pager is not locked while compilers are asked.
//!
//! May import: what `pager` may, `shortage`.

use std::ops::Range;

use super::WeightRange;
use crate::accounts::Of;
use crate::shortage::{Remedy, WeightShortage};
use crate::units::Bytes;

impl WeightRange {
    /// What is said of pages that have to be in at once and are not.
    pub(super) fn together(&self, pages: Range<u32>) -> WeightShortage {
        let (needed, limit) = self.0.pager.lock().books.together(self.0.id, pages);
        self.short(needed, limit, None)
    }

    /// What is said of pages of a group that do not fit.
    pub(super) fn too_much(&self, pages: &[u32]) -> WeightShortage {
        let granule = self.granule().0;
        let mut locked = self.0.pager.lock();
        let stats = locked.books.stats();
        let capacity = locked.books.capacity(self.0.id) * granule;
        let limit = (stats.weights_limit).min(Bytes(capacity.max(stats.resident.0)));
        let alone = Bytes(pages.len() as u64 * granule);
        let needed = if alone > limit {
            alone
        } else {
            // It would fit but for what is entered already.
            let (needed, _) = locked.books.together(self.0.id, pages.iter().copied());
            needed
        };
        drop(locked);
        let part = (limit == stats.weights_limit && limit < stats.limit).then_some(stats.limit);
        self.short(needed, limit, part)
    }

    /// `part` is the whole budget, where what weights may have of it is what is short.
    fn short(&self, needed: Bytes, limit: Bytes, part: Option<Bytes>) -> WeightShortage {
        let pager = &self.0.pager;
        let missing = needed.saturating_sub(limit);
        let (budget, left) = (pager.budget.limit(), pager.budget.free());
        let memory = pager.device.memory().ok();
        let device = memory.filter(|info| info.total < budget || info.free < left);
        let of = device.map_or(Of::Budget, |_| Of::Memory);
        let holdings = pager.account.holdings(of);
        let whole = device.map_or(budget, |info| info.total);
        let free = device.map_or(left, |info| info.free);
        let ours = Bytes(holdings.compilers.0 + holdings.weights.0);
        let elsewhere = device.map_or(Bytes::ZERO, |info| {
            info.total.saturating_sub(info.free).saturating_sub(ours)
        });
        // A device that does not say is believed to have it.
        let has_missing = memory.is_none_or(|info| info.free >= missing);
        let remedy = if part.is_some_and(|whole| needed <= whole) && has_missing {
            Remedy::WeightLimit(needed)
        } else if budget < Bytes(u64::MAX) && has_missing {
            Remedy::Budget(Bytes(budget.0.saturating_add(missing.0)))
        } else if elsewhere >= missing {
            Remedy::FreeElsewhere(missing)
        } else if holdings.compilers >= missing {
            Remedy::FreeOthers(missing)
        } else {
            Remedy::SmallerGroups(limit)
        };
        WeightShortage {
            needed,
            limit,
            whole,
            free,
            held: holdings.weights,
            compilers: holdings.compilers,
            elsewhere,
            remedy,
        }
    }

    /// Has compilers that are in no step give idle pages up for what is missing; whether any did.
    pub(super) fn borrow(&self, short: &WeightShortage) -> bool {
        let pager = &self.0.pager;
        let missing = short.needed.saturating_sub(short.limit);
        if missing == Bytes::ZERO || matches!(short.remedy, Remedy::WeightLimit(_)) {
            return false;
        }
        let of = if pager.budget.free() < missing {
            Of::Budget
        } else {
            Of::Memory
        };
        let is_given = pager.account.ask(of, missing) > Bytes::ZERO;
        if is_given {
            pager.budget.note_return();
        }
        is_given
    }
}
