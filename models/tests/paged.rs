//! Both models over weights that come and go: the same bits at every budget, on compiled and on plain
//! memory.

use candle_core::{DType, Device, Tensor};
use memory_compiler::Bytes;
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::pager::Pager;
use memory_compiler_candle::{Options, Paged, PagedStats};
use memory_compiler_models::compiled::Compiled;
use memory_compiler_models::run::{GuidanceMode, Job, Plain, Stepper, sample};
use memory_compiler_models::sampler::Method;
use memory_compiler_models::weights::{GRANULE, Source, load, load_paged};
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

/// A pager of which weights may have some of a budget.
fn pager(budget: Option<Bytes>, weights: Bytes) -> Pager {
    let options = Options {
        budget,
        granule: GRANULE,
        ..Options::default()
    };
    memory_compiler_candle::pager(&Device::Cpu, &options, Some(weights)).unwrap()
}

fn load_within(kind: ModelKind, source: Source, budget: Bytes) -> (Box<dyn Denoiser>, Paged) {
    load_paged(kind, source, &Device::Cpu, &pager(None, budget)).unwrap()
}

/// Bytes of a model's paged weights.
fn weights_of(kind: ModelKind) -> u64 {
    let (_model, paged) = load_within(kind, Source::Embedded, Bytes::gib(1));
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
            let pager = pager(Some(Bytes::mib(24)), budget);
            let source = Source::Embedded;
            let (model, paged) = load_paged(kind, source, &Device::Cpu, &pager).unwrap();
            let loaded = paged.stats();
            let options = Options {
                strict: true,
                ..Options::default()
            };
            let mut compiled = Compiled::sharing(&Device::Cpu, &options, &pager).unwrap();
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
            assert!(ran.pager.weights_limit == budget && ran.pager.resident <= budget);
            assert_eq!(
                (ran.pager.limit, ran.pager.used),
                (Bytes::mib(24), Bytes(ran.pager.resident.0 + stats.held.0))
            );
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
        ran.resident,
        ran.weights.saturating_sub(ran.resident),
        Bytes((ran.copied.0 - loaded.copied.0) / steps),
        ran.pager.beyond_peak,
    )
}

#[test]
fn a_model_may_outlive_its_pager_and_gives_all_memory_back() {
    let (model, paged) = load_within(ModelKind::Dit, Source::Embedded, Bytes::mib(1));
    drop(paged);
    drop(model);
    // The addresses are gone: a new model is a new range.
    let (model, _paged) = load_within(ModelKind::Dit, Source::Embedded, Bytes::mib(1));
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
        let (model, _paged) = load_within(ModelKind::Dit, Source::File(&file), Bytes::mib(1));
        assert_eq!(draw(model.as_ref(), &mut Plain), plain);
    }
    std::fs::write(path("short.safetensors"), &whole[..whole.len() / 2]).unwrap();
    std::fs::write(path("broken.json"), "{").unwrap();
    for name in ["short.safetensors", "broken.json", "absent.safetensors"] {
        let file = path(name);
        let pager = pager(None, Bytes::mib(1));
        let source = Source::File(&file);
        let error = load_paged(ModelKind::Dit, source, &Device::Cpu, &pager).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(name), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
    let file = path("dit.safetensors");
    let pager = pager(None, Bytes::mib(1));
    let error = load_paged(ModelKind::Unet, Source::File(&file), &Device::Cpu, &pager);
    let text = error.unwrap_err().to_string();
    assert!(text.contains("do not fit the model unet: "), "{text}");
}
