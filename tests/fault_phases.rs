//! Each device call fails at each n in each phase of a compiler's life, once, a few times and for good. What
//! must hold each time: a typed error with true numbers or none, every outstanding buffer readable and
//! writable, the next steps work, and nothing is left on the device in the end.

mod reference;

use memory_compiler::device::adaptor::Repeat;
use memory_compiler::device::{Call, DeviceError, MemoryInfo};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options};

use reference::devices::{CountingHost, Pattern, counting_host};

const PAGE: u64 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The compiler is made.
    Begin,
    /// A step of new sizes is recorded.
    Record,
    /// A survivor's position is known: its first step in the space of survivors, over pages that the step's
    /// space hands over.
    HandOver,
    /// A trimmed step replays and fetches its memory again.
    Refill,
    Trim,
    /// Windows of survivors are taken away because their half is crowded.
    Sweep,
    Compile,
    /// Edges beyond the limit are forgotten, and their windows taken away.
    Forget,
    /// The compiler goes before its last buffers, then they do.
    Drop,
}

const PHASES: [Phase; 9] = [
    Phase::Begin,
    Phase::Record,
    Phase::HandOver,
    Phase::Refill,
    Phase::Trim,
    Phase::Sweep,
    Phase::Compile,
    Phase::Forget,
    Phase::Drop,
];

struct World {
    device: CountingHost,
    compiler: Option<Compiler>,
    /// Outputs that are still used.
    kept: Vec<(u64, Pattern)>,
    seeds: u64,
    errors: Vec<Error>,
}

impl World {
    fn new(phase: Phase, device: CountingHost) -> Result<Self, Error> {
        let options = Options {
            address_space: Bytes(if phase == Phase::Sweep { 256 } else { 16_384 } * PAGE),
            edge_limit: match phase {
                Phase::Forget => 60,
                Phase::HandOver => 10,
                _ => 100_000,
            },
            ..Options::default()
        };
        let compiler = Compiler::new(device.clone(), options)?;
        Ok(Self {
            device,
            compiler: Some(compiler),
            kept: Vec::new(),
            seeds: 0,
            errors: Vec::new(),
        })
    }

    fn compiler(&mut self) -> &mut Compiler {
        self.compiler.as_mut().expect("not dropped yet")
    }

    /// A step of sizes that `shape` decides, whose output lives for a few more.
    fn step(&mut self, name: &str, shape: u64) {
        let device = self.device.clone();
        let mut live: Vec<(u64, Pattern)> = Vec::new();
        let compiler = self.compiler.as_mut().expect("not dropped yet");
        let step = compiler.begin(name).expect("no step is leaked");
        let free = |(at, pattern): (u64, Pattern)| {
            pattern.check(&*device, at);
            step.free(Address(at)).expect("live");
        };
        for nth in 0..7 {
            // Half a page is left empty by most, so that a plan holds less.
            let size = match nth {
                6 => PAGE * (1 + shape % 11) + PAGE / 2,
                _ => {
                    PAGE * (1 + (nth * 7 + shape) % 3 + shape / 100)
                        + 512 * (1 + (nth * 5 + shape) % 7)
                }
            };
            let before = step.stats().live;
            match step.alloc(Bytes(size)) {
                Ok(Allocation::Here(Address(at))) => {
                    self.seeds += 1;
                    let pattern = Pattern {
                        seed: self.seeds,
                        size,
                    };
                    pattern.write(&*device, at);
                    if nth == 6 {
                        self.kept.push((at, pattern));
                    } else {
                        live.push((at, pattern));
                    }
                }
                Ok(Allocation::Elsewhere) => panic!("a step is active"),
                Err(error) => {
                    if let Error::OutOfMemory(short) = &error {
                        let asked = short.asked.0;
                        assert_eq!((asked, short.live), (size.next_multiple_of(512), before));
                        assert_eq!(short.held, device.books().held);
                    }
                    self.errors.push(error);
                }
            }
            if nth % 2 == 1 && live.len() > 1 {
                free(live.remove(nth as usize % live.len()));
            }
        }
        live.into_iter().for_each(free);
        while self.kept.len() > 5 {
            // Not the oldest: its neighbours' windows are not free together.
            free(self.kept.remove(self.seeds as usize % 5));
        }
        step.snapshot()
            .validate()
            .unwrap_or_else(|fault| panic!("{fault}"));
        step.finish().expect("the step ends well");
        self.check();
    }

    fn check(&self) {
        for (at, pattern) in &self.kept {
            pattern.check(&*self.device, *at);
        }
    }

    /// A step of a run that wastes addresses: of its outputs, or of everything.
    fn varied(&mut self, phase: Phase, n: u64) {
        let turn = (n * 7_919) >> 3;
        match phase {
            Phase::Sweep => self.step("step", turn % 11 * 21),
            _ => self.step("step", 1_200 + n % 50),
        }
    }

    /// Brings a compiler to where the phase begins.
    fn prepare(&mut self, phase: Phase, varied: u64) {
        match phase {
            Phase::Begin => {}
            Phase::HandOver => {
                // The first one is forgotten: no edge mentions its pages any more.
                for (name, shape) in [("large", 309), ("other", 319), ("step", 4)] {
                    self.step(name, shape);
                }
            }
            Phase::Sweep | Phase::Forget => (0..varied).for_each(|n| self.varied(phase, n)),
            _ => {
                for shape in [0, 1, 0, 1, 0, 1] {
                    self.step(["cond", "uncond"][shape as usize], shape);
                }
                if phase == Phase::Refill {
                    self.compiler().trim().expect("nothing fails yet");
                }
            }
        }
    }

    fn run(&mut self, phase: Phase, varied: u64) {
        match phase {
            Phase::Begin => {}
            Phase::Record => self.step("step", 309),
            Phase::HandOver => self.step("step", 4),
            Phase::Refill => {
                self.step("cond", 0);
                self.step("uncond", 1);
            }
            Phase::Trim => {
                let trimmed = self.compiler().trim();
                self.errors.extend(trimmed.err());
            }
            Phase::Sweep | Phase::Forget => self.varied(phase, varied),
            Phase::Compile => {
                let compiled = self.compiler().compile();
                self.errors.extend(compiled.err());
            }
            Phase::Drop => {
                self.compiler = None;
                self.check();
                self.free_all();
            }
        }
        self.check();
    }

    fn free_all(&mut self) {
        for (at, pattern) in std::mem::take(&mut self.kept) {
            pattern.check(&*self.device, at);
            memory_compiler::free(Address(at)).expect("live");
        }
    }
}

/// The number of varied steps after which the next one sweeps, or forgets.
fn varied_before(phase: Phase) -> u64 {
    let mut world = World::new(phase, counting_host(Bytes(PAGE))).expect("a compiler");
    let mapped = |world: &World| world.device.books().mappings_alive;
    let found = (0..4_000).find(|&n| {
        let (before, forgotten) = (mapped(&world), world.compiler().stats().edges_forgotten);
        world.varied(phase, n);
        let is_forgetting = world.compiler().stats().edges_forgotten > forgotten;
        // A step alone takes a few pages from one space to the other.
        let is_sweeping = before.saturating_sub(mapped(&world)) > 20;
        is_sweeping && is_forgetting == (phase == Phase::Forget)
    });
    drop(world.compiler.take());
    world.free_all();
    found.expect("it comes to that")
}

fn errors() -> Vec<(DeviceError, Repeat)> {
    let call = Call::Map;
    let driver = DeviceError::Driver { call, code: 999 };
    let info = MemoryInfo {
        free: Bytes(0),
        total: Bytes::mib(1),
    };
    let full = DeviceError::OutOfMemory { info };
    vec![
        (driver.clone(), Repeat::Once),
        (driver, Repeat::Always),
        (full.clone(), Repeat::Once),
        (full, Repeat::Always),
        (DeviceError::NotReady, Repeat::Once),
        (DeviceError::NotReady, Repeat::Times(3)),
        (DeviceError::NotReady, Repeat::Always),
    ]
}

/// One program, in which a call of one kind fails; how many calls did, and whether it was told.
fn fails(
    phase: Phase,
    varied: u64,
    call: Call,
    n: u64,
    how: &(DeviceError, Repeat),
) -> (u64, bool) {
    let (error, repeat) = how;
    let what = || format!("{phase:?}: {call:?} {n} {repeat:?} {error}");
    let device = counting_host(Bytes(PAGE));
    let arm = || {
        let failing = device.upstream();
        failing.fail_call_at(call, n, error.clone(), *repeat);
    };
    if phase == Phase::Begin {
        arm();
    }
    let mut world = match World::new(phase, device.clone()) {
        Ok(world) => world,
        Err(refused) => {
            assert!(
                phase == Phase::Begin && is_of_device(&refused),
                "{}",
                what()
            );
            assert!(device.is_empty(), "{}", what());
            let failures = device.upstream().failures();
            device.upstream().disarm();
            World::new(phase, device).expect("the next one works");
            return (failures, true);
        }
    };
    world.prepare(phase, varied);
    assert_eq!(world.errors, [], "nothing fails yet");
    arm();
    world.run(phase, varied);
    let failures = device.upstream().failures();
    device.upstream().disarm();
    for error in &world.errors {
        assert!(is_of_device(error), "{}: {error}", what());
    }
    let told = !world.errors.is_empty();
    // What goes away when it is asked again is seen by nobody.
    let goes = *error == DeviceError::NotReady && *repeat != Repeat::Always;
    assert!(!(told && goes), "{}: {:?}", what(), world.errors);
    if phase != Phase::Drop {
        world.errors.clear();
        for shape in [0, 1, 2, 0, 1] {
            world.step("step", shape);
        }
        world.compiler().trim().expect("trimming works");
        world.step("step", 0);
        assert_eq!(world.errors, [], "the next steps work after {}", what());
        let stats = world.compiler().stats();
        assert_eq!((stats.bad_frees, stats.held), (0, device.books().held));
        world.compiler = None;
        world.check();
        world.free_all();
    }
    let is_left = !device.is_empty();
    // Only a device that refuses to take things back while the compiler goes, or to be waited for, keeps them.
    let may_keep = phase == Phase::Drop
        && *repeat != Repeat::Once
        && matches!(
            call,
            Call::Unmap | Call::Release | Call::Unreserve | Call::Synchronise
        )
        && failures > 0;
    assert!(!is_left || may_keep, "{} left {:?}", what(), device.books());
    if is_left {
        assert!(!goes, "{}: {:?}", what(), device.books());
        // `Host` would complain of what it was not allowed to take back.
        std::mem::forget(device);
    }
    (failures, told)
}

fn is_of_device(error: &Error) -> bool {
    matches!(
        error,
        Error::Device { .. } | Error::OutOfMemory { .. } | Error::Reservation { .. }
    )
}

#[test]
fn each_call_may_fail_at_each_n_in_each_phase() {
    let calls = Call::MEMORY.into_iter().chain([Call::Synchronise]);
    let (mut all, mut told_all) = (0, 0);
    for phase in PHASES {
        let varied = match phase {
            Phase::Sweep | Phase::Forget => varied_before(phase),
            _ => 0,
        };
        let (mut programs, mut told) = (0_u64, 0_u64);
        let mut reached = Vec::new();
        for call in calls.clone() {
            for how in errors() {
                let mut n = 0;
                loop {
                    let (failures, was_told) = fails(phase, varied, call, n, &how);
                    if failures == 0 {
                        break;
                    }
                    programs += 1;
                    told += u64::from(was_told);
                    if reached.last() != Some(&call) {
                        reached.push(call);
                    }
                    // Forgetting takes a thousand pages away, one call each: fewer of the later ones.
                    n += 1 + if phase == Phase::Forget { n / 2 } else { 0 };
                }
            }
        }
        println!("{phase:?}: {programs} programs, {told} were told an error; calls {reached:?}");
        let needed: &[Call] = match phase {
            Phase::Begin => &[Call::Reserve],
            Phase::Record => &[Call::Create, Call::Map, Call::Allow],
            Phase::HandOver => &[Call::Map, Call::Allow, Call::Unmap, Call::Synchronise],
            Phase::Refill => &[Call::Create, Call::Map, Call::Allow],
            Phase::Trim => &[Call::Unmap, Call::Release, Call::Synchronise],
            Phase::Sweep | Phase::Forget => &[Call::Unmap, Call::Synchronise],
            Phase::Compile => &[Call::Map, Call::Allow, Call::Unmap, Call::Release],
            Phase::Drop => &[
                Call::Unmap,
                Call::Release,
                Call::Unreserve,
                Call::Synchronise,
            ],
        };
        for call in needed {
            assert!(reached.contains(call), "{phase:?} makes no {call:?}");
        }
        all += programs;
        told_all += told;
    }
    println!("{all} programs in all, {told_all} were told an error");
}
