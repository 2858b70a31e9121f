//! Two compilers, one device: idle pages of a compiler that is in no step serve the one that is.

mod reference;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use memory_compiler::device::adaptor::{Failing, Repeat};
use memory_compiler::device::{Call, DeviceError, Host, MemoryInfo};
use memory_compiler::pager::{Ahead, AtOnce, Pager, Pin, Stamp};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options, Remedy, Step};

use reference::devices::{CountingHost, Pattern, limited_host};
use reference::pair::on_thread;

const PAGE: u64 = 4096;
/// Pages of the device.
const SIZE: u64 = 16;

fn pages(count: u64) -> Bytes {
    Bytes(count * PAGE)
}

fn options() -> Options {
    Options {
        address_space: Bytes::mib(4),
        ..Options::default()
    }
}

fn compiler(device: &CountingHost) -> Compiler {
    Compiler::new(device.clone(), options()).expect("a compiler")
}

fn here(step: &Step<'_>, count: u64) -> Result<Address, Error> {
    match step.alloc(pages(count))? {
        Allocation::Here(address) => Ok(address),
        Allocation::Elsewhere => panic!("the step serves its stream"),
    }
}

/// What a step came to.
#[derive(Debug, PartialEq, Eq)]
struct Done {
    at: [Address; 2],
    breaks: u64,
    calls: u64,
}

/// A step of two buffers that are live together, `count` pages in all; their contents are what was written.
fn run(device: &CountingHost, compiler: &mut Compiler, count: u64) -> Result<Done, Error> {
    let step = compiler.begin("step")?;
    let parts = [count / 2, count - count / 2];
    let first = here(&step, parts[0])?;
    let second = here(&step, parts[1]).inspect_err(|_| step.free(first).expect("live"))?;
    let at = [first, second];
    for (at, part) in at.iter().zip(parts) {
        pattern(at.0, part).write(&**device, at.0);
    }
    step.snapshot().validate().expect("no byte is shared");
    for (at, part) in at.iter().zip(parts) {
        pattern(at.0, part).check(&**device, at.0);
        step.free(*at)?;
    }
    let report = step.finish()?;
    Ok(Done {
        at,
        breaks: report.breaks,
        calls: report.device_calls,
    })
}

fn pattern(seed: u64, count: u64) -> Pattern {
    let size = count * PAGE;
    Pattern { seed, size }
}

/// Two compilers of which either one's step needs more than half of what both may have: each is served
/// whenever it is its turn, at its addresses, without a break; what it gave it maps again and counts.
fn alternate(device: &CountingHost, a: &mut Compiler, b: &mut Compiler) {
    let first = [
        run(device, a, 12).expect("there are 16"),
        run(device, b, 14).expect("a idles with 12 of 16"),
    ];
    for _ in 0..100 {
        for (compiler, count, first) in [(&mut *a, 12, &first[0]), (&mut *b, 14, &first[1])] {
            let done = run(device, compiler, count).expect("the other one idles");
            assert_eq!((done.at, done.breaks), (first.at, 0));
            assert!(done.calls > 0, "what it gave is mapped again");
            assert_eq!(compiler.stats().device_calls_step, done.calls);
            assert!(device.books().held_peak <= pages(SIZE));
        }
    }
    // Alone it replays as if nobody had ever asked.
    assert_eq!(run(device, b, 14).expect("as before").calls, 0);
    assert_eq!(run(device, b, 14).expect("as before").calls, 0);
}

#[test]
fn case_55_an_idle_compiler_of_the_device_serves_the_one_in_a_step() {
    let device = limited_host(pages(1), pages(SIZE));
    let (mut a, mut b) = (compiler(&device), compiler(&device));
    alternate(&device, &mut a, &mut b);
    drop((a, b));
    assert!(device.is_empty());
}

#[test]
fn an_idle_compiler_of_the_budget_serves_the_one_in_a_step() {
    let device = limited_host(pages(1), pages(1_000));
    let pager = Pager::new(device.clone(), Some(pages(SIZE))).expect("a pager");
    let [mut a, mut b] = [(); 2].map(|()| Compiler::with_pager(&pager, options()).expect("one"));
    alternate(&device, &mut a, &mut b);
    assert!(device.books().held_peak <= pages(SIZE), "over the budget");
    drop((a, b, pager));
    assert!(device.is_empty());
}

#[test]
fn only_as_much_is_lent_as_is_missing() {
    let device = limited_host(pages(1), pages(SIZE));
    let (mut a, mut b) = (compiler(&device), compiler(&device));
    run(&device, &mut a, 12).expect("there are 16");
    run(&device, &mut b, 6).expect("4 are free, and 2 of a's");
    assert_eq!(a.stats().held, pages(10));
}

#[test]
fn compilers_on_a_counting_adaptor_and_below_it_lend_to_each_other() {
    use memory_compiler::device::adaptor::{Counting, Limiting};
    let host = Host::new(pages(1)).expect("a device");
    let limited = Arc::new(Limiting::new(host, pages(SIZE)));
    let above = Arc::new(Counting::new(limited.clone()));
    let mut a = Compiler::new(limited.clone(), options()).expect("a compiler");
    let mut b = Compiler::new(above, options()).expect("a compiler");
    for turn in 0..4 {
        let compiler = if turn % 2 == 0 { &mut a } else { &mut b };
        let step = compiler.begin("step").expect("a step");
        let at = here(&step, 14).expect("the other one idles");
        step.free(at).expect("live");
        step.finish().expect("the step ends well");
    }
    assert!(limited.held() <= pages(SIZE));
}

#[test]
fn compilers_of_two_host_devices_have_the_memory_of_one_machine() {
    let mut a = Compiler::new(Arc::new(Host::new(pages(1)).expect("a device")), options())
        .expect("a compiler");
    let failing = Arc::new(Failing::new(Host::new(pages(1)).expect("a device")));
    let mut b = Compiler::new(failing.clone(), options()).expect("a compiler");
    let run = |compiler: &mut Compiler| {
        let step = compiler.begin("step").expect("a step");
        let at = here(&step, 4).expect("the machine has memory");
        step.free(at).expect("live");
        step.finish().expect("the step ends well");
    };
    run(&mut a);
    let info = MemoryInfo {
        free: Bytes::ZERO,
        total: pages(4),
    };
    let full = DeviceError::OutOfMemory { info };
    failing.fail_call_at(Call::Create, 0, full, Repeat::Once);
    run(&mut b);
    assert_eq!((a.stats().held, b.stats().held), (Bytes::ZERO, pages(4)));
}

#[test]
fn a_compiler_that_is_in_a_step_elsewhere_lends_nothing_and_lends_later() {
    let device = limited_host(pages(1), pages(SIZE));
    let (mut a, mut b) = (compiler(&device), compiler(&device));
    let (to_b, from_a) = mpsc::channel();
    let (to_a, from_b) = mpsc::channel();
    std::thread::scope(|scope| {
        let lender = &device;
        scope.spawn(move || {
            run(lender, &mut a, 12).expect("there are 16");
            let step = a.begin("step").expect("a step");
            to_b.send(()).expect("b waits");
            from_b
                .recv_timeout(Duration::from_secs(60))
                .expect("no deadlock");
            step.finish().expect("the step ends well");
            to_b.send(()).expect("b waits");
            from_b
                .recv_timeout(Duration::from_secs(60))
                .expect("no deadlock");
        });
        let wait = || {
            from_a
                .recv_timeout(Duration::from_secs(60))
                .expect("no deadlock")
        };
        wait();
        let Err(Error::OutOfMemory(short)) = run(&device, &mut b, 14) else {
            panic!("a is in a step with 12 of 16");
        };
        assert_eq!((short.other_compilers, short.free), (pages(12), pages(4)));
        to_a.send(()).expect("a waits");
        wait();
        run(&device, &mut b, 14).expect("a idles now");
        to_a.send(()).expect("a waits");
    });
}

#[test]
fn a_pinned_layout_lends_nothing() {
    let device = limited_host(pages(1), pages(SIZE));
    let (mut a, mut b) = (compiler(&device), compiler(&device));
    let first = run(&device, &mut a, 12).expect("there are 16");
    let pinned = a.pin_layout().expect("no step is leaked");
    assert!(matches!(
        run(&device, &mut b, 14),
        Err(Error::OutOfMemory(_))
    ));
    drop(pinned);
    let again = run(&device, &mut a, 12).expect("all of it is there");
    assert_eq!((again.at, again.calls), (first.at, 0));
    run(&device, &mut b, 14).expect("a idles and is not pinned");
}

#[test]
fn live_buffers_of_an_idle_compiler_stay_as_they_are() {
    let device = limited_host(pages(1), pages(SIZE));
    let (mut a, mut b) = (compiler(&device), compiler(&device));
    let step = a.begin("step").expect("a step");
    let kept = here(&step, 3).expect("3 of 16");
    pattern(7, 3).write(&*device, kept.0);
    let other = here(&step, 9).expect("12 of 16");
    step.free(other).expect("live");
    step.finish().expect("the step ends well");
    run(&device, &mut b, 13).expect("3 of 16 are live");
    let Err(Error::OutOfMemory(short)) = run(&device, &mut b, 15) else {
        panic!("3 of 16 are live");
    };
    assert_eq!(short.other_compilers, pages(3));
    pattern(7, 3).check(&*device, kept.0);
    memory_compiler::free(kept).expect("live");
    // Its free is applied by whoever asks.
    run(&device, &mut b, 16).expect("nothing else is live");
}

#[test]
fn a_dropped_compiler_gives_all_but_its_survivors_pages_back_at_once() {
    let device = limited_host(pages(1), pages(SIZE));
    let mut a = compiler(&device);
    let step = a.begin("step").expect("a step");
    let kept = [(); 2].map(|()| here(&step, 2).expect("there are 16"));
    let other = here(&step, 8).expect("12 of 16");
    step.free(other).expect("live");
    step.finish().expect("the step ends well");
    assert_eq!(device.books().held, pages(12));
    drop(a);
    assert_eq!(device.books().held, pages(4));
    let mut b = compiler(&device);
    run(&device, &mut b, 12).expect("4 of 16 are live");
    // What its survivors leave is lent too.
    memory_compiler::free(kept[0]).expect("live");
    run(&device, &mut b, 14).expect("2 of 16 are live");
    memory_compiler::free(kept[1]).expect("live");
    drop(b);
    assert!(device.is_empty());
}

#[test]
fn weights_that_must_be_in_at_once_get_idle_pages_and_others_stream() {
    let device = limited_host(pages(1), pages(1_000));
    let pager = Pager::new(device.clone(), Some(pages(SIZE))).expect("a pager");
    let mut a = Compiler::with_pager(&pager, options()).expect("a compiler");
    let first = run(&device, &mut a, 12).expect("there are 16");
    let range = pager.range(pages(10)).expect("addresses");
    let pin = range.pin(Bytes::ZERO, pages(10), Stamp::NEVER);
    assert!(matches!(pin, Ok(Pin::Stream)), "{pin:?}");
    let pinned = range
        .pin_beyond(Bytes::ZERO, pages(10), Stamp::NEVER)
        .expect("a idles with 12 of 16");
    assert_eq!(a.stats().held, pages(6));
    assert!(matches!(
        run(&device, &mut a, 12),
        Err(Error::OverBudget(_))
    ));
    drop(pinned);
    let again = run(&device, &mut a, 12).expect("weights leave again");
    assert_eq!((again.at, again.breaks), (first.at, 0));
    assert!(device.books().held_peak <= pages(SIZE));
}

#[test]
fn weights_that_come_in_ahead_get_idle_pages_before_they_are_refused() {
    let device = limited_host(pages(1), pages(1_000));
    let pager = Pager::new(device.clone(), Some(pages(SIZE))).expect("a pager");
    let mut a = Compiler::with_pager(&pager, options()).expect("a compiler");
    run(&device, &mut a, 12).expect("there are 16");
    let range = pager.range(pages(17)).expect("addresses");
    let mut ahead = Ahead::new(range, Box::new(AtOnce::new(|_| Ok(()))));
    let fits = ahead.group([(Bytes::ZERO, pages(9))]).expect("inside");
    let never = ahead.group([(Bytes::ZERO, pages(17))]).expect("inside");
    ahead.enter(fits).expect("a idles with 12 of 16");
    assert_eq!(a.stats().held, pages(7));
    ahead.leave(fits);
    let Err(Error::WeightBudget(short)) = ahead.enter(never) else {
        panic!("17 of 16");
    };
    assert_eq!(short.remedy, Remedy::Budget(pages(17)));
    assert!(device.books().held_peak <= pages(SIZE));
}

#[test]
fn each_call_of_a_loan_may_fail_and_nothing_is_lost() {
    for call in [
        Call::Unmap,
        Call::Release,
        Call::Create,
        Call::Map,
        Call::Allow,
        Call::Synchronise,
        Call::Memory,
        Call::TrimPool,
    ] {
        for repeat in [Repeat::Once, Repeat::Times(3), Repeat::Always] {
            for n in 0.. {
                let device = limited_host(pages(1), pages(SIZE));
                let (mut a, mut b) = (compiler(&device), compiler(&device));
                let first = run(&device, &mut a, 12).expect("there are 16");
                let failing = device.upstream();
                let error = DeviceError::Driver { call, code: 999 };
                failing.fail_call_at(call, n, error, repeat);
                let lent = run(&device, &mut b, 14);
                let failures = failing.failures();
                failing.disarm();
                if failures == 0 {
                    lent.expect("nothing failed");
                    break;
                }
                assert!(
                    matches!(
                        lent,
                        Ok(_) | Err(Error::Device { .. } | Error::OutOfMemory(_))
                    ),
                    "{call:?} {n} {repeat:?}: {lent:?}"
                );
                drop(b.trim());
                let again = run(&device, &mut a, 12).expect("all is as before");
                assert_eq!((again.at, again.breaks), (first.at, 0));
                run(&device, &mut b, 14).expect("all is as before");
                assert!(device.books().held_peak <= pages(SIZE));
                drop((a, b));
                assert!(device.is_empty(), "{call:?} {n} {repeat:?}");
            }
        }
    }
}

#[test]
fn a_compiler_may_be_dropped_while_it_is_asked() {
    let device = limited_host(pages(1), pages(SIZE));
    for round in 0..200 {
        let mut a = compiler(&device);
        run(&device, &mut a, 12).expect("there are 16");
        let step = a.begin("step").expect("a step");
        let kept = here(&step, 1).expect("12 are there");
        pattern(round, 1).write(&*device, kept.0);
        step.finish().expect("the step ends well");
        let at_once = Arc::new(Barrier::new(2));
        let (other, same_time) = (device.clone(), Arc::clone(&at_once));
        let asker = std::thread::spawn(move || {
            let mut b = compiler(&other);
            same_time.wait();
            run(&other, &mut b, 14)
        });
        at_once.wait();
        drop(a);
        asker
            .join()
            .expect("no panic")
            .expect("all but one page is idle");
        pattern(round, 1).check(&*device, kept.0);
        memory_compiler::free(kept).expect("live");
        assert!(device.is_empty(), "round {round}");
    }
}

#[test]
fn a_compiler_may_change_threads_between_loans() {
    let device = limited_host(pages(1), pages(SIZE));
    let (mut a, mut b) = (compiler(&device), compiler(&device));
    for _ in 0..10 {
        let there = device.clone();
        a = on_thread(move || {
            run(&there, &mut a, 12).expect("b idles");
            a
        });
        run(&device, &mut b, 14).expect("a idles");
    }
}

/// A small generator, for programs of threads.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// What the programs of all threads came to.
#[derive(Debug, Default)]
struct Tally {
    steps: AtomicU64,
    refused: AtomicU64,
    kept: AtomicU64,
    /// Whether a budget is what is short.
    is_budget: bool,
}

/// Random steps of one compiler beside others; every error is one of memory, and its numbers can be.
fn program(device: &CountingHost, mut compiler: Compiler, limit: u64, seed: u64, tally: &Tally) {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut kept: Vec<(Address, Pattern)> = Vec::new();
    let end = |(at, pattern): (Address, Pattern)| {
        pattern.check(&**device, at.0);
        memory_compiler::free(at).expect("live");
    };
    for turn in 0..120 {
        let step = compiler
            .begin(["a", "b"][random.below(2) as usize])
            .expect("a step");
        let mut live: Vec<(Address, Pattern)> = Vec::new();
        for _ in 0..1 + random.below(6) {
            let count = 1 + random.below(limit / 3);
            let size = count * PAGE - 512 * random.below(3);
            match step.alloc(Bytes(size)) {
                Ok(Allocation::Here(at)) => {
                    let seed = seed << 32 | turn << 8 | live.len() as u64;
                    let pattern = Pattern { seed, size };
                    pattern.write(&**device, at.0);
                    live.push((at, pattern));
                }
                Err(error @ (Error::OutOfMemory(_) | Error::OverBudget(_))) => {
                    let is_budget = matches!(error, Error::OverBudget(_));
                    assert_eq!(is_budget, tally.is_budget, "{error}");
                    let (Error::OutOfMemory(short) | Error::OverBudget(short)) = error else {
                        unreachable!()
                    };
                    tally.refused.fetch_add(1, Ordering::Relaxed);
                    let own = live
                        .iter()
                        .chain(&kept)
                        .map(|(_, of)| of.size.next_multiple_of(512));
                    assert_eq!(short.live.0, own.sum::<u64>());
                    assert_eq!(short.limit, pages(limit));
                    assert!(short.held <= short.limit && short.free <= short.limit);
                    // A compiled place may begin within a page.
                    let most = Bytes(size.next_multiple_of(PAGE) + PAGE);
                    assert!(short.needed <= most, "{short:?}");
                    assert!(short.needed > short.free, "it would have fitted: {short:?}");
                }
                other => panic!("{other:?}"),
            }
            if !live.is_empty() && random.below(3) == 0 {
                end(live.swap_remove(random.below(live.len() as u64) as usize));
            }
        }
        step.snapshot().validate().expect("no byte is shared");
        if random.below(6) == 0 && live.len() > 1 {
            kept.extend(live.pop());
            tally.kept.fetch_add(1, Ordering::Relaxed);
        }
        live.into_iter().for_each(end);
        if random.below(8) == 0 {
            step.abort();
        } else {
            step.finish().expect("the step ends well");
        }
        tally.steps.fetch_add(1, Ordering::Relaxed);
        match random.below(24) {
            0 => drop(compiler.trim().expect("no call fails")),
            1 => drop(compiler.compile().expect("no call fails")),
            2 => {
                let pinned = compiler.pin_layout().expect("no step is leaked");
                std::thread::yield_now();
                drop(pinned);
            }
            _ => {}
        }
        kept.iter()
            .for_each(|(at, pattern)| pattern.check(&**device, at.0));
        while kept.len() > 1 {
            end(kept.remove(0));
        }
    }
    drop(compiler);
    kept.into_iter().for_each(end);
}

/// Runs something on a thread of its own, and fails when it takes too long to be anything but a deadlock.
fn in_time(f: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        f();
        done.send(()).expect("somebody waits");
    });
    match ended.recv_timeout(Duration::from_secs(300)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a deadlock"),
        _ => thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

#[test]
fn eight_threads_with_a_compiler_each_share_a_small_device() {
    in_time(|| {
        let tally = Tally::default();
        for seed in 0..4 {
            let device = limited_host(pages(1), pages(24));
            std::thread::scope(|scope| {
                for thread in 0..8 {
                    let (device, tally) = (&device, &tally);
                    let compiler = compiler(device);
                    scope
                        .spawn(move || program(device, compiler, 24, seed * 8 + thread + 1, tally));
                }
            });
            assert!(device.is_empty());
        }
        println!("{tally:?}");
        assert!(
            tally.refused.load(Ordering::Relaxed) > 0,
            "the device was never full"
        );
    });
}

#[test]
fn eight_threads_with_a_compiler_each_share_a_small_budget_with_weights() {
    in_time(|| {
        let tally = Tally {
            is_budget: true,
            ..Tally::default()
        };
        for seed in 0..4 {
            // It has no page more: were the budget exceeded for a moment, it would refuse one.
            let device = limited_host(pages(1), pages(24));
            let pager = Pager::new(device.clone(), Some(pages(24))).expect("a pager");
            let range = pager.range(pages(24)).expect("addresses");
            std::thread::scope(|scope| {
                for thread in 0..8 {
                    let (device, tally) = (&device, &tally);
                    let compiler = Compiler::with_pager(&pager, options()).expect("a compiler");
                    scope
                        .spawn(move || program(device, compiler, 24, seed * 8 + thread + 1, tally));
                }
                let range = &range;
                scope.spawn(move || {
                    let mut random = Random(seed + 99);
                    for _ in 0..400 {
                        let (from, count) = (random.below(18), 1 + random.below(6));
                        match range.pin_beyond(pages(from), pages(count), Stamp::NEVER) {
                            Ok(pinned) => drop(pinned),
                            Err(Error::WeightBudget(short)) => {
                                assert!(short.limit <= pages(24) && short.free <= pages(24));
                            }
                            Err(other) => panic!("{other}"),
                        }
                    }
                });
            });
            drop(range);
            drop(pager);
            assert!(device.is_empty());
        }
        println!("{tally:?}");
    });
}
