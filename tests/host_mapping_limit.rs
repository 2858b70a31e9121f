//! `Host` where the kernel allows no further mapping. A binary of its own: the limit is one of the whole
//! process, so no other test may run beside it.

#![cfg(target_os = "linux")]

mod common;

use common::{assert_invalid, kernel_mappings, nth, times};
use memory_compiler::device::{Call, Device, DeviceError, Host, PageId};
use memory_compiler::units::Bytes;

const GRANULE: Bytes = Bytes::kib(4);

#[test]
fn calls_beyond_the_kernels_limit_of_mappings_are_errors_that_change_nothing() {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("proc_sys_vm(5)");
    let limit: u64 = limit.trim().parse().expect("a number");
    if limit > 300_000 {
        eprintln!("SKIPPED: vm.max_map_count is {limit}, too many to reach in a test");
        return;
    }
    let refused = |call| {
        Err(DeviceError::System {
            call,
            code: libc::ENOMEM,
        })
    };
    let host = Host::new(GRANULE).unwrap();
    let place_count = limit + 10;
    let base = host.reserve(times(GRANULE, place_count)).unwrap();
    let at = |index| nth(base, GRANULE, index);

    // Three pages in a row are one mapping; touching the middle one splits it.
    let pages: Vec<PageId> = (0..3).map(|_| host.create().unwrap()).collect();
    for (index, &page) in (0..).zip(&pages) {
        host.map(at(index), page).unwrap();
    }
    // The same page again and again never merges.
    let mut mapped_count = 3;
    let failed = loop {
        match host.map(at(mapped_count), pages[0]) {
            Ok(()) => mapped_count += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(
        failed,
        DeviceError::System {
            call: Call::Map,
            code: libc::ENOMEM
        }
    );
    assert_eq!(host.allow(at(1), GRANULE), refused(Call::Allow));
    assert_eq!(host.unmap(at(1), GRANULE), refused(Call::Unmap));
    assert_invalid(Call::Read, host.read(at(1), &mut [0]));

    // What splits nothing can be taken back, again and again.
    for index in [mapped_count - 1, mapped_count - 2, mapped_count - 3] {
        host.unmap(at(index), GRANULE).unwrap();
    }
    for index in [mapped_count - 3, mapped_count - 2, mapped_count - 1] {
        host.map(at(index), pages[0]).unwrap();
    }
    assert_eq!(host.map(at(mapped_count), pages[0]), refused(Call::Map));
    host.unmap(at(1_000), times(GRANULE, 1_000)).unwrap();
    let (rights, path) = kernel_mappings(at(mapped_count), GRANULE).remove(0);
    assert_eq!((rights.as_str(), path.as_str()), ("---p", ""));
    host.map(at(mapped_count), pages[0]).unwrap();
    host.allow(at(0), times(GRANULE, 3)).unwrap();
    host.write(at(1), b"still here").unwrap();

    host.unmap(at(0), times(GRANULE, 1_000)).unwrap();
    host.unmap(at(2_000), times(GRANULE, mapped_count + 1 - 2_000))
        .unwrap();
    pages
        .into_iter()
        .for_each(|page| host.release(page).unwrap());
    host.unreserve(base, times(GRANULE, place_count)).unwrap();
}
