//! Random programs of groups that are entered in any order, beside and inside of each other, of several models
//! and of steps on one budget, with faults; their work runs in any legal order. What it reads is compared with
//! what the weights are. At the end nothing is left.

mod reference;

use memory_compiler::device::adaptor::Repeat;
use memory_compiler::device::{Call, Device};
use memory_compiler::pager::Pager;
use memory_compiler::{Allocation, Bytes, Compiler, Error, Options};

use reference::devices::CountingHost;
use reference::many::sums;
use reference::weights::{Model, PAGE, Random, Read, StreamedHost, WORK, check, device, pages};

const PROGRAMS: u64 = 10_000;

/// A model, a decoder and steps on one budget, with faults.
struct World {
    random: Random,
    device: StreamedHost,
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
        let error = self.random.device_error(pages(self.budget));
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
            Err(Error::WeightBudget(short)) => {
                let (needed, limit) = (short.needed, short.limit);
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
    let total = sums(PROGRAMS, |seed| {
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
        assert_eq!(world.device.upstream().moments(), 0);
        [
            world.entered,
            world.refused,
            world.failed,
            world.steps,
            ahead,
            arranged,
        ]
    });
    println!("entered, refused, failed, steps, bytes ahead, arranged: {total:?}");
    assert!(total.iter().all(|&count| count > PROGRAMS / 4), "{total:?}");
}
