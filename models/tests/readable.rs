//! Whether the digits can be read: each model judges what the other draws.
//!
//! A diffusion model classifies by asking for which digit it predicts the noise best (Li et al.
//! 2023, <https://arxiv.org/abs/2303.16203>). The two models share no weights, so a digit that one
//! draws and the other recognises looks like that digit.

use candle_core::{Device, Tensor};
use memory_compiler_models::{
    Denoiser, ModelKind, Result, rng,
    run::{GuidanceMode, Job, Plain, sample},
    sampler::Method,
    schedule::{alpha, sigma},
    weights::{Source, load},
};

/// Noise levels at which an image is judged, where digits differ most.
const TIMES: [f64; 4] = [0.5, 0.6, 0.7, 0.8];

/// The digit for which `judge` predicts the noise on `(1, 1, 28, 28)` best.
fn recognise(judge: &dyn Denoiser, image: &Tensor) -> Result<u32> {
    let mut errors = Tensor::zeros(10, candle_core::DType::F32, &Device::Cpu)?;
    let class = Tensor::arange(0u32, 10, &Device::Cpu)?;
    for (index, t) in TIMES.into_iter().enumerate() {
        let noise = rng::normal(&mut rng::seeded(11, &[index as u64]), image.shape())?;
        let latents = ((image * alpha(t))? + (&noise * sigma(t))?)?;
        let target = ((&noise * alpha(t))? - (image * sigma(t))?)?;
        let prediction = judge.forward(
            &latents.repeat((10, 1, 1, 1))?,
            &Tensor::full(t as f32, 10, &Device::Cpu)?,
            &class,
        )?;
        let error = prediction
            .broadcast_sub(&target)?
            .sqr()?
            .flatten_from(1)?
            .mean(1)?;
        errors = (errors + error)?;
    }
    Ok(errors.argmin(0)?.to_scalar()?)
}

/// How many of the ten digits that `artist` draws `judge` takes for what they are.
fn recognised(artist: ModelKind, judge: ModelKind) -> Result<usize> {
    let job = Job {
        method: Method::Dpmpp2m,
        steps: 12,
        guidance: 2.0,
        mode: GuidanceMode::FlipFlop,
        guided_share: 0.66,
        classes: (0..10).collect(),
        samples: 1,
        seed: 0,
    };
    let artist = load(artist, Source::Embedded)?;
    let judge = load(judge, Source::Embedded)?;
    let images = sample(artist.as_ref(), &job, &mut Plain, || ())?;
    let mut right = 0;
    for index in 0..10u32 {
        let image = images.narrow(0, index as usize, 1)?.clamp(-1f32, 1f32)?;
        right += usize::from(recognise(judge.as_ref(), &image)? == index);
    }
    Ok(right)
}

#[test]
fn the_dit_recognises_the_digits_that_the_unet_draws() -> Result<()> {
    let right = recognised(ModelKind::Unet, ModelKind::Dit)?;
    assert!(right >= 9, "{right} of 10");
    Ok(())
}

#[test]
fn the_unet_recognises_the_digits_that_the_dit_draws() -> Result<()> {
    let right = recognised(ModelKind::Dit, ModelKind::Unet)?;
    assert!(right >= 9, "{right} of 10");
    Ok(())
}
