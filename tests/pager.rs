//! Weights that give way: named tests of what the pager promises.

mod reference;

use std::sync::{Arc, Mutex};

use memory_compiler::device::adaptor::Repeat;
use memory_compiler::device::{Call, Device, DeviceError};
use memory_compiler::pager::{PageOut, Pager, Pin, Pinned, Stamp, WeightRange};
use memory_compiler::{Allocation, Bytes, Compiler, Error, Options};

use reference::devices::{CountingHost, counting_host, limited_host};

const PAGE: u64 = 4096;

fn pages(count: u64) -> Bytes {
    Bytes(count * PAGE)
}

/// A device and a pager on it with a budget of some pages.
fn pager(budget: u64) -> (CountingHost, Pager) {
    let device = counting_host(pages(1));
    let pager = Pager::new(device.clone(), Some(pages(budget))).unwrap();
    (device, pager)
}

fn compiler(pager: &Pager) -> Compiler {
    let options = Options {
        address_space: Bytes::mib(1),
        ..Options::default()
    };
    Compiler::with_pager(pager, options).unwrap()
}

fn pin(range: &WeightRange, page: u64, count: u64) -> Option<Pinned> {
    match range.pin(pages(page), pages(count), Stamp::NEVER).unwrap() {
        Pin::Resident(pinned) => Some(pinned),
        Pin::Stream => None,
    }
}

/// A turn of a model: each page pinned for a moment. Which of them were in memory, or could come.
fn turn(range: &WeightRange, count: u64) -> Vec<bool> {
    (0..count)
        .map(|page| pin(range, page, 1).is_some())
        .collect()
}

/// A step of one buffer.
fn step(compiler: &mut Compiler, count: u64) -> Result<u64, Error> {
    let step = compiler.begin("step")?;
    let Allocation::Here(address) = step.alloc(pages(count))? else {
        unreachable!("the step serves its stream")
    };
    step.free(address)?;
    Ok(step.finish()?.device_calls)
}

fn resident(range: &WeightRange) -> u64 {
    let residency = range.residency(Bytes::ZERO, range.size()).unwrap();
    assert_eq!(
        residency.resident.0 + residency.evicted.0,
        range.size().0,
        "a page is in memory or not"
    );
    residency.resident.0 / PAGE
}

#[test]
fn a_range_reserves_addresses_and_no_memory() {
    let (device, pager) = pager(4);
    let range = pager.range(pages(100)).unwrap();
    assert_eq!(range.size(), pages(100));
    assert_eq!(device.books().held, Bytes::ZERO);
    drop(pager);
    assert!(pin(&range, 99, 1).is_some());
    drop(range);
    assert!(device.is_empty());
}

#[test]
fn a_stamp_stays_while_the_bytes_do_and_never_comes_back() {
    let (_device, pager) = pager(4);
    let mut seen = Vec::new();
    for _ in 0..3 {
        let range = pager.range(pages(2)).unwrap();
        let first = pin(&range, 0, 2).unwrap().stamp();
        assert_eq!(pin(&range, 0, 2).unwrap().stamp(), first);
        range.evict().unwrap();
        let second = pin(&range, 0, 2).unwrap().stamp();
        assert!(second > first);
        seen.extend([first, second]);
    }
    let mut unique = seen.clone();
    unique.dedup();
    assert_eq!(seen, unique);
}

#[test]
fn only_what_came_in_since_the_stamp_is_stale() {
    let (_device, pager) = pager(4);
    let range = pager.range(pages(4)).unwrap();
    let half = Bytes(PAGE / 2);
    let whole = |since| match range.pin(half, pages(3), since).unwrap() {
        Pin::Resident(pinned) => (pinned.stamp(), pinned.stale().to_vec()),
        Pin::Stream => panic!("four pages fit"),
    };
    let (stamp, stale) = whole(Stamp::NEVER);
    assert_eq!(stale.len(), 1);
    assert_eq!((stale[0].offset, stale[0].size), (half, pages(3)));
    assert_eq!(whole(stamp), (stamp, vec![]));
    // Another range takes one page: the highest goes.
    let other = pager.range(pages(1)).unwrap();
    drop(pin(&other, 0, 1));
    drop(other);
    let (later, stale) = whole(stamp);
    assert!(later > stamp);
    assert_eq!(stale.len(), 1);
    assert_eq!((stale[0].offset, stale[0].size), (pages(3), half));
}

#[test]
fn a_model_slightly_too_large_keeps_its_low_part_and_calls_nothing_for_the_rest() {
    let (device, pager) = pager(8);
    let range = pager.range(pages(10)).unwrap();
    let expected: Vec<bool> = (0..10).map(|page| page < 8).collect();
    assert_eq!(turn(&range, 10), expected);
    let calls = device.memory_calls();
    for _ in 0..3 {
        assert_eq!(turn(&range, 10), expected);
    }
    assert_eq!(device.memory_calls(), calls);
    // From the other end the result is the same: low addresses take from high ones.
    range.evict().unwrap();
    (0..10).rev().for_each(|page| drop(pin(&range, page, 1)));
    assert_eq!(turn(&range, 10), expected);
    assert!(device.books().held_peak <= pages(8));
}

#[test]
fn a_pin_that_does_not_fit_takes_nothing_from_others() {
    let (device, pager) = pager(6);
    let old = pager.range(pages(4)).unwrap();
    let new = pager.range(pages(8)).unwrap();
    let kept = pin(&old, 0, 2);
    drop(pin(&old, 2, 2));
    let calls = device.memory_calls();
    assert!(pin(&new, 0, 5).is_none());
    assert!(pin(&new, 0, 8).is_none());
    assert_eq!((resident(&old), device.memory_calls()), (4, calls));
    assert!(pin(&new, 0, 4).is_some());
    assert_eq!(resident(&old), 2);
    drop(kept);
}

#[test]
fn the_range_of_higher_priority_takes_and_the_other_one_streams() {
    let (_device, pager) = pager(4);
    let old = pager.range(pages(4)).unwrap();
    let new = pager.range(pages(4)).unwrap();
    turn(&old, 4);
    turn(&new, 3);
    assert_eq!((resident(&old), resident(&new)), (1, 3));
    assert_eq!(turn(&old, 4), [true, false, false, false]);
    old.prioritise();
    assert_eq!(turn(&old, 4), [true; 4]);
    assert_eq!((resident(&old), resident(&new)), (4, 0));
    drop(old);
    assert_eq!(turn(&new, 4), [true; 4]);
}

#[test]
fn a_second_model_takes_only_the_shortfall() {
    let (device, pager) = pager(10);
    let model = pager.range(pages(8)).unwrap();
    turn(&model, 8);
    let decoder = pager.range(pages(4)).unwrap();
    turn(&decoder, 4);
    assert_eq!(resident(&model), 6);
    let calls = device.memory_calls();
    assert!(pin(&model, 0, 6).is_some());
    assert_eq!(device.memory_calls(), calls);
}

#[test]
fn evicting_a_batch_waits_for_the_device_once() {
    let (device, pager) = pager(16);
    let old = pager.range(pages(16)).unwrap();
    turn(&old, 16);
    let new = pager.range(pages(12)).unwrap();
    let waits = device.calls(Call::Synchronise);
    assert!(pin(&new, 0, 12).is_some());
    assert_eq!(device.calls(Call::Synchronise), waits + 1);
    assert_eq!((pager.stats().evictions, pager.stats().evicting), (12, 1));
}

#[test]
fn recording_evicts_page_by_page_and_replaying_calls_nothing() {
    let (device, pager) = pager(10);
    let range = pager.range(pages(8)).unwrap();
    turn(&range, 8);
    let mut compiler = compiler(&pager);
    step(&mut compiler, 5).unwrap();
    assert_eq!(resident(&range), 5);
    let calls = device.memory_calls();
    for _ in 0..3 {
        assert_eq!(step(&mut compiler, 5).unwrap(), 0);
        turn(&range, 8);
    }
    assert_eq!(device.memory_calls(), calls);
    assert_eq!((resident(&range), pager.stats().used), (5, pages(10)));
    assert!(device.books().held_peak <= pages(10));
}

#[test]
fn what_a_trim_or_the_end_of_a_compiler_gives_back_weights_may_have_again() {
    let (device, pager) = pager(10);
    let range = pager.range(pages(10)).unwrap();
    turn(&range, 10);
    let mut compiler = compiler(&pager);
    step(&mut compiler, 4).unwrap();
    turn(&range, 10);
    assert_eq!(resident(&range), 6);
    assert_eq!(compiler.trim().unwrap(), pages(4));
    assert_eq!(turn(&range, 10), [true; 10]);
    assert!(step(&mut compiler, 4).unwrap() > 0);
    assert_eq!(resident(&range), 6);
    drop(compiler);
    assert_eq!(turn(&range, 10), [true; 10]);
    drop(range);
    assert!(device.is_empty());
}

#[test]
fn a_step_takes_no_pinned_page_and_says_what_is_free() {
    let (device, pager) = pager(6);
    let range = pager.range(pages(6)).unwrap();
    let pinned = pin(&range, 0, 4).unwrap();
    turn(&range, 5);
    let mut compiler = compiler(&pager);
    match step(&mut compiler, 3) {
        Err(Error::OverBudget(short)) => {
            assert_eq!((short.free, short.limit), (pages(2), pages(6)));
            assert_eq!(short.weights, pages(4));
        }
        other => panic!("three pages do not fit beside four: {other:?}"),
    }
    assert_eq!(resident(&range), 4);
    step(&mut compiler, 2).unwrap();
    drop(pinned);
    step(&mut compiler, 3).unwrap();
    assert!(device.books().held_peak <= pages(6));
}

#[test]
fn a_device_without_memory_is_relieved_like_a_budget() {
    let device = limited_host(pages(1), pages(6));
    let pager = Pager::new(device.clone(), None).unwrap();
    let old = pager.range(pages(6)).unwrap();
    turn(&old, 6);
    let new = pager.range(pages(8)).unwrap();
    assert!(pin(&new, 0, 7).is_none());
    assert!(pin(&new, 0, 2).is_some());
    assert_eq!((resident(&old), resident(&new)), (4, 2));
    let mut compiler = compiler(&pager);
    step(&mut compiler, 3).unwrap();
    assert_eq!((resident(&old), resident(&new)), (1, 2));
}

#[test]
fn writable_weights_are_saved_before_they_leave() {
    let (device, pager) = pager(4);
    let saved = Arc::new(Mutex::new(Vec::new()));
    let save = {
        let (device, saved) = (device.clone(), Arc::clone(&saved));
        PageOut::new(move |leaving| {
            let mut bytes = vec![0; leaving.size.0 as usize];
            let read = device.read(leaving.address, &mut bytes);
            // The second page cannot be saved, say.
            let may_leave = read.is_ok() && leaving.offset != pages(1);
            if may_leave {
                saved.lock().unwrap().push((leaving.offset, bytes[0]));
            }
            may_leave
        })
    };
    let range = pager.writable_range(pages(3), save).unwrap();
    for page in 0..3 {
        let pinned = pin(&range, page, 1).unwrap();
        let part = pinned.stale()[0];
        device
            .fill(part.address, part.size, page as u8 + 1)
            .unwrap();
    }
    let new = pager.range(pages(4)).unwrap();
    assert!(pin(&new, 0, 3).is_some());
    assert!(pin(&new, 0, 4).is_none());
    assert_eq!(*saved.lock().unwrap(), [(pages(2), 3), (Bytes::ZERO, 1)]);
    let mut seen = [0];
    let at = range.base().checked_add(pages(1)).unwrap();
    let _pinned = pin(&range, 1, 1).unwrap();
    device.read(at, &mut seen).unwrap();
    assert_eq!(seen, [2]);
}

#[test]
fn pages_that_may_not_leave_cost_few_waits_for_the_device() {
    const PAGES: u64 = 1000;
    for refuses_unmap in [false, true] {
        let (device, pager) = pager(PAGES + 4);
        let may_leave = PageOut::new(move |_| refuses_unmap);
        let range = pager.writable_range(pages(PAGES), may_leave).unwrap();
        drop(pin(&range, 0, PAGES));
        if refuses_unmap {
            let (call, code) = (Call::Unmap, 1);
            let error = DeviceError::Driver { call, code };
            let device = device.upstream();
            device.fail_call_at(call, 0, error, Repeat::Always);
        }
        let waits = || device.calls(Call::Synchronise);
        let before = waits();
        let mut compiler = compiler(&pager);
        let refused = step(&mut compiler, 5);
        assert!(matches!(refused, Err(Error::OverBudget { .. })));
        let (steps, before) = (waits() - before, waits());
        let other = pager.range(pages(5)).unwrap();
        assert!(pin(&other, 0, 5).is_none());
        let pins = waits() - before;
        // 1 + 2 + 4 + … + 512 pages are all of them.
        assert!(steps <= 10 && pins <= 10, "{steps} waits, then {pins}");
        assert_eq!(resident(&range), PAGES);
        device.upstream().disarm();
    }
}

#[test]
fn pages_leave_in_order_and_no_more_than_needed_where_others_may_not() {
    for is_step in [false, true] {
        let (_device, pager) = pager(100);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&asked);
        let may_leave = PageOut::new(move |leaving| {
            let page = leaving.offset.0 / PAGE;
            told.lock().unwrap().push(page);
            page < 80 && page.is_multiple_of(4)
        });
        let range = pager.writable_range(pages(100), may_leave).unwrap();
        drop(pin(&range, 0, 100));
        let other = pager.range(pages(3)).unwrap();
        if is_step {
            step(&mut compiler(&pager), 3).unwrap();
        } else {
            assert!(pin(&other, 0, 3).is_some());
        }
        // 76, 72 and 68 left.
        let expected: Vec<u64> = (68..100).rev().collect();
        assert_eq!(*asked.lock().unwrap(), expected);
        assert_eq!(resident(&range), 97);
    }
}

#[test]
fn what_goes_beyond_the_limit_of_weights_leaves_with_its_last_pin_and_the_rest_stays() {
    let device = counting_host(pages(1));
    let pager = Pager::with_limit(device.clone(), Some(pages(7)), Some(pages(4))).unwrap();
    let range = pager.range(pages(9)).unwrap();
    let beyond = |page, count, since| range.pin_beyond(pages(page), pages(count), since).unwrap();
    let first = beyond(0, 6, Stamp::NEVER);
    assert_eq!(
        (device.books().held, pager.stats().used),
        (pages(6), pages(6))
    );
    let second = beyond(5, 1, Stamp::NEVER);
    let stamp = first.stamp();
    drop(first);
    assert_eq!(device.books().held, pages(5));
    drop(second);
    assert_eq!((resident(&range), device.books().held), (4, pages(4)));
    assert_eq!(pager.stats().beyond_peak, pages(2));
    let again = beyond(0, 6, stamp);
    assert_eq!(again.stale().len(), 1);
    assert_eq!(again.stale()[0].offset, pages(4));
    drop(again);
    let refused = range.pin_beyond(Bytes::ZERO, pages(9), Stamp::NEVER);
    assert!(
        matches!(refused, Err(Error::WeightBudget(short)) if short.needed == pages(9)),
        "the budget is never exceeded"
    );
    drop(range);
    assert!(device.is_empty());
    assert!(device.books().held_peak <= pages(7));
}

/// What must be in memory together, and what it can have.
fn told<T: std::fmt::Debug>(refused: Result<T, Error>) -> (Bytes, Bytes) {
    match refused {
        Err(Error::WeightBudget(short)) => (short.needed, short.limit),
        other => panic!("it does not fit: {other:?}"),
    }
}

#[test]
fn what_has_to_be_in_at_once_takes_any_page_that_is_not_pinned() {
    // Without a limit of weights, and with one.
    for limit in [None, Some(pages(2))] {
        let device = counting_host(pages(1));
        let pager = Pager::with_limit(device.clone(), Some(pages(4)), limit).unwrap();
        let range = pager.range(pages(8)).unwrap();
        let later = pager.range(pages(2)).unwrap();
        assert!(pin(&range, 0, 1).is_some());
        assert!(pin(&later, 0, 1).is_some());
        assert_eq!((resident(&range), resident(&later)), (1, 1));
        // A plain pin takes no lower page, nor one of a range of higher priority.
        assert!(pin(&range, 4, 4).is_none());
        assert_eq!((resident(&range), resident(&later)), (1, 1));
        let all = range.pin_beyond(pages(4), pages(4), Stamp::NEVER).unwrap();
        assert_eq!(all.stale().len(), 1);
        assert_eq!((resident(&range), resident(&later)), (4, 0));
        // Nothing is left that is not pinned, and what is told is the sum.
        let refused = range.pin_beyond(pages(2), pages(3), Stamp::NEVER);
        assert_eq!(told(refused), (pages(6), pages(4)));
        let refused = later.pin_beyond(pages(1), pages(1), Stamp::NEVER);
        assert_eq!(told(refused), (pages(5), pages(4)));
        assert_eq!((resident(&range), resident(&later)), (4, 0));
        drop(all);
        assert!(pager.stats().used <= pager.stats().weights_limit);
        // Whoever lost pages that were its own by right has them again.
        assert!(pin(&later, 0, 1).is_some());
        assert!(pin(&range, 0, 1).is_some());
        assert_eq!(resident(&later), 1);
        drop((range, later));
        assert!(device.is_empty());
        assert!(device.books().held_peak <= pages(4));
    }
}

#[test]
fn of_what_went_beyond_the_limit_stays_what_fits_without_the_pages_that_left_for_it() {
    let device = counting_host(pages(1));
    let pager = Pager::with_limit(device.clone(), Some(pages(6)), Some(pages(4))).unwrap();
    let range = pager.range(pages(9)).unwrap();
    assert!(pin(&range, 0, 4).is_some());
    let pinned = range.pin_beyond(pages(4), pages(5), Stamp::NEVER).unwrap();
    // Two went beyond, and three took the place of others.
    assert_eq!((resident(&range), pager.stats().used), (6, pages(6)));
    drop(pinned);
    assert_eq!((resident(&range), pager.stats().used), (4, pages(4)));
    assert_eq!(pager.stats().beyond_peak, pages(2));
    assert!(pin(&range, 0, 4).is_some(), "low addresses are first again");
    assert!(device.books().held_peak <= pages(6));
}

#[test]
fn bytes_outside_the_range_are_an_error() {
    let (_device, pager) = pager(2);
    assert!(matches!(
        pager.range(Bytes::ZERO),
        Err(Error::Option { option: "size", .. })
    ));
    let range = pager.range(Bytes(1)).unwrap();
    for (offset, size) in [(pages(1), Bytes(1)), (Bytes(u64::MAX), Bytes(2))] {
        let refused = range.pin(offset, size, Stamp::NEVER);
        assert!(matches!(
            refused,
            Err(Error::Option {
                option: "offset",
                ..
            })
        ));
    }
    assert!(matches!(
        Pager::new(counting_host(pages(1)), Some(Bytes(1))),
        Err(Error::Option {
            option: "budget",
            ..
        })
    ));
    let options = Options {
        budget: Some(pages(4)),
        ..Options::default()
    };
    let refused = Compiler::with_pager(&pager, options);
    assert!(matches!(
        refused,
        Err(Error::Option {
            option: "budget",
            ..
        })
    ));
}

/// Runs a program with each of its device calls failing, once and for good, after it has said from when on; until
/// there are no more than `least`. It returns how many calls failed, and leaves nothing.
fn each_failed_call(least: u64, program: impl Fn(&CountingHost, &dyn Fn()) -> u64) {
    for repeat in [Repeat::Once, Repeat::Always] {
        for n in 0.. {
            let device = counting_host(pages(1));
            let code = DeviceError::Driver {
                call: Call::Map,
                code: 1,
            };
            let failures = program(&device, &|| {
                device.upstream().fail_at(n, code.clone(), repeat)
            });
            if failures == 0 {
                assert!(n > least, "evictions and arrivals are more than {n} calls");
                break;
            }
        }
    }
}

#[test]
fn each_failed_call_of_a_pin_leaves_the_pager_as_good_as_new() {
    // Three evictions and three arrivals.
    each_failed_call(9, |device, fail| {
        let pager = Pager::new(device.clone(), Some(pages(4))).unwrap();
        let old = pager.range(pages(4)).unwrap();
        let kept = pin(&old, 0, 1).unwrap();
        turn(&old, 4);
        let new = pager.range(pages(3)).unwrap();
        fail();
        let refused = new.pin(Bytes::ZERO, pages(3), Stamp::NEVER);
        let failures = device.upstream().failures();
        assert!(failures > 0 || matches!(refused, Ok(Pin::Resident(_))));
        drop(refused);
        device.upstream().disarm();
        assert!(pin(&new, 0, 3).is_some());
        assert!(device.books().held_peak <= pages(4));
        drop((kept, old, new));
        assert!(device.is_empty(), "{:?}", device.books());
        failures
    });
}

#[test]
fn each_failed_call_of_a_pin_past_the_limit_leaves_the_pager_as_good_as_new() {
    // Two evictions and three arrivals.
    each_failed_call(9, |device, fail| {
        let pager = Pager::with_limit(device.clone(), Some(pages(4)), Some(pages(3))).unwrap();
        let range = pager.range(pages(8)).unwrap();
        let kept = pin(&range, 0, 1).unwrap();
        turn(&range, 3);
        fail();
        let refused = range.pin_beyond(pages(4), pages(3), Stamp::NEVER);
        let failures = device.upstream().failures();
        assert!(failures > 0 || refused.is_ok());
        drop(refused);
        device.upstream().disarm();
        assert!(range.pin_beyond(pages(4), pages(3), Stamp::NEVER).is_ok());
        assert_eq!(
            range.residency(Bytes::ZERO, pages(1)).unwrap().pinned,
            pages(1)
        );
        assert!(pager.stats().used <= pages(3), "{:?}", pager.stats());
        assert!(device.books().held_peak <= pages(4));
        drop((kept, range));
        assert!(device.is_empty(), "{:?}", device.books());
        failures
    });
}

#[test]
fn threads_that_pin_and_step_at_once_stay_within_the_budget() {
    let (device, pager) = pager(12);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (device, pager) = (&device, &pager);
            scope.spawn(move || {
                let range = pager.range(pages(8)).unwrap();
                for round in 0..200u64 {
                    if let Some(pinned) = pin(&range, round * 5 % 7, 2) {
                        let at = pinned.stale()[0].address;
                        let value = [thread as u8 ^ round as u8; 64];
                        device.write(at, &value).unwrap();
                        let mut seen = [0; 64];
                        device.read(at, &mut seen).unwrap();
                        assert_eq!(seen, value);
                    }
                    if round % 16 == 0 {
                        range.prioritise();
                    }
                }
            });
        }
        let pager = &pager;
        scope.spawn(move || {
            let mut compiler = compiler(pager);
            for round in 0..200 {
                // Whatever is pinned at the moment may leave too little.
                match step(&mut compiler, 1 + round % 4) {
                    Ok(_) | Err(Error::OverBudget { .. } | Error::OutOfMemory { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
                if round % 8 == 0 {
                    compiler.trim().unwrap();
                }
            }
        });
    });
    assert!(device.books().held_peak <= pages(12));
    assert!(device.is_empty());
    assert_eq!(pager.stats().used, Bytes::ZERO);
}
