//! Weights on the CPU, pinned by scopes.
//!
//! A scope whose weights do not fit into what weights may have takes of the rest of the budget until it closes,
//! since a CPU kernel can read them nowhere else; [`PagedStats::pager`] says how far. Where the budget has not
//! so much either, the step ends with an error that says what is needed.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Shape, Tensor, WithDType, bail};
use candle_nn::var_builder::SimpleBackend;
use memory_compiler::device::Device as _;
use memory_compiler::hook::weights::VecRange;
use memory_compiler::pager::{Pager, Part, Pinned, Stamp};
use memory_compiler::{ALIGNMENT, Bytes, Refusal, ScopeWatch, watch_scopes};

use super::paths::Paths;
use super::{Files, PagedStats, SMALLEST};
use crate::wrap;

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
    copies: Copies,
    /// Tensors that were asked for: a name has one, however often it is used.
    tensors: HashMap<String, Tensor>,
    paths: Paths,
}

/// What was copied from the files so far.
#[derive(Debug, Default)]
struct Copies {
    bytes: Bytes,
    /// How long that took.
    took: Duration,
}

/// See the module's page.
pub(super) struct Inner {
    files: Files,
    pub dtype: DType,
    pager: Pager,
    memory: VecRange,
    books: Mutex<Books>,
}

impl Inner {
    pub fn new(pager: &Pager, files: Files, dtype: DType) -> Result<Arc<Self>> {
        let range = pager.range(files.size_as(dtype)).map_err(wrap)?;
        let inner = Arc::new(Self {
            files,
            dtype,
            pager: pager.clone(),
            memory: VecRange::new(range).map_err(wrap)?,
            books: Mutex::default(),
        });
        let watch: Weak<Self> = Arc::downgrade(&inner);
        watch_scopes(watch);
        Ok(inner)
    }

    pub fn stats(&self) -> PagedStats {
        let books = self.lock();
        let range = self.memory.range();
        let residency = range.residency(Bytes::ZERO, range.size());
        PagedStats {
            weights: books.used,
            resident: residency.unwrap_or_default().resident,
            copied: books.copies.bytes,
            waited: books.copies.took,
            pager: self.pager.stats(),
        }
    }

    pub fn only_in(&self, scope: &str) {
        self.lock().paths.only_in(scope);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a weight resident and fills what is not the file's.
    fn pin(&self, weight: &mut Weight, copies: &mut Copies) -> Result<Pinned> {
        let Weight {
            name,
            offset,
            size,
            filled,
        } = weight;
        let range = self.memory.range();
        let pinned = range.pin_beyond(*offset, *size, *filled).map_err(wrap)?;
        let began = Instant::now();
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
            let to = from + size.0 / width;
            let bytes = self
                .files
                .bytes(name, self.dtype, from as usize, to as usize)?;
            let written = self.pager.device().write(address, &bytes);
            written.map_err(candle_core::Error::wrap)?;
            copied += size.0;
        }
        *filled = pinned.stamp();
        if copied > 0 {
            copies.bytes.0 += copied;
            copies.took += began.elapsed();
        }
        Ok(pinned)
    }

    fn get(
        &self,
        name: &str,
        dtype: DType,
        dev: &Device,
        expected: Option<Shape>,
    ) -> Result<Tensor> {
        let shape = self.files.shape(name, expected)?;
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
            let (stored, _, data) = self.files.get(name)?;
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
        if let Some(tensor) = books.tensors.get(name) {
            // Another thread was quicker.
            return Ok(tensor.clone());
        }
        let offset = books.used;
        let end = (offset.0 + size.0).next_multiple_of(ALIGNMENT.0);
        // SAFETY: each tensor gets bytes of its own: `used` only grows, and does so before the lock is let go
        // unless this vector goes again; they are written only by `pin`; whoever opened the weights promises to
        // read them only where they are pinned.
        let vector = unsafe { self.memory.vec::<T>(offset, count) };
        let Some(mut vector) = vector else {
            bail!("{name}: {size} at {offset} do not fit the weights");
        };
        let mut weight = Weight {
            name: name.to_owned(),
            offset,
            size,
            filled: Stamp::NEVER,
        };
        let _pinned = self.pin(&mut weight, &mut books.copies)?;
        // SAFETY: the vector has room for `count` elements, and `pin` has just filled all of them, of
        // which any bits are a value.
        unsafe { vector.set_len(count) };
        let tensor = Tensor::from_vec(vector, shape, &Device::Cpu)?;
        // Nothing fails from here on.
        books.used = Bytes(end);
        books.weights.push(weight);
        books.paths.forget();
        books.tensors.insert(name.to_owned(), tensor.clone());
        Ok(tensor)
    }
}

impl ScopeWatch for Inner {
    fn opened(&self, path: &[String]) -> std::result::Result<Option<Box<dyn Any>>, Refusal> {
        let mut books = self.lock();
        let Books {
            weights,
            copies,
            paths,
            ..
        } = &mut *books;
        let all: &[Weight] = weights;
        let meant = paths.weights(path, all.len(), |weight| all[weight].name.as_str());
        let pin = |&weight: &usize| self.pin(&mut weights[weight], copies);
        let pins: Vec<Pinned> = meant.iter().map(pin).collect::<Result<_>>()?;
        Ok((!pins.is_empty()).then(|| Box::new(pins) as Box<dyn Any>))
    }
}

/// What `candle_nn` asks for tensors.
pub(super) struct Backend(pub Arc<Inner>);

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
