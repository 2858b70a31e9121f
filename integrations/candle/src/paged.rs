//! Weights that come and go: a `VarBuilder` over memory-mapped safetensors whose tensors live in a
//! weight range.
//!
//! ```text
//!   file (mapped) ──dtype──> weight range | down.0.conv | down.0.norm | mid.… | up.… |
//!                                             pinned while the scope "down.0" is open,
//!                                             evicted when memory is short, filled again when back
//! ```
//!
//! A tensor's vector is an ordinary allocation whose memory comes and goes
//! ([`memory_compiler::hook::weights`]). Opening a scope pins the weights whose names begin with its
//! path: inside `block.0`, the scope `attention` means `block.0.attention` if there are such weights,
//! else `attention` alone. Tensors below 4 KiB are not paged.
//!
//! A scope whose weights do not fit goes past the budget until it closes, since a CPU kernel can read
//! them nowhere else; [`PagedStats::pager`] says how far.

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use candle_core::safetensors::{MmapedSafetensors, SliceSafetensors};
use candle_core::{DType, Device, Result, Shape, Tensor, WithDType, bail};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use memory_compiler::device::{Device as _, Host};
use memory_compiler::hook::weights::VecRange;
use memory_compiler::pager::{Pager, PagerStats, Part, Pinned, Stamp};
use memory_compiler::{ALIGNMENT, Bytes, ScopeWatch, watch_scopes};

use crate::wrap;

/// The smallest tensor that is paged.
const SMALLEST: u64 = memory_compiler::hook::host::SMALLEST_THRESHOLD.0;

/// Where the bytes of the weights are.
enum Files {
    Mapped(MmapedSafetensors),
    Slice(SliceSafetensors<'static>),
}

impl Files {
    /// Type, shape and bytes of a tensor.
    fn get(&self, name: &str) -> Result<(DType, Vec<usize>, &[u8])> {
        let view = match self {
            Self::Mapped(files) => files.get(name)?,
            Self::Slice(file) => file.get(name)?,
        };
        let dtype = DType::try_from(view.dtype())?;
        Ok((dtype, view.shape().to_vec(), view.data()))
    }

    fn contains(&self, name: &str) -> bool {
        self.get(name).is_ok()
    }

    /// A bound for what all tensors take as `dtype`, each at a multiple of 512 bytes.
    fn size_as(&self, dtype: DType) -> Bytes {
        let views = match self {
            Self::Mapped(files) => files.tensors(),
            Self::Slice(file) => file.tensors(),
        };
        let size = |elements: usize| (elements * dtype.size_in_bytes()) as u64;
        let sizes = views
            .iter()
            .map(|(_, view)| size(view.shape().iter().product()).next_multiple_of(ALIGNMENT.0));
        Bytes(sizes.sum())
    }
}

/// A tensor of the range.
#[derive(Debug)]
struct Weight {
    name: String,
    offset: Bytes,
    size: Bytes,
    /// When its bytes were filled last.
    filled: Stamp,
}

#[derive(Debug, Default)]
struct Books {
    weights: Vec<Weight>,
    /// Bytes of the range that are given to a tensor.
    used: Bytes,
    /// Bytes copied from the files so far.
    copied: Bytes,
    /// Tensors that were asked for: a name has one, however often it is used.
    tensors: HashMap<String, Tensor>,
    /// Which weights a path of scopes pins.
    paths: HashMap<Vec<String>, Arc<[usize]>>,
}

/// Numbers of paged weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagedStats {
    /// Bytes that the paged tensors take, each from a multiple of 512 on.
    pub weights: Bytes,
    /// Bytes copied from the files so far, as they lie in memory.
    pub copied: Bytes,
    /// Residency, evictions and what went past the budget.
    pub pager: PagerStats,
}

/// Weights of one model, on the CPU. The tensors made from it may outlive it, but are filled no more
/// once it is dropped.
pub struct Paged(Arc<Inner>);

struct Inner {
    files: Files,
    dtype: DType,
    host: Arc<Host>,
    pager: Pager,
    memory: VecRange,
    books: Mutex<Books>,
}

impl std::fmt::Debug for Paged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Paged")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Paged {
    /// Weights from safetensors: a file, several, or one index (`*.safetensors.index.json`) of shards
    /// beside it. At most `budget` bytes of them stay in memory, in pages of `granule`.
    ///
    /// # Safety
    /// - The files do not change while this lives (they are mapped).
    /// - The tensors are read only where their weights are pinned: within a scope that names them, on
    ///   the thread that opened it or on threads that work for it, while this value lives. Elsewhere a
    ///   read is a `SIGSEGV`, or sees bytes that were not filled yet.
    /// - Nobody writes to them.
    ///
    /// # Errors
    /// A file that cannot be read or is damaged, an option that cannot work, or the hook missing.
    pub unsafe fn open<P: AsRef<Path>>(
        paths: &[P],
        dtype: DType,
        budget: Bytes,
        granule: Bytes,
    ) -> Result<Self> {
        let paths = shards(paths)?;
        // SAFETY: the caller promises that the files do not change.
        let files = unsafe { MmapedSafetensors::multi(&paths) }.map_err(|error| {
            let names: Vec<_> = paths
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            candle_core::Error::Msg(format!("{}: {error}", names.join(", ")))
        })?;
        Self::over(Files::Mapped(files), dtype, budget, granule)
    }

    /// The same over bytes that are in memory anyway.
    ///
    /// # Safety
    /// As [`open`](Self::open), without the files.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub unsafe fn over_bytes(
        bytes: &'static [u8],
        dtype: DType,
        budget: Bytes,
        granule: Bytes,
    ) -> Result<Self> {
        Self::over(
            Files::Slice(SliceSafetensors::new(bytes)?),
            dtype,
            budget,
            granule,
        )
    }

    fn over(files: Files, dtype: DType, budget: Bytes, granule: Bytes) -> Result<Self> {
        let host = Arc::new(Host::new(granule).map_err(candle_core::Error::wrap)?);
        let pager = Pager::new(host.clone(), Some(budget)).map_err(wrap)?;
        let range = pager.range(files.size_as(dtype)).map_err(wrap)?;
        let inner = Arc::new(Inner {
            files,
            dtype,
            host,
            pager,
            memory: VecRange::new(range).map_err(wrap)?,
            books: Mutex::default(),
        });
        let watch: Weak<Inner> = Arc::downgrade(&inner);
        watch_scopes(watch);
        Ok(Self(inner))
    }

    /// A builder of tensors that live in the range.
    #[must_use]
    pub fn var_builder(&self) -> VarBuilder<'static> {
        let backend = Box::new(Backend(Arc::clone(&self.0)));
        VarBuilder::from_backend(backend, self.0.dtype, Device::Cpu)
    }

    /// The numbers of now.
    #[must_use]
    pub fn stats(&self) -> PagedStats {
        let books = self.0.lock();
        PagedStats {
            weights: books.used,
            copied: books.copied,
            pager: self.0.pager.stats(),
        }
    }
}

/// The files themselves, or the shards that an index names.
fn shards<P: AsRef<Path>>(paths: &[P]) -> Result<Vec<std::path::PathBuf>> {
    let mut files = Vec::new();
    for path in paths.iter().map(AsRef::as_ref) {
        if path.extension().is_none_or(|extension| extension != "json") {
            files.push(path.to_path_buf());
            continue;
        }
        let wrong = |why: String| candle_core::Error::Msg(format!("{}: {why}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let index: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let map = index.get("weight_map").and_then(|map| map.as_object());
        let map = map.ok_or_else(|| wrong("no weight_map".to_owned()))?;
        let names: Option<BTreeSet<&str>> = map.values().map(|name| name.as_str()).collect();
        let names = names.ok_or_else(|| wrong("a shard is not a name".to_owned()))?;
        files.extend(names.into_iter().map(|name| path.with_file_name(name)));
    }
    Ok(files)
}

impl Inner {
    fn lock(&self) -> std::sync::MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Elements `from .. to` of a tensor, as bytes of the type that it has in memory.
    fn bytes(&self, name: &str, from: usize, to: usize) -> Result<Vec<u8>> {
        let (dtype, _, data) = self.files.get(name)?;
        let width = dtype.size_in_bytes();
        let data = &data[from * width..to * width];
        if dtype == self.dtype {
            return Ok(data.to_vec());
        }
        let tensor = Tensor::from_raw_buffer(data, dtype, &[to - from], &Device::Cpu)?;
        let tensor = tensor.to_dtype(self.dtype)?;
        match self.dtype {
            DType::F32 => Ok(tensor
                .to_vec1::<f32>()?
                .into_iter()
                .flat_map(f32::to_le_bytes)
                .collect()),
            DType::F64 => Ok(tensor
                .to_vec1::<f64>()?
                .into_iter()
                .flat_map(f64::to_le_bytes)
                .collect()),
            DType::F16 => Ok(tensor
                .to_vec1::<half::f16>()?
                .into_iter()
                .flat_map(half::f16::to_le_bytes)
                .collect()),
            DType::BF16 => Ok(tensor
                .to_vec1::<half::bf16>()?
                .into_iter()
                .flat_map(half::bf16::to_le_bytes)
                .collect()),
            other => bail!("{name}: paged weights of type {other:?} are not supported"),
        }
    }

    /// Makes a weight resident and fills what is not the file's.
    fn pin(&self, books: &mut Books, weight: usize) -> Result<Pinned> {
        let Weight {
            name,
            offset,
            size,
            filled,
        } = &books.weights[weight];
        let range = self.memory.range();
        let pinned = range.pin_beyond(*offset, *size, *filled).map_err(wrap)?;
        let mut copied = 0;
        let width = self.dtype.size_in_bytes() as u64;
        for &Part {
            offset: at,
            address,
            size,
        } in pinned.stale()
        {
            // Pages and tensors begin at multiples of 512 bytes.
            let from = (at.0 - offset.0) / width;
            let bytes = self.bytes(name, from as usize, (from + size.0 / width) as usize)?;
            let written = self.host.write(address, &bytes);
            written.map_err(candle_core::Error::wrap)?;
            copied += size.0;
        }
        books.weights[weight].filled = pinned.stamp();
        books.copied.0 += copied;
        Ok(pinned)
    }

    /// The weights that an open path of scopes means.
    fn weights_of(&self, books: &mut Books, path: &[String]) -> Arc<[usize]> {
        if let Some(found) = books.paths.get(path) {
            return Arc::clone(found);
        }
        let under = |prefix: &str| -> Vec<usize> {
            let named = |name: &str| {
                name.strip_prefix(prefix)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            (0..books.weights.len())
                .filter(|&at| named(&books.weights[at].name))
                .collect()
        };
        let (mut prefix, mut found) = (String::new(), Vec::new());
        for name in path {
            let nested = format!("{prefix}.{name}");
            for candidate in [nested.as_str(), name.as_str()] {
                found = under(candidate);
                if !found.is_empty() {
                    prefix = candidate.to_owned();
                    break;
                }
            }
        }
        let found: Arc<[usize]> = found.into();
        books.paths.insert(path.to_vec(), Arc::clone(&found));
        found
    }

    fn get(
        &self,
        name: &str,
        dtype: DType,
        dev: &Device,
        expected: Option<Shape>,
    ) -> Result<Tensor> {
        let (stored, shape, _) = self.files.get(name)?;
        let shape = Shape::from(shape);
        if let Some(expected) = expected.filter(|expected| *expected != shape) {
            return Err(candle_core::Error::UnexpectedShape {
                msg: format!("shape mismatch for {name}"),
                expected,
                got: shape,
            });
        }
        if dtype != self.dtype || !dev.is_cpu() {
            bail!(
                "{name}: paged weights are {:?} on the CPU, not {dtype:?} on {dev:?}",
                self.dtype
            );
        }
        if let Some(tensor) = self.lock().tensors.get(name) {
            return Ok(tensor.clone());
        }
        let count = shape.elem_count();
        if ((count * dtype.size_in_bytes()) as u64) < SMALLEST {
            let (_, _, data) = self.files.get(name)?;
            return Tensor::from_raw_buffer(data, stored, shape.dims(), dev)?.to_dtype(dtype);
        }
        match dtype {
            DType::F32 => self.tensor::<f32>(name, shape),
            DType::F64 => self.tensor::<f64>(name, shape),
            DType::F16 => self.tensor::<half::f16>(name, shape),
            DType::BF16 => self.tensor::<half::bf16>(name, shape),
            other => bail!("{name}: paged weights of type {other:?} are not supported"),
        }
    }

    /// A tensor in the range.
    fn tensor<T: WithDType>(&self, name: &str, shape: Shape) -> Result<Tensor> {
        let count = shape.elem_count();
        let size = Bytes((count * size_of::<T>()) as u64);
        let mut books = self.lock();
        let offset = books.used;
        let end = (offset.0 + size.0).next_multiple_of(ALIGNMENT.0);
        // SAFETY: each tensor gets bytes of its own, since `used` only grows; they are written only by
        // `pin`; whoever opened the weights promises to read them only where they are pinned.
        let vector = unsafe { self.memory.vec::<T>(offset, count) };
        let Some(mut vector) = vector else {
            bail!("{name}: {size} at {offset} do not fit the weights");
        };
        books.used = Bytes(end);
        let weight = books.weights.len();
        books.weights.push(Weight {
            name: name.to_owned(),
            offset,
            size,
            filled: Stamp::NEVER,
        });
        books.paths.clear();
        let _pinned = self.pin(&mut books, weight)?;
        // SAFETY: the vector has room for `count` elements, and `pin` has just filled all of them, of
        // which any bits are a value.
        unsafe { vector.set_len(count) };
        let tensor = Tensor::from_vec(vector, shape, &Device::Cpu)?;
        books.tensors.insert(name.to_owned(), tensor.clone());
        Ok(tensor)
    }
}

impl ScopeWatch for Inner {
    /// # Panics
    /// When the device refuses: the scope could only read bytes that are not there.
    fn opened(&self, path: &[String]) -> Option<Box<dyn Any>> {
        let mut books = self.lock();
        let weights = self.weights_of(&mut books, path);
        let pin = |&weight: &usize| {
            self.pin(&mut books, weight)
                .unwrap_or_else(|error| panic!("weights of {}: {error}", path.join("/")))
        };
        let pins: Vec<Pinned> = weights.iter().map(pin).collect();
        (!pins.is_empty()).then(|| Box::new(pins) as Box<dyn Any>)
    }
}

/// What `candle_nn` asks for tensors.
struct Backend(Arc<Inner>);

impl SimpleBackend for Backend {
    fn get(
        &self,
        s: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        dev: &Device,
    ) -> Result<Tensor> {
        self.0.get(name, dtype, dev, Some(s))
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        self.0.get(name, dtype, dev, None)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.files.contains(name)
    }
}
