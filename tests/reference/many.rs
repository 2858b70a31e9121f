//! Many programs, on all processors, and what they came to.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// Runs `program` with each seed below `count`; returns the sums of its numbers.
///
/// # Panics
/// With the seed, when a program does.
pub fn sums<const N: usize>(count: u64, program: impl Fn(u64) -> [u64; N] + Sync) -> [u64; N] {
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let total = Mutex::new([0; N]);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (total, program) = (&total, &program);
            scope.spawn(move || {
                for seed in (thread..count).step_by(threads as usize) {
                    let run = catch_unwind(AssertUnwindSafe(|| program(seed)));
                    let numbers = run.unwrap_or_else(|_| panic!("program {seed}"));
                    let mut total = total.lock().unwrap();
                    total
                        .iter_mut()
                        .zip(numbers)
                        .for_each(|(sum, number)| *sum += number);
                }
            });
        }
    });
    total.into_inner().unwrap()
}
