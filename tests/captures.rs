//! Layouts that are pinned for a captured graph. A launch is simulated by what it does: every buffer of the captured
//! step is written again, wherever its address is by then. Whoever else lives must not see it.

mod reference;

use std::sync::Arc;

use memory_compiler::device::StreamId;
use memory_compiler::device::adaptor::Streams;
use memory_compiler::{
    Address, Allocation, Bytes, Compiler, Error, Options, PinnedLayout, Step, Uncapturable,
};

use reference::devices::{CountingHost, Pattern, counting_host};
use reference::storm::Random;

const PAGE: u64 = 4096;
const OWN: StreamId = StreamId(0);

struct World {
    counting: CountingHost,
    streams: Arc<Streams<CountingHost>>,
    compiler: Compiler,
    seeds: u64,
}

/// A buffer and what is in it.
#[derive(Clone, Copy, Debug)]
struct Buffer(Address, Pattern);

/// What was captured: the buffers of a step, in order.
type Graph = Vec<Buffer>;

impl World {
    fn new() -> Self {
        let counting = counting_host(Bytes(PAGE));
        let streams = Arc::new(Streams::new(counting.clone()));
        let compiler = Compiler::new(streams.clone(), Options::default()).unwrap();
        Self {
            counting,
            streams,
            compiler,
            seeds: 0,
        }
    }

    fn buffer(&mut self, at: Address, size: u64) -> Buffer {
        self.seeds += 1;
        let seed = self.seeds;
        let buffer = Buffer(at, Pattern { seed, size });
        self.write(buffer);
        buffer
    }

    fn write(&self, Buffer(at, pattern): Buffer) {
        pattern.write(&*self.counting, at.0);
    }

    fn check(&self, Buffer(at, pattern): Buffer) {
        pattern.check(&*self.counting, at.0);
    }

    fn free(&self, buffer: Buffer) {
        self.check(buffer);
        memory_compiler::free(buffer.0).expect("it is live");
    }

    /// A step of these sizes, all live at once, of which the kept ones outlive it; `Err` with what was refused.
    fn step(&mut self, name: &str, sizes: &[u64], kept: &[usize]) -> Result<Graph, Error> {
        let mut made = Graph::new();
        let step = self.compiler.begin(name).unwrap();
        let mut refused = None;
        let mut addresses = Vec::new();
        for &size in sizes {
            match step.alloc(Bytes(size)) {
                Ok(Allocation::Here(at)) => addresses.push((at, size)),
                Ok(Allocation::Elsewhere) => panic!("no stream was named"),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        step.snapshot().validate().unwrap();
        for (index, &(at, _)) in addresses.iter().enumerate() {
            if !kept.contains(&index) {
                step.free(at).unwrap();
            }
        }
        let ended = match refused {
            Some(error) => {
                step.abort();
                Err(error)
            }
            None => step.finish().map(drop),
        };
        if let Err(error) = ended {
            // What it returned goes with its graph.
            for &(at, _) in kept.iter().filter_map(|&index| addresses.get(index)) {
                drop(memory_compiler::free(at));
            }
            return Err(error);
        }
        for (at, size) in addresses {
            made.push(self.buffer(at, size));
        }
        Ok(made)
    }

    fn capture(&mut self, name: &str, sizes: &[u64], kept: &[usize]) -> Result<Graph, Error> {
        self.streams.set_capturing(OWN, true);
        let graph = self.step(name, sizes, kept);
        self.streams.set_capturing(OWN, false);
        graph
    }

    fn launch(&self, graph: &Graph) {
        graph.iter().for_each(|&buffer| self.write(buffer));
    }

    fn pin(&mut self) -> PinnedLayout {
        self.compiler.pin_layout().unwrap()
    }

    fn end(self) {
        drop(self.compiler);
        assert!(self.counting.is_empty(), "{:?}", self.counting.books());
    }
}

const SIZES: [u64; 4] = [3 * PAGE, 512, 2 * PAGE + 512, PAGE];

#[test]
fn what_survives_for_the_first_time_is_not_under_a_later_launch() {
    let mut world = World::new();
    for _ in 0..3 {
        world.step("step", &SIZES, &[]).unwrap();
    }
    let pinned = world.pin();
    let graph = world.capture("step", &SIZES, &[]).unwrap();
    let stats = world.compiler.stats();
    assert_eq!((stats.recorded_step, stats.survivors), (0, 0), "{stats}");
    for index in 0..SIZES.len() {
        // The same step again, not captured: one of its buffers survives for the first time.
        let kept = world.step("step", &SIZES, &[index]).unwrap()[index];
        world.launch(&graph);
        world.free(kept);
    }
    // So does one of a step that nobody saw before.
    let kept = world.step("new", &[PAGE, 5 * PAGE], &[1]).unwrap()[1];
    world.launch(&graph);
    world.free(kept);
    drop(pinned);
    let held = world.compiler.stats().held;
    world.compiler.compile().unwrap();
    world.compiler.trim().unwrap();
    world.step("step", &SIZES, &[]).unwrap();
    let stats = world.compiler.stats();
    assert_eq!(
        (stats.recorded_step, stats.breaks_total),
        (0, 0),
        "nothing was forgotten: {stats}"
    );
    assert!(stats.held < held);
    world.end();
}

#[test]
fn what_a_captured_step_returned_stays_its_own_when_it_is_dropped() {
    let mut world = World::new();
    for _ in 0..5 {
        let output = world.step("step", &SIZES, &[2]).unwrap()[2];
        world.free(output);
        world.compiler.begin("other").unwrap().finish().unwrap();
    }
    let pinned = world.pin();
    let graph = world.capture("step", &SIZES, &[2]).unwrap();
    world.launch(&graph);
    world.free(graph[2]);
    // Everything that may be made since then lies elsewhere.
    let mut kept = Vec::new();
    for round in 0..20 {
        let sizes = SIZES.map(|size| size + 512 * (round % 4));
        kept.push(world.step("step", &sizes, &[1, 2]).unwrap()[2]);
        world.launch(&graph);
        kept.iter().for_each(|&buffer| world.check(buffer));
    }
    drop(pinned);
    let live: Vec<(Address, Bytes)> = world.compiler.snapshot().live;
    live.into_iter()
        .for_each(|(at, _)| memory_compiler::free(at).unwrap());
    world.end();
}

#[test]
fn a_capture_of_what_is_not_recorded_is_refused_and_leaves_nothing_behind() {
    for is_pinned in [false, true] {
        let mut world = World::new();
        world.step("step", &SIZES, &[]).unwrap();
        let before = world.compiler.stats();
        let pinned = is_pinned.then(|| world.pin());
        let more = [&SIZES[..], &[7 * PAGE]].concat();
        let refused = world.capture("step", &more, &[]).unwrap_err();
        let expected = Error::Captured {
            scope: "step".to_owned(),
            size: Bytes(7 * PAGE),
            reason: Uncapturable::NotRecorded,
        };
        assert_eq!(refused, expected);
        let calls = world.counting.memory_calls();
        drop(pinned);
        let after = world.compiler.stats();
        assert_eq!(
            (after.held, after.live, after.edges),
            (before.held, before.live, before.edges)
        );
        assert_eq!(world.counting.memory_calls(), calls);
        // Captured again, and then recorded.
        let pinned = world.pin();
        world.capture("step", &SIZES, &[]).unwrap();
        drop(pinned);
        world.step("step", &more, &[]).unwrap();
        assert_eq!(world.compiler.stats().recorded_step, 1);
        let pinned = world.pin();
        world.capture("step", &more, &[]).unwrap();
        drop(pinned);
        world.end();
    }
}

/// Two branches share their pages: what the second returns for the first time lies where the first writes.
#[test]
fn what_outlives_a_captured_step_where_another_writes_is_told() {
    let mut world = World::new();
    for _ in 0..2 {
        world.step("cond", &SIZES, &[]).unwrap();
        world.step("uncond", &[5 * PAGE, PAGE], &[]).unwrap();
    }
    let pinned = world.pin();
    world.capture("cond", &SIZES, &[]).unwrap();
    let told = world
        .capture("uncond", &[5 * PAGE, PAGE], &[0])
        .unwrap_err();
    let expected = Error::Captured {
        scope: "uncond".to_owned(),
        size: Bytes(5 * PAGE),
        reason: Uncapturable::Overwritten,
    };
    assert_eq!(told, expected);
    drop(pinned);
    // The cure that the error names.
    let kept = world.step("uncond", &[5 * PAGE, PAGE], &[0]).unwrap()[0];
    world.step("cond", &SIZES, &[]).unwrap();
    world.free(kept);
    world.step("uncond", &[5 * PAGE, PAGE], &[]).unwrap();
    let pinned = world.pin();
    let first = world.capture("cond", &SIZES, &[]).unwrap();
    let second = world.capture("uncond", &[5 * PAGE, PAGE], &[0]).unwrap();
    world.launch(&first);
    world.free(second[0]);
    drop(pinned);
    world.end();
}

#[test]
fn a_capture_that_begins_or_ends_within_a_step_writes_nothing_of_the_rest() {
    let mut world = World::new();
    for _ in 0..3 {
        world.step("step", &SIZES, &[]).unwrap();
    }
    let pinned = world.pin();
    // Captured from the first to the second buffer, then the step goes on without.
    world.streams.set_capturing(OWN, true);
    let step = world.compiler.begin("step").unwrap();
    let at = |step: &Step<'_>, size: u64| match step.alloc(Bytes(size)) {
        Ok(Allocation::Here(at)) => at,
        other => panic!("{other:?}"),
    };
    let captured = [at(&step, SIZES[0]), at(&step, SIZES[1])];
    world.streams.set_capturing(OWN, false);
    let rest = [at(&step, SIZES[2]), at(&step, SIZES[3])];
    captured.into_iter().for_each(|at| step.free(at).unwrap());
    step.finish().unwrap();
    let captured = [0, 1].map(|index| world.buffer(captured[index], SIZES[index]));
    let rest = [0, 1].map(|index| world.buffer(rest[index], SIZES[2 + index]));
    captured.into_iter().for_each(|buffer| world.write(buffer));
    rest.into_iter().for_each(|buffer| world.free(buffer));
    // Captured from the second buffer on: which was recorded beside the first, and not alone.
    let step = world.compiler.begin("step").unwrap();
    let first = at(&step, SIZES[0]);
    world.streams.set_capturing(OWN, true);
    let refused = step.alloc(Bytes(SIZES[1])).unwrap_err();
    assert!(matches!(refused, Error::Captured { .. }), "{refused}");
    world.streams.set_capturing(OWN, false);
    step.free(first).unwrap();
    step.finish().unwrap();
    drop(pinned);
    world.end();
}

#[test]
fn a_pinned_layout_outlives_its_compiler() {
    let mut world = World::new();
    for _ in 0..3 {
        world.step("step", &SIZES, &[]).unwrap();
    }
    let (first, second) = (world.pin(), world.pin());
    let graph = world.capture("step", &SIZES, &[]).unwrap();
    let World {
        counting,
        compiler,
        streams,
        ..
    } = world;
    let held = counting.books().held;
    drop(compiler);
    drop(first);
    assert_eq!(counting.books().held, held);
    let write = |&Buffer(at, pattern): &Buffer| {
        pattern.write(&*counting, at.0);
        pattern.check(&*counting, at.0);
    };
    graph.iter().for_each(write);
    // The last guard gives all back, on whatever thread.
    std::thread::spawn(move || drop(second)).join().unwrap();
    assert!(counting.is_empty(), "{:?}", counting.books());
    drop(streams);
}

#[test]
fn guards_and_compilers_that_go_on_two_threads_leave_nothing() {
    for _ in 0..300 {
        let mut world = World::new();
        world.step("step", &SIZES, &[]).unwrap();
        let kept = world.step("step", &SIZES, &[0]).unwrap()[0];
        let (first, second) = (world.pin(), world.pin());
        let World {
            counting, compiler, ..
        } = world;
        std::thread::scope(|scope| {
            scope.spawn(move || drop(first));
            scope.spawn(move || drop(second));
            scope.spawn(move || drop(compiler));
            scope.spawn(move || memory_compiler::free(kept.0).unwrap());
        });
        assert!(counting.is_empty(), "{:?}", counting.books());
    }
}

/// Random steps with pins, captures and launches in between: what lives is never written by a launch, and what is
/// captured is where it was recorded.
#[test]
fn no_launch_of_any_program_writes_into_a_buffer_of_others() {
    let (mut captures, mut refusals, mut launches) = (0, [0; 2], 0);
    for seed in 0..400 {
        let mut random = Random(seed);
        let mut world = World::new();
        let mut pins: Vec<PinnedLayout> = Vec::new();
        let mut graphs: Vec<Graph> = Vec::new();
        let mut kept: Vec<Buffer> = Vec::new();
        let names = ["cond", "uncond", "decode"];
        let shapes: Vec<Vec<u64>> = (0..3)
            .map(|_| {
                let count = 1 + random.below(6);
                let size = |random: &mut Random| match random.below(3) {
                    0 => 512 * (1 + random.below(7)),
                    _ => 512 * (1 + random.below(40)),
                };
                (0..count).map(|_| size(&mut random)).collect()
            })
            .collect();
        for _ in 0..60 {
            match random.below(12) {
                0 => pins.push(world.pin()),
                1 if !pins.is_empty() => {
                    drop(pins.swap_remove(random.below(pins.len() as u64) as usize));
                    if pins.is_empty() {
                        graphs.clear();
                    }
                }
                2..5 if !pins.is_empty() => {
                    let which = random.below(3) as usize;
                    // Now and then one of its buffers outlives it.
                    let index = random.below(shapes[which].len() as u64 * 2) as usize;
                    let keeps: &[usize] = if index < shapes[which].len() {
                        &[index]
                    } else {
                        &[]
                    };
                    match world.capture(names[which], &shapes[which], keeps) {
                        Ok(graph) => {
                            captures += 1;
                            kept.extend(keeps.iter().map(|&index| graph[index]));
                            graphs.push(graph);
                        }
                        Err(Error::Captured { reason, .. }) => {
                            refusals[usize::from(reason == Uncapturable::Overwritten)] += 1;
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                5..7 => {
                    graphs.iter().for_each(|graph| world.launch(graph));
                    launches += graphs.len();
                    // What the graphs' own results hold now is what they wrote last.
                    for buffer in &mut kept {
                        let own =
                            |other: &&Buffer| other.0 == buffer.0 && other.1.size == buffer.1.size;
                        if let Some(last) = graphs.iter().flatten().rfind(own) {
                            *buffer = *last;
                        }
                    }
                }
                7 => {
                    let done = (
                        world.compiler.compile().map(drop),
                        world.compiler.trim().map(drop),
                    );
                    let expected = if pins.is_empty() {
                        Ok(())
                    } else {
                        Err(Error::Pinned)
                    };
                    assert_eq!(done, (expected.clone(), expected));
                }
                _ => {
                    let which = random.below(3) as usize;
                    let sizes = &shapes[which];
                    let index = random.below(sizes.len() as u64 * 3) as usize;
                    let keeps: &[usize] = if index < sizes.len() { &[index] } else { &[] };
                    let made = world.step(names[which], sizes, keeps).unwrap();
                    kept.extend(keeps.iter().map(|&index| made[index]));
                }
            }
            while kept.len() > 5 {
                let buffer = kept.swap_remove(random.below(5) as usize);
                world.free(buffer);
            }
            world.compiler.snapshot().validate().unwrap();
        }
        drop(pins);
        kept.into_iter().for_each(|buffer| world.free(buffer));
        world.end();
    }
    println!("{captures} captures, {refusals:?} refused, {launches} launches");
    assert!(captures > 500 && refusals.iter().all(|&count| count > 50) && launches > 500);
}
