//! Loading and saving parameters.
//!
//! The trained weights of both models are part of the program, as half-precision safetensors with
//! a header that tells how they were made. Everything is computed in `f32`.

use crate::{Denoiser, Error, ModelKind, Result, error::first_line};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use memory_compiler::Bytes;
use memory_compiler::pager::Pager;
use memory_compiler_candle::Paged;
use std::{borrow::Cow, collections::HashMap, io::Read as _, path::Path};

/// Where weights come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// The ones that are part of the program.
    Embedded,
    /// A safetensors file.
    File(&'a Path),
    /// The bytes of such a file.
    Bytes(&'a [u8]),
}

impl std::fmt::Display for Source<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Embedded => f.write_str("(embedded)"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Bytes(bytes) => write!(f, "({} bytes)", bytes.len()),
        }
    }
}

/// The trained weights of a model, as the bytes of a safetensors file.
pub fn embedded(kind: ModelKind) -> &'static [u8] {
    match kind {
        ModelKind::Unet => include_bytes!("../weights/unet.safetensors"),
        ModelKind::Dit => include_bytes!("../weights/dit.safetensors"),
    }
}

/// Builds a model over weights on the CPU.
pub fn load(kind: ModelKind, source: Source) -> Result<Box<dyn Denoiser>> {
    load_on(kind, source, &Device::Cpu)
}

/// Builds a model over weights on a device.
pub fn load_on(kind: ModelKind, source: Source, device: &Device) -> Result<Box<dyn Denoiser>> {
    let mut tensors = read(kind, source)?;
    for tensor in tensors.values_mut() {
        *tensor = tensor.to_device(device)?;
    }
    let vb = VarBuilder::from_tensors(tensors, DType::F32, device);
    kind.build(vb)
        .map_err(|error| unfit(kind, source, first_line(&error)))
}

/// The page of paged weights on the CPU: theirs are small.
pub const GRANULE: Bytes = Bytes::kib(16);

/// Builds a model over weights on `device` that `pager` keeps in memory as far as its budget goes. Each of
/// its layers runs in a scope that names its weights. A file stays mapped and may not change while the model
/// lives.
pub fn load_paged(
    kind: ModelKind,
    source: Source<'_>,
    device: &Device,
    pager: &Pager,
) -> Result<(Box<dyn Denoiser>, Paged)> {
    let paged = match source {
        // SAFETY: both models read a weight only in the scope of its prefix, on the thread that opened
        // it and on rayon's for it, or by work of Candle on a GPU; a model is handed out with its `Paged`, and
        // nothing writes to it.
        Source::Embedded => unsafe { Paged::over_bytes(pager, device, embedded(kind), DType::F32) },
        // They may go before the weights do.
        Source::Bytes(_) => {
            let why = "weights are paged from a file or from the program".to_string();
            return Err(unfit(kind, source, why));
        }
        Source::File(path) => {
            check_readable(path)?;
            // SAFETY: as above, and the caller leaves the file alone.
            unsafe { Paged::open(pager, device, &[path], DType::F32) }
        }
    };
    let paged = paged.map_err(|error| {
        let why = first_line(&error);
        // Which file it was is said already.
        let same = why.strip_prefix(&format!("{source}: "));
        unfit(kind, source, same.unwrap_or(&why).to_owned())
    })?;
    let model = kind.build(paged.var_builder());
    let model = model.map_err(|error| unfit(kind, source, first_line(&error)))?;
    Ok((model, paged))
}

/// Reads the tensors of a safetensors file, all of them finite.
pub fn read(kind: ModelKind, source: Source) -> Result<HashMap<String, Tensor>> {
    tensors(kind, source, &bytes(kind, source)?)
}

/// The bytes of a safetensors file.
pub(crate) fn bytes<'a>(kind: ModelKind, source: Source<'a>) -> Result<Cow<'a, [u8]>> {
    Ok(match source {
        Source::Embedded => Cow::Borrowed(embedded(kind)),
        Source::Bytes(bytes) => Cow::Borrowed(bytes),
        Source::File(path) => {
            Cow::Owned(std::fs::read(path).map_err(|error| Error::read(path, error))?)
        }
    })
}

/// Refuses what is no file that this program may read, as [`bytes`] does.
fn check_readable(path: &Path) -> Result<()> {
    let read = std::fs::File::open(path).and_then(|mut file| file.read(&mut [0]));
    read.map_err(|error| Error::read(path, error)).map(drop)
}

/// The tensors in those bytes, all of them finite.
pub(crate) fn tensors(
    kind: ModelKind,
    source: Source,
    bytes: &[u8],
) -> Result<HashMap<String, Tensor>> {
    let tensors = candle_core::safetensors::load_buffer(bytes, &Device::Cpu).map_err(|error| {
        let why = format!("not a safetensors file ({})", first_line(&error));
        unfit(kind, source, why)
    })?;
    let mut names: Vec<_> = tensors.keys().cloned().collect();
    names.sort();
    for name in names {
        if !all_finite(&tensors[&name])? {
            let why = format!("{name} holds values that are not finite");
            return Err(unfit(kind, source, why));
        }
    }
    Ok(tensors)
}

pub(crate) fn unfit(kind: ModelKind, source: Source, why: String) -> Error {
    Error::Weights {
        origin: source.to_string(),
        model: kind.name(),
        why,
    }
}

/// Writes parameters in half precision, with `notes` in the header.
pub fn save(
    tensors: &[(String, Tensor)],
    notes: HashMap<String, String>,
    path: &Path,
) -> Result<()> {
    let halves = tensors
        .iter()
        .map(|(name, tensor)| Ok((name.as_str(), tensor.to_dtype(DType::F16)?)))
        .collect::<Result<Vec<_>>>()?;
    let bytes = safetensors::serialize(halves, Some(notes));
    let bytes = bytes.map_err(|error| Error::write(path, error))?;
    std::fs::write(path, bytes).map_err(|error| Error::write(path, error))
}

fn all_finite(tensor: &Tensor) -> Result<bool> {
    let sum = tensor
        .to_dtype(DType::F32)?
        .abs()?
        .sum_all()?
        .to_scalar::<f32>()?;
    Ok(sum.is_finite())
}
