//! A class-conditional UNet.
//!
//! ```text
//!   28×28  embed ─ down.0 ───────────────────────────── up.0 ─ head
//!                     └─ 14×14  down.1 ───────── up.1 ─┘
//!                                  └─ 7×7 down.2 ─ mid ─ up.2 ─┘
//! ```
//!
//! Each level is a residual block (group norm, SiLU, 3×3 convolution, twice; time and digit scale
//! and shift the second norm), with self-attention below 28×28. The output of every level on the
//! way down is kept and joined to the same level on the way up: those are the buffers that live
//! longest in a step.

use crate::{
    Denoiser,
    attention::SelfAttention,
    conv::{Conv1x1, Conv3x3, upsample},
    embedding::Conditioning,
    layers::{GroupNorm, Linear, normalise_groups},
};
use candle_core::{D, Device, Result, Tensor};
use candle_nn::VarBuilder;

/// Channels at 28×28, 14×14 and 7×7.
pub(crate) const CHANNELS: [usize; 3] = [24, 48, 80];

/// Attention heads at each level; none at 28×28.
pub(crate) const HEADS: [usize; 3] = [0, 1, 2];

/// Width of the conditioning vector.
pub(crate) const CONDITION: usize = 96;

/// The network. Build it over loaded weights, or over a `VarMap` to train it.
#[derive(Clone, Debug)]
pub struct UNet {
    condition: Conditioning,
    embed: Conv3x3,
    down: Vec<Level>,
    mid: (Level, ResBlock),
    up: Vec<Level>,
    head_norm: GroupNorm,
    head: Conv3x3,
}

impl UNet {
    /// Takes the parameters from `vb`.
    pub fn new(vb: VarBuilder) -> Result<Self> {
        let bottom = CHANNELS.len() - 1;
        let mut down = Vec::new();
        let mut up = Vec::new();
        for (level, &channels) in CHANNELS.iter().enumerate() {
            let above = CHANNELS[level.saturating_sub(1)];
            let below = CHANNELS[(level + 1).min(bottom)];
            let heads = HEADS[level];
            down.push(Level::new(
                above,
                channels,
                heads,
                vb.pp(format!("down.{level}")),
            )?);
            up.push(Level::new(
                below + channels,
                channels,
                heads,
                vb.pp(format!("up.{level}")),
            )?);
        }
        let (widest, vm) = (CHANNELS[bottom], vb.pp("mid"));
        Ok(Self {
            condition: Conditioning::new(CONDITION, vb.pp("condition"))?,
            embed: Conv3x3::new(1, CHANNELS[0], vb.pp("embed"))?,
            down,
            mid: (
                Level::new(widest, widest, HEADS[bottom], vm.pp("first"))?,
                ResBlock::new(widest, widest, vm.pp("second"))?,
            ),
            up,
            head_norm: GroupNorm::new(CHANNELS[0], vb.pp("head_norm"))?,
            head: Conv3x3::zeroed(CHANNELS[0], 1, vb.pp("head"))?,
        })
    }
}

impl Denoiser for UNet {
    fn device(&self) -> &Device {
        self.embed.device()
    }

    fn forward(&self, latents: &Tensor, timestep: &Tensor, class: &Tensor) -> Result<Tensor> {
        let (condition, mut x) = {
            let _scope = memory_compiler::scope("embed");
            (
                self.condition.forward(timestep, class)?,
                latents.apply(&self.embed)?,
            )
        };
        let mut skips = Vec::new();
        for (index, level) in self.down.iter().enumerate() {
            let _scope = memory_compiler::scope(&format!("down.{index}"));
            if index > 0 {
                x = x.avg_pool2d(2)?;
            }
            x = level.forward(&x, &condition)?;
            skips.push(x.clone());
        }
        {
            let _scope = memory_compiler::scope("mid");
            x = self.mid.0.forward(&x, &condition)?;
            x = self.mid.1.forward(&x, &condition)?;
        }
        for (index, level) in self.up.iter().enumerate().rev() {
            let _scope = memory_compiler::scope(&format!("up.{index}"));
            if let Some(skip) = skips.pop() {
                if x.dim(D::Minus1)? != skip.dim(D::Minus1)? {
                    x = upsample(&x)?;
                }
                x = Tensor::cat(&[x, skip], 1)?;
            }
            x = level.forward(&x, &condition)?;
        }
        let _scope = memory_compiler::scope("head");
        x.apply(&self.head_norm)?.silu()?.apply(&self.head)
    }
}

/// A residual block, then attention where the level has heads.
#[derive(Clone, Debug)]
struct Level {
    block: ResBlock,
    attention: Option<(GroupNorm, SelfAttention)>,
}

impl Level {
    fn new(channels_in: usize, channels_out: usize, heads: usize, vb: VarBuilder) -> Result<Self> {
        let attention = if heads > 0 {
            Some((
                GroupNorm::new(channels_out, vb.pp("attention_norm"))?,
                SelfAttention::new(channels_out, heads, vb.pp("attention"))?,
            ))
        } else {
            None
        };
        Ok(Self {
            block: ResBlock::new(channels_in, channels_out, vb.pp("block"))?,
            attention,
        })
    }

    fn forward(&self, x: &Tensor, condition: &Tensor) -> Result<Tensor> {
        let x = self.block.forward(x, condition)?;
        let Some((norm, attention)) = &self.attention else {
            return Ok(x);
        };
        let tokens = x.apply(norm)?.flatten_from(2)?.transpose(1, 2)?;
        let seen = attention
            .forward(&tokens.contiguous()?)?
            .transpose(1, 2)?
            .reshape(x.shape())?;
        x + seen
    }
}

/// Two convolutions around which the input is added back.
#[derive(Clone, Debug)]
struct ResBlock {
    norm_in: GroupNorm,
    conv_in: Conv3x3,
    condition: Linear,
    conv_out: Conv3x3,
    /// Present where the block changes the number of channels.
    skip: Option<Conv1x1>,
}

impl ResBlock {
    fn new(channels_in: usize, channels_out: usize, vb: VarBuilder) -> Result<Self> {
        let skip = if channels_in == channels_out {
            None
        } else {
            Some(Conv1x1::new(channels_in, channels_out, vb.pp("skip"))?)
        };
        Ok(Self {
            norm_in: GroupNorm::new(channels_in, vb.pp("norm_in"))?,
            conv_in: Conv3x3::new(channels_in, channels_out, vb.pp("conv_in"))?,
            condition: Linear::new(CONDITION, 2 * channels_out, vb.pp("condition"))?,
            conv_out: Conv3x3::zeroed(channels_out, channels_out, vb.pp("conv_out"))?,
            skip,
        })
    }

    fn forward(&self, x: &Tensor, condition: &Tensor) -> Result<Tensor> {
        let scale_shift = condition
            .apply(&self.condition)?
            .unsqueeze(D::Minus1)?
            .unsqueeze(D::Minus1)?
            .chunk(2, 1)?;
        let inner = x.apply(&self.norm_in)?.silu()?.apply(&self.conv_in)?;
        let inner = normalise_groups(&inner)?
            .broadcast_mul(&(&scale_shift[0] + 1.0)?)?
            .broadcast_add(&scale_shift[1])?
            .silu()?
            .apply(&self.conv_out)?;
        match &self.skip {
            Some(skip) => x.apply(skip)? + inner,
            None => x + inner,
        }
    }
}
