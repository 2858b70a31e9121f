//! Every device call fails once, or from then on; budgets and devices are too small. What must hold
//! each time: a typed error with true numbers, nothing leaked, nothing half done, outstanding buffers
//! intact, and the next step works. The reference model runs alongside: a failed allocation is to it
//! one that was never asked for.

mod reference;

use memory_compiler::device::adaptor::Repeat;
use memory_compiler::device::{Call, DeviceError, MemoryInfo};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options, Remedy, Shortage};

use reference::devices::{CountingHost, counting_host, limited_host};
use reference::pair::Pair;

const PAGE: u64 = 4096;
const GRANULE: Bytes = Bytes(PAGE);

fn small_options() -> Options {
    Options {
        address_space: Bytes::mib(64),
        ..Options::default()
    }
}

/// Sizes of two shapes, a survivor position among them, whole pages and parts of pages.
const SHAPES: [&[u64]; 2] = [
    &[3 * PAGE, 512, PAGE / 2, 2 * PAGE + 512, 4 * PAGE, 512],
    &[5 * PAGE, 1024, PAGE / 2, 2 * PAGE + 512, 6 * PAGE, 512],
];

/// Steps of two shapes that keep a buffer each, with a trim between them. Returns what failed.
fn program(pair: &mut Pair) -> Vec<Error> {
    let mut errors = Vec::new();
    let mut kept: Vec<u64> = Vec::new();
    for (number, shape) in [0, 0, 1, 0, 1, 1].into_iter().enumerate() {
        if number == 3 || number == 5 {
            errors.extend(pair.try_trim().err());
        }
        let mut run = match pair.try_begin("step") {
            Ok(run) => run,
            Err(error) => {
                errors.push(error);
                continue;
            }
        };
        let mut live = Vec::new();
        for (nth, &size) in SHAPES[shape].iter().enumerate() {
            match run.try_alloc(size) {
                Ok((_, address)) => live.extend(address),
                Err(error) => errors.push(error),
            }
            if nth >= 2 && !live.is_empty() {
                run.free(live.remove(0), true);
            }
        }
        let keep = live.pop();
        live.into_iter().for_each(|address| run.free(address, true));
        kept.drain(..kept.len().saturating_sub(1))
            .for_each(|address| run.free(address, true));
        kept.extend(keep);
        run.finish();
    }
    errors
}

fn out_of_memory() -> DeviceError {
    DeviceError::OutOfMemory {
        info: MemoryInfo {
            free: Bytes(0),
            total: Bytes::mib(1),
        },
    }
}

fn arm(device: &CountingHost, call: Option<Call>, n: u64, error: &DeviceError, repeat: Repeat) {
    let failing = device.upstream();
    match call {
        Some(call) => failing.fail_call_at(call, n, error.clone(), repeat),
        None => failing.fail_at(n, error.clone(), repeat),
    }
}

/// Fails each call of the program in turn; returns how many there were.
fn fail_each(call: Option<Call>, error: &DeviceError, repeat: Repeat) -> u64 {
    for n in 0.. {
        let device = counting_host(GRANULE);
        arm(&device, call, n, error, repeat);
        let mut pair = match Pair::try_over(device.clone(), device.clone(), small_options()) {
            Ok(pair) => pair,
            Err(refused) => {
                assert!(
                    matches!(refused, Error::Device { .. } | Error::Reservation { .. }),
                    "{refused}"
                );
                assert!(
                    device.is_empty(),
                    "a compiler that was not made holds {:?}",
                    device.books()
                );
                continue;
            }
        };
        let errors = program(&mut pair);
        let failures = device.upstream().failures();
        for error in &errors {
            match error {
                Error::Device { call: failed, .. } => {
                    assert!(
                        call.is_none_or(|call| call == *failed),
                        "{call:?} failed, and {failed:?} was blamed"
                    );
                }
                Error::OutOfMemory { .. } => {}
                other => panic!("not an error of the device: {other}"),
            }
        }
        assert!(
            failures > 0 || errors.is_empty(),
            "nothing failed, yet {errors:?}"
        );

        device.upstream().disarm();
        assert_eq!(
            program(&mut pair),
            [],
            "the next steps work, after call {n} of {call:?} failed"
        );
        pair.end();
        if failures == 0 {
            println!("{n} calls failed in turn: {call:?} {repeat:?} {error}");
            return n;
        }
    }
    unreachable!("the program ends")
}

#[test]
fn any_memory_call_may_fail_once() {
    let driver = DeviceError::Driver {
        call: Call::Map,
        code: 999,
    };
    let calls = fail_each(None, &driver, Repeat::Once);
    assert!(calls > 50, "{calls} calls are few");
    assert_eq!(fail_each(None, &out_of_memory(), Repeat::Once), calls);
    assert_eq!(fail_each(None, &DeviceError::NotReady, Repeat::Once), calls);
}

#[test]
fn all_memory_calls_may_fail_from_any_one_on() {
    let driver = DeviceError::Driver {
        call: Call::Map,
        code: 999,
    };
    let calls = fail_each(None, &driver, Repeat::Always);
    assert!(calls > 50, "{calls} calls are few");
    assert_eq!(fail_each(None, &out_of_memory(), Repeat::Always), calls);
}

#[test]
fn each_kind_of_call_may_fail_alone() {
    for call in Call::MEMORY {
        for repeat in [Repeat::Once, Repeat::Always] {
            let driver = DeviceError::Driver { call, code: 999 };
            let calls = fail_each(Some(call), &driver, repeat);
            let needed = matches!(call, Call::Reserve | Call::Create | Call::Map | Call::Allow);
            assert!(calls > 0 || !needed, "the program makes no {call:?}");
        }
    }
    for repeat in [Repeat::Once, Repeat::Always] {
        fail_each(Some(Call::Create), &out_of_memory(), repeat);
    }
}

/// What is not a memory call may fail too: a fence, a wait, a question for free memory.
#[test]
fn other_calls_may_fail() {
    for call in [Call::Synchronise, Call::Fence, Call::Wait, Call::Memory] {
        fail_each(Some(call), &DeviceError::NotReady, Repeat::Always);
    }
}

/// Going away, a compiler can tell nobody that a call failed once, and leaves nothing behind.
#[test]
fn a_call_that_fails_once_while_the_compiler_goes_leaks_nothing() {
    let driver = DeviceError::Driver {
        call: Call::Unmap,
        code: 999,
    };
    for (n, error) in (0..).flat_map(|n| [(n, &DeviceError::NotReady), (n, &driver)]) {
        let device = counting_host(GRANULE);
        let mut pair = Pair::over(device.clone(), device.clone(), small_options());
        assert_eq!(program(&mut pair), []);
        let survivors = pair.book.addresses();
        assert!(!survivors.is_empty());
        arm(&device, None, n, error, Repeat::Once);
        pair.drop_compiler();
        survivors.into_iter().for_each(|address| pair.free(address));
        let failures = device.upstream().failures();
        assert!(
            device.is_empty(),
            "call {n} failed once and left {:?}",
            device.books()
        );
        if failures == 0 {
            assert!(n > 0, "there is something to give back");
            break;
        }
    }
}

/// What is "not ready" and goes away when it is asked again is seen by nobody.
#[test]
fn a_driver_that_is_not_ready_once_is_never_noticed() {
    for n in 0.. {
        let device = counting_host(GRANULE);
        arm(&device, None, n, &DeviceError::NotReady, Repeat::Once);
        let mut pair = Pair::over(device.clone(), device.clone(), small_options());
        assert_eq!(program(&mut pair), [], "call {n} was not ready once");
        pair.end();
        if device.upstream().failures() == 0 {
            assert!(n > 50, "{n} calls are few");
            break;
        }
    }
    for call in Call::MEMORY.into_iter().chain([Call::Synchronise]) {
        for n in 0..8 {
            let device = counting_host(GRANULE);
            arm(&device, Some(call), n, &DeviceError::NotReady, Repeat::Once);
            let mut pair = Pair::over(device.clone(), device.clone(), small_options());
            assert_eq!(program(&mut pair), [], "{call:?} {n} was not ready once");
            pair.end();
        }
    }
}

/// A budget that just holds the program, so that idle memory has to go on the way; and each call fails.
#[test]
fn any_memory_call_may_fail_where_the_budget_is_tight() {
    let run = |pages: u64, fault: Option<(u64, Repeat)>| {
        let device = counting_host(GRANULE);
        let options = Options {
            budget: Some(Bytes(pages * PAGE)),
            ..small_options()
        };
        let mut pair = Pair::over(device.clone(), device.clone(), options);
        if let Some((n, repeat)) = fault {
            let driver = DeviceError::Driver {
                call: Call::Unmap,
                code: 999,
            };
            arm(&device, None, n, &driver, repeat);
        }
        let errors = program(&mut pair);
        assert!(device.books().held.0 <= pages * PAGE, "over the budget");
        let failures = device.upstream().failures();
        device.upstream().disarm();
        for error in errors.iter().chain(&program(&mut pair)) {
            let typed = matches!(error, Error::Device { .. } | Error::OverBudget { .. });
            assert!(typed, "{error}");
        }
        pair.end();
        (errors.len(), failures)
    };
    let least = (1..100)
        .find(|&pages| run(pages, None).0 == 0)
        .expect("a budget that is enough");
    for (pages, repeat) in [
        (least, Repeat::Once),
        (least, Repeat::Always),
        (least - 2, Repeat::Once),
    ] {
        let calls = (0..).find(|&n| run(pages, Some((n, repeat))).1 == 0);
        assert!(calls > Some(50), "{calls:?} calls are few");
    }
}

/// Before an allocation fails for want of memory, idle memory of the same compiler goes.
#[test]
fn idle_memory_goes_before_a_device_is_called_full() {
    for budget in [None, Some(Bytes(16 * PAGE))] {
        let device = match budget {
            None => limited_host(GRANULE, Bytes(16 * PAGE)),
            Some(_) => counting_host(GRANULE),
        };
        let options = Options {
            budget,
            ..small_options()
        };
        let mut pair = Pair::over(device.clone(), device.clone(), options);
        // Replays may have to fetch their memory again.
        pair.book.trimmed = true;
        let mut kept = None;
        for _ in 0..6 {
            let mut run = pair.begin("step");
            let large = run.here(9 * PAGE);
            run.free(large, true);
            // From the second step on in the space of survivors, where the large one's pages cannot go.
            let new = run.here(5 * PAGE);
            if let Some(old) = kept.replace(new) {
                run.free(old, true);
            }
            run.finish();
            let held = device.books().held;
            assert!(held.0 <= 16 * PAGE, "{held}");
        }
        pair.end();
    }
}

/// A device that refuses from a call on, for good, while the compiler goes: buffers stay readable until
/// they go, nothing panics, and what the device did not take back is in its own books.
#[test]
fn a_device_that_refuses_for_good_keeps_what_it_has() {
    let driver = DeviceError::Driver {
        call: Call::Release,
        code: 999,
    };
    for call in [
        Call::Unmap,
        Call::Release,
        Call::Unreserve,
        Call::Synchronise,
    ] {
        for n in 0..6 {
            let device = counting_host(GRANULE);
            let mut pair = Pair::over(device.clone(), device.clone(), small_options());
            assert_eq!(program(&mut pair), []);
            arm(&device, Some(call), n, &driver, Repeat::Always);
            pair.compiler = None;
            pair.book.check_contents();
            for address in pair.book.addresses() {
                pair.book.check_contents();
                pair.free(address);
            }
            let refused = device.upstream().failures() > 0;
            if call == Call::Synchronise {
                // It is waited for at the end, and in vain each time: then nothing goes.
                let books = device.books();
                assert_eq!(refused, books.mappings_alive > 0, "{n}: {books:?}");
            }
            if !device.is_empty() {
                assert!(refused, "{:?}", device.books());
                // `Host` would complain of what it was not allowed to take back.
                std::mem::forget(device);
            }
        }
    }
}

/// Going back after a refused map is refused as well: the stray mapping must not pass for a whole window
/// when the page is fetched again.
#[test]
fn a_page_that_could_neither_be_allowed_nor_unmapped_is_not_served() {
    let device = counting_host(GRANULE);
    let mut pair = Pair::over(device.clone(), device.clone(), small_options());
    for _ in 0..2 {
        let mut run = pair.begin("step");
        let a = run.here(2 * PAGE);
        run.free(a, true);
        run.finish();
    }
    assert_eq!(pair.trim(), Bytes(2 * PAGE));
    // A page is made and mapped; allowing it fails, and so does everything after.
    arm(
        &device,
        None,
        2,
        &DeviceError::Driver {
            call: Call::Allow,
            code: 999,
        },
        Repeat::Always,
    );
    let mut run = pair.begin("step");
    for _ in 0..3 {
        let refused = run.try_alloc(2 * PAGE);
        assert!(matches!(refused, Err(Error::Device { .. })), "{refused:?}");
    }
    device.upstream().disarm();
    let a = run.here(2 * PAGE);
    run.free(a, true);
    run.finish();
    pair.end();
}

/// A page is left under a stray mapping, and the next failure at the same place leaves another one.
#[test]
fn two_failures_at_one_place_lose_no_page() {
    let device = counting_host(GRANULE);
    let mut pair = Pair::over(device.clone(), device.clone(), small_options());
    // Two pages are made, the first is mapped; mapping the second fails, and so does everything after.
    arm(
        &device,
        None,
        3,
        &DeviceError::Driver {
            call: Call::Map,
            code: 999,
        },
        Repeat::Always,
    );
    let mut run = pair.begin("step");
    for size in [2 * PAGE, PAGE, 2 * PAGE] {
        let refused = run.try_alloc(size);
        assert!(matches!(refused, Err(Error::Device { .. })), "{refused:?}");
    }
    device.upstream().disarm();
    run.finish();
    pair.end();
}

#[test]
fn an_allocation_over_the_budget_is_refused_with_true_numbers() {
    let options = Options {
        budget: Some(Bytes::mib(16)),
        ..Options::default()
    };
    let mut pair = Pair::new(Bytes::mib(2), options);
    let mut run = pair.begin("step");
    let a = run.here(8 << 20);
    let small = run.here(512);
    let calls = run.book.counting.memory_calls();
    let refused = run.try_alloc(16 << 20);
    let expected = Error::OverBudget(Box::new(Shortage {
        scope: "step".into(),
        asked: Bytes::mib(16),
        needed: Bytes::mib(16),
        limit: Bytes::mib(16),
        free: Bytes::mib(6),
        held: Bytes::mib(10),
        live: Bytes((8 << 20) + 512),
        other_compilers: Bytes::ZERO,
        weights: Bytes::ZERO,
        elsewhere: Bytes::ZERO,
        remedy: Remedy::Budget(Bytes::mib(26)),
    }));
    assert_eq!(refused, Err(expected));
    assert_eq!(
        run.book.counting.memory_calls(),
        calls,
        "the device was not asked"
    );
    run.free(small, true);
    run.free(a, true);
    let all = run.here(16 << 20);
    run.free(all, true);
    run.finish();
    let mut next = pair.begin("step");
    let again = next.here(8 << 20);
    assert_eq!(again, a);
    next.free(again, true);
    next.finish();
    assert_eq!(pair.book.held(), 16 << 20);
    pair.end();
}

#[test]
fn a_survivor_over_the_budget_is_refused_with_true_numbers() {
    let options = Options {
        budget: Some(Bytes::mib(16)),
        ..Options::default()
    };
    let mut pair = Pair::new(Bytes::mib(2), options);
    for step in 0..2 {
        let mut run = pair.begin("step");
        // In the second step it goes to the survivor region, whose pages no edge may mention.
        run.here(8 << 20);
        run.finish();
        assert_eq!(pair.book.held(), (8 << 20) * (step + 1));
    }
    let mut run = pair.begin("step");
    let refused = run.try_alloc(8 << 20);
    let Err(Error::OverBudget(short)) = refused else {
        panic!("there are two of them already: {refused:?}");
    };
    assert_eq!(
        (short.asked, short.live, short.limit),
        (Bytes::mib(8), Bytes::mib(16), Bytes::mib(16))
    );
    let (held, free) = (short.held, short.free);
    assert_eq!(
        (held.0, free.0),
        (run.book.held(), (16 << 20) - run.book.held())
    );
    run.finish();
    pair.end();
}

#[test]
fn a_device_that_is_full_is_reported_with_true_numbers() {
    let device = limited_host(Bytes::mib(2), Bytes::mib(20));
    let mut pair = Pair::over(device.clone(), device.clone(), Options::default());
    let mut run = pair.begin("step");
    let (a, b) = (run.here(8 << 20), run.here(8 << 20));
    run.free(b, true);
    let refused = run.try_alloc(16 << 20);
    let Err(Error::OutOfMemory(short)) = refused else {
        panic!("20 MiB cannot hold 24: {refused:?}");
    };
    let (asked, held, live, free) = (short.asked, short.held, short.live, short.free);
    assert_eq!((asked, live), (Bytes::mib(16), Bytes::mib(8)));
    assert_eq!(held.0, device.books().held.0);
    assert_eq!(free.0, (20 << 20) - held.0);
    let fits = run.here(12 << 20);
    run.free(fits, true);
    run.free(a, true);
    run.finish();
    pair.end();
}

#[test]
fn an_address_space_that_is_used_up_is_a_typed_error() {
    let device = counting_host(GRANULE);
    let options = Options {
        address_space: Bytes(64 * PAGE),
        ..Options::default()
    };
    let mut compiler = Compiler::new(device.clone(), options).expect("a compiler");
    let step = compiler.begin("step").expect("a step");
    let refused = step.alloc(Bytes(65 * PAGE));
    assert!(
        matches!(refused, Err(Error::AddressSpace { asked: Bytes(asked), .. }) if asked == 65 * PAGE),
        "{refused:?}"
    );
    let served = step.alloc(Bytes(2 * PAGE));
    let Ok(Allocation::Here(Address(address))) = served else {
        panic!("{served:?}")
    };
    step.free(Address(address)).expect("live");
    step.finish().expect("the step ends well");
    drop(compiler);
    assert!(device.is_empty());
}
