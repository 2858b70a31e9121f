//! Random programs of pin, also of what must be in at once, unpin, step, trim, prioritise, evict and device faults on one budget. After
//! each operation: the device holds what the budget says and never more than it allows, what is pinned
//! holds the bytes that its stamp promises. At the end nothing is left.

mod reference;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use memory_compiler::device::adaptor::Repeat;
use memory_compiler::device::{Call, Device};
use memory_compiler::pager::{PageOut, Pager, Pin, Pinned, Stamp, WeightRange};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options};

use reference::devices::{CountingHost, Pattern, limited_host};
use reference::many::sums;
use reference::weights::{PAGE, Random};

const PROGRAMS: u64 = 10_000;

/// What was saved of a writable range, by page.
type Saved = Arc<Mutex<HashMap<u64, Vec<u8>>>>;

/// Some bytes of a range, as their owner knows them.
struct Weight {
    offset: u64,
    bytes: Vec<u8>,
    since: Stamp,
    pins: Vec<Pinned>,
}

struct Model {
    range: WeightRange,
    weights: Vec<Weight>,
    saved: Option<Saved>,
}

#[derive(Default)]
struct Reached {
    resident: u64,
    refilled: u64,
    streamed: u64,
    told: u64,
    refused: u64,
    evictions: u64,
    step_errors: u64,
    replays: u64,
    saved: u64,
}

struct World {
    random: Random,
    device: CountingHost,
    budget: u64,
    pager: Pager,
    compiler: Option<Compiler>,
    models: Vec<Model>,
    /// Whether a call may fail.
    armed: bool,
    next_seed: u64,
    reached: Reached,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let budget = (2 + random.below(16)) * PAGE;
        // Every fourth device has less memory than the budget allows.
        let limit = if random.below(4) == 0 {
            budget / 2
        } else {
            u64::MAX
        };
        let device = limited_host(Bytes(PAGE), Bytes(limit.max(PAGE)));
        // Weights of every third one may have half of it, but for those that must be in at once.
        let weights = (random.below(3) == 0).then_some(Bytes((budget / 2).max(PAGE)));
        let pager = Pager::with_limit(device.clone(), Some(Bytes(budget)), weights).unwrap();
        Self {
            random,
            device,
            budget,
            pager,
            compiler: None,
            models: Vec::new(),
            armed: false,
            next_seed: seed << 16,
            reached: Reached::default(),
        }
    }

    fn contents(&mut self, size: u64) -> Vec<u8> {
        self.next_seed += 1;
        let mut random = Random(self.next_seed);
        (0..size.div_ceil(8))
            .flat_map(|_| random.below(u64::MAX).to_le_bytes())
            .take(size as usize)
            .collect()
    }

    fn disarm(&mut self) {
        self.device.upstream().disarm();
        self.armed = false;
    }

    fn arm(&mut self) {
        const CALLS: [Call; 6] = [
            Call::Create,
            Call::Map,
            Call::Allow,
            Call::Unmap,
            Call::Release,
            Call::Synchronise,
        ];
        let call = CALLS.get(self.random.below(8) as usize).copied();
        let n = self.random.below(8);
        let error = self.random.device_error(Bytes(self.budget));
        let repeat = if self.random.below(2) == 0 {
            Repeat::Once
        } else {
            Repeat::Always
        };
        match call {
            Some(call) => self.device.upstream().fail_call_at(call, n, error, repeat),
            None => self.device.upstream().fail_at(n, error, repeat),
        }
        self.armed = true;
    }

    fn add_model(&mut self) {
        self.disarm();
        let size = (1 + self.random.below(12)) * PAGE;
        let (range, saved) = if self.random.below(3) == 0 {
            let saved = Saved::default();
            let (device, store) = (self.device.clone(), Arc::clone(&saved));
            let mut refuse = Random(self.next_seed);
            let save = PageOut::new(move |leaving| {
                if refuse.below(8) == 0 {
                    return false;
                }
                let mut bytes = vec![0; leaving.size.0 as usize];
                device.read(leaving.address, &mut bytes).unwrap();
                store.lock().unwrap().insert(leaving.offset.0, bytes);
                true
            });
            (
                self.pager.writable_range(Bytes(size), save).unwrap(),
                Some(saved),
            )
        } else {
            (self.pager.range(Bytes(size)).unwrap(), None)
        };
        let mut weights = Vec::new();
        let mut offset = 0;
        while offset < size {
            // Writable weights are whole pages, so that a saved page has one owner.
            let unit = if saved.is_some() { PAGE } else { 512 };
            let size = ((1 + self.random.below(3 * PAGE / unit)) * unit).min(size - offset);
            let bytes = self.contents(size);
            weights.push(Weight {
                offset,
                bytes,
                since: Stamp::NEVER,
                pins: Vec::new(),
            });
            offset += size;
        }
        self.models.push(Model {
            range,
            weights,
            saved,
        });
    }

    fn pin(&mut self, model: usize, weight: usize) {
        let before = self.pager.stats();
        let is_beyond = self.random.below(4) == 0;
        // Writable pages may be refused to be saved.
        let may_stay = self.models.iter().any(|model| model.saved.is_some());
        let model = &mut self.models[model];
        let weight = &mut model.weights[weight];
        let (offset, size) = (Bytes(weight.offset), Bytes(weight.bytes.len() as u64));
        let pin = if is_beyond {
            match model.range.pin_beyond(offset, size, weight.since) {
                Ok(pinned) => Ok(Pin::Resident(pinned)),
                Err(Error::WeightBudget(short)) => {
                    let (needed, limit) = (short.needed, short.limit);
                    assert!(
                        needed > limit || self.armed || may_stay,
                        "{needed} of {limit}"
                    );
                    self.reached.told += 1;
                    Ok(Pin::Stream)
                }
                Err(error) => Err(error),
            }
        } else {
            model.range.pin(offset, size, weight.since)
        };
        match pin {
            Ok(Pin::Resident(pinned)) => {
                self.reached.resident += 1;
                for part in pinned.stale() {
                    self.reached.refilled += 1;
                    assert!(weight.pins.is_empty(), "what is pinned stays");
                    fill(
                        &self.device,
                        weight,
                        model.saved.as_ref(),
                        part.offset.0,
                        part.address,
                        part.size,
                    );
                }
                weight.since = pinned.stamp();
                weight.pins.push(pinned);
            }
            Ok(Pin::Stream) => {
                self.reached.streamed += 1;
                assert!(weight.pins.is_empty(), "what is pinned fits");
                if !self.armed && !may_stay {
                    let after = self.pager.stats();
                    assert_eq!(
                        after.resident, before.resident,
                        "a pin that streams takes nothing"
                    );
                }
            }
            Err(error) => {
                self.reached.refused += 1;
                assert!(
                    self.armed && matches!(error, Error::Device { .. }),
                    "{error}"
                );
            }
        }
    }

    /// Writes new contents to a pinned weight of a writable range.
    fn write(&mut self, model: usize, weight: usize) {
        let size = self.models[model].weights[weight].bytes.len() as u64;
        let bytes = self.contents(size);
        let model = &mut self.models[model];
        let weight = &mut model.weights[weight];
        if model.saved.is_some() && !weight.pins.is_empty() {
            let at = Address(model.range.base().0 + weight.offset);
            self.device.write(at, &bytes).unwrap();
            weight.bytes = bytes;
        }
    }

    fn step(&mut self) {
        if self.compiler.is_none() {
            self.disarm();
            let options = Options {
                address_space: Bytes::mib(1),
                ..Options::default()
            };
            self.compiler = Some(Compiler::with_pager(&self.pager, options).unwrap());
        }
        let Self {
            compiler,
            device,
            random,
            ..
        } = self;
        let calls = device.memory_calls();
        let step = compiler.as_mut().unwrap().begin("step").unwrap();
        let mut shape = Random(random.below(3));
        let mut live: Vec<(Address, Pattern)> = Vec::new();
        let mut errors = 0;
        for event in 0..4 + shape.below(5) {
            if shape.below(3) == 0 && !live.is_empty() {
                let (address, pattern) = live.remove(shape.below(live.len() as u64) as usize);
                pattern.check(&**device, address.0);
                step.free(address).unwrap();
                continue;
            }
            let size = (1 + shape.below(24)) * 512;
            match step.alloc(Bytes(size)) {
                Ok(Allocation::Here(address)) => {
                    let pattern = Pattern { seed: event, size };
                    pattern.write(&**device, address.0);
                    live.push((address, pattern));
                }
                Ok(Allocation::Elsewhere) => unreachable!("the step serves its stream"),
                Err(error) => {
                    errors += 1;
                    let typed = matches!(
                        error,
                        Error::OverBudget { .. } | Error::OutOfMemory { .. } | Error::Device { .. }
                    );
                    assert!(typed, "{error}");
                }
            }
        }
        for (address, pattern) in live {
            pattern.check(&**device, address.0);
            step.free(address).unwrap();
        }
        let report = step.finish().unwrap();
        if report.device_calls == 0 && errors == 0 {
            assert_eq!(
                device.memory_calls(),
                calls,
                "a replayed step evicts nothing"
            );
            self.reached.replays += 1;
        }
        self.reached.step_errors += errors;
    }

    fn operation(&mut self) {
        let choice = self.random.below(64);
        if choice == 0 || self.models.is_empty() {
            if self.models.len() < 3 {
                self.add_model();
            } else {
                self.disarm();
                let at = self.random.below(3) as usize;
                self.models.remove(at);
            }
            return;
        }
        let model = self.random.below(self.models.len() as u64) as usize;
        let weight = self.random.below(self.models[model].weights.len() as u64) as usize;
        match choice {
            1..=27 => self.pin(model, weight),
            28..=43 => drop(self.models[model].weights[weight].pins.pop()),
            44..=45 => {
                let weights = &mut self.models[model].weights;
                weights.iter_mut().for_each(|weight| weight.pins.clear());
            }
            46..=48 => self.write(model, weight),
            49..=54 => self.step(),
            55 => self.models[model].range.prioritise(),
            56 => {
                let evicted = self.models[model].range.evict();
                assert!(self.armed || evicted.is_ok(), "{evicted:?}");
            }
            57 => {
                if let Some(compiler) = &mut self.compiler {
                    let trimmed = compiler.trim();
                    assert!(self.armed || trimmed.is_ok(), "{trimmed:?}");
                }
            }
            58 => {
                self.disarm();
                self.compiler = None;
            }
            59..=60 => self.arm(),
            _ => self.disarm(),
        }
    }

    fn check(&self) {
        let books = self.device.books();
        let stats = self.pager.stats();
        assert!(books.held_peak.0 <= self.budget, "over the budget");
        assert_eq!(books.held, stats.used, "all that is held is claimed");
        for model in &self.models {
            let all = model
                .range
                .residency(Bytes::ZERO, model.range.size())
                .unwrap();
            assert!(all.pinned <= all.resident);
            for weight in model
                .weights
                .iter()
                .filter(|weight| !weight.pins.is_empty())
            {
                let mut seen = vec![0; weight.bytes.len()];
                let at = Address(model.range.base().0 + weight.offset);
                self.device.read(at, &mut seen).unwrap();
                assert!(seen == weight.bytes, "contents match their stamp");
            }
        }
    }

    fn end(mut self) -> Reached {
        self.disarm();
        self.reached.evictions = self.pager.stats().evictions;
        let saved = self.models.iter().filter_map(|model| model.saved.as_ref());
        self.reached.saved = saved.map(|saved| saved.lock().unwrap().len() as u64).sum();
        // In either order.
        if self.random.below(2) == 0 {
            self.compiler = None;
        }
        self.models.clear();
        self.compiler = None;
        assert_eq!(self.pager.stats().used, Bytes::ZERO);
        assert!(self.device.is_empty(), "{:?}", self.device.books());
        self.reached
    }
}

/// Fills a part from what was saved, else from what the weight began with.
fn fill(
    device: &CountingHost,
    weight: &Weight,
    saved: Option<&Saved>,
    offset: u64,
    at: Address,
    size: Bytes,
) {
    let end = offset + size.0;
    let mut from = offset;
    while from < end {
        let to = (from / PAGE * PAGE + PAGE).min(end);
        let at = Address(at.0 + from - offset);
        let saved = saved.and_then(|saved| saved.lock().unwrap().get(&from).cloned());
        let truth = &weight.bytes[(from - weight.offset) as usize..(to - weight.offset) as usize];
        device.write(at, saved.as_deref().unwrap_or(truth)).unwrap();
        from = to;
    }
}

#[test]
fn ten_thousand_programs_stay_within_the_budget_and_keep_what_their_stamps_promise() {
    let total = sums(PROGRAMS, |seed| {
        let mut world = World::new(seed);
        for _ in 0..20 + world.random.below(60) {
            world.operation();
            world.check();
        }
        let ran = world.end();
        [
            ran.resident,
            ran.refilled,
            ran.streamed,
            ran.told,
            ran.refused,
            ran.evictions,
            ran.step_errors,
            ran.replays,
            ran.saved,
        ]
    });
    // The property proves something only while the programs reach every answer.
    println!(
        "{PROGRAMS} programs: resident, refilled, streamed, told, refused, evicted, failed in steps, replays, saved: {total:?}"
    );
    assert!(total.iter().all(|&number| number > 500), "{total:?}");
}
