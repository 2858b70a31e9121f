//! One sampling run with classifier-free guidance (Ho and Salimans 2022,
//! <https://arxiv.org/abs/2207.12598>).
//!
//! ```text
//!   flip-flop   cond uncond cond uncond … cond uncond cond cond cond    two steps, alternating
//!   batched     batched     batched     … batched     batched  …        one step, twice the batch
//! ```
//!
//! Every call of the model goes through a [`Stepper`] under a name. [`Plain`] just calls; one that
//! owns a memory compiler brackets each name as a step of its own. What happens between the calls
//! (guidance, the sampler) belongs to no step, so the predictions and the latents outlive theirs.

use crate::{
    Denoiser, Error, IMAGE_SIDE, NO_CLASS, Result, rng,
    sampler::{Method, Sampler},
};
use candle_core::{Device, Tensor};

/// Runs the model's calls.
pub trait Stepper {
    /// Runs `f` as one repetition of the step `name`.
    fn step<T>(
        &mut self,
        name: &str,
        f: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<T>;
}

/// Just calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Stepper for Plain {
    fn step<T>(
        &mut self,
        _name: &str,
        f: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        f()
    }
}

/// What answers for the network: the network, with whatever memory it runs on.
pub trait Predictor {
    /// Where the tensors that it is given must be.
    fn device(&self) -> &Device;

    /// Predicts `v` in one repetition of the step `step`; see [`Denoiser::forward`].
    fn predict(
        &mut self,
        step: &str,
        latents: &Tensor,
        timestep: &Tensor,
        class: &Tensor,
    ) -> Result<Tensor>;
}

/// A network of Candle's whose calls go through a stepper.
struct Stepped<'s, S> {
    model: &'s dyn Denoiser,
    stepper: &'s mut S,
}

impl<S: Stepper> Predictor for Stepped<'_, S> {
    fn device(&self) -> &Device {
        self.model.device()
    }

    fn predict(
        &mut self,
        step: &str,
        latents: &Tensor,
        timestep: &Tensor,
        class: &Tensor,
    ) -> Result<Tensor> {
        let forward = || self.model.forward(latents, timestep, class);
        Ok(self.stepper.step(step, forward)?)
    }
}

/// How the two predictions of guidance are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum GuidanceMode {
    /// One call with the digit, one without, in turn.
    FlipFlop,
    /// One call with twice the batch.
    Batched,
}

/// What to draw and how.
#[derive(Clone, Debug)]
pub struct Job {
    /// The way down the noise schedule.
    pub method: Method,
    /// Steps of the sampler.
    pub steps: usize,
    /// How far past the unconditional prediction to go; 1 asks for none and draws without guidance.
    pub guidance: f64,
    /// How the two predictions are asked for.
    pub mode: GuidanceMode,
    /// The share of the steps, from the first on, that are guided in flip-flop mode.
    pub guided_share: f64,
    /// The digits, one image each for every sample.
    pub classes: Vec<u32>,
    /// Images of each digit.
    pub samples: usize,
    /// Where the noise comes from.
    pub seed: u64,
}

/// More steps than anybody takes: above this is a slip of the keyboard.
const STEP_LIMIT: usize = 1_000_000;

/// Images that are drawn together; with batched guidance the UNet needs about 5 MiB for each.
const IMAGE_LIMIT: usize = 2_000;

impl Job {
    /// Fails unless every number makes sense.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: &str| Err(Error::Setting(what.to_string()));
        match self {
            Self { steps: 0, .. } => wrong("steps must be at least 1"),
            Self { samples: 0, .. } => wrong("samples must be at least 1"),
            Self { steps, .. } if *steps > STEP_LIMIT => {
                wrong(&format!("steps must be at most {STEP_LIMIT}"))
            }
            Self { classes, .. } if classes.is_empty() => wrong("no class to draw"),
            Self {
                samples, classes, ..
            } if *samples > IMAGE_LIMIT / classes.len() => wrong(&format!(
                "samples must be at most {}: {IMAGE_LIMIT} images are drawn at once at most \
                 (another seed draws others)",
                IMAGE_LIMIT / classes.len()
            )),
            Self { classes, .. } if classes.iter().any(|&class| class >= NO_CLASS) => {
                wrong("a class must be 0 to 9")
            }
            Self { guidance, .. } if !guidance.is_finite() || *guidance < 0.0 => {
                wrong("the guidance scale must be a number of at least 0")
            }
            Self { guided_share, .. } if !(0.0..=1.0).contains(guided_share) => {
                wrong("the guided fraction must be between 0 and 1")
            }
            _ => Ok(()),
        }
    }

    /// Whether the step at `index` is guided.
    fn is_guided(&self, index: usize) -> bool {
        let guided_steps = match self.mode {
            GuidanceMode::FlipFlop => (self.guided_share * self.steps as f64).round() as usize,
            GuidanceMode::Batched => self.steps,
        };
        self.guidance != 1.0 && index < guided_steps
    }
}

/// Draws the images of `job` on the model's device: `(samples · classes, 1, 28, 28)`, the classes of one
/// sample together. The noise is made on the CPU, so that it is the same everywhere.
///
/// Calls `progress` after every step of the sampler.
pub fn sample(
    model: &dyn Denoiser,
    job: &Job,
    stepper: &mut impl Stepper,
    progress: impl FnMut(),
) -> Result<Tensor> {
    sample_from(&mut Stepped { model, stepper }, job, progress)
}

/// The same for any network.
pub fn sample_from(
    network: &mut impl Predictor,
    job: &Job,
    mut progress: impl FnMut(),
) -> Result<Tensor> {
    job.check()?;
    let count = job.samples * job.classes.len();
    let device = &network.device().clone();
    let class = Tensor::from_vec(job.classes.repeat(job.samples), count, device)?;
    let no_class = Tensor::full(NO_CLASS, count, device)?;
    let both_classes = Tensor::cat(&[&class, &no_class], 0)?;
    let shape = (count, 1, IMAGE_SIDE, IMAGE_SIDE);
    let mut latents = rng::normal(&mut rng::seeded(job.seed, &[]), shape)?.to_device(device)?;
    let mut sampler = Sampler::new(job.method, job.steps);
    for (index, t) in sampler.timesteps().into_iter().enumerate() {
        let times = |count: usize| Tensor::full(t as f32, count, device);
        let prediction = if !job.is_guided(index) {
            let timestep = times(count)?;
            network.predict("cond", &latents, &timestep, &class)?
        } else if job.mode == GuidanceMode::FlipFlop {
            let timestep = times(count)?;
            let cond = network.predict("cond", &latents, &timestep, &class)?;
            let uncond = network.predict("uncond", &latents, &timestep, &no_class)?;
            guide(&cond, &uncond, job.guidance)?
        } else {
            let (twice, timestep) = (Tensor::cat(&[&latents, &latents], 0)?, times(2 * count)?);
            let both = network.predict("batched", &twice, &timestep, &both_classes)?;
            let (cond, uncond) = (both.narrow(0, 0, count)?, both.narrow(0, count, count)?);
            guide(&cond, &uncond, job.guidance)?
        };
        latents = sampler.step(&prediction, t, &latents)?;
        progress();
    }
    Ok(latents)
}

/// From the unconditional prediction through the conditional one and beyond.
fn guide(cond: &Tensor, uncond: &Tensor, scale: f64) -> candle_core::Result<Tensor> {
    uncond + ((cond - uncond)? * scale)?
}
