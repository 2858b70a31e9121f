//! A device whose n-th call fails.
//!
//! May import: `device`, `units`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{forward, lock};
use crate::device::{
    Call, Device, DeviceError, Fence, GpuIdentity, HostMemory, Mappings, MemoryInfo, Moment,
    PageId, StreamId,
};
use crate::units::{Address, Bytes};

/// Fails a chosen call with a chosen error; the failed call never reaches upstream.
///
/// To fail each call of a program in turn, run it for n = 0, 1, … until it ends with
/// [`failures`](Failing::failures) still 0:
///
/// ```
/// # #[cfg(target_os = "linux")] {
/// use memory_compiler::device::adaptor::{Failing, Repeat};
/// use memory_compiler::device::{Device, DeviceError, Host};
///
/// let device = Failing::new(Host::new(Host::default_granule())?);
/// let program = || -> Result<(), DeviceError> {
///     let page = device.create()?;
///     device.release(page).or_else(|_| device.release(page))
/// };
/// for n in 0.. {
///     device.fail_at(n, DeviceError::NotReady, Repeat::Once);
///     let _ = program();
///     if device.failures() == 0 {
///         assert_eq!(n, 2);
///         break;
///     }
/// }
/// # }
/// # Ok::<(), memory_compiler::device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct Failing<D> {
    upstream: D,
    plan: Mutex<Plan>,
}

/// How often a [`Failing`] device fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// The n-th call fails; the ones after it pass.
    Once,
    /// The n-th call fails, and those after it, so many in all.
    Times(u64),
    /// The n-th call fails, and all after it.
    Always,
}

/// What is to happen, and what has happened since it was said.
#[derive(Debug, Default)]
struct Plan {
    failure: Option<Failure>,
    /// Calls that the plan is about, the failed ones included.
    seen: u64,
    failures: u64,
}

#[derive(Debug)]
struct Failure {
    /// The calls that the plan is about: this one, or every memory call.
    call: Option<Call>,
    n: u64,
    error: DeviceError,
    repeat: Repeat,
}

impl<D: Device> Failing<D> {
    /// All calls pass until [`fail_at`](Failing::fail_at).
    #[must_use]
    pub fn new(upstream: D) -> Self {
        Self {
            upstream,
            plan: Mutex::default(),
        }
    }

    /// The device under it.
    #[must_use]
    pub fn upstream(&self) -> &D {
        &self.upstream
    }

    /// From now on `n` calls of [`Call::MEMORY`] pass and the next one fails with `error`: `n = 0`
    /// fails the very next. Replaces what was planned before.
    pub fn fail_at(&self, n: u64, error: DeviceError, repeat: Repeat) {
        self.arm(Some(Failure {
            call: None,
            n,
            error,
            repeat,
        }));
    }

    /// As [`fail_at`](Failing::fail_at), where only calls of `call` count and fail; it need not be a
    /// memory call.
    pub fn fail_call_at(&self, call: Call, n: u64, error: DeviceError, repeat: Repeat) {
        self.arm(Some(Failure {
            call: Some(call),
            n,
            error,
            repeat,
        }));
    }

    /// From now on all calls pass.
    pub fn disarm(&self) {
        self.arm(None);
    }

    /// Calls that counted since the device was armed or disarmed last, the failed ones included:
    /// memory calls, or those of the call named in [`fail_call_at`](Failing::fail_call_at).
    #[must_use]
    pub fn seen(&self) -> u64 {
        lock(&self.plan).seen
    }

    /// Calls that failed by plan since the device was armed or disarmed last.
    #[must_use]
    pub fn failures(&self) -> u64 {
        lock(&self.plan).failures
    }

    fn arm(&self, failure: Option<Failure>) {
        *lock(&self.plan) = Plan {
            failure,
            seen: 0,
            failures: 0,
        };
    }

    /// Makes `call`, unless it is its turn to fail.
    fn unless_planned<T>(
        &self,
        call: Call,
        make: impl FnOnce(&D) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        // Bound first: a guard in the head of a `match` would live through the call upstream.
        let planned = lock(&self.plan).on(call);
        match planned {
            Some(error) => Err(error),
            None => make(&self.upstream),
        }
    }
}

impl Plan {
    /// Counts `call`; the error, when it is to fail.
    fn on(&mut self, call: Call) -> Option<DeviceError> {
        let only = self.failure.as_ref().and_then(|failure| failure.call);
        if !only.map_or(call.is_memory(), |only| only == call) {
            return None;
        }
        let turn = self.seen;
        self.seen += 1;
        let failure = self
            .failure
            .as_ref()
            .filter(|failure| match failure.repeat {
                Repeat::Once => turn == failure.n,
                Repeat::Times(times) => turn >= failure.n && turn - failure.n < times,
                Repeat::Always => turn >= failure.n,
            })?;
        self.failures += 1;
        Some(failure.error.clone())
    }
}

// SAFETY: every method that reserves, creates, maps or allows is upstream's, which keeps the contract; a
// call that is refused here has changed nothing there.
unsafe impl<D: Device> Device for Failing<D> {
    forward!(self => self.upstream;
        granule, is_host_memory, gpu, memory_source, check_stream, begin_row, mappings, is_capturing, check_room,
        host_memory, moment, elapsed, copy_stream);

    fn reserve(&self, size: Bytes) -> Result<Address, DeviceError> {
        self.unless_planned(Call::Reserve, |d| d.reserve(size))
    }

    fn unreserve(&self, base: Address, size: Bytes) -> Result<(), DeviceError> {
        self.unless_planned(Call::Unreserve, |d| d.unreserve(base, size))
    }

    fn create(&self) -> Result<PageId, DeviceError> {
        self.unless_planned(Call::Create, Device::create)
    }

    fn release(&self, page: PageId) -> Result<(), DeviceError> {
        self.unless_planned(Call::Release, |d| d.release(page))
    }

    fn map(&self, at: Address, page: PageId) -> Result<(), DeviceError> {
        self.unless_planned(Call::Map, |d| d.map(at, page))
    }

    fn allow(&self, at: Address, size: Bytes) -> Result<(), DeviceError> {
        self.unless_planned(Call::Allow, |d| d.allow(at, size))
    }

    fn unmap(&self, at: Address, size: Bytes) -> Result<(), DeviceError> {
        self.unless_planned(Call::Unmap, |d| d.unmap(at, size))
    }

    fn synchronise(&self) -> Result<(), DeviceError> {
        self.unless_planned(Call::Synchronise, Device::synchronise)
    }

    fn fence(&self, stream: StreamId) -> Result<Fence, DeviceError> {
        self.unless_planned(Call::Fence, |d| d.fence(stream))
    }

    fn wait(&self, stream: StreamId, fence: Fence) -> Result<(), DeviceError> {
        self.unless_planned(Call::Wait, |d| d.wait(stream, fence))
    }

    fn trim_pool(&self) -> Result<(), DeviceError> {
        self.unless_planned(Call::TrimPool, Device::trim_pool)
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.unless_planned(Call::Memory, Device::memory)
    }

    fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.unless_planned(Call::Write, |d| d.write(at, bytes))
    }

    fn read(&self, at: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.unless_planned(Call::Read, |d| d.read(at, bytes))
    }

    fn fill(&self, at: Address, size: Bytes, value: u8) -> Result<(), DeviceError> {
        self.unless_planned(Call::Fill, |d| d.fill(at, size, value))
    }

    fn enqueue_copy(
        &self,
        stream: StreamId,
        at: Address,
        from: &Arc<HostMemory>,
        offset: Bytes,
        size: Bytes,
    ) -> Result<(), DeviceError> {
        self.unless_planned(Call::Write, |d| {
            d.enqueue_copy(stream, at, from, offset, size)
        })
    }
}
