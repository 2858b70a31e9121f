//! Addresses come back: the windows of survivors that are gone, whatever sizes they had, before the half of
//! the range that is theirs is used up; and never the window of one that is live.

mod reference;

use std::collections::VecDeque;

use memory_compiler::device::adaptor::Repeat;
use memory_compiler::device::{Call, DeviceError};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options, Step};
use proptest::prelude::*;

use reference::devices::{CountingHost, Pattern, counting_host};
use reference::pair::Pair;

const PAGE: u64 = 4096;

fn compiler(pages: u64) -> (CountingHost, Compiler) {
    let device = counting_host(Bytes(PAGE));
    let options = Options {
        edge_limit: 500,
        address_space: Bytes(pages * PAGE),
        ..Options::default()
    };
    let compiler = Compiler::new(device.clone(), options).expect("a compiler");
    (device, compiler)
}

fn here(step: &Step<'_>, size: u64) -> Address {
    match step.alloc(Bytes(size)) {
        Ok(Allocation::Here(address)) => address,
        other => panic!("{size} bytes were not served: {other:?}"),
    }
}

/// A buffer that is checked when it goes.
struct Kept(Address, Pattern);

impl Kept {
    fn new(device: &CountingHost, step: &Step<'_>, size: u64, seed: u64) -> Self {
        let pattern = Pattern { seed, size };
        let at = here(step, size);
        pattern.write(&**device, at.0);
        Self(at, pattern)
    }

    fn free(self, device: &CountingHost, step: &Step<'_>) {
        self.1.check(&**device, self.0.0);
        step.free(self.0).expect("live");
    }
}

/// The three outputs that are kept grow by 24 bytes a step, up to 40 pages and from the beginning again, for
/// 100,000 steps: 4,687 times a new size in units of 512 B, in a half of 1,024 pages, which holds some 50 of
/// them at once.
#[test]
fn a_hundred_thousand_survivors_that_drift_by_a_few_bytes_do_not_use_the_addresses_up() {
    const STEPS: u64 = 100_000;
    let (device, mut compiler) = compiler(2_048);
    let mut kept: VecDeque<Kept> = VecDeque::new();
    let (mut addresses, mut held) = (0, 0);
    for n in 0..STEPS {
        let step = compiler.begin("step").expect("a step");
        let scratch = here(&step, 10 * PAGE);
        let size = PAGE / 4 + 24 * n % (40 * PAGE);
        kept.push_back(Kept::new(&device, &step, size, n));
        step.free(scratch).expect("live");
        if kept.len() > 3 {
            kept.pop_front().expect("four").free(&device, &step);
        }
        step.finish().expect("the step ends well");
        if n % 1_000 == 999 {
            let stats = compiler.stats();
            addresses = addresses.max(stats.virtual_bytes.0 / PAGE);
            held = held.max(stats.held.0 / PAGE);
        }
    }
    let stats = compiler.stats();
    println!("at most {addresses} pages of addresses and {held} of memory: {stats}");
    assert_eq!(stats.survivors, 3);
    assert!(stats.edges_forgotten > 1_000, "{stats}");
    assert!(addresses <= 2_048, "{addresses} pages");
    // Four outputs and the scratch buffer at once, and what each space keeps for itself.
    assert!(held <= 2 * (4 * 41 + 10), "{held} pages");
    drop(compiler);
    for Kept(at, pattern) in kept {
        pattern.check(&*device, at.0);
        memory_compiler::free(at).expect("live");
    }
    assert!(device.is_empty());
}

/// Sizes that never repeat in a small range, and a few outputs of any age in between.
#[test]
fn survivors_of_any_size_and_age_leave_room_for_the_next() {
    let (device, mut compiler) = compiler(4_096);
    let mut random = 1_u64;
    let mut below = |limit: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % limit
    };
    let mut kept: Vec<Kept> = Vec::new();
    let mut made = 0;
    for n in 0..6_000 {
        let step = compiler.begin("step").expect("a step");
        for _ in 0..4 {
            // Few classes, so that most positions are known to survive.
            let size = match below(3) {
                0 => 512 * (1 + below(7)),
                1 => PAGE * (1 + below(24)),
                _ => PAGE * (1 + below(12)) + 512 * below(3),
            };
            kept.push(Kept::new(&device, &step, size, n));
            made += size;
        }
        while kept.len() > 12 {
            // Now and then one stays for long.
            let at = (below(8) == 0) as usize * (kept.len() - 1);
            kept.swap_remove(at.max(below(6) as usize))
                .free(&device, &step);
        }
        step.finish().expect("the step ends well");
    }
    let stats = compiler.stats();
    println!("{made} bytes survived: {stats}");
    assert!(made > 50 * 4_096 * PAGE / 2, "{made} bytes are little");
    assert!(stats.survivor_positions > 30, "{stats}");
    drop(compiler);
    for Kept(at, pattern) in kept {
        pattern.check(&*device, at.0);
        memory_compiler::free(at).expect("live");
    }
    assert!(device.is_empty());
}

/// Runs one turn of a step: a buffer of so many pages, in a scope whose every turn is the same position.
fn turn(step: &Step<'_>, pages: u64) -> Result<Address, Error> {
    let _turn = memory_compiler::scope("turn");
    match step.alloc(Bytes(pages * PAGE))? {
        Allocation::Here(at) => Ok(at),
        Allocation::Elsewhere => panic!("no stream was named"),
    }
}

/// One step of 3,000 survivors, of which six live at once: their windows come back in the middle of it; not
/// while the layout is pinned, when the step is told so and loses nothing.
#[test]
fn addresses_come_back_within_a_step_unless_the_layout_is_pinned() {
    let (device, mut compiler) = compiler(256);
    for pages in 1..=8 {
        let step = compiler.begin("step").expect("a step");
        let at = turn(&step, pages).expect("one buffer");
        step.finish().expect("the step ends well");
        compiler.begin("other").expect("a step").abort();
        memory_compiler::free(at).expect("live");
    }
    assert_eq!(compiler.stats().survivor_positions, 8);
    for is_pinned in [false, true, false] {
        let pinned = is_pinned.then(|| compiler.pin_layout().expect("no step is leaked"));
        let step = compiler.begin("step").expect("a step");
        let mut random = 5_u64;
        let (mut live, mut refused) = (Vec::new(), 0);
        for n in 0..3_000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let pages = 1 + (random >> 40) % 8;
            let pattern = Pattern {
                seed: n,
                size: pages * PAGE,
            };
            match turn(&step, pages) {
                Ok(at) => {
                    pattern.write(&*device, at.0);
                    live.push(Kept(at, pattern));
                }
                Err(Error::AddressSpace { .. }) if is_pinned => refused += 1,
                Err(error) => panic!("event {n}: {error}"),
            }
            if live.len() > 6 {
                live.swap_remove((random >> 50) as usize % 6)
                    .free(&device, &step);
            }
        }
        assert_eq!(refused > 0, is_pinned, "{refused} were refused");
        assert_eq!(step.stats().survivors, 0);
        live.into_iter().for_each(|kept| kept.free(&device, &step));
        let report = step.finish().expect("the step ends well");
        assert_eq!((report.recorded, report.survivors), (0, 3_000 - refused));
        drop(pinned);
    }
    drop(compiler);
    assert!(device.is_empty());
}

/// Steps until `count` sizes of 1, 2, … pages are known to survive.
fn taught(compiler: &mut Compiler, count: u64) {
    for pages in 1..=count {
        let step = compiler.begin("step").expect("a step");
        let at = here(&step, pages * PAGE);
        step.finish().expect("the step ends well");
        compiler.begin("other").expect("a step").abort();
        memory_compiler::free(at).expect("live");
    }
    assert_eq!(compiler.stats().survivor_positions, count);
}

/// The device refuses while windows are taken away: nothing is lost, and later they go.
#[test]
fn windows_that_the_device_does_not_take_back_yet_are_taken_away_later() {
    for call in [Call::Unmap, Call::Synchronise, Call::Map, Call::Allow] {
        for n in 0..12 {
            let (device, mut compiler) = compiler(256);
            taught(&mut compiler, 12);
            let mut kept: VecDeque<Kept> = VecDeque::new();
            let (mut failures, mut errors) = (0, 0);
            for round in 0..60 {
                if round == 8 {
                    let error = DeviceError::Driver { call, code: 999 };
                    device
                        .upstream()
                        .fail_call_at(call, n, error, Repeat::Always);
                } else if round == 30 {
                    failures = device.upstream().failures();
                    device.upstream().disarm();
                }
                let step = compiler.begin("step").expect("a step");
                for nth in 0..4 {
                    let pages = 1 + (round * 5 + nth * 7) % 12;
                    let pattern = Pattern {
                        seed: round * 4 + nth,
                        size: pages * PAGE,
                    };
                    match step.alloc(Bytes(pattern.size)) {
                        Ok(Allocation::Here(at)) => {
                            pattern.write(&*device, at.0);
                            kept.push_back(Kept(at, pattern));
                        }
                        Err(error) => {
                            let typed =
                                matches!(error, Error::Device { .. } | Error::AddressSpace { .. });
                            assert!(typed && (8..30).contains(&round), "{round}: {error}");
                            errors += 1;
                        }
                        other => panic!("{other:?}"),
                    }
                }
                while kept.len() > 6 {
                    kept.pop_front().expect("seven").free(&device, &step);
                }
                kept.iter()
                    .for_each(|Kept(at, pattern)| pattern.check(&*device, at.0));
                step.finish().expect("the step ends well");
            }
            assert!(errors == 0 || failures > 0);
            drop(compiler);
            for Kept(at, pattern) in kept {
                pattern.check(&*device, at.0);
                memory_compiler::free(at).expect("live");
            }
            assert!(device.is_empty(), "{call:?} {n}: {:?}", device.books());
        }
    }
}

/// A step of a program whose outputs fill the survivors' half over and over.
#[derive(Clone, Debug)]
struct Round {
    /// Pages and odd units of each output, and how many later steps it lives in.
    outputs: Vec<(u64, u64, usize)>,
    trims: bool,
    aborts: bool,
}

fn rounds() -> impl Strategy<Value = Vec<Round>> {
    let output = (0_u64..7, 0_u64..2, 0_usize..3);
    let round = (prop::collection::vec(output, 0..5), 0_u8..24, 0_u8..24).prop_map(
        |(outputs, trims, aborts)| Round {
            outputs,
            trims: trims == 0,
            aborts: aborts == 0,
        },
    );
    prop::collection::vec(round, 100..260)
}

/// Runs a program against the reference model; returns how often windows were taken away.
fn run(rounds: &[Round]) -> u32 {
    let options = Options {
        address_space: Bytes(384 * PAGE),
        ..Options::default()
    };
    let mut pair = Pair::new(Bytes(PAGE), options);
    let mut kept: Vec<(usize, u64)> = Vec::new();
    let mut sweeps = 0;
    for (number, round) in rounds.iter().enumerate() {
        if round.trims {
            pair.trim();
        }
        let before = pair.compiler().stats().virtual_bytes;
        let mut run = pair.begin("step");
        sweeps += u32::from(run.step.stats().virtual_bytes.0 + 16 * PAGE < before.0);
        let scratch = run.here(2 * PAGE);
        for &(pages, odd, age) in &round.outputs {
            let at = run.here((pages * PAGE + odd * 512).max(512));
            kept.push((number + age, at));
        }
        run.free(scratch, true);
        kept.retain(|&(until, at)| {
            let stays = until > number;
            if !stays {
                run.free(at, true);
            }
            stays
        });
        if round.aborts {
            run.abort(true);
        } else {
            run.finish();
        }
    }
    pair.end();
    sweeps
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Against the reference model: what survives is disjoint from all that lives and from every frame that an
    /// edge mentions, keeps its contents, and is never refused.
    #[test]
    fn what_survives_in_a_small_range_is_served_as_the_model_says(rounds in rounds()) {
        run(&rounds);
    }
}

/// The property above proves something only while its programs do.
#[test]
fn the_programs_of_survivors_have_windows_taken_away() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let sweeps: u32 = (0..64)
        .map(|_| run(&rounds().new_tree(&mut runner).expect("one").current()))
        .sum();
    println!("{sweeps} sweeps");
    assert!(sweeps > 30, "{sweeps} are few");
}
