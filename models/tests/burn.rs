//! Both networks in Burn: the predictions of Candle's within a tolerance, and on compiled memory the same bits
//! as on plain memory.

use burn::tensor::Device;
use candle_core::{Device as Cpu, Tensor};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::{Bytes, Stats};
use memory_compiler_burn::Options;
use memory_compiler_models::burn::{Network, Session, device};
use memory_compiler_models::run::{GuidanceMode, Job, Plain, Predictor, sample, sample_from};
use memory_compiler_models::sampler::Method;
use memory_compiler_models::weights::{Source, load};
use memory_compiler_models::{ModelKind, NO_CLASS, Result, rng};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

const KINDS: [ModelKind; 2] = [ModelKind::Unet, ModelKind::Dit];
const METHODS: [Method; 3] = [Method::Euler, Method::Ddim, Method::Dpmpp2m];
const MODES: [GuidanceMode; 2] = [GuidanceMode::FlipFlop, GuidanceMode::Batched];

/// Most that a value of an image, between −1 and 1, may be off Candle's; 2.0e-5 was measured.
const TOLERANCE: f32 = 1e-4;

fn job(method: Method, mode: GuidanceMode, steps: usize) -> Job {
    Job {
        method,
        steps,
        guidance: 2.0,
        mode,
        guided_share: 0.66,
        classes: vec![3, 8],
        samples: 1,
        seed: 7,
    }
}

fn session(kind: ModelKind, options: Option<&Options>) -> Result<Session> {
    Session::load(kind, Source::Embedded, &Device::flex(), options)
}

fn values(images: &Tensor) -> Vec<f32> {
    images.flatten_all().unwrap().to_vec1().unwrap()
}

fn bits(images: &Tensor) -> Vec<u32> {
    values(images).into_iter().map(f32::to_bits).collect()
}

#[test]
fn images_are_those_of_candle_within_the_tolerance() -> Result<()> {
    for kind in KINDS {
        let candle = load(kind, Source::Embedded)?;
        let mut burn = session(kind, None)?;
        for method in METHODS {
            let job = job(method, GuidanceMode::FlipFlop, 12);
            let expected = values(&sample(candle.as_ref(), &job, &mut Plain, || ())?);
            let found = values(&sample_from(&mut burn, &job, || ())?);
            let differences = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
            let largest = differences.fold(0f32, f32::max);
            println!("{kind:?} {method:?}: off by at most {largest:e}");
            assert!(largest <= TOLERANCE, "{kind:?} {method:?}: {largest}");
            let range = |values: &[f32]| values.iter().fold(0f32, |most, x| most.max(x.abs()));
            assert!(range(&expected) > 0.5, "an image was drawn");
        }
    }
    Ok(())
}

/// Draws on both memories; returns the numbers of the compiled run.
fn compare(kind: ModelKind, job: &Job, options: &Options) -> Result<Stats> {
    let mut compiled = session(kind, Some(options))?;
    let images = bits(&sample_from(&mut compiled, job, || ())?);
    let plain = bits(&sample_from(&mut session(kind, None)?, job, || ())?);
    assert_eq!(images, plain, "{kind:?} {job:?}");
    Ok(compiled.stats().expect("it has a compiler"))
}

#[test]
fn both_networks_draw_the_same_bits_with_every_sampler_and_both_guidance_modes() -> Result<()> {
    for kind in KINDS {
        for method in METHODS {
            for mode in MODES {
                let stats = compare(kind, &job(method, mode, 5), &Options::default())?;
                assert_eq!((stats.breaks_total, stats.bad_frees), (0, 0), "{stats}");
            }
        }
    }
    Ok(())
}

/// Notes what each call did.
struct Watch {
    session: Session,
    calls: Vec<(String, Stats)>,
}

impl Predictor for Watch {
    fn device(&self) -> &Cpu {
        self.session.device()
    }

    fn predict(
        &mut self,
        step: &str,
        latents: &Tensor,
        timestep: &Tensor,
        class: &Tensor,
    ) -> Result<Tensor> {
        let prediction = self.session.predict(step, latents, timestep, class)?;
        let stats = self.session.stats().expect("it has a compiler");
        self.calls.push((step.to_owned(), stats));
        Ok(prediction)
    }
}

#[test]
fn strict_flip_flop_makes_no_call_and_no_break_from_the_third_run_on() -> Result<()> {
    for kind in KINDS {
        let options = Options {
            strict: true,
            ..Options::default()
        };
        let mut watch = Watch {
            session: session(kind, Some(&options))?,
            calls: Vec::new(),
        };
        let job = Job {
            guided_share: 1.0,
            ..job(Method::Euler, GuidanceMode::FlipFlop, 8)
        };
        sample_from(&mut watch, &job, || ())?;
        for name in ["cond", "uncond"] {
            let runs = watch.calls.iter().filter(|(step, _)| step == name);
            assert_eq!(runs.clone().count(), 8);
            for (run, (_, stats)) in runs.enumerate().skip(2) {
                let nothing = (
                    stats.breaks_step,
                    stats.recorded_step,
                    stats.device_calls_step,
                );
                assert_eq!(nothing, (0, 0, 0), "{kind:?}, run {run} of {name}: {stats}");
                assert!(stats.replayed_step > 50, "{kind:?}: {stats}");
            }
        }
    }
    Ok(())
}

#[test]
fn flip_flop_holds_the_larger_of_both_calls_and_not_their_sum() -> Result<()> {
    let job = job(Method::Euler, GuidanceMode::FlipFlop, 9);
    let stats = compare(ModelKind::Unet, &job, &Options::default())?;
    let names: Vec<&str> = stats.branches.iter().map(|branch| &*branch.name).collect();
    assert_eq!(names, ["cond", "uncond"]);
    let larger = stats
        .branches
        .iter()
        .map(|branch| branch.peak.0)
        .max()
        .unwrap();
    assert!(stats.held.0 < larger + larger / 10, "{stats}");
    assert!(
        stats.held.0 <= stats.floor.0 + 4 * stats.granule.0,
        "{stats}"
    );
    let scopes: Vec<&str> = stats.scopes.iter().map(|scope| &*scope.path).collect();
    for path in [
        "cond/down.1/attention",
        "uncond/up.0",
        "cond/embed/condition",
    ] {
        assert!(scopes.contains(&path), "{path}: {scopes:?}");
    }
    Ok(())
}

#[test]
fn batches_of_several_sizes_in_turn_become_branches_and_settle() -> Result<()> {
    let options = Options::default();
    let (mut compiled, mut plain) = (
        session(ModelKind::Unet, Some(&options))?,
        session(ModelKind::Unet, None)?,
    );
    for n in 0..9 {
        let batch = [1, 3, 2][n % 3];
        let latents = rng::normal(&mut rng::seeded(n as u64, &[]), (batch, 1, 28, 28))?;
        let timestep = Tensor::full(0.4f32, batch, &Cpu::Cpu)?;
        let class = Tensor::full(NO_CLASS, batch, &Cpu::Cpu)?;
        let found = compiled.predict("step", &latents, &timestep, &class)?;
        let expected = plain.predict("step", &latents, &timestep, &class)?;
        assert_eq!(bits(&found), bits(&expected), "call {n}");
        let stats = compiled.stats().expect("it has a compiler");
        if n >= 6 {
            assert_eq!(
                (stats.breaks_step, stats.device_calls_step),
                (0, 0),
                "{stats}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_budget_below_the_step_is_an_error_that_says_so() -> Result<()> {
    let options = Options {
        budget: Some(Bytes::kib(256)),
        ..Options::default()
    };
    let mut session = session(ModelKind::Dit, Some(&options))?;
    let job = job(Method::Euler, GuidanceMode::Batched, 2);
    let error = sample_from(&mut session, &job, || ())
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("over the budget of 256.00 KiB"),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1);
    Ok(())
}

#[test]
fn weights_and_devices_that_do_not_fit_are_refused_in_one_line() {
    if !cfg!(feature = "burn-cuda") {
        let error = device(Some(0)).unwrap_err().to_string();
        assert!(error.contains("--features burn-cuda"), "{error}");
    }
    let cpu = device(None).unwrap();
    let refused = |kind, source| {
        let error = Network::load(kind, source, &cpu).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        error
    };
    let dit = memory_compiler_models::weights::embedded(ModelKind::Dit);
    let error = refused(ModelKind::Unet, Source::Bytes(dit));
    assert!(error.contains("do not fit the model unet"), "{error}");
    let error = refused(ModelKind::Unet, Source::Bytes(b"nothing"));
    assert!(error.contains("not a safetensors file"), "{error}");
}
