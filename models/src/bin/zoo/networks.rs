//! The models, as candle-transformers publishes them, each with the inputs of one step.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::flux::{self, WithForward as _};
use candle_transformers::models::stable_diffusion::unet_2d::{
    BlockConfig, UNet2DConditionModel, UNet2DConditionModelConfig,
};
use candle_transformers::models::stable_diffusion::vae::{AutoEncoderKL, AutoEncoderKLConfig};
use candle_transformers::models::{mmdit, z_image};
use clap::ValueEnum;

/// A model of candle-transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Model {
    /// The UNet of Stable Diffusion 1.5.
    Sd15,
    /// The UNet of Stable Diffusion XL.
    Sdxl,
    /// The MMDiT of Stable Diffusion 3 medium.
    Sd3,
    /// The MMDiT-X of Stable Diffusion 3.5 medium: a second attention in its first 13 blocks.
    Sd35,
    /// The transformer of FLUX.1-dev.
    Flux,
    /// The transformer of Z-Image-Turbo.
    ZImage,
    /// The decoder of Stable Diffusion 1.5's autoencoder.
    Vae,
}

impl Model {
    /// The number format that it is usually run in.
    pub fn usual_dtype(self) -> DType {
        match self {
            Self::Flux | Self::ZImage => DType::BF16,
            Self::Sd15 | Self::Sdxl | Self::Sd3 | Self::Sd35 | Self::Vae => DType::F16,
        }
    }

    /// The size that it is usually run at, in pixels.
    pub fn usual_size(self) -> usize {
        if matches!(self, Self::Sd15 | Self::Vae) {
            512
        } else {
            1024
        }
    }

    /// Two with guidance by a second prediction, one without.
    pub fn usual_batch(self) -> usize {
        if matches!(self, Self::Sd15 | Self::Sdxl | Self::Sd3 | Self::Sd35) {
            2
        } else {
            1
        }
    }
}

/// Sizes of one step.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub model: Model,
    pub width: usize,
    pub height: usize,
    pub batch: usize,
    pub dtype: DType,
}

/// One step of a model, to be run again and again.
pub type Network = Box<dyn Fn() -> Result<Tensor>>;

/// Takes the weights of a job from `vb` and draws its inputs.
pub fn build(job: Job, device: &Device, vb: VarBuilder) -> Result<Network> {
    let Job {
        model,
        width,
        height,
        batch,
        dtype,
    } = job;
    let noise = |shape: &[usize]| -> Result<Tensor> {
        Tensor::randn(0f32, 1f32, shape, device)?.to_dtype(dtype)
    };
    let (rows, columns) = (height / 8, width / 8);
    Ok(match model {
        Model::Sd15 | Model::Sdxl => {
            let config = unet(model);
            let text = noise(&[batch, 77, config.cross_attention_dim])?;
            let latents = noise(&[batch, 4, rows, columns])?;
            let network = UNet2DConditionModel::new(vb, 4, 4, false, config)?;
            Box::new(move || network.forward(&latents, 500.0, &text))
        }
        Model::Sd3 | Model::Sd35 => {
            let config = match model {
                Model::Sd3 => mmdit::model::Config::sd3_medium(),
                _ => mmdit::model::Config::sd3_5_medium(),
            };
            let network = mmdit::model::MMDiT::new(&config, false, vb)?;
            let latents = noise(&[batch, 16, rows, columns])?;
            let time = Tensor::full(500f32, batch, device)?;
            let (pooled, text) = (noise(&[batch, 2048])?, noise(&[batch, 154, 4096])?);
            Box::new(move || network.forward(&latents, &time, &pooled, &text, None))
        }
        Model::Flux => {
            let network = flux::model::Flux::new(&flux::model::Config::dev(), vb)?;
            let latents = noise(&[batch, 16, rows, columns])?;
            let state =
                flux::sampling::State::new(&noise(&[1, 512, 4096])?, &noise(&[1, 768])?, &latents)?;
            let time = Tensor::full(0.5f32, batch, device)?;
            let guidance = Tensor::full(3.5f32, batch, device)?;
            Box::new(move || {
                let flux::sampling::State {
                    img,
                    img_ids,
                    txt,
                    txt_ids,
                    vec,
                } = &state;
                network.forward(img, img_ids, txt, txt_ids, &time, vec, Some(&guidance))
            })
        }
        Model::ZImage => {
            let config = z_image::transformer::Config::z_image_turbo();
            let text = noise(&[batch, 128, config.cap_feat_dim])?;
            let mask = Tensor::ones((batch, 128), DType::U8, device)?;
            let network = z_image::transformer::ZImageTransformer2DModel::new(&config, vb)?;
            let latents = noise(&[batch, 16, 1, rows, columns])?;
            let time = Tensor::full(0.5f32, batch, device)?.to_dtype(dtype)?;
            Box::new(move || network.forward(&latents, &time, &text, &mask))
        }
        Model::Vae => {
            let config = AutoEncoderKLConfig {
                block_out_channels: vec![128, 256, 512, 512],
                layers_per_block: 2,
                latent_channels: 4,
                norm_num_groups: 32,
                use_quant_conv: true,
                use_post_quant_conv: true,
            };
            let network = AutoEncoderKL::new(vb, 3, 3, config)?;
            let latents = noise(&[batch, 4, rows, columns])?;
            Box::new(move || network.decode(&latents))
        }
    })
}

/// The published configurations; candle-transformers keeps its own copies private.
fn unet(model: Model) -> UNet2DConditionModelConfig {
    let block = |out_channels, use_cross_attn, attention_head_dim| BlockConfig {
        out_channels,
        use_cross_attn,
        attention_head_dim,
    };
    let (blocks, cross_attention_dim) = if model == Model::Sdxl {
        (
            vec![
                block(320, None, 5),
                block(640, Some(2), 10),
                block(1280, Some(10), 20),
            ],
            2048,
        )
    } else {
        let with = |channels| block(channels, Some(1), 8);
        (
            vec![with(320), with(640), with(1280), block(1280, None, 8)],
            768,
        )
    };
    UNet2DConditionModelConfig {
        blocks,
        cross_attention_dim,
        center_input_sample: false,
        downsample_padding: 1,
        flip_sin_to_cos: true,
        freq_shift: 0.0,
        layers_per_block: 2,
        mid_block_scale_factor: 1.0,
        norm_eps: 1e-5,
        norm_num_groups: 32,
        sliced_attention_size: None,
        use_linear_projection: model == Model::Sdxl,
    }
}
