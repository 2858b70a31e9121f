//! Streams, threads, devices and faults on a real GPU. Without one each test says so and passes.
//!
//! The tests take turns: two of them ask for most of the GPU's memory.

#![cfg(all(feature = "cuda", target_os = "linux"))]

#[path = "robust_cuda/handles.rs"]
mod handles;
mod reference;

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, CudaStream, sys};
use memory_compiler::device::adaptor::{Counting, Failing, Limiting, Repeat};
use memory_compiler::device::{Call, Cuda, Device, DeviceError, MemoryInfo, StreamId};
use memory_compiler::hook::cuda::{alloc_async, free_async};
use memory_compiler::{
    Address, Allocation, Bytes, Compiler, Error, Options, Step, free, free_on, pause,
};

use reference::devices::Pattern;
use reference::pair::on_thread;

memory_compiler::interpose_cuda!();

const MIB: u64 = 1 << 20;
/// Large enough for a copy to take tens of microseconds.
const LARGE: u64 = 64 * MIB;

type Books = Counting<Failing<Limiting<Cuda>>>;

static ALONE: Mutex<()> = Mutex::new(());

/// The first GPU, with its primary context current on this thread.
struct World {
    device: Arc<Books>,
    context: Arc<CudaContext>,
    _alone: MutexGuard<'static, ()>,
}

fn world() -> Option<World> {
    if Cuda::count() == 0 {
        eprintln!("SKIPPED: no GPU here");
        return None;
    }
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let context = CudaContext::new(0).expect("the first GPU");
    let gpu = Limiting::new(Cuda::new(0).expect("the first GPU"), Bytes(u64::MAX));
    Some(World {
        device: Arc::new(Counting::new(Failing::new(gpu))),
        context,
        _alone: alone,
    })
}

impl World {
    fn stream(&self) -> Arc<CudaStream> {
        self.context.new_stream().expect("a stream")
    }

    fn compiler(&self, options: Options) -> Compiler {
        Compiler::new(Arc::clone(&self.device) as Arc<dyn Device>, options).expect("a compiler")
    }

    /// A compiler whose steps serve a stream.
    fn compiler_on(&self, stream: &CudaStream) -> Compiler {
        let mut compiler = self.compiler(Options::default());
        compiler.use_stream(id(stream)).expect("a fence");
        compiler
    }

    fn is_filled(&self, at: Address, value: u8) -> bool {
        let mut seen = vec![0; LARGE as usize];
        self.device.read(at, &mut seen).expect("mapped");
        seen.iter().all(|&byte| byte == value)
    }
}

fn id(stream: &CudaStream) -> StreamId {
    StreamId(stream.cu_stream() as u64)
}

fn done(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// Enqueues a fill.
fn fill(stream: &CudaStream, at: Address, value: u8) {
    // SAFETY: `at` is a live buffer of LARGE bytes of this GPU, or the test is about that it was one.
    done(unsafe { sys::cuMemsetD8Async(at.0, value, LARGE as usize, stream.cu_stream()) });
}

/// Enqueues so many copies, of which each takes tens of microseconds.
fn copy(stream: &CudaStream, from: Address, to: Address, times: usize) {
    for _ in 0..times {
        // SAFETY: both are live buffers of LARGE bytes of this GPU when the copies are enqueued.
        let result =
            unsafe { sys::cuMemcpyDtoDAsync_v2(to.0, from.0, LARGE as usize, stream.cu_stream()) };
        done(result);
    }
}

fn here(step: &Step<'_>, size: u64) -> Address {
    match step.alloc(Bytes(size)) {
        Ok(Allocation::Here(address)) => address,
        other => panic!("{size} bytes were not served: {other:?}"),
    }
}

/// `cuMemAllocAsync` as a framework calls it.
fn take_on(stream: &CudaStream, size: u64) -> Result<Address, u32> {
    let mut at = 0;
    // SAFETY: `at` is writable; the stream is alive.
    let code = unsafe {
        alloc_async(
            &raw mut at,
            size as usize,
            stream.cu_stream().cast::<c_void>(),
        )
    };
    if code == 0 {
        Ok(Address(at))
    } else {
        Err(code)
    }
}

fn give_on(stream: &CudaStream, at: Address) {
    let stream = stream.cu_stream().cast::<c_void>();
    // SAFETY: the address came from `take_on` and is not used any more.
    let code = unsafe { free_async(at.0, stream) };
    assert_eq!(code, 0);
}

/// Where a stream other than the step's still reads a buffer that it frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Step,
    Thread,
    Hook,
}

#[test]
fn a_buffer_freed_on_another_stream_is_reused_behind_its_work() {
    let Some(world) = world() else { return };
    let (own, other) = (world.stream(), world.stream());
    for from in [From::Step, From::Thread, From::Hook] {
        let mut compiler = world.compiler_on(&own);
        for round in 1..6_u8 {
            let step = compiler.begin("step").expect("a step");
            let copied = here(&step, LARGE);
            let buffer = here(&step, LARGE);
            fill(&own, buffer, round);
            own.synchronize().expect("it works");
            copy(&other, buffer, copied, 40);
            match from {
                From::Step => step.free_on(id(&other), buffer).expect("live"),
                From::Thread => {
                    let stream = id(&other);
                    on_thread(move || free_on(stream, buffer)).expect("live");
                }
                From::Hook => give_on(&other, buffer),
            }
            assert_eq!(here(&step, LARGE), buffer, "{from:?}: taken again");
            fill(&own, buffer, 0xEE);
            own.synchronize().expect("it works");
            other.synchronize().expect("it works");
            assert!(
                world.is_filled(copied, round),
                "{from:?}, round {round}: overwritten while it was read"
            );
            step.free(buffer).expect("live");
            step.free(copied).expect("live");
            step.finish().expect("the step ends well");
        }
        drop(compiler);
        assert!(world.device.is_empty());
    }
}

#[test]
fn a_step_that_moves_to_another_stream_reuses_places_behind_the_work_of_the_first() {
    let Some(world) = world() else { return };
    let (first, second) = (world.stream(), world.stream());
    let mut compiler = world.compiler_on(&first);
    for round in 1..6_u8 {
        compiler.use_stream(id(&first)).expect("a fence");
        let step = compiler.begin("step").expect("a step");
        let copied = here(&step, LARGE);
        let buffer = here(&step, LARGE);
        fill(&first, buffer, round);
        copy(&first, buffer, copied, 40);
        step.free_on(id(&first), buffer).expect("live");
        step.use_stream(id(&second)).expect("a fence");
        assert_eq!(here(&step, LARGE), buffer, "taken again");
        fill(&second, buffer, 0xEE);
        second.synchronize().expect("it works");
        first.synchronize().expect("it works");
        assert!(world.is_filled(copied, round), "round {round}");
        step.free(buffer).expect("live");
        step.free(copied).expect("live");
        step.finish().expect("the step ends well");
    }
    drop(compiler);
    assert!(world.device.is_empty());
}

#[test]
fn a_step_serves_its_stream_and_thread_and_the_driver_all_else() {
    let Some(world) = world() else { return };
    let (own, other) = (world.stream(), world.stream());
    let mut compiler = world.compiler_on(&own);
    for round in 0..3 {
        compiler.use_stream(id(&own)).expect("a fence");
        let step = compiler.begin("step").expect("a step");
        let base = step.snapshot().base;
        let is_ours = |at: Address| at >= base && at.0 < base.0 + Bytes::gib(256).0;
        let ours = take_on(&own, 8 * MIB).expect("served");
        let foreign = take_on(&other, 8 * MIB).expect("the driver has it");
        let elsewhere = std::thread::scope(|scope| {
            let there = scope.spawn(|| {
                world.context.bind_to_thread().expect("a context");
                take_on(&own, 8 * MIB).expect("the driver has it")
            });
            there.join().expect("the thread ends well")
        });
        let paused = {
            let _pause = pause();
            take_on(&own, 8 * MIB).expect("the driver has it")
        };
        assert!(is_ours(ours));
        for at in [foreign, elsewhere, paused] {
            assert!(!is_ours(at), "{at}");
        }
        step.use_stream(id(&other)).expect("a fence");
        let moved = take_on(&other, 8 * MIB).expect("served");
        let left = take_on(&own, 8 * MIB).expect("the driver has it");
        assert!(is_ours(moved) && !is_ours(left));
        // Each finds its owner, on whichever stream it is freed.
        for at in [ours, foreign, elsewhere, paused, moved, left] {
            give_on(&other, at);
        }
        assert_eq!(step.stats().live, Bytes::ZERO);
        let report = step.finish().expect("the step ends well");
        assert!(round == 0 || report.device_calls == 0, "{report:?}");
    }
    own.synchronize().expect("it works");
    other.synchronize().expect("it works");
    drop(compiler);
    assert!(world.device.is_empty());
}

/// What was freed to the driver's pool, and kept there, serves a step before it fails. Drivers of branch 580 give
/// it to `cuMemCreate` on their own; where one does not, the step asks for it (`Call::TrimPool`).
#[test]
fn what_the_drivers_pool_keeps_serves_a_step_before_it_fails() {
    let Some(world) = world() else { return };
    let stream = world.stream();
    let mut pool = std::ptr::null_mut();
    // SAFETY: `pool` is writable; the device is the context's.
    done(unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, world.context.cu_device()) });
    let set = |mut threshold: u64| {
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let value = (&raw mut threshold).cast::<c_void>();
        // SAFETY: the attribute is a 64-bit number, read from `value` during the call.
        done(unsafe { sys::cuMemPoolSetAttribute(pool, attribute, value) });
    };
    // It keeps everything, whatever is synchronised.
    set(u64::MAX);
    let free_before = world.device.memory().expect("a GPU").free.0;
    let kept = free_before.saturating_sub(3 << 30) & !(2 * MIB - 1);
    let at = take_on(&stream, kept).expect("the driver has it");
    give_on(&stream, at);
    stream.synchronize().expect("it works");
    let left = world.device.memory().expect("a GPU").free.0;
    assert!(
        left < 4 << 30,
        "the pool keeps {kept} bytes, and {left} are left"
    );
    let mut compiler = world.compiler_on(&stream);
    let step = compiler.begin("step").expect("a step");
    let buffer = here(&step, 6 << 30);
    step.free(buffer).expect("live");
    step.finish().expect("the step ends well");
    println!(
        "the driver's pool was asked to give back {} times",
        world.device.calls(Call::TrimPool)
    );
    set(0);
    drop(compiler);
    world.device.trim_pool().expect("the driver trims");
    assert!(world.device.is_empty());
}

#[test]
fn a_gpu_that_is_full_is_a_typed_error_with_true_numbers_and_the_next_step_works() {
    let Some(world) = world() else { return };
    // Addresses are not what is short: half of them are the step's.
    let options = Options {
        address_space: Bytes::gib(1024),
        ..Options::default()
    };
    let mut compiler = world.compiler(options);
    let step = compiler.begin("step").expect("a step");
    let small = here(&step, 8 * MIB);
    let all = world.device.memory().expect("a GPU");
    let refused = step.alloc(Bytes(all.free.0 + (64 << 20)));
    let Err(Error::OutOfMemory(short)) = refused else {
        panic!("more than is free was served: {refused:?}");
    };
    let (asked, held, live, left) = (short.asked, short.held, short.live, short.free);
    assert!(asked > all.free);
    assert_eq!((held, live), (Bytes(8 * MIB), Bytes(8 * MIB)));
    assert!(
        left.0 + (512 << 20) > all.free.0,
        "{left} of {} are free again",
        all.free
    );
    assert_eq!(world.device.books().held, held);
    let next = here(&step, 16 * MIB);
    step.free(next).expect("live");
    step.free(small).expect("live");
    step.finish().expect("the step ends well");
    drop(compiler);
    assert!(world.device.is_empty());
}

/// Three steps of two shapes with outputs that outlive them, a trim and a compile; what was refused.
fn program(
    world: &World,
    compiler: &mut Compiler,
    kept: &mut Vec<(Address, Pattern)>,
) -> Vec<Error> {
    let device = &*world.device;
    let mut errors = Vec::new();
    for (number, shape) in [0, 1, 0, 1].into_iter().enumerate() {
        if number == 2 {
            errors.extend(compiler.trim().err());
            errors.extend(compiler.compile().err());
        }
        let step = compiler.begin("step").expect("a step");
        let mut live: Vec<(Address, Pattern)> = Vec::new();
        for (nth, size) in [3 * MIB, 512, 5 * MIB + 512 * shape, 2 * MIB, MIB]
            .into_iter()
            .enumerate()
        {
            match step.alloc(Bytes(size)) {
                Ok(Allocation::Here(at)) => {
                    let seed = nth as u64 + 10 * number as u64;
                    let pattern = Pattern { seed, size };
                    pattern.write(device, at.0);
                    live.push((at, pattern));
                }
                Ok(Allocation::Elsewhere) => panic!("a step is active"),
                Err(error) => errors.push(error),
            }
            if nth == 2 && !live.is_empty() {
                let (at, pattern) = live.remove(0);
                pattern.check(device, at.0);
                step.free(at).expect("live");
            }
        }
        if kept.len() > 1 {
            let (at, pattern) = kept.remove(0);
            pattern.check(device, at.0);
            step.free(at).expect("live");
        }
        kept.extend(live.pop());
        for (at, pattern) in live {
            pattern.check(device, at.0);
            step.free(at).expect("live");
        }
        step.finish().expect("the step ends well");
    }
    kept.iter()
        .for_each(|(at, pattern)| pattern.check(device, at.0));
    errors
}

#[test]
fn any_call_of_the_driver_may_fail_and_nothing_is_lost() {
    let Some(world) = world() else { return };
    let failing = world.device.upstream();
    let driver = DeviceError::Driver {
        call: Call::Map,
        code: 999,
    };
    let info = MemoryInfo {
        free: Bytes(0),
        total: Bytes(MIB),
    };
    let full = DeviceError::OutOfMemory { info };
    let mut programs = 0;
    for (error, repeat) in [
        (&driver, Repeat::Once),
        (&driver, Repeat::Always),
        (&full, Repeat::Once),
        (&DeviceError::NotReady, Repeat::Once),
        (&DeviceError::NotReady, Repeat::Times(3)),
    ] {
        for n in 0.. {
            failing.fail_at(n, error.clone(), repeat);
            let options = Options {
                address_space: Bytes::gib(4),
                ..Options::default()
            };
            let made = Compiler::new(Arc::clone(&world.device) as Arc<dyn Device>, options);
            let Ok(mut compiler) = made else {
                assert!(world.device.is_empty());
                failing.disarm();
                continue;
            };
            let mut kept = Vec::new();
            let errors = program(&world, &mut compiler, &mut kept);
            let failures = failing.failures();
            failing.disarm();
            for error in &errors {
                let typed = matches!(error, Error::Device { .. } | Error::OutOfMemory { .. });
                assert!(typed, "{error}");
            }
            assert!(failures > 0 || errors.is_empty(), "{errors:?}");
            assert!(
                *error != DeviceError::NotReady || errors.is_empty(),
                "{errors:?}"
            );
            assert_eq!(
                program(&world, &mut compiler, &mut kept),
                [],
                "after call {n}"
            );
            drop(compiler);
            for (at, pattern) in kept {
                pattern.check(&*world.device, at.0);
                free(at).expect("live");
            }
            assert!(
                world.device.is_empty(),
                "call {n}: {:?}",
                world.device.books()
            );
            programs += 1;
            if failures == 0 {
                assert!(n > 30, "{n} calls are few");
                break;
            }
        }
    }
    println!("{programs} programs");
}

#[test]
fn compilers_on_several_threads_share_a_gpu_and_free_each_others_buffers() {
    let Some(world) = world() else { return };
    let (give, take) = std::sync::mpsc::channel::<(Address, Pattern)>();
    std::thread::scope(|scope| {
        for own in 0..3_u64 {
            let (give, world) = (give.clone(), &world);
            scope.spawn(move || {
                let mut compiler = world.compiler(Options::default());
                for round in 0..20 {
                    let step = compiler.begin("step").expect("a step");
                    let scratch = here(&step, 6 * MIB);
                    let size = (1 + own) * 2 * MIB + 512;
                    let at = here(&step, size);
                    let seed = own * 100 + round;
                    let pattern = Pattern { seed, size };
                    pattern.write(&*world.device, at.0);
                    step.free(scratch).expect("live");
                    step.finish().expect("the step ends well");
                    give.send((at, pattern)).expect("somebody listens");
                }
            });
        }
        drop(give);
        for (at, pattern) in take {
            pattern.check(&*world.device, at.0);
            free(at).expect("live");
        }
    });
    assert!(world.device.is_empty(), "{:?}", world.device.books());
}

#[test]
fn a_step_that_runs_on_another_thread_than_the_last_waits_for_its_work() {
    let Some(world) = world() else { return };
    let stream = world.stream();
    let mut compiler = world.compiler_on(&stream);
    let mut copied = None;
    for round in 1..8_u8 {
        let mut step = |compiler: &mut Compiler| {
            world.context.bind_to_thread().expect("a context");
            let step = compiler.begin("step").expect("a step");
            let buffer = here(&step, LARGE);
            fill(&stream, buffer, round);
            let to = *copied.get_or_insert_with(|| here(&step, LARGE));
            copy(&stream, buffer, to, 20);
            step.free(buffer).expect("live");
            step.finish().expect("the step ends well");
        };
        if round % 2 == 0 {
            step(&mut compiler);
        } else {
            std::thread::scope(|scope| {
                let there = scope.spawn(|| step(&mut compiler));
                there.join().expect("the thread ends well");
            });
        }
        stream.synchronize().expect("it works");
        assert!(
            world.is_filled(copied.expect("made"), round),
            "round {round}"
        );
    }
    free(copied.expect("made")).expect("live");
    drop(compiler);
    assert!(world.device.is_empty());
}

#[test]
fn two_gpus_are_stepped_by_one_thread() {
    if Cuda::count() < 2 {
        eprintln!("SKIPPED: {} GPUs here, and two are needed", Cuda::count());
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = [0, 1].map(|n| Arc::new(Counting::new(Cuda::new(n).expect("a GPU"))));
    let contexts = [0, 1].map(|n| CudaContext::new(n).expect("a GPU"));
    let streams = [0, 1].map(|n: usize| contexts[n].new_stream().expect("a stream"));
    let mut compilers = [0, 1].map(|n: usize| {
        let device = Arc::clone(&devices[n]) as Arc<dyn Device>;
        let mut compiler = Compiler::new(device, Options::default()).expect("a compiler");
        compiler.use_stream(id(&streams[n])).expect("a fence");
        compiler
    });
    for round in 0..4 {
        let [left, right] = &mut compilers;
        let steps = [
            left.begin("step").expect("a step"),
            right.begin("step").expect("a step"),
        ];
        let buffers = [0, 1].map(|n: usize| {
            contexts[n].bind_to_thread().expect("a context");
            let at = take_on(&streams[n], 8 * MIB).expect("served");
            let pattern = Pattern {
                seed: round * 2 + n as u64,
                size: 8 * MIB,
            };
            pattern.write(&*devices[n], at.0);
            (at, pattern)
        });
        for (n, (at, pattern)) in buffers.into_iter().enumerate() {
            pattern.check(&*devices[n], at.0);
            // While the other device is the current one.
            contexts[1 - n].bind_to_thread().expect("a context");
            give_on(&streams[n], at);
        }
        for step in steps {
            let report = step.finish().expect("the step ends well");
            assert!(round == 0 || report.device_calls == 0, "{report:?}");
        }
    }
    drop(compilers);
    assert!(devices.iter().all(|device| device.is_empty()));
}
