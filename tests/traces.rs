//! The recorded traces of real models: what one step of them costs on compiled memory.

use std::collections::HashMap;
use std::io::BufReader;
use std::sync::Arc;

use flate2::read::GzDecoder;
use memory_compiler::device::adaptor::Counting;
use memory_compiler::device::{Device, Host};
use memory_compiler::trace::{Event, Trace};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Options, Step, StepReport};

fn load(name: &str) -> Trace {
    let path = format!("{}/tests/data/{name}.trace.gz", env!("CARGO_MANIFEST_DIR"));
    Trace::read(BufReader::new(GzDecoder::new(
        std::fs::File::open(path).unwrap(),
    )))
    .unwrap()
}

fn run(step: &Step<'_>, trace: &Trace) -> Vec<Address> {
    let mut live = HashMap::new();
    let mut addresses = Vec::new();
    for event in &trace.events {
        match event {
            Event::Alloc { buffer, size } => {
                let Allocation::Here(address) = step.alloc(*size).unwrap() else {
                    panic!("not served")
                };
                live.insert(*buffer, address);
                addresses.push(address);
            }
            Event::Free { buffer } => step.free(live.remove(buffer).unwrap()).unwrap(),
            Event::Enter(_) | Event::Leave => {}
        }
    }
    assert!(live.is_empty());
    addresses
}

fn held_over_live_peak(name: &str, least_replayed_while_recording: f64) {
    let trace = load(name);
    let device = Arc::new(Counting::new(Host::new(Bytes::mib(2)).unwrap()));
    let mut compiler =
        Compiler::new(Arc::clone(&device) as Arc<dyn Device>, Options::default()).unwrap();
    let mut step = || -> (Vec<Address>, StepReport) {
        let step = compiler.begin("step").unwrap();
        let addresses = run(&step, &trace);
        (addresses, step.finish().unwrap())
    };
    let (recorded, first) = step();
    assert_eq!(
        (first.events as usize, first.breaks),
        (trace.events.len(), 0)
    );
    let calls = device.memory_calls();
    for _ in 0..3 {
        let (replayed, report) = step();
        assert_eq!(
            (report.breaks, report.recorded, report.device_calls),
            (0, 0, 0)
        );
        assert_eq!(replayed, recorded);
    }
    assert_eq!(device.memory_calls(), calls);
    let stats = compiler.stats();
    let live_peak = trace.live_peak();
    let ratio = stats.held.0 as f64 / live_peak.0 as f64;
    let joined = first.replayed as f64 / trace.buffer_count() as f64;
    println!(
        "{name}: L {live_peak}, held {} ({ratio:.4} × L), virtual {}, {:.1} % of the first step replayed, \
         {} states, {} edges, {} device calls",
        stats.held,
        stats.virtual_bytes,
        joined * 100.0,
        stats.states,
        stats.edges,
        first.device_calls
    );
    assert_eq!(stats.peak, live_peak);
    assert!(ratio <= 1.02, "{ratio}");
    assert!(joined >= least_replayed_while_recording, "{joined}");
    drop(compiler);
    assert!(device.is_empty());
}

#[test]
fn sd15_holds_at_most_two_percent_over_its_live_peak() {
    held_over_live_peak("sd15", 0.28);
}

#[test]
fn sdxl_holds_at_most_two_percent_over_its_live_peak() {
    held_over_live_peak("sdxl", 0.67);
}

#[test]
fn flux_holds_at_most_two_percent_over_its_live_peak() {
    held_over_live_peak("flux", 0.67);
}
