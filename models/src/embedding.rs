//! What a network is told besides the image: the time and the digit, as one vector.

use crate::{NO_CLASS, layers::Linear};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Embedding, VarBuilder, embedding};

/// Waves in the time embedding.
pub(crate) const WAVES: usize = 64;

/// Time 0..1 is stretched to this, the scale at which the usual frequencies tell steps apart.
const TIME_SCALE: f64 = 1000.0;

/// Sinusoids of the time, then two linear layers; the digit's own vector is added.
#[derive(Clone, Debug)]
pub struct Conditioning {
    time_in: Linear,
    time_out: Linear,
    class: Embedding,
}

impl Conditioning {
    /// A conditioning vector of `width` numbers.
    pub fn new(width: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            time_in: Linear::new(WAVES, width, vb.pp("time_in"))?,
            time_out: Linear::new(width, width, vb.pp("time_out"))?,
            class: embedding(NO_CLASS as usize + 1, width, vb.pp("class"))?,
        })
    }

    /// `(batch, width)`, already through SiLU: every block starts with a linear layer on it.
    pub fn forward(&self, timestep: &Tensor, class: &Tensor) -> Result<Tensor> {
        let _scope = memory_compiler::scope("condition");
        let time = sinusoids(timestep, WAVES)?
            .apply(&self.time_in)?
            .silu()?
            .apply(&self.time_out)?;
        (time + self.class.forward(class)?)?.silu()
    }
}

/// Sines and cosines of each value at geometrically spaced frequencies: `(batch)` to
/// `(batch, waves)` (Vaswani et al. 2017, <https://arxiv.org/abs/1706.03762>).
pub fn sinusoids(values: &Tensor, waves: usize) -> Result<Tensor> {
    let frequencies = Tensor::from_vec(frequencies(waves), (1, waves / 2), values.device())?;
    let angles = values
        .to_dtype(DType::F32)?
        .unsqueeze(1)?
        .broadcast_mul(&frequencies)?;
    Tensor::cat(&[angles.sin()?, angles.cos()?], 1)
}

/// Half as many frequencies as waves.
pub(crate) fn frequencies(waves: usize) -> Vec<f32> {
    let half = waves / 2;
    (0..half)
        .map(|i| (TIME_SCALE * (-(10_000f64.ln()) * i as f64 / half as f64).exp()) as f32)
        .collect()
}
