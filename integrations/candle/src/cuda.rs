//! Candle's GPU devices.

use candle_core::{CudaDevice, Result};
use memory_compiler::device::StreamId;
use memory_compiler::{Compiler, hook};

/// A compiler for the GPU and the stream of a Candle device.
pub(crate) fn compiler(device: &CudaDevice, options: memory_compiler::Options) -> Result<Compiler> {
    let stream = device.cuda_stream();
    let handle = StreamId(stream.cu_stream().addr() as u64);
    hook::cuda::compiler(stream.context().ordinal(), handle, options).map_err(crate::wrap)
}
