//! The hook where a process has more than one context, without a driver: what passes on fails.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::{alloc_async, create_context, free_async, is_of_context};
use crate::compiler::Compiler;
use crate::device::{Device, DeviceError, Fence, GpuIdentity, Host, MemoryInfo, PageId, StreamId};
use crate::options::Options;
use crate::units::{Address, Bytes};

const PRIMARY: u64 = 0x9000;
const SECOND: u64 = 0xa000;

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(PRIMARY) };
}

/// The context that a test made the current one.
pub(super) fn current_context() -> u64 {
    CURRENT.get()
}

/// Memory of this machine that says it is a GPU's.
#[derive(Debug)]
struct Pretending(Host);

macro_rules! forward {
    ($($method:ident($($name:ident: $kind:ty),*) -> $result:ty;)+) => {
        $(fn $method(&self, $($name: $kind),*) -> $result { self.0.$method($($name),*) })+
    };
}

// SAFETY: every call that hands memory out is that of `Host`, which keeps the contract.
unsafe impl Device for Pretending {
    fn is_host_memory(&self) -> bool {
        false
    }

    fn gpu(&self) -> Option<GpuIdentity> {
        Some(GpuIdentity {
            context: PRIMARY,
            has_pools: true,
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

fn handle(stream: u64) -> *mut c_void {
    ptr::without_provenance_mut(stream as usize)
}

/// `cuMemAllocAsync`, and whether a step served it; freed again.
fn is_served(stream: u64) -> bool {
    let mut at = 0;
    // SAFETY: `at` is writable.
    let code = unsafe { alloc_async(&raw mut at, 10_000, handle(stream)) };
    if code == 0 {
        // SAFETY: the step made it.
        assert_eq!(unsafe { free_async(at, handle(stream)) }, 0);
    }
    code == 0
}

/// 0, 1 and 2 name streams of the current context: those of a second one are not the step's, however many GPUs the
/// driver shows, recorded or replayed.
#[test]
fn a_default_stream_of_a_second_context_is_not_the_steps() {
    if super::driver().alloc_async.is_some() {
        eprintln!("SKIPPED: the driver here would be passed addresses of no GPU");
        return;
    }
    let device: Arc<dyn Device> = Arc::new(Pretending(Host::new(Bytes(4096)).unwrap()));
    let mut compiler = Compiler::new(device, Options::default()).unwrap();
    for stream in [0, 1, 2] {
        compiler.use_stream(StreamId(stream)).unwrap();
        if stream == 0 {
            let step = compiler.begin("step").unwrap();
            assert!(is_served(0), "one context");
            step.finish().unwrap();
            // SAFETY: there is no driver, and a null pointer is refused.
            let code = unsafe { create_context(ptr::null_mut(), 0, 0) };
            assert_ne!(code, 0);
        }
        for _ in 0..2 {
            let step = compiler.begin("step").unwrap();
            CURRENT.set(SECOND);
            assert!(!is_served(stream), "stream {stream} of the second context");
            assert!(!is_of_context(StreamId(stream), PRIMARY));
            CURRENT.set(PRIMARY);
            assert!(is_served(stream), "stream {stream}");
            assert!(is_of_context(StreamId(stream), PRIMARY));
            step.finish().unwrap();
        }
    }
    // A stream with a handle of its own is of one context.
    compiler.use_stream(StreamId(0x5000)).unwrap();
    let step = compiler.begin("step").unwrap();
    CURRENT.set(SECOND);
    assert!(is_served(0x5000));
    step.finish().unwrap();
    CURRENT.set(PRIMARY);
}
