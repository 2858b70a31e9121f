//! The two networks: shapes, determinism, weights that do not fit, and training.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use memory_compiler_models::{
    Denoiser, Error, ModelKind, NO_CLASS, Result,
    conv::{Conv1x1, Conv3x3, upsample},
    layers::{GroupNorm, Linear},
    rng,
    run::{GuidanceMode, Job, Plain, Stepper, sample},
    sampler::Method,
    weights::{Source, embedded, load},
};

const KINDS: [ModelKind; 2] = [ModelKind::Unet, ModelKind::Dit];

fn job() -> Job {
    Job {
        method: Method::Dpmpp2m,
        steps: 4,
        guidance: 2.0,
        mode: GuidanceMode::FlipFlop,
        guided_share: 0.5,
        classes: vec![3, 7],
        samples: 1,
        seed: 5,
    }
}

fn trained(kind: ModelKind) -> Result<Box<dyn Denoiser>> {
    load(kind, Source::Embedded)
}

fn largest_difference(a: &Tensor, b: &Tensor) -> Result<f32> {
    Ok((a - b)?.abs()?.max_all()?.to_scalar()?)
}

/// Notes the names of the steps.
#[derive(Default)]
struct Noting(Vec<String>);

impl Stepper for Noting {
    fn step<T>(
        &mut self,
        name: &str,
        f: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        self.0.push(name.to_string());
        f()
    }
}

#[test]
fn predictions_have_the_shape_of_the_latents() -> Result<()> {
    for kind in KINDS {
        let model = trained(kind)?;
        for batch in [1, 3] {
            let latents = rng::normal(&mut rng::seeded(0, &[]), (batch, 1, 28, 28))?;
            let timestep = Tensor::full(0.5f32, batch, &Device::Cpu)?;
            let class = Tensor::full(NO_CLASS, batch, &Device::Cpu)?;
            let prediction = model.forward(&latents, &timestep, &class)?;
            assert_eq!(prediction.dims(), latents.dims());
        }
    }
    Ok(())
}

#[test]
fn an_image_does_not_depend_on_the_rest_of_its_batch() -> Result<()> {
    for kind in KINDS {
        let model = trained(kind)?;
        let latents = rng::normal(&mut rng::seeded(0, &[]), (2, 1, 28, 28))?;
        let timestep = Tensor::new(&[0.3f32, 0.8], &Device::Cpu)?;
        let class = Tensor::new(&[4u32, NO_CLASS], &Device::Cpu)?;
        let both = model.forward(&latents, &timestep, &class)?;
        for item in 0..2 {
            let alone = model.forward(
                &latents.narrow(0, item, 1)?,
                &timestep.narrow(0, item, 1)?,
                &class.narrow(0, item, 1)?,
            )?;
            assert!(largest_difference(&both.narrow(0, item, 1)?, &alone)? < 1e-4);
        }
    }
    Ok(())
}

#[test]
fn a_seed_gives_the_same_pixels_and_another_seed_others() -> Result<()> {
    for kind in KINDS {
        let model = trained(kind)?;
        let draw = |seed| {
            let job = Job { seed, ..job() };
            sample(model.as_ref(), &job, &mut Plain, || ())
        };
        let (first, again, other) = (draw(5)?, draw(5)?, draw(6)?);
        assert_eq!(largest_difference(&first, &again)?, 0.0);
        assert!(largest_difference(&first, &other)? > 0.1);
    }
    Ok(())
}

#[test]
fn batched_guidance_draws_what_flip_flop_draws() -> Result<()> {
    let model = trained(ModelKind::Dit)?;
    let draw = |mode| {
        let job = Job {
            mode,
            guided_share: 1.0,
            ..job()
        };
        sample(model.as_ref(), &job, &mut Plain, || ())
    };
    let difference = largest_difference(
        &draw(GuidanceMode::FlipFlop)?,
        &draw(GuidanceMode::Batched)?,
    )?;
    assert!(difference < 1e-3, "{difference}");
    Ok(())
}

#[test]
fn the_unconditional_step_is_dropped_after_its_share() -> Result<()> {
    let model = trained(ModelKind::Dit)?;
    let steps = |job: &Job| -> Result<Vec<String>> {
        let mut noting = Noting::default();
        sample(model.as_ref(), job, &mut noting, || ())?;
        Ok(noting.0)
    };
    assert_eq!(
        steps(&job())?,
        ["cond", "uncond", "cond", "uncond", "cond", "cond"]
    );
    let batched = Job {
        mode: GuidanceMode::Batched,
        ..job()
    };
    assert_eq!(steps(&batched)?, ["batched"; 4]);
    let unguided = Job {
        guidance: 1.0,
        ..job()
    };
    assert_eq!(steps(&unguided)?, ["cond"; 4]);
    Ok(())
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let bad = [
        Job { steps: 0, ..job() },
        Job {
            samples: 0,
            ..job()
        },
        Job {
            classes: vec![],
            ..job()
        },
        Job {
            classes: vec![10],
            ..job()
        },
        Job {
            guidance: f64::NAN,
            ..job()
        },
        Job {
            guided_share: 1.5,
            ..job()
        },
    ];
    for job in bad {
        assert!(matches!(job.check(), Err(Error::Setting(_))), "{job:?}");
    }
    assert!(job().check().is_ok());
}

#[test]
fn weights_that_do_not_fit_are_refused_with_a_reason() {
    let good = embedded(ModelKind::Unet);
    let mut not_finite = good.to_vec();
    let last = not_finite.len() - 2;
    // The last half-precision number becomes infinite.
    not_finite[last..].copy_from_slice(&[0x00, 0x7c]);
    let cases: [(&[u8], &str); 5] = [
        (&[], "not a safetensors file"),
        (b"digits", "not a safetensors file"),
        (&good[..good.len() / 2], "not a safetensors file"),
        (&not_finite, "not finite"),
        (embedded(ModelKind::Dit), "cannot find tensor"),
    ];
    for (bytes, reason) in cases {
        match load(ModelKind::Unet, Source::Bytes(bytes)) {
            Err(Error::Weights { why, .. }) => {
                assert!(why.contains(reason), "{why}");
                assert!(!why.contains('\n'), "{why}");
            }
            other => panic!("{reason}: {other:?}"),
        }
    }
}

/// Builds a layer twice over the same random numbers, to be trained and not.
fn both_ways<M: Module>(
    build: impl Fn(VarBuilder) -> candle_core::Result<M>,
    x: &Tensor,
) -> Result<(VarMap, Tensor, Tensor)> {
    let map = VarMap::new();
    let tracked = build(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
    let tensors = match map.data().lock() {
        Ok(data) => data
            .iter()
            .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
            .collect(),
        Err(poisoned) => panic!("{poisoned}"),
    };
    let plain = build(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu))?;
    let results = (tracked.forward(x)?, plain.forward(x)?);
    Ok((map, results.0, results.1))
}

#[test]
fn layers_answer_the_same_in_training_and_in_sampling() -> Result<()> {
    let image = rng::normal(&mut rng::seeded(3, &[]), (2, 8, 6, 10))?;
    let tokens = rng::normal(&mut rng::seeded(4, &[]), (2, 5, 8))?;
    for (trained, sampled) in [
        both_ways(|vb| Conv3x3::new(8, 3, vb), &image).map(|(_, a, b)| (a, b))?,
        both_ways(|vb| Conv1x1::new(8, 3, vb), &image).map(|(_, a, b)| (a, b))?,
        both_ways(|vb| GroupNorm::new(8, vb), &image).map(|(_, a, b)| (a, b))?,
        both_ways(|vb| Linear::new(8, 3, vb), &tokens).map(|(_, a, b)| (a, b))?,
        {
            let var = Var::from_tensor(&image)?;
            (upsample(&var)?, upsample(&image)?)
        },
    ] {
        assert_eq!(trained.dims(), sampled.dims());
        assert!(largest_difference(&trained, &sampled)? < 1e-5);
    }
    Ok(())
}

#[test]
fn gradients_of_the_training_layers_are_those_of_candle() -> Result<()> {
    let x = Var::from_tensor(&rng::normal(&mut rng::seeded(3, &[]), (2, 4, 6, 10))?)?;
    let target = rng::normal(&mut rng::seeded(9, &[]), (2, 3, 6, 10))?;
    let (map, ours, _) = both_ways(|vb| Conv3x3::new(4, 3, vb), &x)?;
    let weight = match map.data().lock() {
        Ok(data) => data["weight"].clone(),
        Err(poisoned) => panic!("{poisoned}"),
    };
    let candles = x.conv2d(&weight, 1, 1, 1, 1)?;
    let ours = (ours * &target)?.sum_all()?.backward()?;
    let candles = (candles * &target)?.sum_all()?.backward()?;
    for var in [&x, &weight] {
        match (ours.get(var), candles.get(var)) {
            (Some(a), Some(b)) => assert!(largest_difference(a, b)? < 1e-4),
            _ => panic!("a gradient is missing"),
        }
    }

    let ours = (upsample(&x)?.sqr()?.sum_all()?).backward()?;
    let candles = (x.upsample_nearest2d(12, 20)?.sqr()?.sum_all()?).backward()?;
    match (ours.get(&x), candles.get(&x)) {
        (Some(a), Some(b)) => assert!(largest_difference(a, b)? < 1e-4),
        _ => panic!("a gradient is missing"),
    }
    Ok(())
}
