//! Which buffers Burn allocates in a step of its `flex` backend, and in which order. The versions of Burn and
//! cubecl are pinned; this fails when a new one does otherwise, before anything subtler does.
//!
//! Only tensors are in the list. What the matrix product packs its operands into depends on the processor's
//! caches; it is told apart by its alignment.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::activation::softmax;
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Tensor};

/// The system's allocator; notes the calls of a thread that asks for it.
struct Noting;

#[global_allocator]
static MEMORY: Noting = Noting;

thread_local! {
    static NOTES: Cell<bool> = const { Cell::new(false) };
}

/// Whether it can be a tensor's buffer.
fn is_tensor(layout: Layout) -> bool {
    layout.size() >= 4096 && layout.align() < 128
}

const ROOM: usize = 1000;
/// Addresses and sizes in the order of allocation, 0 once freed, and the events: a size, or the complement of
/// the index of what was freed.
static ADDRESSES: [AtomicUsize; ROOM] = [const { AtomicUsize::new(0) }; ROOM];
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static EVENTS: [AtomicUsize; ROOM] = [const { AtomicUsize::new(0) }; ROOM];
static NOTED: AtomicUsize = AtomicUsize::new(0);

fn note(event: usize) {
    let at = NOTED.fetch_add(1, Ordering::Relaxed);
    EVENTS[at % ROOM].store(event, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract, which is the same.
        let pointer = unsafe { System.alloc(layout) };
        if is_tensor(layout) && NOTES.get() {
            let index = ALLOCATED.fetch_add(1, Ordering::Relaxed);
            ADDRESSES[index % ROOM].store(pointer.addr(), Ordering::Relaxed);
            note(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if is_tensor(layout) && NOTES.get() {
            let is_it = |slot: &AtomicUsize| slot.load(Ordering::Relaxed) == pointer.addr();
            if let Some(index) = ADDRESSES.iter().position(is_it) {
                ADDRESSES[index].store(0, Ordering::Relaxed);
                note(!index);
            }
        }
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// The events of one call of `f`: `+4096` for an allocation, `-0` for the free of the first.
fn events<T>(f: impl FnOnce() -> T) -> String {
    ALLOCATED.store(0, Ordering::Relaxed);
    NOTED.store(0, Ordering::Relaxed);
    NOTES.set(true);
    let result = f();
    NOTES.set(false);
    drop(result);
    let noted = NOTED.load(Ordering::Relaxed);
    assert!(noted < ROOM, "{noted} events are too many for this test");
    let events = EVENTS[..noted].iter().map(|event| {
        let event = event.load(Ordering::Relaxed);
        if event.leading_ones() > 0 {
            format!("-{}", !event)
        } else {
            format!("+{event}")
        }
    });
    events.collect::<Vec<_>>().join(" ")
}

/// A convolution, attention and a matrix product.
fn step(x: Tensor<4>, kernel: Tensor<4>, weight: Tensor<2>) -> Tensor<3> {
    let same = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
    let seen = conv2d(x, kernel, None, same);
    let tokens: Tensor<3> = seen.flatten::<3>(2, 3).swap_dims(1, 2);
    let scores = tokens.clone().matmul(tokens.clone().transpose()) * 0.25;
    let seen = softmax(scores, 2).matmul(tokens);
    (seen * 2.0).matmul(weight.unsqueeze()).exp()
}

const EXPECTED: &str = "+147456 +32768 +32768 +147456 +16384 -4 -3 +147456 +16384 -6 -5 -1 -0 +32768 +32768 -7 \
    +32768 -8 +32768 +32768 -10 -2 -9 +49152 +49152 -12 -11";

#[test]
fn a_step_allocates_what_it_did_when_this_was_written() {
    let device = Device::flex();
    let (x, kernel) = (
        Tensor::<4>::ones([2, 64, 8, 8], &device),
        Tensor::<4>::ones([64, 64, 3, 3], &device) * 0.01,
    );
    let weight = Tensor::<2>::ones([64, 96], &device) * 0.01;
    let run = || step(x.clone(), kernel.clone(), weight.clone());
    run();
    let found = events(run);
    assert_eq!(found, events(run), "two runs in a row differ");
    assert_eq!(
        found, EXPECTED,
        "\nBurn allocates other buffers than version 0.22.1 did (left found, right recorded). When the version \
         was changed on purpose and the other tests pass, which compare contents: take the new list over and \
         measure the numbers of the README again."
    );
}
