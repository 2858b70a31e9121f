//! Who is where: reserved ranges, living pages, mappings, fences. Checked before the driver is asked,
//! so that a call that breaks a rule of [`Device`](super::super::Device) is told what it broke and
//! changes nothing.
//!
//! May import: `device`, `units`.

use std::collections::BTreeMap;

use super::super::{Call, DeviceError, PageId, StreamId};
use super::driver::{Event, Handle};
use crate::units::{Address, Bytes};

/// See the module's page.
#[derive(Debug, Default)]
pub(super) struct Books {
    /// Reserved ranges: base and size.
    pub ranges: BTreeMap<Address, Bytes>,
    /// Mapped granules.
    pub places: BTreeMap<Address, Place>,
    /// Living pages.
    pub pages: BTreeMap<PageId, Page>,
    /// The next page's number: every page ever created has a smaller one.
    next_page: u64,
    /// Fences issued and not yet waited for.
    pub fences: BTreeMap<u64, Event>,
    next_fence: u64,
    /// Moments whose time was not asked for yet; numbered with the fences.
    pub moments: BTreeMap<u64, Event>,
    /// The stream for copies, once somebody asked for it.
    pub copy_stream: Option<StreamId>,
}

/// A granule of a range with a page under it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub page: PageId,
    pub allowed: bool,
}

/// The driver's name of a page, and under how many places it stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    pub handle: Handle,
    pub place_count: u64,
}

pub(super) fn invalid(call: Call, reason: &'static str) -> DeviceError {
    DeviceError::Invalid { call, reason }
}

/// Checks that `at .. at + size` is a non-empty row of granules; returns its end.
pub(super) fn check_granules(
    call: Call,
    at: Address,
    size: Bytes,
    granule: Bytes,
) -> Result<Address, DeviceError> {
    if !at.0.is_multiple_of(granule.0) || !size.0.is_multiple_of(granule.0) {
        return Err(invalid(call, "place and size are multiples of the granule"));
    }
    if size == Bytes::ZERO {
        return Err(invalid(call, "the size is not zero"));
    }
    at.checked_add(size)
        .ok_or(invalid(call, "the end is an address"))
}

impl Books {
    /// Checks that one reserved range holds all of `at .. end`.
    pub fn check_inside(&self, call: Call, at: Address, end: Address) -> Result<(), DeviceError> {
        let below = self.ranges.range(..=at).next_back();
        match below {
            Some((base, size)) if base.0 + size.0 >= end.0 => Ok(()),
            _ => Err(invalid(call, "the place is not inside one reserved range")),
        }
    }

    /// Checks that every granule of `at .. end` is mapped, and that `keep` holds for it.
    pub fn check_mapped(
        &self,
        call: Call,
        at: Address,
        end: Address,
        granule: Bytes,
        keep: impl Fn(&Place) -> bool,
        reason: &'static str,
    ) -> Result<(), DeviceError> {
        let mapped = self
            .places
            .range(at..end)
            .filter(|(_, place)| keep(place))
            .count() as u64;
        if mapped == (end.0 - at.0) / granule.0 {
            Ok(())
        } else {
            Err(invalid(call, reason))
        }
    }

    /// Checks that every byte of `at .. at + size` may be accessed.
    pub fn check_access(
        &self,
        call: Call,
        at: Address,
        size: Bytes,
        granule: Bytes,
    ) -> Result<(), DeviceError> {
        if size == Bytes::ZERO {
            return Ok(());
        }
        let end = at
            .checked_add(size)
            .and_then(|end| Bytes(end.0).checked_round_up(granule));
        let end = end.ok_or(invalid(call, "the end is an address"))?;
        let first = Address(at.0 - at.0 % granule.0);
        let reason = "memory is accessed only where it is mapped and allowed";
        self.check_mapped(
            call,
            first,
            Address(end.0),
            granule,
            |place| place.allowed,
            reason,
        )
    }

    pub fn add_page(&mut self, handle: Handle) -> PageId {
        let page = PageId(self.next_page);
        self.next_page += 1;
        self.pages.insert(
            page,
            Page {
                handle,
                place_count: 0,
            },
        );
        page
    }

    pub fn page(&self, call: Call, page: PageId) -> Result<Page, DeviceError> {
        self.pages
            .get(&page)
            .copied()
            .ok_or(invalid(call, "no such page lives"))
    }

    pub fn add_place(&mut self, at: Address, page: PageId) {
        self.places.insert(
            at,
            Place {
                page,
                allowed: false,
            },
        );
        self.pages
            .get_mut(&page)
            .expect("a mapped page lives")
            .place_count += 1;
    }

    pub fn remove_place(&mut self, at: Address) {
        let place = self.places.remove(&at).expect("checked by the caller");
        self.pages
            .get_mut(&place.page)
            .expect("a mapped page lives")
            .place_count -= 1;
    }

    pub fn add_moment(&mut self, event: Event) -> u64 {
        let moment = self.next_fence;
        self.next_fence += 1;
        self.moments.insert(moment, event);
        moment
    }

    pub fn add_fence(&mut self, event: Event) -> u64 {
        let fence = self.next_fence;
        self.next_fence += 1;
        self.fences.insert(fence, event);
        fence
    }
}
