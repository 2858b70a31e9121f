//! The floor to measure against: a step's buffers at offsets planned once in one block, handed out in
//! order by a counter. No check, no other branch, no other thread: for measuring only.
//!
//! The four driver calls are defined here and not by `interpose_cuda!`, so that the floor stands behind
//! the same calls as the compiler. Unless the floor is being recorded or replayed they are the hook's.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Instant;

use memory_compiler::device::{Call, DeviceError};
use memory_compiler::hook::cuda as hook;

const OFF: u8 = 0;
const RECORD: u8 = 1;
const REPLAY: u8 = 2;
static MODE: AtomicU8 = AtomicU8::new(OFF);

/// A buffer of the recorded step: size, and the events between which it lives.
#[derive(Clone, Copy, Debug)]
struct Recorded {
    size: u64,
    begin: u64,
    end: u64,
}

#[derive(Debug, Default)]
struct Floor {
    live: HashMap<u64, usize>,
    buffers: Vec<Recorded>,
    events: u64,
    addresses: Vec<u64>,
    next: usize,
    block: (u64, u64),
}

thread_local! { static FLOOR: RefCell<Floor> = RefCell::default() }

/// Begins to record the allocations of a step.
pub fn record() {
    FLOOR.take();
    MODE.store(RECORD, Ordering::Relaxed);
}

/// Ends the recording; plans the buffers into one block. Returns how many there are and the block's size.
pub fn plan() -> candle_core::Result<(u64, u64)> {
    MODE.store(OFF, Ordering::Relaxed);
    FLOOR.with_borrow_mut(|floor| {
        let (offsets, size) = place(&floor.buffers);
        let mut base = 0;
        // SAFETY: `base` is writable.
        let code = unsafe { hook::alloc(&raw mut base, size as usize) };
        if code != 0 {
            let call = Call::Create;
            let refused = DeviceError::Driver {
                call,
                code: code.cast_signed(),
            };
            candle_core::bail!("no block of {size} bytes for the floor: {refused}");
        }
        floor.addresses = offsets.iter().map(|offset| base + offset).collect();
        floor.block = (base, size);
        Ok((floor.addresses.len() as u64, size))
    })
}

/// Begins a step at the planned addresses.
pub fn replay() {
    FLOOR.with_borrow_mut(|floor| floor.next = 0);
    MODE.store(REPLAY, Ordering::Relaxed);
}

/// Ends the step; buffers that are still live must be gone before the next.
pub fn pause() {
    MODE.store(OFF, Ordering::Relaxed);
}

/// Gives the block back.
pub fn end() {
    let (base, _) = FLOOR.take().block;
    if base != 0 {
        // SAFETY: allocated in `plan`; the caller has waited for the device.
        unsafe { hook::free(base) };
    }
}

/// Largest first, each at the lowest offset that is free while it lives.
fn place(buffers: &[Recorded]) -> (Vec<u64>, u64) {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|&at| (std::cmp::Reverse(buffers[at].size), buffers[at].begin));
    let mut placed: Vec<(u64, usize)> = Vec::new();
    let mut offsets = vec![0; buffers.len()];
    let mut height = 0;
    for at in order {
        let new = buffers[at];
        let mut gap = 0;
        let mut best: Option<(u64, u64)> = None;
        let neighbours = placed.iter().filter(|&&(_, other)| {
            buffers[other].begin < new.end && new.begin < buffers[other].end
        });
        for &(offset, other) in neighbours {
            if offset >= gap + new.size && best.is_none_or(|(room, _)| offset - gap < room) {
                best = Some((offset - gap, gap));
            }
            gap = gap.max(offset + buffers[other].size);
        }
        let offset = best.map_or(gap, |(_, offset)| offset);
        offsets[at] = offset;
        height = height.max(offset + new.size);
        let index = placed.partition_point(|&(other, _)| other <= offset);
        placed.insert(index, (offset, at));
    }
    (offsets, height)
}

impl Floor {
    fn began(&mut self, address: u64, size: usize) {
        self.live.insert(address, self.buffers.len());
        let size = (size as u64).next_multiple_of(512);
        self.buffers.push(Recorded {
            size,
            begin: self.events,
            end: u64::MAX,
        });
        self.events += 1;
    }

    fn ended(&mut self, address: u64) {
        if let Some(buffer) = self.live.remove(&address) {
            self.buffers[buffer].end = self.events;
            self.events += 1;
        }
    }

    fn owns(&self, address: u64) -> bool {
        address.wrapping_sub(self.block.0) < self.block.1
    }
}

static TIMED: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicU64 = AtomicU64::new(0);
static NANOSECONDS: AtomicU64 = AtomicU64::new(0);

/// Runs `f` with a clock around every call that it makes of `cuMemAllocAsync` and `cuMemFreeAsync`.
/// Returns how many there were, and how long one took on average, the clock's own time taken off.
pub fn timed<T>(f: impl FnOnce() -> T) -> (T, u64, f64) {
    CALLS.store(0, Ordering::Relaxed);
    NANOSECONDS.store(0, Ordering::Relaxed);
    TIMED.store(true, Ordering::Relaxed);
    let result = f();
    TIMED.store(false, Ordering::Relaxed);
    let calls = CALLS.load(Ordering::Relaxed);
    let mean = NANOSECONDS.load(Ordering::Relaxed) as f64 / calls.max(1) as f64;
    let clock = (0..1_000)
        .map(|_| Instant::now().elapsed().as_nanos() as f64)
        .sum::<f64>()
        / 1_000.0;
    (result, calls, mean - clock)
}

#[inline]
fn clocked(call: impl FnOnce() -> u32) -> u32 {
    if !TIMED.load(Ordering::Relaxed) {
        return call();
    }
    let began = Instant::now();
    let code = call();
    let took = began.elapsed().as_nanos() as u64;
    NANOSECONDS.fetch_add(took, Ordering::Relaxed);
    CALLS.fetch_add(1, Ordering::Relaxed);
    code
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(at: *mut u64, size: usize, stream: *mut c_void) -> u32 {
    // SAFETY: the caller keeps the contract of the driver's call, which is the same.
    clocked(|| unsafe { alloc(at, size, stream) })
}

/// # Safety
/// As the driver's call.
#[inline]
unsafe fn alloc(at: *mut u64, size: usize, stream: *mut c_void) -> u32 {
    let mode = MODE.load(Ordering::Relaxed);
    if mode == REPLAY && size > 0 {
        return FLOOR.with_borrow_mut(|floor| {
            let Some(&address) = floor.addresses.get(floor.next) else {
                return 1;
            };
            floor.next += 1;
            // SAFETY: cudarc passes a place for the result.
            unsafe { at.write(address) };
            0
        });
    }
    // SAFETY: the caller keeps the contract of the driver's call, which is the same.
    let code = unsafe { hook::alloc_async(at, size, stream) };
    if mode == RECORD && code == 0 {
        // SAFETY: the call above has written it.
        let address = unsafe { at.read() };
        FLOOR.with_borrow_mut(|floor| floor.began(address, size));
    }
    code
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeAsync(at: u64, stream: *mut c_void) -> u32 {
    // SAFETY: the caller keeps the contract of the driver's call, which is the same.
    clocked(|| unsafe { free(at, stream) })
}

/// # Safety
/// As the driver's call.
#[inline]
unsafe fn free(at: u64, stream: *mut c_void) -> u32 {
    let mode = MODE.load(Ordering::Relaxed);
    if mode == RECORD {
        FLOOR.with_borrow_mut(|floor| floor.ended(at));
    }
    // A result of a step may be freed after it.
    if FLOOR.with_borrow(|floor| floor.owns(at)) {
        return 0;
    }
    // SAFETY: the caller keeps the contract of the driver's call, which is the same.
    unsafe { hook::free_async(at, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(at: *mut u64, size: usize) -> u32 {
    // SAFETY: the caller keeps the contract of the driver's call, which is the same.
    unsafe { hook::alloc(at, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFree_v2(at: u64) -> u32 {
    // SAFETY: the caller keeps the contract of the driver's call, which is the same.
    unsafe { hook::free(at) }
}
