//! The GPU hook's routing, on memory of this machine that says it is a GPU's. No driver is needed: what
//! passes on fails there, and that is how a test sees it.
//!
//! cudarc loads the driver at run time here, so that the macro is without effect and `check` has to say
//! so. Built with `--features cuda,cudarc/dynamic-linking` and run with `MEMORY_COMPILER_LINKED=1` it has
//! to say the opposite.

#![cfg(all(feature = "cuda", target_os = "linux"))]

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::thread;

use memory_compiler::device::adaptor::{Counting, Failing, Limiting, Repeat, Streams};
use memory_compiler::device::{
    Call, Device, DeviceError, Fence, GpuIdentity, Host, MemoryInfo, PageId, StreamId,
};
use memory_compiler::hook::cuda::{
    Driver, alloc, alloc_async, check, counts, destroy_stream, free, free_async, streams_destroyed,
};
use memory_compiler::{
    Address, BadFree, Bytes, Compiler, Error, Options, free as program_free,
    free_on as program_free_on, pause, strict_scope,
};

memory_compiler::interpose_cuda!();

/// A device that says it is a GPU's.
#[derive(Debug)]
struct Pretending<D> {
    upstream: D,
    has_pools: bool,
}

macro_rules! forward {
    ($($method:ident($($name:ident: $kind:ty),*) -> $result:ty;)+) => {
        $(fn $method(&self, $($name: $kind),*) -> $result { self.upstream.$method($($name),*) })+
    };
}

// SAFETY: every call that hands memory out is upstream's, which keeps the contract.
unsafe impl<D: Device> Device for Pretending<D> {
    fn is_host_memory(&self) -> bool {
        false
    }

    fn gpu(&self) -> Option<GpuIdentity> {
        Some(GpuIdentity {
            // No context: the current one of all threads here.
            context: 0,
            has_pools: self.has_pools,
        })
    }

    forward! {
        granule() -> Bytes;
        reserve(size: Bytes) -> Result<Address, DeviceError>;
        unreserve(base: Address, size: Bytes) -> Result<(), DeviceError>;
        create() -> Result<PageId, DeviceError>;
        release(page: PageId) -> Result<(), DeviceError>;
        map(at: Address, page: PageId) -> Result<(), DeviceError>;
        allow(at: Address, size: Bytes) -> Result<(), DeviceError>;
        unmap(at: Address, size: Bytes) -> Result<(), DeviceError>;
        synchronise() -> Result<(), DeviceError>;
        fence(stream: StreamId) -> Result<Fence, DeviceError>;
        wait(stream: StreamId, fence: Fence) -> Result<(), DeviceError>;
        memory() -> Result<MemoryInfo, DeviceError>;
        write(at: Address, bytes: &[u8]) -> Result<(), DeviceError>;
        read(at: Address, bytes: &mut [u8]) -> Result<(), DeviceError>;
        fill(at: Address, size: Bytes, value: u8) -> Result<(), DeviceError>;
    }
}

type Fake = Pretending<Counting<Streams<Failing<Limiting<Host>>>>>;

const PAGE: u64 = 4096;
/// The handles of the default streams: the driver knows them in any state, and refuses without a context,
/// which this process never makes.
const STREAM: u64 = 1;
const OTHER: u64 = 2;

fn fake(limit: u64, has_pools: bool) -> Arc<Fake> {
    let host = Limiting::new(Host::new(Bytes(PAGE)).unwrap(), Bytes(limit));
    let upstream = Counting::new(Streams::new(Failing::new(host)));
    Arc::new(Pretending {
        upstream,
        has_pools,
    })
}

fn compiler(device: &Arc<Fake>, options: Options) -> Compiler {
    let shared: Arc<dyn Device> = Arc::clone(device) as _;
    let mut compiler = Compiler::new(shared, options).unwrap();
    compiler.use_stream(StreamId(STREAM)).unwrap();
    compiler
}

fn stream(number: u64) -> *mut c_void {
    ptr::without_provenance_mut(number as usize)
}

/// `cuMemAllocAsync`: the address, or the code.
fn take_on(number: u64, size: u64) -> Result<Address, u32> {
    let mut at = 0;
    // SAFETY: `at` is writable.
    let code = unsafe { alloc_async(&raw mut at, size as usize, stream(number)) };
    match code {
        0 => Ok(Address(at)),
        code => Err(code),
    }
}

fn take(size: u64) -> Address {
    take_on(STREAM, size).expect("a step serves the stream")
}

/// `cuMemFreeAsync`: the code.
fn give_on(number: u64, at: Address) -> u32 {
    // SAFETY: what no compiler owns is refused by the driver: there is no context.
    unsafe { free_async(at.0, stream(number)) }
}

fn give(at: Address) {
    assert_eq!(give_on(STREAM, at), 0);
}

#[test]
fn the_macro_has_an_effect_exactly_where_the_drivers_symbols_are_linked() {
    let linked = std::env::var_os("MEMORY_COMPILER_LINKED").is_some();
    let found = check();
    assert_eq!(found.is_ok(), linked, "{found:?}");
    if let Err(error) = found {
        assert_eq!(error, Error::CudaHookMissing);
        assert!(
            error
                .to_string()
                .contains("memory_compiler::interpose_cuda!();")
        );
    }
}

#[test]
fn a_step_serves_its_stream_and_replays() {
    let device = fake(1 << 20, true);
    let mut compiler = compiler(&device, Options::default());
    let mut seen = Vec::new();
    for _ in 0..3 {
        let step = compiler.begin("step").unwrap();
        let (a, b) = (take(10_000), take(5_000));
        give(a);
        let c = take(9_000);
        give(b);
        give(c);
        let report = step.finish().unwrap();
        seen.push((a, b, c, report.recorded, report.breaks));
    }
    assert_eq!(seen[0].3, 3);
    assert_eq!(
        (seen[1], seen[2]),
        ((seen[0].0, seen[0].1, seen[0].2, 0, 0), seen[1])
    );
    assert_eq!(compiler.stats().device_calls_step, 0);
}

#[test]
fn what_no_step_claims_goes_to_the_driver() {
    let device = fake(1 << 20, true);
    let mut compiler = compiler(&device, Options::default());
    let before = counts();
    assert!(take_on(STREAM, 512).is_err(), "no step is active");
    let step = compiler.begin("step").unwrap();
    assert!(take_on(OTHER, 512).is_err(), "another stream");
    assert!(
        thread::scope(|scope| scope.spawn(|| take_on(STREAM, 512)).join().unwrap()).is_err(),
        "another thread"
    );
    assert!(take_on(STREAM, 0).is_err(), "no bytes");
    {
        let _pause = pause();
        assert!(take_on(STREAM, 512).is_err(), "paused");
    }
    let mut at = 0;
    // SAFETY: `at` is writable.
    let code = unsafe { alloc(&raw mut at, 512) };
    assert_ne!(code, 0, "the synchronous call");
    assert_ne!(give_on(STREAM, Address(512)), 0, "an address of nobody");
    // SAFETY: a null pointer is refused.
    let code = unsafe { alloc_async(ptr::null_mut(), 512, stream(STREAM)) };
    assert_ne!(code, 0, "nowhere to write to");
    step.use_stream(StreamId(OTHER)).unwrap();
    assert!(
        take_on(STREAM, 512).is_err(),
        "the step serves another one now"
    );
    assert_eq!(give_on(OTHER, take_on(OTHER, 512).unwrap()), 0);
    step.finish().unwrap();
    // Other tests of this process pass on too.
    assert!(counts().allocs - before.allocs >= 8);
    assert!(counts().frees > before.frees);
}

#[test]
fn without_stream_ordered_allocation_the_synchronous_calls_are_served() {
    let device = fake(1 << 20, false);
    let mut compiler = compiler(&device, Options::default());
    let step = compiler.begin("step").unwrap();
    assert!(take_on(STREAM, 0x600).is_ok(), "a stream is never wrong");
    let mut at = 0;
    // SAFETY: `at` is writable.
    assert_eq!(unsafe { alloc(&raw mut at, 512) }, 0);
    let work = device
        .upstream
        .upstream()
        .enqueue_read(StreamId(OTHER), Address(at), Bytes(4));
    // SAFETY: the step has just made it.
    assert_eq!(unsafe { free(at) }, 0);
    assert!(
        device.upstream.upstream().saw(work).is_some(),
        "the device was waited for"
    );
    drop(step);
}

#[test]
fn a_free_from_another_stream_is_waited_for_before_reuse() {
    let device = fake(1 << 20, true);
    let mut compiler = compiler(&device, Options::default());
    let streams = device.upstream.upstream();
    for from_thread in [false, true] {
        let step = compiler.begin("step").unwrap();
        let at = take(PAGE);
        device.write(at, b"old").unwrap();
        let read = streams.enqueue_read(StreamId(OTHER), at, Bytes(3));
        if from_thread {
            thread::scope(|scope| {
                let code = scope.spawn(|| give_on(OTHER, at)).join().unwrap();
                assert_eq!(code, 0);
            });
        } else {
            assert_eq!(give_on(OTHER, at), 0);
        }
        assert_eq!(take(PAGE), at, "reused");
        let write = streams.enqueue_write(StreamId(STREAM), at, b"new");
        // The owner's stream first, as far as it may.
        while streams.run_next(StreamId(STREAM)) {}
        assert_eq!(streams.saw(write), None, "the write waits for the read");
        streams.run_all(7);
        assert_eq!(streams.saw(read), Some(Ok(b"old".to_vec())));
        give(at);
        step.finish().unwrap();
    }
}

#[test]
fn a_free_at_home_needs_no_fence_also_after_the_step() {
    let device = fake(1 << 20, true);
    let mut compiler = compiler(&device, Options::default());
    let fences = |device: &Fake| device.upstream.calls(Call::Fence);
    let step = compiler.begin("step").unwrap();
    let (a, b) = (take(PAGE), take(PAGE));
    give(a);
    step.finish().unwrap();
    give(b);
    assert_eq!(fences(&device), 0);
    assert_eq!(compiler.stats().live, Bytes::ZERO);
    let step = compiler.begin("step").unwrap();
    let a = take(PAGE);
    step.finish().unwrap();
    thread::scope(|scope| scope.spawn(|| give(a)).join().unwrap());
    assert_eq!(
        fences(&device),
        1,
        "the same stream's handle means another thread's stream"
    );
    assert_eq!(compiler.stats().live, Bytes::ZERO);
}

#[test]
fn a_step_on_another_thread_begins_behind_all_earlier_work() {
    let device = fake(1 << 20, true);
    let mut compiler = compiler(&device, Options::default());
    let step = compiler.begin("step").unwrap();
    give(take(PAGE));
    step.finish().unwrap();
    let waits = || device.upstream.calls(Call::Synchronise);
    assert_eq!(waits(), 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let step = compiler.begin("step").unwrap();
            give(take(PAGE));
            step.finish().unwrap();
        });
    });
    assert_eq!(waits(), 1);
}

#[test]
fn a_step_does_not_begin_on_another_thread_while_earlier_work_cannot_be_waited_for() {
    let device = fake(1 << 20, true);
    let mut compiler = compiler(&device, Options::default());
    let step = compiler.begin("step").unwrap();
    give(take(PAGE));
    step.finish().unwrap();
    let failing = device.upstream.upstream().upstream();
    let error = DeviceError::Driver {
        call: Call::Synchronise,
        code: 700,
    };
    failing.fail_call_at(Call::Synchronise, 0, error, Repeat::Once);
    thread::scope(|scope| {
        scope.spawn(|| {
            let refused = compiler.begin("step").map(drop).unwrap_err();
            assert!(matches!(refused, Error::Device { .. }), "{refused}");
            assert!(take_on(STREAM, PAGE).is_err(), "no step is active");
            // The next one waits again.
            let step = compiler.begin("step").unwrap();
            give(take(PAGE));
            assert_eq!(step.finish().unwrap().recorded, 0);
        });
    });
}

/// The driver destroys a stream at once and its work goes on; the next stream may get the handle. What was freed in
/// the order of the old one is used in the order of the new one: so the old one's work is waited for.
#[test]
fn a_stream_that_gets_the_handle_of_a_destroyed_one_begins_behind_its_work() {
    // Of this test alone: what is destroyed is waited for by all who serve it.
    const STREAM: u64 = 0x51d0;
    const OTHER: u64 = 0x51d8;
    if Driver::exported().alloc.is_some() {
        eprintln!("SKIPPED: the driver here would be given handles of no stream");
        return;
    }
    let take = |size| take_on(STREAM, size).expect("a step serves the stream");
    let give = |at| assert_eq!(give_on(STREAM, at), 0);
    let device = fake(1 << 20, true);
    let mut compiler = compiler(&device, Options::default());
    compiler.use_stream(StreamId(STREAM)).unwrap();
    let streams = device.upstream.upstream();
    let waits = || device.upstream.calls(Call::Synchronise);
    let destroy = |number| {
        // SAFETY: there is no driver.
        let code = unsafe { destroy_stream(stream(number)) };
        assert_ne!(code, 0);
    };
    let step = compiler.begin("step").unwrap();
    let at = take(PAGE);
    device.write(at, b"old").unwrap();
    let read = streams.enqueue_read(StreamId(STREAM), at, Bytes(3));
    give(at);
    let (waited, destroyed) = (waits(), streams_destroyed());
    destroy(OTHER);
    assert_eq!(waits(), waited, "nobody serves it");
    assert_eq!(streams.saw(read), None);
    destroy(STREAM);
    assert_eq!(
        streams.saw(read),
        Some(Ok(b"old".to_vec())),
        "its work is done"
    );
    assert!(streams_destroyed() >= destroyed + 2);
    assert_eq!(take(PAGE), at, "served as the stream of that handle");
    // Whether the handle names a stream at all is not known: it waits for nothing.
    let (waited, fences) = (waits(), device.upstream.calls(Call::Fence));
    let read = streams.enqueue_read(StreamId(OTHER), at, Bytes(3));
    thread::scope(|scope| {
        assert_eq!(scope.spawn(|| give_on(OTHER, at)).join().unwrap(), 0);
    });
    assert_eq!(take(PAGE), at);
    assert!(streams.saw(read).is_some(), "the device was waited for");
    assert!(waits() > waited);
    assert_eq!(device.upstream.calls(Call::Fence), fences + 1);
    step.use_stream(StreamId(OTHER)).unwrap();
    assert_eq!(
        device.upstream.calls(Call::Fence),
        fences + 1,
        "no fence of a stream that is gone"
    );
    // The one that is named lives.
    step.use_stream(StreamId(STREAM)).unwrap();
    assert_eq!(device.upstream.calls(Call::Fence), fences + 2);
    give(at);
    step.finish().unwrap();
    drop(compiler);
    assert!(device.upstream.is_empty());
}

#[test]
fn bad_frees_are_refused_and_change_nothing() {
    let device = fake(1 << 20, true);
    let mut compiler = compiler(&device, Options::default());
    let step = compiler.begin("step").unwrap();
    let at = take(PAGE);
    assert_eq!(give_on(STREAM, Address(at.0 + 512)), 1, "inside a buffer");
    give(at);
    assert_eq!(give_on(STREAM, at), 1, "twice");
    let report = step.finish().unwrap();
    assert_eq!(report.events, 2);
    assert_eq!(compiler.stats().bad_frees, 2);
}

/// What the hook served is a framework's tensor: an address alone, which safe code can have from anywhere, does
/// not free it, whoever asks and whether it was recorded or replayed; the driver's calls do.
#[test]
fn safe_code_cannot_free_what_the_hook_served() {
    let device = fake(1 << 20, true);
    let mut compiler = compiler(&device, Options::default());
    let hooked = |address| {
        Err(Error::BadFree {
            address,
            reason: BadFree::Hooked,
        })
    };
    let mut bad = 0;
    for round in 0..3 {
        let step = compiler.begin("step").unwrap();
        let (a, b, c) = (take(PAGE), take(2 * PAGE), take(PAGE));
        device.write(a, b"mine").unwrap();
        assert_eq!(step.free(a), hooked(a), "round {round}");
        assert_eq!(program_free(a), hooked(a));
        for number in [STREAM, OTHER] {
            assert_eq!(step.free_on(StreamId(number), a), hooked(a));
            assert_eq!(program_free_on(StreamId(number), a), hooked(a));
        }
        bad += 6;
        // Elsewhere nobody waits for the answer.
        thread::scope(|scope| {
            let elsewhere = scope.spawn(|| (program_free(a), program_free_on(StreamId(OTHER), a)));
            assert_eq!(elsewhere.join().unwrap(), (Ok(()), Ok(())));
        });
        bad += 2;
        let next = take(PAGE);
        assert_ne!(next, a, "it is live");
        let stats = step.stats();
        assert_eq!((stats.live, stats.bad_frees), (Bytes(5 * PAGE), bad));
        give(next);
        // Each way in which a framework frees.
        assert_eq!(give_on(OTHER, b), 0);
        thread::scope(|scope| {
            assert_eq!(scope.spawn(|| give_on(STREAM, c)).join().unwrap(), 0);
        });
        assert_eq!(step.stats().live, Bytes(PAGE));
        step.finish().unwrap();
        assert_eq!(program_free(a), Ok(()), "the owner looks later");
        bad += 1;
        assert_eq!(compiler.stats().live, Bytes(PAGE));
        let mut bytes = [0; 4];
        device.read(a, &mut bytes).unwrap();
        assert_eq!(&bytes, b"mine");
        // SAFETY: the step made it.
        assert_eq!(unsafe { free(a.0) }, 0);
        let stats = compiler.stats();
        assert_eq!((stats.live, stats.bad_frees), (Bytes::ZERO, bad));
    }
    let step = compiler.begin("step").unwrap();
    let left = take(PAGE);
    step.finish().unwrap();
    drop(compiler);
    assert_eq!(program_free(left), Ok(()));
    assert!(!device.upstream.is_empty(), "it outlives its compiler");
    give(left);
    assert!(device.upstream.is_empty());
}

#[test]
fn a_strict_break_is_served_and_the_step_returns_it() {
    let device = fake(1 << 20, true);
    let mut compiler = compiler(&device, Options::default());
    let mut step = |size| {
        compiler.step(|| {
            let _strict = strict_scope("inner");
            give(take(size));
            Ok::<_, Error>(())
        })
    };
    step(PAGE).unwrap();
    let error = step(2 * PAGE).unwrap_err();
    assert!(matches!(error, Error::Strict { .. }), "{error}");
    step(PAGE).unwrap();
}

#[test]
fn over_the_budget_the_call_fails_and_the_driver_is_not_asked() {
    let device = fake(1 << 20, true);
    let options = Options {
        budget: Some(Bytes(PAGE)),
        ..Options::default()
    };
    let mut compiler = compiler(&device, options);
    let step = compiler.begin("step").unwrap();
    assert_eq!(
        take_on(STREAM, 2 * PAGE),
        Err(2),
        "CUDA_ERROR_OUT_OF_MEMORY"
    );
    let error = step.finish().unwrap_err();
    assert!(matches!(error, Error::OverBudget { .. }), "{error}");
}

#[test]
fn out_of_memory_asks_the_driver_before_the_step_fails() {
    let device = fake(PAGE, true);
    let mut compiler = compiler(&device, Options::default());
    let step = compiler.begin("step").unwrap();
    let code = take_on(STREAM, 2 * PAGE).unwrap_err();
    assert_ne!(code, 2, "it is the driver's: there is no context");
    let error = step.finish().unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    let step = compiler.begin("step").unwrap();
    give(take(PAGE));
    step.finish().unwrap();
}

#[test]
fn one_thread_serves_two_gpus_by_their_streams() {
    let (one, two) = (fake(1 << 20, true), fake(1 << 20, true));
    let (mut first, mut second) = (
        compiler(&one, Options::default()),
        compiler(&two, Options::default()),
    );
    second.use_stream(StreamId(OTHER)).unwrap();
    for _ in 0..2 {
        let (outer, inner) = (first.begin("step").unwrap(), second.begin("step").unwrap());
        let (a, b) = (take(PAGE), take_on(OTHER, PAGE).unwrap());
        assert_eq!(give_on(OTHER, b), 0);
        inner.finish().unwrap();
        give(a);
        outer.finish().unwrap();
    }
    for compiler in [&mut first, &mut second] {
        let stats = compiler.stats();
        assert_eq!((stats.recorded_total, stats.replayed_total), (1, 1));
    }
}
