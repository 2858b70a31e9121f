//! Both models over weights that come and go: the same bits at every budget, on compiled and on plain
//! memory.

use candle_core::{DType, Tensor};
use memory_compiler::Bytes;
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler_candle::{Options, PagedStats};
use memory_compiler_models::compiled::Compiled;
use memory_compiler_models::run::{GuidanceMode, Job, Plain, Stepper, sample};
use memory_compiler_models::sampler::Method;
use memory_compiler_models::weights::{Source, load, load_paged};
use memory_compiler_models::{Denoiser, ModelKind};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

const KINDS: [ModelKind; 2] = [ModelKind::Unet, ModelKind::Dit];

fn job() -> Job {
    Job {
        method: Method::Euler,
        steps: 6,
        guidance: 2.0,
        mode: GuidanceMode::FlipFlop,
        guided_share: 1.0,
        classes: vec![3, 8],
        samples: 1,
        seed: 7,
    }
}

fn draw(model: &dyn Denoiser, stepper: &mut impl Stepper) -> Vec<u32> {
    let images = sample(model, &job(), stepper, || ()).unwrap();
    let values = images.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    let values: Vec<f32> = Tensor::to_vec1(&values).unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// Bytes of a model's paged weights.
fn weights_of(kind: ModelKind) -> u64 {
    let (_model, paged) = load_paged(kind, Source::Embedded, Bytes::gib(1)).unwrap();
    paged.stats().weights.0
}

fn percent(whole: u64, percent: u64) -> Bytes {
    Bytes((whole * percent / 100).next_multiple_of(16 << 10))
}

#[test]
fn both_models_draw_the_same_bits_at_every_budget() {
    for kind in KINDS {
        let whole = weights_of(kind);
        let plain = draw(load(kind, Source::Embedded).unwrap().as_ref(), &mut Plain);
        for share in [100, 60, 30, 10] {
            let budget = percent(whole, share);
            let (model, paged) = load_paged(kind, Source::Embedded, budget).unwrap();
            let loaded = paged.stats();
            let mut compiled = Compiled::new(&Options {
                strict: true,
                ..Options::default()
            })
            .unwrap();
            assert_eq!(
                draw(model.as_ref(), &mut compiled),
                plain,
                "{kind:?} at {share} %"
            );
            let ran = paged.stats();
            let stats = compiled.stats();
            assert_eq!(
                (stats.breaks_total, stats.device_calls_step),
                (0, 0),
                "{stats}"
            );
            println!("{}", row(kind, share, budget, &loaded, &ran, stats.steps));
            assert!(ran.pager.limit == budget && ran.pager.used <= budget);
            if share == 100 {
                assert_eq!(ran.copied, loaded.copied, "what fits is copied once");
            } else {
                assert!(ran.copied > loaded.copied);
                assert!(ran.copied.0 < loaded.copied.0 + stats.steps * whole);
            }
            assert_eq!(draw(model.as_ref(), &mut Plain), plain, "without steps");
        }
    }
}

fn row(
    kind: ModelKind,
    share: u64,
    budget: Bytes,
    loaded: &PagedStats,
    ran: &PagedStats,
    steps: u64,
) -> String {
    format!(
        "{:<5} {share:>3} %  budget {budget:>10}  resident {:>10}  evicted {:>10}  copied a step {:>10}  \
         beyond {:>10}",
        kind.name(),
        ran.pager.resident,
        ran.weights.saturating_sub(ran.pager.resident),
        Bytes((ran.copied.0 - loaded.copied.0) / steps),
        ran.pager.beyond_peak,
    )
}

#[test]
fn a_model_may_outlive_its_pager_and_gives_all_memory_back() {
    let (model, paged) = load_paged(ModelKind::Dit, Source::Embedded, Bytes::mib(1)).unwrap();
    drop(paged);
    drop(model);
    // The addresses are gone: a new model is a new range.
    let (model, _paged) = load_paged(ModelKind::Dit, Source::Embedded, Bytes::mib(1)).unwrap();
    draw(model.as_ref(), &mut Plain);
}

#[test]
fn files_and_indexes_are_mapped_and_damage_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let whole = include_bytes!("../weights/dit.safetensors");
    std::fs::write(path("dit.safetensors"), whole).unwrap();
    let index = r#"{"weight_map": {"anything": "dit.safetensors"}}"#;
    std::fs::write(path("dit.safetensors.index.json"), index).unwrap();
    let plain = draw(
        load(ModelKind::Dit, Source::Embedded).unwrap().as_ref(),
        &mut Plain,
    );
    for name in ["dit.safetensors", "dit.safetensors.index.json"] {
        let file = path(name);
        let (model, _paged) =
            load_paged(ModelKind::Dit, Source::File(&file), Bytes::mib(1)).unwrap();
        assert_eq!(draw(model.as_ref(), &mut Plain), plain);
    }
    std::fs::write(path("short.safetensors"), &whole[..whole.len() / 2]).unwrap();
    std::fs::write(path("broken.json"), "{").unwrap();
    for name in ["short.safetensors", "broken.json", "absent.safetensors"] {
        let file = path(name);
        let error = load_paged(ModelKind::Dit, Source::File(&file), Bytes::mib(1)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(name), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
    let file = path("dit.safetensors");
    let error = load_paged(ModelKind::Unet, Source::File(&file), Bytes::mib(1));
    let text = error.unwrap_err().to_string();
    assert!(text.contains("do not fit the model unet: "), "{text}");
}
