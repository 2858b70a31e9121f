//! Buffers that are freed on other threads: at every point of a compiler's life, by every kind of
//! thread, with and without streams. Direct API; `hook_threads.rs` does the same through the allocator.

mod reference;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};

use memory_compiler::device::adaptor::{Failing, Repeat, Streams};
use memory_compiler::device::{Call, Device, DeviceError, StreamId};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options, Step, free, free_on};

use reference::devices::{CountingHost, Pattern, counting_host};
use reference::pair::on_thread;

const PAGE: u64 = 4096;
const WORKER: StreamId = StreamId(9);

fn options() -> Options {
    Options {
        address_space: Bytes::mib(64),
        ..Options::default()
    }
}

fn compiler(device: &CountingHost) -> Compiler {
    Compiler::new(device.clone(), options()).expect("a compiler")
}

fn here(step: &Step<'_>, size: u64) -> Address {
    match step.alloc(Bytes(size)) {
        Ok(Allocation::Here(address)) => address,
        other => panic!("{size} bytes were not served: {other:?}"),
    }
}

/// Runs a step that allocates and frees, and says how much was live in the end.
fn plain_step(compiler: &mut Compiler) -> Bytes {
    let step = compiler.begin("step").expect("a step");
    let (a, b) = (here(&step, 3 * PAGE), here(&step, 512));
    step.free(a).expect("live");
    step.free(b).expect("live");
    step.finish().expect("the step ends well");
    compiler.stats().live
}

/// When a buffer is freed, counted from the step that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    SameStep,
    BetweenSteps,
    NextStep,
    AfterNextStep,
    InAnAbortedStep,
    AfterTrim,
    AfterDrop,
    WhileDropping,
}

const EVER: [When; 8] = [
    When::SameStep,
    When::BetweenSteps,
    When::NextStep,
    When::AfterNextStep,
    When::InAnAbortedStep,
    When::AfterTrim,
    When::AfterDrop,
    When::WhileDropping,
];

/// Who frees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Owner,
    OtherThread,
    OtherThreadsStream,
    /// A thread in a step of a compiler of its own.
    OtherStep,
    /// The destructor of a thread-local of a thread that never touched a compiler.
    ThreadLocal,
}

const ALL: [Who; 5] = [
    Who::Owner,
    Who::OtherThread,
    Who::OtherThreadsStream,
    Who::OtherStep,
    Who::ThreadLocal,
];

struct FreedOnDrop(Option<Address>);

impl Drop for FreedOnDrop {
    fn drop(&mut self) {
        if let Some(address) = self.0.take() {
            free(address).expect("live");
        }
    }
}

thread_local! {
    static LAST: std::cell::RefCell<FreedOnDrop> =
        const { std::cell::RefCell::new(FreedOnDrop(None)) };
}

impl Who {
    fn frees(self, address: Address) {
        match self {
            Self::Owner => free(address).expect("live"),
            Self::OtherThread => on_thread(move || free(address)).expect("live"),
            Self::OtherThreadsStream => on_thread(move || free_on(WORKER, address)).expect("live"),
            Self::OtherStep => on_thread(move || {
                let device = counting_host(Bytes(PAGE));
                let mut compiler = compiler(&device);
                let step = compiler.begin("other").expect("a step");
                let own = here(&step, PAGE);
                step.free(address).expect("live");
                step.free(own).expect("live");
                step.finish().expect("the step ends well");
                assert_eq!(compiler.stats().bad_frees, 0);
            }),
            Self::ThreadLocal => on_thread(move || {
                LAST.with_borrow_mut(|last| last.0 = Some(address));
            }),
        }
    }
}

#[test]
fn a_buffer_may_be_freed_by_anyone_at_any_time() {
    for (when, who) in EVER.into_iter().flat_map(|when| ALL.map(|who| (when, who))) {
        let device = counting_host(Bytes(PAGE));
        let mut compiler = compiler(&device);
        plain_step(&mut compiler);
        let pattern = Pattern {
            seed: 7,
            size: 2 * PAGE + 512,
        };
        let frees = |buffer: Address| {
            pattern.check(&*device, buffer.0);
            who.frees(buffer);
        };
        let step = compiler.begin("step").expect("a step");
        let buffer = here(&step, pattern.size);
        pattern.write(&*device, buffer.0);
        if when == When::SameStep {
            frees(buffer);
            // The owner sees it at its next event, and takes the place again.
            assert_eq!(here(&step, pattern.size), buffer, "{who:?}");
            step.free(buffer).expect("live");
        }
        step.finish().expect("the step ends well");
        match when {
            When::SameStep => {}
            When::BetweenSteps => frees(buffer),
            When::NextStep => {
                let step = compiler.begin("step").expect("a step");
                let before = here(&step, PAGE);
                frees(buffer);
                step.free(before).expect("live");
                assert_eq!(step.stats().live, Bytes::ZERO, "{who:?}");
                step.finish().expect("the step ends well");
            }
            When::AfterNextStep => {
                plain_step(&mut compiler);
                frees(buffer);
            }
            When::InAnAbortedStep => {
                let step = compiler.begin("step").expect("a step");
                let lost = here(&step, PAGE);
                frees(buffer);
                step.abort();
                who.frees(lost);
            }
            When::AfterTrim => {
                compiler.trim().expect("trimming works");
                frees(buffer);
                compiler.trim().expect("trimming works");
                assert_eq!(device.books().held, Bytes::ZERO, "{who:?}");
            }
            When::AfterDrop => {
                drop(compiler);
                assert!(!device.is_empty());
                frees(buffer);
                assert!(device.is_empty(), "{when:?} {who:?}: {:?}", device.books());
                continue;
            }
            When::WhileDropping => {
                pattern.check(&*device, buffer.0);
                let barrier = Arc::new(Barrier::new(2));
                let there = Arc::clone(&barrier);
                let dropping = std::thread::spawn(move || {
                    there.wait();
                    drop(compiler);
                });
                barrier.wait();
                who.frees(buffer);
                dropping.join().expect("the thread ends well");
                assert!(device.is_empty(), "{when:?} {who:?}: {:?}", device.books());
                continue;
            }
        }
        let stats = compiler.stats();
        assert_eq!(
            (stats.live, stats.bad_frees),
            (Bytes::ZERO, 0),
            "{when:?} {who:?}"
        );
        assert_eq!(plain_step(&mut compiler), Bytes::ZERO);
        drop(compiler);
        assert!(device.is_empty(), "{when:?} {who:?}: {:?}", device.books());
    }
}

#[test]
fn many_threads_race_the_drop_of_their_owner() {
    for round in 0..200_u64 {
        let device = counting_host(Bytes(PAGE));
        let mut compiler = compiler(&device);
        let step = compiler.begin("step").expect("a step");
        let buffers: Vec<Address> = (0..12).map(|i| here(&step, PAGE + 512 * i)).collect();
        step.finish().expect("the step ends well");
        let barrier = Barrier::new(4);
        std::thread::scope(|scope| {
            for part in buffers.chunks(4) {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    part.iter().for_each(|&at| free(at).expect("live"));
                });
            }
            barrier.wait();
            if round % 2 == 0 {
                let step = compiler.begin("step").expect("a step");
                let a = here(&step, PAGE);
                step.free(a).expect("live");
                drop(step);
            }
            drop(compiler);
        });
        assert!(device.is_empty(), "round {round}: {:?}", device.books());
    }
}

/// Compilers on several threads whose buffers go to any other thread; some go before their last buffer.
#[test]
fn buffers_of_several_compilers_cross_several_threads() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 150;
    type Gift = (Address, Pattern, CountingHost);
    let (give, take): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel::<Gift>()).unzip();
    let freed = Arc::new(AtomicU64::new(0));
    let work = |own: u64, give: Vec<mpsc::Sender<Gift>>, take: mpsc::Receiver<Gift>| {
        let freed = Arc::clone(&freed);
        move || {
            let free_gift = |(address, pattern, device): Gift| {
                pattern.check(&*device, address.0);
                free(address).expect("live");
                freed.fetch_add(1, Ordering::Relaxed);
            };
            let mut devices = vec![counting_host(Bytes(PAGE))];
            let mut compiler = compiler(&devices[0]);
            let mut random = own + 1;
            for round in 0..ROUNDS {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                if random >> 60 == 0 {
                    // Its gifts are still on their way.
                    devices.push(counting_host(Bytes(PAGE)));
                    compiler = Compiler::new(devices[devices.len() - 1].clone(), options())
                        .expect("a compiler");
                }
                let device = devices[devices.len() - 1].clone();
                let step = compiler.begin("step").expect("a step");
                for nth in 0..3 {
                    let seed = (own << 32) + (round << 2) + nth;
                    let pattern = Pattern {
                        seed,
                        size: 700 * (1 + (seed % 9)),
                    };
                    let at = here(&step, pattern.size);
                    pattern.write(&*device, at.0);
                    let to = (random >> (8 * nth)) % THREADS;
                    give[to as usize]
                        .send((at, pattern, device.clone()))
                        .expect("everyone listens");
                    take.try_iter().take(2).for_each(free_gift);
                }
                if random >> 61 == 1 {
                    step.abort();
                } else {
                    step.finish().expect("the step ends well");
                }
            }
            drop(give);
            take.iter().for_each(free_gift);
            assert_eq!(compiler.stats().bad_frees, 0);
            drop(compiler);
            devices
        }
    };
    let threads: Vec<_> = take
        .into_iter()
        .zip(0..)
        .map(|(take, own)| std::thread::spawn(work(own, give.clone(), take)))
        .collect();
    drop(give);
    let devices = threads.into_iter().flat_map(|t| t.join().expect("well"));
    for device in devices.collect::<Vec<_>>() {
        assert!(device.is_empty(), "left behind: {:?}", device.books());
    }
    assert_eq!(freed.load(Ordering::Relaxed), THREADS * ROUNDS * 3);
}

/// A step that was leaked (which is safe Rust) stays on its thread: nobody can finish it elsewhere.
#[test]
fn a_step_leaked_on_one_thread_is_a_typed_error_on_another() {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let (lent, lender) = mpsc::channel::<Compiler>();
    let (back, returned) = mpsc::channel::<Compiler>();
    let step = compiler.begin("step").expect("a step");
    let buffer = here(&step, PAGE);
    std::mem::forget(step);
    std::thread::spawn(move || {
        for mut compiler in lender {
            assert_eq!(compiler.begin("step").err(), Some(Error::StepActive));
            assert_eq!(compiler.trim().err(), Some(Error::StepActive));
            assert_eq!(compiler.stats(), memory_compiler::Stats::default());
            free(buffer).expect("queued for its owner");
            back.send(compiler).expect("the owner waits");
        }
    });
    lent.send(compiler).expect("the thread listens");
    let mut compiler = returned.recv().expect("it comes back");
    // On its own thread the compiler takes the leaked step back, as aborted.
    let stats = compiler.stats();
    assert_eq!((stats.aborts, stats.live), (1, Bytes::ZERO));
    plain_step(&mut compiler);
    drop(compiler);
    assert!(device.is_empty());
}

/// A buffer of a stream is freed on another thread; neither the fence nor the device can be waited for.
#[test]
fn a_free_that_cannot_be_ordered_yet_is_not_lost() {
    let error = DeviceError::Driver {
        call: Call::Wait,
        code: 999,
    };
    // Whether the compiler goes before the free could be ordered, and whether the device can be waited for then.
    for (gone, in_vain) in [(false, false), (true, false), (true, true)] {
        let device = counting_host(Bytes(PAGE));
        // One for each of the two calls that are to fail.
        let outer = Arc::new(Failing::new(device.clone()));
        let mut compiler = Compiler::new(outer.clone(), options()).expect("a compiler");
        let step = compiler.begin("step").expect("a step");
        let buffer = here(&step, 2 * PAGE);
        let inner = device.upstream();
        inner.fail_call_at(Call::Wait, 0, error.clone(), Repeat::Always);
        on_thread(move || free_on(WORKER, buffer)).expect("queued");
        assert_eq!(here(&step, 2 * PAGE), buffer, "the device was waited for");

        outer.fail_call_at(Call::Synchronise, 0, error.clone(), Repeat::Always);
        on_thread(move || free_on(WORKER, buffer)).expect("queued");
        let other = here(&step, 2 * PAGE);
        assert_ne!(other, buffer, "its last work may still run");
        assert_eq!(step.stats().live, Bytes(4 * PAGE), "so it is still live");
        if !gone {
            inner.disarm();
            assert_eq!(step.stats().live, Bytes(2 * PAGE), "the free was kept");
            assert_eq!(here(&step, 2 * PAGE), buffer);
            step.free(buffer).expect("live");
            assert_eq!(step.stats().bad_frees, 0);
        }
        step.free(other).expect("live");
        step.finish().expect("the step ends well");
        if !in_vain {
            outer.disarm();
        }
        drop(compiler);
        let kept = device.books();
        assert_eq!(
            device.is_empty(),
            !in_vain,
            "its last work may still run: {kept:?}"
        );
    }
}

/// What a read of stream 9 sees, enqueued before its buffer is freed there on another thread, when the
/// owner overwrites the place on its own stream.
#[test]
fn a_place_freed_on_another_threads_stream_is_taken_after_its_work() {
    for seed in 0..100 {
        let counting = counting_host(Bytes(PAGE));
        let streams = Arc::new(Streams::new(counting.clone()));
        let mut compiler = Compiler::new(streams.clone(), options()).expect("a compiler");
        let step = compiler.begin("step").expect("a step");
        let buffer = here(&step, 2 * PAGE);
        streams.write(buffer, &[0x11; 64]).expect("mapped");
        let read = std::thread::scope(|scope| {
            let there = scope.spawn(|| {
                let read = streams.enqueue_read(WORKER, buffer, Bytes(64));
                free_on(WORKER, buffer).expect("live");
                read
            });
            there.join().expect("the thread ends well")
        });
        assert_eq!(here(&step, 2 * PAGE), buffer, "the place is taken again");
        streams.enqueue_write(StreamId(0), buffer, &[0x22; 64]);
        streams.run_all(seed);
        assert_eq!(streams.saw(read), Some(Ok(vec![0x11; 64])), "order {seed}");
        step.free(buffer).expect("live");
        step.finish().expect("the step ends well");
        drop(compiler);
        assert!(counting.is_empty());
    }
}

/// While a step is captured into a graph its stream waits for no fence: a buffer that another stream
/// freed stays live until the capture ends, whoever freed it.
#[test]
fn frees_of_other_streams_wait_for_the_end_of_a_capture() {
    let counting = counting_host(Bytes(PAGE));
    let streams = Arc::new(Streams::new(counting.clone()));
    let mut compiler = Compiler::new(streams.clone(), options()).expect("a compiler");
    let own = StreamId(0);
    // Only what was recorded can be captured.
    let step = compiler.begin("step").expect("a step");
    let recorded = [2, 3, 5, 7].map(|pages| here(&step, pages * PAGE));
    recorded
        .into_iter()
        .for_each(|at| step.free(at).expect("live"));
    step.finish().expect("the step ends well");
    for turn in 0..3 {
        let step = compiler.begin("step").expect("a step");
        let [a, b, c] = [2, 3, 5].map(|pages| here(&step, pages * PAGE));
        streams.set_capturing(own, true);
        on_thread(move || free_on(WORKER, a)).expect("live");
        free_on(WORKER, b).expect("live");
        let d = here(&step, 7 * PAGE);
        assert!(![a, b, c].contains(&d));
        let live = step.snapshot().live;
        for (at, pages) in [(a, 2), (b, 3), (c, 5), (d, 7)] {
            assert!(live.contains(&(at, Bytes(pages * PAGE))), "turn {turn}");
        }
        // Its own stream's frees take effect at once.
        step.free(d).expect("live");
        assert_eq!(here(&step, 7 * PAGE), d);
        streams.set_capturing(own, false);
        step.free(d).expect("live");
        assert_eq!(step.snapshot().live, [(c, Bytes(5 * PAGE))]);
        step.free(c).expect("live");
        step.finish().expect("the step ends well");
        assert_eq!(compiler.stats().bad_frees, 0);
    }
    drop(compiler);
    assert!(counting.is_empty());
}

/// Two devices stepped by one thread: each serves what is asked of it, and a free finds its device.
#[test]
fn two_devices_are_stepped_by_one_thread() {
    let devices = [Bytes(PAGE), Bytes(16 * PAGE)].map(counting_host);
    let mut compilers = [0, 1].map(|at| compiler(&devices[at]));
    for round in 0..4 {
        let [left, right] = &mut compilers;
        let (left, right) = (
            left.begin("step").expect("a step"),
            right.begin("step").expect("a step"),
        );
        let (a, b) = (here(&left, 3 * PAGE), here(&right, 5 * PAGE));
        let patterns = [(a, 3), (b, 5)].map(|(at, pages)| {
            let pattern = Pattern {
                seed: round,
                size: pages * PAGE,
            };
            (at, pattern)
        });
        for (device, (at, pattern)) in devices.iter().zip(patterns) {
            pattern.write(&**device, at.0);
        }
        for (device, (at, pattern)) in devices.iter().zip(patterns) {
            pattern.check(&**device, at.0);
        }
        // Each through the other's step.
        right.free(a).expect("live");
        left.free_on(WORKER, b).expect("live");
        // Not in the order in which they began.
        let first = left.finish().expect("the step ends well");
        let second = right.finish().expect("the step ends well");
        if round > 0 {
            assert_eq!((first.device_calls, second.device_calls), (0, 0));
            assert_eq!((first.breaks, second.breaks), (0, 0));
        }
    }
    drop(compilers);
    assert!(devices.iter().all(|device| device.is_empty()));
}
