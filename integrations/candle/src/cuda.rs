//! Candle's GPU devices.

use candle_core::CudaDevice;
use memory_compiler::device::StreamId;

/// The GPU's number.
pub(crate) fn ordinal(device: &CudaDevice) -> usize {
    device.cuda_stream().context().ordinal()
}

/// The stream on which a Candle device works and allocates.
pub(crate) fn stream(device: &CudaDevice) -> StreamId {
    StreamId(device.cuda_stream().cu_stream().addr() as u64)
}
