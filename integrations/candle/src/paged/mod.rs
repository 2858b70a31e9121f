//! Weights that come and go: a `VarBuilder` whose tensors live in a weight range.
//!
//! ```text
//!   file (mapped) ──dtype──> weight range | down.0.conv | down.0.norm | mid.… | up.… |
//!                            in memory while they are in use, evicted when memory is short
//! ```
//!
//! **On the CPU** a tensor's vector is an ordinary allocation whose memory comes and goes
//! ([`memory_compiler::hook::weights`]), filled from the mapped file. Opening a scope pins the weights whose
//! names begin with its path: inside `block.0`, the scope `attention` means `block.0.attention` if there are
//! such weights, else `attention` alone. Tensors below 4 KiB are not paged.
//!
//! **On a GPU** the weights lie in page-locked memory of the host as well, converted once, and come in for the
//! kernels that use them (`memory_compiler::hook::uses`): no scope is needed, and the model may be anybody's.
//! What is used together is known by the names (`names`), what comes next by the order of the last step, and
//! that is copied while this is computed ([`memory_compiler::pager::Ahead`]).

mod cpu;
mod files;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(any(feature = "cuda", test))]
mod names;
mod paths;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Result, bail};
#[cfg(feature = "cuda")]
use candle_core::{Shape, Tensor};
use candle_nn::VarBuilder;
#[cfg(feature = "cuda")]
use candle_nn::var_builder::SimpleBackend;
use memory_compiler::Bytes;
use memory_compiler::pager::{Pager, PagerStats};

use self::files::Files;
use crate::{refused, wrap};

/// The smallest tensor that is paged.
const SMALLEST: u64 = memory_compiler::hook::host::SMALLEST_THRESHOLD.0;

/// Numbers of paged weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagedStats {
    /// Bytes that the paged tensors take, each from a multiple of 512 on.
    pub weights: Bytes,
    /// Those of them that are in memory.
    pub resident: Bytes,
    /// Bytes copied so far to where they lie in memory.
    pub copied: Bytes,
    /// How long work has waited for copies so far.
    pub waited: Duration,
    /// Residency and evictions of all weights of the pager.
    pub pager: PagerStats,
}

/// Weights of one model. The tensors made from it may outlive it, but are filled no more once it is dropped.
pub struct Paged(Kind);

enum Kind {
    Cpu(Arc<cpu::Inner>),
    #[cfg(feature = "cuda")]
    Gpu(Arc<gpu::Inner>),
}

impl std::fmt::Debug for Paged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Paged")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Paged {
    /// Weights from safetensors: a file, several, or one index (`*.safetensors.index.json`) of shards beside it,
    /// as `dtype`, on `device`, within the budget of `pager`, which [`crate::pager`] makes for that device.
    ///
    /// # Errors
    /// What is wrong with a file, with its name; [`memory_compiler::Error`], wrapped, for a hook that is missing
    /// and a pager of another device.
    ///
    /// # Safety
    /// - Nobody changes the files while this lives.
    /// - The weights are read only while this lives. On the CPU: only on the thread that has a scope open which
    ///   names them, and on threads that work for it meanwhile. On a GPU: only by work on the device's own stream
    ///   that `memory_compiler::hook::uses` sees.
    /// - On a GPU one thread at a time uses the weights, or says that they [`rest`](Self::rest). Threads that take
    ///   turns are told apart; two that launch work on weights of one `Paged` at the same time are not, since
    ///   bringing weights in and the launch itself are two steps: the weights of the first may leave between them.
    /// - Nobody writes to the weights.
    pub unsafe fn open<P: AsRef<Path>>(
        pager: &Pager,
        device: &Device,
        paths: &[P],
        dtype: DType,
    ) -> Result<Self> {
        // SAFETY: the caller's promise.
        Self::new(pager, device, unsafe { Files::map(paths) }?, dtype)
    }

    /// The same from the bytes of a file that are part of the program.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Safety
    /// As [`open`](Self::open).
    pub unsafe fn over_bytes(
        pager: &Pager,
        device: &Device,
        bytes: &'static [u8],
        dtype: DType,
    ) -> Result<Self> {
        Self::new(pager, device, Files::over(bytes)?, dtype)
    }

    fn new(pager: &Pager, device: &Device, files: Files, dtype: DType) -> Result<Self> {
        crate::check_pager(pager, device)?;
        match device {
            Device::Cpu => Ok(Self(Kind::Cpu(cpu::Inner::new(pager, files, dtype)?))),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                let capacity = files.size_as(dtype);
                let source = Box::new(FileSource(files));
                let source = VarBuilder::from_backend(source, dtype, Device::Cpu);
                let inner = gpu::Inner::new(pager, device, source, capacity)?;
                Ok(Self(Kind::Gpu(inner)))
            }
            other => bail!("weights are not paged on {:?}", other.location()),
        }
    }

    /// Weights of a GPU from another builder, on whatever device, which is asked for each tensor once and may
    /// make it up; all of them together take at most `capacity`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Safety
    /// As [`open`](Self::open), on a GPU: also that one thread at a time uses the weights.
    #[cfg(feature = "cuda")]
    pub unsafe fn over(
        pager: &Pager,
        device: &Device,
        source: VarBuilder<'static>,
        capacity: Bytes,
    ) -> Result<Self> {
        crate::check_pager(pager, device)?;
        let inner = gpu::Inner::new(pager, device, source, capacity)?;
        Ok(Self(Kind::Gpu(inner)))
    }

    /// A builder of tensors that live in the range.
    #[must_use]
    pub fn var_builder(&self) -> VarBuilder<'static> {
        match &self.0 {
            Kind::Cpu(inner) => {
                let backend = Box::new(cpu::Backend(Arc::clone(inner)));
                VarBuilder::from_backend(backend, inner.dtype, Device::Cpu)
            }
            #[cfg(feature = "cuda")]
            Kind::Gpu(inner) => {
                let backend = Box::new(gpu::Backend(Arc::clone(inner)));
                VarBuilder::from_backend(backend, inner.dtype, inner.device.clone())
            }
        }
    }

    /// Has only scopes inside of one named `scope` mean these weights: for a model whose weights have the names of
    /// another one's. On the CPU each would else come in for scopes of the other; on a GPU weights come in for
    /// the work that uses them, and this changes nothing.
    pub fn only_in(&self, scope: &str) {
        match &self.0 {
            Kind::Cpu(inner) => inner.only_in(scope),
            #[cfg(feature = "cuda")]
            Kind::Gpu(_) => {}
        }
    }

    /// Runs `f`, work on these weights that is no step, on plain memory.
    ///
    /// # Errors
    /// What `f` returns; where weights could not come in, why, as [`Memory::step`](crate::Memory::step) says it.
    pub fn run<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        drop(refused());
        let result = memory_compiler::catch_scopes(f).map_err(wrap)?;
        result.map_err(|error| refused().map_or(error, wrap))
    }

    /// The numbers of now.
    #[must_use]
    pub fn stats(&self) -> PagedStats {
        match &self.0 {
            Kind::Cpu(inner) => inner.stats(),
            #[cfg(feature = "cuda")]
            Kind::Gpu(inner) => inner.stats(),
        }
    }

    /// Lets everything go when others need memory: no more work on these weights is enqueued for now. Only
    /// worth saying on a GPU, where weights are else kept until others of this model are used. Another thread than
    /// the one that used them waits for the device once.
    pub fn rest(&self) {
        match &self.0 {
            Kind::Cpu(_) => {}
            #[cfg(feature = "cuda")]
            Kind::Gpu(inner) => inner.rest(),
        }
    }
}

/// Tensors of files, in the memory of the host.
#[cfg(feature = "cuda")]
struct FileSource(Files);

#[cfg(feature = "cuda")]
impl SimpleBackend for FileSource {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        self.0.shape(name, Some(shape))?;
        self.get_unchecked(name, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let (stored, shape, data) = self.0.get(name)?;
        Tensor::from_raw_buffer(data, stored, &shape, device)?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}
