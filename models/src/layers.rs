//! Linear layers and group norms whose gradients are fast on the CPU.
//!
//! The forward passes are Candle's. What differs is how a vector is spread over rows while a
//! parameter is tracked: the gradient of a broadcast is a sum over leading dimensions, which
//! Candle's CPU does one element at a time. A product with a column of ones has the same value,
//! and its gradient is a matrix product.

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder, init};

/// `x · weightᵀ + bias` on the last dimension of two- or three-dimensional tensors.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    /// A layer from `width_in` numbers to `width_out`.
    pub fn new(width_in: usize, width_out: usize, vb: VarBuilder) -> Result<Self> {
        Self::with_init(width_in, width_out, init::DEFAULT_KAIMING_NORMAL, vb)
    }

    /// A layer that answers zero until it is trained.
    pub fn zeroed(width_in: usize, width_out: usize, vb: VarBuilder) -> Result<Self> {
        Self::with_init(width_in, width_out, Init::Const(0.0), vb)
    }

    fn with_init(width_in: usize, width_out: usize, init: Init, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: vb.get_with_hints((width_out, width_in), "weight", init)?,
            bias: vb.get_with_hints(width_out, "bias", Init::Const(0.0))?,
        })
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        let width_in = dims.pop().unwrap_or_default();
        let rows: usize = dims.iter().product();
        dims.push(self.bias.dim(0)?);
        let product = x.reshape((rows, width_in))?.matmul(&self.weight.t()?)?;
        let bias = self.bias.unsqueeze(0)?;
        let sum = if self.bias.track_op() {
            product + ones(&[rows, 1], x)?.matmul(&bias)?
        } else {
            product.broadcast_add(&bias)
        };
        sum?.reshape(dims)
    }
}

/// `(batch, 1, width)` as an operand for `(batch, tokens, width)`.
pub fn spread(vector: &Tensor, tokens: usize) -> Result<Tensor> {
    let (batch, _, width) = vector.dims3()?;
    if vector.track_op() {
        ones(&[batch, tokens, 1], vector)?.matmul(&vector.contiguous()?)
    } else {
        vector.broadcast_as((batch, tokens, width))
    }
}

/// Channels in groups, each brought to mean 0 and variance 1 (Wu and He 2018,
/// <https://arxiv.org/abs/1803.08494>), then scaled and shifted by channel.
#[derive(Clone, Debug)]
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
}

/// Channels that share a mean and a variance.
pub const GROUP: usize = 8;

/// Added to a variance before its root is taken.
pub(crate) const EPSILON: f64 = 1e-6;

impl GroupNorm {
    /// A norm over `channels`, a multiple of [`GROUP`].
    pub fn new(channels: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: vb.get_with_hints(channels, "weight", Init::Const(1.0))?,
            bias: vb.get_with_hints(channels, "bias", Init::Const(0.0))?,
        })
    }
}

impl Module for GroupNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, channels) = (x.dim(0)?, x.dim(1)?);
        // First by image, then by pixel: two sums that Candle does quickly, instead of one.
        let by_image = |vector: &Tensor| {
            vector
                .reshape((1, channels, 1, 1))?
                .broadcast_as((batch, channels, 1, 1))
        };
        normalise_groups(x)?
            .broadcast_mul(&by_image(&self.weight)?)?
            .broadcast_add(&by_image(&self.bias)?)
    }
}

/// The part of [`GroupNorm`] without parameters.
pub fn normalise_groups(x: &Tensor) -> Result<Tensor> {
    let (batch, channels, height, width) = x.dims4()?;
    let groups = x.reshape((batch, channels / GROUP, GROUP * height * width))?;
    normalise_last(&groups)?.reshape(x.shape())
}

/// Brings the last dimension to mean 0 and variance 1.
pub fn normalise_last(x: &Tensor) -> Result<Tensor> {
    let last = x.rank() - 1;
    let centred = x.broadcast_sub(&x.mean_keepdim(last)?)?;
    let deviation = (centred.sqr()?.mean_keepdim(last)? + EPSILON)?.sqrt()?;
    centred.broadcast_div(&deviation)
}

fn ones(shape: &[usize], like: &Tensor) -> Result<Tensor> {
    Tensor::ones(shape, DType::F32, like.device())
}
