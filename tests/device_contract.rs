//! Every device and adaptor under one contract, and then what each does beyond it.
//!
//! A new one joins with one `hold_to_the_contract!` line.

#![cfg(target_os = "linux")]

mod common;

use std::io::{Read as _, Write as _};
use std::sync::Arc;

use common::{assert_invalid, kernel_mappings, nth, times};
use memory_compiler::device::adaptor::{Counting, Failing, Limiting, Repeat, Streams};
use memory_compiler::device::{Call, Device, DeviceError, Host, MemoryInfo, PageId, StreamId};
use memory_compiler::units::{Address, Bytes};

const SMALL: Bytes = Bytes::kib(4);
const LARGE: Bytes = Bytes::mib(2);

fn host(granule: Bytes) -> Host {
    Host::new(granule).unwrap()
}

hold_to_the_contract!(host_with_small_pages, host(SMALL));
hold_to_the_contract!(host_with_large_pages, host(LARGE));
hold_to_the_contract!(counting, Counting::new(host(SMALL)), |device| assert!(
    device.is_empty()
));
hold_to_the_contract!(limiting, Limiting::new(host(SMALL), times(SMALL, 3)));
hold_to_the_contract!(failing_disarmed, Failing::new(host(SMALL)));
hold_to_the_contract!(streams, Streams::new(host(SMALL)));
hold_to_the_contract!(shared, Arc::new(host(SMALL)) as Arc<dyn Device>);
hold_to_the_contract!(
    all_adaptors_at_once,
    Streams::new(Failing::new(Counting::new(Limiting::new(
        host(SMALL),
        LARGE
    ))))
);

mod host_alone {
    use super::*;

    #[test]
    fn a_granule_is_a_power_of_two_of_whole_system_pages() {
        for granule in [0, 512, 4096 + 512, 3 * 4096] {
            assert_invalid(Call::Create, Host::new(Bytes(granule)));
        }
        assert_eq!(host(Host::default_granule()).granule(), LARGE);
    }

    #[test]
    fn a_released_page_goes_back_to_the_system() {
        let host = host(LARGE);
        let pages: Vec<PageId> = (0..4).map(|_| host.create().unwrap()).collect();
        assert_eq!(host.resident().unwrap(), times(LARGE, 4));
        for (&page, left) in pages.iter().zip([3, 2, 1, 0]) {
            host.release(page).unwrap();
            assert_eq!(host.resident().unwrap(), times(LARGE, left));
        }
    }

    #[test]
    fn a_page_is_backed_when_it_is_created_and_its_piece_of_the_file_is_used_again() {
        let host = host(LARGE);
        for _ in 0..100 {
            let page = host.create().unwrap();
            assert_eq!(host.resident().unwrap(), LARGE);
            host.release(page).unwrap();
        }
        assert_eq!(host.resident().unwrap(), Bytes::ZERO);
    }

    #[test]
    fn reserved_mapped_and_allowed_places_have_their_rights_in_the_kernel() {
        let host = host(SMALL);
        let base = host.reserve(times(SMALL, 3)).unwrap();
        let page = host.create().unwrap();
        for index in [0, 1] {
            host.map(nth(base, SMALL, index), page).unwrap();
        }
        host.allow(base, SMALL).unwrap();
        let rights = |index| {
            let (rights, path) = kernel_mappings(nth(base, SMALL, index), SMALL).remove(0);
            (rights, path.contains("memory-compiler"))
        };
        assert_eq!(rights(0), ("rw-s".to_owned(), true));
        assert_eq!(rights(1), ("---s".to_owned(), true));
        assert_eq!(rights(2), ("---p".to_owned(), false));
        host.unmap(base, times(SMALL, 2)).unwrap();
        assert_eq!(rights(0), ("---p".to_owned(), false));
        host.release(page).unwrap();
        host.unreserve(base, times(SMALL, 3)).unwrap();
    }

    #[test]
    fn a_forked_child_has_mapped_places_of_its_own() {
        let host = host(SMALL);
        let base = host.reserve(times(SMALL, 4)).unwrap();
        for index in 0..3 {
            host.map(nth(base, SMALL, index), host.create().unwrap())
                .unwrap();
        }
        host.allow(base, times(SMALL, 2)).unwrap();
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        // SAFETY: the child uses what this test alone has, and ends here.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let rights = kernel_mappings(base, times(SMALL, 4));
            let rights: Vec<_> = rights.into_iter().map(|(rights, _)| rights).collect();
            let _ = writer.write_all(rights.join(" ").as_bytes());
            // SAFETY: ends this process, which is the child.
            unsafe { libc::_exit(0) };
        }
        drop(writer);
        let mut seen = String::new();
        reader.read_to_string(&mut seen).unwrap();
        // SAFETY: null is for a status that nobody wants.
        let ended = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        assert_eq!(ended, child);
        // Two of its own in one mapping, one that is not allowed, and addresses without memory.
        assert_eq!(seen, "rw-p ---s ---p");
        let rights = kernel_mappings(base, times(SMALL, 4)).remove(0).0;
        assert_eq!(rights, "rw-s", "the parent's");
        host.unmap(base, times(SMALL, 3)).unwrap();
        (0..3).for_each(|page| host.release(PageId(page)).unwrap());
        host.unreserve(base, times(SMALL, 4)).unwrap();
    }

    #[test]
    fn threads_share_a_device() {
        let host = host(SMALL);
        let work = |byte| {
            for _ in 0..200 {
                let base = host.reserve(times(SMALL, 2)).unwrap();
                let page = host.create().unwrap();
                host.map(base, page).unwrap();
                host.map(nth(base, SMALL, 1), page).unwrap();
                host.allow(base, times(SMALL, 2)).unwrap();
                host.fill(base, SMALL, byte).unwrap();
                let mut seen = [0; 16];
                host.read(nth(base, SMALL, 1), &mut seen).unwrap();
                assert_eq!(seen, [byte; 16]);
                host.unmap(base, times(SMALL, 2)).unwrap();
                host.release(page).unwrap();
                host.unreserve(base, times(SMALL, 2)).unwrap();
            }
        };
        std::thread::scope(|scope| {
            (1..=4).for_each(|byte| drop(scope.spawn(move || work(byte))));
        });
        assert_eq!(host.resident().unwrap(), Bytes::ZERO);
    }

    #[test]
    fn new_pages_take_the_lowest_free_pieces_so_that_a_row_stays_one_kernel_mapping() {
        let host = host(SMALL);
        let size = times(SMALL, 4);
        let base = host.reserve(size).unwrap();
        let mut row: Vec<PageId> = (0..4).map(|_| host.create().unwrap()).collect();
        for index in [2, 0] {
            host.release(row[index]).unwrap();
        }
        for index in [0, 2] {
            row[index] = host.create().unwrap();
        }
        for (index, &page) in (0..).zip(&row) {
            host.map(nth(base, SMALL, index), page).unwrap();
        }
        assert_eq!(kernel_mappings(base, size).len(), 1);
        host.unmap(base, size).unwrap();
        row.into_iter().for_each(|page| host.release(page).unwrap());
        host.unreserve(base, size).unwrap();
    }

    #[test]
    fn forty_thousand_aliased_places_over_neighbouring_pages_are_forty_kernel_mappings() {
        const PAGES: u64 = 1_000;
        const WINDOWS: u64 = 40;
        let host = host(SMALL);
        let size = times(SMALL, PAGES * WINDOWS);
        let base = host.reserve(size).unwrap();
        let pages: Vec<PageId> = (0..PAGES).map(|_| host.create().unwrap()).collect();
        for window in 0..WINDOWS {
            for (index, &page) in (0..).zip(&pages) {
                host.map(nth(base, SMALL, window * PAGES + index), page)
                    .unwrap();
            }
        }
        assert_eq!(kernel_mappings(base, size).len() as u64, WINDOWS);
        host.allow(base, size).unwrap();
        assert_eq!(kernel_mappings(base, size).len() as u64, WINDOWS);

        host.fill(base, times(SMALL, PAGES), 3).unwrap();
        let mut byte = [0];
        host.read(nth(base, SMALL, PAGES * WINDOWS - 1), &mut byte)
            .unwrap();
        assert_eq!(byte, [3]);
        host.unmap(base, size).unwrap();
        pages
            .into_iter()
            .for_each(|page| host.release(page).unwrap());
        host.unreserve(base, size).unwrap();
    }

    #[test]
    fn a_range_of_a_tebibyte_costs_no_memory() {
        let host = host(LARGE);
        let base = host.reserve(Bytes::gib(1024)).unwrap();
        assert_eq!(host.resident().unwrap(), Bytes::ZERO);
        host.unreserve(base, Bytes::gib(1024)).unwrap();
    }

    #[test]
    fn a_range_larger_than_the_address_space_is_an_error_of_the_system() {
        let refused = host(LARGE).reserve(Bytes(1 << 60));
        assert_eq!(
            refused,
            Err(DeviceError::System {
                call: Call::Reserve,
                code: libc::ENOMEM
            })
        );
    }

    #[test]
    fn an_address_is_memory_of_this_process() {
        let host = host(SMALL);
        let base = host.reserve(SMALL).unwrap();
        let page = host.create().unwrap();
        host.map(base, page).unwrap();
        host.allow(base, SMALL).unwrap();
        let pointer = std::ptr::with_exposed_provenance_mut::<u64>(base.0 as usize);
        // SAFETY: the place is mapped and allowed, aligned to a granule, and nobody else knows it.
        unsafe { pointer.write(0x0123_4567) };
        let mut bytes = [0; 8];
        host.read(base, &mut bytes).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 0x0123_4567);
        host.unmap(base, SMALL).unwrap();
        host.release(page).unwrap();
        host.unreserve(base, SMALL).unwrap();
    }

    /// Not a test of its own: the next one runs it in a child process, which it ends.
    #[test]
    #[ignore = "ends the process; run by a_touch_before_allow_ends_the_process"]
    fn touch_before_allow() {
        let host = host(SMALL);
        let base = host.reserve(SMALL).unwrap();
        host.map(base, host.create().unwrap()).unwrap();
        let pointer = std::ptr::with_exposed_provenance_mut::<u8>(base.0 as usize);
        // SAFETY: the address is this device's and nothing of Rust's lies there; the write is volatile
        // and its fault is what the parent waits for.
        unsafe { pointer.write_volatile(1) };
    }

    #[test]
    fn a_touch_before_allow_ends_the_process() {
        use std::os::unix::process::ExitStatusExt as _;
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "host_alone::touch_before_allow", "--ignored"])
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(libc::SIGSEGV), "{child:?}");
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "0 ranges and 1 pages")]
    fn dropping_it_with_a_living_page_panics_in_debug_builds() {
        host(SMALL).create().unwrap();
    }
}

#[test]
fn a_limit_refuses_the_page_beyond_it_with_numbers_and_takes_a_released_one_back() {
    let limit = Bytes(3 * SMALL.0 + 512);
    let device = Limiting::new(Counting::new(host(SMALL)), limit);
    let pages: Vec<PageId> = (0..3).map(|_| device.create().unwrap()).collect();
    let info = MemoryInfo {
        free: Bytes(512),
        total: limit,
    };
    assert_eq!(device.create(), Err(DeviceError::OutOfMemory { info }));
    assert_eq!(device.memory().unwrap(), info);
    assert_eq!(device.upstream().calls(Call::Create), 3);

    device.release(pages[1]).unwrap();
    assert_invalid(Call::Release, device.release(pages[1]));
    assert_eq!(device.held(), times(SMALL, 2));
    let again = device.create().unwrap();
    assert!(device.create().is_err());
    for page in [pages[0], pages[2], again] {
        device.release(page).unwrap();
    }
    assert!(device.upstream().is_empty());
}

#[test]
fn a_create_that_fails_upstream_does_not_count_against_the_limit() {
    let device = Limiting::new(Failing::new(host(SMALL)), SMALL);
    device
        .upstream()
        .fail_at(0, DeviceError::NotReady, Repeat::Once);
    assert_eq!(device.create(), Err(DeviceError::NotReady));
    let page = device.create().unwrap();
    device.release(page).unwrap();
}

#[test]
fn a_row_counts_and_fails_page_by_page() {
    let device = Counting::new(Failing::new(host(SMALL)));
    let base = device.reserve(times(SMALL, 4)).unwrap();
    let pages: Vec<PageId> = (0..4).map(|_| device.create().unwrap()).collect();
    device
        .upstream()
        .fail_call_at(Call::Map, 2, DeviceError::NotReady, Repeat::Once);
    let refused = device.map_row(base, &pages).unwrap_err();
    assert_eq!((refused.mapped, refused.source), (2, DeviceError::NotReady));
    let books = device.books();
    assert_eq!((books.calls(Call::Map), books.mappings_alive), (3, 2));
    device.map_row(nth(base, SMALL, 2), &pages[2..]).unwrap();
    let books = device.books();
    assert_eq!((books.calls(Call::Map), books.mappings_alive), (5, 4));
    device.unmap(base, times(SMALL, 4)).unwrap();
    pages
        .into_iter()
        .for_each(|page| device.release(page).unwrap());
    device.unreserve(base, times(SMALL, 4)).unwrap();
    assert!(device.is_empty());
}

#[test]
fn a_limit_of_mappings_is_the_one_that_is_named_and_kept() {
    // The mappings of the process are counted, those of other tests too.
    let limited = Limiting::new(host(SMALL), LARGE).mappings_at_most(0);
    let base = limited.reserve(SMALL).unwrap();
    let page = limited.create().unwrap();
    let mappings = limited.mappings().expect("counted");
    assert_eq!(mappings.limit, 0);
    let refused = limited.map(base, page).unwrap_err();
    assert!(
        matches!(
            refused,
            DeviceError::Mappings {
                call: Call::Map,
                ..
            }
        ),
        "{refused}"
    );
    assert!(refused.to_string().contains("vm.max_map_count"));
    assert_eq!(limited.map_row(base, &[page]).unwrap_err().mapped, 0);
    limited.release(page).unwrap();
    limited.unreserve(base, SMALL).unwrap();
}

#[test]
fn books_tell_calls_bytes_and_peaks() {
    let device = Counting::new(host(SMALL));
    assert!(device.is_empty());
    let base = device.reserve(times(SMALL, 4)).unwrap();
    let pages = [device.create().unwrap(), device.create().unwrap()];
    for index in 0..4 {
        device
            .map(nth(base, SMALL, index), pages[index as usize % 2])
            .unwrap();
    }
    device.allow(base, times(SMALL, 4)).unwrap();
    device.unmap(base, times(SMALL, 3)).unwrap();
    device.release(pages[0]).unwrap();
    assert_invalid(Call::Release, device.release(pages[1]));
    let fence = device.fence(StreamId(1)).unwrap();
    device.wait(StreamId(2), fence).unwrap();
    device.synchronise().unwrap();

    let books = device.books();
    assert_eq!(books.reserved, times(SMALL, 4));
    assert_eq!(
        (books.pages_created, books.pages_alive, books.mappings_alive),
        (2, 1, 1)
    );
    assert_eq!((books.held, books.held_peak), (SMALL, times(SMALL, 2)));
    assert_eq!((books.calls(Call::Map), books.calls(Call::Release)), (4, 2));
    assert_eq!(books.memory_calls(), 1 + 2 + 4 + 1 + 1 + 2);
    assert_eq!((books.calls(Call::Fence), books.calls(Call::Wait)), (1, 1));

    device.unmap(nth(base, SMALL, 3), SMALL).unwrap();
    device.release(pages[1]).unwrap();
    assert!(!device.is_empty());
    device.unreserve(base, times(SMALL, 4)).unwrap();
    assert!(device.is_empty());
}

mod failing {
    use super::*;

    /// What a program has to take back when a call fails.
    enum Undo {
        Unreserve(Address),
        Release(PageId),
        Unmap(Address),
    }

    /// Makes 18 memory calls; pushes what each successful one leaves behind.
    fn program(device: &dyn Device, undo: &mut Vec<Undo>) -> Result<(), DeviceError> {
        let base = device.reserve(times(SMALL, 4))?;
        undo.push(Undo::Unreserve(base));
        for index in 0..2 {
            let page = device.create()?;
            undo.push(Undo::Release(page));
            for place in [index, index + 2] {
                device.map(nth(base, SMALL, place), page)?;
                undo.push(Undo::Unmap(nth(base, SMALL, place)));
                device.allow(nth(base, SMALL, place), SMALL)?;
            }
            device.fill(nth(base, SMALL, index), SMALL, 1)?;
        }
        while let Some(last) = undo.pop() {
            take_back(device, &last).inspect_err(|_| undo.push(last))?;
        }
        Ok(())
    }

    fn take_back(device: &dyn Device, undo: &Undo) -> Result<(), DeviceError> {
        match *undo {
            Undo::Unreserve(base) => device.unreserve(base, times(SMALL, 4)),
            Undo::Release(page) => device.release(page),
            Undo::Unmap(at) => device.unmap(at, SMALL),
        }
    }

    #[test]
    fn every_call_of_a_program_can_fail_and_the_books_end_empty() {
        let error = DeviceError::Driver {
            call: Call::Map,
            code: 2,
        };
        for repeat in [Repeat::Once, Repeat::Always] {
            let mut failed_count = 0;
            for n in 0.. {
                let device = Failing::new(Counting::new(host(SMALL)));
                device.fail_at(n, error.clone(), repeat);
                let mut undo = Vec::new();
                let ended = program(&device, &mut undo);
                if device.failures() == 0 {
                    assert_eq!(ended, Ok(()));
                    break;
                }
                failed_count += 1;
                assert_eq!(ended, Err(error.clone()));
                assert_eq!((device.seen(), device.failures()), (n + 1, 1));
                // The failed call did not reach upstream.
                assert_eq!(device.upstream().memory_calls(), n);
                device.disarm();
                for last in undo.iter().rev() {
                    take_back(&device, last).unwrap();
                }
                assert!(
                    device.upstream().is_empty(),
                    "n = {n}: {:?}",
                    device.upstream().books()
                );
            }
            assert_eq!(failed_count, 18);
        }
    }

    #[test]
    fn a_failure_happens_once_or_goes_on_until_disarmed() {
        let device = Failing::new(host(SMALL));
        let outcomes = |count| -> Vec<bool> {
            (0..count)
                .map(|_| {
                    device
                        .create()
                        .map(|page| device.upstream().release(page))
                        .is_ok()
                })
                .collect()
        };
        device.fail_at(1, DeviceError::NotReady, Repeat::Once);
        assert_eq!(outcomes(4), [true, false, true, true]);
        device.fail_at(2, DeviceError::NotReady, Repeat::Always);
        assert_eq!(outcomes(4), [true, true, false, false]);
        assert_eq!(device.failures(), 2);
        device.disarm();
        assert_eq!(outcomes(2), [true, true]);
    }

    #[test]
    fn a_named_call_alone_counts_and_fails_also_when_it_is_no_memory_call() {
        let device = Failing::new(host(SMALL));
        device.fail_call_at(Call::Release, 0, DeviceError::NotReady, Repeat::Once);
        let page = device.create().unwrap();
        assert_eq!(device.seen(), 0);
        assert_eq!(device.release(page), Err(DeviceError::NotReady));
        device.release(page).unwrap();

        device.fail_call_at(Call::Synchronise, 1, DeviceError::NotReady, Repeat::Once);
        device.synchronise().unwrap();
        assert_eq!(device.synchronise(), Err(DeviceError::NotReady));
        device.synchronise().unwrap();
    }
}

mod streams_alone {
    use super::*;

    const ONE: StreamId = StreamId(1);
    const TWO: StreamId = StreamId(2);

    /// Runs `test` with a place of one allowed page.
    fn with_memory(test: impl FnOnce(&Streams<Host>, Address)) {
        let device = Streams::new(host(SMALL));
        let base = device.reserve(SMALL).unwrap();
        let page = device.create().unwrap();
        device.map(base, page).unwrap();
        device.allow(base, SMALL).unwrap();
        device.write(base, b"old").unwrap();
        test(&device, base);
        device.unmap(base, SMALL).unwrap();
        device.release(page).unwrap();
        device.unreserve(base, SMALL).unwrap();
    }

    /// Seeds out of 64 whose order lets a read on one stream see what another stream wrote later.
    fn overwritten_early(fenced: bool) -> usize {
        let mut count = 0;
        for seed in 0..64 {
            with_memory(|device, at| {
                let read = device.enqueue_read(ONE, at, Bytes(3));
                if fenced {
                    let fence = device.fence(ONE).unwrap();
                    device.wait(TWO, fence).unwrap();
                }
                device.enqueue_write(TWO, at, b"new");
                device.run_all(seed);
                assert_eq!(device.pending(), 0);
                count += usize::from(device.saw(read).unwrap().unwrap() == b"new");
            });
        }
        count
    }

    #[test]
    fn a_write_without_a_fence_overtakes_a_read_of_another_stream() {
        assert!((8..56).contains(&overwritten_early(false)));
    }

    #[test]
    fn a_write_behind_a_fence_never_overtakes() {
        assert_eq!(overwritten_early(true), 0);
    }

    #[test]
    fn a_fence_passes_on_what_its_stream_waits_for() {
        for seed in 0..64 {
            with_memory(|device, at| {
                let read = device.enqueue_read(ONE, at, Bytes(3));
                let first = device.fence(ONE).unwrap();
                device.wait(TWO, first).unwrap();
                let second = device.fence(TWO).unwrap();
                device.wait(StreamId(3), second).unwrap();
                device.enqueue_write(StreamId(3), at, b"new");
                device.run_all(seed);
                assert_eq!(device.saw(read), Some(Ok(b"old".to_vec())));
            });
        }
    }

    #[test]
    fn a_fence_holds_nothing_that_was_enqueued_after_it() {
        with_memory(|device, at| {
            let fence = device.fence(ONE).unwrap();
            let read = device.enqueue_read(ONE, at, Bytes(3));
            device.wait(TWO, fence).unwrap();
            let write = device.enqueue_write(TWO, at, b"new");
            assert!(device.run_next(TWO) && device.run_next(TWO) && !device.run_next(TWO));
            assert_eq!(device.saw(write), Some(Ok(Vec::new())));
            assert_eq!(device.saw(read), None);
            device.synchronise().unwrap();
            assert_eq!(device.saw(read), Some(Ok(b"new".to_vec())));
        });
    }

    #[test]
    fn a_stream_runs_in_its_order_and_the_same_seed_in_the_same_one() {
        let order = |seed| {
            let mut seen = Vec::new();
            with_memory(|device, at| {
                for byte in 0..20 {
                    device.enqueue_write(ONE, at, &[byte]);
                }
                let reads: Vec<_> = (0..20)
                    .map(|_| device.enqueue_read(TWO, at, Bytes(1)))
                    .collect();
                device.run_all(seed);
                seen = reads
                    .iter()
                    .map(|&read| device.saw(read).unwrap().unwrap()[0])
                    .collect();
            });
            seen
        };
        let runs: Vec<Vec<u8>> = (0..16).map(order).collect();
        assert!(
            runs.iter()
                .all(|seen| seen.iter().filter(|&&b| b != b'o').is_sorted())
        );
        assert_eq!(runs, (0..16).map(order).collect::<Vec<_>>());
        assert!(runs.iter().any(|seen| seen != &runs[0]));
    }

    #[test]
    fn work_that_runs_after_its_memory_is_gone_has_failed() {
        let device = Streams::new(host(SMALL));
        let base = device.reserve(SMALL).unwrap();
        let work = device.enqueue_write(ONE, base, b"late");
        device.synchronise().unwrap();
        assert_invalid(Call::Write, device.saw(work).unwrap());
        device.unreserve(base, SMALL).unwrap();
    }
}
