//! What is easy to get wrong, each as a story of its own.

mod reference;

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};

use memory_compiler::device::adaptor::Streams;
use memory_compiler::device::{Device, StreamId};
use memory_compiler::{
    Address, Allocation, Bytes, Compiler, Error, Expected, Options, Snapshot, Step,
};

use reference::Expect;
use reference::devices::{Pattern, counting_host};
use reference::pair::{Pair, on_thread};

const MIB: u64 = 1 << 20;
const GRANULE: Bytes = Bytes::mib(2);

fn frames(snapshot: &Snapshot, address: u64, size: u64) -> BTreeSet<u32> {
    let first = (address - snapshot.base.0) / snapshot.granule.0;
    let count = size.div_ceil(snapshot.granule.0);
    let under = snapshot
        .frames
        .iter()
        .filter(|(page, _)| (first..first + count).contains(&u64::from(*page)));
    under.map(|&(_, frame)| frame).collect()
}

fn here(step: &Step<'_>, size: u64) -> Address {
    match step.alloc(Bytes(size)) {
        Ok(Allocation::Here(address)) => address,
        other => panic!("{size} bytes were not served: {other:?}"),
    }
}

#[test]
fn a_frame_that_is_live_through_another_window_is_in_the_way() {
    let mut pair = Pair::new(GRANULE, Options::default());
    let mut step = |keep_c: bool| {
        let mut run = pair.begin("step");
        let (expect, a) = run.alloc(8 * MIB);
        let (a, b) = (a.expect("served"), run.here(8 * MIB));
        let snapshot = run.step.snapshot();
        let a_frames = frames(&snapshot, a, 8 * MIB);
        run.free(a, true);
        // Needs the pages of a and as many new ones.
        let c = run.here(16 * MIB);
        let shared = !frames(&run.step.snapshot(), c, 16 * MIB).is_disjoint(&a_frames);
        run.free(b, true);
        if !keep_c {
            run.free(c, true);
        }
        run.finish();
        (expect, a, c, shared)
    };
    let (_, first_a, c, shared) = step(false);
    assert!(shared, "the pages of a were used again");
    assert!(
        first_a + 8 * MIB <= c || c + 16 * MIB <= first_a,
        "through another window"
    );
    step(true);
    let (expect, a, ..) = step(false);
    assert_eq!(
        expect,
        Expect::Recorded,
        "the recorded place of a shares frames with c, which is live"
    );
    assert_ne!(a, first_a);
    let stats = pair.compiler().stats();
    assert_eq!((stats.obstructed, stats.survivors), (1, 1));
    pair.book.check_contents();
    pair.end();
}

#[test]
fn a_survivor_in_the_way_moves_the_edge_once() {
    let mut pair = Pair::new(GRANULE, Options::default());
    let mut run = pair.begin("step");
    let a = run.here(8 * MIB);
    run.free(a, true);
    run.finish();

    // The same edge, at a position of another scope, where it survives.
    let mut run = pair.begin("step");
    run.open("other");
    let kept = run.here(8 * MIB);
    assert_eq!(kept, a);
    run.finish();

    let mut addresses = Vec::new();
    for recorded in [1, 0, 0] {
        let mut run = pair.begin("step");
        let moved = run.here(8 * MIB);
        assert_ne!(moved, kept);
        addresses.push(moved);
        run.free(moved, true);
        let report = run.finish();
        assert_eq!(
            (report.recorded, report.breaks),
            (recorded, 0),
            "no break: the step went its way"
        );
    }
    pair.free_on_thread(kept);
    let mut run = pair.begin("step");
    assert_eq!(run.alloc(8 * MIB).0, Expect::Replayed(addresses[0]));
    run.free(addresses[0], true);
    run.finish();
    assert_eq!(pair.compiler().stats().obstructed, 1);
    pair.end();
}

#[test]
fn a_buffer_at_a_surviving_position_is_a_survivor_only_after_its_step() {
    let mut pair = Pair::new(GRANULE, Options::default());
    pair.begin("step").finish();
    let mut old = None;
    for step in 0..4 {
        let mut run = pair.begin("step");
        let new = run.here(8 * MIB);
        let stats = run.step.stats();
        let survivors = u64::from(step > 0);
        assert_eq!(
            (stats.survivors, stats.survivor_bytes.0),
            (survivors, survivors * 8 * MIB),
            "step {step}"
        );
        if let Some(old) = old.replace(new) {
            run.free(old, true);
        }
        assert_eq!(
            run.step.stats().survivors,
            0,
            "only this step's own is live"
        );
        run.finish();
    }
    pair.end();
}

/// What a read of stream 9 sees that is enqueued before its buffer is freed there, when the owner
/// takes the buffer's place on its own stream at once.
fn pending_read_sees(seed: u64, with_compiler: bool) -> Vec<u8> {
    const WORKER: StreamId = StreamId(9);
    let counting = counting_host(GRANULE);
    let streams = Arc::new(Streams::new(counting.clone()));
    let mut compiler = Compiler::new(streams.clone(), Options::default()).expect("a compiler");
    let (old, new) = ([0x11; 64], [0x22; 64]);
    let step = compiler.begin("step").expect("a step");
    let address = here(&step, 8 * MIB);
    streams.write(address, &old).expect("mapped");
    let read = streams.enqueue_read(WORKER, address, Bytes(64));
    if with_compiler {
        step.free_on(WORKER, address).expect("live");
        assert_eq!(here(&step, 8 * MIB), address, "the place is taken again");
    }
    streams.enqueue_write(StreamId(0), address, &new);
    streams.run_all(seed);
    assert_eq!(streams.pending(), 0);
    let seen = streams.saw(read).expect("it ran").expect("it could read");
    step.free(address).expect("live");
    step.finish().expect("the step ends well");
    drop(compiler);
    assert!(counting.is_empty());
    seen
}

#[test]
fn a_place_freed_by_another_stream_is_taken_after_its_work() {
    for seed in 0..200 {
        assert_eq!(
            pending_read_sees(seed, true),
            [0x11; 64],
            "order {seed} overwrote what was still read"
        );
    }
    // Without a fence between the two streams some order does, or the above proves nothing.
    assert!((0..200).any(|seed| pending_read_sees(seed, false) == [0x22; 64]));
}

/// What a read of the step's first stream sees, whose buffer is freed there before the step moves to
/// another stream and takes its place again.
fn read_of_the_first_stream_sees(seed: u64) -> Vec<u8> {
    const FIRST: StreamId = StreamId(0);
    const SECOND: StreamId = StreamId(1);
    let streams = Arc::new(Streams::new(counting_host(GRANULE)));
    let mut compiler = Compiler::new(streams.clone(), Options::default()).expect("a compiler");
    let step = compiler.begin("step").expect("a step");
    let address = here(&step, 8 * MIB);
    streams.write(address, &[0x11; 64]).expect("mapped");
    let read = streams.enqueue_read(FIRST, address, Bytes(64));
    step.free_on(FIRST, address).expect("live");
    step.use_stream(SECOND).expect("a fence");
    assert_eq!(here(&step, 8 * MIB), address, "the place is taken again");
    streams.enqueue_write(SECOND, address, &[0x22; 64]);
    streams.run_all(seed);
    step.free(address).expect("live");
    step.finish().expect("the step ends well");
    streams.saw(read).expect("it ran").expect("it could read")
}

#[test]
fn a_step_that_moves_to_another_stream_takes_places_after_the_work_of_the_first() {
    for seed in 0..200 {
        assert_eq!(
            read_of_the_first_stream_sees(seed),
            [0x11; 64],
            "order {seed} overwrote what was still read"
        );
    }
}

#[test]
fn a_place_freed_by_a_thread_is_taken_when_the_free_is_applied() {
    let mut pair = Pair::new(GRANULE, Options::default());
    let mut run = pair.begin("step");
    let a = run.here(8 * MIB);
    run.free_on_thread(a);
    assert_eq!(run.here(8 * MIB), a, "the next event sees the free");
    run.free(a, true);
    run.finish();
    assert_eq!(pair.book.held(), 8 * MIB);
    pair.end();
}

/// The path of the innermost open scope, which a strict break tells.
fn path(step: &Step<'_>) -> String {
    let _strict = memory_compiler::strict_scope("probe");
    match step.alloc(Bytes(123 * 512)) {
        Err(Error::Strict { scope, .. }) => {
            scope.strip_suffix("/probe").expect("the probe").to_owned()
        }
        other => panic!("a size that no step has: {other:?}"),
    }
}

fn compiler_with_a_finished_step() -> Compiler {
    let mut compiler =
        Compiler::new(counting_host(GRANULE), Options::default()).expect("a compiler");
    let step = compiler.begin("step").expect("a step");
    let a = here(&step, MIB);
    step.free(a).expect("live");
    step.finish().expect("the step ends well");
    compiler
}

fn runs_clean(compiler: &mut Compiler) {
    let before = compiler.stats().bad_scopes;
    let step = compiler.begin("step").expect("a step");
    assert_eq!(path(&step), "step");
    {
        let _scope = memory_compiler::scope("inner");
        assert_eq!(path(&step), "step/inner");
        let a = here(&step, MIB);
        step.free(a).expect("live");
    }
    assert_eq!(path(&step), "step");
    let report = step.finish().expect("the step ends well");
    assert_eq!((report.breaks, report.replayed), (0, 1));
    assert_eq!(compiler.stats().bad_scopes, before);
}

#[test]
fn scopes_closed_out_of_order_are_counted_and_harmless() {
    let mut compiler = compiler_with_a_finished_step();
    let step = compiler.begin("step").expect("a step");
    let (outer, inner) = (
        memory_compiler::scope("outer"),
        memory_compiler::scope("inner"),
    );
    drop(outer);
    let a = here(&step, MIB);
    drop(inner);
    assert_eq!(path(&step), "step");
    step.free(a).expect("live");
    // Whether the step itself reports it is its own affair.
    let _ = step.finish();
    assert!(compiler.stats().bad_scopes >= 1);
    runs_clean(&mut compiler);
}

#[test]
fn a_scope_that_was_closed_with_the_one_around_it_closes_no_other() {
    let mut compiler = compiler_with_a_finished_step();
    let step = compiler.begin("step").expect("a step");
    let outer = memory_compiler::scope("outer");
    let stale = memory_compiler::scope("inner");
    drop(outer);
    let second = memory_compiler::scope("second");
    let third = memory_compiler::scope("third");
    drop(stale);
    assert_eq!(path(&step), "step/second/third");
    drop(third);
    drop(second);
    let _ = step.finish();
    assert_eq!(compiler.stats().bad_scopes, 2);
    runs_clean(&mut compiler);
}

#[test]
fn a_scope_that_outlives_its_step_closes_nothing_of_the_next() {
    let mut compiler = compiler_with_a_finished_step();
    let step = compiler.begin("step").expect("a step");
    let stale = memory_compiler::scope("stale");
    let _ = step.finish();
    assert!(compiler.stats().bad_scopes >= 1, "it was left open");
    let step = compiler.begin("step").expect("a step");
    let own = memory_compiler::scope("own");
    assert_eq!(path(&step), "step/own");
    drop(stale);
    assert_eq!(path(&step), "step/own");
    drop(own);
    assert_eq!(path(&step), "step");
    let _ = step.finish();
    runs_clean(&mut compiler);
}

#[test]
fn a_scope_without_a_step_means_nothing() {
    drop(memory_compiler::scope("nowhere"));
    let early = memory_compiler::scope("early");
    let mut compiler = compiler_with_a_finished_step();
    let step = compiler.begin("step").expect("a step");
    let own = memory_compiler::scope("own");
    drop(early);
    assert_eq!(path(&step), "step/own");
    drop(own);
    step.finish().expect("the step ends well");
    runs_clean(&mut compiler);
}

#[test]
fn a_strict_break_names_a_size_that_is_recorded_in_its_state() {
    let options = Options {
        strict: true,
        ..Options::default()
    };
    let mut compiler = Compiler::new(counting_host(GRANULE), options).expect("a compiler");
    let step = compiler.begin("step").expect("a step");
    let a = here(&step, 8 * MIB);
    step.free(a).expect("live");
    let b = here(&step, 16 * MIB);
    step.free(b).expect("live");
    step.finish().expect("the step ends well");
    // While the 8 is live, nothing is recorded: a 16 would break as well.
    let step = compiler.begin("step").expect("a step");
    let a = here(&step, 8 * MIB);
    let refused = |size| match step.alloc(Bytes(size)) {
        Err(Error::Strict { expected, .. }) => expected,
        other => panic!("that was never recorded: {other:?}"),
    };
    assert_eq!(refused(16 * MIB), Expected::Nothing);
    assert_eq!(refused(24 * MIB), Expected::Nothing);
    step.free(a).expect("live");
    assert_eq!(refused(24 * MIB), Expected::Size(Bytes::mib(16)));
    let b = here(&step, 16 * MIB);
    step.free(b).expect("live");
    assert_eq!(refused(24 * MIB), Expected::End);
    step.finish().expect("the step ends well");
}

#[test]
fn a_strict_step_may_learn_its_survivors_but_not_break() {
    let options = Options {
        strict: true,
        ..Options::default()
    };
    let mut pair = Pair::new(GRANULE, options);
    let mut kept = Vec::new();
    for _ in 0..6 {
        let mut run = pair.begin("step");
        let temporary = run.here(8 * MIB);
        run.free(temporary, true);
        let output = run.here(8 * MIB);
        let tail = run.here(4 * MIB);
        run.free(tail, true);
        kept.push(output);
        if kept.len() > 1 {
            let old = kept.remove(0);
            run.free(old, true);
        }
        assert_eq!(run.finish().breaks, 0);
    }
    let mut run = pair.begin("step");
    assert_eq!(run.alloc(16 * MIB).0, Expect::Refused);
    run.finish();
    pair.end();
}

#[test]
fn two_compilers_on_one_thread_take_turns() {
    let (mut left, mut right) = (
        Pair::new(GRANULE, Options::default()),
        Pair::new(GRANULE, Options::default()),
    );
    let mut kept: [Option<u64>; 2] = [None, None];
    for round in 0..6 {
        for (own, pair) in [&mut left, &mut right].into_iter().enumerate() {
            let mut run = pair.begin("step");
            let size = (8 + 8 * own as u64) * MIB;
            let (new, other) = (run.here(size), run.here(4 * MIB));
            if let Some(old) = kept[own].replace(new) {
                // Through the function that finds the owner by the address alone.
                run.free(old, false);
            }
            run.free(other, false);
            let report = run.finish();
            assert!(
                round < 3 || (report.breaks, report.device_calls) == (0, 0),
                "round {round}: {report:?}"
            );
        }
    }
    // While one of them steps, a buffer of the other is freed on the same thread.
    let mut run = left.begin("step");
    let own = run.here(4 * MIB);
    right.free(kept[1].expect("kept"));
    run.free(own, true);
    run.finish();
    right.begin("step").finish();
    assert!(right.book.model.live.is_empty());
    left.end();
    right.end();
}

#[test]
fn two_compilers_on_two_threads_free_each_others_buffers() {
    const ROUNDS: u64 = 300;
    let (to_left, from_right) = mpsc::channel::<(u64, u64)>();
    let (to_right, from_left) = mpsc::channel::<(u64, u64)>();
    let work = |seed: u64, give: mpsc::Sender<(u64, u64)>, take: mpsc::Receiver<(u64, u64)>| {
        move || {
            let device = counting_host(Bytes(4096));
            let options = Options {
                address_space: Bytes::gib(1),
                ..Options::default()
            };
            let mut compiler = Compiler::new(device.clone(), options).expect("a compiler");
            for round in 0..ROUNDS {
                let step = compiler.begin("step").expect("a step");
                let (gift, own) = (here(&step, 6000), here(&step, 20_000));
                let (gift_pattern, own_pattern) = (
                    Pattern {
                        seed: seed + round,
                        size: 6000,
                    },
                    Pattern {
                        seed: seed + round + 1,
                        size: 20_000,
                    },
                );
                gift_pattern.write(&*device, gift.0);
                own_pattern.write(&*device, own.0);
                gift_pattern.check(&*device, gift.0);
                give.send((gift.0, round)).expect("the other side listens");
                // Frees what the other side gave, whatever it is doing now.
                if let Ok((address, _)) = take.try_recv() {
                    memory_compiler::free(Address(address)).expect("live");
                }
                own_pattern.check(&*device, own.0);
                step.free(own).expect("live");
                step.finish().expect("the step ends well");
            }
            drop(give);
            while let Ok((address, _)) = take.recv() {
                memory_compiler::free(Address(address)).expect("live");
            }
            assert_eq!(compiler.stats().bad_frees, 0);
            (compiler, device)
        }
    };
    let left = std::thread::spawn(work(1 << 10, to_right, from_right));
    let right = std::thread::spawn(work(1 << 20, to_left, from_left));
    // Both first: until then the other side may still hold gifts.
    let sides = [left, right].map(|side| side.join().expect("the thread ends well"));
    for (compiler, device) in sides {
        // Its owner may end on another thread than it lived on.
        on_thread(move || drop(compiler));
        assert!(device.is_empty(), "left behind: {:?}", device.books());
    }
}

fn six_sizes(compiler: &mut Compiler, name: &str, first: u64) -> Result<(), Error> {
    let step = compiler.begin(name)?;
    let mut live = Vec::new();
    for i in first..first + 6 {
        match step.alloc(Bytes(i * MIB))? {
            Allocation::Here(address) => live.push(address),
            Allocation::Elsewhere => panic!("not served"),
        }
    }
    live.into_iter()
        .for_each(|address| step.free(address).expect("live"));
    step.finish().map(drop)
}

#[test]
fn a_step_that_was_forgotten_records_again_and_breaks_nothing_in_strict_mode() {
    let options = Options {
        strict: true,
        edge_limit: 8,
        ..Options::default()
    };
    let mut compiler = Compiler::new(counting_host(GRANULE), options).expect("a compiler");
    for _ in 0..3 {
        for (name, first) in [("a", 1), ("b", 20)] {
            six_sizes(&mut compiler, name, first).expect("what was forgotten may be recorded");
        }
    }
    let stats = compiler.stats();
    assert!(stats.edges_forgotten > 0, "{stats}");
    assert_eq!(stats.breaks_total, 0, "{stats}");
}

/// Windows of sizes that never come again must not use the addresses up.
#[test]
fn steps_of_drifting_sizes_do_not_run_out_of_addresses() {
    let device = counting_host(Bytes(4096));
    let options = Options {
        edge_limit: 500,
        address_space: Bytes::mib(256),
        ..Options::default()
    };
    let mut compiler = Compiler::new(device.clone(), options).expect("a compiler");
    let mut random = 1_u64;
    let mut used = 0;
    for n in 0..4_000 {
        let step = compiler.begin("step").expect("a step");
        let mut live: Vec<(Address, Pattern)> = Vec::new();
        for nth in 0..12 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let pattern = Pattern {
                seed: n * 100 + nth,
                size: 4096 + (random >> 33) % 300_000,
            };
            let at = here(&step, pattern.size);
            pattern.write(&*device, at.0);
            live.push((at, pattern));
            if live.len() > 4 {
                let (at, pattern) = live.remove((random >> 20) as usize % 4);
                pattern.check(&*device, at.0);
                step.free(at).expect("live");
                used += pattern.size;
            }
        }
        for (at, pattern) in live {
            pattern.check(&*device, at.0);
            step.free(at).expect("live");
        }
        step.finish().expect("the step ends well");
    }
    let stats = compiler.stats();
    assert!(used > 4 * Bytes::gib(1).0, "{used} bytes are little");
    assert!(stats.virtual_bytes <= Bytes::mib(128), "{stats}");
    drop(compiler);
    assert!(device.is_empty());
}

#[test]
fn the_floor_counts_what_was_live_at_once_and_not_a_survivor_that_was_gone() {
    let device = counting_host(GRANULE);
    let mut compiler = Compiler::new(device, Options::default()).expect("a compiler");
    let mut kept = None;
    for _ in 0..6 {
        let step = compiler.begin("step").expect("a step");
        if let Some(address) = kept.take() {
            step.free(address).expect("live");
        }
        let most = here(&step, 5 * MIB);
        step.free(most).expect("live");
        kept = Some(here(&step, 3 * MIB));
        step.finish().expect("the step ends well");
    }
    let stats = compiler.stats();
    assert_eq!((stats.peak, stats.floor), (Bytes::mib(5), Bytes::mib(6)));
    assert!(stats.held >= stats.floor, "{stats}");
}
