//! Storms: programs that use small ranges up over and over, and mix all that a compiler knows: branches, growing
//! sizes, survivors, aborts, trims, compiles, forgetting, budgets; and, as the seed has it, two compilers on one
//! device or pager, calls that fail, frees on another thread, layouts that are pinned for captured graphs. The
//! judge is outside: every buffer has a pattern of its own, which is compared when it goes, and the validator
//! looks at what lives after each step.

use std::collections::HashMap;
use std::sync::{Arc, mpsc};

use memory_compiler::device::adaptor::{Repeat, Streams};
use memory_compiler::device::{DeviceError, MemoryInfo, StreamId};
use memory_compiler::pager::Pager;
use memory_compiler::{
    Address, Allocation, Bytes, Compiler, Error, Options, PinnedLayout, Step, scope,
};

use super::devices::{CountingHost, Pattern, limited_host};

const PAGE: u64 = 4096;

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit
    }

    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// What a step does, again and again.
#[derive(Clone, Debug)]
enum Do {
    Alloc { slot: u8, size: u64 },
    Free { slot: u8 },
    Enter(&'static str),
    Leave,
}

const SLOTS: u8 = 24;
const NAMES: [&str; 3] = ["cond", "uncond", "decode"];

#[derive(Clone, Debug)]
struct Script {
    name: &'static str,
    events: Vec<Do>,
    /// Slots that outlive the step, and for how many steps at most.
    kept: Vec<(u8, u64)>,
    /// How much larger large buffers are each time.
    growth: u64,
    runs: u64,
}

/// Of a range of so many pages.
fn size(random: &mut Random, pages: u64) -> u64 {
    match random.below(8) {
        0..2 => 512 * (1 + random.below(8)),
        2 => 1 + random.below(PAGE * 3),
        3..7 => PAGE * (1 + random.below(6)),
        _ => PAGE * (1 + random.below(pages / 40 + 2)) + 512 * random.below(8),
    }
}

impl Script {
    /// With buffers of these sizes.
    fn new(random: &mut Random, sizes: &[u64]) -> Self {
        let mut events = Vec::new();
        let mut depth = 0;
        let longest = [8, 36][random.below(2) as usize];
        for _ in 0..2 + random.below(longest) {
            events.push(match random.below(10) {
                0..6 => Do::Alloc {
                    slot: random.below(SLOTS.into()) as u8,
                    size: sizes[random.below(sizes.len() as u64) as usize],
                },
                6..8 => Do::Free {
                    slot: random.below(SLOTS.into()) as u8,
                },
                8 if depth < 3 => {
                    depth += 1;
                    Do::Enter(["a", "b", "c"][random.below(3) as usize])
                }
                _ if depth > 0 => {
                    depth -= 1;
                    Do::Leave
                }
                _ => continue,
            });
        }
        let mut kept = Vec::new();
        for _ in 0..random.below(4) {
            kept.push((random.below(SLOTS.into()) as u8, random.below(6)));
        }
        Self {
            name: NAMES[random.below(3) as usize],
            kept,
            events,
            growth: if random.one_in(4) {
                512 * random.below(20)
            } else {
                0
            },
            runs: 0,
        }
    }
}

/// What storms did, added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub events: u64,
    pub steps: u64,
    pub recorded: u64,
    pub replayed: u64,
    pub refused: u64,
    pub compiles: u64,
    pub forgotten: u64,
    pub obstructed: u64,
    pub faults: u64,
    pub captures: u64,
    pub launches: u64,
    pub remote_frees: u64,
}

impl Outcome {
    /// By name, for tables and sums.
    pub fn numbers(&self) -> [(&'static str, u64); 12] {
        [
            ("events", self.events),
            ("steps", self.steps),
            ("recorded", self.recorded),
            ("replayed", self.replayed),
            ("refused", self.refused),
            ("compiles", self.compiles),
            ("edges forgotten", self.forgotten),
            ("obstructed", self.obstructed),
            ("calls failed", self.faults),
            ("captures", self.captures),
            ("launches", self.launches),
            ("frees elsewhere", self.remote_frees),
        ]
    }
}

/// A buffer that is live.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    at: Address,
    pattern: Pattern,
    /// The graph that may write to it: of the captured step in which it was made.
    graph: Option<u64>,
}

/// A thread that frees what it is given, before the giver goes on.
pub struct Elsewhere {
    give: mpsc::Sender<Address>,
    done: mpsc::Receiver<()>,
}

impl Elsewhere {
    pub fn new() -> Self {
        let (give, take) = mpsc::channel();
        let (tell, done) = mpsc::channel();
        std::thread::spawn(move || {
            for address in take {
                memory_compiler::free(address).expect("it is live");
                tell.send(()).expect("it is waited for");
            }
        });
        Self { give, done }
    }

    fn free(&self, address: Address) {
        self.give.send(address).expect("it listens");
        self.done.recv().expect("it does not fail");
    }
}

/// A compiler, what is pinned of it, and the graphs that were captured meanwhile: what they write.
struct Station {
    compiler: Option<Compiler>,
    scripts: Vec<Script>,
    pins: Vec<PinnedLayout>,
    graphs: Vec<(u64, Vec<(Address, u64)>)>,
}

/// All that a storm is about.
struct World<'a> {
    random: Random,
    pages: u64,
    sizes: Vec<u64>,
    device: CountingHost,
    streams: Arc<Streams<CountingHost>>,
    stations: Vec<Station>,
    /// Keeps the budget of the stations.
    _pager: Option<Pager>,
    elsewhere: Option<&'a Elsewhere>,
    is_faulty: bool,
    is_pinning: bool,
    seeds: u64,
    slots: [Option<Buffer>; SLOTS as usize],
    /// Buffers that outlived their steps, by the step in which they go.
    kept: Vec<(u64, Buffer)>,
    outcome: Outcome,
}

/// Runs a storm of so many events.
///
/// # Panics
/// When two live buffers shared a byte, when one was lost, when an error is none that the limits explain.
pub fn run(seed: u64, events: u64, elsewhere: &Elsewhere) -> Outcome {
    let mut world = World::new(Random(seed), elsewhere);
    while world.outcome.events < events {
        world.go_on();
    }
    world.end()
}

impl<'a> World<'a> {
    fn new(mut random: Random, elsewhere: &'a Elsewhere) -> Self {
        let pages = 48 << random.below(9);
        let device = limited_host(Bytes(PAGE), Bytes(pages / 2 * PAGE));
        let streams = Arc::new(Streams::new(device.clone()));
        let size_count = 2 + random.below(12);
        let sizes: Vec<u64> = (0..size_count).map(|_| size(&mut random, pages)).collect();
        let budget = Bytes(PAGE * (pages / 16 + random.below(pages / 4)));
        let budget = random.one_in(3).then_some(budget);
        let shares = random.one_in(3);
        let pager = (shares && random.one_in(2))
            .then(|| Pager::new(streams.clone(), budget).expect("a pager"));
        let options = Options {
            address_space: Bytes(pages * PAGE),
            budget: budget.filter(|_| pager.is_none()),
            edge_limit: [60, 400, 4_000, 200_000][random.below(4) as usize],
            compile_after: random.one_in(3).then(|| 1 + random.below(4) as u32),
            hash_seed: Some(random.next()),
            ..Options::default()
        };
        let stations = (0..1 + u64::from(shares)).map(|_| Station {
            compiler: Some(
                match &pager {
                    Some(pager) => Compiler::with_pager(pager, options.clone()),
                    None => Compiler::new(streams.clone(), options.clone()),
                }
                .expect("a compiler"),
            ),
            scripts: (0..6).map(|_| Script::new(&mut random, &sizes)).collect(),
            pins: Vec::new(),
            graphs: Vec::new(),
        });
        Self {
            stations: stations.collect(),
            pages,
            sizes,
            device,
            streams,
            _pager: pager,
            elsewhere: random.one_in(4).then_some(elsewhere),
            is_faulty: random.one_in(4),
            is_pinning: random.one_in(4),
            seeds: 0,
            slots: [None; SLOTS as usize],
            kept: Vec::new(),
            outcome: Outcome::default(),
            random,
        }
    }

    /// One step, and what comes between steps.
    fn go_on(&mut self) {
        let mut station = self.random.below(self.stations.len() as u64) as usize;
        if self.random.one_in(40) {
            let index = self.random.below(6) as usize;
            let script = Script::new(&mut self.random, &self.sizes);
            self.stations[station].scripts[index] = script;
        }
        // One script runs for a while, or all of them in turn.
        let script = if self.random.one_in(3) {
            self.random.below(6)
        } else {
            self.outcome.steps / 8 % 6
        };
        if self.is_faulty && self.random.one_in(12) {
            self.arm();
        }
        self.step(station, script as usize);
        self.outcome.steps += 1;
        if self.is_faulty && self.random.one_in(3) {
            self.disarm();
        }
        station = self.random.below(self.stations.len() as u64) as usize;
        let is_pinned = !self.stations[station].pins.is_empty();
        let compiler = self.stations[station]
            .compiler
            .as_mut()
            .expect("not dropped yet");
        match self.random.below(64) {
            0 => {
                let trimmed = compiler.trim().map(drop);
                self.note(is_pinned, trimmed);
            }
            1 => {
                let compiled = compiler.compile();
                if let Ok(compiled) = &compiled {
                    self.outcome.compiles += u64::from(compiled.is_installed);
                }
                self.note(is_pinned, compiled.map(drop));
            }
            2..5 if self.is_pinning => {
                let pin = compiler.pin_layout().expect("no step is leaked");
                self.stations[station].pins.push(pin);
            }
            5..8 if is_pinned => {
                let station = &mut self.stations[station];
                let index = self.random.below(station.pins.len() as u64) as usize;
                drop(station.pins.swap_remove(index));
                if station.pins.is_empty() {
                    station.graphs.clear();
                }
            }
            8..24 if is_pinned => self.launch(station),
            _ => {}
        }
    }

    fn arm(&mut self) {
        let error = match self.random.below(3) {
            0 => DeviceError::NotReady,
            1 => DeviceError::OutOfMemory {
                info: MemoryInfo {
                    free: Bytes(0),
                    total: Bytes::mib(1),
                },
            },
            _ => DeviceError::Invalid {
                call: memory_compiler::device::Call::Map,
                reason: "of the test",
            },
        };
        let repeat = [Repeat::Once, Repeat::Always][self.random.below(2) as usize];
        self.disarm();
        self.device
            .upstream()
            .fail_at(self.random.below(40), error, repeat);
    }

    fn disarm(&mut self) {
        self.outcome.faults += self.device.upstream().failures();
        self.device.upstream().disarm();
    }

    /// Takes an error for what may be.
    fn note(&mut self, is_pinned: bool, result: Result<(), Error>) {
        match result {
            Ok(()) => {}
            Err(Error::Pinned) if is_pinned => {}
            Err(
                Error::OverBudget { .. } | Error::OutOfMemory { .. } | Error::AddressSpace { .. },
            ) => self.outcome.refused += 1,
            Err(Error::Captured { .. }) if is_pinned => self.outcome.refused += 1,
            Err(Error::Device { .. }) if self.is_faulty => self.outcome.refused += 1,
            Err(error) => panic!("{error}"),
        }
    }

    fn end_buffer(&mut self, buffer: Buffer) {
        self.check(&buffer);
        match self.elsewhere {
            Some(elsewhere) if self.random.one_in(8) => {
                elsewhere.free(buffer.at);
                self.outcome.remote_frees += 1;
            }
            _ => memory_compiler::free(buffer.at).expect("it is live"),
        }
        self.outcome.events += 1;
    }

    fn check(&self, buffer: &Buffer) {
        buffer
            .pattern
            .check(&**self.device.upstream().upstream().upstream(), buffer.at.0);
    }

    fn write(&self, at: Address, pattern: Pattern) {
        pattern.write(&**self.device.upstream().upstream().upstream(), at.0);
    }

    fn pattern(&mut self, size: u64) -> Pattern {
        self.seeds += 1;
        let seed = self.seeds;
        Pattern { seed, size }
    }

    fn free(&mut self, slot: u8) {
        if let Some(buffer) = self.slots[slot as usize].take() {
            self.end_buffer(buffer);
        }
    }

    fn alloc(
        &mut self,
        step: &Step<'_>,
        slot: u8,
        size: u64,
        graph: Option<u64>,
    ) -> Result<Address, Error> {
        self.free(slot);
        self.outcome.events += 1;
        let Allocation::Here(at) = step.alloc(Bytes(size))? else {
            panic!("{size} bytes are served by nobody");
        };
        let pattern = self.pattern(size);
        self.write(at, pattern);
        self.slots[slot as usize] = Some(Buffer { at, pattern, graph });
        Ok(at)
    }

    /// Every graph of a station writes again all that it wrote when it was captured.
    fn launch(&mut self, station: usize) {
        let graphs = std::mem::take(&mut self.stations[station].graphs);
        for (graph, buffers) in &graphs {
            for &(at, size) in buffers {
                let pattern = self.pattern(size);
                self.write(at, pattern);
                let own = |buffer: &&mut (u64, Buffer)| {
                    buffer.1.graph == Some(*graph) && buffer.1.at == at
                };
                if let Some((_, buffer)) = self.kept.iter_mut().find(own) {
                    buffer.pattern = pattern;
                }
            }
        }
        self.outcome.launches += graphs.len() as u64;
        self.stations[station].graphs = graphs;
        self.kept.iter().for_each(|(_, buffer)| self.check(buffer));
    }

    fn step(&mut self, station: usize, script: usize) {
        let now = self.outcome.steps;
        let plan = self.stations[station].scripts[script].clone();
        self.stations[station].scripts[script].runs += 1;
        let is_pinned = !self.stations[station].pins.is_empty();
        let is_captured = is_pinned && self.random.one_in(2);
        let mut graph = Vec::new();
        let mut compiler = self.stations[station]
            .compiler
            .take()
            .expect("not dropped yet");
        self.streams.set_capturing(StreamId(0), is_captured);
        let step = compiler.begin(plan.name).expect("a step");
        let aborts = self.random.one_in(30);
        let stops = if aborts || self.random.one_in(12) {
            self.random.below(plan.events.len() as u64 + 1) as usize
        } else {
            plan.events.len()
        };
        let mut scopes = Vec::new();
        let grown = plan.growth * plan.runs;
        for event in &plan.events[..stops] {
            match *event {
                Do::Alloc { slot, size } => {
                    let grows = size >= PAGE && plan.growth > 0;
                    let more = if grows {
                        grown % ((self.pages / 64 + 1) * PAGE)
                    } else {
                        0
                    };
                    match self.alloc(&step, slot, size + more, is_captured.then_some(now)) {
                        Ok(at) => graph.push((at, size + more)),
                        Err(error) => self.note(is_pinned, Err(error)),
                    }
                }
                Do::Free { slot } => self.free(slot),
                Do::Enter(name) => scopes.push(scope(name)),
                Do::Leave => drop(scopes.pop()),
            }
        }
        while scopes.pop().is_some() {}
        // What was to go by now goes, and some of it later.
        let kept = std::mem::take(&mut self.kept);
        let (stay, go): (Vec<_>, Vec<_>) = kept.into_iter().partition(|kept| kept.0 > now);
        self.kept = stay;
        go.into_iter()
            .for_each(|(_, buffer)| self.end_buffer(buffer));
        let ages: HashMap<u8, u64> = plan.kept.iter().copied().collect();
        for slot in 0..SLOTS {
            let age = match ages.get(&slot) {
                Some(&age) if !self.random.one_in(10) => age,
                _ if self.random.one_in(200) => self.random.below(60),
                _ => {
                    self.free(slot);
                    continue;
                }
            };
            if let Some(buffer) = self.slots[slot as usize].take() {
                self.kept.push((now + 1 + age, buffer));
            }
        }
        let snapshot = step.snapshot();
        snapshot
            .validate()
            .unwrap_or_else(|fault| panic!("{fault}"));
        let ended = if aborts {
            step.abort();
            Ok(())
        } else {
            step.finish().map(drop)
        };
        self.streams.set_capturing(StreamId(0), false);
        self.stations[station].compiler = Some(compiler);
        if is_captured && ended.is_ok() && !aborts {
            self.stations[station].graphs.push((now, graph));
            self.outcome.captures += 1;
        } else if is_captured {
            // What it made goes with its graph, which nobody launches.
            let kept = std::mem::take(&mut self.kept);
            let is_own = |kept: &(u64, Buffer)| kept.1.graph == Some(now);
            let (go, stay): (Vec<_>, Vec<_>) = kept.into_iter().partition(is_own);
            self.kept = stay;
            go.into_iter()
                .for_each(|(_, buffer)| self.end_buffer(buffer));
        }
        self.note(is_pinned, ended);
    }

    fn end(mut self) -> Outcome {
        self.disarm();
        self.kept.iter().for_each(|(_, buffer)| self.check(buffer));
        for mut station in std::mem::take(&mut self.stations) {
            let mut compiler = station.compiler.take().expect("not dropped yet");
            let stats = compiler.stats();
            self.outcome.recorded += stats.recorded_total;
            self.outcome.replayed += stats.replayed_total;
            self.outcome.forgotten += stats.edges_forgotten;
            self.outcome.obstructed += stats.obstructed;
            drop(compiler);
            drop(station.pins);
        }
        for (_, buffer) in std::mem::take(&mut self.kept) {
            self.end_buffer(buffer);
        }
        assert!(
            self.device.is_empty(),
            "left behind: {:?}",
            self.device.books()
        );
        self.outcome
    }
}
