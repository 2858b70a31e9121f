//! The transformer of [`dit`](crate::dit), in Burn and in any size.

use burn::module::Module;
use burn::nn::Linear;
use burn::nn::conv::Conv2d;
use burn::tensor::activation::silu;
use burn::tensor::{Device, Int, Tensor};

use super::parts::{Conditioning, SelfAttention, conv3x3, linear, normalise_last, scale_shift};
use crate::dit::{DEPTH, GRID, HEADS, MLP_RATIO, PATCH, SMOOTH, WIDTH, grid_waves};

/// How large the network is.
#[derive(Clone, Debug)]
pub struct DitSize {
    /// Channels of the images.
    pub image: usize,
    /// Height and width of a patch, in pixels.
    pub patch: usize,
    /// Patches along one side of the image.
    pub grid: usize,
    /// Numbers in a token.
    pub width: usize,
    /// Attention heads in a block.
    pub heads: usize,
    /// Blocks.
    pub depth: usize,
    /// Channels of the convolutions at the end.
    pub smooth: usize,
}

impl DitSize {
    /// That of the trained weights.
    pub fn digits() -> Self {
        Self {
            image: 1,
            patch: PATCH,
            grid: GRID,
            width: WIDTH,
            heads: HEADS,
            depth: DEPTH,
            smooth: SMOOTH,
        }
    }
}

/// The network.
#[derive(Module, Debug)]
pub struct Dit {
    condition: Conditioning,
    embed: Linear,
    block: Vec<Block>,
    head_modulation: Linear,
    head: Linear,
    smooth: Smooth,
    image: usize,
    patch: usize,
    grid: usize,
}

impl Dit {
    /// With random parameters.
    pub fn new(size: &DitSize, device: &Device) -> Self {
        let (width, pixels) = (size.width, size.image * size.patch * size.patch);
        Self {
            condition: Conditioning::new(width, device),
            embed: linear(pixels, width, device),
            block: (0..size.depth)
                .map(|_| Block::new(width, size.heads, device))
                .collect(),
            head_modulation: linear(width, 2 * width, device),
            head: linear(width, pixels, device),
            smooth: Smooth {
                first: conv3x3(2 * size.image, size.smooth, device),
                condition: linear(width, 2 * size.smooth, device),
                second: conv3x3(size.smooth, size.smooth, device),
                last: conv3x3(size.smooth, size.image, device),
            },
            image: size.image,
            patch: size.patch,
            grid: size.grid,
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
            let tokens = self.embed.forward(self.patchify(latents.clone()));
            (
                self.condition.forward(timestep, class),
                tokens + self.positions(&latents.device()),
            )
        };
        for (index, block) in self.block.iter().enumerate() {
            let _scope = memory_compiler::scope(&format!("block.{index}"));
            x = block.forward(x, &condition);
        }
        let patched = {
            let _scope = memory_compiler::scope("head");
            let [shift, scale] = modulation(&self.head_modulation, &condition);
            self.unpatchify(self.head.forward(modulate(x, shift, scale)))
        };
        let _scope = memory_compiler::scope("smooth");
        self.smooth.forward(latents, patched, condition)
    }

    /// Where every token lies, `[1, tokens, width]`.
    fn positions(&self, device: &Device) -> Tensor<3> {
        let [_, width] = self.embed.weight.dims();
        let values = grid_waves(self.grid, width);
        Tensor::<1>::from_floats(values.as_slice(), device).reshape([
            1,
            self.grid * self.grid,
            width,
        ])
    }

    /// `[batch, channels, side, side]` to `[batch, tokens, numbers of a patch]`.
    fn patchify(&self, images: Tensor<4>) -> Tensor<3> {
        let (batch, grid, patch) = (images.dims()[0], self.grid, self.patch);
        images
            .reshape([batch, self.image, grid, patch, grid, patch])
            .permute([0, 2, 4, 1, 3, 5])
            .reshape([batch, grid * grid, self.image * patch * patch])
    }

    /// The reverse of [`patchify`](Self::patchify).
    fn unpatchify(&self, tokens: Tensor<3>) -> Tensor<4> {
        let (batch, grid, patch) = (tokens.dims()[0], self.grid, self.patch);
        tokens
            .reshape([batch, grid, grid, self.image, patch, patch])
            .permute([0, 3, 1, 4, 2, 5])
            .reshape([batch, self.image, grid * patch, grid * patch])
    }
}

#[derive(Module, Debug)]
struct Block {
    modulation: Linear,
    attention: SelfAttention,
    mlp_in: Linear,
    mlp_out: Linear,
}

impl Block {
    fn new(width: usize, heads: usize, device: &Device) -> Self {
        let hidden = MLP_RATIO * width;
        Self {
            modulation: linear(width, 6 * width, device),
            attention: SelfAttention::new(width, heads, device),
            mlp_in: linear(width, hidden, device),
            mlp_out: linear(hidden, width, device),
        }
    }

    fn forward(&self, x: Tensor<3>, condition: &Tensor<2>) -> Tensor<3> {
        let [shift, scale, gate, mlp_shift, mlp_scale, mlp_gate] =
            modulation(&self.modulation, condition);
        let seen = self.attention.forward(modulate(x.clone(), shift, scale));
        let x = x + seen * gate;
        let _scope = memory_compiler::scope("mlp");
        let thought = modulate(x.clone(), mlp_shift, mlp_scale);
        let thought = self.mlp_out.forward(silu(self.mlp_in.forward(thought)));
        x + thought * mlp_gate
    }
}

/// Corrects a prediction made of patches, pixel by pixel.
#[derive(Module, Debug)]
struct Smooth {
    first: Conv2d,
    condition: Linear,
    second: Conv2d,
    last: Conv2d,
}

impl Smooth {
    fn forward(&self, latents: Tensor<4>, patched: Tensor<4>, condition: Tensor<2>) -> Tensor<4> {
        let [scale, shift] = scale_shift(&self.condition, condition);
        let both = Tensor::cat(vec![latents, patched.clone()], 1);
        let inner = self.first.forward(both) * (scale + 1.0) + shift;
        let inner = silu(self.second.forward(silu(inner)));
        patched + self.last.forward(inner)
    }
}

/// `N` vectors of shape `[batch, 1, width]`.
fn modulation<const N: usize>(layer: &Linear, condition: &Tensor<2>) -> [Tensor<3>; N] {
    let all: Tensor<3> = layer.forward(condition.clone()).unsqueeze_dim(1);
    all.chunk(N, 2).try_into().expect("as many as asked for")
}

/// Normalises every token, then scales and shifts it.
fn modulate(x: Tensor<3>, shift: Tensor<3>, scale: Tensor<3>) -> Tensor<3> {
    normalise_last(x) * (scale + 1.0) + shift
}
