//! What both networks are made of: Burn's own layers, put together as in [`attention`](crate::attention),
//! [`conv`](crate::conv) and [`embedding`](crate::embedding).

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Device, Int, Tensor};

use crate::NO_CLASS;
use crate::embedding::{WAVES, frequencies};
use crate::layers::{EPSILON, GROUP};

/// A linear layer.
pub fn linear(width_in: usize, width_out: usize, device: &Device) -> Linear {
    LinearConfig::new(width_in, width_out).init(device)
}

/// A 3×3 convolution with stride 1 and padding 1.
pub fn conv3x3(channels_in: usize, channels_out: usize, device: &Device) -> Conv2d {
    Conv2dConfig::new([channels_in, channels_out], [3, 3])
        .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
        .init(device)
}

/// A convolution that looks at single pixels.
pub fn conv1x1(channels_in: usize, channels_out: usize, device: &Device) -> Conv2d {
    Conv2dConfig::new([channels_in, channels_out], [1, 1]).init(device)
}

/// Groups of [`GROUP`] channels, normalised, then scaled and shifted by channel.
pub fn group_norm(channels: usize, device: &Device) -> GroupNorm {
    GroupNormConfig::new(channels / GROUP, channels)
        .with_epsilon(EPSILON)
        .init(device)
}

/// The same without parameters.
pub fn plain_group_norm(channels: usize, device: &Device) -> GroupNorm {
    GroupNormConfig::new(channels / GROUP, channels)
        .with_epsilon(EPSILON)
        .with_affine(false)
        .init(device)
}

/// Brings the last dimension to mean 0 and variance 1.
pub fn normalise_last(x: Tensor<3>) -> Tensor<3> {
    let centred = x.clone() - x.mean_dim(2);
    let deviation = (centred.clone().square().mean_dim(2) + EPSILON).sqrt();
    centred / deviation
}

/// Scale and shift for images, from a conditioning vector.
pub fn scale_shift(layer: &Linear, condition: Tensor<2>) -> [Tensor<4>; 2] {
    let both = layer.forward(condition);
    let [batch, twice] = both.dims();
    let halves = both.reshape([batch, twice, 1, 1]).chunk(2, 1);
    halves.try_into().expect("two halves")
}

/// Every token looks at every token.
#[derive(Module, Debug)]
pub struct SelfAttention {
    qkv: Linear,
    out: Linear,
    heads: usize,
}

impl SelfAttention {
    /// Attention over tokens of `width` numbers, split among `heads`.
    pub fn new(width: usize, heads: usize, device: &Device) -> Self {
        Self {
            qkv: linear(width, 3 * width, device),
            out: linear(width, width, device),
            heads,
        }
    }

    /// `[batch, tokens, width]` to the same shape.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let _scope = memory_compiler::scope("attention");
        let [batch, tokens, width] = x.dims();
        let head_width = width / self.heads;
        let mut parts = self
            .qkv
            .forward(x)
            .reshape([batch, tokens, 3, self.heads, head_width])
            .permute([2, 0, 3, 1, 4])
            .chunk(3, 0)
            .into_iter()
            .map(|part| part.reshape([batch, self.heads, tokens, head_width]));
        let mut next = || parts.next().expect("three parts");
        let (q, k, v): (Tensor<4>, Tensor<4>, Tensor<4>) = (next(), next(), next());
        let scores = q.matmul(k.transpose()) / (head_width as f64).sqrt();
        let seen = softmax(scores, 3).matmul(v);
        self.out
            .forward(seen.swap_dims(1, 2).reshape([batch, tokens, width]))
    }
}

/// Sinusoids of the time, then two linear layers; the digit's own vector is added.
#[derive(Module, Debug)]
pub struct Conditioning {
    time_in: Linear,
    time_out: Linear,
    class: Embedding,
}

impl Conditioning {
    /// A conditioning vector of `width` numbers.
    pub fn new(width: usize, device: &Device) -> Self {
        Self {
            time_in: linear(WAVES, width, device),
            time_out: linear(width, width, device),
            class: EmbeddingConfig::new(NO_CLASS as usize + 1, width).init(device),
        }
    }

    /// `[batch, width]`, already through SiLU: every block starts with a linear layer on it.
    pub fn forward(&self, timestep: Tensor<1>, class: Tensor<1, Int>) -> Tensor<2> {
        let _scope = memory_compiler::scope("condition");
        let device = timestep.device();
        let frequencies = Tensor::<1>::from_floats(frequencies(WAVES).as_slice(), &device);
        let angles = timestep.unsqueeze_dim::<2>(1) * frequencies.unsqueeze::<2>();
        let waves = Tensor::cat(vec![angles.clone().sin(), angles.cos()], 1);
        let time = self.time_out.forward(silu(self.time_in.forward(waves)));
        let class = self.class.forward(class.unsqueeze_dim::<2>(1));
        silu(time + class.squeeze_dim::<2>(1))
    }
}
