//! [memory-compiler](memory_compiler) for [Candle](candle_core): a step's tensors live in memory that is
//! recorded once and replayed.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//!
//! #[global_allocator]
//! static MEMORY: memory_compiler::hook::host::ScopedAllocator =
//!     memory_compiler::hook::host::ScopedAllocator::new();
//!
//! fn main() -> candle_core::Result<()> {
//!     let device = Device::Cpu;
//!     let mut memory = memory_compiler_candle::compiler(&device)?;
//!     let mut x = Tensor::ones((64, 256), DType::F32, &device)?;
//!     for _ in 0..5 {
//!         x = memory.step(|| x.relu()? * 0.5)?;
//!     }
//!     let stats = memory.stats();
//!     assert!(stats.replayed_step > 0);
//!     assert_eq!((stats.breaks_step, stats.device_calls_step), (0, 0));
//!     println!("{stats}");
//!     Ok(())
//! }
//! ```
//!
//! On an NVIDIA GPU (feature `cuda`) the line is `memory_compiler::interpose_cuda!();` instead, and the
//! step serves the stream of the device that the compiler was made for.
//!
//! No handle goes through the model: while a step runs, the buffers that Candle allocates on this
//! thread are served from it. A tensor that a step returns outlives it; where the next steps put it is
//! learnt from the first. Scopes ([`memory_compiler::scope`]) in the model name where memory goes.

#[cfg(feature = "cuda")]
mod cuda;
mod paged;

pub use paged::{Paged, PagedStats};

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use memory_compiler::pager::Pager;
use memory_compiler::report::Report;
use memory_compiler::{Bytes, Compiled, Compiler, Error, PinnedLayout, Snapshot, Stats, hook};

/// How a [`Memory`] works. `..Options::default()` for the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// A graph break is an error, from the second run of a step's name on.
    pub strict: bool,
    /// Most physical bytes that steps may hold; `None` for what the device has.
    pub budget: Option<Bytes>,
    /// The page on the CPU: a power of two of at least 4 KiB. Smaller pages hold less beyond the peak
    /// and cost more kernel mappings, of which a process has 65,530.
    pub granule: Bytes,
    /// The smallest buffer that is served on the CPU.
    pub threshold: Bytes,
    /// Addresses to reserve.
    pub address_space: Bytes,
    /// Most edges of the step graph, beyond which the branches that ran longest ago are forgotten; as in
    /// [`memory_compiler::Options`].
    pub edge_limit: u32,
    /// Plan all places again once this many steps in a row have recorded nothing ([`Memory::compile`]);
    /// `None` for never. It happens between two steps, takes at most 0.2 s, and leaves a step holding
    /// what its peak needs.
    pub compile_after: Option<u32>,
}

impl Default for Options {
    /// Not strict, no budget, pages of 64 KiB, compiled after two steps that recorded nothing, the rest as
    /// in [`memory_compiler::Options`].
    fn default() -> Self {
        let core = memory_compiler::Options::default();
        Self {
            strict: core.strict,
            budget: core.budget,
            granule: Bytes::kib(64),
            threshold: core.threshold,
            address_space: core.address_space,
            edge_limit: core.edge_limit,
            compile_after: Some(2),
        }
    }
}

/// A compiler for the memory of one Candle device.
#[derive(Debug)]
pub struct Memory {
    compiler: Compiler,
}

/// A compiler for `device`, with default [`Options`].
///
/// # Errors
/// As [`compiler_with`].
pub fn compiler(device: &Device) -> Result<Memory> {
    compiler_with(device, &Options::default())
}

/// A compiler for `device`.
///
/// # Errors
/// [`memory_compiler::Error`], wrapped: `HookMissing` when the program's global allocator is not a
/// [`hook::host::ScopedAllocator`] and `CudaHookMissing` when GPU allocations do not reach the compiler (the
/// messages are the lines to add), `Option` for an option that cannot
/// work, `Device` when the system refuses. A device other than the CPU is refused in words.
pub fn compiler_with(device: &Device, options: &Options) -> Result<Memory> {
    let memory = open(device, options)?;
    let compiler = Compiler::new(memory, core_options(options, options.budget)).map_err(wrap)?;
    Memory::new(device, compiler)
}

/// A pager for weights on `device`, to be shared with a compiler ([`compiler_sharing`]): together they own at
/// most `options.budget`, and weights at most `weights` of it.
///
/// # Errors
/// As [`compiler_with`].
pub fn pager(device: &Device, options: &Options, weights: Option<Bytes>) -> Result<Pager> {
    Pager::with_limit(open(device, options)?, options.budget, weights).map_err(wrap)
}

/// A compiler whose steps share the budget of `pager`: recording one evicts weights if it must. The budget
/// and the page are the pager's, whatever `options` say.
///
/// # Errors
/// As [`compiler_with`]; the pager must be one for this device.
pub fn compiler_sharing(device: &Device, options: &Options, pager: &Pager) -> Result<Memory> {
    check_pager(pager, device)?;
    let compiler = Compiler::with_pager(pager, core_options(options, None)).map_err(wrap)?;
    Memory::new(device, compiler)
}

/// Whether a pager manages the memory under a device.
fn check_pager(pager: &Pager, device: &Device) -> Result<()> {
    let memory = pager.device();
    let is_same = match device {
        Device::Cpu => memory.is_host_memory(),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => memory.gpu().is_some_and(|gpu| {
            gpu.context == device.cuda_stream().context().cu_ctx().addr() as u64
        }),
        _ => false,
    };
    if !is_same {
        candle_core::bail!(
            "the pager is one of another device than {:?}",
            device.location()
        );
    }
    Ok(())
}

fn core_options(options: &Options, budget: Option<Bytes>) -> memory_compiler::Options {
    memory_compiler::Options {
        strict: options.strict,
        budget,
        threshold: options.threshold,
        address_space: options.address_space,
        edge_limit: options.edge_limit,
        compile_after: options.compile_after,
        hash_seed: None,
    }
}

/// The memory under a device of Candle's, where the hook for it is part of the program.
fn open(device: &Device, options: &Options) -> Result<Arc<dyn memory_compiler::device::Device>> {
    match device {
        Device::Cpu => Ok(hook::host::device(options.granule).map_err(wrap)?),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => Ok(hook::cuda::device(cuda::ordinal(device)).map_err(wrap)?),
        _ => candle_core::bail!(
            "this build of memory-compiler-candle serves Device::Cpu{}, not {:?}",
            if cfg!(feature = "cuda") {
                " and Device::Cuda"
            } else {
                "; its feature `cuda` adds Device::Cuda"
            },
            device.location()
        ),
    }
}

/// Makes Candle's matrix product allocate the workspace that it keeps on each thread (1 MiB, the
/// size of a cache) now: made inside the first step, it would lie there for good.
fn warm_up(device: &Device) -> Result<()> {
    let square = Tensor::ones((64, 64), DType::F32, device)?;
    square.matmul(&square)?;
    Ok(())
}

fn wrap(error: Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// An error of a step: the compiler's own, or what the closure returned.
enum StepError {
    Compiler(Error),
    Candle(candle_core::Error),
}

impl From<Error> for StepError {
    fn from(error: Error) -> Self {
        Self::Compiler(error)
    }
}

/// Why the hook refused work on weights on this thread last, which the driver's code could not say.
fn refused() -> Option<Error> {
    #[cfg(feature = "cuda")]
    return hook::uses::take_error();
    #[cfg(not(feature = "cuda"))]
    None
}

impl Memory {
    fn new(device: &Device, compiler: Compiler) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            let mut compiler = compiler;
            compiler.use_stream(cuda::stream(device)).map_err(wrap)?;
            return Ok(Self { compiler });
        }
        warm_up(device)?;
        Ok(Self { compiler })
    }

    /// Runs `f` as the step named `step`; [`Compiler::step`].
    ///
    /// # Errors
    /// What `f` returns; else the compiler's error, wrapped: a strict break, memory that did not suffice.
    pub fn step<T>(&mut self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        self.step_named("step", f)
    }

    /// Runs `f` as a step with a name of its own; [`Compiler::step_named`].
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_named<T>(&mut self, name: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
        // Of work before.
        drop(refused());
        let result = self
            .compiler
            .step_named(name, || f().map_err(StepError::Candle));
        result.map_err(|error| match error {
            StepError::Compiler(error) => wrap(error),
            StepError::Candle(error) => refused().map_or(error, wrap),
        })
    }

    /// All numbers; [`Compiler::stats`].
    pub fn stats(&mut self) -> Stats {
        self.compiler.stats()
    }

    /// Where the memory goes; [`Compiler::report`]. `memory.report().html()` is a page to look at.
    pub fn report(&mut self) -> Report {
        self.compiler.report()
    }

    /// Plans all recorded steps again with their lifespans known, and installs the plan if it holds fewer
    /// bytes; [`Compiler::compile`].
    ///
    /// # Errors
    /// As [`Compiler::compile`], wrapped; the recorded layout then stays.
    pub fn compile(&mut self) -> Result<Compiled> {
        self.compiler.compile().map_err(wrap)
    }

    /// Keeps every address as it is until the guard is dropped: for a step that is captured into a CUDA graph;
    /// [`Compiler::pin_layout`]. Capture a step that was replayed before: it makes no driver call that a
    /// capture forbids. Candle passes shapes of strided tensors through host memory that is gone when the
    /// graph is launched; only kernels on contiguous tensors can be captured.
    ///
    /// # Errors
    /// When a step of this compiler was leaked on another thread.
    pub fn pin_layout(&mut self) -> Result<PinnedLayout> {
        self.compiler.pin_layout().map_err(wrap)
    }

    /// Gives idle memory back to the device; [`Compiler::trim`].
    ///
    /// # Errors
    /// As [`Compiler::trim`], wrapped.
    pub fn trim(&mut self) -> Result<Bytes> {
        self.compiler.trim().map_err(wrap)
    }

    /// What a checker needs to know; [`Compiler::snapshot`].
    pub fn snapshot(&mut self) -> Snapshot {
        self.compiler.snapshot()
    }
}
