//! Weights that come and go on the CPU: number formats, shards, and what is said of files that are not right.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Result, Tensor};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::pager::Pager;
use memory_compiler::{Bytes, scope};
use memory_compiler_candle::{Options, Paged, compiler_sharing, pager};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

const CPU: Device = Device::Cpu;
const SIDE: usize = 96;

/// A folder that goes with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("memory-compiler-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left of a test is no failure of it.
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn draw(names: &[&str], dtype: DType) -> HashMap<String, Tensor> {
    let draw = |name: &&str| {
        let drawn = Tensor::randn(0f32, 1f32, (SIDE, SIDE), &CPU).unwrap();
        ((*name).to_owned(), drawn.to_dtype(dtype).unwrap())
    };
    names.iter().map(draw).collect()
}

fn within(limit: Bytes) -> Pager {
    let options = Options {
        granule: Bytes::kib(16),
        ..Options::default()
    };
    pager(&CPU, &options, Some(limit)).unwrap()
}

/// Opens files of which nobody else knows. Tests run beside each other: each names its weights in its own way.
fn open(pager: &Pager, paths: &[&Path], dtype: DType) -> Result<Paged> {
    // SAFETY: the tests read a weight in its scope, and leave the files alone.
    unsafe { Paged::open(pager, &CPU, paths, dtype) }
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    let values = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    let values = values.to_vec1::<f64>().unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

#[test]
fn every_format_is_converted_as_candle_converts_it() {
    let folder = Folder::new("formats");
    let formats = [DType::F16, DType::BF16, DType::F32, DType::F64];
    for stored in formats {
        let path = folder.file(&format!("{stored:?}.safetensors"));
        let names = ["format.a.weight", "format.b.weight", "format.c.weight"];
        let tensors = draw(&names, stored);
        candle_core::safetensors::save(&tensors, &path).unwrap();
        for dtype in formats {
            let one = Bytes((SIDE * SIDE * dtype.size_in_bytes()) as u64);
            let pager = within(Bytes(one.0 + (32 << 10)));
            let paged = open(&pager, &[&path], dtype).unwrap();
            let vb = paged.var_builder();
            let get = |name: &&str| vb.get((SIDE, SIDE), name).unwrap();
            let weights: Vec<Tensor> = names.iter().map(get).collect();
            for _ in 0..2 {
                for (name, weight) in names.iter().zip(&weights) {
                    let _scope = scope(name.trim_end_matches(".weight"));
                    let truth = tensors[*name].to_dtype(dtype).unwrap();
                    assert!(bits(weight) == bits(&truth), "{stored:?} as {dtype:?}");
                }
            }
            let stats = paged.stats();
            assert!(stats.copied.0 > 3 * one.0, "they came back: {stats:?}");
            assert!(stats.resident <= stats.pager.weights_limit);
        }
    }
}

#[test]
fn shards_are_found_by_their_index() {
    let folder = Folder::new("shards");
    let (first, second) = (
        draw(&["shard.a.weight"], DType::F32),
        draw(&["shard.b.weight"], DType::F32),
    );
    for (name, tensors) in [("1.safetensors", &first), ("2.safetensors", &second)] {
        candle_core::safetensors::save(tensors, folder.file(name)).unwrap();
    }
    let index = folder.file("model.safetensors.index.json");
    let map =
        r#"{"weight_map": {"shard.a.weight": "1.safetensors", "shard.b.weight": "2.safetensors"}}"#;
    std::fs::write(&index, map).unwrap();
    let pager = within(Bytes::mib(1));
    let paged = open(&pager, &[&index], DType::F32).unwrap();
    for (name, tensors) in [("shard.a", &first), ("shard.b", &second)] {
        let full = format!("{name}.weight");
        let weight = paged.var_builder().get((SIDE, SIDE), &full).unwrap();
        let _scope = scope(name);
        assert!(bits(&weight) == bits(&tensors[&full]));
    }
    std::fs::remove_file(folder.file("2.safetensors")).unwrap();
    let error = open(&pager, &[&index], DType::F32).unwrap_err().to_string();
    assert!(error.contains("2.safetensors"), "{error}");
    for (text, reason) in [
        ("{", "EOF"),
        ("{}", "no weight_map"),
        (r#"{"weight_map": {"a": 1}}"#, "a shard is not a name"),
    ] {
        std::fs::write(&index, text).unwrap();
        let error = open(&pager, &[&index], DType::F32).unwrap_err().to_string();
        let named = error.contains("model.safetensors.index.json") && error.contains(reason);
        assert!(named, "{error}");
    }
}

#[test]
fn a_file_that_is_not_right_is_named_with_the_tensor_or_the_reason() {
    let folder = Folder::new("damage");
    let path = folder.file("whole.safetensors");
    candle_core::safetensors::save(&draw(&["a.weight"], DType::F32), &path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    damaged[8] = b'#';
    let cases: [(&str, &[u8]); 5] = [
        ("short", &whole[..whole.len() - 1]),
        ("header", &whole[..20]),
        ("nothing", &[]),
        ("damaged", &damaged),
        ("huge", &[0xff; 64]),
    ];
    let pager = within(Bytes::mib(1));
    for (name, bytes) in cases {
        let file = folder.file(&format!("{name}.safetensors"));
        std::fs::write(&file, bytes).unwrap();
        let error = open(&pager, &[&file], DType::F32).unwrap_err().to_string();
        let (file, reason) = error.split_once(": ").expect("a file and a reason");
        assert!(file.contains(name) && !reason.is_empty(), "{error}");
        assert_eq!(error.matches("safetensors: ").count(), 1, "{error}");
    }
    let absent = folder.file("absent.safetensors");
    let error = open(&pager, &[&absent], DType::F32).unwrap_err();
    let error = error.to_string();
    let told = error.lines().next().unwrap_or_default();
    assert_eq!(told.matches("absent.safetensors").count(), 1, "{error}");
    let paged = open(&pager, &[&path], DType::F32).unwrap();
    let vb = paged.var_builder();
    let missing = vb.get((SIDE, SIDE), "b.weight").unwrap_err().to_string();
    assert!(missing.contains("b.weight"), "{missing}");
    let misshapen = vb.get((2, 2), "a.weight").unwrap_err().to_string();
    assert!(misshapen.contains("a.weight"), "{misshapen}");
    let other = vb.get_with_hints_dtype((SIDE, SIDE), "a.weight", Default::default(), DType::F16);
    let other = other.unwrap_err().to_string();
    assert!(other.contains("a.weight"), "{other}");
}

#[test]
fn weights_and_steps_share_one_budget_and_what_does_not_fit_is_told() {
    let folder = Folder::new("budget");
    let path = folder.file("model.safetensors");
    let names = [
        "budget.a.weight",
        "budget.b.weight",
        "budget.c.weight",
        "budget.d.weight",
    ];
    candle_core::safetensors::save(&draw(&names, DType::F32), &path).unwrap();
    let one = Bytes::kib(48);
    let options = Options {
        granule: Bytes::kib(16),
        budget: Some(Bytes(6 * one.0)),
        ..Options::default()
    };
    let pager = pager(&CPU, &options, None).unwrap();
    let paged = open(&pager, &[&path], DType::F32).unwrap();
    let vb = paged.var_builder();
    let get = |name: &&str| vb.get((SIDE, SIDE), name).unwrap();
    let weights: Vec<Tensor> = names.iter().map(get).collect();
    let mut memory = compiler_sharing(&CPU, &options, &pager).unwrap();
    let x = Tensor::ones((SIDE, SIDE), DType::F32, &CPU).unwrap();
    let forward = |x: &Tensor| {
        let mut x = x.clone();
        for (name, weight) in names.iter().zip(&weights) {
            let _scope = scope(name.trim_end_matches(".weight"));
            x = (x * weight)?.tanh()?;
        }
        Ok(x)
    };
    let plain = bits(&forward(&x).unwrap());
    for _ in 0..6 {
        let output = memory.step(|| forward(&x)).unwrap();
        assert!(bits(&output) == plain);
        assert!(pager.stats().used <= Bytes(6 * one.0));
    }
    assert_eq!(memory.stats().device_calls_step, 0);
    // A step that needs all of it evicts what is not pinned, and a scope then says what it needs.
    let held: Vec<Tensor> = memory
        .step_named("all", || (0..6).map(|_| x.tanh()).collect::<Result<_>>())
        .unwrap_or_default();
    drop(held);
    let small = within(Bytes::kib(16));
    let small = open(&small, &[&path], DType::F32).unwrap();
    let told = small.var_builder().get((SIDE, SIDE), "budget.a.weight");
    // Nothing bounds the whole, so that it takes of the rest.
    assert!(told.is_ok());
    assert!(small.stats().pager.beyond_peak > Bytes::ZERO);
    let bounded = Options {
        budget: Some(Bytes::kib(32)),
        ..options
    };
    let bounded = memory_compiler_candle::pager(&CPU, &bounded, None).unwrap();
    let bounded = open(&bounded, &[&path], DType::F32).unwrap();
    let told = bounded.var_builder().get((SIDE, SIDE), "budget.a.weight");
    let told = told.unwrap_err().to_string();
    assert!(
        told.contains("weights that are used at once need 48.00 KiB"),
        "{told}"
    );
}

#[test]
fn a_step_returns_that_a_scope_s_weights_do_not_fit_and_the_next_one_runs() {
    let folder = Folder::new("scope");
    let path = folder.file("model.safetensors");
    let names = ["wide.a", "wide.b", "wide.c"];
    candle_core::safetensors::save(&draw(&names, DType::F32), &path).unwrap();
    // One of the three (48 KiB), and the step's own buffers (two of them).
    let options = Options {
        granule: Bytes::kib(16),
        budget: Some(Bytes::kib(144)),
        ..Options::default()
    };
    let pager = pager(&CPU, &options, Some(Bytes::kib(48))).unwrap();
    let paged = open(&pager, &[&path], DType::F32).unwrap();
    let vb = paged.var_builder();
    let weights = names.map(|name| vb.get((SIDE, SIDE), name).unwrap());
    let mut memory = compiler_sharing(&CPU, &options, &pager).unwrap();
    let sum = |name: &str| -> Result<Tensor> {
        let x = Tensor::ones((SIDE, SIDE), DType::F32, &CPU)?;
        let _scope = scope(name);
        weights[0].mul(&x)?.sum_all()
    };
    let mut sums = Vec::new();
    for _ in 0..3 {
        let told = memory.step(|| sum("wide")).unwrap_err().to_string();
        assert!(
            told.contains("scope wide: weights that are used at once need"),
            "{told}"
        );
        // A scope of its own for each fits.
        let narrow = memory.step_named("narrow", || sum("wide.a")).unwrap();
        sums.push(bits(&narrow));
    }
    assert!(sums[0] == sums[1] && sums[1] == sums[2]);
    let stats = paged.stats();
    assert!(stats.pager.used <= Bytes::kib(144), "{stats:?}");
}

#[test]
fn a_weight_that_does_not_fit_is_refused_alike_each_time_and_leaves_room_for_the_others() {
    let folder = Folder::new("refused");
    let path = folder.file("model.safetensors");
    let names = ["kept.a", "kept.b"];
    let mut tensors = draw(&names, DType::F32);
    let wide = Tensor::ones((3 * SIDE, SIDE), DType::F32, &CPU).unwrap();
    tensors.insert("refused.wide".to_owned(), wide);
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let options = Options {
        granule: Bytes::kib(16),
        budget: Some(Bytes::kib(96)),
        ..Options::default()
    };
    let pager = pager(&CPU, &options, None).unwrap();
    let paged = open(&pager, &[&path], DType::F32).unwrap();
    let vb = paged.var_builder();
    for _ in 0..3 {
        let told = vb.get((3 * SIDE, SIDE), "refused.wide").unwrap_err();
        let told = told.to_string();
        let needed = "weights that are used at once need 112.00 KiB, and 96.00 KiB is what";
        assert!(told.contains(needed), "{told}");
        assert_eq!(paged.stats().weights, Bytes::ZERO);
    }
    let weights = names.map(|name| vb.get((SIDE, SIDE), name).unwrap());
    assert_eq!(paged.stats().weights, Bytes::kib(72));
    // What was refused is no weight: its scope needs none.
    paged
        .run(|| {
            let _scope = scope("refused");
            Ok(())
        })
        .unwrap();
    for (name, weight) in names.iter().zip(&weights) {
        let _scope = scope(name);
        assert!(bits(weight) == bits(&tensors[*name]));
    }
}

#[test]
fn scopes_that_take_turns_with_all_of_the_budget_run_in_whatever_order_they_were_loaded() {
    let folder = Folder::new("turns");
    let path = folder.file("model.safetensors");
    // Five pages, and three of them at once: neither of the scopes leaves room for the other one.
    let (small, large) = ((SIDE, 85), (SIDE, 120));
    let draw = |shape| Tensor::randn(0f32, 1f32, shape, &CPU).unwrap();
    let tensors = HashMap::from([
        ("turn.small".to_owned(), draw(small)),
        ("turn.large".to_owned(), draw(large)),
    ]);
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let options = Options {
        granule: Bytes::kib(16),
        budget: Some(Bytes::kib(48)),
        ..Options::default()
    };
    let parts = [("turn.small", small), ("turn.large", large)];
    for order in [[0, 1], [1, 0]] {
        let pager = pager(&CPU, &options, None).unwrap();
        let paged = open(&pager, &[&path], DType::F32).unwrap();
        let weights = order.map(|at| {
            let (name, shape) = parts[at];
            (name, paged.var_builder().get(shape, name).unwrap())
        });
        for _ in 0..3 {
            for (name, weight) in &weights {
                let read = paged.run(|| {
                    let _scope = scope(name);
                    Ok(bits(weight))
                });
                assert!(read.unwrap() == bits(&tensors[*name]), "{name}");
            }
        }
        // Both at once are told as the sum.
        let told = paged.run(|| {
            let _scope = scope("turn");
            Ok(())
        });
        let told = told.unwrap_err().to_string();
        let needed = "scope turn: weights that are used at once need 80.00 KiB, and 48.00 KiB is";
        assert!(told.contains(needed), "{told}");
        assert!(pager.stats().used <= Bytes::kib(48));
    }
}

#[test]
fn threads_that_load_a_weight_at_once_get_the_same_one() {
    let folder = Folder::new("race");
    let path = folder.file("model.safetensors");
    let names: Vec<String> = (0..24).map(|at| format!("race.{at}")).collect();
    let refs: Vec<&str> = names.iter().map(String::as_str).collect();
    candle_core::safetensors::save(&draw(&refs, DType::F32), &path).unwrap();
    for _ in 0..20 {
        let pager = within(Bytes::mib(4));
        let paged = open(&pager, &[&path], DType::F32).unwrap();
        let vb = paged.var_builder();
        let start = AtomicUsize::new(0);
        let load = || -> Result<Vec<Tensor>> {
            let load = |(at, name): (usize, &String)| {
                start.fetch_add(1, Ordering::SeqCst);
                // Without sleep, so that both go at the same moment.
                while start.load(Ordering::SeqCst) < 2 * (at + 1) {
                    std::hint::spin_loop();
                }
                vb.get((SIDE, SIDE), name)
            };
            // All of them, so that neither thread waits for the other one for ever.
            let loaded: Vec<Result<Tensor>> = names.iter().enumerate().map(load).collect();
            loaded.into_iter().collect()
        };
        let (first, second) = std::thread::scope(|scope| {
            let other = scope.spawn(load);
            (load(), other.join().unwrap())
        });
        for (first, second) in first.unwrap().iter().zip(&second.unwrap()) {
            assert_eq!(first.id(), second.id());
        }
        assert_eq!(paged.stats().weights, Bytes::kib(36 * 24));
    }
}

#[test]
fn two_models_with_weights_of_one_name_are_told_apart_by_a_scope_around_each() {
    let folder = Folder::new("twins");
    let files = ["first", "second"].map(|name| folder.file(&format!("{name}.safetensors")));
    let drawn = files.each_ref().map(|path| {
        let drawn = draw(&["twin.a", "twin.b"], DType::F32);
        candle_core::safetensors::save(&drawn, path).unwrap();
        drawn
    });
    // One weight each.
    let pagers = [within(Bytes::kib(48)), within(Bytes::kib(48))];
    let models = [0, 1].map(|at| open(&pagers[at], &[&files[at]], DType::F32).unwrap());
    let weights = models.each_ref().map(|paged| {
        let vb = paged.var_builder();
        ["twin.a", "twin.b"].map(|name| vb.get((SIDE, SIDE), name).unwrap())
    });
    let copied = || models.each_ref().map(|paged| paged.stats().copied);
    let read = |model: usize| {
        let _model = scope(["first", "second"][model]);
        for (weight, name) in weights[model].iter().zip(["twin.a", "twin.b"]) {
            let _scope = scope(name);
            assert!(bits(weight) == bits(&drawn[model][name]));
        }
    };
    let before = copied();
    read(0);
    assert!(copied()[1] > before[1], "the other one's came in too");
    models[0].only_in("first");
    models[1].only_in("second");
    for _ in 0..2 {
        let before = copied();
        read(0);
        assert!(copied()[0] > before[0]);
        assert_eq!(copied()[1], before[1]);
        read(1);
        assert!(copied()[1] > before[1]);
    }
}
