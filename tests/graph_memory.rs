//! What the compiler's own books cost, by a global allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memory_compiler::device::Host;
use memory_compiler::{Address, Allocation, Bytes, Compiler, Options};

struct CountingAllocator;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator and counts.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the block came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A step of `count` allocations that never meets a state twice: a window of 50 live buffers moves on.
fn step(compiler: &mut Compiler, count: u64) {
    let step = compiler.begin("step").unwrap();
    let mut live: std::collections::VecDeque<Address> = std::collections::VecDeque::new();
    let mut random = 1_u64;
    for _ in 0..count {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let size = Bytes::kib(64 + (random >> 33) % 4_000);
        let Allocation::Here(at) = step.alloc(size).unwrap() else {
            panic!("not served")
        };
        live.push_back(at);
        if live.len() > 50 {
            step.free(live.pop_front().unwrap()).unwrap();
        }
    }
    for at in live {
        step.free(at).unwrap();
    }
    step.finish().unwrap();
}

#[test]
fn ten_thousand_states_with_their_edges_and_tape_cost_at_most_4_mb_and_do_not_grow() {
    let mut compiler = Compiler::new(
        Arc::new(Host::new(Bytes::mib(2)).unwrap()),
        Options::default(),
    )
    .unwrap();
    step(&mut compiler, 10);
    let before = LIVE.load(Ordering::Relaxed);
    step(&mut compiler, 10_000);
    let cost = LIVE.load(Ordering::Relaxed) - before;
    let stats = compiler.stats();
    println!(
        "{} states, {} edges: {cost} bytes",
        stats.states, stats.edges
    );
    assert!(stats.states >= 9_990, "{stats}");
    assert!(cost <= 4_000_000, "{cost} bytes");
    drop(stats);
    let before = LIVE.load(Ordering::Relaxed);
    for _ in 0..20 {
        step(&mut compiler, 10_000);
    }
    assert!(LIVE.load(Ordering::Relaxed) <= before);
}
