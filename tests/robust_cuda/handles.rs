//! What a handle means: contexts, streams that come back, functions of modules that were loaded after others; and who
//! may free what the hook served. On a real GPU.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use cudarc::driver::sys;
use memory_compiler::device::adaptor::Repeat;
use memory_compiler::device::{Call, Device, DeviceError, StreamId};
use memory_compiler::hook::cuda::{alloc_async, create_context, destroy_stream, free_async};
use memory_compiler::hook::uses::{UseWatch, forget_dropped, launch_kernel, watch_uses};
use memory_compiler::{Address, BadFree, Bytes, Error, Options, free, free_on};

use super::{LARGE, MIB, copy, done, fill, give_on, here, id, take_on, world};

fn raw_stream() -> *mut c_void {
    let mut stream = ptr::null_mut();
    let beside = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: `stream` is writable; a context is current.
    done(unsafe { sys::cuStreamCreate(&raw mut stream, beside) });
    stream.cast()
}

/// `cuMemAllocAsync` on a stream's handle.
fn take_raw(stream: *mut c_void, size: u64) -> Address {
    let mut at = 0;
    // SAFETY: `at` is writable, and the stream is one of the current context.
    let code = unsafe { alloc_async(&raw mut at, size as usize, stream) };
    assert_eq!(code, 0);
    Address(at)
}

fn give_raw(stream: *mut c_void, at: Address) {
    // SAFETY: the address came from `take_raw` and is not used any more.
    assert_eq!(unsafe { free_async(at.0, stream) }, 0);
}

#[test]
fn safe_code_cannot_free_what_the_hook_served() {
    let Some(world) = world() else { return };
    let (own, other) = (world.stream(), world.stream());
    let mut compiler = world.compiler_on(&own);
    for round in 1..4_u8 {
        let step = compiler.begin("step").expect("a step");
        let at = take_on(&own, LARGE).expect("served");
        let hooked = |address| {
            Err(Error::BadFree {
                address,
                reason: BadFree::Hooked,
            })
        };
        assert_eq!(step.free(at), hooked(at));
        for stream in [id(&own), id(&other)] {
            assert_eq!(step.free_on(stream, at), hooked(at));
            assert_eq!(free_on(stream, at), hooked(at));
        }
        fill(&own, at, round);
        let next = take_on(&own, LARGE).expect("served");
        assert_ne!(next, at);
        fill(&own, next, 0xEE);
        own.synchronize().expect("it works");
        assert!(world.is_filled(at, round));
        give_on(&other, next);
        give_on(&own, at);
        assert_eq!(step.stats().live, Bytes::ZERO);
        step.finish().expect("the step ends well");
    }
    drop(compiler);
    assert!(world.device.is_empty());
}

#[test]
fn a_default_stream_of_a_second_context_is_not_the_steps() {
    let Some(world) = world() else { return };
    let gpu = world.context.cu_device();
    for number in [2_usize, 1, 0] {
        let stream = ptr::without_provenance_mut(number);
        let mut compiler = world.compiler(Options::default());
        compiler
            .use_stream(StreamId(number as u64))
            .expect("a fence");
        for _ in 0..2 {
            let step = compiler.begin("step").expect("a step");
            let base = step.snapshot().base;
            let is_ours = |at: Address| at >= base && at.0 < base.0 + Bytes::gib(256).0;
            let ours = take_raw(stream, 8 * MIB);
            assert!(is_ours(ours), "stream {number}");
            let (mut second, mut popped) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: `second` is writable; it becomes the current context.
            let code = unsafe { create_context(&raw mut second, 0, gpu) };
            assert_eq!(code, 0);
            let foreign = take_raw(stream, 8 * MIB);
            assert!(
                !is_ours(foreign),
                "stream {number} of a second context was served"
            );
            give_raw(stream, foreign);
            let made = raw_stream();
            let refused = step.use_stream(StreamId(made.addr() as u64));
            assert!(matches!(refused, Err(Error::Device { .. })), "{refused:?}");
            // SAFETY: `popped` is writable.
            done(unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) });
            assert_eq!(popped.cast(), second);
            // SAFETY: made above, and nothing of it is used any more.
            done(unsafe { sys::cuCtxDestroy_v2(popped) });
            let again = take_raw(stream, 2 * MIB);
            assert!(is_ours(again));
            give_raw(stream, again);
            give_raw(stream, ours);
            step.finish().expect("the step ends well");
        }
        drop(compiler);
    }
    assert!(world.device.is_empty());
}

#[test]
fn a_stream_that_gets_the_handle_of_a_destroyed_one_begins_behind_its_work() {
    let Some(world) = world() else { return };
    let mut compiler = world.compiler(Options::default());
    let mut came_back = 0;
    for round in 1..9_u8 {
        let old = raw_stream();
        compiler
            .use_stream(StreamId(old.addr() as u64))
            .expect("a fence");
        let step = compiler.begin("step").expect("a step");
        let (copied, buffer) = (here(&step, LARGE), here(&step, LARGE));
        // SAFETY: a live buffer, and a live stream.
        done(unsafe { sys::cuMemsetD8Async(buffer.0, round, LARGE as usize, old.cast()) });
        for _ in 0..40 {
            // SAFETY: both are live when it is enqueued.
            done(unsafe {
                sys::cuMemcpyDtoDAsync_v2(copied.0, buffer.0, LARGE as usize, old.cast())
            });
        }
        step.free_on(StreamId(old.addr() as u64), buffer)
            .expect("live");
        // SAFETY: nobody uses the handle any more.
        assert_eq!(unsafe { destroy_stream(old) }, 0);
        let mut news = Vec::new();
        while news.last() != Some(&old) && news.len() < 32 {
            news.push(raw_stream());
        }
        let new = *news.last().expect("made");
        came_back += u32::from(new == old);
        if new != old {
            let bound = step.use_stream(StreamId(new.addr() as u64));
            bound.expect("nothing of the old one is asked");
        }
        let again = take_raw(new, LARGE);
        assert_eq!(again, buffer, "taken again");
        // SAFETY: a live buffer, and a live stream.
        done(unsafe { sys::cuMemsetD8Async(again.0, 0xEE, LARGE as usize, new.cast()) });
        world.device.synchronise().expect("it works");
        assert!(
            world.is_filled(copied, round),
            "round {round}: overwritten while it was read"
        );
        give_raw(new, again);
        step.free(copied).expect("live");
        step.finish().expect("the step ends well");
        for stream in news {
            // SAFETY: made above.
            assert_eq!(unsafe { destroy_stream(stream) }, 0);
        }
    }
    println!("{came_back} of 8 handles came back");
    drop(compiler);
    assert!(world.device.is_empty());
}

#[test]
fn a_compiler_that_cannot_wait_for_its_gpu_keeps_what_work_uses() {
    let Some(world) = world() else { return };
    let stream = world.stream();
    let mut compiler = world.compiler_on(&stream);
    let step = compiler.begin("step").expect("a step");
    let (buffer, copied) = (here(&step, LARGE), here(&step, LARGE));
    fill(&stream, buffer, 7);
    copy(&stream, buffer, copied, 200);
    for at in [buffer, copied] {
        step.free_on(id(&stream), at).expect("live");
    }
    step.finish().expect("the step ends well");
    let error = DeviceError::Driver {
        call: Call::Synchronise,
        code: 999,
    };
    let before = world.device.books();
    let failing = world.device.upstream();
    failing.fail_call_at(Call::Synchronise, 0, error, Repeat::Always);
    drop(compiler);
    failing.disarm();
    let after = world.device.books();
    assert_eq!(
        (after.pages_alive, after.mappings_alive, after.reserved),
        (before.pages_alive, before.mappings_alive, before.reserved)
    );
    stream
        .synchronize()
        .expect("no work met memory that was gone");
    assert!(world.is_filled(copied, 7));
}

/// Three parameters, of which the last is the second address; and one.
const THREE: &CStr = c".version 7.0\n.target sm_70\n.address_size 64\n\
    .visible .entry k(.param .u64 a, .param .u32 b, .param .u64 c) { ret; }\n";
const ONE: &CStr = c".version 7.0\n.target sm_70\n.address_size 64\n\
    .visible .entry k(.param .u64 a) { ret; }\n";

fn load(code: &CStr) -> Option<(sys::CUmodule, *mut c_void)> {
    let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: `module` is writable, and the code ends with zero.
    let loaded = unsafe { sys::cuModuleLoadData(&raw mut module, code.as_ptr().cast()) };
    if loaded == sys::CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND {
        return None;
    }
    done(loaded);
    // SAFETY: `function` is writable; the module is loaded and has one of this name.
    done(unsafe { sys::cuModuleGetFunction(&raw mut function, module, c"k".as_ptr()) });
    Some((module, function.cast()))
}

fn unload(module: sys::CUmodule) {
    // SAFETY: nothing of the module runs or is used any more.
    done(unsafe { sys::cuModuleUnload(module) });
}

#[derive(Default)]
struct Watch(Mutex<Vec<(Vec<Address>, StreamId)>>);

impl UseWatch for Watch {
    fn used(&self, addresses: &[Address], stream: StreamId) -> Result<(), Error> {
        let mut told = self.0.lock().expect("no panic");
        told.push((addresses.to_vec(), stream));
        Ok(())
    }
}

impl Watch {
    fn told(&self) -> Vec<(Vec<Address>, StreamId)> {
        std::mem::take(&mut *self.0.lock().expect("no panic"))
    }
}

#[test]
fn a_function_whose_handle_came_back_has_its_own_parameters_read() {
    let Some(world) = world() else { return };
    let stream = world.stream();
    let Some((first, function)) = load(THREE) else {
        eprintln!("SKIPPED: no compiler in the driver here");
        return;
    };
    let size = world.device.granule();
    let base = world.device.reserve(size).expect("addresses");
    let watch = Arc::new(Watch::default());
    let weak: Weak<Watch> = Arc::downgrade(&watch);
    watch_uses(base, size, weak);
    let launch = |function: *mut c_void, words: &mut [u64]| {
        let params = words.iter_mut().map(|word| (&raw mut *word).cast());
        let mut params: Vec<*mut c_void> = params.collect();
        let (stream, params) = (stream.cu_stream().cast(), params.as_mut_ptr());
        // SAFETY: the function is loaded and uses nothing of what it is given, of which there is enough.
        let code =
            unsafe { launch_kernel(function, [1; 3], [1; 3], 0, stream, params, ptr::null_mut()) };
        assert_eq!(code, 0);
    };
    launch(function, &mut [7, 7, base.0]);
    assert_eq!(watch.told(), [(vec![base], id(&stream))]);
    stream.synchronize().expect("it works");
    unload(first);
    let mut others = Vec::new();
    while others.last().is_none_or(|&(_, other)| other != function) && others.len() < 64 {
        others.extend(load(ONE));
    }
    let &(_, other) = others.last().expect("loaded");
    println!("the handle came back: {}", other == function);
    launch(other, &mut [7, 7, base.0]);
    assert_eq!(watch.told(), [], "a word behind the list was read");
    // What a launch costs with a watch and without.
    let time = |what: &str| {
        let began = Instant::now();
        (0..1_000).for_each(|_| launch(other, &mut [7]));
        println!("{:?} for a launch {what}", began.elapsed() / 1_000);
        stream.synchronize().expect("it works");
    };
    time("to warm up");
    time("with a watch");
    drop(watch);
    forget_dropped();
    time("without");
    others.into_iter().for_each(|(module, _)| unload(module));
    world.device.unreserve(base, size).expect("it is reserved");
    // Nothing else frees an address of nobody.
    assert!(free(base).is_err());
}
