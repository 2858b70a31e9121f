//! Children made by fork(2), direct API: they read what they inherit, own what they write, and nothing that they do
//! reaches their parent; `hook_forks.rs` does the same through the allocator.

#![cfg(target_os = "linux")]

mod reference;

use std::cell::RefCell;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memory_compiler::device::{Call, Device, DeviceError, Host, StreamId};
use memory_compiler::pager::{Ahead, OnThread, Pager, Pin, Stamp};
use memory_compiler::{
    Address, Allocation, BadFree, Bytes, Compiler, Error, Options, Stats, free, free_on, pause,
    scope,
};
use reference::child::{Buffer, Child, alloc, end, fork, in_child};
use reference::devices::{CountingHost, Pattern, counting_host};

const PAGE: u64 = 4096;

fn options() -> Options {
    Options {
        address_space: Bytes::mib(64),
        ..Options::default()
    }
}

fn compiler(device: &CountingHost) -> Compiler {
    Compiler::new(device.clone(), options()).expect("a compiler")
}

/// A step of which every second buffer survives.
fn run(device: &CountingHost, compiler: &mut Compiler, sizes: &[u64]) -> Vec<Buffer> {
    let step = compiler.begin("step").expect("a step");
    let buffers = sizes.iter().zip(1..);
    let mut buffers: Vec<Buffer> = buffers
        .map(|(&size, seed)| alloc(device, &step, size, seed))
        .collect();
    let mut number = 0;
    buffers.retain(|_| {
        number += 1;
        number % 2 == 0
    });
    step.finish().expect("the step ends well");
    buffers
}

const SIZES: [u64; 6] = [3 * PAGE, 2 * PAGE, 512, PAGE + 512, 7 * PAGE, 1536];

fn settled(compiler: &mut Compiler) -> Stats {
    let stats = compiler.stats();
    assert_eq!((stats.breaks_step, stats.bad_frees), (0, 0), "{stats}");
    stats
}

#[test]
fn a_child_that_drops_everything_and_exits_leaves_its_parents_bytes_and_books() {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let survivors = run(&device, &mut compiler, &SIZES);
    let (books, stats) = (device.books(), compiler.stats());
    // One that just ends, and one that drops in this order and the other way round.
    in_child(|_| ());
    in_child(|child| {
        drop(child.own(&raw const compiler));
        drop(child.own(&raw const survivors));
        drop(child.own(&raw const device));
    });
    in_child(|child| {
        drop(child.own(&raw const survivors));
        drop(child.own(&raw const device));
        drop(child.own(&raw const compiler));
    });
    assert_eq!(device.books(), books);
    assert_eq!(compiler.stats(), stats);
    survivors.iter().for_each(Buffer::check);
    compiler.snapshot().validate().expect("nothing is shared");
    drop(survivors);
    for _ in 0..6 {
        drop(run(&device, &mut compiler, &SIZES));
    }
    assert_eq!(settled(&mut compiler).device_calls_step, 0);
    drop(compiler);
    assert!(device.is_empty(), "{:?}", device.books());
}

#[test]
fn the_memory_of_a_host_stays_when_a_child_gives_all_of_it_back() {
    let host = Host::new(Bytes(PAGE)).expect("this machine has memory");
    let base = host.reserve(Bytes(4 * PAGE)).expect("addresses");
    let page = host.create().expect("a page");
    host.map(base, page).expect("mapped");
    host.allow(base, Bytes(PAGE)).expect("allowed");
    host.write(base, b"parent").expect("written");
    in_child(|_| {
        let refused = |call| Err(DeviceError::Forked { call });
        let next = Address(base.0 + PAGE);
        assert_eq!(
            host.reserve(Bytes(PAGE)),
            Err(DeviceError::Forked {
                call: Call::Reserve
            })
        );
        assert_eq!(
            host.create(),
            Err(DeviceError::Forked { call: Call::Create })
        );
        assert_eq!(host.map(next, page), refused(Call::Map));
        assert_eq!(host.allow(base, Bytes(PAGE)), refused(Call::Allow));
        assert_eq!(host.unmap(base, Bytes(PAGE)), refused(Call::Unmap));
        assert_eq!(host.release(page), refused(Call::Release));
        assert_eq!(
            host.unreserve(base, Bytes(4 * PAGE)),
            refused(Call::Unreserve)
        );
        let text = host.create().expect_err("refused").to_string();
        assert!(
            text.contains("make a device of this process's own"),
            "{text}"
        );
        // In a debug build a device that is dropped with something in it panics.
        drop(std::mem::ManuallyDrop::into_inner(
            std::mem::ManuallyDrop::new(Host::new(Bytes(PAGE)).expect("one of its own")),
        ));
    });
    assert_eq!(host.resident(), Ok(Bytes(PAGE)));
    let mut seen = [0; 6];
    host.read(base, &mut seen).expect("readable");
    assert_eq!(&seen, b"parent");
    host.unmap(base, Bytes(PAGE)).expect("unmapped");
    host.release(page).expect("released");
    host.unreserve(base, Bytes(4 * PAGE)).expect("given back");
}

#[test]
fn a_child_and_its_parent_each_see_their_own_writes() {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let survivors = run(&device, &mut compiler, &SIZES);
    in_child(|_| {
        survivors.iter().for_each(Buffer::check);
        survivors.iter().for_each(Buffer::spoil);
        // A child of its own reads what the child wrote, and its writes stay its own too.
        in_child(|_| {
            for buffer in &survivors {
                let Pattern { seed, size } = buffer.pattern;
                Pattern { seed: !seed, size }.check(&*device, buffer.at.0);
                buffer.pattern.write(&*device, buffer.at.0);
            }
        });
        for buffer in &survivors {
            let Pattern { seed, size } = buffer.pattern;
            Pattern { seed: !seed, size }.check(&*device, buffer.at.0);
        }
    });
    survivors.iter().for_each(Buffer::check);
}

#[test]
fn pages_under_two_places_and_places_apart_are_inherited() {
    let host = Host::new(Bytes(PAGE)).expect("this machine has memory");
    let base = host.reserve(Bytes(8 * PAGE)).expect("addresses");
    let at = |index: u64| Address(base.0 + index * PAGE);
    let pages: Vec<_> = (0..3).map(|_| host.create().expect("a page")).collect();
    // Neighbours, a page again, the other way round, one that nobody may access, none.
    for (index, page) in [(0, 0), (1, 1), (2, 1), (3, 0), (5, 2), (6, 2)] {
        host.map(at(index), pages[page]).expect("mapped");
        if index != 6 {
            host.allow(at(index), Bytes(PAGE)).expect("allowed");
        }
    }
    for (index, byte) in [(0, 10), (1, 11), (5, 12)] {
        host.fill(at(index), Bytes(PAGE), byte).expect("filled");
    }
    let byte = |index| {
        let mut seen = [0];
        host.read(at(index), &mut seen).map(|()| seen[0])
    };
    let bytes = [0, 1, 2, 3, 5].map(|index| byte(index).expect("readable"));
    assert_eq!(bytes, [10, 11, 11, 10, 12]);
    in_child(|_| {
        assert_eq!(
            [0, 1, 2, 3, 5].map(|index| byte(index).expect("readable")),
            bytes
        );
        for index in [4, 6, 7] {
            byte(index).expect_err("not mapped, or not allowed");
        }
        host.fill(at(1), Bytes(PAGE), 99).expect("filled");
        assert_eq!(byte(1), Ok(99));
        assert_eq!(byte(0), Ok(10));
    });
    assert_eq!(
        [0, 1, 2, 3, 5].map(|index| byte(index).expect("readable")),
        bytes
    );
    for index in [0, 1, 2, 3, 5, 6] {
        host.unmap(at(index), Bytes(PAGE)).expect("unmapped");
    }
    pages
        .into_iter()
        .for_each(|page| host.release(page).expect("released"));
    host.unreserve(base, Bytes(8 * PAGE)).expect("given back");
}

#[test]
fn a_compiler_that_is_used_in_a_child_says_so() {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let survivors = run(&device, &mut compiler, &SIZES);
    let books = device.books();
    let pinned = compiler.pin_layout().expect("pinned");
    in_child(|child| {
        assert_eq!(compiler.begin("step").err(), Some(Error::Forked));
        let step: Result<(), Error> = compiler.step(|| panic!("the step does not begin"));
        assert_eq!(step, Err(Error::Forked));
        assert_eq!(compiler.trim(), Err(Error::Forked));
        assert_eq!(compiler.compile().err(), Some(Error::Forked));
        assert_eq!(compiler.pin_layout().err(), Some(Error::Forked));
        assert_eq!(compiler.use_stream(StreamId(3)), Err(Error::Forked));
        assert_eq!(compiler.stats(), Stats::default());
        assert!(compiler.snapshot().live.is_empty());
        let other = Compiler::new(device.clone(), options());
        assert_eq!(other.err(), Some(Error::Forked));
        let text = Error::Forked.to_string();
        assert!(
            text.contains("make a device and a compiler of the child's"),
            "{text}"
        );
        drop(child.own(&raw const pinned));
        let at = survivors[0].at;
        assert_eq!(free_on(StreamId(7), at), Ok(()));
        drop(child.own(&raw const survivors));
        drop(child.own(&raw const compiler));
        // Not one call of the device was made but those of the checks.
        assert_eq!(
            device.memory_calls() - books.memory_calls(),
            1,
            "the other compiler's"
        );
    });
    drop(pinned);
    assert_eq!(device.books(), books);
    survivors.iter().for_each(Buffer::check);
    drop(survivors);
    drop(compiler);
    assert!(device.is_empty());
}

#[test]
fn a_fork_inside_a_step_changes_nothing_in_the_parent() {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let mut calls = None;
    for round in 0..8 {
        let outside = &raw const compiler;
        let step = compiler.begin("step").expect("a step");
        let _outer = scope("outer");
        let first = alloc(&device, &step, 3 * PAGE, 1);
        let second = alloc(&device, &step, 2 * PAGE, 2);
        let (inner, paused) = (scope("inner"), pause());
        let forked = fork(|child| {
            assert_eq!(step.alloc(Bytes(PAGE)), Err(Error::Forked));
            assert_eq!(step.alloc_on(StreamId(0), Bytes(PAGE)), Err(Error::Forked));
            assert_eq!(step.use_stream(StreamId(1)), Err(Error::Forked));
            assert_eq!(step.stats(), Stats::default());
            first.check();
            second.check();
            second.spoil();
            drop(child.own(&raw const second));
            drop(child.own(&raw const inner));
            drop(child.own(&raw const paused));
            drop(scope("of the child"));
            assert_eq!(free(first.at), Ok(()));
            match round % 3 {
                0 => drop(child.own(&raw const step)),
                1 => {
                    let finished = child.own(&raw const step).finish();
                    assert_eq!(finished.err(), Some(Error::Forked));
                }
                _ => {}
            }
            let mut compiler = child.own(outside);
            assert_eq!(compiler.begin("step").err(), Some(Error::Forked));
            drop(compiler);
        });
        forked.succeeds();
        second.check();
        assert_eq!(step.alloc(Bytes(PAGE)), Ok(Allocation::Elsewhere));
        drop(paused);
        let third = alloc(&device, &step, PAGE, 3);
        drop((first, inner));
        let fourth = alloc(&device, &step, 3 * PAGE, 4);
        [second, third, fourth].iter().for_each(Buffer::check);
        step.finish().expect("the step ends well");
        if round > 3 {
            assert_eq!(settled(&mut compiler).recorded_step, 0);
            assert_eq!(
                *calls.get_or_insert(device.memory_calls()),
                device.memory_calls()
            );
        }
    }
    drop(compiler);
    assert!(device.is_empty(), "{:?}", device.books());
}

/// Steps of a compiler that this process makes.
fn works() {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let mut kept = Vec::new();
    for _ in 0..6 {
        kept = run(&device, &mut compiler, &SIZES);
        kept.iter().for_each(Buffer::check);
    }
    assert_eq!(settled(&mut compiler).device_calls_step, 0);
    compiler.snapshot().validate().expect("nothing is shared");
    drop(compiler);
    kept.iter().for_each(Buffer::check);
    drop(kept);
    assert!(device.is_empty(), "{:?}", device.books());
}

#[test]
fn a_child_and_its_child_make_compilers_of_their_own() {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let survivors = run(&device, &mut compiler, &SIZES);
    in_child(|child| {
        works();
        let own = counting_host(Bytes(PAGE));
        let mut own_compiler = self::compiler(&own);
        let own_survivors = run(&own, &mut own_compiler, &SIZES);
        in_child(|child| {
            works();
            for compiler in [&raw const compiler, &raw const own_compiler] {
                let mut compiler = child.own(compiler);
                assert_eq!(compiler.trim(), Err(Error::Forked));
                drop(compiler);
            }
            survivors
                .iter()
                .chain(&own_survivors)
                .for_each(Buffer::check);
            survivors
                .iter()
                .chain(&own_survivors)
                .for_each(Buffer::spoil);
            drop(child.own(&raw const survivors));
            drop(child.own(&raw const own_survivors));
            works();
        });
        survivors
            .iter()
            .chain(&own_survivors)
            .for_each(Buffer::check);
        drop(own_compiler);
        drop(own_survivors);
        assert!(own.is_empty(), "{:?}", own.books());
        assert_eq!(child.own(&raw const compiler).trim(), Err(Error::Forked));
    });
    in_child(|_| works());
    survivors.iter().for_each(Buffer::check);
    works();
}

#[test]
fn a_pager_and_its_weights_stay_their_parents() {
    let device = counting_host(Bytes(PAGE));
    let pager = Pager::new(device.clone(), Some(Bytes(16 * PAGE))).expect("a pager");
    let weights = pager.range(Bytes(4 * PAGE)).expect("addresses");
    let ahead = pager.range(Bytes(4 * PAGE)).expect("addresses");
    let copies = Arc::clone(&device);
    let carrier = OnThread::new(move |part| copies.fill(part.address, part.size, 5));
    let mut ahead = Ahead::new(ahead, Box::new(carrier.expect("a thread")));
    let group = ahead.group([(Bytes(0), Bytes(2 * PAGE))]).expect("a group");
    ahead.enter(group).expect("it fits");
    let mut compiler = Compiler::with_pager(&pager, options()).expect("a compiler");
    let survivors = run(&device, &mut compiler, &SIZES[..3]);
    let Ok(Pin::Resident(pinned)) = weights.pin(Bytes(0), Bytes(2 * PAGE), Stamp::NEVER) else {
        panic!("two pages fit")
    };
    device.fill(weights.base(), Bytes(PAGE), 9).expect("pinned");
    let byte = |at: Address| {
        let mut seen = [0];
        device.read(at, &mut seen).map(|()| seen[0])
    };
    let (books, stats) = (device.books(), pager.stats());
    in_child(|child| {
        let mut ahead = child.own(&raw const ahead);
        assert_eq!(byte(weights.base()), Ok(9));
        assert_eq!(byte(ahead.range().base()), Ok(5));
        let pin = weights.pin(Bytes(0), Bytes(PAGE), Stamp::NEVER);
        assert_eq!(pin.err(), Some(Error::Forked));
        let pin = weights.pin_beyond(Bytes(0), Bytes(PAGE), Stamp::NEVER);
        assert_eq!(pin.err(), Some(Error::Forked));
        assert_eq!(weights.evict(), Err(Error::Forked));
        assert_eq!(
            weights.residency(Bytes(0), Bytes(1)).err(),
            Some(Error::Forked)
        );
        weights.prioritise();
        assert_eq!(pager.range(Bytes(PAGE)).err(), Some(Error::Forked));
        assert_eq!(
            Compiler::with_pager(&pager, options()).err(),
            Some(Error::Forked)
        );
        assert_eq!(pager.stats(), Default::default());
        assert_eq!(ahead.enter(group), Err(Error::Forked));
        ahead.leave(group);
        drop((child.own(&raw const pinned), ahead));
        drop(child.own(&raw const compiler));
        drop(child.own(&raw const survivors));
        drop(child.own(&raw const weights));
        drop(child.own(&raw const pager));
    });
    assert_eq!((device.books().held, pager.stats()), (books.held, stats));
    assert_eq!(byte(weights.base()), Ok(9));
    survivors.iter().for_each(Buffer::check);
    ahead.leave(group);
    drop((pinned, compiler, ahead));
    weights.evict().expect("evicted");
    drop((survivors, weights, pager));
    assert!(device.is_empty(), "{:?}", device.books());
}

#[test]
fn an_orphaned_engine_stays_its_parents() {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let survivors = run(&device, &mut compiler, &SIZES);
    drop(compiler);
    in_child(|child| drop(child.own(&raw const survivors)));
    survivors.iter().for_each(Buffer::check);
    assert!(!device.is_empty());
    drop(survivors);
    assert!(device.is_empty());
}

#[test]
fn a_child_frees_only_what_is_its_own() {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let survivors = run(&device, &mut compiler, &SIZES);
    in_child(|_| {
        // What no compiler ever had is as bad a free as in the parent.
        let reason = BadFree::Unknown;
        let address = Address(512);
        assert_eq!(free(address), Err(Error::BadFree { address, reason }));
        // Of a buffer of the parent nothing is known.
        let at = survivors[0].at;
        assert_eq!(free(at), Ok(()));
        assert_eq!(free(at), Ok(()));
        survivors[0].check();
    });
    assert_eq!(compiler.stats().bad_frees, 0);
    survivors.iter().for_each(Buffer::check);
}

/// Another thread is anywhere in a call when the fork comes.
#[test]
fn a_thousand_forks_beside_a_thread_that_works_end_all() {
    const FORKS: u32 = 1_000;
    let kept_device = counting_host(Bytes(PAGE));
    let mut kept_compiler = compiler(&kept_device);
    let kept = run(&kept_device, &mut kept_compiler, &SIZES);
    let (over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let device = counting_host(Bytes(PAGE));
                let mut compiler = compiler(&device);
                let mut survivors = Vec::new();
                for _ in 0..5 {
                    survivors = run(&device, &mut compiler, &SIZES);
                    survivors.iter().for_each(Buffer::check);
                }
                drop(compiler);
                // The last free ends the engine, the device with it.
                drop(survivors);
                assert!(device.is_empty());
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        for number in 0..FORKS {
            let child = fork(|child| {
                assert_eq!(
                    child.own(&raw const kept_compiler).trim(),
                    Err(Error::Forked)
                );
                kept[0].check();
                assert_eq!(free(kept[0].at), Ok(()));
                if number % 10 == 0 {
                    works();
                }
            });
            child.succeeds();
        }
        over.store(true, Ordering::Relaxed);
    });
    let rounds = rounds.into_inner();
    assert!(rounds > 10, "{rounds} rounds are few");
    kept.iter().for_each(Buffer::check);
    drop(kept);
    drop(kept_compiler);
    assert!(kept_device.is_empty());
}

thread_local! {
    static LAST: RefCell<Option<(Compiler, Vec<Buffer>)>> = const { RefCell::new(None) };
}

static AT_EXIT: Mutex<Option<(Compiler, Vec<Buffer>)>> = Mutex::new(None);

/// Children that end as a program does: with handlers of `exit` and destructors of thread-locals, which drop a compiler
/// with its buffers each; the parent does the same at last.
#[test]
#[ignore = "exits: run by the test below, in a process of its own"]
fn a_process_whose_children_exit() {
    extern "C" fn handler() {
        let last = AT_EXIT.lock().expect("no thread panicked").take();
        let (compiler, buffers) = last.expect("kept until the end");
        buffers.iter().for_each(Buffer::check);
        drop((compiler, buffers));
        println!("{} dropped all", std::process::id());
    }
    // SAFETY: the handler is a function of this process; what panics in it aborts, as it may not unwind.
    assert_eq!(unsafe { libc::atexit(handler) }, 0);
    let made = || {
        let device = counting_host(Bytes(PAGE));
        let mut compiler = compiler(&device);
        let buffers = run(&device, &mut compiler, &SIZES);
        (compiler, buffers)
    };
    *AT_EXIT.lock().expect("ours") = Some(made());
    LAST.set(Some(made()));
    for _ in 0..2 {
        fork(|_| std::process::exit(0)).succeeds();
    }
    LAST.with_borrow(|last| {
        let (_, buffers) = last.as_ref().expect("the parent's");
        buffers.iter().for_each(Buffer::check);
    });
    std::process::exit(0);
}

fn run_alone(test: &str) -> String {
    let child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output()
        .expect("a child");
    let said = String::from_utf8_lossy(&child.stdout);
    let errors = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{}\n{said}{errors}", child.status);
    assert!(!errors.contains("refused"), "{errors}");
    format!("{said}{errors}")
}

#[test]
fn children_may_end_with_destructors() {
    let said = run_alone("a_process_whose_children_exit");
    assert_eq!(said.matches("dropped all").count(), 3, "{said}");
}

/// A copy of the process that no handler was told of.
#[test]
#[ignore = "needs a process without other threads: run by the test below"]
fn a_process_that_is_cloned() {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let survivors = run(&device, &mut compiler, &SIZES);
    let flags = libc::c_long::from(libc::SIGCHLD);
    // SAFETY: without a stack and without CLONE_VM this is a fork, of which the C library does not know.
    let cloned = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if cloned == 0 {
        end(|child| {
            assert_eq!(compiler.trim(), Err(Error::Forked));
            survivors.iter().for_each(Buffer::check);
            let at = survivors[0].at;
            let refused = Err(DeviceError::Forked { call: Call::Fill });
            assert_eq!(device.fill(at, Bytes(512), 3), refused);
            drop(child.own(&raw const survivors));
            drop(child.own(&raw const compiler));
            drop(child.own(&raw const device));
            works();
        });
    }
    Child::from_pid(cloned as libc::pid_t).succeeds();
    survivors.iter().for_each(Buffer::check);
    drop((compiler, survivors));
    assert!(device.is_empty());
}

#[test]
fn a_clone_without_handlers_drops_nothing_of_its_parents() {
    run_alone("a_process_that_is_cloned");
}
