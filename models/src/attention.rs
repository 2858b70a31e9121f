//! Multi-head self-attention over a sequence.

use crate::layers::Linear;
use candle_core::{D, Result, Tensor};
use candle_nn::VarBuilder;

/// Every token looks at every token (Vaswani et al. 2017, <https://arxiv.org/abs/1706.03762>).
#[derive(Clone, Debug)]
pub struct SelfAttention {
    qkv: Linear,
    out: Linear,
    heads: usize,
}

impl SelfAttention {
    /// Attention over tokens of `width` numbers, split among `heads`.
    pub fn new(width: usize, heads: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            qkv: Linear::new(width, 3 * width, vb.pp("qkv"))?,
            out: Linear::new(width, width, vb.pp("out"))?,
            heads,
        })
    }

    /// `(batch, tokens, width)` to the same shape.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _scope = memory_compiler::scope("attention");
        let (batch, tokens, width) = x.dims3()?;
        let head_width = width / self.heads;
        let qkv = x
            .apply(&self.qkv)?
            .reshape((batch, tokens, 3, self.heads, head_width))?
            .permute((2, 0, 3, 1, 4))?
            .contiguous()?;
        let (q, k, v) = (qkv.get(0)?, qkv.get(1)?, qkv.get(2)?);
        let scores = (q.matmul(&k.t()?)? / (head_width as f64).sqrt())?;
        softmax(&scores)?
            .matmul(&v)?
            .transpose(1, 2)?
            .reshape((batch, tokens, width))?
            .apply(&self.out)
    }
}

/// Candle's fused softmax has no gradient, so training takes the composed one.
fn softmax(scores: &Tensor) -> Result<Tensor> {
    if scores.track_op() {
        candle_nn::ops::softmax(scores, D::Minus1)
    } else {
        candle_nn::ops::softmax_last_dim(scores)
    }
}
