//! Weights on a GPU, brought in for the work that uses them.
//!
//! ```text
//!   get("a.weight")   source ──> image (page-locked, at the weight's offset)      no memory of the GPU
//!                     tensor at base + offset of the range
//!   first use         groups by name, the image is closed, `Ahead` begins
//!   each use          the kernel's arguments ──> weights ──> their groups are entered, others left
//! ```
//!
//! A weight stays where it is entered until work on another group is enqueued: then what is enqueued so far is
//! all that used it. From the moment when a thread is told that it may use weights until its work is enqueued,
//! another thread that uses weights waits: what leaves would not be behind that work.
//!
//! Copies and work are ordered on the stream of the work, whichever call enqueues it. Where another stream uses
//! weights than before, the device is waited for once: another handle, another thread, since a handle may name a
//! stream of each thread, and the same handle after any stream was destroyed, since it may have come back.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::ThreadId;

use candle_core::cuda_backend::cudarc::cublas;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::{CudaDType, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Shape, Storage, Tensor, WithDType, bail};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use memory_compiler::device::{Call, DeviceError, HostMemory, StreamId};
use memory_compiler::hook::cuda as streams;
use memory_compiler::hook::uses::{self, UseWatch, forget_dropped, watch_uses};
use memory_compiler::hook::weights::SliceRange;
use memory_compiler::pager::{Ahead, AheadStats, Group, OnStream, Pager};
use memory_compiler::{ALIGNMENT, Address, Bytes, Error};

use super::names;
use super::{PagedStats, SMALLEST};
use crate::wrap;

/// The largest group; a smaller part of the limit of weights where that is small. Work waits for all of its group:
/// small ones wait less, and each one costs a fence.
const GROUP: Bytes = Bytes::gib(1);
const GROUPS_IN_LIMIT: u64 = 16;

/// See the module's page.
pub(super) struct Inner {
    pub device: Device,
    pub dtype: DType,
    source: VarBuilder<'static>,
    pager: Pager,
    stream: StreamId,
    memory: SliceRange,
    /// Held while a tensor is made, so that each is made once. Before `books`.
    loading: Mutex<()>,
    books: Mutex<Books>,
    /// Told when `Books::enqueuing` becomes `None`.
    enqueued: Condvar,
}

struct Weight {
    name: String,
    offset: Bytes,
    size: Bytes,
}

#[derive(Default)]
struct Books {
    /// By offset.
    weights: Vec<Weight>,
    /// Bytes of the range that are given to a tensor.
    used: Bytes,
    tensors: HashMap<(String, DType), Tensor>,
    phase: Phase,
    /// The thread that may use weights and has not enqueued its work yet, and how often it was told so.
    enqueuing: Option<(ThreadId, u32)>,
}

#[derive(Default)]
enum Phase {
    #[default]
    Empty,
    /// Weights are added; none was used.
    Loading(HostMemory),
    Running(Box<Running>),
    /// The image could not be closed.
    Failed(Error),
}

struct Running {
    ahead: Ahead,
    /// Of each weight.
    group_of: Vec<Group>,
    active: BTreeSet<Group>,
    /// Who used weights last.
    last: User,
}

/// A stream of work, as far as a thread can tell it from others.
#[derive(Clone, Copy, PartialEq, Eq)]
struct User {
    stream: StreamId,
    /// Candle's usual stream is another one on each thread.
    thread: ThreadId,
    /// Streams that were destroyed so far: later on the handle may be another one's.
    destroyed: u64,
}

impl User {
    /// Whoever enqueues on a stream now, on this thread.
    fn of(stream: StreamId) -> Self {
        Self {
            stream,
            thread: std::thread::current().id(),
            destroyed: streams::streams_destroyed(),
        }
    }
}

impl Running {
    /// Has work on a stream go on where another one used weights last: fences and copies are in order with the
    /// stream that they are asked for, and with no other one.
    fn come_to(&mut self, stream: StreamId) -> std::result::Result<(), Error> {
        let user = User::of(stream);
        if self.last != user {
            self.ahead.work_on(stream)?;
            self.last = user;
        }
        Ok(())
    }
}

/// Whether what Candle calls in cuBLAS arrives at the hook.
fn check_products() -> bool {
    use cublas::sys;
    let (null, transpose) = (std::ptr::null_mut(), sys::cublasOperation_t::CUBLAS_OP_N);
    let kind = sys::cudaDataType_t::CUDA_R_32F;
    uses::probe(|| {
        // SAFETY: no handle: refused, nothing is computed.
        let _ = unsafe {
            sys::cublasGemmStridedBatchedEx(
                std::ptr::null_mut(),
                transpose,
                transpose,
                0,
                0,
                0,
                null,
                null,
                kind,
                0,
                0,
                null,
                kind,
                0,
                0,
                null,
                null,
                kind,
                0,
                0,
                0,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
    })
}

impl Inner {
    pub fn new(
        pager: &Pager,
        device: &Device,
        source: VarBuilder<'static>,
        capacity: Bytes,
    ) -> Result<Arc<Self>> {
        uses::check().map_err(wrap)?;
        if !check_products() {
            return Err(wrap(Error::CudaUsesMissing));
        }
        let Device::Cuda(cuda) = device else {
            bail!("weights are not paged here on {:?}", device.location());
        };
        let range = pager.range(capacity).map_err(wrap)?;
        let inner = Arc::new(Self {
            device: device.clone(),
            dtype: source.dtype(),
            source,
            pager: pager.clone(),
            stream: crate::cuda::stream(cuda),
            memory: SliceRange::new(range).map_err(wrap)?,
            loading: Mutex::default(),
            books: Mutex::default(),
            enqueued: Condvar::new(),
        });
        let watch: Weak<Self> = Arc::downgrade(&inner);
        let range = inner.memory.range();
        watch_uses(range.base(), range.size(), watch);
        Ok(inner)
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same once no other thread is about to enqueue work on weights.
    fn lock_behind_work(&self) -> MutexGuard<'_, Books> {
        let here = std::thread::current().id();
        let is_elsewhere = |books: &mut Books| {
            let thread = books.enqueuing.map(|(thread, _)| thread);
            thread.is_some_and(|thread| thread != here)
        };
        let waited = self.enqueued.wait_while(self.lock(), is_elsewhere);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    pub fn stats(&self) -> PagedStats {
        let mut books = self.lock();
        let range = self.memory.range();
        let residency = range.residency(Bytes::ZERO, range.size());
        let weights = books.used;
        let ahead = match &mut books.phase {
            Phase::Running(running) => running.ahead.stats(),
            _ => AheadStats::default(),
        };
        PagedStats {
            weights,
            resident: residency.unwrap_or_default().resident,
            copied: ahead.copied,
            waited: ahead.waited,
            pager: self.pager.stats(),
        }
    }

    pub fn rest(&self) {
        let mut books = self.lock_behind_work();
        let Phase::Running(running) = &mut books.phase else {
            return;
        };
        if running.active.is_empty() {
            return;
        }
        // The stream of the last work may be destroyed by now; this one is the device's, which lives.
        if let Err(error) = running.come_to(self.stream) {
            // They stay until work of this model needs other ones.
            tracing::warn!(%error, "no weights rest");
            return;
        }
        let Running { ahead, active, .. } = &mut **running;
        std::mem::take(active)
            .into_iter()
            .for_each(|group| ahead.leave(group));
    }

    fn get(&self, name: &str, dtype: DType, dev: &Device, shape: Option<Shape>) -> Result<Tensor> {
        if !dev.same_device(&self.device) {
            bail!("{name}: these weights are on {:?}", self.device.location());
        }
        let key = (name.to_owned(), dtype);
        let _loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tensor) = self.lock().tensors.get(&key) {
            return Ok(tensor.clone());
        }
        let tensor = match shape {
            Some(shape) => {
                let hints = candle_nn::Init::Const(0.0);
                self.source.get_with_hints_dtype(shape, name, hints, dtype)
            }
            None => self.source.get_unchecked_dtype(name, dtype),
        }?;
        let size = tensor.elem_count() * dtype.size_in_bytes();
        if (size as u64) < SMALLEST {
            return tensor.to_device(&self.device);
        }
        let tensor = match dtype {
            DType::F32 => self.add::<f32>(name, &tensor),
            DType::F64 => self.add::<f64>(name, &tensor),
            DType::F16 => self.add::<half::f16>(name, &tensor),
            DType::BF16 => self.add::<half::bf16>(name, &tensor),
            DType::U8 => self.add::<u8>(name, &tensor),
            DType::U32 => self.add::<u32>(name, &tensor),
            DType::I64 => self.add::<i64>(name, &tensor),
            other => bail!("{name}: paged weights of type {other:?} are not supported"),
        }?;
        self.lock().tensors.insert(key, tensor.clone());
        Ok(tensor)
    }

    /// A tensor in the range with the values of another one, which go into the image.
    fn add<T: WithDType + CudaDType + DeviceRepr>(
        &self,
        name: &str,
        values: &Tensor,
    ) -> Result<Tensor> {
        let count = values.elem_count();
        let size = Bytes((count * size_of::<T>()) as u64);
        let mut books = self.lock();
        let offset = books.used;
        let end = (offset.0 + size.0).next_multiple_of(ALIGNMENT.0);
        let room = self.memory.range().size();
        if end > room.0 {
            bail!("{name}: {size} at {offset} do not fit {room} of weights");
        }
        if let Phase::Empty = books.phase {
            let image = self.pager.device().host_memory(room);
            books.phase = Phase::Loading(image.map_err(candle_core::Error::wrap)?);
        }
        let Phase::Loading(image) = &mut books.phase else {
            bail!("{name}: all weights are loaded before the first one is used");
        };
        let place = &mut image.bytes_mut()[offset.0 as usize..(offset.0 + size.0) as usize];
        copy_values::<T>(values, place)?;
        let Some(at) = self.memory.place(offset, size) else {
            bail!("{name}: {size} at {offset} do not lie in the weights");
        };
        books.used = Bytes(end);
        books.weights.push(Weight {
            name: name.to_owned(),
            offset,
            size,
        });
        drop(books);
        let Device::Cuda(device) = &self.device else {
            bail!("weights are not paged here on {:?}", self.device.location());
        };
        // SAFETY: the bytes are this tensor's alone, since `used` only grows; they are in memory whenever work
        // that the hook sees uses them, which whoever opened the weights promises is all; the free of the
        // address is taken over by the hook.
        let slice = unsafe { device.cuda_stream().upgrade_device_ptr::<T>(at.0, count) };
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, device.clone()));
        Ok(Tensor::from_storage(
            storage,
            values.shape().clone(),
            BackpropOp::none(),
            false,
        ))
    }

    /// Ends loading: puts weights into groups and has the image copied from.
    fn run(&self, books: &mut Books) -> std::result::Result<(), Error> {
        let image = match std::mem::take(&mut books.phase) {
            Phase::Loading(image) => image,
            Phase::Empty => return Ok(()),
            other => {
                books.phase = other;
                return Ok(());
            }
        };
        let running = self.start(&books.weights, image);
        match running {
            Ok(running) => {
                books.phase = Phase::Running(Box::new(running));
                Ok(())
            }
            Err(error) => {
                books.phase = Phase::Failed(error.clone());
                Err(error)
            }
        }
    }

    fn start(&self, weights: &[Weight], image: HostMemory) -> std::result::Result<Running, Error> {
        let device = Arc::clone(self.pager.device());
        let carrier = OnStream::new(device, self.stream, Arc::new(image));
        let carrier = carrier.map_err(|source| Error::Device {
            call: Call::Write,
            source,
        })?;
        let mut ahead = Ahead::new(self.memory.range().clone(), Box::new(carrier));
        let stats = self.pager.stats();
        let limit = GROUP.min(Bytes(stats.weights_limit.0 / GROUPS_IN_LIMIT));
        let named: Vec<(&str, u64)> = weights
            .iter()
            .map(|weight| (weight.name.as_str(), weight.size.0))
            .collect();
        let mut group_of = vec![None; weights.len()];
        for members in names::groups(&named, limit.0) {
            let parts = members
                .iter()
                .map(|&member| (weights[member].offset, weights[member].size));
            let group = ahead.group(parts)?;
            members
                .iter()
                .for_each(|&member| group_of[member] = Some(group));
        }
        Ok(Running {
            ahead,
            group_of: group_of.into_iter().flatten().collect(),
            active: BTreeSet::new(),
            last: User::of(self.stream),
        })
    }
}

impl UseWatch for Inner {
    fn used(&self, addresses: &[Address], stream: StreamId) -> std::result::Result<(), Error> {
        let mut books = self.lock_behind_work();
        self.bring(&mut books, addresses, stream)?;
        let (thread, times) = books.enqueuing.unwrap_or((std::thread::current().id(), 0));
        books.enqueuing = Some((thread, times + 1));
        Ok(())
    }

    fn enqueued(&self) {
        let mut books = self.lock();
        let left = books.enqueuing.filter(|&(_, times)| times > 1);
        books.enqueuing = left.map(|(thread, times)| (thread, times - 1));
        if books.enqueuing.is_none() {
            drop(books);
            self.enqueued.notify_all();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        forget_dropped();
    }
}

impl Inner {
    /// Makes the weights at these addresses be in memory for the work that comes next on a stream.
    fn bring(
        &self,
        books: &mut Books,
        addresses: &[Address],
        stream: StreamId,
    ) -> std::result::Result<(), Error> {
        self.run(books)?;
        let Books { weights, phase, .. } = books;
        let running = match phase {
            Phase::Running(running) => running,
            Phase::Failed(error) => return Err(error.clone()),
            // What looks like an address is none: there are no weights.
            Phase::Empty | Phase::Loading(_) => return Ok(()),
        };
        let gpu = self.pager.device().gpu();
        if !gpu.is_none_or(|gpu| streams::is_of_context(stream, gpu.context)) {
            // No fence of the GPU's own context would be one of this stream.
            return Err(Error::Device {
                call: Call::Wait,
                source: DeviceError::Invalid {
                    call: Call::Wait,
                    reason: "weights are used on streams of the GPU's primary context",
                },
            });
        }
        let base = self.memory.range().base().0;
        let mut needed = BTreeSet::new();
        for address in addresses {
            let offset = address.0 - base;
            let after = weights.partition_point(|weight| weight.offset.0 <= offset);
            let weight = after.checked_sub(1);
            let inside =
                weight.filter(|&weight| offset < weights[weight].offset.0 + weights[weight].size.0);
            needed.extend(inside.map(|weight| running.group_of[weight]));
        }
        running.come_to(stream)?;
        if needed.is_subset(&running.active) {
            return Ok(());
        }
        let Running { ahead, active, .. } = &mut **running;
        active.retain(|&group| {
            let stays = needed.contains(&group);
            if !stays {
                ahead.leave(group);
            }
            stays
        });
        for group in needed {
            if !active.contains(&group) {
                ahead.enter(group)?;
                active.insert(group);
            }
        }
        Ok(())
    }
}

/// Copies a tensor's values into bytes of the host.
fn copy_values<T: WithDType + CudaDType + DeviceRepr>(
    values: &Tensor,
    place: &mut [u8],
) -> Result<()> {
    let values = values.flatten_all()?.contiguous()?;
    // SAFETY: any bits are a value of `T`, a number; what does not align is left out, and seen below.
    let (before, place, after) = unsafe { place.align_to_mut::<T>() };
    if !before.is_empty() || !after.is_empty() || place.len() != values.elem_count() {
        bail!(
            "{} bytes are no {} values",
            size_of_val(place),
            values.elem_count()
        );
    }
    let (storage, layout) = values.storage_and_layout();
    let from = layout.start_offset();
    match &*storage {
        Storage::Cpu(storage) => {
            let all = storage.as_slice::<T>()?;
            place.copy_from_slice(&all[from..from + place.len()]);
        }
        Storage::Cuda(storage) => {
            let all = storage.as_cuda_slice::<T>()?;
            let view = all.slice(from..from + place.len());
            let stream = storage.device.cuda_stream();
            let copied = stream.memcpy_dtoh(&view, place);
            copied.map_err(candle_core::Error::wrap)?;
            stream.synchronize().map_err(candle_core::Error::wrap)?;
        }
        Storage::Metal(_) => bail!("weights come from the CPU or from a GPU of CUDA"),
    }
    Ok(())
}

/// What `candle_nn` asks for tensors.
pub(super) struct Backend(pub Arc<Inner>);

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        dev: &Device,
    ) -> Result<Tensor> {
        self.0.get(name, dtype, dev, Some(shape))
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        self.0.get(name, dtype, dev, None)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.source.contains_tensor(name)
    }
}
