//! Where pages come from, in this order, and what is said when they do not come.
//!
//! ```text
//!   spare pages, what the device has and the budget allows
//!     -> weights are evicted (`Budget::relieve`)
//!     -> idle frames of this arena are trimmed
//!     -> idle pages of compilers in no step (`Account::ask`), of the budget or of the device
//!     -> the device is waited for and its driver's pool trimmed
//!     -> a refusal with all numbers, and one remedy
//! ```
//!
//! Two who are short at once may each have taken what the other one needs. So who fails although there is enough
//! once it gave back what it had tries again, one after the other, and who comes new waits for that.
//!
//! Invariant: who gives pages up here asks nobody for any ([`Arena::lend`]).
//!
//! May import: what `arena` may.

use std::time::Duration;

use super::{Arena, Refusal};
use crate::accounts::{self, Of};
use crate::device::{Call, DeviceError, MemoryInfo, PageId};
use crate::pages::Refused;
use crate::placer::{Space, Units};
use crate::shortage::{Remedy, Shortage};
use crate::units::{ALIGNMENT, Bytes};

/// How often pages are tried for again that others had taken for a while.
const TRIES: u32 = 16;
/// How much longer is waited before each of these.
const PAUSE: Duration = Duration::from_micros(50);
/// That no page can be created.
fn no_room(info: MemoryInfo) -> Refused {
    Refused::Device {
        call: Call::Create,
        source: DeviceError::OutOfMemory { info },
    }
}

/// How often a smaller request is looked for.
const GUESSES: usize = 8;

impl Arena {
    /// Takes `count` pages, all or none; an error counts `more` that will be needed beside them.
    pub(super) fn take_pages(
        &mut self,
        count: usize,
        more: usize,
        keep: &[u32],
    ) -> Result<Vec<PageId>, Refusal> {
        let mut turn = accounts::turn_if_wanted();
        let mut taken = self.try_take(count, more, keep);
        for tries in 0..TRIES {
            let of = match &taken {
                Err(Refusal::OverBudget(short)) if short.free >= short.needed => Of::Budget,
                Err(Refusal::OutOfMemory(short)) if short.free >= short.needed => Of::Memory,
                _ => break,
            };
            // Others may have gone since; once more is enough then.
            if tries > 0 && self.account().is_alone(of) {
                break;
            }
            if turn.is_none() {
                turn = accounts::turn();
            }
            // Who had begun before this turn ends meanwhile.
            std::thread::sleep(PAUSE * tries);
            taken = self.try_take(count, more, keep);
        }
        taken
    }

    fn try_take(
        &mut self,
        count: usize,
        more: usize,
        keep: &[u32],
    ) -> Result<Vec<PageId>, Refusal> {
        let total = (count + more) as u64;
        self.make_room(count as u64, keep)
            .map_err(|()| Refusal::OverBudget(self.shortage(Of::Budget, total, None)))?;
        let missing = (count as u64).saturating_sub(self.pages.spare_count());
        if missing > 1 {
            self.pages.device.begin_row(missing);
        }
        let mut new = Vec::new();
        let mut reclaimed = false;
        // Before the first one is created, and after each time that something was given up for them.
        let mut has_room = false;
        while new.len() < count {
            let rest = count - new.len();
            let lacking = match has_room {
                true => None,
                false => self.pages.lacking(rest),
            };
            let (taken, short) = match lacking {
                // What neither has, the budget lacks.
                Some((short, _)) if self.over_budget(rest as u64) > 0 => {
                    (Err(Refused::Budget), short)
                }
                Some((short, info)) => (Err(no_room(info)), short),
                None => (self.pages.take_free(), rest as u64),
            };
            has_room = taken.is_ok();
            let refused = match taken {
                Ok(id) => {
                    new.push(id);
                    continue;
                }
                Err(refused) => refused,
            };
            if refused.is_out_of_memory() {
                let of = if refused == Refused::Budget {
                    Of::Budget
                } else {
                    Of::Memory
                };
                if self.evict_weights(short)
                    || self.trim_idle(short, keep) > 0
                    || self.borrow_idle(of, short)
                {
                    continue;
                }
            }
            let mut refused = refused;
            if refused.is_device_full() && !reclaimed {
                reclaimed = true;
                match self.pages.reclaim() {
                    Ok(()) => continue,
                    Err(failed) => refused = failed,
                }
            }
            for id in new {
                drop(self.pages.give_back(id));
            }
            // What is free is said now that everything taken for this place is back.
            return Err(match refused {
                Refused::Budget => Refusal::OverBudget(self.shortage(Of::Budget, total, None)),
                Refused::Device {
                    source: DeviceError::OutOfMemory { info },
                    ..
                } => Refusal::OutOfMemory(self.shortage(
                    Of::Memory,
                    total,
                    Some((info.free, info.total)),
                )),
                Refused::Device { call, source } => Refusal::Device { call, source },
            });
        }
        Ok(new)
    }

    /// Makes room in the budget for `count` pages.
    fn make_room(&mut self, count: u64, keep: &[u32]) -> Result<(), ()> {
        let over = |arena: &Self| arena.over_budget(count);
        // Pages may stay claimed although they were given up: what was evicted is no measure.
        while over(self) > 0 && self.evict_weights(over(self)) {}
        if over(self) > 0 {
            self.trim_idle(over(self), keep);
        }
        while over(self) > 0 && self.borrow_idle(Of::Budget, over(self)) {}
        if over(self) > 0 { Err(()) } else { Ok(()) }
    }

    /// Pages that the budget lacks for `count` of them.
    fn over_budget(&self, count: u64) -> u64 {
        let more = count.saturating_sub(self.pages.spare_count()) * self.granule().0;
        more.saturating_sub(self.pages.budget.free().0)
            .div_ceil(self.granule().0)
    }

    /// Has up to `count` pages of weights evicted; whether any was.
    fn evict_weights(&mut self, count: u64) -> bool {
        let wanted = Bytes(count * self.granule().0);
        self.pages.budget.relieve(wanted) > Bytes::ZERO
    }

    /// Has compilers that are in no step give up to `count` idle pages back; whether any did.
    fn borrow_idle(&mut self, of: Of, count: u64) -> bool {
        let wanted = Bytes(count * self.granule().0);
        self.account().ask(of, wanted) > Bytes::ZERO
    }

    /// Gives up to `count` pages back that nothing uses, for others.
    pub fn lend(&mut self, count: u64) {
        let held = |arena: &Self| arena.held().0 / arena.granule().0;
        let goal = held(self).saturating_sub(count);
        self.pages.tidy();
        self.pages.shed_spare(held(self).saturating_sub(goal));
        self.trim_idle(held(self).saturating_sub(goal), &[]);
    }

    /// What there is, and what `count` pages lack. `device` is what it said when it refused, for when it says no
    /// more now.
    fn shortage(&self, of: Of, count: u64, device: Option<(Bytes, Bytes)>) -> Box<Shortage> {
        let held = self.held();
        let holdings = self.account().holdings(of);
        let needed = count.saturating_sub(self.pages.spare_count());
        let needed = Bytes(needed.saturating_mul(self.granule().0));
        let (free, limit) = match of {
            Of::Budget => (self.pages.budget.free(), self.pages.budget.limit()),
            Of::Memory => match (self.pages.device.memory(), device) {
                (Ok(info), _) => (info.free, info.total),
                (Err(_), said) => said.unwrap_or_default(),
            },
        };
        let ours = Bytes(holdings.compilers.0 + holdings.weights.0);
        let elsewhere = match of {
            Of::Budget => Bytes::ZERO,
            Of::Memory => limit.saturating_sub(free).saturating_sub(ours),
        };
        Box::new(Shortage {
            needed,
            limit,
            free,
            held,
            other_compilers: holdings.compilers.saturating_sub(held),
            weights: holdings.weights,
            elsewhere,
            ..Shortage::default()
        })
    }

    /// The same for `size`, which is more than there can be whoever gives something up. Looks for no place, which
    /// would take as long as it is large.
    pub(super) fn hopeless(&self, of: Of, size: Bytes) -> Box<Shortage> {
        let mut short = self.shortage(of, size.0 / self.granule().0, None);
        let missing = short.needed.saturating_sub(short.free);
        let memory = self.pages.device.memory();
        let device = memory.map_or(Bytes(u64::MAX), |info| info.free);
        let room = self.pages.budget.free().min(device);
        short.remedy = if of == Of::Budget && device >= short.needed {
            Remedy::Budget(Bytes(short.limit.0.saturating_add(missing.0)))
        } else if of == Of::Memory && short.elsewhere >= missing {
            Remedy::FreeElsewhere(missing)
        } else {
            match room.0 - room.0 % self.granule().0 {
                0 => Remedy::FreeLive(missing),
                room => Remedy::Smaller(Bytes(room)),
            }
        };
        short
    }

    /// Adds the remedy to a refusal for want of memory.
    pub(super) fn advise(&mut self, refusal: Refusal, len: Units, space: Space) -> Refusal {
        let (mut short, of) = match refusal {
            Refusal::OverBudget(short) => (short, Of::Budget),
            Refusal::OutOfMemory(short) => (short, Of::Memory),
            other => return other,
        };
        let missing = short.needed.saturating_sub(short.free);
        // A device that does not say is believed to have it.
        let memory = self.pages.device.memory();
        let device = memory.map_or(Bytes(u64::MAX), |info| info.free);
        short.remedy = if of == Of::Budget && device >= short.needed {
            Remedy::Budget(Bytes(short.limit.0.saturating_add(missing.0)))
        } else if of == Of::Memory && short.elsewhere >= missing {
            Remedy::FreeElsewhere(missing)
        } else if short.other_compilers.0 + short.weights.0 >= missing.0 {
            Remedy::FreeOthers(missing)
        } else {
            let room = self.pages.budget.free().min(device).0 / self.granule().0;
            match self.largest(len, space, missing, room + self.pages.spare_count()) {
                0 => Remedy::FreeLive(missing),
                units => Remedy::Smaller(Bytes(u64::from(units) * ALIGNMENT.0)),
            }
        };
        match of {
            Of::Budget => Refusal::OverBudget(short),
            Of::Memory => Refusal::OutOfMemory(short),
        }
    }

    /// A size below `len` that needs at most `room` pages more than there are; 0 where none was found.
    fn largest(&mut self, len: Units, space: Space, missing: Bytes, room: u64) -> Units {
        let page_units = u64::from(self.page_units());
        // No longer than `len`, which is of this type.
        let shorter = |len: Units, pages: u64| {
            u64::from(len).saturating_sub(pages.saturating_mul(page_units)) as Units
        };
        let mut guess = shorter(len, missing.0.div_ceil(self.granule().0));
        for _ in 0..GUESSES {
            if guess == 0 {
                break;
            }
            let Some(plan) = self.placer.plan(guess, space) else {
                break;
            };
            let (mut frames, new_count) = self.frames_of(&plan);
            frames.sort_unstable();
            frames.dedup();
            frames.retain(|&frame| self.page_of[frame as usize].is_none());
            let needed = (frames.len() + new_count) as u64;
            if needed <= room {
                return guess;
            }
            guess = shorter(guess, needed - room);
        }
        0
    }
}
