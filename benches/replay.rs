//! What an event costs: the recorded traces of three models through the CPU hook, replayed and
//! recorded, beside the system allocator and a bump pointer behind the same hook entry.
//!
//! What the numbers mean: `replay` is a whole step (begin, every alloc and free of the trace, end) on
//! the `Host` device, `system` the same events through the system allocator, `bump` the floor: the
//! least that an entry of this shape costs (size check, thread-local, range check, counters) with
//! nothing behind it. `record` runs on a device whose calls do nothing, and makes a new compiler for
//! each step. Times are per event in the table that is printed first; criterion's own lines are per
//! step.
//!
//! `cold` is what a replayed event costs above the floor when 96 KiB of other memory are read between
//! two events, as a launch of a kernel may do: medians of 41 steps each, every event timed alone.
//!
//! What they do not mean: nothing touches the buffers, so caches are warmer than in a real step, and
//! the system allocator pays for no page fault. Sizes below the threshold are raised to it, so that
//! every event reaches the compiler.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::hint::black_box;
use std::io::BufReader;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use memory_compiler::device::{Device, DeviceError, Fence, Host, MemoryInfo, PageId, StreamId};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::trace::{Event, Trace};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Options, Step};

static MEMORY: ScopedAllocator = ScopedAllocator::new();
const THRESHOLD: usize = 16 << 10;

#[derive(Clone, Copy)]
enum Op {
    Alloc(usize, Layout),
    Free(usize, Layout),
}

struct Program {
    name: &'static str,
    ops: Vec<Op>,
    slots: usize,
    /// Pages of 2 MiB that its buffers touch.
    pages: usize,
}

fn load(name: &'static str) -> Program {
    let path = format!("{}/tests/data/{name}.trace.gz", env!("CARGO_MANIFEST_DIR"));
    let file = std::fs::File::open(path).expect("the traces are in the repository");
    let trace =
        Trace::read(BufReader::new(flate2::read::GzDecoder::new(file))).expect("a sound trace");
    let mut layouts = std::collections::HashMap::new();
    let mut ops = Vec::new();
    let mut pages = 0;
    for event in &trace.events {
        match event {
            Event::Alloc { buffer, size } => {
                let size = usize::try_from(size.0).expect("64-bit").max(THRESHOLD);
                let layout = Layout::from_size_align(size, 64).expect("small enough");
                pages += size.div_ceil(2 << 20);
                layouts.insert(*buffer, layout);
                ops.push(Op::Alloc(*buffer as usize, layout));
            }
            Event::Free { buffer } => ops.push(Op::Free(*buffer as usize, layouts[buffer])),
            Event::Enter(_) | Event::Leave => {}
        }
    }
    Program {
        name,
        ops,
        slots: layouts.len(),
        pages,
    }
}

fn run(allocator: &impl GlobalAlloc, program: &Program, live: &mut [*mut u8]) {
    for op in &program.ops {
        match *op {
            // SAFETY: the layout is not empty.
            Op::Alloc(slot, layout) => live[slot] = black_box(unsafe { allocator.alloc(layout) }),
            // SAFETY: the trace frees each buffer once, with the layout that made it.
            Op::Free(slot, layout) => unsafe { allocator.dealloc(live[slot], layout) },
        }
    }
}

/// As `run`, with as much memory read between two events as a launch of a kernel may touch, so that the
/// first cache holds nothing of the last event. Returns how long the events alone took, with the clock's own
/// time for each.
fn run_cold(allocator: &impl GlobalAlloc, program: &Program, live: &mut [*mut u8]) -> Duration {
    static OTHER: [u8; 96 << 10] = [1; 96 << 10];
    let mut all = Duration::ZERO;
    for op in &program.ops {
        for at in (0..OTHER.len()).step_by(64) {
            black_box(OTHER[at]);
        }
        let began = Instant::now();
        match *op {
            // SAFETY: the layout is not empty.
            Op::Alloc(slot, layout) => live[slot] = black_box(unsafe { allocator.alloc(layout) }),
            // SAFETY: the trace frees each buffer once, with the layout that made it.
            Op::Free(slot, layout) => unsafe { allocator.dealloc(live[slot], layout) },
        }
        all += began.elapsed();
    }
    all
}

/// A bump pointer behind an entry like the hook's.
struct Bump;

#[derive(Default)]
struct Range {
    base: u64,
    size: u64,
    top: u64,
    live: u64,
    live_bytes: u64,
    peak: u64,
    events: u64,
}

thread_local! {
    static RANGES: RefCell<Vec<Range>> = const { RefCell::new(Vec::new()) };
}

// SAFETY: never dereferenced: the benchmark writes to no buffer.
unsafe impl GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() < 4096 || layout.align() > 512 {
            return ptr::null_mut();
        }
        RANGES.with(|ranges| {
            let mut ranges = ranges.borrow_mut();
            let range = ranges.last_mut().expect("begun");
            let size = layout.size() as u64;
            let at = range.base + range.top;
            range.top += size;
            range.live += 1;
            range.live_bytes += size;
            range.peak = range.peak.max(range.live_bytes);
            range.events += 1;
            ptr::without_provenance_mut(at as usize)
        })
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        RANGES.with(|ranges| {
            let mut ranges = ranges.borrow_mut();
            let at = pointer.addr() as u64;
            let found = ranges
                .iter_mut()
                .rev()
                .find(|range| at.wrapping_sub(range.base) < range.size);
            let range = found.expect("made above");
            range.live -= 1;
            range.live_bytes -= layout.size() as u64;
            range.events += 1;
            if range.live == 0 {
                range.top = 0;
            }
        });
    }
}

/// A device whose calls do nothing.
#[derive(Debug, Default)]
struct Null(AtomicU64);

// SAFETY: it says that its memory is this machine's and has none: the benchmark touches no buffer.
unsafe impl Device for Null {
    fn granule(&self) -> Bytes {
        Bytes::mib(2)
    }
    fn is_host_memory(&self) -> bool {
        true
    }
    fn reserve(&self, _: Bytes) -> Result<Address, DeviceError> {
        Ok(Address(1 << 46))
    }
    fn unreserve(&self, _: Address, _: Bytes) -> Result<(), DeviceError> {
        Ok(())
    }
    fn create(&self) -> Result<PageId, DeviceError> {
        Ok(PageId(self.0.fetch_add(1, Ordering::Relaxed)))
    }
    fn release(&self, _: PageId) -> Result<(), DeviceError> {
        Ok(())
    }
    fn map(&self, _: Address, _: PageId) -> Result<(), DeviceError> {
        Ok(())
    }
    fn allow(&self, _: Address, _: Bytes) -> Result<(), DeviceError> {
        Ok(())
    }
    fn unmap(&self, _: Address, _: Bytes) -> Result<(), DeviceError> {
        Ok(())
    }
    fn synchronise(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn fence(&self, _: StreamId) -> Result<Fence, DeviceError> {
        Ok(Fence(0))
    }
    fn wait(&self, _: StreamId, _: Fence) -> Result<(), DeviceError> {
        Ok(())
    }
    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        Ok(MemoryInfo {
            free: Bytes::gib(1),
            total: Bytes::gib(1),
        })
    }
    fn write(&self, _: Address, _: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    fn read(&self, _: Address, _: &mut [u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    fn fill(&self, _: Address, _: Bytes, _: u8) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn null_compiler() -> Compiler {
    Compiler::new(Arc::new(Null::default()), Options::default()).expect("a device that never fails")
}

/// One whole step through the hook.
fn step(compiler: &mut Compiler, program: &Program, live: &mut [*mut u8]) {
    let step = compiler.begin("step").expect("no step is active");
    run(&MEMORY, program, live);
    step.finish().expect("nothing fails");
}

/// The median of `times` runs of `f`, which says how long each took.
fn median(times: usize, mut f: impl FnMut() -> Duration) -> f64 {
    let mut all: Vec<Duration> = (0..times).map(|_| f()).collect();
    all.sort_unstable();
    all[times / 2].as_secs_f64()
}

fn timed(f: impl FnOnce()) -> Duration {
    let began = Instant::now();
    f();
    began.elapsed()
}

/// Everything in one run, per event, with the answers checked.
fn table(programs: &[Program]) {
    println!(
        "{:<8} {:>8} {:>8} | {:>8} {:>8} {:>8} {:>8} {:>8} | record, of which pages at 20 ns, left per event",
        "trace", "events", "pages", "bump", "replay", "cold", "system", "record"
    );
    for program in programs {
        let mut live = vec![ptr::null_mut(); program.slots];
        let events = program.ops.len() as f64;
        let per_event = |seconds: f64| seconds * 1e9 / events;
        let mut compiler = Compiler::new(
            Arc::new(Host::new(Bytes::mib(2)).expect("2 MiB is a granule")),
            Options::default(),
        )
        .expect("addresses are free");
        step(&mut compiler, program, &mut live);
        // In turn, so that all three see the same machine.
        let (mut replay, mut system, mut bump) = (Vec::new(), Vec::new(), Vec::new());
        RANGES.with_borrow_mut(|ranges| {
            ranges.push(Range {
                base: 1 << 46,
                size: 1 << 40,
                ..Range::default()
            });
        });
        for _ in 0..101 {
            replay.push(timed(|| step(&mut compiler, program, &mut live)));
            system.push(timed(|| run(&System, program, &mut live)));
            bump.push(timed(|| run(&Bump, program, &mut live)));
        }
        let (mut cold, mut cold_bump) = (Vec::new(), Vec::new());
        for _ in 0..41 {
            let step = compiler.begin("step").expect("no step is active");
            cold.push(run_cold(&MEMORY, program, &mut live));
            step.finish().expect("nothing fails");
            cold_bump.push(run_cold(&Bump, program, &mut live));
        }
        let [cold, cold_bump] = [cold, cold_bump].map(|times| {
            let mut next = times.into_iter();
            per_event(median(41, || next.next().expect("counted")))
        });
        let cold = cold - cold_bump;
        RANGES.with_borrow_mut(Vec::clear);
        let stats = compiler.stats();
        assert_eq!(
            stats.branches[0].replays, 142,
            "every timed step was a replay"
        );
        assert_eq!((stats.breaks_total, stats.device_calls_step), (0, 0));
        assert_eq!(stats.replayed_step as usize * 2, program.ops.len());
        let record = median(21, || {
            let mut compiler = null_compiler();
            timed(|| step(&mut compiler, program, &mut live))
        });
        let of = |times: &mut Vec<Duration>| {
            let mut next = times.drain(..);
            per_event(median(101, || next.next().expect("counted")))
        };
        let (bump, replay, system, record) = (
            of(&mut bump),
            of(&mut replay),
            of(&mut system),
            per_event(record),
        );
        let pages = 20.0 * program.pages as f64 / events;
        println!(
            "{:<8} {:>8} {:>8} | {bump:>5.1} ns {replay:>5.1} ns {cold:>5.1} ns {system:>5.0} ns {record:>5.0} ns | {pages:.0} ns, {:.0} ns",
            program.name,
            program.ops.len(),
            program.pages,
            (record - pages).max(0.0)
        );
    }
}

/// Recording one buffer and freeing it again, with others live; every size is new, so nothing replays.
fn record_with_live(step: &Step<'_>, others: usize) -> f64 {
    let mut sizes = (0..4_000_u64).map(|i| Bytes(64 * 512 + i * 512));
    let others: Vec<Address> = (0..others).map(|_| place(step, Bytes::kib(16))).collect();
    let seconds = median(3, || {
        timed(|| {
            for size in sizes.by_ref().take(1_000) {
                let at = place(step, size);
                step.free(at).expect("it is live");
            }
        })
    });
    for other in others {
        step.free(other).expect("it is live");
    }
    seconds * 1e9 / 2_000.0
}

fn place(step: &Step<'_>, size: Bytes) -> Address {
    match step.alloc(size).expect("the device never fails") {
        Allocation::Here(at) => at,
        Allocation::Elsewhere => panic!("the step serves everything"),
    }
}

fn live_table() {
    println!("recording with other buffers live, per event:");
    for live in [1_000, 10_000, 100_000] {
        let mut compiler = null_compiler();
        let step = compiler.begin("step").expect("no step is active");
        println!("{live:>8} live | {:>5.0} ns", record_with_live(&step, live));
        step.finish().expect("nothing fails");
    }
}

fn events(c: &mut Criterion) {
    let programs = ["sd15", "sdxl", "flux"].map(load);
    table(&programs);
    live_table();
    let mut group = c.benchmark_group("step");
    group
        .sample_size(20)
        .measurement_time(Duration::from_secs(2))
        .warm_up_time(Duration::from_millis(500));
    for program in &programs {
        let mut live = vec![ptr::null_mut(); program.slots];
        group.throughput(Throughput::Elements(program.ops.len() as u64));
        let mut compiler = null_compiler();
        step(&mut compiler, program, &mut live);
        group.bench_function(BenchmarkId::new("replay", program.name), |b| {
            b.iter(|| step(&mut compiler, program, &mut live));
        });
        group.bench_function(BenchmarkId::new("system", program.name), |b| {
            b.iter(|| run(&System, program, &mut live));
        });
        group.bench_function(BenchmarkId::new("record", program.name), |b| {
            b.iter_with_setup(null_compiler, |mut compiler| {
                step(&mut compiler, program, &mut live);
                compiler
            });
        });
    }
    group.finish();
}

criterion_group!(benches, events);
criterion_main!(benches);
