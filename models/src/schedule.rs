//! The noise schedule and the three names of one prediction.
//!
//! Time runs from 0 (an image) to 1 (noise). A noisy image is `x = α·image + σ·noise` with
//! `α = cos(πt/2)` and `σ = sin(πt/2)`: the cosine schedule of Nichol and Dhariwal 2021
//! (<https://arxiv.org/abs/2102.09672>) in the variance-preserving form of Salimans and Ho 2022
//! (<https://arxiv.org/abs/2202.00512>), whose `v = α·noise − σ·image` the models predict. Because
//! `α² + σ² = 1`, both the image and the noise follow from `v` without dividing by anything.

use candle_core::{Result, Tensor};
use std::f64::consts::FRAC_PI_2;

/// Where sampling starts: at exactly 1 the ratio σ/α is infinite.
pub const START: f64 = 0.994;

/// Share of the image in `x` at time `t`.
pub fn alpha(t: f64) -> f64 {
    (t * FRAC_PI_2).cos()
}

/// Share of the noise in `x` at time `t`.
pub fn sigma(t: f64) -> f64 {
    (t * FRAC_PI_2).sin()
}

/// The time at which `σ/α` is `ratio`.
pub fn time_of_ratio(ratio: f64) -> f64 {
    ratio.atan() / FRAC_PI_2
}

/// The clean image that a prediction implies.
pub fn image_of(prediction: &Tensor, t: f64, latents: &Tensor) -> Result<Tensor> {
    (latents * alpha(t))? - (prediction * sigma(t))?
}

/// The noise that a prediction implies.
pub fn noise_of(prediction: &Tensor, t: f64, latents: &Tensor) -> Result<Tensor> {
    (latents * sigma(t))? + (prediction * alpha(t))?
}
