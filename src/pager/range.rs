//! One range: its pages, and the frames that pages of it share.
//!
//! ```text
//!   pages   | a0 a1 a2 | b0 b1 b2 | c0 c1 c2 |     a0, b0, c0 have memory of their own
//!   rings         r0 r1      r2 r3      r0 r1      a1 and c1 stand over one frame, and so do a2 and c2:
//!                                                  it holds the contents of one of them at a time
//! ```
//!
//! A page whose *ring* has a frame becomes resident by taking the frame over: no call of the device, once
//! it is mapped there. So weights that stream through memory step by step cost copies and nothing else.
//!
//! Invariants:
//! - the frame of a ring is held by one member, which is resident; it goes when that one leaves;
//! - a member that is an alias is mapped over its ring's frame; who reads it while another one holds the
//!   frame reads that one's bytes, never a page of somebody else.
//!
//! May import: layers 0 and 3, `pages`.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Leaving, PageOut};
use crate::device::PageId;
use crate::pages::Pages;
use crate::units::{Address, Bytes};

/// Stamps given so far in this process; 0 is [`Stamp::NEVER`](super::Stamp::NEVER).
static STAMPS: AtomicU64 = AtomicU64::new(1);

/// A virtual page of a range.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot {
    /// The page under it, while it is resident.
    pub page: Option<PageId>,
    /// When it became resident last.
    pub stamp: u64,
    pub pins: u32,
    /// Whether it was pinned since: before that nobody can have filled it, and nothing is to save.
    pub handed_out: bool,
    /// Whether it came in past the budget, and leaves with its last pin.
    pub beyond: bool,
    /// The ring that it is a member of.
    ring: Option<u32>,
    /// Whether it is mapped over the frame of its ring.
    pub is_alias: bool,
}

/// Pages that share a frame.
#[derive(Debug)]
pub(super) struct Ring {
    members: Vec<u32>,
    frame: Option<Frame>,
}

#[derive(Clone, Copy, Debug)]
struct Frame {
    page: PageId,
    holder: u32,
}

#[derive(Debug)]
pub(super) struct Range {
    /// The higher, the longer it stays.
    pub priority: u64,
    pub pages: Pages,
    pub slots: Vec<Slot>,
    pub rings: Vec<Ring>,
    /// Whether a page had to leave its ring since the last arrangement.
    pub is_disturbed: bool,
    pub resident: u32,
    /// Pages that became resident so far.
    pub arrivals: u64,
    /// Pages from here on left when memory was short. They are not asked back before somebody
    /// returned memory.
    pub watermark: u32,
    /// [`Budget::returns`](crate::budget::Budget::returns) when the watermark was looked at last.
    pub seen_returns: u64,
    pub page_out: Option<PageOut>,
}

impl Range {
    /// Those of `pages` that are not resident.
    pub fn missing(&self, pages: &[u32]) -> Vec<u32> {
        let is_out = |&page: &u32| self.slots[page as usize].page.is_none();
        pages.iter().copied().filter(is_out).collect()
    }

    /// Pins resident pages; returns each with its stamp.
    pub fn pin_all(&mut self, pages: impl Iterator<Item = u32>) -> Vec<(u32, u64)> {
        let pin = |page: u32| {
            let slot = &mut self.slots[page as usize];
            slot.pins += 1;
            slot.handed_out = true;
            (page, slot.stamp)
        };
        pages.map(pin).collect()
    }

    /// Enters pages that were mapped under the consecutive slots of `run`.
    pub fn arrived(&mut self, run: &[u32], ids: &[PageId], beyond_from: u32) {
        let stamp = STAMPS.fetch_add(1, Ordering::Relaxed);
        for (&page, &id) in run.iter().zip(ids) {
            let member = self.slots[page as usize].ring;
            // A ring without a frame shares this one; a second member that needs one at the same time
            // has its own from now on.
            let ring = member.filter(|&ring| self.rings[ring as usize].frame.is_none());
            self.is_disturbed |= ring != member;
            if let Some(ring) = ring {
                let holder = page;
                self.rings[ring as usize].frame = Some(Frame { page: id, holder });
            }
            self.slots[page as usize] = Slot {
                page: Some(id),
                stamp,
                beyond: page >= beyond_from,
                ring,
                is_alias: ring.is_some(),
                ..Slot::default()
            };
        }
        self.resident += run.len() as u32;
        self.arrivals += run.len() as u64;
    }

    /// Whether a page's ring has a frame, which another one holds as long as this one is out.
    pub fn is_ring_taken(&self, page: u32) -> bool {
        let ring = self.slots[page as usize].ring;
        ring.is_some_and(|ring| self.rings[ring as usize].frame.is_some())
    }

    /// Makes those of `pages` resident whose frame is held by one that is not pinned, not to be kept, and not of
    /// them. Returns who held them. `pages` ascend.
    pub fn take_over(&mut self, pages: &[u32], keeps: impl Fn(u32) -> bool) -> Vec<u32> {
        let takeable = |range: &Self, page: u32| {
            let slot = &range.slots[page as usize];
            let frame = range.rings[slot.ring? as usize].frame?;
            let is_free = range.slots[frame.holder as usize].pins == 0
                && !keeps(frame.holder)
                && pages.binary_search(&frame.holder).is_err();
            (slot.page.is_none() && is_free).then_some(frame)
        };
        let is_new = |range: &Self, page: u32| !range.slots[page as usize].is_alias;
        let new: Vec<(u32, PageId)> = pages
            .iter()
            .filter(|&&page| is_new(self, page))
            .filter_map(|&page| Some((page, takeable(self, page)?.page)))
            .collect();
        for run in new.chunk_by(|a, b| a.0 + 1 == b.0) {
            let ids: Vec<PageId> = run.iter().map(|&(_, id)| id).collect();
            if self.pages.map(run[0].0, &ids).is_ok() {
                run.iter()
                    .for_each(|&(page, _)| self.slots[page as usize].is_alias = true);
            }
        }
        let stamp = STAMPS.fetch_add(1, Ordering::Relaxed);
        let mut taken = Vec::new();
        for &page in pages {
            if is_new(self, page) {
                continue;
            }
            let Some(Frame { page: id, holder }) = takeable(self, page) else {
                continue;
            };
            self.slots[holder as usize].page = None;
            let ring = self.slots[page as usize].ring;
            self.slots[page as usize] = Slot {
                page: Some(id),
                stamp,
                ring,
                is_alias: true,
                ..Slot::default()
            };
            if let Some(ring) = ring {
                let holder = page;
                self.rings[ring as usize].frame = Some(Frame { page: id, holder });
            }
            self.arrivals += 1;
            taken.push(holder);
        }
        taken
    }

    /// Makes a page that is out have memory of its own, if another one holds its frame. The device was
    /// waited for.
    pub fn leave_ring(&mut self, page: u32) {
        if self.is_ring_taken(page) {
            if self.slots[page as usize].is_alias {
                self.pages.unmap_or_stray(page);
            }
            let slot = &mut self.slots[page as usize];
            (slot.ring, slot.is_alias) = (None, false);
            self.is_disturbed = true;
        }
    }

    /// Takes the frame of a ring away from all members but for the mapping of its holder.
    fn unmap_aliases(&mut self, ring: u32) {
        let Ring { members, frame } = &self.rings[ring as usize];
        let holder = frame.map(|frame| frame.holder);
        for page in members.clone() {
            let slot = &mut self.slots[page as usize];
            if Some(page) != holder && slot.ring == Some(ring) && slot.is_alias {
                slot.is_alias = false;
                self.pages.unmap_or_stray(page);
            }
        }
    }

    /// Forms rings anew. Nothing is pinned, and the device was waited for. What is in a ring or was loses
    /// its contents; its memory is kept for what comes next.
    pub fn arrange(&mut self, rings: Vec<Vec<u32>>) {
        for ring in 0..self.rings.len() as u32 {
            self.unmap_aliases(ring);
        }
        let mut members = vec![None; self.slots.len()];
        for (ring, pages) in rings.iter().enumerate() {
            for &page in pages {
                members[page as usize] = Some(ring as u32);
            }
        }
        for (page, ring) in members.into_iter().enumerate() {
            let slot = &mut self.slots[page];
            if (ring.is_some() || slot.ring.is_some())
                && let Some(id) = slot.page.take()
            {
                self.resident -= 1;
                self.pages.unmap_or_stray(page as u32);
                self.pages.keep(id);
            }
            let slot = &mut self.slots[page];
            (slot.ring, slot.is_alias) = (ring, false);
        }
        let form = |members| Ring {
            members,
            frame: None,
        };
        self.rings = rings.into_iter().map(form).collect();
        self.is_disturbed = false;
    }

    /// Takes the memory of a page away; whether it could. The device was waited for.
    pub fn leave(&mut self, page: u32) -> bool {
        let offset = Bytes(u64::from(page) * self.pages.granule.0);
        if let Some(page_out) = &mut self.page_out
            && self.slots[page as usize].handed_out
        {
            let leaving = Leaving {
                offset,
                address: Address(self.pages.base.0 + offset.0),
                size: self.pages.granule,
            };
            if !(page_out.0)(leaving) {
                return false;
            }
        }
        if let Some(ring) = self.slots[page as usize].ring {
            self.unmap_aliases(ring);
        }
        if self.pages.unmap(page).is_err() {
            return false;
        }
        self.resident -= 1;
        let slot = &mut self.slots[page as usize];
        slot.is_alias = false;
        if let Some(ring) = slot.ring {
            self.rings[ring as usize].frame = None;
        }
        if let Some(id) = slot.page.take() {
            // A refused page is spare: `shed` tries again.
            drop(self.pages.give_back(id));
        }
        true
    }
}
