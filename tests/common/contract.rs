//! The rules of [`Device`], each a function over any device whose memory is its own.
//!
//! A rule leaves the device as empty as it found it, so that dropping it checks that nothing leaks.
//! To hold another device to them, add a line to `tests/device_contract.rs`.

use std::sync::Arc;

use memory_compiler::device::{Call, Device, PageId, StreamId};
use memory_compiler::units::{Address, Bytes};

use super::{assert_invalid, nth, times};

/// Makes a module of tests for a device: one for each rule of this file. A third argument looks at the
/// device when a rule is done with it.
#[macro_export]
macro_rules! hold_to_the_contract {
    ($name:ident, $device:expr) => {
        $crate::hold_to_the_contract!($name, $device, |_| ());
    };
    ($name:ident, $device:expr, $at_the_end:expr) => {
        $crate::hold_to_the_contract!(@ $name, $device, $at_the_end;
            one_page_under_two_places_shows_the_same_bytes,
            a_page_keeps_its_bytes_while_it_stands_nowhere,
            two_pages_share_no_byte,
            places_of_one_range_are_contiguous,
            ranges_are_aligned_and_disjoint,
            a_remapped_place_shows_the_new_page_only,
            page_numbers_are_never_reused,
            a_fill_changes_its_bytes_and_no_others,
            a_row_of_pages_stands_as_if_each_was_mapped_by_itself,
            a_row_that_is_refused_says_how_much_of_it_stands,
            map_wants_a_free_place_a_living_page_and_a_granule_border,
            allow_wants_mapped_granules,
            unmap_wants_mapped_granules,
            release_wants_a_living_page_that_stands_nowhere,
            unreserve_wants_a_whole_range_without_mappings,
            reserve_wants_whole_granules,
            access_wants_mapped_and_allowed_memory,
            a_new_mapping_is_not_allowed_because_the_last_one_was,
            a_fence_is_waited_for_once,
            free_memory_is_no_more_than_all_of_it,
            a_trimmed_pool_takes_nothing_that_is_alive,
            an_enqueued_copy_is_there_when_the_device_was_waited_for,
            host_memory_is_written_again_when_copies_from_it_are_done,
        );
    };
    (@ $name:ident, $device:expr, $at_the_end:expr; $($rule:ident),+ $(,)?) => {
        mod $name {
            use super::*;

            $(
                #[test]
                fn $rule() {
                    let device = $device;
                    $crate::common::contract::$rule(&device);
                    $crate::common::contract::look_at(&device, $at_the_end);
                }
            )+
        }
    };
}

/// Calls `look`; a function, so that a closure without types knows those of its device.
pub fn look_at<D>(device: &D, look: impl FnOnce(&D)) {
    look(device);
}

/// A range with its first granules mapped to pages of their own, and allowed.
struct Row<'a> {
    device: &'a dyn Device,
    granule: Bytes,
    base: Address,
    place_count: u64,
    pages: Vec<PageId>,
}

impl<'a> Row<'a> {
    fn new(device: &'a dyn Device, place_count: u64, page_count: u64) -> Self {
        let granule = device.granule();
        let base = device.reserve(times(granule, place_count)).unwrap();
        let mut row = Self {
            device,
            granule,
            base,
            place_count,
            pages: Vec::new(),
        };
        for index in 0..page_count {
            let page = device.create().unwrap();
            row.pages.push(page);
            row.map(index, page);
        }
        row
    }

    fn at(&self, index: u64) -> Address {
        nth(self.base, self.granule, index)
    }

    fn map(&self, index: u64, page: PageId) {
        self.device.map(self.at(index), page).unwrap();
        self.device.allow(self.at(index), self.granule).unwrap();
    }

    fn unmap(&self, index: u64) {
        self.device.unmap(self.at(index), self.granule).unwrap();
    }

    fn write(&self, index: u64, text: &[u8]) {
        self.device.write(self.at(index), text).unwrap();
    }

    #[track_caller]
    fn shows(&self, index: u64, text: &[u8]) {
        assert_eq!(read(self.device, self.at(index), text.len()), text);
    }

    /// Gives all back; the first `mapped_count` places are mapped.
    fn give_back(self, mapped_count: u64) {
        if mapped_count > 0 {
            self.device
                .unmap(self.base, times(self.granule, mapped_count))
                .unwrap();
        }
        for page in self.pages {
            self.device.release(page).unwrap();
        }
        self.device
            .unreserve(self.base, times(self.granule, self.place_count))
            .unwrap();
    }
}

fn read(device: &dyn Device, at: Address, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    device.read(at, &mut bytes).unwrap();
    bytes
}

pub fn one_page_under_two_places_shows_the_same_bytes(device: &dyn Device) {
    let row = Row::new(device, 3, 1);
    row.map(1, row.pages[0]);
    row.map(2, row.pages[0]);
    row.write(0, b"left");
    row.shows(2, b"left");
    row.write(2, b"right");
    row.shows(0, b"right");
    row.unmap(0);
    row.shows(1, b"right");
    row.map(0, row.pages[0]);
    row.give_back(3);
}

pub fn a_page_keeps_its_bytes_while_it_stands_nowhere(device: &dyn Device) {
    let row = Row::new(device, 2, 1);
    row.write(0, b"kept");
    row.unmap(0);
    row.map(1, row.pages[0]);
    row.shows(1, b"kept");
    row.unmap(1);
    row.give_back(0);
}

pub fn two_pages_share_no_byte(device: &dyn Device) {
    let row = Row::new(device, 2, 2);
    device.fill(row.at(0), row.granule, 1).unwrap();
    device.fill(row.at(1), row.granule, 2).unwrap();
    assert!(
        read(device, row.at(0), row.granule.0 as usize)
            .iter()
            .all(|&byte| byte == 1)
    );
    assert!(
        read(device, row.at(1), row.granule.0 as usize)
            .iter()
            .all(|&byte| byte == 2)
    );
    row.give_back(2);
}

pub fn places_of_one_range_are_contiguous(device: &dyn Device) {
    let row = Row::new(device, 2, 2);
    let border = Address(row.at(1).0 - 3);
    device.write(border, b"across").unwrap();
    row.shows(1, b"oss");
    assert_eq!(read(device, border, 6), b"across");
    row.give_back(2);
}

pub fn ranges_are_aligned_and_disjoint(device: &dyn Device) {
    let size = times(device.granule(), 3);
    let mut bases: Vec<Address> = (0..8).map(|_| device.reserve(size).unwrap()).collect();
    bases.sort_unstable();
    assert!(
        bases
            .iter()
            .all(|base| base.0.is_multiple_of(device.granule().0))
    );
    assert!(bases.windows(2).all(|pair| pair[0].0 + size.0 <= pair[1].0));
    for base in bases {
        device.unreserve(base, size).unwrap();
    }
}

pub fn a_remapped_place_shows_the_new_page_only(device: &dyn Device) {
    let row = Row::new(device, 2, 2);
    row.write(0, b"old");
    row.write(1, b"new");
    device.unmap(row.base, times(row.granule, 2)).unwrap();
    row.map(0, row.pages[1]);
    row.shows(0, b"new");
    row.write(0, b"top");
    row.unmap(0);
    row.map(0, row.pages[0]);
    row.shows(0, b"old");
    row.give_back(1);
}

pub fn page_numbers_are_never_reused(device: &dyn Device) {
    let first = device.create().unwrap();
    let second = device.create().unwrap();
    device.release(first).unwrap();
    let third = device.create().unwrap();
    assert!(third != first && third != second);
    device.release(second).unwrap();
    device.release(third).unwrap();
}

pub fn a_fill_changes_its_bytes_and_no_others(device: &dyn Device) {
    let row = Row::new(device, 1, 1);
    row.write(0, &[7; 16]);
    device.fill(Address(row.base.0 + 4), Bytes(8), 9).unwrap();
    row.shows(0, &[7, 7, 7, 7, 9, 9, 9, 9, 9, 9, 9, 9, 7, 7, 7, 7]);
    row.give_back(1);
}

pub fn a_row_of_pages_stands_as_if_each_was_mapped_by_itself(device: &dyn Device) {
    let mut row = Row::new(device, 5, 0);
    device.begin_row(2);
    row.pages = (0..2).map(|_| device.create().unwrap()).collect();
    let [first, second] = row.pages[..] else {
        unreachable!("two were made")
    };
    device.map_row(row.base, &[]).unwrap();
    // Neighbours and aliases.
    device
        .map_row(row.base, &[first, second, second, first])
        .unwrap();
    assert_invalid(Call::Read, device.read(row.at(1), &mut [0]));
    device.allow(row.base, times(row.granule, 4)).unwrap();
    row.write(0, b"first");
    row.write(2, b"second");
    row.shows(3, b"first");
    row.shows(1, b"second");
    assert_invalid(Call::Unmap, device.unmap(row.at(4), row.granule));
    row.give_back(4);
}

pub fn a_row_that_is_refused_says_how_much_of_it_stands(device: &dyn Device) {
    let row = Row::new(device, 4, 2);
    let [first, second] = row.pages[..] else {
        unreachable!("two were made")
    };
    row.unmap(1);
    row.map(3, second);
    // The last place is taken; then a page that does not live, behind one that does.
    let refused = device.map_row(row.at(1), &[first, second, first]);
    let refused = refused.unwrap_err();
    assert_eq!(refused.mapped, 2);
    assert_invalid::<()>(Call::Map, Err(refused.source));
    device.allow(row.base, times(row.granule, 4)).unwrap();
    row.write(0, b"first");
    row.shows(1, b"first");
    row.unmap(1);
    let refused = device.map_row(row.at(1), &[first, PageId(u64::MAX)]);
    assert_eq!(refused.unwrap_err().mapped, 1);
    row.give_back(4);
}

pub fn map_wants_a_free_place_a_living_page_and_a_granule_border(device: &dyn Device) {
    let row = Row::new(device, 3, 2);
    row.write(0, b"first");
    let page = row.pages[1];
    assert_invalid(Call::Map, device.map(row.at(0), page));
    assert_invalid(Call::Map, device.map(row.at(3), page));
    assert_invalid(Call::Map, device.map(Address(row.at(2).0 + 512), page));
    assert_invalid(Call::Map, device.map(Address(0), page));
    assert_invalid(
        Call::Map,
        device.map(Address(u64::MAX - row.granule.0 + 1), page),
    );
    assert_invalid(Call::Map, device.map(row.at(2), PageId(u64::MAX)));
    let released = device.create().unwrap();
    device.release(released).unwrap();
    assert_invalid(Call::Map, device.map(row.at(2), released));
    row.shows(0, b"first");
    // Nothing was mapped under the third place: it is still free.
    row.map(2, page);
    row.give_back(3);
}

pub fn allow_wants_mapped_granules(device: &dyn Device) {
    let row = Row::new(device, 3, 1);
    device.map(row.at(1), row.pages[0]).unwrap();
    assert_invalid(Call::Allow, device.allow(row.at(1), times(row.granule, 2)));
    assert_invalid(Call::Allow, device.allow(row.at(2), row.granule));
    assert_invalid(
        Call::Allow,
        device.allow(row.at(1), Bytes(row.granule.0 - 512)),
    );
    assert_invalid(Call::Allow, device.allow(row.at(1), Bytes::ZERO));
    assert_invalid(
        Call::Allow,
        device.allow(row.at(1), Bytes(0_u64.wrapping_sub(row.granule.0))),
    );
    // The mapped half of a refused range is not allowed.
    assert_invalid(Call::Read, device.read(row.at(1), &mut [0]));
    device.allow(row.at(0), times(row.granule, 2)).unwrap();
    row.write(1, b"allowed");
    row.give_back(2);
}

pub fn unmap_wants_mapped_granules(device: &dyn Device) {
    let row = Row::new(device, 3, 2);
    row.write(0, b"first");
    row.write(1, b"second");
    assert_invalid(Call::Unmap, device.unmap(row.at(2), row.granule));
    assert_invalid(Call::Unmap, device.unmap(row.at(1), times(row.granule, 2)));
    assert_invalid(Call::Unmap, device.unmap(row.at(0), times(row.granule, 4)));
    assert_invalid(
        Call::Unmap,
        device.unmap(row.at(0), Bytes(512 + row.granule.0)),
    );
    assert_invalid(Call::Unmap, device.unmap(row.at(0), Bytes::ZERO));
    row.shows(0, b"first");
    row.shows(1, b"second");
    row.give_back(2);
}

pub fn release_wants_a_living_page_that_stands_nowhere(device: &dyn Device) {
    let row = Row::new(device, 2, 1);
    row.map(1, row.pages[0]);
    row.write(0, b"alive");
    assert_invalid(Call::Release, device.release(row.pages[0]));
    row.unmap(1);
    assert_invalid(Call::Release, device.release(row.pages[0]));
    row.shows(0, b"alive");
    let page = row.pages[0];
    row.give_back(1);
    assert_invalid(Call::Release, device.release(page));
    assert_invalid(Call::Release, device.release(PageId(u64::MAX)));
}

pub fn unreserve_wants_a_whole_range_without_mappings(device: &dyn Device) {
    let row = Row::new(device, 2, 1);
    let size = times(row.granule, 2);
    row.write(0, b"mapped");
    assert_invalid(Call::Unreserve, device.unreserve(row.base, size));
    row.shows(0, b"mapped");
    row.unmap(0);
    assert_invalid(Call::Unreserve, device.unreserve(row.base, row.granule));
    assert_invalid(Call::Unreserve, device.unreserve(row.at(1), row.granule));
    row.map(1, row.pages[0]);
    row.unmap(1);
    let base = row.base;
    row.give_back(0);
    assert_invalid(Call::Unreserve, device.unreserve(base, size));
}

pub fn reserve_wants_whole_granules(device: &dyn Device) {
    assert_invalid(Call::Reserve, device.reserve(Bytes::ZERO));
    assert_invalid(
        Call::Reserve,
        device.reserve(Bytes(device.granule().0 + 512)),
    );
}

pub fn access_wants_mapped_and_allowed_memory(device: &dyn Device) {
    let row = Row::new(device, 3, 2);
    row.unmap(1);
    device.map(row.at(1), row.pages[1]).unwrap();
    device.fill(row.at(0), row.granule, 5).unwrap();
    let last = Address(row.at(1).0 - 2);
    for (at, length) in [
        (last, 3),
        (row.at(1), 1),
        (row.at(2), 1),
        (Address(u64::MAX), 2),
    ] {
        let size = Bytes(length as u64);
        assert_invalid(Call::Write, device.write(at, &vec![6; length]));
        assert_invalid(Call::Read, device.read(at, &mut vec![0; length]));
        assert_invalid(Call::Fill, device.fill(at, size, 6));
    }
    assert_eq!(read(device, last, 2), [5, 5]);
    row.give_back(2);
}

pub fn a_new_mapping_is_not_allowed_because_the_last_one_was(device: &dyn Device) {
    let row = Row::new(device, 1, 1);
    row.unmap(0);
    device.map(row.at(0), row.pages[0]).unwrap();
    assert_invalid(Call::Read, device.read(row.at(0), &mut [0]));
    row.give_back(1);
}

pub fn a_fence_is_waited_for_once(device: &dyn Device) {
    let (one, two) = (StreamId(1), StreamId(2));
    let fence = device.fence(one).unwrap();
    let other = device.fence(one).unwrap();
    assert_ne!(fence, other);
    device.wait(two, fence).unwrap();
    assert_invalid(Call::Wait, device.wait(two, fence));
    device.wait(one, other).unwrap();
    device.synchronise().unwrap();
}

pub fn a_trimmed_pool_takes_nothing_that_is_alive(device: &dyn Device) {
    let row = Row::new(device, 2, 2);
    device.fill(row.at(0), times(row.granule, 2), 9).unwrap();
    device.synchronise().unwrap();
    device.trim_pool().unwrap();
    assert_eq!(read(device, row.at(1), 2), [9, 9]);
    row.give_back(2);
    device.trim_pool().unwrap();
}

pub fn free_memory_is_no_more_than_all_of_it(device: &dyn Device) {
    let info = device.memory().unwrap();
    assert!(
        Bytes::ZERO < info.free && info.free <= info.total,
        "{info:?}"
    );
}

pub fn an_enqueued_copy_is_there_when_the_device_was_waited_for(device: &dyn Device) {
    let row = Row::new(device, 3, 2);
    let size = times(row.granule, 2);
    let mut image = device.host_memory(size).unwrap();
    assert_eq!(image.size(), size);
    for (byte, number) in image.bytes_mut().iter_mut().zip(0_u64..) {
        *byte = (number / 7) as u8;
    }
    let image = Arc::new(image);
    let stream = device.copy_stream().unwrap();
    assert_eq!(device.copy_stream().unwrap(), stream);
    let half = Bytes(row.granule.0 / 2);
    let copy = |at, offset, size| device.enqueue_copy(stream, at, &image, offset, size);
    copy(row.at(0), half, row.granule).unwrap();
    let arrived = device.fence(stream).unwrap();
    device.wait(StreamId(1), arrived).unwrap();
    device.synchronise().unwrap();
    let seen = read(device, row.at(0), row.granule.0 as usize);
    assert!(seen == image.bytes()[half.0 as usize..][..seen.len()]);
    // More than there is in the image.
    assert_invalid(Call::Write, copy(row.at(0), size, Bytes(1)));
    drop(image);
    row.give_back(2);
}

pub fn host_memory_is_written_again_when_copies_from_it_are_done(device: &dyn Device) {
    const PAGES: u64 = 2;
    let row = Row::new(device, PAGES + 1, PAGES);
    let size = times(row.granule, PAGES);
    let mut image = device.host_memory(size).unwrap();
    image.bytes_mut().fill(7);
    let mut image = Arc::new(image);
    let stream = device.copy_stream().unwrap();
    for _ in 0..64 {
        device
            .enqueue_copy(stream, row.at(0), &image, Bytes::ZERO, size)
            .unwrap();
    }
    Arc::get_mut(&mut image).unwrap().bytes_mut().fill(9);
    device.synchronise().unwrap();
    let seen = read(device, row.at(0), size.0 as usize);
    assert!(seen.iter().all(|byte| *byte == 7));
    drop(image);
    row.give_back(PAGES);
}
