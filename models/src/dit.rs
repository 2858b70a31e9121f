//! A diffusion transformer (Peebles and Xie 2022, <https://arxiv.org/abs/2212.09748>).
//!
//! ```text
//!   28×28 ──patches of 4×4──► 49 tokens ── block.0 … block.4 ── head ──► 28×28 ── smooth ──► 28×28
//! ```
//!
//! Every block is attention and an MLP, each between an adaLN-zero modulation: time and digit give
//! the shift and scale in front and the gate behind. All gates start at zero, so an untrained
//! block is the identity. Patches are predicted apart and would show their borders, so that, as in
//! U-ViT (Bao et al. 2022, <https://arxiv.org/abs/2209.12152>), 3×3 convolutions have the last word.

use crate::{
    Denoiser, IMAGE_SIDE,
    attention::SelfAttention,
    conv::Conv3x3,
    embedding::Conditioning,
    layers::{Linear, normalise_last, spread},
};
use candle_core::{D, Device, Result, Tensor};
use candle_nn::VarBuilder;

/// Height and width of a patch, in pixels.
pub(crate) const PATCH: usize = 4;

/// Patches along one side of the image.
pub(crate) const GRID: usize = IMAGE_SIDE / PATCH;

/// Numbers in a token.
pub(crate) const WIDTH: usize = 96;

/// Attention heads in a block.
pub(crate) const HEADS: usize = 4;

/// Blocks.
pub(crate) const DEPTH: usize = 5;

/// Channels of the convolutions at the end.
pub(crate) const SMOOTH: usize = 16;

/// Width of the MLP's middle, in tokens' widths.
pub(crate) const MLP_RATIO: usize = 3;

/// The network. Build it over loaded weights, or over a `VarMap` to train it.
#[derive(Clone, Debug)]
pub struct Dit {
    condition: Conditioning,
    embed: Linear,
    /// `(1, tokens, width)`, fixed.
    positions: Tensor,
    blocks: Vec<Block>,
    head_modulation: Linear,
    head: Linear,
    smooth: Smooth,
}

impl Dit {
    /// Takes the parameters from `vb`.
    pub fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            condition: Conditioning::new(WIDTH, vb.pp("condition"))?,
            embed: Linear::new(PATCH * PATCH, WIDTH, vb.pp("embed"))?,
            positions: grid_positions(vb.device())?,
            blocks: (0..DEPTH)
                .map(|index| Block::new(vb.pp(format!("block.{index}"))))
                .collect::<Result<_>>()?,
            head_modulation: Linear::zeroed(WIDTH, 2 * WIDTH, vb.pp("head_modulation"))?,
            head: Linear::zeroed(WIDTH, PATCH * PATCH, vb.pp("head"))?,
            smooth: Smooth::new(vb.pp("smooth"))?,
        })
    }
}

impl Denoiser for Dit {
    fn device(&self) -> &Device {
        self.positions.device()
    }

    fn forward(&self, latents: &Tensor, timestep: &Tensor, class: &Tensor) -> Result<Tensor> {
        let (condition, mut x) = {
            let _scope = memory_compiler::scope("embed");
            let tokens = patchify(latents)?.apply(&self.embed)?;
            (
                self.condition.forward(timestep, class)?,
                tokens.broadcast_add(&self.positions)?,
            )
        };
        for (index, block) in self.blocks.iter().enumerate() {
            let _scope = memory_compiler::scope(&format!("block.{index}"));
            x = block.forward(&x, &condition)?;
        }
        let patched = {
            let _scope = memory_compiler::scope("head");
            let parts = {
                let _scope = memory_compiler::scope("head_modulation");
                modulation(&self.head_modulation, &condition, 2)?
            };
            unpatchify(&modulate(&x, &parts[0], &parts[1])?.apply(&self.head)?)?
        };
        let _scope = memory_compiler::scope("smooth");
        self.smooth.forward(latents, &patched, &condition)
    }
}

#[derive(Clone, Debug)]
struct Block {
    modulation: Linear,
    attention: SelfAttention,
    mlp_in: Linear,
    mlp_out: Linear,
}

impl Block {
    fn new(vb: VarBuilder) -> Result<Self> {
        let hidden = MLP_RATIO * WIDTH;
        Ok(Self {
            modulation: Linear::zeroed(WIDTH, 6 * WIDTH, vb.pp("modulation"))?,
            attention: SelfAttention::new(WIDTH, HEADS, vb.pp("attention"))?,
            mlp_in: Linear::new(WIDTH, hidden, vb.pp("mlp_in"))?,
            mlp_out: Linear::new(hidden, WIDTH, vb.pp("mlp_out"))?,
        })
    }

    fn forward(&self, x: &Tensor, condition: &Tensor) -> Result<Tensor> {
        let parts = modulation(&self.modulation, condition, 6)?;
        let seen = self
            .attention
            .forward(&modulate(x, &parts[0], &parts[1])?)?;
        let x = (x + (seen * spread(&parts[2], GRID * GRID)?)?)?;
        let _scope = memory_compiler::scope("mlp");
        let thought = modulate(&x, &parts[3], &parts[4])?
            .apply(&self.mlp_in)?
            .silu()?
            .apply(&self.mlp_out)?;
        x + (thought * spread(&parts[5], GRID * GRID)?)?
    }
}

/// Corrects a prediction made of patches, pixel by pixel.
#[derive(Clone, Debug)]
struct Smooth {
    first: Conv3x3,
    condition: Linear,
    second: Conv3x3,
    last: Conv3x3,
}

impl Smooth {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            first: Conv3x3::new(2, SMOOTH, vb.pp("first"))?,
            condition: Linear::zeroed(WIDTH, 2 * SMOOTH, vb.pp("condition"))?,
            second: Conv3x3::new(SMOOTH, SMOOTH, vb.pp("second"))?,
            last: Conv3x3::zeroed(SMOOTH, 1, vb.pp("last"))?,
        })
    }

    fn forward(&self, latents: &Tensor, patched: &Tensor, condition: &Tensor) -> Result<Tensor> {
        let scale_shift = condition
            .apply(&self.condition)?
            .unsqueeze(D::Minus1)?
            .unsqueeze(D::Minus1)?
            .chunk(2, 1)?;
        let correction = Tensor::cat(&[latents, patched], 1)?
            .apply(&self.first)?
            .broadcast_mul(&(&scale_shift[0] + 1.0)?)?
            .broadcast_add(&scale_shift[1])?
            .silu()?
            .apply(&self.second)?
            .silu()?
            .apply(&self.last)?;
        patched + correction
    }
}

/// `parts` vectors of shape `(batch, 1, width)`.
fn modulation(layer: &Linear, condition: &Tensor, parts: usize) -> Result<Vec<Tensor>> {
    condition
        .apply(layer)?
        .unsqueeze(1)?
        .chunk(parts, D::Minus1)
}

/// Normalises every token, then scales and shifts it.
fn modulate(x: &Tensor, shift: &Tensor, scale: &Tensor) -> Result<Tensor> {
    let tokens = x.dim(1)?;
    (normalise_last(x)? * spread(&(scale + 1.0)?, tokens)?)? + spread(shift, tokens)?
}

/// `(batch, 1, 28, 28)` to `(batch, tokens, pixels of a patch)`.
fn patchify(images: &Tensor) -> Result<Tensor> {
    let batch = images.dim(0)?;
    images
        .reshape((batch, GRID, PATCH, GRID, PATCH))?
        .transpose(2, 3)?
        .reshape((batch, GRID * GRID, PATCH * PATCH))
}

/// The reverse of [`patchify`].
fn unpatchify(tokens: &Tensor) -> Result<Tensor> {
    let batch = tokens.dim(0)?;
    tokens
        .reshape((batch, GRID, GRID, PATCH, PATCH))?
        .transpose(2, 3)?
        .reshape((batch, 1, IMAGE_SIDE, IMAGE_SIDE))
}

fn grid_positions(device: &Device) -> Result<Tensor> {
    Tensor::from_vec(grid_waves(GRID, WIDTH), (1, GRID * GRID, WIDTH), device)
}

/// Where the tokens of a square grid lie: a quarter of a token's numbers each for the sine and cosine of
/// its row and column.
pub(crate) fn grid_waves(grid: usize, width: usize) -> Vec<f32> {
    let quarter = width / 4;
    let mut values = Vec::with_capacity(grid * grid * width);
    for token in 0..grid * grid {
        for place in [token / grid, token % grid] {
            let angles = (0..quarter)
                .map(|i| place as f64 * (-(10_000f64.ln()) * i as f64 / quarter as f64).exp());
            values.extend(angles.clone().map(|angle| angle.sin() as f32));
            values.extend(angles.map(|angle| angle.cos() as f32));
        }
    }
    values
}
