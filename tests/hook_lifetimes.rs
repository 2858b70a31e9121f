//! Buffers that outlive their step, with real contents through the CPU hook: of any number, age and
//! pattern. They cost their bytes and never a page each, and the steps settle to no break and no call.

use std::collections::VecDeque;
use std::sync::Arc;

use memory_compiler::device::adaptor::Counting;
use memory_compiler::device::{Device, Host};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::{Bytes, Compiler, Error, Options, Stats, scope};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

const KIB: usize = 1 << 10;
/// Far larger than the survivors below: a page for each would be seen.
const GRANULE: Bytes = Bytes::kib(256);

type Buffer = Vec<u32>;

fn filled(bytes: usize, seed: u32) -> Buffer {
    (0..bytes as u32 / 4)
        .map(|i| i.wrapping_mul(2_654_435_761) ^ seed)
        .collect()
}

#[track_caller]
fn check(buffer: &Buffer, seed: u32) {
    let expected = |i: usize| (i as u32).wrapping_mul(2_654_435_761) ^ seed;
    assert!(
        buffer
            .iter()
            .enumerate()
            .all(|(i, &word)| word == expected(i)),
        "buffer {seed} was overwritten"
    );
}

struct World {
    device: Arc<Counting<Host>>,
    compiler: Compiler,
    random: u64,
}

impl World {
    fn new() -> Self {
        let device = Arc::new(Counting::new(Host::new(GRANULE).unwrap()));
        let options = Options {
            address_space: Bytes::gib(8),
            ..Options::default()
        };
        let compiler = Compiler::new(Arc::clone(&device) as Arc<dyn Device>, options).unwrap();
        Self {
            device,
            compiler,
            random: 1,
        }
    }

    /// Scratch buffers of a step around what `f` keeps.
    fn step<T>(&mut self, f: impl FnOnce() -> T) -> T {
        let kept = self.compiler.step(|| {
            let _body = scope("body");
            let large = filled(300 * KIB, 1);
            let kept = f();
            let tail = filled(100 * KIB, 2);
            check(&large, 1);
            check(&tail, 2);
            Ok::<_, Error>(kept)
        });
        kept.unwrap()
    }

    fn settled(&mut self) -> Stats {
        let stats = self.compiler.stats();
        assert_eq!(
            (stats.breaks_step, stats.device_calls_step),
            (0, 0),
            "{stats}"
        );
        stats
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % limit
    }

    /// Ends the compiler before `kept`, which stays readable until it goes too.
    fn end(self, kept: impl IntoIterator<Item = (Buffer, u32)>) {
        let Self {
            device, compiler, ..
        } = self;
        drop(compiler);
        for (buffer, seed) in kept {
            assert!(!device.is_empty());
            check(&buffer, seed);
        }
        assert!(device.is_empty(), "left behind: {:?}", device.books());
    }
}

/// Keeps the last `count` outputs of 40 KiB; calls and breaks must be gone after `settles` steps.
fn last_outputs(count: usize, settles: u32) -> Stats {
    let mut world = World::new();
    let mut kept: VecDeque<(Buffer, u32)> = VecDeque::new();
    for n in 0..settles + 20 {
        let output = world.step(|| filled(40 * KIB, n));
        kept.push_back((output, n));
        kept.iter().for_each(|(buffer, seed)| check(buffer, *seed));
        if kept.len() > count {
            kept.pop_front();
        }
        if n >= settles {
            world.settled();
        }
    }
    let stats = world.compiler.stats();
    world.end(kept);
    stats
}

#[test]
fn one_output_is_kept() {
    let stats = last_outputs(1, 4);
    assert!(stats.held.0 <= stats.floor.0 + 2 * GRANULE.0, "{stats}");
}

#[test]
fn the_last_three_outputs_are_kept() {
    last_outputs(3, 7);
}

#[test]
fn hundreds_of_outputs_are_kept() {
    let stats = last_outputs(300, 305);
    assert_eq!(stats.survivors, 300);
    assert!(
        stats.held.0 <= stats.floor.0 + 4 * GRANULE.0,
        "a page each would be {} MiB: {stats}",
        300 / 4
    );
}

#[test]
fn every_block_keeps_one_and_the_report_names_the_scope() {
    const BLOCKS: usize = 40;
    let mut world = World::new();
    let mut kept: Vec<(Buffer, u32)> = Vec::new();
    for n in 0..12 {
        let old = std::mem::take(&mut kept);
        kept = world.step(|| {
            let block = |i: usize| {
                let _block = scope("block");
                let seed = (n * BLOCKS + i) as u32;
                let scratch = filled(50 * KIB, seed);
                if let Some((buffer, seed)) = old.get(i) {
                    check(buffer, *seed);
                }
                check(&scratch, seed);
                (filled(20 * KIB, seed), seed)
            };
            let new = (0..BLOCKS).map(block).collect();
            drop(old);
            new
        });
        if n >= 4 {
            world.settled();
        }
    }
    let stats = world.compiler.stats();
    let positions = |path: &str| {
        let scope = stats.scopes.iter().find(|scope| scope.path == path);
        scope.map(|scope| scope.survivor_positions)
    };
    assert!(
        positions("step/body/block") >= Some(1),
        "{:?}",
        stats.scopes
    );
    assert_eq!(positions("step/body"), Some(0));
    let sum: u64 = stats
        .scopes
        .iter()
        .map(|scope| scope.survivor_positions)
        .sum();
    assert_eq!(sum, stats.survivor_positions);
    let shown = stats.to_string();
    assert!(
        shown.contains("positions whose buffers do: step/body/block ("),
        "{shown}"
    );
    let bytes = 3 * (BLOCKS * 20 * KIB) as u64;
    assert!(
        stats.held.0 <= 600 * 1024 + bytes + 2 * GRANULE.0,
        "{stats}"
    );
    world.end(kept);
}

#[test]
fn a_history_that_grows_costs_its_bytes() {
    let mut world = World::new();
    let mut history = Vec::with_capacity(1000);
    let mut held = Vec::new();
    for n in 0..200 {
        let new = world.step(|| filled(20 * KIB, n));
        history.push((new, n));
        let stats = world.compiler.stats();
        assert!(n < 4 || stats.breaks_step == 0, "step {n}: {stats}");
        held.push(stats.held.0);
    }
    history
        .iter()
        .for_each(|(buffer, seed)| check(buffer, *seed));
    let grown = held[199] - held[9];
    let bytes = 190 * 20 * KIB as u64;
    assert!(
        grown <= bytes + bytes / 8 + GRANULE.0,
        "{grown} for {bytes} bytes"
    );
    world.end(history);
}

#[test]
fn a_cache_that_is_replaced_irregularly_keeps_its_contents() {
    let mut world = World::new();
    let mut cache: Vec<Option<(Buffer, u32)>> = (0..8).map(|_| None).collect();
    let mut clean = 0;
    for n in 0..300 {
        let slot = world.below(12) as usize;
        let fresh = world.step(|| filled((20 + 4 * (slot % 3)) * KIB, n));
        if let Some(place) = cache.get_mut(slot) {
            *place = Some((fresh, n));
        }
        for (buffer, seed) in cache.iter().flatten() {
            check(buffer, *seed);
        }
        let stats = world.compiler.stats();
        clean += u32::from(n >= 200 && (stats.breaks_step, stats.device_calls_step) == (0, 0));
    }
    assert_eq!(clean, 100, "{}", world.compiler.stats());
    world.end(cache.into_iter().flatten());
}

#[test]
fn buffers_of_any_age_keep_their_contents() {
    let mut world = World::new();
    let mut kept: Vec<(u32, Buffer, u32)> = Vec::new();
    for n in 0..300 {
        let age = world.below(20) as u32;
        let (output, feature) = world.step(|| (filled(40 * KIB, n), filled(24 * KIB, !n)));
        kept.retain(|(until, buffer, seed)| {
            check(buffer, *seed);
            *until > n
        });
        kept.push((n + age, output, n));
        kept.push((n + age / 3, feature, !n));
        let stats = world.compiler.stats();
        assert!(n < 100 || stats.breaks_step == 0, "step {n}: {stats}");
    }
    world.end(kept.into_iter().map(|(_, buffer, seed)| (buffer, seed)));
}

#[test]
fn an_output_is_read_after_the_compiler_is_gone() {
    for warm in 0..5 {
        let mut world = World::new();
        for n in 0..warm {
            let output = world.step(|| filled(40 * KIB, n));
            check(&output, n);
        }
        let output = world.step(|| filled(40 * KIB, 99));
        let other = world.step(|| filled(40 * KIB, 98));
        world.end([(output, 99), (other, 98)]);
    }
}
