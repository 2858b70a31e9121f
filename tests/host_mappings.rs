//! What `Host` says of the kernel's mappings is what `/proc/self/maps` says. A binary of its own: the count is
//! one of the whole process.

#![cfg(target_os = "linux")]

mod common;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{kernel_mappings, nth, times};
use memory_compiler::device::{Device, Host, PageId};
use memory_compiler::units::Bytes;
use proptest::prelude::*;

const GRANULE: Bytes = Bytes::kib(4);
const PLACES: u64 = 40;
const PAGES: usize = 16;

/// One test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn counted(host: &Host) -> u64 {
    host.mappings().expect("Linux counts them").count
}

#[derive(Clone, Debug)]
enum Action {
    /// So many pages from a page on, at a place.
    MapRow {
        at: u64,
        page: usize,
        count: u64,
    },
    Map {
        at: u64,
        page: usize,
    },
    Allow {
        at: u64,
        count: u64,
    },
    Unmap {
        at: u64,
        count: u64,
    },
    /// Another page in the place of one that stands nowhere.
    Remake {
        page: usize,
    },
}

fn action() -> impl Strategy<Value = Action> {
    let (place, page, count) = (0..PLACES, 0..PAGES, 1_u64..9);
    prop_oneof![
        3 => (place.clone(), page.clone(), count.clone())
            .prop_map(|(at, page, count)| Action::MapRow { at, page, count }),
        2 => (place.clone(), page.clone()).prop_map(|(at, page)| Action::Map { at, page }),
        3 => (place.clone(), count.clone()).prop_map(|(at, count)| Action::Allow { at, count }),
        3 => (place, count).prop_map(|(at, count)| Action::Unmap { at, count }),
        1 => page.prop_map(|page| Action::Remake { page }),
    ]
}

fn run(actions: &[Action]) {
    let host = Host::new(GRANULE).unwrap();
    // A second range, of which nothing happens in the first.
    let other = host.reserve(times(GRANULE, 3)).unwrap();
    let lone = host.create().unwrap();
    host.map(nth(other, GRANULE, 1), lone).unwrap();
    let base = host.reserve(times(GRANULE, PLACES)).unwrap();
    host.begin_row(PAGES as u64);
    let mut pages: Vec<PageId> = (0..PAGES).map(|_| host.create().unwrap()).collect();
    let mut mapped: BTreeMap<u64, PageId> = BTreeMap::new();
    for action in actions {
        match *action {
            Action::MapRow { at, page, count } => {
                let row = &pages[page..PAGES.min(page + count as usize)];
                let row = &row[..row.len().min((PLACES - at) as usize)];
                let free = (at..)
                    .zip(row)
                    .take_while(|(at, _)| !mapped.contains_key(at));
                let free = free.count();
                match host.map_row(nth(base, GRANULE, at), row) {
                    Ok(()) => assert_eq!(free, row.len()),
                    Err(refused) => assert_eq!(refused.mapped, free, "{refused:?}"),
                }
                mapped.extend((at..).zip(row[..free].iter().copied()));
            }
            Action::Map { at, page } => {
                let is_free = !mapped.contains_key(&at);
                let done = host.map(nth(base, GRANULE, at), pages[page]);
                assert_eq!(done.is_ok(), is_free);
                if is_free {
                    mapped.insert(at, pages[page]);
                }
            }
            Action::Allow { at, count } => {
                let is_whole = (at..at + count).all(|at| mapped.contains_key(&at));
                let done = host.allow(nth(base, GRANULE, at), times(GRANULE, count));
                assert_eq!(done.is_ok(), is_whole);
            }
            Action::Unmap { at, count } => {
                let is_whole = (at..at + count).all(|at| mapped.contains_key(&at));
                let done = host.unmap(nth(base, GRANULE, at), times(GRANULE, count));
                assert_eq!(done.is_ok(), is_whole);
                if is_whole {
                    mapped.retain(|place, _| !(at..at + count).contains(place));
                }
            }
            Action::Remake { page } => {
                if host.release(pages[page]).is_ok() {
                    pages[page] = host.create().unwrap();
                }
            }
        }
        // Two ranges that happen to lie side by side share the gap between them.
        let touch =
            other.0 + times(GRANULE, 3).0 == base.0 || base.0 + times(GRANULE, PLACES).0 == other.0;
        let seen = kernel_mappings(base, times(GRANULE, PLACES)).len()
            + kernel_mappings(other, times(GRANULE, 3)).len();
        assert_eq!(
            counted(&host),
            seen as u64,
            "after {action:?}; side by side: {touch}"
        );
    }
    for &at in mapped.keys() {
        host.unmap(nth(base, GRANULE, at), GRANULE).unwrap();
    }
    host.unmap(nth(other, GRANULE, 1), GRANULE).unwrap();
    pages.push(lone);
    pages
        .into_iter()
        .for_each(|page| host.release(page).unwrap());
    assert_eq!(counted(&host), 2);
    host.unreserve(base, times(GRANULE, PLACES)).unwrap();
    host.unreserve(other, times(GRANULE, 3)).unwrap();
    assert_eq!(counted(&host), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_count_is_what_the_kernel_shows_after_every_call(
        actions in prop::collection::vec(action(), 1..60)
    ) {
        let _alone = alone();
        run(&actions);
    }
}

#[test]
fn the_devices_of_a_process_count_together() {
    let _alone = alone();
    let hosts = [
        Host::new(GRANULE).unwrap(),
        Host::new(Bytes::mib(2)).unwrap(),
    ];
    let bases = hosts
        .each_ref()
        .map(|host| host.reserve(times(host.granule(), 8)).unwrap());
    let pages = hosts.each_ref().map(|host| host.create().unwrap());
    for ((host, base), page) in hosts.iter().zip(bases).zip(pages) {
        for index in [1, 3, 5] {
            host.map(nth(base, host.granule(), index), page).unwrap();
        }
    }
    // Four gaps and three places each.
    assert_eq!(hosts.each_ref().map(counted), [14, 14]);
    for ((host, base), page) in hosts.iter().zip(bases).zip(pages) {
        for index in [1, 3, 5] {
            host.unmap(nth(base, host.granule(), index), host.granule())
                .unwrap();
        }
        host.release(page).unwrap();
        host.unreserve(base, times(host.granule(), 8)).unwrap();
    }
    assert_eq!(hosts.each_ref().map(counted), [0, 0]);
}

#[test]
fn pages_made_in_a_row_are_one_mapping_whatever_is_free_between_others() {
    let _alone = alone();
    let host = Host::new(GRANULE).unwrap();
    let base = host.reserve(times(GRANULE, 64)).unwrap();
    let mut pages: Vec<PageId> = (0..64).map(|_| host.create().unwrap()).collect();
    // Every second one goes, and then a run of three.
    for index in (0..64).step_by(2).chain([21, 23]) {
        host.release(pages[index]).unwrap();
    }
    pages.retain(|page| page.0 % 2 == 1 && ![21, 23].contains(&page.0));
    for (count, mappings) in [(5, 1), (20, 1), (1, 1)] {
        host.begin_row(count);
        let row: Vec<PageId> = (0..count).map(|_| host.create().unwrap()).collect();
        host.map_row(base, &row).unwrap();
        assert_eq!(kernel_mappings(base, times(GRANULE, count)).len(), mappings);
        host.unmap(base, times(GRANULE, count)).unwrap();
        pages.extend(row);
    }
    // The five went where they fitted, twenty behind the end, the one to the lowest free piece.
    assert_eq!(host.resident().unwrap(), times(GRANULE, pages.len() as u64));
    pages
        .into_iter()
        .for_each(|page| host.release(page).unwrap());
    host.unreserve(base, times(GRANULE, 64)).unwrap();
}
