//! Weights drawn on the device: what the models compute with is no good image, but it is not zeros.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};

use crate::networks::{Job, Model};

/// Draws each tensor when it is asked for, scaled so that values neither vanish nor overflow in half
/// precision.
struct Random {
    /// Whether the first 13 blocks of an MMDiT have their second attention, as in SD 3.5 medium.
    has_second_attention: bool,
}

impl SimpleBackend for Random {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let (mean, deviation) = match shape.dims() {
            // The scale and the offset of a norm, and the offset of a layer.
            [_] if name.ends_with("weight") || name.ends_with("scale") => (1.0, 0.05),
            [_] => (0.0, 0.02),
            [_, inputs @ ..] => (0.0, 1.0 / (inputs.iter().product::<usize>() as f32).sqrt()),
            [] => (0.0, 1.0),
        };
        // The generator makes pairs.
        let count = shape.elem_count();
        let drawn = Tensor::randn(mean, deviation, count.next_multiple_of(2), device)?;
        drawn.narrow(0, 0, count)?.to_dtype(dtype)?.reshape(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("{name} is asked for without a shape")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        if !name.contains(".attn2.qkv.") {
            return true;
        }
        let block = name.split('.').find_map(|part| part.parse::<usize>().ok());
        self.has_second_attention && block.is_some_and(|block| block < 13)
    }
}

/// Random weights for a job on `device`.
pub fn weights(job: Job, device: &Device) -> VarBuilder<'static> {
    let random = Random {
        has_second_attention: job.model == Model::Sd35,
    };
    VarBuilder::from_backend(Box::new(random), job.dtype, device.clone())
}
