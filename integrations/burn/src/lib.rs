//! [memory-compiler](memory_compiler) for [Burn](burn): a step's tensors live in memory that is recorded
//! once and replayed.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//!
//! #[global_allocator]
//! static MEMORY: memory_compiler::hook::host::ScopedAllocator =
//!     memory_compiler::hook::host::ScopedAllocator::new();
//!
//! fn main() -> Result<(), memory_compiler_burn::Error> {
//!     let device = Device::flex();
//!     let mut memory = memory_compiler_burn::compiler(&device)?;
//!     let weight = Tensor::<2>::ones([256, 256], &device) * 0.01;
//!     let mut x = Tensor::<2>::ones([64, 256], &device);
//!     for _ in 0..5 {
//!         x = memory.step(|| x.matmul(weight.clone()).exp())?;
//!     }
//!     let stats = memory.stats();
//!     assert!(stats.replayed_step > 0);
//!     assert_eq!((stats.breaks_step, stats.device_calls_step), (0, 0));
//!     println!("{stats}");
//!     Ok(())
//! }
//! ```
//!
//! No handle goes through the model: while a step runs, the buffers that Burn allocates for it are served
//! from it. A tensor that a step returns outlives it; where the next steps put it is learnt from the first.
//! Scopes ([`memory_compiler::scope`]) in the model name where memory goes.
//!
//! On NVIDIA GPUs (feature `cuda`, x86-64, `Device::cuda(0)`) no line is needed: [`compiler`] patches the driver's
//! allocation calls in this process, sets cubecl up to allocate in stream order, and so must be called before
//! anything else uses the GPU, loading weights included. A step runs on cubecl's own thread, without fusion. The
//! first runs of each name ([`Options::warm_ups`]) just run: shapes that come later and are still to be tuned
//! (Burn's feature `autotune`) need a name of their own, or [`Memory::outside`] first. That is where weights and
//! inputs are best made, too: they take no more than their size there.
//!
//! On the CPU it serves the backend `flex`, whose tensors lie in memory of Rust's allocator. Leave Burn's
//! feature `rayon` off: with it the scratch memory of kernels moves to other threads and passes by.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod detour;

#[cfg(all(feature = "cuda", not(target_arch = "x86_64")))]
compile_error!("the feature `cuda` patches machine code, which is written for x86-64 only");

use burn::tensor::{Device, Tensor};
use memory_compiler::report::Report;
use memory_compiler::{Bytes, Compiled, Compiler, Snapshot, Stats, hook};

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
    /// How many first runs of each step's name just run on a GPU, before the step is recorded: kernels are
    /// compiled and tuned in them.
    pub warm_ups: u32,
}

impl Default for Options {
    /// Not strict, no budget, pages of 64 KiB, compiled after two steps that recorded nothing, 3 warm-ups, the
    /// rest as in [`memory_compiler::Options`].
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
            warm_ups: 3,
        }
    }
}

impl Options {
    fn core(&self) -> memory_compiler::Options {
        memory_compiler::Options {
            strict: self.strict,
            budget: self.budget,
            threshold: self.threshold,
            address_space: self.address_space,
            edge_limit: self.edge_limit,
            compile_after: self.compile_after,
            hash_seed: None,
        }
    }
}

/// What this crate could not do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// What the compiler could not do: the hook is missing, an option cannot work, a strict step broke, there
    /// is no memory.
    #[error(transparent)]
    Compiler(#[from] memory_compiler::Error),
    /// The device is none that this build serves.
    #[error("this build of memory-compiler-burn serves {serves}, not {device}")]
    Device {
        /// The device, as Burn prints it.
        device: String,
        /// What would be served.
        serves: &'static str,
    },
    /// cubecl, which Burn runs on, is in use already and has read its configuration.
    #[error(
        "the memory compiler comes too late: make it before anything uses the GPU (tensors, weights), so that \
         cubecl can be told to allocate in stream order"
    )]
    TooLate,
    /// Burn was built with its feature `fusion`, whose thread and a step would wait for each other.
    #[error(
        "steps cannot run with Burn's feature `fusion`; build without it (default-features = false)"
    )]
    Fusion,
    /// The driver's allocation calls could not be patched.
    #[error("the driver's allocation calls cannot be taken over: {why}")]
    Detour {
        /// What was wrong.
        why: String,
    },
    /// cubecl's thread of the device refused to run something, or lost it.
    #[error("cubecl refused: {why}")]
    Runner {
        /// What it said.
        why: String,
    },
}

/// A compiler for the memory of one Burn device.
#[derive(Debug)]
pub struct Memory {
    compiler: Compiler,
    #[cfg(feature = "cuda")]
    gpu: Option<cuda::Gpu>,
}

/// A compiler for `device`, with default [`Options`].
///
/// # Errors
/// As [`compiler_with`].
pub fn compiler(device: &Device) -> Result<Memory, Error> {
    compiler_with(device, &Options::default())
}

/// A compiler for `device`.
///
/// # Errors
/// [`Error::Device`] for a device that is not served; [`Error::Compiler`] with `HookMissing` when the program's
/// global allocator is not a [`hook::host::ScopedAllocator`] (the message is the line to add), with `Option`
/// for an option that cannot work, with `Device` when the system refuses. On a GPU also [`Error::TooLate`],
/// [`Error::Fusion`], [`Error::Detour`] and [`Error::Runner`].
///
/// On a GPU the first compiler of a process, and the last one that is dropped, patch the driver's allocation
/// calls: no other thread may be in one of them then, of cubecl's for another GPU or of another library's.
pub fn compiler_with(device: &Device, options: &Options) -> Result<Memory, Error> {
    if *device == Device::flex() {
        warm_up(device);
        return Ok(Memory {
            compiler: hook::host::compiler(options.granule, options.core())?,
            #[cfg(feature = "cuda")]
            gpu: None,
        });
    }
    #[cfg(feature = "cuda")]
    if let Some(ordinal) = cuda::ordinal(device) {
        let (compiler, gpu) = cuda::compiler(device, ordinal, options.core(), options.warm_ups)?;
        return Ok(Memory {
            compiler,
            gpu: Some(gpu),
        });
    }
    Err(Error::Device {
        device: format!("{device:?}"),
        serves: if cfg!(feature = "cuda") {
            "Device::flex() and Device::cuda(…)"
        } else {
            "Device::flex(); its feature `cuda` adds Device::cuda(…)"
        },
    })
}

/// Makes the matrix product allocate the workspace that it keeps on each thread (of the size of a cache)
/// now: made inside the first step, it would lie there for good.
fn warm_up(device: &Device) {
    let square = Tensor::<2>::ones([64, 64], device);
    drop(square.clone().matmul(square));
}

/// An error of a step: the compiler's own, or what the closure returned.
enum StepError<E> {
    Compiler(memory_compiler::Error),
    Program(E),
}

impl<E: From<Error>> StepError<E> {
    fn into_program(self) -> E {
        match self {
            Self::Compiler(error) => Error::from(error).into(),
            Self::Program(error) => error,
        }
    }
}

impl<E> From<memory_compiler::Error> for StepError<E> {
    fn from(error: memory_compiler::Error) -> Self {
        Self::Compiler(error)
    }
}

impl Memory {
    /// Runs `f` as the step named `step`; [`Compiler::step`]. A panic of `f` aborts the step and goes on.
    ///
    /// # Errors
    /// [`Error::Compiler`]: a strict break, memory that did not suffice.
    pub fn step<T, F>(&mut self, f: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send,
    {
        self.step_named("step", f)
    }

    /// Runs `f` as a step with a name of its own; [`Compiler::step_named`].
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_named<T, F>(&mut self, name: &str, f: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send,
    {
        self.try_step_named(name, || Ok::<T, Error>(f()))
    }

    /// Runs `f`, which may fail, as the step named `step`: an error aborts it.
    ///
    /// # Errors
    /// What `f` returns; else as [`step`](Self::step).
    pub fn try_step<T, E, F>(&mut self, f: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<Error> + Send + 'static,
        F: FnOnce() -> Result<T, E> + Send,
    {
        self.try_step_named("step", f)
    }

    /// Runs `f`, which may fail, as a step with a name of its own.
    ///
    /// # Errors
    /// As [`try_step`](Self::try_step).
    pub fn try_step_named<T, E, F>(&mut self, name: &str, f: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<Error> + Send + 'static,
        F: FnOnce() -> Result<T, E> + Send,
    {
        let compiler = &mut self.compiler;
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &mut self.gpu {
            if gpu.warms_up(name) {
                return gpu.outside(f)?;
            }
            let step = || {
                let result = f().map_err(StepError::Program)?;
                gpu.settle();
                Ok(result)
            };
            let result = gpu.inside(|| compiler.step_named(name, step))?;
            return result.map_err(StepError::into_program);
        }
        let result = compiler.step_named(name, || f().map_err(StepError::Program));
        result.map_err(StepError::into_program)
    }

    /// Runs `f` outside of any step, as the first runs on a GPU do ([`Options::warm_ups`]): kernels for shapes
    /// that are new are compiled and tuned, and nothing is recorded. On the CPU it just runs.
    ///
    /// Tensors that `f` leaves behind, such as weights and inputs, lie in device allocations of their size, and what
    /// it freed goes back to the device. Made elsewhere a tensor lies in a page of cubecl's, which is as large as the
    /// largest buffer that cubecl has served there (1 GiB for a UNet at 64×64) and stays for as long as anything
    /// in it lives.
    ///
    /// # Errors
    /// [`Error::Runner`] when the GPU has failed.
    pub fn outside<T: Send>(&mut self, f: impl FnOnce() -> T + Send) -> Result<T, Error> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return gpu.outside(f);
        }
        Ok(f())
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
    /// As [`Compiler::compile`]; the recorded layout then stays.
    pub fn compile(&mut self) -> Result<Compiled, Error> {
        Ok(self.compiler.compile()?)
    }

    /// Gives idle memory back to the device; [`Compiler::trim`].
    ///
    /// # Errors
    /// As [`Compiler::trim`].
    pub fn trim(&mut self) -> Result<Bytes, Error> {
        Ok(self.compiler.trim()?)
    }

    /// What a checker needs to know; [`Compiler::snapshot`].
    pub fn snapshot(&mut self) -> Snapshot {
        self.compiler.snapshot()
    }
}

#[cfg(feature = "cuda")]
impl Drop for Memory {
    fn drop(&mut self) {
        let compiler = &mut self.compiler;
        if let Some(gpu) = &mut self.gpu {
            gpu.end(|| compiler.stats().live == Bytes::ZERO);
        }
    }
}
