//! Candle's GPU devices.

use std::sync::Arc;

use candle_core::{CudaDevice, Result};
use memory_compiler::device::{Cuda, StreamId};
use memory_compiler::{Compiler, Error, hook};

/// A compiler for the GPU and the stream of a Candle device.
pub(crate) fn compiler(device: &CudaDevice, options: memory_compiler::Options) -> Result<Compiler> {
    hook::cuda::check().map_err(crate::wrap)?;
    let stream = device.cuda_stream();
    let gpu = Cuda::new(stream.context().ordinal()).map_err(|source| {
        crate::wrap(Error::Device {
            call: memory_compiler::device::Call::Reserve,
            source,
        })
    })?;
    let mut compiler = Compiler::new(Arc::new(gpu), options).map_err(crate::wrap)?;
    let stream = StreamId(stream.cu_stream().addr() as u64);
    compiler.use_stream(stream).map_err(crate::wrap)?;
    Ok(compiler)
}
