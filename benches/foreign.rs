//! What a free of somebody else's memory costs through the CPU hook: every free of the process goes past it.
//!
//! ```text
//!   below            under all ranges of compilers, as most of the heap is
//!   between          in a gap between two of them, as blocks of the heap come to lie there
//!   wrapped          the wrapped allocator alone, which does nothing here: the floor
//! ```
//!
//! What the numbers mean: nanoseconds a call, the best of several runs, one after the other on one thread, and on two
//! threads at once, where a lock would show. Nothing is freed: the wrapped allocator does nothing, so caches are warm.

use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use memory_compiler::device::{Device, Host};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::{Address, Bytes, Compiler, Options};

/// An allocator that has nothing and takes everything.
struct Nothing;

// SAFETY: it allocates nothing, and a free may do nothing.
unsafe impl GlobalAlloc for Nothing {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        std::ptr::null_mut()
    }

    unsafe fn dealloc(&self, pointer: *mut u8, _: Layout) {
        black_box(pointer);
    }
}

const CALLS: u32 = 200_000;
const RUNS: usize = 15;

fn nanoseconds(allocator: &impl GlobalAlloc, at: Address) -> f64 {
    let layout = Layout::from_size_align(1 << 16, 16).expect("a layout");
    let pointer = std::ptr::with_exposed_provenance_mut(at.0 as usize);
    let run = || {
        let began = Instant::now();
        for _ in 0..CALLS {
            // SAFETY: the address is no compiler's, and the wrapped allocator does nothing with it.
            unsafe { allocator.dealloc(black_box(pointer), layout) };
        }
        began.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
    };
    (0..RUNS).map(|_| run()).fold(f64::MAX, f64::min)
}

/// The same on two threads at once; the slower one counts.
fn on_two_threads(allocator: &(impl GlobalAlloc + Sync), at: Address) -> f64 {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| nanoseconds(allocator, at));
        let own = nanoseconds(allocator, at);
        own.max(other.join().expect("it measures"))
    })
}

fn main() {
    // Every other range is nobody's: a gap between two compilers.
    let gaps = Host::new(Bytes::kib(64)).expect("a device");
    let device: Arc<dyn Device> = Arc::new(Host::new(Bytes::kib(64)).expect("a device"));
    let hook = ScopedAllocator::over(Nothing);
    let options = Options {
        address_space: Bytes::gib(1),
        ..Options::default()
    };
    let gap_size = Bytes::gib(1);
    let (mut compilers, mut bases, mut gap_bases) = (Vec::new(), Vec::new(), Vec::new());
    println!("ns a free     below  between  wrapped    between, two threads");
    for count in [0, 1, 2, 20] {
        while compilers.len() < count {
            let mut compiler =
                Compiler::new(Arc::clone(&device), options.clone()).expect("a compiler");
            bases.push(compiler.snapshot().base);
            compilers.push(compiler);
            gap_bases.push(gaps.reserve(gap_size).expect("addresses"));
        }
        let below = nanoseconds(&hook, Address(1 << 20));
        let (lowest, highest) = (bases.iter().min(), bases.iter().max());
        let between = gap_bases.iter().copied().find(|gap| {
            lowest.is_some_and(|lowest| lowest < gap)
                && highest.is_some_and(|highest| gap < highest)
        });
        let at = between.map(|gap| Address(gap.0 + 4096));
        let shown = |time: Option<f64>| time.map_or("-".to_owned(), |time| format!("{time:.2}"));
        println!(
            "{count:>2} compilers {below:>6.2} {:>8} {:>8.2} {:>23}",
            shown(at.map(|at| nanoseconds(&hook, at))),
            nanoseconds(&Nothing, Address(1 << 20)),
            shown(at.map(|at| on_two_threads(&hook, at))),
        );
    }
    drop(compilers);
    for gap in gap_bases {
        gaps.unreserve(gap, gap_size).expect("ours");
    }
}
