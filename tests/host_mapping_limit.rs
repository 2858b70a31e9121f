//! `Host` where the kernel allows no further mapping. A binary of its own: the limit is one of the whole
//! process, so no other test may run beside it.

#![cfg(target_os = "linux")]

mod common;

use common::{assert_invalid, kernel_mappings, nth, times};
use memory_compiler::device::{Call, Device, DeviceError, Host, PageId};
use memory_compiler::units::Bytes;

const GRANULE: Bytes = Bytes::kib(4);

/// Mappings of the process that are not the device's: what it keeps in hand, and all the rest.
const OTHERS: u64 = 200;

#[test]
fn at_the_kernels_limit_nothing_more_is_mapped_and_everything_can_be_given_back() {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("proc_sys_vm(5)");
    let limit: u64 = limit.trim().parse().expect("a number");
    if limit > 300_000 {
        eprintln!("SKIPPED: vm.max_map_count is {limit}, too many to reach in a test");
        return;
    }
    /// Pages of which one mapping is made.
    const ROW: u64 = 100;
    let host = Host::new(GRANULE).unwrap();
    let place_count = limit + 3 * ROW;
    let base = host.reserve(times(GRANULE, place_count)).unwrap();
    let at = |index| nth(base, GRANULE, index);
    let refused = |call| {
        let mappings = host.mappings().expect("counted");
        assert_eq!(mappings.limit, limit);
        assert!(
            (limit - OTHERS..=limit).contains(&mappings.count),
            "{mappings:?}"
        );
        Err(DeviceError::Mappings { call, mappings })
    };

    // A hundred pages in a row are one mapping; touching one in the middle splits it.
    let pages: Vec<PageId> = (0..ROW).map(|_| host.create().unwrap()).collect();
    host.map_row(base, &pages).unwrap();
    assert_eq!(kernel_mappings(base, times(GRANULE, ROW)).len(), 1);
    // The same page again and again never merges.
    let mut mapped_count = ROW;
    while host.map(at(mapped_count), pages[0]).is_ok() {
        mapped_count += 1;
    }
    assert_eq!(host.map(at(mapped_count), pages[0]), refused(Call::Map));
    assert_eq!(host.allow(at(1), GRANULE), refused(Call::Allow));
    assert_invalid(Call::Read, host.read(at(1), &mut [0]));

    // What splits nothing can be taken back, again and again.
    for index in [mapped_count - 1, mapped_count - 2, mapped_count - 3] {
        host.unmap(at(index), GRANULE).unwrap();
    }
    for index in [mapped_count - 3, mapped_count - 2, mapped_count - 1] {
        host.map(at(index), pages[0]).unwrap();
    }
    assert_eq!(host.map(at(mapped_count), pages[0]), refused(Call::Map));

    // What splits too: every second page of the row goes, and its memory with it.
    let resident = host.resident().unwrap();
    for index in (1..ROW).step_by(2) {
        host.unmap(at(index), GRANULE).unwrap();
        assert_invalid(Call::Unmap, host.unmap(at(index), GRANULE));
        assert_invalid(Call::Allow, host.allow(at(index), GRANULE));
        host.release(pages[index as usize]).unwrap();
    }
    assert_eq!(resident.0 - host.resident().unwrap().0, ROW / 2 * GRANULE.0);
    // A page that is made now stands where it is mapped and nowhere else.
    let fresh: Vec<PageId> = (0..ROW / 2).map(|_| host.create().unwrap()).collect();

    host.unmap(at(1_000), times(GRANULE, 1_000)).unwrap();
    let (rights, path) = kernel_mappings(at(mapped_count), GRANULE).remove(0);
    assert_eq!((rights.as_str(), path.as_str()), ("---p", ""));
    host.map(at(mapped_count), pages[0]).unwrap();
    for (index, &page) in (1..ROW).step_by(2).zip(&fresh) {
        host.map(at(index), page).unwrap();
    }
    host.allow(base, times(GRANULE, ROW)).unwrap();
    for index in 0..ROW {
        host.fill(at(index), GRANULE, index as u8).unwrap();
    }
    for index in 0..ROW {
        let mut seen = [0];
        host.read(at(index), &mut seen).unwrap();
        assert_eq!(seen, [index as u8], "place {index}");
    }
    // All that the device counts is there, and what it leaves out are the others.
    let all = kernel_mappings(base, times(GRANULE, place_count)).len() as u64;
    assert_eq!(host.mappings().expect("counted").count, all);

    // At the limit again, where the end takes everything away.
    let mut more = (1_000..2_000).chain(mapped_count + 1..place_count);
    assert!(more.any(|index| host.map(at(index), pages[0]).is_err()));
    for index in (1..ROW).step_by(3) {
        host.unmap(at(index), GRANULE).unwrap();
    }
    for index in 0..place_count {
        // Also what is a mapping's middle; some are gone already.
        drop(host.unmap(at(index), GRANULE));
    }
    let living = pages.iter().step_by(2).chain(&fresh);
    living.for_each(|&page| host.release(page).unwrap());
    host.unreserve(base, times(GRANULE, place_count)).unwrap();
    assert_eq!(host.resident().unwrap(), Bytes::ZERO);
    assert_eq!(host.mappings().expect("counted").count, 0);
}
