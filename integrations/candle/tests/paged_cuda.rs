//! Weights that come and go on a GPU: the same bits at every budget, for a model that names no scopes. Without a
//! GPU each test says so and passes.

#![cfg(feature = "cuda")]

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Result, Storage, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use memory_compiler::Bytes;
use memory_compiler_candle::{Options, Paged, PagedStats, compiler_sharing, pager};

memory_compiler::interpose_cuda!();
memory_compiler::page_cuda_weights!();

const WIDTH: usize = 1024;
const DEPTH: usize = 40;

fn gpu() -> Option<Device> {
    if memory_compiler::device::Cuda::count() == 0 {
        eprintln!("SKIPPED: no GPU here");
        return None;
    }
    Some(Device::new_cuda(0).unwrap())
}

/// Layers of 2 or 4 MiB, used in order, the first one twice.
struct Model(Vec<Linear>);

impl Model {
    fn new(vb: &VarBuilder) -> Result<Self> {
        let layer = |index: usize| linear(WIDTH, WIDTH, vb.pp(format!("layers.{index}")));
        Ok(Self((0..DEPTH).map(layer).collect::<Result<_>>()?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in self.0.iter().chain(self.0.first()) {
            x = (layer.forward(&x)?.relu()? + &x)?;
            x = x.broadcast_div(&x.sqr()?.mean_keepdim(1)?.sqrt()?)?;
        }
        Ok(x)
    }
}

/// A file of weights, of half precision.
fn file(name: &str) -> PathBuf {
    let device = Device::Cpu;
    let mut tensors = HashMap::new();
    for index in 0..DEPTH {
        let draw = |shape: &[usize], deviation: f32| {
            let drawn = Tensor::randn(0.0, deviation, shape, &device).unwrap();
            drawn.to_dtype(DType::F16).unwrap()
        };
        let weight = draw(&[WIDTH, WIDTH], 1.0 / 32.0);
        tensors.insert(format!("layers.{index}.weight"), weight);
        tensors.insert(format!("layers.{index}.bias"), draw(&[WIDTH], 0.1));
    }
    let name = format!("memory-compiler-{}-{name}.safetensors", std::process::id());
    let path = std::env::temp_dir().join(name);
    candle_core::safetensors::save(&tensors, &path).unwrap();
    path
}

fn bits(x: &Tensor) -> Vec<u32> {
    let values = x.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
    let values = values.to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

fn input(device: &Device, dtype: DType) -> Tensor {
    device.set_seed(7).unwrap();
    let x = Tensor::randn(0f32, 1f32, (64, WIDTH), device).unwrap();
    x.to_dtype(dtype).unwrap()
}

fn row(dtype: DType, share: u64, stats: &PagedStats) -> String {
    format!(
        "{dtype:?} {share:>3} %  limit {:>9}  resident {:>9}  copied {:>10}  waited {:?}  calls {}",
        stats.pager.weights_limit,
        stats.resident,
        stats.copied,
        stats.waited,
        stats.pager.device_calls
    )
}

#[test]
fn the_same_bits_at_every_budget_and_no_memory_call_in_a_step() {
    let Some(device) = gpu() else { return };
    let path = file("bits");
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let x = input(&device, dtype);
        // SAFETY: nobody else knows the file.
        let plain = unsafe { VarBuilder::from_mmaped_safetensors(&[&path], dtype, &device) };
        let plain = bits(&Model::new(&plain.unwrap()).unwrap().forward(&x).unwrap());
        let whole = (DEPTH * (WIDTH * WIDTH + WIDTH) * dtype.size_in_bytes()) as u64;
        for share in [110, 100, 60, 30, 10] {
            let limit = Bytes(whole * share / 100);
            let pager = pager(&device, &Options::default(), Some(limit)).unwrap();
            // SAFETY: the model uses its weights by Candle's work alone, and nobody else knows the file.
            let paged = unsafe { Paged::open(&pager, &device, &[&path], dtype) }.unwrap();
            let model = Model::new(&paged.var_builder()).unwrap();
            assert_eq!(paged.stats().resident, Bytes::ZERO, "loading takes nothing");
            let mut memory = compiler_sharing(&device, &Options::default(), &pager).unwrap();
            let mut before = PagedStats::default();
            for step in 0..8 {
                before = paged.stats();
                let output = memory.step(|| model.forward(&x)).unwrap();
                assert!(bits(&output) == plain, "{dtype:?} {share} % step {step}");
            }
            let after = paged.stats();
            println!("{}", row(dtype, share, &after));
            assert_eq!(after.pager.device_calls, before.pager.device_calls);
            assert_eq!(memory.stats().device_calls_step, 0);
            assert!(after.resident <= limit);
            if share == 110 {
                assert_eq!(after.copied, before.copied, "what fits is copied once");
            } else if share < 100 {
                assert!(after.copied > before.copied);
            }
            // A tensor may outlive its pager, and reading one from the host is a use too.
            let first = model.0[0].weight().clone();
            drop(model);
            let read = bits(&first);
            assert!(read.iter().any(|&bits| bits != 0));
            drop((memory, paged, pager, first));
        }
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_weight_that_does_not_fit_is_an_error_that_says_so() {
    let Some(device) = gpu() else { return };
    let path = file("large");
    let pager = pager(&device, &Options::default(), Some(Bytes::mib(2))).unwrap();
    // SAFETY: the model uses its weights by Candle's work alone, and nobody else knows the file.
    let paged = unsafe { Paged::open(&pager, &device, &[&path], DType::F32) }.unwrap();
    let model = Model::new(&paged.var_builder()).unwrap();
    let mut memory = compiler_sharing(&device, &Options::default(), &pager).unwrap();
    let x = input(&device, DType::F32);
    let error = memory.step(|| model.forward(&x)).unwrap_err().to_string();
    assert!(
        error.contains("weights that are used at once need"),
        "{error}"
    );
    // The device is as good as new.
    assert!(bits(&x.relu().unwrap()).len() == 64 * WIDTH);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_second_model_takes_only_the_shortfall_and_going_back_brings_only_that_in() {
    let Some(device) = gpu() else { return };
    let path = file("second");
    let pager = pager(&device, &Options::default(), Some(Bytes::mib(176))).unwrap();
    // SAFETY: the models use their weights by Candle's work alone, and nobody else knows the file.
    let paged = unsafe { Paged::open(&pager, &device, &[&path], DType::F32) }.unwrap();
    let model = Model::new(&paged.var_builder()).unwrap();
    // SAFETY: as above.
    let other = unsafe { Paged::open(&pager, &device, &[&path], DType::F32) }.unwrap();
    let mut decoder = Model::new(&other.var_builder()).unwrap();
    decoder.0.truncate(10);
    let mut memory = compiler_sharing(&device, &Options::default(), &pager).unwrap();
    let x = input(&device, DType::F32);
    let plain = bits(&model.forward(&x).unwrap());
    let decoded = bits(&decoder.forward(&x).unwrap());
    for _ in 0..3 {
        for _ in 0..4 {
            assert!(bits(&memory.step(|| model.forward(&x)).unwrap()) == plain);
        }
        let (before, calls) = (paged.stats(), pager.stats().device_calls);
        assert!(bits(&memory.step(|| model.forward(&x)).unwrap()) == plain);
        assert_eq!(
            (paged.stats().copied, pager.stats().device_calls),
            (before.copied, calls)
        );
        paged.rest();
        for _ in 0..2 {
            let output = memory.step_named("decode", || decoder.forward(&x)).unwrap();
            assert!(bits(&output) == decoded);
        }
        other.rest();
        let left = paged.stats().resident;
        let shortfall = before.resident.0 - left.0;
        let went = before.copied;
        assert!(bits(&memory.step(|| model.forward(&x)).unwrap()) == plain);
        let back = paged.stats().copied.0 - went.0;
        println!(
            "{} before, {left} left, {} came back",
            before.resident,
            Bytes(back)
        );
        // 160 MiB and 40 MiB of weights, whole pages, in 176 MiB.
        assert!(
            shortfall <= 28 << 20 && back == shortfall,
            "{shortfall} {back}"
        );
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn threads_take_turns_with_the_same_weights() {
    let Some(device) = gpu() else { return };
    let path = file("threads");
    let pager = pager(&device, &Options::default(), Some(Bytes::mib(40))).unwrap();
    // SAFETY: the model uses its weights by Candle's work alone, and nobody else knows the file.
    let paged = unsafe { Paged::open(&pager, &device, &[&path], DType::F32) }.unwrap();
    let model = Model::new(&paged.var_builder()).unwrap();
    let x = input(&device, DType::F32);
    let plain = bits(&model.forward(&x).unwrap());
    for _ in 0..6 {
        // Each thread's stream is another one, and is not waited for in between but for its output.
        let output = std::thread::scope(|scope| {
            let forward = || bits(&model.forward(&x).unwrap());
            scope.spawn(forward).join().unwrap()
        });
        assert!(output == plain);
        assert!(bits(&model.forward(&x).unwrap()) == plain);
    }
    std::fs::remove_file(path).unwrap();
}

/// A copy of a weight has the weight's bytes on whichever stream it runs: they arrive before it there, and do not leave
/// before it has read them.
#[test]
fn a_weight_that_is_copied_on_another_stream_is_there_until_it_is_copied() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(cuda) = &device else { return };
    let path = file("streams");
    let pager = pager(&device, &Options::default(), Some(Bytes::mib(40))).unwrap();
    // SAFETY: the model uses its weights by Candle's work and by copies that the hook sees, and nobody else knows the
    // file.
    let paged = unsafe { Paged::open(&pager, &device, &[&path], DType::F32) }.unwrap();
    let model = Model::new(&paged.var_builder()).unwrap();
    let x = input(&device, DType::F32);
    let plain = bits(&model.forward(&x).unwrap());
    let truth: Vec<Vec<u32>> = model.0.iter().map(|layer| bits(layer.weight())).collect();
    let own = cuda.cuda_stream();
    let other = own.context().new_stream().unwrap();
    for round in 0..6 {
        let mut copies = Vec::new();
        for (number, layer) in model.0.iter().enumerate() {
            // One alone, two in turn, and all on the other.
            let is_other = match round % 3 {
                0 => number % 2 == 0,
                1 => number % 5 != 0,
                _ => true,
            };
            let stream = if is_other { &other } else { &own };
            let (storage, _) = layer.weight().storage_and_layout();
            let Storage::Cuda(storage) = &*storage else {
                panic!("it is on the GPU");
            };
            let weight = storage.as_cuda_slice::<f32>().unwrap();
            let mut copy = stream.clone_dtod(weight).unwrap();
            // Several, so that the last ones run when others come in.
            for _ in 0..8 {
                stream.memcpy_dtod(weight, &mut copy).unwrap();
            }
            copies.push(copy);
        }
        // The model's own work takes their place.
        let output = model.forward(&x).unwrap();
        other.synchronize().unwrap();
        own.synchronize().unwrap();
        for (number, copy) in copies.iter().enumerate() {
            let seen = own.clone_dtoh(copy).unwrap();
            let seen: Vec<u32> = seen.into_iter().map(f32::to_bits).collect();
            assert!(seen == truth[number], "round {round}, layer {number}");
        }
        assert!(bits(&output) == plain, "round {round}");
    }
    std::fs::remove_file(path).unwrap();
}

/// A thread that was told that it may use weights has not enqueued its work yet when another one uses others.
#[test]
fn threads_use_the_same_weights_at_once() {
    let Some(device) = gpu() else { return };
    let path = file("at-once");
    let pager = pager(&device, &Options::default(), Some(Bytes::mib(40))).unwrap();
    // SAFETY: the model uses its weights by Candle's work alone, and nobody else knows the file.
    let paged = unsafe { Paged::open(&pager, &device, &[&path], DType::F32) }.unwrap();
    let model = Model::new(&paged.var_builder()).unwrap();
    let x = input(&device, DType::F32);
    let plain = bits(&model.forward(&x).unwrap());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..4 {
                    assert!(bits(&model.forward(&x).unwrap()) == plain);
                }
            });
        }
    });
    std::fs::remove_file(path).unwrap();
}

#[test]
fn another_thread_may_have_the_weights_rest_while_the_work_on_them_runs() {
    let Some(device) = gpu() else { return };
    let path = file("rest");
    let pager = pager(&device, &Options::default(), Some(Bytes::mib(40))).unwrap();
    // SAFETY: the model uses its weights by Candle's work alone, on this thread, and nobody else knows the file.
    let paged = unsafe { Paged::open(&pager, &device, &[&path], DType::F32) }.unwrap();
    let model = Model::new(&paged.var_builder()).unwrap();
    let x = input(&device, DType::F32);
    let normal = |x: Tensor| x.broadcast_div(&x.sqr()?.mean_keepdim(1)?.sqrt()?);
    // Much work on the first layer, then a little on all others, which take its place.
    let wide = Tensor::randn(0f32, 1f32, (8192, WIDTH), &device).unwrap();
    let long = || -> Result<Tensor> {
        let first = |x: Tensor, _| normal(model.0[0].forward(&x)?);
        (0..200).try_fold(wide.clone(), first)
    };
    let others = || -> Result<Tensor> {
        let next = |x: Tensor, layer: &Linear| normal(layer.forward(&x)?);
        model.0[1..].iter().try_fold(x.clone(), next)
    };
    let plain = (bits(&long().unwrap()), bits(&others().unwrap()));
    for round in 0..6 {
        let first = long().unwrap();
        // What is enqueued is not waited for: the other thread's stream knows nothing of it.
        std::thread::scope(|scope| {
            scope.spawn(|| paged.rest()).join().unwrap();
        });
        let second = others().unwrap();
        assert!(bits(&first) == plain.0, "round {round}");
        assert!(bits(&second) == plain.1, "round {round}");
        // The second time there is nothing to leave.
        paged.rest();
        paged.rest();
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn threads_that_load_a_weight_at_once_get_the_same_one() {
    let Some(device) = gpu() else { return };
    let path = file("race");
    let pager = pager(&device, &Options::default(), None).unwrap();
    for _ in 0..4 {
        // SAFETY: the weights are used by Candle's work alone, on this thread, and nobody else knows the file.
        let paged = unsafe { Paged::open(&pager, &device, &[&path], DType::F32) }.unwrap();
        let vb = paged.var_builder();
        let load = || Model::new(&vb);
        let (first, second) = std::thread::scope(|scope| {
            let other = scope.spawn(load);
            (load(), other.join().unwrap())
        });
        let (first, second) = (first.unwrap(), second.unwrap());
        for (first, second) in first.0.iter().zip(&second.0) {
            assert_eq!(first.weight().id(), second.weight().id());
        }
        let whole = (DEPTH * (WIDTH * WIDTH + WIDTH) * size_of::<f32>()) as u64;
        assert_eq!(paged.stats().weights, Bytes(whole));
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_missing_a_misshapen_and_a_late_tensor_are_named() {
    let Some(device) = gpu() else { return };
    let path = file("names");
    let pager = pager(&device, &Options::default(), None).unwrap();
    // SAFETY: the weights are used by Candle's work alone, and nobody else knows the file.
    let paged = unsafe { Paged::open(&pager, &device, &[&path], DType::F32) }.unwrap();
    let vb = paged.var_builder();
    for (name, shape) in [
        ("absent.weight", [WIDTH, WIDTH]),
        ("layers.1.weight", [2, 2]),
    ] {
        let error = vb.get(&shape[..], name).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let weight = vb.get((WIDTH, WIDTH), "layers.0.weight").unwrap();
    assert!(bits(&weight).len() == WIDTH * WIDTH);
    let late = vb
        .get((WIDTH, WIDTH), "layers.2.weight")
        .unwrap_err()
        .to_string();
    assert!(late.contains("layers.2.weight"), "{late}");
    std::fs::remove_file(path).unwrap();
}
