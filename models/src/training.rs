//! The loop that made the weights.
//!
//! The loss is the mean square error of `v` (see [`crate::schedule`]) over noise levels spread evenly
//! over each shard; one image in ten is shown without its digit, so that the same network can be
//! asked for guidance. Weights are averaged over time (EMA), and the average is what is saved.
//!
//! ```text
//!   batch ─┬─ shard 0 ─ forward, backward ─┐
//!          ├─ …                             ├─ mean, clipped ─ AdamW ─ EMA
//!          └─ shard n ─ forward, backward ─┘
//! ```
//!
//! Each shard has a thread and random numbers of its own, and gradients are summed in the order of
//! the shards: the result depends on the settings, never on the timing or the number of cores. Set
//! `RAYON_NUM_THREADS=1` so that Candle does not split each shard's work again.

use crate::{
    Denoiser, Error, IMAGE_SIDE, ModelKind, NO_CLASS, Result,
    digits::Digits,
    rng, schedule,
    weights::{self, Source},
};
use candle_core::{DType, Device, Tensor, Var, backprop::GradStore, bail};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use rand::Rng;
use std::{collections::HashMap, path::Path};

/// The share of images shown without their digit.
const UNLABELLED: f64 = 0.1;

/// Gradients longer than this are shortened to it.
const LONGEST_GRADIENT: f64 = 1.0;

/// The most that one step's weights may lack in the average.
const EMA_DECAY: f64 = 0.999;

/// What a training run depends on.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The network.
    pub kind: ModelKind,
    /// Optimiser steps; the learning rate reaches its end with the last one.
    pub steps: usize,
    /// Images a step, over all shards.
    pub batch: usize,
    /// Threads, each with an equal share of the batch.
    pub shards: usize,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// Where all randomness comes from.
    pub seed: u64,
}

/// A model in training.
#[derive(Debug)]
pub struct Trainer<'a> {
    settings: Settings,
    digits: &'a Digits,
    model: Box<dyn Denoiser>,
    /// Sorted by name.
    parameters: Vec<(String, Var)>,
    /// The averages, in the same order.
    averages: Vec<Tensor>,
    optimizer: Optimizing,
    taken: usize,
}

/// Candle's AdamW has no `Debug`.
struct Optimizing(AdamW);

impl std::fmt::Debug for Optimizing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdamW").finish_non_exhaustive()
    }
}

impl<'a> Trainer<'a> {
    /// Starts from random weights.
    pub fn new(settings: Settings, digits: &'a Digits) -> Result<Self> {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let model = settings.kind.build(vb)?;
        let mut parameters: Vec<(String, Var)> = match map.data().lock() {
            Ok(data) => data.iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
            Err(_) => Vec::new(),
        };
        parameters.sort_by(|a, b| a.0.cmp(&b.0));
        initialise(&parameters, settings.seed)?;
        let averages = parameters
            .iter()
            .map(|(_, var)| var.as_detached_tensor().copy())
            .collect::<candle_core::Result<_>>()?;
        let optimizer = AdamW::new(
            parameters.iter().map(|(_, var)| var.clone()).collect(),
            ParamsAdamW {
                beta2: 0.99,
                ..ParamsAdamW::default()
            },
        )?;
        Ok(Self {
            settings,
            digits,
            model,
            parameters,
            averages,
            optimizer: Optimizing(optimizer),
            taken: 0,
        })
    }

    /// Goes on from saved weights instead of random ones.
    pub fn start_from(&mut self, path: &Path) -> Result<()> {
        let saved = weights::read(self.settings.kind, Source::File(path))?;
        for ((name, var), average) in self.parameters.iter().zip(&mut self.averages) {
            match saved.get(name) {
                Some(tensor) if tensor.dims() == var.dims() => {
                    *average = tensor.to_dtype(DType::F32)?;
                    var.set(average)?;
                }
                _ => {
                    return Err(Error::Weights {
                        origin: path.display().to_string(),
                        model: self.settings.kind.name(),
                        why: format!("no fitting tensor {name}"),
                    });
                }
            }
        }
        Ok(())
    }

    /// How many numbers are trained.
    pub fn parameter_count(&self) -> usize {
        self.averages.iter().map(Tensor::elem_count).sum()
    }

    /// One step of the optimiser; the loss before it.
    pub fn step(&mut self) -> Result<f32> {
        let (loss, mut gradients) = self.gradients()?;
        self.clip(&mut gradients)?;
        self.optimizer.0.set_learning_rate(self.learning_rate());
        self.optimizer.0.step(&gradients)?;
        self.taken += 1;
        let decay = EMA_DECAY.min((1 + self.taken) as f64 / (10 + self.taken) as f64);
        for ((_, var), average) in self.parameters.iter().zip(&mut self.averages) {
            *average = ((&*average * decay)? + (var.as_detached_tensor() * (1.0 - decay))?)?;
        }
        Ok(loss)
    }

    /// Writes the averaged weights.
    pub fn save(&self, notes: HashMap<String, String>, path: &Path) -> Result<()> {
        let named: Vec<_> = self
            .parameters
            .iter()
            .zip(&self.averages)
            .map(|((name, _), average)| (name.clone(), average.clone()))
            .collect();
        weights::save(&named, notes, path)
    }

    /// Rises over the first twentieth, then falls along half a cosine to a hundredth.
    fn learning_rate(&self) -> f64 {
        let warm_up = (self.settings.steps as f64 / 20.0).max(1.0);
        let taken = self.taken as f64;
        let rise = ((taken + 1.0) / warm_up).min(1.0);
        let done = (taken / self.settings.steps as f64).min(1.0);
        let fall = 0.01 + 0.99 * 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        self.settings.learning_rate * rise * fall
    }

    /// The mean loss and gradient over all shards.
    fn gradients(&self) -> Result<(f32, GradStore)> {
        let results: Vec<candle_core::Result<(f32, GradStore)>> = std::thread::scope(|threads| {
            let running: Vec<_> = (0..self.settings.shards)
                .map(|shard| threads.spawn(move || self.shard(shard)))
                .collect();
            running
                .into_iter()
                .map(|thread| match thread.join() {
                    Ok(result) => result,
                    Err(panic) => std::panic::resume_unwind(panic),
                })
                .collect()
        });
        let share = 1.0 / self.settings.shards as f64;
        let mut sum: Option<(f32, GradStore)> = None;
        for result in results {
            let (loss, gradients) = result?;
            let Some((loss_sum, gradient_sum)) = &mut sum else {
                sum = Some((loss, gradients));
                continue;
            };
            *loss_sum += loss;
            for (_, var) in &self.parameters {
                if let Some(gradient) = gradients.get(var) {
                    let total = match gradient_sum.get(var) {
                        Some(before) => (before + gradient)?,
                        None => gradient.clone(),
                    };
                    gradient_sum.insert(var, total);
                }
            }
        }
        let Some((loss, mut gradients)) = sum else {
            return Err(Error::Setting("shards must be at least 1".into()));
        };
        for (_, var) in &self.parameters {
            if let Some(gradient) = gradients.remove(var) {
                gradients.insert(var, (gradient * share)?);
            }
        }
        Ok(((loss as f64 * share) as f32, gradients))
    }

    /// Draws a share of the batch and goes through the network and back.
    fn shard(&self, shard: usize) -> candle_core::Result<(f32, GradStore)> {
        let count = (self.settings.batch / self.settings.shards).max(1);
        let mut rng = rng::seeded(self.settings.seed, &[self.taken as u64, shard as u64]);
        let noise = rng::normal(&mut rng, (count, 1, IMAGE_SIDE, IMAGE_SIDE))?;
        let mut pixels = Vec::with_capacity(count * IMAGE_SIDE * IMAGE_SIDE);
        let mut class = Vec::with_capacity(count);
        let mut time = Vec::with_capacity(count);
        for index in 0..count {
            let (image, label) = self.digits.image(rng.random_range(0..self.digits.len()));
            pixels.extend_from_slice(image);
            class.push(if rng.random_bool(UNLABELLED) {
                NO_CLASS
            } else {
                label
            });
            time.push(((index as f64 + rng.random::<f64>()) / count as f64) as f32);
        }
        let cpu = &Device::Cpu;
        let share = |of: fn(f64) -> f64| {
            let values: Vec<f32> = time.iter().map(|&t| of(f64::from(t)) as f32).collect();
            Tensor::from_vec(values, (count, 1, 1, 1), cpu)
        };
        let (alpha, sigma) = (share(schedule::alpha)?, share(schedule::sigma)?);
        let image = Tensor::from_vec(pixels, noise.shape(), cpu)?;
        let latents = (image.broadcast_mul(&alpha)? + noise.broadcast_mul(&sigma)?)?;
        let target = (noise.broadcast_mul(&alpha)? - image.broadcast_mul(&sigma)?)?;
        let prediction = self.model.forward(
            &latents,
            &Tensor::from_vec(time, count, cpu)?,
            &Tensor::from_vec(class, count, cpu)?,
        )?;
        let loss = (prediction - target)?.sqr()?.mean_all()?;
        let gradients = loss.backward()?;
        Ok((loss.to_scalar()?, gradients))
    }

    /// Shortens the gradient as a whole to [`LONGEST_GRADIENT`].
    fn clip(&self, gradients: &mut GradStore) -> candle_core::Result<()> {
        let mut square = 0f64;
        for (_, var) in &self.parameters {
            if let Some(gradient) = gradients.get(var) {
                square += f64::from(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?);
            }
        }
        let length = square.sqrt();
        if !length.is_finite() {
            bail!("the gradient is not finite: the learning rate is too high");
        }
        if length > LONGEST_GRADIENT {
            for (_, var) in &self.parameters {
                if let Some(gradient) = gradients.remove(var) {
                    gradients.insert(var, (gradient * (LONGEST_GRADIENT / length))?);
                }
            }
        }
        Ok(())
    }
}

/// Draws every parameter that Candle drew at random again, from the seed: matrices and kernels with
/// a variance of one over their inputs, everything else zero. Constants stay.
fn initialise(parameters: &[(String, Var)], seed: u64) -> candle_core::Result<()> {
    let mut rng = rng::seeded(seed, &[u64::MAX]);
    for (_, var) in parameters {
        let values: Vec<f32> = var.flatten_all()?.to_vec1()?;
        if values.iter().all(|&value| value == values[0]) {
            continue;
        }
        if var.rank() == 1 {
            var.set(&var.zeros_like()?)?;
            continue;
        }
        let inputs: usize = var.dims()[1..].iter().product();
        let drawn = rng::normal(&mut rng, var.shape())?;
        var.set(&(drawn / (inputs as f64).sqrt())?)?;
    }
    Ok(())
}
