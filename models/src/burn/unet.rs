//! The UNet of [`unet`](crate::unet), in Burn and in any size.

use burn::module::Module;
use burn::nn::conv::Conv2d;
use burn::nn::{GroupNorm, Linear};
use burn::tensor::activation::silu;
use burn::tensor::module::{avg_pool2d, interpolate};
use burn::tensor::ops::{AvgPoolOptions, InterpolateMode, InterpolateOptions};
use burn::tensor::{Device, Int, Tensor};

use super::parts::{
    Conditioning, SelfAttention, conv1x1, conv3x3, group_norm, linear, plain_group_norm,
    scale_shift,
};
use crate::unet::{CHANNELS, CONDITION, HEADS};

/// How large the network is.
#[derive(Clone, Debug)]
pub struct UNetSize {
    /// Channels of the images.
    pub image: usize,
    /// Channels at each level, each half as high and wide as the one before.
    pub channels: Vec<usize>,
    /// Attention heads at each level; 0 for none.
    pub heads: Vec<usize>,
    /// Width of the conditioning vector.
    pub condition: usize,
}

impl UNetSize {
    /// That of the trained weights.
    pub fn digits() -> Self {
        Self {
            image: 1,
            channels: CHANNELS.to_vec(),
            heads: HEADS.to_vec(),
            condition: CONDITION,
        }
    }
}

/// The network.
#[derive(Module, Debug)]
pub struct UNet {
    condition: Conditioning,
    embed: Conv2d,
    down: Vec<Level>,
    mid: Middle,
    up: Vec<Level>,
    head_norm: GroupNorm,
    head: Conv2d,
}

impl UNet {
    /// With random parameters.
    pub fn new(size: &UNetSize, device: &Device) -> Self {
        let channels = &size.channels;
        let (widest, bottom) = (channels[channels.len() - 1], channels.len() - 1);
        let level = |from: usize, at: usize| {
            let to = channels[at];
            Level::new(from, to, size.heads[at], size.condition, device)
        };
        Self {
            condition: Conditioning::new(size.condition, device),
            embed: conv3x3(size.image, channels[0], device),
            down: (0..=bottom)
                .map(|at| level(channels[at.saturating_sub(1)], at))
                .collect(),
            mid: Middle {
                first: level(widest, bottom),
                second: ResBlock::new(widest, widest, size.condition, device),
            },
            up: (0..=bottom)
                .map(|at| level(channels[(at + 1).min(bottom)] + channels[at], at))
                .collect(),
            head_norm: group_norm(channels[0], device),
            head: conv3x3(channels[0], size.image, device),
        }
    }

    /// Predicts `v`; see [`Network::forward`](super::Network::forward).
    pub fn forward(
        &self,
        latents: Tensor<4>,
        timestep: Tensor<1>,
        class: Tensor<1, Int>,
    ) -> Tensor<4> {
        let (condition, mut x) = {
            let _scope = memory_compiler::scope("embed");
            (
                self.condition.forward(timestep, class),
                self.embed.forward(latents),
            )
        };
        let mut skips = Vec::new();
        for (index, level) in self.down.iter().enumerate() {
            let _scope = memory_compiler::scope(&format!("down.{index}"));
            if index > 0 {
                x = avg_pool2d(x, AvgPoolOptions::new([2, 2]).with_stride([2, 2]));
            }
            x = level.forward(x, &condition);
            skips.push(x.clone());
        }
        {
            let _scope = memory_compiler::scope("mid");
            x = self.mid.first.forward(x, &condition);
            x = self.mid.second.forward(x, &condition);
        }
        for (index, level) in self.up.iter().enumerate().rev() {
            let _scope = memory_compiler::scope(&format!("up.{index}"));
            if let Some(skip) = skips.pop() {
                let [_, _, height, width] = skip.dims();
                if x.dims()[3] != width {
                    let nearest = InterpolateOptions::new(InterpolateMode::Nearest);
                    x = interpolate(x, nearest.with_output_size([height, width]));
                }
                x = Tensor::cat(vec![x, skip], 1);
            }
            x = level.forward(x, &condition);
        }
        let _scope = memory_compiler::scope("head");
        self.head.forward(silu(self.head_norm.forward(x)))
    }
}

/// The way along the bottom.
#[derive(Module, Debug)]
struct Middle {
    first: Level,
    second: ResBlock,
}

/// A residual block, then attention where the level has heads.
#[derive(Module, Debug)]
struct Level {
    block: ResBlock,
    attention_norm: Option<GroupNorm>,
    attention: Option<SelfAttention>,
}

impl Level {
    fn new(
        channels_in: usize,
        channels_out: usize,
        heads: usize,
        condition: usize,
        device: &Device,
    ) -> Self {
        let has_attention = heads > 0;
        Self {
            block: ResBlock::new(channels_in, channels_out, condition, device),
            attention_norm: has_attention.then(|| group_norm(channels_out, device)),
            attention: has_attention.then(|| SelfAttention::new(channels_out, heads, device)),
        }
    }

    fn forward(&self, x: Tensor<4>, condition: &Tensor<2>) -> Tensor<4> {
        let x = self.block.forward(x, condition);
        let (Some(norm), Some(attention)) = (&self.attention_norm, &self.attention) else {
            return x;
        };
        let shape = x.dims();
        let tokens = norm.forward(x.clone()).flatten::<3>(2, 3).swap_dims(1, 2);
        let seen = attention.forward(tokens).swap_dims(1, 2).reshape(shape);
        x + seen
    }
}

/// Two convolutions around which the input is added back.
#[derive(Module, Debug)]
struct ResBlock {
    norm_in: GroupNorm,
    conv_in: Conv2d,
    condition: Linear,
    norm_out: GroupNorm,
    conv_out: Conv2d,
    /// Present where the block changes the number of channels.
    skip: Option<Conv2d>,
}

impl ResBlock {
    fn new(channels_in: usize, channels_out: usize, condition: usize, device: &Device) -> Self {
        let changes = channels_in != channels_out;
        Self {
            norm_in: group_norm(channels_in, device),
            conv_in: conv3x3(channels_in, channels_out, device),
            condition: linear(condition, 2 * channels_out, device),
            norm_out: plain_group_norm(channels_out, device),
            conv_out: conv3x3(channels_out, channels_out, device),
            skip: changes.then(|| conv1x1(channels_in, channels_out, device)),
        }
    }

    fn forward(&self, x: Tensor<4>, condition: &Tensor<2>) -> Tensor<4> {
        let [scale, shift] = scale_shift(&self.condition, condition.clone());
        let inner = self.conv_in.forward(silu(self.norm_in.forward(x.clone())));
        let inner = self.norm_out.forward(inner) * (scale + 1.0) + shift;
        let inner = self.conv_out.forward(silu(inner));
        match &self.skip {
            Some(skip) => skip.forward(x) + inner,
            None => x + inner,
        }
    }
}
