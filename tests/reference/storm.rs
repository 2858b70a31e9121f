//! Storms: programs that use small ranges up over and over, and mix all that a compiler knows: branches, growing
//! sizes, survivors, aborts, trims, compiles, forgetting. The judge is outside: every buffer has a pattern of its
//! own, which is compared when it goes, and the validator looks at what lives after each step.

use std::collections::HashMap;

use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options, Step, scope};

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

/// What a storm did.
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
}

/// A buffer that is live.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    at: Address,
    pattern: Pattern,
}

/// Buffers by their places in the program, all on one device.
pub struct Buffers {
    device: CountingHost,
    seeds: u64,
    slots: [Option<Buffer>; SLOTS as usize],
    /// Those that outlived their steps, by the step in which they go.
    kept: Vec<(u64, Buffer)>,
    events: u64,
}

impl Buffers {
    fn new(device: CountingHost) -> Self {
        Self {
            device,
            seeds: 0,
            slots: [None; SLOTS as usize],
            kept: Vec::new(),
            events: 0,
        }
    }

    fn end(&mut self, buffer: Buffer) {
        buffer.pattern.check(&*self.device, buffer.at.0);
        memory_compiler::free(buffer.at).expect("it is live");
        self.events += 1;
    }

    fn free(&mut self, slot: u8) {
        if let Some(buffer) = self.slots[slot as usize].take() {
            self.end(buffer);
        }
    }

    fn alloc(&mut self, step: &Step<'_>, slot: u8, size: u64) -> Result<(), Error> {
        self.free(slot);
        self.events += 1;
        let Allocation::Here(at) = step.alloc(Bytes(size))? else {
            panic!("{size} bytes are served by nobody");
        };
        self.seeds += 1;
        let seed = self.seeds;
        let pattern = Pattern { seed, size };
        pattern.write(&*self.device, at.0);
        self.slots[slot as usize] = Some(Buffer { at, pattern });
        Ok(())
    }

    fn check_all(&self) {
        let live = self
            .slots
            .iter()
            .flatten()
            .chain(self.kept.iter().map(|kept| &kept.1));
        live.for_each(|buffer| buffer.pattern.check(&*self.device, buffer.at.0));
    }
}

/// Runs a storm of so many events.
///
/// # Panics
/// When two live buffers shared a byte, when one was lost, when an error is none that the limits explain.
pub fn run(seed: u64, events: u64) -> Outcome {
    let mut random = Random(seed);
    let pages = 48 << random.below(9);
    let device = limited_host(Bytes(PAGE), Bytes(pages / 2 * PAGE));
    let size_count = 2 + random.below(12);
    let sizes: Vec<u64> = (0..size_count).map(|_| size(&mut random, pages)).collect();
    let options = Options {
        address_space: Bytes(pages * PAGE),
        budget: random
            .one_in(3)
            .then(|| Bytes(PAGE * (pages / 16 + random.below(pages / 4)))),
        edge_limit: [60, 400, 4_000, 200_000][random.below(4) as usize],
        compile_after: random.one_in(3).then(|| 1 + random.below(4) as u32),
        ..Options::default()
    };
    let mut compiler = Compiler::new(device.clone(), options).expect("a compiler");
    let mut buffers = Buffers::new(device.clone());
    let mut scripts: Vec<Script> = (0..6).map(|_| Script::new(&mut random, &sizes)).collect();
    let mut outcome = Outcome::default();
    while buffers.events < events {
        if random.one_in(40) {
            let index = random.below(6) as usize;
            scripts[index] = Script::new(&mut random, &sizes);
        }
        // One script runs for a while, or all of them in turn.
        let which = if random.one_in(3) {
            random.below(6)
        } else {
            outcome.steps / 8 % 6
        };
        step(
            pages,
            &mut compiler,
            &mut buffers,
            &mut scripts[which as usize],
            &mut random,
            &mut outcome,
        );
        outcome.steps += 1;
        match random.below(64) {
            0 => drop(compiler.trim().expect("trimming works")),
            1 => match compiler.compile() {
                Ok(compiled) => outcome.compiles += u64::from(compiled.is_installed),
                Err(Error::AddressSpace { .. }) => outcome.refused += 1,
                Err(error) => panic!("{error}"),
            },
            _ => {}
        }
    }
    buffers.check_all();
    let stats = compiler.stats();
    outcome.events = buffers.events;
    outcome.recorded = stats.recorded_total;
    outcome.replayed = stats.replayed_total;
    outcome.forgotten = stats.edges_forgotten;
    outcome.obstructed = stats.obstructed;
    drop(compiler);
    for slot in 0..SLOTS {
        buffers.free(slot);
    }
    for (_, buffer) in std::mem::take(&mut buffers.kept) {
        buffers.end(buffer);
    }
    assert!(device.is_empty(), "left behind: {:?}", device.books());
    outcome
}

fn step(
    pages: u64,
    compiler: &mut Compiler,
    buffers: &mut Buffers,
    script: &mut Script,
    random: &mut Random,
    outcome: &mut Outcome,
) {
    let now = outcome.steps;
    let step = compiler.begin(script.name).expect("a step");
    let aborts = random.one_in(30);
    let stops = if aborts || random.one_in(12) {
        random.below(script.events.len() as u64 + 1) as usize
    } else {
        script.events.len()
    };
    let mut scopes = Vec::new();
    let grown = script.growth * script.runs;
    for event in &script.events[..stops] {
        match *event {
            Do::Alloc { slot, size } => {
                let grows = size >= PAGE && script.growth > 0;
                let size = if grows {
                    size + grown % ((pages / 64 + 1) * PAGE)
                } else {
                    size
                };
                match buffers.alloc(&step, slot, size) {
                    Ok(()) => {}
                    Err(
                        Error::OverBudget { .. }
                        | Error::OutOfMemory { .. }
                        | Error::AddressSpace { .. },
                    ) => outcome.refused += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            Do::Free { slot } => buffers.free(slot),
            Do::Enter(name) => scopes.push(scope(name)),
            Do::Leave => drop(scopes.pop()),
        }
    }
    while scopes.pop().is_some() {}
    script.runs += 1;
    // What was to go by now goes, and some of it later.
    for (_, buffer) in buffers
        .kept
        .extract_if(.., |kept| kept.0 <= now)
        .collect::<Vec<_>>()
    {
        buffers.end(buffer);
    }
    let ages: HashMap<u8, u64> = script.kept.iter().copied().collect();
    for slot in 0..SLOTS {
        let age = match ages.get(&slot) {
            Some(&age) if !random.one_in(10) => age,
            _ if random.one_in(200) => random.below(60),
            _ => {
                buffers.free(slot);
                continue;
            }
        };
        if let Some(buffer) = buffers.slots[slot as usize].take() {
            buffers.kept.push((now + 1 + age, buffer));
        }
    }
    let snapshot = step.snapshot();
    snapshot
        .validate()
        .unwrap_or_else(|fault| panic!("{fault}"));
    if aborts {
        step.abort();
    } else {
        step.finish().expect("the step ends well");
    }
}
