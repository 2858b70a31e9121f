//! Convolutions and upsampling: Candle's own when sampling, matrix products when training.
//!
//! Candle's gradient of `conv2d` is a transposed convolution, plain loops on the CPU and many times
//! slower than the forward pass. While a parameter is tracked, the same sum is therefore written as
//! a matrix product over unfolded patches, whose gradient is two matrix products:
//!
//! ```text
//!   image (b, c, h, w) ──unfold──► patches (c·9, b·h·w) ──weights (out, c·9)──► (out, b·h·w)
//! ```
//!
//! Unfolding and folding back are each other's gradient.

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

/// Pixels a 3×3 kernel looks at.
const TAPS: usize = 9;

/// A 3×3 convolution with stride 1 and padding 1.
#[derive(Clone, Debug)]
pub struct Conv3x3 {
    weight: Tensor,
    bias: Tensor,
}

impl Conv3x3 {
    /// A convolution from `channels_in` to `channels_out`.
    pub fn new(channels_in: usize, channels_out: usize, vb: VarBuilder) -> Result<Self> {
        Self::with_init(
            channels_in,
            channels_out,
            candle_nn::init::DEFAULT_KAIMING_NORMAL,
            vb,
        )
    }

    /// A convolution that answers zero until it is trained: the end of a residual branch.
    pub fn zeroed(channels_in: usize, channels_out: usize, vb: VarBuilder) -> Result<Self> {
        Self::with_init(channels_in, channels_out, Init::Const(0.0), vb)
    }

    /// Where its parameters are.
    pub fn device(&self) -> &Device {
        self.weight.device()
    }

    fn with_init(
        channels_in: usize,
        channels_out: usize,
        init: Init,
        vb: VarBuilder,
    ) -> Result<Self> {
        Ok(Self {
            weight: vb.get_with_hints((channels_out, channels_in, 3, 3), "weight", init)?,
            bias: vb.get_with_hints(channels_out, "bias", Init::Const(0.0))?,
        })
    }
}

impl Module for Conv3x3 {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let channels_out = self.bias.dim(0)?;
        if self.weight.track_op() {
            let (batch, _, height, width) = x.dims4()?;
            let patches = x.contiguous()?.apply_op1(Unfold)?;
            product(&self.weight, &patches, &self.bias, (batch, height, width))
        } else {
            x.conv2d(&self.weight, 1, 1, 1, 1)?
                .broadcast_add(&self.bias.reshape((1, channels_out, 1, 1))?)
        }
    }
}

/// A convolution that looks at single pixels.
#[derive(Clone, Debug)]
pub struct Conv1x1 {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1x1 {
    /// A convolution from `channels_in` to `channels_out`.
    pub fn new(channels_in: usize, channels_out: usize, vb: VarBuilder) -> Result<Self> {
        let shape = (channels_out, channels_in, 1, 1);
        Ok(Self {
            weight: vb.get_with_hints(shape, "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?,
            bias: vb.get_with_hints(channels_out, "bias", Init::Const(0.0))?,
        })
    }
}

impl Module for Conv1x1 {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let channels_out = self.bias.dim(0)?;
        if self.weight.track_op() {
            let (batch, channels, height, width) = x.dims4()?;
            let pixels = x
                .transpose(0, 1)?
                .reshape((channels, batch * height * width))?;
            product(&self.weight, &pixels, &self.bias, (batch, height, width))
        } else {
            x.conv2d(&self.weight, 0, 1, 1, 1)?
                .broadcast_add(&self.bias.reshape((1, channels_out, 1, 1))?)
        }
    }
}

/// Weights times patches plus bias, back in the order of images.
fn product(
    weight: &Tensor,
    patches: &Tensor,
    bias: &Tensor,
    (batch, height, width): (usize, usize, usize),
) -> Result<Tensor> {
    let channels_out = bias.dim(0)?;
    weight
        .reshape((channels_out, patches.dim(0)?))?
        .matmul(patches)?
        .broadcast_add(&bias.unsqueeze(1)?)?
        .reshape((channels_out, batch, height, width))?
        .transpose(0, 1)?
        .contiguous()
}

/// Doubles height and width by repeating pixels. Candle's own operation has a slow gradient.
pub fn upsample(x: &Tensor) -> Result<Tensor> {
    if x.track_op() {
        x.contiguous()?.apply_op1(Repeat)
    } else {
        let (_, _, height, width) = x.dims4()?;
        x.upsample_nearest2d(2 * height, 2 * width)
    }
}

/// Every pixel becomes a square of four.
#[derive(Debug)]
struct Repeat;

impl CustomOp1 for Repeat {
    fn name(&self) -> &'static str {
        "repeat-2x2"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (batch, channels, height, width) = layout.shape().dims4()?;
        let source = contiguous_f32(storage, layout)?;
        let mut out = Vec::with_capacity(4 * source.len());
        for row in source.chunks_exact(width) {
            for _ in 0..2 {
                out.extend(row.iter().flat_map(|&pixel| [pixel, pixel]));
            }
        }
        let shape = (batch, channels, 2 * height, 2 * width);
        Ok((CpuStorage::F32(out), shape.into()))
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some((grad.avg_pool2d(2)? * 4.0)?))
    }
}

/// `(b, c, h, w)` to the 3×3 neighbourhood of every pixel, `(c·9, b·h·w)`, zero outside the image.
#[derive(Debug)]
struct Unfold;

/// The reverse of [`Unfold`]: adds every neighbourhood back to where it came from.
#[derive(Debug)]
struct Fold {
    /// `(b, c, h, w)`.
    image: [usize; 4],
}

impl CustomOp1 for Unfold {
    fn name(&self) -> &'static str {
        "unfold-3x3"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (batch, channels, height, width) = layout.shape().dims4()?;
        let image = [batch, channels, height, width];
        let source = contiguous_f32(storage, layout)?;
        let mut patches = vec![0f32; source.len() * TAPS];
        for_each_row(image, |from, to, len| {
            patches[to..to + len].copy_from_slice(&source[from..from + len]);
        });
        Ok((
            CpuStorage::F32(patches),
            (channels * TAPS, batch * height * width).into(),
        ))
    }

    fn bwd(&self, arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (batch, channels, height, width) = arg.dims4()?;
        let image = [batch, channels, height, width];
        Ok(Some(grad.contiguous()?.apply_op1_no_bwd(&Fold { image })?))
    }
}

impl CustomOp1 for Fold {
    fn name(&self) -> &'static str {
        "fold-3x3"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let patches = contiguous_f32(storage, layout)?;
        let mut image = vec![0f32; patches.len() / TAPS];
        for_each_row(self.image, |to, from, len| {
            for (sum, value) in image[to..to + len]
                .iter_mut()
                .zip(&patches[from..from + len])
            {
                *sum += value;
            }
        });
        let [batch, channels, height, width] = self.image;
        Ok((
            CpuStorage::F32(image),
            (batch, channels, height, width).into(),
        ))
    }
}

/// Calls `visit(image offset, patches offset, length)` for every run of pixels that lies together in
/// both layouts.
fn for_each_row(
    [batch, channels, height, width]: [usize; 4],
    mut visit: impl FnMut(usize, usize, usize),
) {
    for channel in 0..channels {
        for tap in 0..TAPS {
            let (down, right) = (tap / 3, tap % 3);
            let patch_row = channel * TAPS + tap;
            let skip_left = usize::from(right == 0);
            let len = width - usize::from(right != 1);
            for item in 0..batch {
                for y in 0..height {
                    // Output row y reads image row y + down − 1.
                    let Some(source_y) = (y + down).checked_sub(1).filter(|&row| row < height)
                    else {
                        continue;
                    };
                    let image_start = ((item * channels + channel) * height + source_y) * width
                        + usize::from(right == 2);
                    let patch_start = ((patch_row * batch + item) * height + y) * width + skip_left;
                    visit(image_start, patch_start, len);
                }
            }
        }
    }
}

/// The values of a contiguous `f32` tensor.
fn contiguous_f32<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&values[start..end]),
        _ => bail!("training convolutions take contiguous f32 tensors"),
    }
}
