//! Weights that come in while other work runs: on `Host` with streams whose work runs in any legal order,
//! and with a thread that copies. What the work reads is compared with what the weights are.

mod reference;

use std::sync::Arc;
use std::sync::Mutex;

use memory_compiler::device::adaptor::{Counting, Repeat, Streams, Work};
use memory_compiler::device::{Call, Device, DeviceError, HostMemory, MemoryInfo, StreamId};
use memory_compiler::pager::{Ahead, Group, OnStream, OnThread, Pager, Part};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options};

use reference::devices::{CountingHost, limited_host};

const PAGE: u64 = 4096;
const WORK: StreamId = StreamId(1);
const PROGRAMS: u64 = 10_000;

type Device1 = Arc<Counting<Streams<CountingHost>>>;

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % end
    }
}

fn pages(count: u64) -> Bytes {
    Bytes(count * PAGE)
}

fn device() -> Device1 {
    let host = limited_host(Bytes(PAGE), Bytes(u64::MAX));
    Arc::new(Counting::new(Streams::new(host)))
}

/// A model: groups of weights, one after the other, in an image of the host.
struct Model {
    ahead: Ahead,
    groups: Vec<(Group, Bytes, Bytes)>,
    image: Arc<HostMemory>,
    base: Address,
}

/// Work that reads, and what it must see.
struct Read {
    work: Work,
    truth: Vec<u8>,
}

impl Model {
    /// Groups of these sizes in bytes.
    fn new(device: &Device1, pager: &Pager, sizes: &[u64], seed: u64) -> Self {
        let size = Bytes(sizes.iter().sum());
        let range = pager.range(size).unwrap();
        let base = range.base();
        let mut image = device.host_memory(size).unwrap();
        let mut random = Random(seed);
        for word in image.bytes_mut().chunks_mut(8) {
            let bytes = random.below(u64::MAX).to_le_bytes();
            word.copy_from_slice(&bytes[..word.len()]);
        }
        let image = Arc::new(image);
        let shared: Arc<dyn Device> = Arc::clone(device) as _;
        let carrier = OnStream::new(shared, WORK, Arc::clone(&image)).unwrap();
        let mut ahead = Ahead::new(range, Box::new(carrier));
        let mut offset = 0;
        let groups = sizes.iter().map(|&size| {
            let part = (Bytes(offset), Bytes(size));
            offset += size;
            (ahead.group([part]).unwrap(), part.0, part.1)
        });
        let groups = groups.collect();
        Self {
            ahead,
            groups,
            image,
            base,
        }
    }

    fn read(&self, device: &Device1, group: usize) -> Read {
        let (_, offset, size) = self.groups[group];
        let at = Address(self.base.0 + offset.0);
        Read {
            work: device.upstream().enqueue_read(WORK, at, size),
            truth: self.image.bytes()[offset.0 as usize..(offset.0 + size.0) as usize].to_vec(),
        }
    }

    /// Enters a group, enqueues work that reads it twice, leaves it.
    fn run(&mut self, device: &Device1, group: usize, reads: &mut Vec<Read>) {
        self.ahead.enter(self.groups[group].0).unwrap();
        reads.push(self.read(device, group));
        reads.push(self.read(device, group));
        self.ahead.leave(self.groups[group].0);
    }

    fn step(&mut self, device: &Device1, reads: &mut Vec<Read>) {
        (0..self.groups.len()).for_each(|group| self.run(device, group, reads));
    }
}

fn check(device: &Device1, reads: &mut Vec<Read>) {
    for read in reads.drain(..) {
        match device.upstream().saw(read.work) {
            Some(Ok(seen)) => assert!(seen == read.truth, "work read other bytes than the weights"),
            other => panic!("work that did not read: {other:?}"),
        }
    }
}

#[test]
fn a_model_that_fits_is_copied_once_and_then_costs_no_call() {
    let device = device();
    let pager = Pager::with_limit(device.clone(), None, Some(pages(12))).unwrap();
    let mut model = Model::new(&device, &pager, &[3 * PAGE, 4 * PAGE, 5 * PAGE], 1);
    let mut reads = Vec::new();
    for step in 0..4 {
        let (calls, fences) = (device.memory_calls(), device.calls(Call::Fence));
        model.step(&device, &mut reads);
        device.upstream().run_all(step);
        check(&device, &mut reads);
        assert_eq!(model.ahead.stats().copied, pages(12));
        if step > 0 {
            assert_eq!(device.memory_calls(), calls);
            assert_eq!(
                device.calls(Call::Fence),
                fences,
                "nothing is to be ordered"
            );
        }
    }
}

#[test]
fn a_model_that_does_not_fit_streams_its_share_and_makes_no_memory_call() {
    for (frames, streamed) in [(56, 6), (40, 30), (24, 54), (20, 60), (14, 60)] {
        let device = device();
        let pager = Pager::with_limit(device.clone(), None, Some(pages(frames))).unwrap();
        let mut model = Model::new(&device, &pager, &[10 * PAGE; 6], 2);
        let mut reads = Vec::new();
        let (mut copied, mut calls, mut waits) = (Bytes::ZERO, 0, 0);
        for step in 0..8 {
            if step == 3 {
                (copied, calls) = (model.ahead.stats().copied, device.memory_calls());
                waits = device.calls(Call::Synchronise);
            }
            model.step(&device, &mut reads);
            device.upstream().run_all(step);
            check(&device, &mut reads);
            assert!(device.books().held_peak <= pages(frames));
        }
        assert_eq!(device.memory_calls(), calls, "{frames} frames");
        let copied = model.ahead.stats().copied.0 - copied.0;
        assert_eq!(copied, 5 * streamed * PAGE, "{frames} frames");
        assert_eq!(model.ahead.stats().arranged, 1);
        assert_eq!(device.calls(Call::Synchronise), waits, "{frames} frames");
    }
}

#[test]
fn the_next_group_is_in_memory_before_the_work_of_this_one_ran() {
    let device = device();
    let pager = Pager::with_limit(device.clone(), None, Some(pages(24))).unwrap();
    let mut model = Model::new(&device, &pager, &[8 * PAGE; 6], 3);
    let copies = device.copy_stream().unwrap();
    let mut reads = Vec::new();
    for step in 0..3 {
        model.step(&device, &mut reads);
        device.upstream().run_all(step);
    }
    check(&device, &mut reads);
    for group in 0..6 {
        model.ahead.enter(model.groups[group].0).unwrap();
        let read = model.read(&device, group);
        while device.upstream().run_next(copies) {}
        assert!(device.upstream().saw(read.work).is_none());
        let (_, offset, size) = model.groups[(group + 1) % 6];
        let mut seen = vec![0; size.0 as usize];
        let at = Address(model.base.0 + offset.0);
        device.read(at, &mut seen).unwrap();
        let is_in = seen == model.image.bytes()[offset.0 as usize..][..seen.len()];
        // The first one shares frames with the last one, and comes in after it.
        assert!(is_in || group == 5, "group {group}");
        model.ahead.leave(model.groups[group].0);
        reads.push(read);
        device.upstream().run_all(group as u64);
    }
    check(&device, &mut reads);
}

#[test]
fn a_thread_copies_the_next_group_while_this_one_is_in_use() {
    let device = limited_host(Bytes(PAGE), Bytes(u64::MAX));
    let pager = Pager::with_limit(device.clone(), None, Some(pages(24))).unwrap();
    let range = pager.range(pages(48)).unwrap();
    let base = range.base();
    let mut random = Random(8);
    let mut image: Vec<u8> = Vec::new();
    image.resize_with(48 * PAGE as usize, || random.below(256) as u8);
    let (target, source) = (device.clone(), image.clone());
    let fill = move |part: Part| {
        let from = part.offset.0 as usize;
        target.write(part.address, &source[from..from + part.size.0 as usize])
    };
    let mut ahead = Ahead::new(range, Box::new(OnThread::new(fill).unwrap()));
    let groups: Vec<Group> = (0..6)
        .map(|group| ahead.group([(pages(8 * group), pages(8))]).unwrap())
        .collect();
    let mut calls = 0;
    for step in 0..60 {
        if step == 3 {
            calls = device.memory_calls();
        }
        // Now and then another order.
        let order: Vec<usize> = match step % 20 {
            17 => vec![0, 1, 4, 5],
            18 => vec![0, 2, 1, 3, 5, 4],
            _ => (0..6).collect(),
        };
        for group in order {
            ahead.enter(groups[group]).unwrap();
            let (from, len) = (8 * group * PAGE as usize, 8 * PAGE as usize);
            let mut seen = vec![0; len];
            device
                .read(Address(base.0 + from as u64), &mut seen)
                .unwrap();
            assert!(
                seen == image[from..from + len],
                "step {step}, group {group}"
            );
            ahead.leave(groups[group]);
        }
        if step == 15 {
            assert_eq!(device.memory_calls(), calls);
        }
        assert!(device.books().held_peak <= pages(24));
    }
    let stats = ahead.stats();
    assert!(stats.copied_ahead.0 > stats.copied.0 / 2, "{stats:?}");
    drop((ahead, pager));
    assert!(device.is_empty());
}

#[test]
fn a_group_that_does_not_fit_is_told_what_it_needs() {
    let device = device();
    let pager = Pager::with_limit(device.clone(), None, Some(pages(8))).unwrap();
    let mut model = Model::new(&device, &pager, &[4 * PAGE, 9 * PAGE, 2 * PAGE], 4);
    let mut reads = Vec::new();
    for step in 0..3 {
        model.run(&device, 0, &mut reads);
        let refused = model.ahead.enter(model.groups[1].0);
        let (needed, limit) = (pages(9), pages(8));
        assert_eq!(refused, Err(Error::WeightBudget { needed, limit }));
        model.run(&device, 2, &mut reads);
        device.upstream().run_all(step);
        check(&device, &mut reads);
    }
    assert!(device.books().held_peak <= pages(8));
}

#[test]
fn a_second_model_takes_only_the_shortfall_and_the_first_one_only_takes_that_back() {
    let device = device();
    let pager = Pager::new(device.clone(), Some(pages(40))).unwrap();
    let mut model = Model::new(&device, &pager, &[6 * PAGE; 6], 5);
    let mut decoder = Model::new(&device, &pager, &[5 * PAGE; 2], 6);
    let mut reads = Vec::new();
    for turn in 0..4 {
        for _ in 0..3 {
            model.step(&device, &mut reads);
        }
        let before = (model.ahead.stats().copied, device.calls(Call::Map));
        model.step(&device, &mut reads);
        assert_eq!(
            (model.ahead.stats().copied, device.calls(Call::Map)),
            before
        );
        decoder.step(&device, &mut reads);
        let whole = model.ahead.range().size();
        let left = model.ahead.range().residency(Bytes::ZERO, whole).unwrap();
        assert_eq!(
            left.evicted,
            pages(6),
            "40 pages, of which 10 are the decoder's"
        );
        let maps = device.calls(Call::Map);
        model.step(&device, &mut reads);
        assert_eq!(model.ahead.stats().copied.0 - before.0.0, 6 * PAGE);
        assert_eq!(
            device.calls(Call::Map) - maps,
            6,
            "what was left alone costs no call"
        );
        device.upstream().run_all(turn);
        check(&device, &mut reads);
    }
}

#[test]
fn steps_take_from_streaming_weights_and_give_back_at_trim() {
    let device = device();
    let pager = Pager::new(device.clone(), Some(pages(40))).unwrap();
    let mut model = Model::new(&device, &pager, &[8 * PAGE; 6], 7);
    let options = Options {
        address_space: Bytes::mib(1),
        ..Options::default()
    };
    let mut compiler = Compiler::with_pager(&pager, options).unwrap();
    compiler.use_stream(WORK).unwrap();
    let mut reads = Vec::new();
    for step in 0..12 {
        let calls = device.memory_calls();
        let running = compiler.begin("step").unwrap();
        for group in 0..6 {
            let Allocation::Here(at) = running.alloc(pages(9)).unwrap() else {
                panic!("a step is active");
            };
            model.run(&device, group, &mut reads);
            running.free(at).unwrap();
        }
        running.finish().unwrap();
        device.upstream().run_all(step);
        check(&device, &mut reads);
        if step > 3 {
            assert_eq!(device.memory_calls(), calls, "step {step}");
        }
        assert!(device.books().held_peak <= pages(40));
    }
    compiler.trim().unwrap();
    for step in 0..4 {
        model.step(&device, &mut reads);
        device.upstream().run_all(step);
        check(&device, &mut reads);
    }
    assert_eq!(pager.stats().resident, pages(40));
}

/// A model, a decoder and steps on one budget, with faults.
struct World {
    random: Random,
    device: Device1,
    budget: u64,
    pager: Pager,
    compiler: Option<Compiler>,
    models: Vec<Model>,
    reads: Vec<Read>,
    armed: bool,
    entered: u64,
    refused: u64,
    failed: u64,
    steps: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let budget = 6 + random.below(40);
        let device = device();
        let weights = (random.below(2) == 0).then(|| pages(4 + random.below(budget - 4)));
        let pager = Pager::with_limit(device.clone(), Some(pages(budget)), weights).unwrap();
        Self {
            random,
            device,
            budget,
            pager,
            compiler: None,
            models: Vec::new(),
            reads: Vec::new(),
            armed: false,
            entered: 0,
            refused: 0,
            failed: 0,
            steps: 0,
        }
    }

    fn host(&self) -> &CountingHost {
        self.device.upstream().upstream()
    }

    fn disarm(&mut self) {
        self.host().upstream().disarm();
        self.armed = false;
    }

    fn arm(&mut self) {
        const CALLS: [Call; 5] = [
            Call::Create,
            Call::Map,
            Call::Allow,
            Call::Unmap,
            Call::Release,
        ];
        let call = CALLS[self.random.below(5) as usize];
        let n = self.random.below(6);
        let error = match self.random.below(3) {
            0 => DeviceError::NotReady,
            1 => {
                let (free, total) = (Bytes(0), pages(self.budget));
                DeviceError::OutOfMemory {
                    info: MemoryInfo { free, total },
                }
            }
            _ => DeviceError::Driver {
                call: Call::Map,
                code: 1,
            },
        };
        let repeat = if self.random.below(3) == 0 {
            Repeat::Always
        } else {
            Repeat::Once
        };
        let failing = self.host().upstream();
        failing.fail_call_at(call, n, error, repeat);
        self.armed = true;
    }

    fn add_model(&mut self) {
        self.disarm();
        let count = 1 + self.random.below(6);
        let half = PAGE / 2;
        let sizes: Vec<u64> = (0..count)
            .map(|_| (1 + self.random.below(12)) * half)
            .collect();
        let seed = self.random.below(u64::MAX);
        let model = Model::new(&self.device, &self.pager, &sizes, seed);
        self.models.push(model);
    }

    /// Enters a group, has work read it, perhaps another one beside or inside of it, and leaves it.
    fn run(&mut self, at: usize, group: usize, depth: u32) {
        let model = &mut self.models[at];
        let entered = model.ahead.enter(model.groups[group].0);
        match entered {
            Ok(()) => self.entered += 1,
            Err(Error::WeightBudget { needed, limit }) => {
                self.refused += 1;
                assert!(needed > Bytes::ZERO && limit <= pages(self.budget));
                return;
            }
            Err(error) => {
                assert!(
                    self.armed && matches!(error, Error::Device { .. }),
                    "{error}"
                );
                self.failed += 1;
                return;
            }
        }
        let read = model.read(&self.device, group);
        self.reads.push(read);
        if depth < 2 && self.random.below(8) == 0 {
            let other = self.random.below(self.models[at].groups.len() as u64) as usize;
            self.run(at, other, depth + 1);
            let read = self.models[at].read(&self.device, group);
            self.reads.push(read);
        }
        let model = &mut self.models[at];
        model.ahead.leave(model.groups[group].0);
        for _ in 0..self.random.below(6) {
            let stream = if self.random.below(2) == 0 {
                WORK
            } else {
                self.device.copy_stream().unwrap()
            };
            self.device.upstream().run_next(stream);
        }
    }

    fn round(&mut self) {
        let at = self.random.below(self.models.len() as u64) as usize;
        let count = self.models[at].groups.len();
        let skip = self.random.below(8);
        let with_step = self.random.below(3) == 0;
        let mut compiler = with_step.then(|| self.compiler.take()).flatten();
        let step = compiler
            .as_mut()
            .map(|compiler| compiler.begin("step").unwrap());
        for group in 0..count {
            if group as u64 == skip {
                continue;
            }
            let buffer = step
                .as_ref()
                .map(|step| step.alloc(pages(1 + group as u64 % 3)));
            self.run(at, group, 0);
            match buffer {
                Some(Ok(Allocation::Here(at))) => step.as_ref().unwrap().free(at).unwrap(),
                Some(Err(error)) => assert!(
                    matches!(
                        error,
                        Error::OverBudget { .. } | Error::OutOfMemory { .. } | Error::Device { .. }
                    ),
                    "{error}"
                ),
                Some(Ok(Allocation::Elsewhere)) => panic!("a step is active"),
                None => {}
            }
        }
        self.steps += u64::from(step.map(|step| step.finish().unwrap()).is_some());
        self.compiler = compiler.or(self.compiler.take());
    }

    fn operation(&mut self) {
        match self.random.below(32) {
            _ if self.models.is_empty() => self.add_model(),
            0 if self.models.len() < 3 => self.add_model(),
            1 => {
                self.disarm();
                let at = self.random.below(self.models.len() as u64) as usize;
                self.see();
                self.models.remove(at);
            }
            2 if self.compiler.is_none() => {
                self.disarm();
                let options = Options {
                    address_space: Bytes::mib(1),
                    ..Options::default()
                };
                let mut compiler = Compiler::with_pager(&self.pager, options).unwrap();
                compiler.use_stream(WORK).unwrap();
                self.compiler = Some(compiler);
            }
            3 => {
                self.disarm();
                self.compiler = None;
            }
            4 => {
                if let Some(compiler) = &mut self.compiler {
                    let trimmed = compiler.trim();
                    assert!(self.armed || trimmed.is_ok(), "{trimmed:?}");
                }
            }
            5 => {
                let evicted = self.models[0].ahead.range().evict();
                assert!(self.armed || evicted.is_ok(), "{evicted:?}");
            }
            6 => self.models[0].ahead.range().prioritise(),
            7 | 8 => self.arm(),
            9..=11 => self.disarm(),
            12..=14 => {
                let at = self.random.below(self.models.len() as u64) as usize;
                let group = self.random.below(self.models[at].groups.len() as u64) as usize;
                self.run(at, group, 0);
            }
            15 => self.see(),
            _ => self.round(),
        }
        let books = self.device.books();
        assert!(books.held_peak <= pages(self.budget), "over the budget");
        assert_eq!(
            books.held,
            self.pager.stats().used,
            "all that is held is claimed"
        );
        let stats = self.pager.stats();
        assert!(stats.resident <= stats.weights_limit);
    }

    /// Runs everything, and checks what the work saw.
    fn see(&mut self) {
        let seed = self.random.below(u64::MAX);
        self.device.upstream().run_all(seed);
        check(&self.device, &mut self.reads);
    }
}

#[test]
fn ten_thousand_programs_read_what_the_weights_are_and_stay_within_the_budget() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let total = Mutex::new([0_u64; 6]);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let total = &total;
            scope.spawn(move || {
                for seed in (thread..PROGRAMS).step_by(threads as usize) {
                    let run = std::panic::catch_unwind(|| {
                        let mut world = World::new(seed);
                        for _ in 0..10 + world.random.below(40) {
                            world.operation();
                        }
                        world.see();
                        world.disarm();
                        world.compiler = None;
                        let (mut ahead, mut arranged) = (0, 0);
                        for mut model in world.models.drain(..) {
                            ahead += model.ahead.stats().copied_ahead.0;
                            arranged += model.ahead.stats().arranged;
                        }
                        assert_eq!(world.pager.stats().used, Bytes::ZERO);
                        assert!(world.device.is_empty(), "{:?}", world.device.books());
                        [
                            world.entered,
                            world.refused,
                            world.failed,
                            world.steps,
                            ahead,
                            arranged,
                        ]
                    });
                    let reached = run.unwrap_or_else(|_| panic!("program {seed}"));
                    let mut total = total.lock().unwrap();
                    total
                        .iter_mut()
                        .zip(reached)
                        .for_each(|(sum, one)| *sum += one);
                }
            });
        }
    });
    let total = total.into_inner().unwrap();
    println!("entered, refused, failed, steps, bytes ahead, arranged: {total:?}");
    assert!(total.iter().all(|&count| count > PROGRAMS / 4), "{total:?}");
}
