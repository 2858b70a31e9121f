//! Runs random programs for a given time, as a server would for weeks, and prints what became of them.
//!
//! ```text
//! cargo run --release --example soak -- 600 1                # seconds, seed
//! cargo run --release --example soak -- storms 1000000 1     # how many storms, the first seed
//! ```
//!
//! Three kinds take turns: programs against the reference model of the tests, the same on a device that
//! fails, and steps of one veteran compiler that lives all the time, with a small limit to what it may
//! remember, whose buffers end on another thread. Whatever is lost is a panic; memory that grows after
//! the first third is an error at the end.
//!
//! Storms are the programs of `tests/storms.rs`, on all processors: most are short, one in 64 uses its ranges up
//! many times over.

#[path = "../tests/reference/mod.rs"]
mod reference;

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options};

use reference::devices::{CountingHost, Pattern, counting_host};
use reference::faulty::Faulty;
use reference::program::{Event, Program, SLOTS};
use reference::storm::{self, Elsewhere};

struct CountingAllocator;

static LIVE: AtomicU64 = AtomicU64::new(0);

// SAFETY: forwards to the system's allocator and counts.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the block came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[derive(Debug, Default)]
struct Totals {
    programs: u64,
    faulty_programs: u64,
    steps: u64,
    events: u64,
    replayed: u64,
    recorded: u64,
    breaks: u64,
    survivors: u64,
    bad_frees: u64,
    aborts: u64,
    faults: u64,
    errors: u64,
}

impl Totals {
    fn add(&mut self, program: &Program, stats: &memory_compiler::Stats) {
        self.steps += stats.steps;
        let events = program.steps.iter().map(|step| step.events.len() as u64);
        self.events += events.sum::<u64>();
        self.replayed += stats.replayed_total;
        self.recorded += stats.recorded_total;
        self.breaks += stats.breaks_total;
        self.survivors += stats.survivor_positions;
        self.bad_frees += stats.bad_frees;
        self.aborts += stats.aborts;
    }
}

/// Highest value seen in the first third of the time, and in the rest.
#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    early: u64,
    late: u64,
}

impl Peak {
    fn see(&mut self, value: u64, is_early: bool) {
        let peak = if is_early {
            &mut self.early
        } else {
            &mut self.late
        };
        *peak = (*peak).max(value);
    }

    /// How much more there was later; an eighth and 256 KiB are noise.
    fn growth(self) -> u64 {
        self.late.saturating_sub(self.early)
    }

    fn is_flat(self) -> bool {
        self.growth() <= self.early / 8 + (256 << 10)
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| (self.next() >> 56) as u8).collect()
    }
}

/// One compiler for the whole time, and a thread that frees what it gives away.
struct Veteran {
    compiler: Compiler,
    device: CountingHost,
    slots: [Option<(u64, Pattern)>; SLOTS],
    give: mpsc::Sender<(u64, Pattern)>,
    seeds: u64,
}

impl Veteran {
    fn new() -> (Self, std::thread::JoinHandle<u64>) {
        let device = counting_host(Bytes(4096));
        let options = Options {
            edge_limit: 2_000,
            address_space: Bytes::gib(1),
            ..Options::default()
        };
        let compiler = Compiler::new(device.clone(), options).expect("a compiler");
        let (give, take) = mpsc::channel::<(u64, Pattern)>();
        let there = device.clone();
        let freeing = std::thread::spawn(move || {
            let mut count = 0;
            for (address, pattern) in take {
                pattern.check(&*there, address);
                memory_compiler::free(Address(address)).expect("live");
                count += 1;
            }
            count
        });
        let veteran = Self {
            compiler,
            device,
            slots: [None; SLOTS],
            give,
            seeds: 0,
        };
        (veteran, freeing)
    }

    fn run(&mut self, program: &Program, random: &mut Random) {
        for plan in &program.steps {
            // Now and then a name that never comes again.
            let name = match random.next() % 16 {
                0 => format!("request {}", self.seeds),
                _ => plan.name.to_owned(),
            };
            let step = self.compiler.begin(&name).expect("a step");
            for event in &plan.events {
                let (slot, size) = match *event {
                    Event::Alloc { slot, size } => (slot, size),
                    Event::Free { slot, .. } => (slot, 0),
                    _ => continue,
                };
                if let Some((address, pattern)) = self.slots[slot].take() {
                    if random.next().is_multiple_of(4) {
                        self.give.send((address, pattern)).expect("it listens");
                    } else {
                        pattern.check(&*self.device, address);
                        step.free(Address(address)).expect("live");
                    }
                }
                if size > 0 {
                    let served = step.alloc(Bytes(size));
                    let Ok(Allocation::Here(address)) = served else {
                        panic!("{size} bytes: {served:?}");
                    };
                    self.seeds += 1;
                    let seed = self.seeds;
                    let pattern = Pattern { seed, size };
                    pattern.write(&*self.device, address.0);
                    self.slots[slot] = Some((address.0, pattern));
                }
            }
            if random.next().is_multiple_of(32) {
                step.abort();
            } else {
                step.finish().expect("the step ends well");
            }
        }
        match random.next() % 32 {
            0..4 => drop(self.compiler.trim().expect("trimming works")),
            4 => drop(self.compiler.compile().expect("compiling works")),
            _ => {}
        }
    }

    fn end(self) -> Result<memory_compiler::Stats, Error> {
        let Self {
            mut compiler,
            device,
            slots,
            give,
            ..
        } = self;
        let stats = compiler.stats();
        drop(compiler);
        for (address, pattern) in slots.into_iter().flatten() {
            pattern.check(&*device, address);
            memory_compiler::free(Address(address))?;
        }
        drop(give);
        Ok(stats)
    }
}

/// Resident memory of the process but for shared pages, which are the devices'.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0_u64) * 1024
}

/// Events of the storm of a seed.
fn storm_len(seed: u64) -> u64 {
    match seed % 64 {
        0 => 200 << (seed / 64 % 7),
        _ => 40 + seed % 60,
    }
}

/// Runs storms on all processors and prints what they did.
fn storms(count: u64, first_seed: u64) {
    let began = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let (tell, told) = mpsc::channel();
    for thread in 0..threads {
        let tell = tell.clone();
        std::thread::spawn(move || {
            let elsewhere = Elsewhere::new();
            for seed in (first_seed + thread..first_seed + count).step_by(threads as usize) {
                let run =
                    std::panic::catch_unwind(|| storm::run(seed, storm_len(seed), &elsewhere));
                let outcome = run.unwrap_or_else(|_| {
                    eprintln!("storm {seed} of {} events failed", storm_len(seed));
                    std::process::exit(1);
                });
                tell.send(outcome.numbers()).expect("it is listened to");
            }
        });
    }
    drop(tell);
    let mut sums = storm::Outcome::default().numbers();
    let mut next_line = Duration::from_secs(10);
    for (done, numbers) in (1..).zip(told) {
        for (sum, number) in sums.iter_mut().zip(numbers) {
            sum.1 += number.1;
        }
        if began.elapsed() >= next_line || done == count {
            next_line = began.elapsed() + Duration::from_secs(10);
            println!("{:>6.0?} {done} storms: {sums:?}", began.elapsed());
        }
    }
    println!("shared or lost: nothing");
}

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_storms = arguments.first().is_some_and(|word| word == "storms");
    if is_storms {
        arguments.remove(0);
    }
    let mut arguments = arguments.iter().map(|text| text.parse::<u64>());
    let mut number = |or| arguments.next().unwrap_or(Ok(or));
    let (Ok(seconds), Ok(seed)) = (number(60), number(1)) else {
        eprintln!("usage: soak [seconds] [seed]\n       soak storms [count] [first seed]");
        return ExitCode::FAILURE;
    };
    if is_storms {
        storms(seconds, seed);
        return ExitCode::SUCCESS;
    }
    let (began, time) = (Instant::now(), Duration::from_secs(seconds));
    let mut random = Random(seed);
    let mut totals = Totals::default();
    let (mut resident, mut books, mut held) = <(Peak, Peak, Peak)>::default();
    let (mut veteran, freeing) = Veteran::new();
    let device = veteran.device.clone();
    let mut next_line = Duration::from_secs(10);
    while began.elapsed() < time {
        let records = 20 + (random.next() % 140) as usize;
        let bytes = random.bytes(4 * records + 17);
        let program = Program::decode(&bytes);
        totals.add(&program, &program.run());
        totals.programs += 1;

        let faulty = Faulty::decode(&bytes);
        let outcome = faulty.run();
        totals.add(&faulty.program, &outcome.stats);
        totals.faulty_programs += 1;
        totals.faults += outcome.failures;
        totals.errors += outcome.errors;

        veteran.run(&program, &mut random);
        drop((program, faulty, bytes));
        let is_early = began.elapsed() < time / 3;
        resident.see(resident_bytes(), is_early);
        books.see(LIVE.load(Ordering::Relaxed), is_early);
        held.see(device.books().held.0, is_early);
        if began.elapsed() >= next_line {
            next_line += Duration::from_secs(10);
            let (resident, books) = (resident_bytes(), LIVE.load(Ordering::Relaxed));
            println!(
                "{:>6.0?} resident {}, books {}, held {}, addresses {}, {totals:?}",
                began.elapsed(),
                Bytes(resident),
                Bytes(books),
                device.books().held,
                veteran.compiler.stats().virtual_bytes
            );
        }
    }
    let stats = veteran.end().expect("its buffers are live");
    let given = freeing.join().expect("the thread ends well");
    assert!(device.is_empty(), "left behind: {:?}", device.books());
    println!("{totals:#?}");
    println!(
        "the veteran: {} steps, {} replayed, {} recorded, {} edges and {} scopes remembered, {} edges \
         forgotten, {} survivors, {given} buffers freed on another thread; held at most {}, floor {}",
        stats.steps,
        stats.replayed_total,
        stats.recorded_total,
        stats.edges,
        stats.scopes.len(),
        stats.edges_forgotten,
        stats.survivors,
        Bytes(held.early.max(held.late)),
        stats.floor
    );
    for (what, peak) in [("resident memory", resident), ("all books", books)] {
        let flat = if peak.is_flat() { "flat" } else { "GROWS" };
        println!(
            "{what}: at most {} in the first third, {} more later: {flat}",
            Bytes(peak.early),
            Bytes(peak.growth())
        );
    }
    println!("lost: nothing");
    if resident.is_flat() && books.is_flat() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
