//! Burn's NVIDIA devices.
//!
//! ```text
//!   Memory::step ──> Client::exclusive ──> runner thread of the device
//!                                            dedicated window: a buffer is a driver allocation
//!                                              a step of the compiler, on cubecl's stream
//!                                                the closure, then one small buffer
//! ```
//!
//! cubecl makes all driver calls on one thread a device, and hides buffers in pools. So a step runs on that
//! thread, where reserves, launches and drops happen in program order, inside a window in which every reserve is
//! an allocation of its own. cubecl gives a dropped buffer back when it reserves the next: the small one at the
//! end lets the last ones go before the step ends, instead of in the next.
//!
//! What only happens in the first runs (parameters made when first used, kernels compiled and tuned, launch
//! arguments cached) would lie in the step's memory for good or block the thread that it waits for. So the first
//! runs of a step's name just run.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::OnceLock;

use burn::tensor::{Device, StreamId};
use burn_backend::Backend;
use burn_dispatch::Dispatch;
use cubecl::client::Client;
use cubecl::config::memory::CudaAllocator;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::device::CudaDevice;
use memory_compiler::device::Cuda;
use memory_compiler::hook::cuda::stream_of;
use memory_compiler::{Compiler, hook};

use crate::Error;
use crate::detour::Installed;

/// GPUs that are looked through for the number of a device.
const MOST_GPUS: usize = 64;

/// The small buffer at the end of a step.
const LAST_BYTES: usize = 1;

/// How a step gets to its GPU.
pub(crate) struct Gpu {
    device: Device,
    client: Client,
    /// cubecl's name of the stream that steps run on, whichever thread asks for them.
    stream: StreamId,
    installed: Option<Installed>,
    warm_ups: u32,
    runs: HashMap<String, u32>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("stream", &self.stream)
            .field("runs", &self.runs)
            .finish_non_exhaustive()
    }
}

/// The number of a CUDA device; `None` for another device.
pub(crate) fn ordinal(device: &Device) -> Option<usize> {
    (0..MOST_GPUS).find(|&ordinal| *device == Device::cuda(ordinal))
}

/// Lets cubecl allocate in stream order, which it reads once, and patches the driver, before it does
/// anything with a GPU.
fn prepare() -> Result<Installed, Error> {
    static PREPARED: OnceLock<()> = OnceLock::new();
    if PREPARED.get().is_none() {
        let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
        config.memory.cuda.allocator = CudaAllocator::Async;
        if !CubeClRuntimeConfig::try_set(config) {
            return Err(Error::TooLate);
        }
        PREPARED.get_or_init(|| ());
    }
    // SAFETY: where nobody holds the patches, either cubecl has not made a client yet, since making one reads the
    // configuration; or they were taken away before, and whoever uses several GPUs has read that no other may be
    // in use (`compiler_with`).
    unsafe { Installed::new() }
}

/// A compiler for the GPU and the current stream.
pub(crate) fn compiler(
    device: &Device,
    ordinal: usize,
    options: memory_compiler::Options,
    warm_ups: u32,
) -> Result<(Compiler, Gpu), Error> {
    if Cuda::count() <= ordinal {
        return Err(Error::Device {
            device: format!("{device:?}"),
            serves: "GPUs that the driver shows",
        });
    }
    let installed = prepare()?;
    let mut gpu = Gpu {
        device: device.clone(),
        client: cubecl::Device::Cuda(CudaDevice::new(ordinal)).client(),
        stream: StreamId::current(),
        installed: Some(installed),
        warm_ups,
        runs: HashMap::new(),
    };
    match gpu.compiler(ordinal, options) {
        Ok(compiler) => Ok((compiler, gpu)),
        Err(error) => {
            gpu.end(|| true);
            Err(error)
        }
    }
}

/// Runs `f` on the runner thread, every buffer an allocation of its own. A panic comes through.
fn window<T: Send + 'static>(
    client: &Client,
    stream: StreamId,
    f: impl FnOnce() -> T + Send,
) -> Result<T, Error> {
    let outcome = client.exclusive(|| {
        stream.executes(|| {
            // Inside the window, so that a panic closes it too.
            client.memory_dedicated_allocation((), |()| catch_unwind(AssertUnwindSafe(f)))
        })
    });
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(panic)) => resume_unwind(panic),
        Err(error) => Err(refused(error)),
    }
}

impl Gpu {
    fn compiler(
        &self,
        ordinal: usize,
        options: memory_compiler::Options,
    ) -> Result<Compiler, Error> {
        if Dispatch::name(self.device.as_dispatch()).contains("fusion") {
            return Err(Error::Fusion);
        }
        let allocates = || stream_of(|| drop(self.client.empty(LAST_BYTES)));
        let ((), stream) = window(&self.client, self.stream, allocates)?;
        let compiler = match stream {
            Some(stream) => hook::cuda::compiler(ordinal, stream, options),
            // The call did not arrive, or cubecl allocates without a stream, which is not served.
            None => Err(memory_compiler::Error::CudaHookMissing),
        };
        compiler.map_err(|error| match error {
            memory_compiler::Error::CudaHookMissing => Error::Detour {
                why: "they are patched, and cubecl's do not arrive".to_owned(),
            },
            error => error.into(),
        })
    }

    /// Whether this run of a step's name just runs.
    pub fn warms_up(&mut self, name: &str) -> bool {
        if !self.runs.contains_key(name) {
            self.runs.insert(name.to_owned(), 0);
        }
        let runs = self.runs.get_mut(name).expect("just inserted");
        *runs = runs.saturating_add(1);
        *runs <= self.warm_ups
    }

    /// Runs `f` outside of any step, on the stream of the steps. What it keeps, parameters above all, gets places of
    /// its exact size, so that all the rest can be given back.
    pub fn outside<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T, Error> {
        let caught = || catch_unwind(AssertUnwindSafe(f));
        let result = self
            .stream
            .executes(|| self.client.memory_persistent_allocation((), |()| caught()));
        let result = result.unwrap_or_else(|panic| resume_unwind(panic));
        let sync = || self.stream.executes(|| self.device.sync()).map_err(refused);
        sync()?;
        self.client.memory_cleanup().map_err(refused)?;
        // The driver's pool gives back what was freed when it is waited for, not before.
        sync()?;
        Ok(result)
    }

    /// Runs `step`, a step of the compiler, where its allocations are served.
    pub fn inside<T: Send + 'static>(&self, step: impl FnOnce() -> T + Send) -> Result<T, Error> {
        window(&self.client, self.stream, step)
    }

    /// Lets cubecl give back what was dropped, which it does when it reserves.
    pub fn settle(&self) {
        drop(self.client.empty(LAST_BYTES));
    }

    /// Gives dropped buffers back, and takes the patches away if `is_idle` then says that none of the compiler's
    /// is live. Else they stay: the free of such a buffer must find its way.
    pub fn end(&mut self, is_idle: impl FnOnce() -> bool + Send) {
        let Some(installed) = self.installed.take() else {
            return;
        };
        let client = &self.client;
        let ended = client.exclusive(|| {
            if client.memory_cleanup().is_err() || !is_idle() {
                return Ok(());
            }
            // SAFETY: no buffer is live; cubecl calls the driver from this thread only, one for each GPU, and whoever
            // uses several GPUs has read that no other may be in use (`compiler_with`).
            unsafe { installed.end() }
        });
        if let Ok(Err(error)) = ended {
            tracing::warn!(%error, "a patch of the driver's calls stays");
        }
    }
}

fn refused(error: impl std::fmt::Debug) -> Error {
    let text = format!("{error:?}");
    Error::Runner {
        why: text.lines().next().unwrap_or_default().to_owned(),
    }
}
