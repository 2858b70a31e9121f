//! Safetensors files, and their tensors as bytes of the type that a model computes in.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_core::safetensors::{MmapedSafetensors, SliceSafetensors};
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use memory_compiler::{ALIGNMENT, Bytes};

/// Where the bytes of weights are.
pub(super) enum Files {
    Mapped(MmapedSafetensors),
    Slice(SliceSafetensors<'static>),
}

impl Files {
    /// A file, several, or an index of shards beside it.
    ///
    /// # Safety
    /// As [`MmapedSafetensors::new`]: nobody changes the files while they are open.
    pub unsafe fn map<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        let files = shards(paths)?;
        // One after the other first, so that an error names its file.
        for file in &files {
            // SAFETY: the caller's promise.
            let opened = unsafe { MmapedSafetensors::new(file) };
            opened.map_err(|error| {
                let reason = match error {
                    candle_core::Error::WithPath { inner, .. } => *inner,
                    other => other,
                };
                candle_core::Error::Msg(format!("{}: {reason}", file.display()))
            })?;
        }
        // SAFETY: the caller's promise.
        Ok(Self::Mapped(unsafe { MmapedSafetensors::multi(&files) }?))
    }

    pub fn over(bytes: &'static [u8]) -> Result<Self> {
        Ok(Self::Slice(SliceSafetensors::new(bytes)?))
    }

    /// Type, shape and bytes of a tensor.
    pub fn get(&self, name: &str) -> Result<(DType, Vec<usize>, &[u8])> {
        let view = match self {
            Self::Mapped(files) => files.get(name)?,
            Self::Slice(file) => file.get(name)?,
        };
        let dtype = DType::try_from(view.dtype())?;
        Ok((dtype, view.shape().to_vec(), view.data()))
    }

    pub fn contains(&self, name: &str) -> bool {
        self.get(name).is_ok()
    }

    /// The shape of a tensor, if it is the expected one.
    pub fn shape(&self, name: &str, expected: Option<Shape>) -> Result<Shape> {
        let (_, shape, _) = self.get(name)?;
        let shape = Shape::from(shape);
        match expected.filter(|expected| *expected != shape) {
            None => Ok(shape),
            Some(expected) => Err(candle_core::Error::UnexpectedShape {
                msg: format!("shape mismatch for {name}"),
                expected,
                got: shape,
            }),
        }
    }

    /// A bound for what all tensors take as `dtype`, each at a multiple of 512 bytes.
    pub fn size_as(&self, dtype: DType) -> Bytes {
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

    /// Elements `from .. to` of a tensor as `dtype`, as bytes.
    pub fn bytes(&self, name: &str, dtype: DType, from: usize, to: usize) -> Result<Vec<u8>> {
        let (stored, _, data) = self.get(name)?;
        let width = stored.size_in_bytes();
        let Some(data) = data.get(from * width..to * width) else {
            bail!("{name}: it ends before element {to}");
        };
        if stored == dtype {
            return Ok(data.to_vec());
        }
        let tensor = Tensor::from_raw_buffer(data, stored, &[to - from], &Device::Cpu)?;
        let tensor = tensor.to_dtype(dtype)?;
        fn bytes_of<T, const N: usize>(values: Vec<T>, bytes: fn(T) -> [u8; N]) -> Vec<u8> {
            values.into_iter().flat_map(bytes).collect()
        }
        match dtype {
            DType::F32 => Ok(bytes_of(tensor.to_vec1()?, f32::to_le_bytes)),
            DType::F64 => Ok(bytes_of(tensor.to_vec1()?, f64::to_le_bytes)),
            DType::F16 => Ok(bytes_of(tensor.to_vec1()?, half::f16::to_le_bytes)),
            DType::BF16 => Ok(bytes_of(tensor.to_vec1()?, half::bf16::to_le_bytes)),
            other => bail!("{name}: {stored:?} is not converted to {other:?}"),
        }
    }
}

/// The files themselves, or the shards that an index names.
fn shards<P: AsRef<Path>>(paths: &[P]) -> Result<Vec<PathBuf>> {
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
