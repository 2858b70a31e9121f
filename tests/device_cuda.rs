//! The GPU under the contract of devices. Without a GPU each test says so and passes.

#![cfg(feature = "cuda")]

mod common;

use std::sync::Arc;

use common::{assert_invalid, nth, times};
use memory_compiler::device::adaptor::Counting;
use memory_compiler::device::{Call, Cuda, Device, DeviceError, StreamId};
use memory_compiler::units::Bytes;
use memory_compiler::{Allocation, Compiler, Error, Options};

/// The first GPU.
fn gpu() -> Option<Cuda> {
    if Cuda::count() == 0 {
        eprintln!("SKIPPED: no GPU here");
        return None;
    }
    Some(Cuda::new(0).expect("the first GPU"))
}

/// The first GPU, or the end of the test.
macro_rules! gpu_or_skip {
    () => {
        match gpu() {
            Some(gpu) => gpu,
            None => return,
        }
    };
}

hold_to_the_contract!(cuda, gpu_or_skip!());
hold_to_the_contract!(
    counting_cuda,
    Counting::new(gpu_or_skip!()),
    |device| assert!(device.is_empty())
);

#[test]
fn a_gpu_that_is_not_there_is_refused_in_words() {
    let refused = Cuda::new(Cuda::count());
    assert_invalid(Call::Reserve, refused);
}

#[test]
fn a_page_is_the_drivers_granule() {
    let gpu = gpu_or_skip!();
    let granule = gpu.granule();
    assert!(
        granule.0.is_power_of_two() && granule >= Bytes::kib(64),
        "{granule}"
    );
    assert!(!gpu.is_host_memory());
    assert_ne!(gpu.gpu().expect("it is one").context, 0);
}

#[test]
fn pages_cost_what_the_driver_says_they_cost() {
    let gpu = gpu_or_skip!();
    let size = times(gpu.granule(), 64);
    let before = gpu.memory().unwrap().free;
    let pages: Vec<_> = (0..64).map(|_| gpu.create().unwrap()).collect();
    let taken = before.saturating_sub(gpu.memory().unwrap().free);
    // Other tests of this process come and go beside it.
    assert!(taken >= Bytes(size.0 / 2), "{taken} of {size}");
    for page in pages {
        gpu.release(page).unwrap();
    }
}

#[test]
fn more_addresses_than_there_are_are_refused() {
    let gpu = gpu_or_skip!();
    let refused = gpu.reserve(Bytes(1 << 62));
    assert!(
        matches!(
            refused,
            Err(DeviceError::Driver { .. } | DeviceError::OutOfMemory { .. })
        ),
        "{refused:?}"
    );
}

#[test]
fn threads_share_a_gpu_without_a_current_context() {
    let gpu = gpu_or_skip!();
    std::thread::scope(|scope| {
        for value in 1..5_u8 {
            let gpu = &gpu;
            scope.spawn(move || {
                let granule = gpu.granule();
                let base = gpu.reserve(granule).unwrap();
                for _ in 0..20 {
                    let page = gpu.create().unwrap();
                    gpu.map(base, page).unwrap();
                    gpu.allow(base, granule).unwrap();
                    gpu.fill(base, granule, value).unwrap();
                    let mut seen = vec![0; 4096];
                    gpu.read(nth(base, Bytes(4096), u64::from(value)), &mut seen)
                        .unwrap();
                    assert!(seen.iter().all(|&byte| byte == value));
                    let fence = gpu.fence(StreamId(2)).unwrap();
                    gpu.wait(StreamId(1), fence).unwrap();
                    gpu.synchronise().unwrap();
                    gpu.unmap(base, granule).unwrap();
                    gpu.release(page).unwrap();
                }
                gpu.unreserve(base, granule).unwrap();
            });
        }
    });
}

#[test]
fn a_compiler_replays_on_a_gpu_and_gives_everything_back() {
    let device = Arc::new(Counting::new(gpu_or_skip!()));
    let shared: Arc<dyn Device> = Arc::clone(&device) as _;
    let mut compiler = Compiler::new(shared, Options::default()).unwrap();
    for turn in 0..5_u8 {
        let step = compiler.begin("step").unwrap();
        let mut live = Vec::new();
        for (value, size) in (1..).zip([8, 3, 16, 1, 24]) {
            let Allocation::Here(at) = step.alloc(Bytes::mib(size)).unwrap() else {
                panic!("a step is active");
            };
            device.fill(at, Bytes::mib(size), value + turn).unwrap();
            live.push((at, value + turn, size));
            if value % 2 == 0 {
                let (at, ..) = live.remove(0);
                step.free(at).unwrap();
            }
        }
        for (at, value, size) in live {
            let mut seen = vec![0; size as usize * (1 << 20)];
            device.read(at, &mut seen).unwrap();
            assert!(seen.iter().all(|&byte| byte == value));
            step.free(at).unwrap();
        }
        let report = step.finish().unwrap();
        assert_eq!(report.breaks, 0);
        assert!(turn == 0 || report.device_calls == 0, "{report:?}");
    }
    drop(compiler);
    assert!(device.is_empty());
}

#[test]
fn a_budget_is_kept_on_a_gpu() {
    let device: Arc<dyn Device> = Arc::new(gpu_or_skip!());
    let options = Options {
        budget: Some(Bytes::mib(16)),
        ..Options::default()
    };
    let mut compiler = Compiler::new(device, options).unwrap();
    let step = compiler.begin("step").unwrap();
    let refused = step.alloc(Bytes::mib(17));
    assert!(
        matches!(refused, Err(Error::OverBudget { .. })),
        "{refused:?}"
    );
}
