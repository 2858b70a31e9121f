//! Both models on compiled memory: the same bits as on plain memory, without breaks or device calls.

use candle_core::{DType, Tensor};
use memory_compiler::Stats;
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler_candle::Options;
use memory_compiler_models::compiled::Compiled;
use memory_compiler_models::run::{GuidanceMode, Job, Plain, Stepper, sample};
use memory_compiler_models::sampler::Method;
use memory_compiler_models::weights::{Source, load};
use memory_compiler_models::{Denoiser, ModelKind};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

const METHODS: [Method; 3] = [Method::Euler, Method::Ddim, Method::Dpmpp2m];
const MODES: [GuidanceMode; 2] = [GuidanceMode::FlipFlop, GuidanceMode::Batched];

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

fn bits(images: &Tensor) -> Vec<u32> {
    let values = images.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    let values = values.to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

fn draw(model: &dyn Denoiser, job: &Job, stepper: &mut impl Stepper) -> Vec<u32> {
    bits(&sample(model, job, stepper, || ()).unwrap())
}

/// Draws with both; returns the numbers of the compiled run.
fn compare(kind: ModelKind, job: &Job, options: &Options) -> Stats {
    let model = load(kind, Source::Embedded).unwrap();
    let mut compiled = Compiled::new(options).unwrap();
    let images = draw(model.as_ref(), job, &mut compiled);
    assert!(
        images.iter().any(|&bits| bits != images[0]),
        "an image is not one colour"
    );
    assert_eq!(
        images,
        draw(model.as_ref(), job, &mut Plain),
        "{kind:?} {job:?}"
    );
    compiled.stats()
}

fn is_bit_identical_on_all_paths(kind: ModelKind) {
    for method in METHODS {
        for mode in MODES {
            let stats = compare(kind, &job(method, mode, 5), &Options::default());
            assert_eq!((stats.breaks_total, stats.bad_frees), (0, 0), "{stats}");
        }
    }
}

#[test]
fn a_unet_draws_the_same_bits_with_every_sampler_and_both_guidance_modes() {
    is_bit_identical_on_all_paths(ModelKind::Unet);
}

#[test]
fn a_dit_draws_the_same_bits_with_every_sampler_and_both_guidance_modes() {
    is_bit_identical_on_all_paths(ModelKind::Dit);
}

/// Runs until every name has settled, then asserts that nothing more is recorded or mapped.
fn settles(method: Method, mode: GuidanceMode, after: usize) {
    struct Watch {
        compiled: Compiled,
        runs: std::collections::HashMap<String, usize>,
        after: usize,
    }
    impl Stepper for Watch {
        fn step<T>(
            &mut self,
            name: &str,
            f: impl FnOnce() -> candle_core::Result<T>,
        ) -> candle_core::Result<T> {
            let result = self.compiled.step(name, f)?;
            let run = self.runs.entry(name.to_owned()).or_insert(0);
            *run += 1;
            let stats = self.compiled.stats();
            if *run >= self.after {
                assert_eq!(
                    (
                        stats.breaks_step,
                        stats.recorded_step,
                        stats.device_calls_step
                    ),
                    (0, 0, 0),
                    "run {run} of {name}"
                );
            }
            Ok(result)
        }
    }
    let model = load(ModelKind::Unet, Source::Embedded).unwrap();
    let compiled = Compiled::new(&Options {
        strict: true,
        ..Options::default()
    })
    .unwrap();
    let mut watch = Watch {
        compiled,
        runs: std::collections::HashMap::new(),
        after,
    };
    // Guidance to the end, so that every name runs as often as there are steps.
    let job = Job {
        guided_share: 1.0,
        ..job(method, mode, after + 3)
    };
    draw(model.as_ref(), &job, &mut watch);
    let names = if mode == GuidanceMode::FlipFlop { 2 } else { 1 };
    assert_eq!(watch.runs.len(), names);
    assert!(watch.runs.values().all(|&runs| runs == after + 3));
}

#[test]
fn strict_single_step_samplers_make_no_call_and_no_break_from_the_fourth_run_on() {
    for method in [Method::Euler, Method::Ddim] {
        for mode in MODES {
            settles(method, mode, 4);
        }
    }
}

#[test]
fn a_strict_multistep_sampler_makes_no_call_and_no_break_from_the_seventh_run_on() {
    for mode in MODES {
        settles(Method::Dpmpp2m, mode, 7);
    }
}

#[test]
fn flip_flop_holds_the_larger_of_both_calls_and_not_their_sum() {
    let stats = compare(
        ModelKind::Unet,
        &job(Method::Euler, GuidanceMode::FlipFlop, 9),
        &Options::default(),
    );
    let peaks: Vec<u64> = stats.branches.iter().map(|branch| branch.peak.0).collect();
    let names: Vec<&str> = stats.branches.iter().map(|branch| &*branch.name).collect();
    assert_eq!(names, ["cond", "uncond"]);
    let larger = peaks[0].max(peaks[1]);
    // Beside the step's own: survivors of both calls, and the first ones' places in the arena.
    assert!(stats.held.0 < larger + larger / 10, "{stats}");
    assert!(
        stats.held.0 <= stats.floor.0 + 4 * stats.granule.0,
        "{stats}"
    );
    assert!(
        stats
            .branches
            .iter()
            .all(|branch| branch.replays + 3 >= branch.runs),
        "{stats}"
    );
}

#[test]
fn scopes_of_the_model_show_where_its_memory_goes() {
    let stats = compare(
        ModelKind::Dit,
        &job(Method::Euler, GuidanceMode::Batched, 3),
        &Options::default(),
    );
    let peak_of = |path: &str| {
        stats
            .scopes
            .iter()
            .find(|scope| scope.path == path)
            .map(|scope| scope.peak)
    };
    assert!(peak_of("batched/block.0").is_some(), "{:?}", stats.scopes);
    assert!(
        stats
            .scopes
            .iter()
            .all(|scope| scope.peak <= peak_of("batched").unwrap())
    );
}

#[test]
fn a_budget_below_the_step_is_an_error_that_says_so() {
    let model = load(ModelKind::Dit, Source::Embedded).unwrap();
    let budget = Some(memory_compiler::Bytes::kib(256));
    let mut compiled = Compiled::new(&Options {
        budget,
        ..Options::default()
    })
    .unwrap();
    let job = job(Method::Euler, GuidanceMode::Batched, 2);
    let error = sample(model.as_ref(), &job, &mut compiled, || ()).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("over the budget of 256.00 KiB"),
        "{error}"
    );
    assert_eq!(error.to_string().lines().count(), 1);
}
