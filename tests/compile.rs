//! Compiling a recorded step graph: what is held, what still replays, and what a failure leaves.

mod reference;

use std::collections::{BTreeMap, HashMap};
use std::io::BufReader;
use std::sync::Arc;

use flate2::read::GzDecoder;
use memory_compiler::device::adaptor::Repeat;
use memory_compiler::device::{Call, Device, DeviceError};
use memory_compiler::trace::{Event, Trace};
use memory_compiler::{
    Address, Allocation, Bytes, Compiler, Error, Options, Snapshot, Step, StepReport, validate,
};
use proptest::prelude::*;
use reference::devices::{CountingHost, Pattern, counting_host};

const PAGE: u64 = 4096;

fn options() -> Options {
    Options {
        address_space: Bytes::gib(64),
        ..Options::default()
    }
}

fn compiler(granule: Bytes) -> (CountingHost, Compiler) {
    let device = counting_host(granule);
    let compiler = Compiler::new(Arc::clone(&device) as Arc<dyn Device>, options()).unwrap();
    (device, compiler)
}

fn here(step: &Step<'_>, size: u64) -> Address {
    match step.alloc(Bytes(size)).unwrap() {
        Allocation::Here(address) => address,
        Allocation::Elsewhere => panic!("{size} bytes were not served"),
    }
}

fn assert_disjoint(snapshot: &Snapshot) {
    validate::disjoint(&snapshot.live, snapshot.granule, |page| {
        snapshot.frame_at(page)
    })
    .unwrap();
}

fn load(name: &str) -> Trace {
    let path = format!("{}/tests/data/{name}.trace.gz", env!("CARGO_MANIFEST_DIR"));
    Trace::read(BufReader::new(GzDecoder::new(
        std::fs::File::open(path).unwrap(),
    )))
    .unwrap()
}

/// One step of a trace whose sizes are scaled by `scale.0 / scale.1`.
fn run(compiler: &mut Compiler, name: &str, trace: &Trace, scale: (u64, u64)) -> StepReport {
    let step = compiler.begin(name).unwrap();
    let mut live = HashMap::new();
    for event in &trace.events {
        match event {
            Event::Alloc { buffer, size } => {
                live.insert(*buffer, here(&step, size.0 * scale.0 / scale.1));
            }
            Event::Free { buffer } => step.free(live.remove(buffer).unwrap()).unwrap(),
            Event::Enter(_) | Event::Leave => {}
        }
    }
    step.finish().unwrap()
}

fn assert_replayed(report: StepReport) {
    let numbers = (report.breaks, report.recorded, report.device_calls);
    assert_eq!(numbers, (0, 0, 0), "breaks, recorded, device calls");
}

fn trace_holds_its_floor(name: &str) {
    let trace = load(name);
    let granule = Bytes::mib(2);
    let (device, mut compiler) = compiler(granule);
    for _ in 0..2 {
        run(&mut compiler, "step", &trace, (1, 1));
    }
    let creates = device.books().pages_created;
    let held_peak = device.books().held_peak;
    let compiled = compiler.compile().unwrap();
    assert!(compiled.is_installed, "{compiled:?}");
    assert_eq!(device.books().held_peak, held_peak, "{compiled:?}");
    for _ in 0..3 {
        assert_replayed(run(&mut compiler, "step", &trace, (1, 1)));
    }
    let stats = compiler.stats();
    println!("{name}: {stats}");
    assert_eq!(
        device.books().pages_created,
        creates,
        "no page was made for it"
    );
    assert_eq!(device.books().held, stats.held);
    assert_eq!(stats.held, compiled.held_after);
    assert!(stats.held.0 <= stats.floor.0 + granule.0, "{stats}");
    assert!(stats.virtual_bytes.0 <= stats.held.0 + granule.0, "{stats}");
    drop(compiler);
    assert!(device.is_empty());
}

#[test]
fn sd15_holds_its_floor_after_a_compile() {
    trace_holds_its_floor("sd15");
}

#[test]
fn sdxl_holds_its_floor_after_a_compile() {
    trace_holds_its_floor("sdxl");
}

#[test]
fn flux_holds_its_floor_after_a_compile() {
    trace_holds_its_floor("flux");
}

#[test]
fn two_resolutions_hold_the_larger_floor_and_both_replay() {
    let trace = load("sd15");
    let granule = Bytes::mib(2);
    let (_, mut compiler) = compiler(granule);
    for _ in 0..2 {
        run(&mut compiler, "step", &trace, (1, 1));
        run(&mut compiler, "step", &trace, (9, 4));
    }
    assert!(compiler.compile().unwrap().is_installed);
    for _ in 0..2 {
        assert_replayed(run(&mut compiler, "step", &trace, (1, 1)));
        assert_replayed(run(&mut compiler, "step", &trace, (9, 4)));
    }
    let stats = compiler.stats();
    println!("{stats}");
    assert!(stats.held.0 <= stats.floor.0 + granule.0, "{stats}");
}

/// A step whose recorded layout holds more than its floor: a page is half empty wherever one goes.
fn wasteful(compiler: &mut Compiler, name: &str, shape: u64) -> StepReport {
    let step = compiler.begin(name).unwrap();
    let mut live = Vec::new();
    for i in 0..24 {
        live.push(here(
            &step,
            PAGE * (1 + (i * 7 + shape) % 3) + 512 * (1 + (i * 5 + shape) % 7),
        ));
        if i % 3 == 2 {
            let at = (i as usize * 11 + shape as usize) % live.len();
            step.free(live.remove(at)).unwrap();
        }
    }
    assert_disjoint(&step.snapshot());
    live.into_iter()
        .for_each(|address| step.free(address).unwrap());
    step.finish().unwrap()
}

#[test]
fn a_failure_of_any_device_call_leaves_a_layout_that_works() {
    let error = DeviceError::Driver {
        call: Call::Map,
        code: 999,
    };
    for repeat in [Repeat::Once, Repeat::Always] {
        for n in 0.. {
            let (device, mut compiler) = compiler(Bytes(PAGE));
            for _ in 0..2 {
                wasteful(&mut compiler, "cond", 0);
                wasteful(&mut compiler, "uncond", 4);
            }
            let held = device.books().held;
            device.upstream().fail_at(n, error.clone(), repeat);
            let result = compiler.compile();
            let was_reached = device.upstream().failures() > 0;
            device.upstream().disarm();
            assert!(device.books().held <= held);
            match &result {
                Ok(compiled) => assert!(compiled.is_installed),
                Err(error) => assert!(matches!(error, Error::Device { .. }), "{error}"),
            }
            if result.is_err() {
                assert_eq!(device.books().held, held, "the old layout");
            }
            for (name, shape) in [("cond", 0), ("uncond", 4), ("cond", 0)] {
                let report = wasteful(&mut compiler, name, shape);
                assert_eq!((report.breaks, report.recorded), (0, 0));
            }
            compiler.compile().unwrap();
            assert_replayed(wasteful(&mut compiler, "uncond", 4));
            drop(compiler);
            assert!(device.is_empty(), "call {n}: {:?}", device.books());
            if !was_reached {
                assert!(n > 3, "a compile makes device calls");
                break;
            }
        }
    }
}

#[test]
fn survivors_stay_readable_where_they_are_and_the_step_replays_after_them() {
    let (device, mut compiler) = compiler(Bytes(PAGE));
    for _ in 0..2 {
        wasteful(&mut compiler, "step", 0);
    }
    let step = compiler.begin("step").unwrap();
    let kept = here(&step, 3 * PAGE + 512);
    step.finish().unwrap();
    let pattern = Pattern {
        seed: 3,
        size: 3 * PAGE + 512,
    };
    pattern.write(&*device, kept.0);
    let compiled = compiler.compile().unwrap();
    pattern.check(&*device, kept.0);
    assert_disjoint(&compiler.snapshot());
    for _ in 0..3 {
        wasteful(&mut compiler, "step", 0);
        pattern.check(&*device, kept.0);
    }
    memory_compiler::free(kept).unwrap();
    wasteful(&mut compiler, "step", 0);
    assert_replayed(wasteful(&mut compiler, "step", 0));
    let held = device.books().held;
    compiler.compile().unwrap();
    assert!(device.books().held <= held, "{compiled:?}");
    assert_replayed(wasteful(&mut compiler, "step", 0));
    drop(compiler);
    assert!(device.is_empty());
}

#[test]
fn new_branches_after_a_compile_are_folded_into_the_next() {
    let (_, mut compiler) = compiler(Bytes(PAGE));
    for round in 0..6 {
        for shape in 0..=round {
            wasteful(&mut compiler, "step", shape);
        }
        compiler.compile().unwrap();
        for shape in 0..=round {
            assert_replayed(wasteful(&mut compiler, "step", shape));
        }
    }
    let stats = compiler.stats();
    assert!(stats.held.0 <= stats.floor.0 + 2 * PAGE, "{stats}");
}

#[test]
fn a_pinned_layout_refuses_compile_and_trim_and_keeps_addresses() {
    let (_, mut compiler) = compiler(Bytes(PAGE));
    for _ in 0..2 {
        wasteful(&mut compiler, "step", 0);
    }
    let frames = compiler.snapshot().frames;
    let (first, second) = (
        compiler.pin_layout().unwrap(),
        compiler.pin_layout().unwrap(),
    );
    drop(first);
    assert_eq!(compiler.compile(), Err(Error::Pinned));
    assert_eq!(compiler.trim(), Err(Error::Pinned));
    assert_eq!(compiler.snapshot().frames, frames);
    drop(second);
    assert!(compiler.compile().unwrap().is_installed);
    assert_ne!(compiler.snapshot().frames, frames);
    let held = compiler.stats().held;
    assert_eq!(compiler.trim(), Ok(held));
    let report = wasteful(&mut compiler, "step", 0);
    assert_eq!((report.breaks, report.recorded), (0, 0));
    assert!(report.device_calls > 0, "idle pages were mapped again");
}

#[test]
fn a_graph_that_has_settled_is_compiled_by_itself() {
    let device = counting_host(Bytes(PAGE));
    let options = Options {
        compile_after: Some(3),
        ..options()
    };
    let mut compiler = Compiler::new(device, options).unwrap();
    for _ in 0..4 {
        wasteful(&mut compiler, "step", 0);
    }
    assert_eq!(compiler.stats().compiled, None);
    assert_replayed(wasteful(&mut compiler, "step", 0));
    let compiled = compiler.stats().compiled.expect("after three quiet steps");
    assert!(compiled.is_installed && compiled.held_after < compiled.held_before);
}

/// What one record of a random program does.
#[derive(Clone, Debug)]
enum Do {
    Alloc { slot: usize, units: u64 },
    Free { slot: usize },
}

type Body = Vec<Do>;

fn bodies() -> impl Strategy<Value = Vec<Body>> {
    let record = prop_oneof![
        3 => (0..10_usize, 1..40_u64).prop_map(|(slot, units)| Do::Alloc { slot, units }),
        1 => (0..10_usize).prop_map(|slot| Do::Free { slot }),
    ];
    prop::collection::vec(prop::collection::vec(record, 1..40), 1..4)
}

/// One run of a body: `(which body, records left out from here, kept slots, what comes before)`.
fn runs() -> impl Strategy<Value = Vec<(usize, usize, u16, u8)>> {
    prop::collection::vec((0..4_usize, 0..60_usize, any::<u16>(), 0..8_u8), 1..16)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn compiles_at_any_boundary_never_let_live_buffers_overlap(bodies in bodies(), runs in runs()) {
        let (device, mut compiler) = compiler(Bytes(PAGE));
        let mut slots: BTreeMap<usize, (Address, Pattern)> = BTreeMap::new();
        let mut seed = 0;
        for (which, skipped, keep, before) in runs {
            match before {
                0..=2 => {
                    let held = device.books().held;
                    compiler.compile().unwrap();
                    prop_assert!(device.books().held <= held);
                }
                3 => {
                    compiler.trim().unwrap();
                }
                4 => {
                    if let Some((_, (address, pattern))) = slots.pop_first() {
                        pattern.check(&*device, address.0);
                        memory_compiler::free(address).unwrap();
                    }
                }
                _ => {}
            }
            slots.values().for_each(|(address, pattern)| pattern.check(&*device, address.0));
            assert_disjoint(&compiler.snapshot());
            let step = compiler.begin(["cond", "uncond"][which % 2]).unwrap();
            let free = |slots: &mut BTreeMap<usize, (Address, Pattern)>, slot: usize| {
                if let Some((address, pattern)) = slots.remove(&slot) {
                    pattern.check(&*device, address.0);
                    step.free(address).unwrap();
                }
            };
            for (at, record) in bodies[which % bodies.len()].iter().enumerate() {
                if at == skipped {
                    continue;
                }
                match *record {
                    Do::Alloc { slot, units } => {
                        free(&mut slots, slot);
                        let size = units * 512;
                        let address = here(&step, size);
                        seed += 1;
                        let pattern = Pattern { seed, size };
                        pattern.write(&*device, address.0);
                        slots.insert(slot, (address, pattern));
                        assert_disjoint(&step.snapshot());
                    }
                    Do::Free { slot } => free(&mut slots, slot),
                }
            }
            for slot in 0..10 {
                if keep & (1 << slot) == 0 || keep & (1 << 15) == 0 {
                    free(&mut slots, slot);
                }
            }
            if keep & (1 << 14) == 0 || keep & (1 << 13) == 0 {
                step.finish().unwrap();
            } else {
                step.abort();
            }
        }
        slots.values().for_each(|(address, pattern)| pattern.check(&*device, address.0));
        drop(compiler);
        for (address, _) in slots.into_values() {
            memory_compiler::free(address).unwrap();
        }
        prop_assert!(device.is_empty(), "{:?}", device.books());
    }
}
