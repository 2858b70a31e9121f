//! Three deterministic ways from noise to an image.
//!
//! All three follow the probability-flow ODE of Song et al. 2021
//! (<https://arxiv.org/abs/2011.13456>) and differ in the order and in where they step:
//!
//! | sampler | order | steps are even in | paper |
//! |---|---|---|---|
//! | Euler | 1 | `(σ/α)^(1/7)` | Karras et al. 2022, <https://arxiv.org/abs/2206.00364> |
//! | DDIM | 1 | time | Song et al. 2020, <https://arxiv.org/abs/2010.02502> |
//! | DPM-Solver++(2M) | 2 | `log(α/σ)` | Lu et al. 2022, <https://arxiv.org/abs/2211.01095> |
//!
//! The loop is always the same:
//!
//! ```
//! use memory_compiler_models::{rng, sampler::{Method, Sampler}};
//!
//! # fn main() -> candle_core::Result<()> {
//! // The best prediction where every image is black (−1): see `schedule` for v.
//! let denoise = |latents: &candle_core::Tensor, t: f64| {
//!     let (a, s) = (memory_compiler_models::schedule::alpha(t), memory_compiler_models::schedule::sigma(t));
//!     (latents * (a / s))? + 1.0 / s
//! };
//! let mut sampler = Sampler::new(Method::Dpmpp2m, 8);
//! let mut latents = rng::normal(&mut rng::seeded(0, &[]), (1, 1, 28, 28))?;
//! for t in sampler.timesteps() {
//!     let prediction = denoise(&latents, t)?;
//!     latents = sampler.step(&prediction, t, &latents)?;
//! }
//! assert!((latents.mean_all()?.to_scalar::<f32>()? + 1.0).abs() < 1e-3);
//! # Ok(())
//! # }
//! ```

use crate::schedule::{START, alpha, image_of, noise_of, sigma, time_of_ratio};
use candle_core::{Result, Tensor, bail};

/// Which sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Method {
    /// Euler's method in `σ/α`.
    Euler,
    /// Denoising diffusion implicit model, without added noise.
    Ddim,
    /// DPM-Solver++, second order, multistep: keeps the image it predicted one step ago.
    #[value(name = "dpmpp-2m")]
    Dpmpp2m,
}

/// The smallest `σ/α` before the last step, which goes to zero.
const SMALLEST_RATIO: f64 = 0.02;

/// Karras' exponent: large steps where there is mostly noise.
const RHO: f64 = 7.0;

/// One run down the schedule. Every call of [`Sampler::step`] takes the next timestep.
#[derive(Clone, Debug)]
pub struct Sampler {
    method: Method,
    /// Strictly falling; ends with 0, which is no step of its own.
    times: Vec<f64>,
    /// Steps taken.
    taken: usize,
    /// The predicted image of the step before; only DPM-Solver++(2M) keeps it.
    previous: Option<Tensor>,
}

impl Sampler {
    /// A run of `steps` steps, at least one.
    pub fn new(method: Method, steps: usize) -> Self {
        let steps = steps.max(1);
        let largest_ratio = sigma(START) / alpha(START);
        let even = |from: f64, to: f64, i: usize| {
            from + (to - from) * i as f64 / (steps - 1).max(1) as f64
        };
        let mut times: Vec<f64> = (0..steps)
            .map(|i| match method {
                Method::Euler => {
                    let root = |ratio: f64| ratio.powf(1.0 / RHO);
                    let ratio = even(root(largest_ratio), root(SMALLEST_RATIO), i).powf(RHO);
                    time_of_ratio(ratio)
                }
                Method::Ddim => START * (steps - i) as f64 / steps as f64,
                Method::Dpmpp2m => {
                    time_of_ratio(even(largest_ratio.ln(), SMALLEST_RATIO.ln(), i).exp())
                }
            })
            .collect();
        times.push(0.0);
        Self {
            method,
            times,
            taken: 0,
            previous: None,
        }
    }

    /// The times at which the model is asked, in order.
    pub fn timesteps(&self) -> Vec<f64> {
        self.times[..self.times.len() - 1].to_vec()
    }

    /// From the latents at `t` and the model's prediction there to the latents at the next time.
    ///
    /// Fails unless `t` is the next of [`Sampler::timesteps`].
    pub fn step(&mut self, prediction: &Tensor, t: f64, latents: &Tensor) -> Result<Tensor> {
        let next = match self.times.get(self.taken + 1) {
            Some(&next) if self.times[self.taken] == t => next,
            _ => bail!("time {t} is not step {} of this sampler", self.taken),
        };
        let latents = match self.method {
            Method::Euler => euler(prediction, t, next, latents)?,
            Method::Ddim => ddim(prediction, t, next, latents)?,
            Method::Dpmpp2m => self.dpmpp_2m(prediction, t, next, latents)?,
        };
        self.taken += 1;
        Ok(latents)
    }

    /// Extrapolates the predicted image from this step and the one before, then solves the ODE
    /// exactly for that image. The first and the last step are of first order.
    fn dpmpp_2m(
        &mut self,
        prediction: &Tensor,
        t: f64,
        next: f64,
        latents: &Tensor,
    ) -> Result<Tensor> {
        let image = image_of(prediction, t, latents)?;
        if next == 0.0 {
            return Ok(image);
        }
        let half_log_snr = |t: f64| (alpha(t) / sigma(t)).ln();
        let h = half_log_snr(next) - half_log_snr(t);
        let target = match self.previous.take() {
            None => image.clone(),
            Some(previous) => {
                let h_before = half_log_snr(t) - half_log_snr(self.times[self.taken - 1]);
                let weight = h / (2.0 * h_before);
                ((&image * (1.0 + weight))? - (previous * weight)?)?
            }
        };
        self.previous = Some(image);
        (latents * (sigma(next) / sigma(t)))? - (target * (alpha(next) * (-h).exp_m1()))?
    }
}

/// `x/α` moves along its slope in `σ/α`, which is the noise.
fn euler(prediction: &Tensor, t: f64, next: f64, latents: &Tensor) -> Result<Tensor> {
    let ratio = |t: f64| sigma(t) / alpha(t);
    let slope = noise_of(prediction, t, latents)?;
    let moved = ((latents / alpha(t))? + (slope * (ratio(next) - ratio(t)))?)?;
    moved * alpha(next)
}

/// Takes the noise out, puts less of the same noise back.
fn ddim(prediction: &Tensor, t: f64, next: f64, latents: &Tensor) -> Result<Tensor> {
    let image = image_of(prediction, t, latents)?;
    let noise = noise_of(prediction, t, latents)?;
    (image * alpha(next))? + (noise * sigma(next))?
}
