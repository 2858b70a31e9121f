//! A program that uses mappings up: what nobody needs is given up before, what is left works, and where
//! nothing can be given up an error says so. A binary of its own: mappings are counted for the process.

#![cfg(target_os = "linux")]

mod reference;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use memory_compiler::device::adaptor::{Counting, Limiting};
use memory_compiler::device::{Device, Host};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options, Step, StepReport};

use reference::devices::Pattern;

type Card = Counting<Limiting<Host>>;

const SMALL: Bytes = Bytes::kib(4);
/// The page of the CPU hook.
const HOOKED: Bytes = Bytes::kib(64);
/// As if `vm.max_map_count` were this.
const FEW: u64 = 2_000;

/// One test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn card(granule: Bytes, mapping_limit: u64) -> Arc<Card> {
    let host = Host::new(granule).expect("memory");
    let limited = Limiting::new(host, Bytes(u64::MAX)).mappings_at_most(mapping_limit);
    Arc::new(Counting::new(limited))
}

/// A live buffer, which is looked at when it goes.
struct Buffer(Address, Pattern);

/// A program of steps: caches that grow, and whatever else a test makes.
struct Program {
    card: Arc<Card>,
    compiler: Compiler,
    caches: Vec<Option<Buffer>>,
    seed: u64,
    /// Most mappings at the end of a step.
    most: u64,
}

impl Program {
    fn new(card: Arc<Card>, options: Options) -> Self {
        let compiler = Compiler::new(card.clone(), options).expect("addresses");
        let (caches, seed, most) = (Vec::new(), 0, 0);
        Self {
            card,
            compiler,
            caches,
            seed,
            most,
        }
    }

    fn mappings(&self) -> u64 {
        self.card.mappings().expect("counted").count
    }

    /// One step of a decoder: each layer makes a larger cache, fills it, and drops the old one.
    fn decode(&mut self, layers: usize, kib: u64) -> Result<StepReport, Error> {
        let size = kib << 10;
        self.caches
            .resize_with(layers.max(self.caches.len()), || None);
        let step = self.compiler.begin("decode")?;
        for cache in &mut self.caches {
            let scratch = here(&step, 3 * self.card.granule().0)?;
            step.free(scratch)?;
            let at = here(&step, size)?;
            self.seed += 1;
            let pattern = Pattern {
                seed: self.seed,
                size,
            };
            pattern.write(&*self.card, at.0);
            if let Some(Buffer(old, pattern)) = cache.replace(Buffer(at, pattern)) {
                pattern.check(&*self.card, old.0);
                step.free(old)?;
            }
        }
        let report = step.finish();
        self.most = self.most.max(self.mappings());
        report
    }

    /// Drops the compiler, then its tensors.
    fn end(self) {
        drop(self.compiler);
        for Buffer(at, pattern) in self.caches.into_iter().flatten() {
            pattern.check(&*self.card, at.0);
            memory_compiler::free(at).expect("live");
        }
        assert!(self.card.is_empty(), "left behind: {:?}", self.card.books());
    }
}

fn here(step: &Step<'_>, size: u64) -> Result<Address, Error> {
    match step.alloc(Bytes(size))? {
        Allocation::Here(at) => Ok(at),
        Allocation::Elsewhere => panic!("{size} bytes are served by nobody"),
    }
}

fn kernel_limit() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("proc_sys_vm(5)");
    text.trim().parse().expect("a number")
}

/// The kernel's own limit, pages of the CPU hook, and two models one after the other. Without giving windows
/// up the first fails in step 93.
#[test]
fn two_models_whose_caches_grow_every_step_are_served_and_the_process_works() {
    let _alone = alone();
    for _ in 0..2 {
        let mut program = Program::new(card(HOOKED, u64::MAX), Options::default());
        let began = Instant::now();
        for step in 1..=100 {
            let served = program.decode(16, step * 96);
            served.unwrap_or_else(|error| panic!("step {step}: {error}"));
        }
        let rate = 100.0 / began.elapsed().as_secs_f64();
        println!(
            "{rate:.0} steps a second, at most {} mappings",
            program.most
        );
        assert!(
            program.most < kernel_limit() / 2,
            "{} mappings",
            program.most
        );
        // SAFETY: the block is used by nobody.
        let block = unsafe { libc::malloc(64 << 20) };
        assert!(!std::hint::black_box(block).is_null());
        // SAFETY: it came from `malloc` and was not freed.
        unsafe { libc::free(block) };
        let thread = std::thread::Builder::new().spawn(|| 7).expect("a thread");
        assert_eq!(thread.join().expect("no panic"), 7);
        assert!(program.compiler.trim().expect("trim works") > Bytes::ZERO);
        program.decode(16, 101 * 96).expect("the next step works");
        program.end();
    }
}

/// What is live at the end alone would be one and a half times the limit, if pages from everywhere stood in its windows.
#[test]
fn caches_that_are_larger_than_the_limit_of_mappings_lie_on_rows_of_pages() {
    let _alone = alone();
    let mut program = Program::new(card(SMALL, FEW), Options::default());
    for step in 1..=500 {
        let served = program.decode(4, step * 6);
        served.unwrap_or_else(|error| panic!("step {step}: {error}"));
    }
    let live = 4 * 750;
    println!(
        "{live} pages are live, at most {} mappings of {FEW}",
        program.most
    );
    assert!(program.most < FEW / 2, "{} mappings", program.most);
    // Nothing is held beyond what the growth of one step needs.
    let (held, needed) = (program.card.books().held.0 / SMALL.0, 5 * 750 + 3);
    assert!(held <= needed + 1, "{held} pages are held for {needed}");
    program.end();
}

/// Caches that grow also use addresses up: 250 steps map 190,000 pages in a half of 8,192.
#[test]
fn caches_that_grow_do_not_use_the_addresses_up() {
    let _alone = alone();
    let options = Options {
        address_space: Bytes(16_384 * SMALL.0),
        ..Options::default()
    };
    let mut program = Program::new(card(SMALL, u64::MAX), options);
    for step in 1..=250 {
        let served = program.decode(4, step * 6);
        served.unwrap_or_else(|error| panic!("step {step}: {error}"));
    }
    program.end();
}

/// Two shapes that come again and again, beside caches that grow: after their first rounds nothing of them is
/// recorded any more, whatever is given up.
#[test]
fn steps_that_are_replayed_stay_recorded_while_windows_of_others_are_given_up() {
    let _alone = alone();
    let mut program = Program::new(card(SMALL, FEW), Options::default());
    let mut recorded = 0;
    for round in 1..=400 {
        program.decode(2, round * 6).expect("a step of the decoder");
        for (name, pages) in [("cond", 5), ("uncond", 9)] {
            let step = program.compiler.begin(name).expect("a step");
            let buffers = [1, 2, 3].map(|n| here(&step, n * pages * SMALL.0).expect("served"));
            buffers
                .into_iter()
                .for_each(|at| step.free(at).expect("live"));
            let report = step.finish().expect("the step ends well");
            if round > 3 {
                recorded += report.recorded;
            }
        }
    }
    let stats = program.compiler.stats();
    let (forgotten, obstructed) = (stats.edges_forgotten, stats.obstructed);
    println!("{recorded} recorded again, {obstructed} obstructed, {forgotten} forgotten");
    assert!(forgotten > 500, "{stats}");
    // The caches' buffers are in their way now and then; forgotten they are not.
    assert!(
        recorded <= 3 * stats.obstructed + 30,
        "{recorded} recorded again: {stats}"
    );
    program.end();
}

/// Every second page of a row is another buffer's, and no two neighbours are free together.
fn scattered(step: &Step<'_>, pages: u64, kept: &mut Vec<Address>) -> Result<(), Error> {
    let singles: Result<Vec<_>, _> = (0..pages).map(|_| here(step, SMALL.0)).collect();
    let (even, odd): (Vec<_>, Vec<_>) = (0..).zip(singles?).partition(|(n, _)| n % 2 == 0);
    for (half, _) in [(even, 0), (odd, 1)] {
        half.into_iter().try_for_each(|(_, at)| step.free(at))?;
        kept.push(here(step, pages / 2 * SMALL.0)?);
    }
    Ok(())
}

#[test]
fn where_nothing_can_be_given_up_an_error_names_limit_count_and_both_remedies() {
    let _alone = alone();
    let mut program = Program::new(card(SMALL, FEW), Options::default());
    let mut kept = Vec::new();
    let step = program.compiler.begin("step").expect("a step");
    let error = scattered(&step, FEW, &mut kept).expect_err("the second window is refused");
    let Error::Mappings {
        count,
        limit,
        granule,
        asked,
        ..
    } = error.clone()
    else {
        panic!("{error}");
    };
    assert_eq!(
        (limit, granule, asked),
        (FEW, SMALL, Bytes(FEW / 2 * SMALL.0))
    );
    // Before the kernel's: a quarter is left to the rest of the process.
    assert!(count > FEW / 4 && count <= FEW / 4 * 3, "{count}");
    let text = error.to_string();
    for word in [
        &count.to_string(),
        "2000",
        "granule",
        "vm.max_map_count",
        "4.00 KiB",
    ] {
        assert!(text.contains(word), "{word} is missing: {text}");
    }
    // The step goes on with what it has, and the next one has room again.
    let small = here(&step, 512).expect("served");
    step.free(small).expect("live");
    for at in kept.drain(..) {
        step.free(at).expect("live");
    }
    step.finish().expect("the step ends well");
    program.compiler.trim().expect("trim works");
    program.decode(4, 40).expect("a step");
    program.end();
}

#[test]
fn nothing_is_given_up_while_the_layout_is_pinned() {
    let _alone = alone();
    let mut program = Program::new(card(SMALL, FEW), Options::default());
    for step in 1..=20 {
        program.decode(4, step * 6).expect("a step");
    }
    let pinned = program.compiler.pin_layout().expect("no step is leaked");
    let before = program.compiler.stats().edges_forgotten;
    let mut error = None;
    for step in 21..=400 {
        if let Err(refused) = program.decode(4, step * 6) {
            error = Some(refused);
            break;
        }
    }
    assert!(
        matches!(error, Some(Error::Mappings { limit: FEW, .. })),
        "{error:?}"
    );
    assert_eq!(program.compiler.stats().edges_forgotten, before);
    assert!(program.mappings() <= FEW / 4 * 3);
    drop(pinned);
    for step in 21..=100 {
        program
            .decode(4, step * 6)
            .expect("windows are given up again");
    }
    assert!(program.mappings() < FEW / 2);
    program.end();
}

/// Buffers that outlive their step by turns, in windows of the survivors' space, within one long step.
#[test]
fn windows_of_survivors_are_given_up_within_a_step() {
    let _alone = alone();
    let mut program = Program::new(card(SMALL, FEW), Options::default());
    const SIZES: u64 = 60;
    let turn = |step: &Step<'_>, pages: u64| {
        let _turn = memory_compiler::scope("turn");
        here(step, pages * SMALL.0)
    };
    for pages in 1..=SIZES {
        let step = program.compiler.begin("step").expect("a step");
        let at = turn(&step, pages).expect("served");
        step.finish().expect("the step ends well");
        program.compiler.begin("other").expect("a step").abort();
        memory_compiler::free(at).expect("live");
    }
    let step = program.compiler.begin("step").expect("a step");
    let mut live: Vec<(u64, Address)> = Vec::new();
    let mut random = 5_u64;
    for n in 0..6_000 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let pages = 1 + (random >> 40) % SIZES;
        let at = turn(&step, pages).unwrap_or_else(|error| panic!("event {n}: {error}"));
        live.push((pages, at));
        if live.len() > 12 {
            let (_, at) = live.swap_remove((random >> 50) as usize % 12);
            step.free(at).expect("live");
        }
    }
    live.into_iter()
        .for_each(|(_, at)| step.free(at).expect("live"));
    let report = step.finish().expect("the step ends well");
    assert_eq!(report.survivors, 6_000);
    program.end();
}
