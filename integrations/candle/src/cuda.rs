//! Candle's GPU devices.

use std::sync::Arc;

use candle_core::{CudaDevice, Result};
use memory_compiler::Error;
use memory_compiler::device::{Call, Cuda, Device, StreamId};

/// The memory of the GPU under a Candle device.
pub(crate) fn open(device: &CudaDevice) -> Result<Arc<dyn Device>> {
    let ordinal = device.cuda_stream().context().ordinal();
    let gpu = Cuda::new(ordinal).map_err(|source| {
        crate::wrap(Error::Device {
            call: Call::Reserve,
            source,
        })
    })?;
    Ok(Arc::new(gpu))
}

/// The stream on which a Candle device works and allocates.
pub(crate) fn stream(device: &CudaDevice) -> StreamId {
    StreamId(device.cuda_stream().cu_stream().addr() as u64)
}
