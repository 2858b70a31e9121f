//! What an event costs on a GPU: the recorded traces of three models through the GPU hook, replayed from
//! a step and passed on to the driver's stream-ordered allocator. Skips aloud without a GPU.
//!
//! Times in the table are per event, medians of 21 steps that take turns; criterion's own lines are per
//! step. Nothing is launched in between, so that caches are warmer than in a real step, and the driver's
//! pool has what it needs after the first.

use std::ffi::c_void;
use std::io::BufReader;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use cudarc::driver::CudaContext;
use memory_compiler::device::{Cuda, Device, StreamId};
use memory_compiler::hook::cuda::{alloc_async, counts, free_async};
use memory_compiler::trace::{Event, Trace};
use memory_compiler::{Compiler, Options};

// Without effect here, where cudarc loads the driver at run time: the functions behind it are called.
memory_compiler::interpose_cuda!();

#[derive(Clone, Copy)]
enum Op {
    Alloc(usize, usize),
    Free(usize),
}

struct Program {
    name: &'static str,
    ops: Vec<Op>,
    slots: usize,
}

/// The traces are part of the program: it runs on machines without the repository.
const TRACES: [(&str, &[u8]); 3] = [
    ("sd15", include_bytes!("../tests/data/sd15.trace.gz")),
    ("sdxl", include_bytes!("../tests/data/sdxl.trace.gz")),
    ("flux", include_bytes!("../tests/data/flux.trace.gz")),
];

fn load((name, bytes): (&'static str, &[u8])) -> Program {
    let trace =
        Trace::read(BufReader::new(flate2::read::GzDecoder::new(bytes))).expect("a sound trace");
    let mut ops = Vec::new();
    let mut slots = 0;
    for event in &trace.events {
        match event {
            Event::Alloc { buffer, size } => {
                slots = slots.max(*buffer as usize + 1);
                ops.push(Op::Alloc(*buffer as usize, size.0 as usize));
            }
            Event::Free { buffer } => ops.push(Op::Free(*buffer as usize)),
            Event::Enter(_) | Event::Leave => {}
        }
    }
    Program { name, ops, slots }
}

/// The stream of the calling thread, as Candle's devices use it.
fn stream() -> *mut c_void {
    ptr::without_provenance_mut(2)
}

fn run(program: &Program, live: &mut [u64]) {
    for op in &program.ops {
        let code = match *op {
            // SAFETY: the place is writable, the stream is the thread's.
            Op::Alloc(slot, size) => unsafe {
                alloc_async(&raw mut live[slot], size.max(1), stream())
            },
            // SAFETY: the trace frees each buffer once; nothing uses it.
            Op::Free(slot) => unsafe { free_async(live[slot], stream()) },
        };
        assert_eq!(code, 0, "the device has memory");
    }
}

fn step(compiler: &mut Compiler, program: &Program, live: &mut [u64]) {
    let step = compiler.begin("step").expect("no step is active");
    run(program, live);
    step.finish().expect("nothing fails");
}

fn median(mut times: Vec<Duration>, events: usize) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e9 / events as f64
}

fn timed(f: impl FnOnce()) -> Duration {
    let began = Instant::now();
    f();
    began.elapsed()
}

fn events(c: &mut Criterion) {
    if Cuda::count() == 0 {
        println!("skipped: no GPU");
        return;
    }
    // The driver's calls go to the current context.
    let context = CudaContext::new(0).expect("a GPU has a context");
    context.bind_to_thread().expect("it can be made current");
    let gpu = Arc::new(Cuda::new(0).expect("a GPU"));
    println!(
        "{:<8} {:>8} | {:>10} {:>10}",
        "trace", "events", "replay", "driver"
    );
    let mut group = c.benchmark_group("gpu step");
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(1))
        .warm_up_time(Duration::from_millis(300));
    for program in TRACES.map(load) {
        let mut live = vec![0; program.slots];
        let mut compiler =
            Compiler::new(gpu.clone(), Options::default()).expect("addresses are free");
        compiler
            .use_stream(StreamId(2))
            .expect("a stream can follow another");
        step(&mut compiler, &program, &mut live);
        run(&program, &mut live);
        let (mut replay, mut driver) = (Vec::new(), Vec::new());
        for _ in 0..21 {
            let before = counts();
            replay.push(timed(|| step(&mut compiler, &program, &mut live)));
            assert_eq!(counts(), before, "the driver sees nothing of a replay");
            driver.push(timed(|| run(&program, &mut live)));
            gpu.synchronise().expect("nothing is wrong with the device");
        }
        let stats = compiler.stats();
        assert_eq!((stats.breaks_total, stats.device_calls_step), (0, 0));
        let events = program.ops.len();
        println!(
            "{:<8} {events:>8} | {:>7.1} ns {:>7.0} ns",
            program.name,
            median(replay, events),
            median(driver, events)
        );
        group.throughput(Throughput::Elements(events as u64));
        group.bench_function(BenchmarkId::new("replay", program.name), |b| {
            b.iter(|| step(&mut compiler, &program, &mut live));
        });
        group.bench_function(BenchmarkId::new("driver", program.name), |b| {
            b.iter(|| run(&program, &mut live));
        });
    }
    group.finish();
}

criterion_group!(benches, events);
criterion_main!(benches);
