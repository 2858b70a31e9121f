//! The samplers on problems whose solution is known.
//!
//! Where every pixel is drawn from a normal distribution, the best prediction is a formula, and so
//! is the image that the probability-flow ODE reaches from given noise.

use candle_core::{Result, Tensor};
use memory_compiler_models::{
    rng,
    sampler::{Method, Sampler},
    schedule::{START, alpha, image_of, noise_of, sigma, time_of_ratio},
};

const METHODS: [Method; 3] = [Method::Euler, Method::Ddim, Method::Dpmpp2m];

/// Pixels from a normal distribution.
#[derive(Clone, Copy)]
struct Normal {
    mean: f64,
    deviation: f64,
}

impl Normal {
    /// The best `v` for noisy pixels at `t`.
    fn predict(self, latents: &Tensor, t: f64) -> Result<Tensor> {
        let (a, s) = (alpha(t), sigma(t));
        let gain = a * self.deviation.powi(2) / self.variance(t);
        let image = ((latents - a * self.mean)? * gain)? + self.mean;
        ((latents * a)? - image?)? / s
    }

    /// Where the ODE ends that starts with `latents` at [`START`].
    fn solution(self, latents: &Tensor) -> Result<Tensor> {
        let scale = self.deviation / self.variance(START).sqrt();
        ((latents - alpha(START) * self.mean)? * scale)? + self.mean
    }

    fn variance(self, t: f64) -> f64 {
        (alpha(t) * self.deviation).powi(2) + sigma(t).powi(2)
    }

    /// The largest error of a pixel after `steps` steps.
    fn error(self, method: Method, steps: usize) -> Result<f32> {
        let mut sampler = Sampler::new(method, steps);
        let start = rng::normal(&mut rng::seeded(7, &[]), 256)?;
        let mut latents = start.clone();
        for t in sampler.timesteps() {
            latents = sampler.step(&self.predict(&latents, t)?, t, &latents)?;
        }
        (latents - self.solution(&start)?)?
            .abs()?
            .max_all()?
            .to_scalar()
    }
}

#[test]
fn a_single_image_is_reached_exactly_in_any_number_of_steps() -> Result<()> {
    let image = Normal {
        mean: 0.25,
        deviation: 0.0,
    };
    for method in METHODS {
        for steps in [1, 2, 3, 10] {
            let error = image.error(method, steps)?;
            assert!(error < 1e-3, "{method:?} in {steps} steps: {error}");
        }
    }
    Ok(())
}

#[test]
fn a_normal_distribution_is_reached_ever_closer_with_more_steps() -> Result<()> {
    let pixels = Normal {
        mean: 0.3,
        deviation: 0.5,
    };
    for method in METHODS {
        let errors = [8, 32, 128].map(|steps| pixels.error(method, steps));
        let [few, some, many] = errors.map(|error| error.unwrap_or(f32::NAN));
        assert!(some < few / 2.0, "{method:?}: {few} to {some}");
        assert!(many < some / 2.0, "{method:?}: {some} to {many}");
        assert!(many < 0.05, "{method:?}: {many}");
    }
    Ok(())
}

#[test]
fn the_second_order_sampler_beats_the_same_steps_of_first_order() -> Result<()> {
    let pixels = Normal {
        mean: 0.3,
        deviation: 0.5,
    };
    for steps in [12, 24, 48] {
        let second = pixels.error(Method::Dpmpp2m, steps)?;
        let first = pixels.error(Method::Euler, steps)?;
        assert!(second < first, "{steps} steps: {second} against {first}");
    }
    Ok(())
}

#[test]
fn times_fall_from_almost_one_and_never_reach_zero() {
    for method in METHODS {
        for steps in [1, 2, 25] {
            let times = Sampler::new(method, steps).timesteps();
            assert_eq!(times.len(), steps);
            assert!((times[0] - START).abs() < 1e-9, "{method:?}: {times:?}");
            assert!(times.windows(2).all(|pair| pair[1] < pair[0]));
            assert!(times.iter().all(|&t| t > 0.0));
        }
    }
}

#[test]
fn a_step_out_of_turn_is_refused() -> Result<()> {
    let mut sampler = Sampler::new(Method::Ddim, 4);
    let times = sampler.timesteps();
    let x = rng::normal(&mut rng::seeded(0, &[]), 4)?;
    assert!(sampler.step(&x, times[1], &x).is_err());
    for &t in &times {
        sampler.step(&x, t, &x)?;
    }
    assert!(sampler.step(&x, times[3], &x).is_err());
    Ok(())
}

#[test]
fn image_and_noise_follow_from_the_prediction() -> Result<()> {
    let image = rng::normal(&mut rng::seeded(1, &[]), 64)?;
    let noise = rng::normal(&mut rng::seeded(2, &[]), 64)?;
    for t in [0.1, 0.5, 0.9] {
        let latents = ((&image * alpha(t))? + (&noise * sigma(t))?)?;
        let v = ((&noise * alpha(t))? - (&image * sigma(t))?)?;
        for (found, wanted) in [
            (image_of(&v, t, &latents)?, &image),
            (noise_of(&v, t, &latents)?, &noise),
        ] {
            let error: f32 = (found - wanted)?.abs()?.max_all()?.to_scalar()?;
            assert!(error < 1e-5, "{error} at {t}");
        }
        assert!((time_of_ratio(sigma(t) / alpha(t)) - t).abs() < 1e-12);
    }
    Ok(())
}
