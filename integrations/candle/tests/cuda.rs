//! Candle's tensors on a GPU. Without a GPU each test says so and passes.

#![cfg(feature = "cuda")]

use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};

use candle_core::{DType, Device, Result, Tensor};
use memory_compiler::device::{Cuda, Device as _};
use memory_compiler::{Bytes, hook, pause, scope};
use memory_compiler_candle::{Options, compiler, compiler_with};

memory_compiler::interpose_cuda!();

/// The driver's calls are counted for the whole program: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn gpu(ordinal: usize) -> Option<(Device, MutexGuard<'static, ()>)> {
    if Cuda::count() <= ordinal {
        eprintln!("SKIPPED: no GPU of number {ordinal} here");
        return None;
    }
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Some((Device::new_cuda(ordinal).expect("the GPU"), alone))
}

struct Network {
    kernel: Tensor,
    weight: Tensor,
    input: Tensor,
}

impl Network {
    fn new(device: &Device) -> Result<Self> {
        device.set_seed(3)?;
        Ok(Self {
            kernel: (Tensor::randn(0f32, 1f32, (16, 16, 3, 3), device)? * 0.1)?,
            weight: (Tensor::randn(0f32, 1f32, (1024, 1024), device)? * 0.03)?,
            input: Tensor::randn(0f32, 1f32, (2, 16, 32, 32), device)?,
        })
    }

    /// Convolution, attention over channels and a residual, a few times.
    fn forward(&self, blocks: usize) -> Result<Tensor> {
        let mut x = self.input.clone();
        for _ in 0..blocks {
            let _scope = scope("block");
            let h = x.conv2d(&self.kernel, 1, 1, 1, 1)?.relu()?;
            let flat = h.reshape((2, 16, 1024))?;
            let rows = flat.reshape((32, 1024))?.matmul(&self.weight)?;
            let keys = rows.reshape((2, 16, 1024))?;
            let scores = flat.matmul(&keys.t()?)?.affine(1e-3, 0.0)?.exp()?;
            let scores = scores.broadcast_div(&scores.sum_keepdim(2)?)?;
            let mixed = scores.matmul(&flat)?.reshape((2, 16, 32, 32))?;
            x = (x + mixed)?.tanh()?;
        }
        Ok(x)
    }
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let values = tensor.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

fn driver_calls() -> u64 {
    let counts = hook::cuda::counts();
    counts.allocs + counts.frees
}

#[test]
fn a_recorded_and_a_replayed_step_compute_the_same_bits_as_the_drivers_allocator() -> Result<()> {
    let Some((device, _alone)) = gpu(0) else {
        return Ok(());
    };
    let network = Network::new(&device)?;
    let expected = bits(&network.forward(6)?)?;
    assert!(
        expected
            .iter()
            .all(|&bits| f32::from_bits(bits).is_finite())
    );
    let mut memory = compiler(&device)?;
    for turn in 0..4 {
        let before = driver_calls();
        let output = memory.step(|| network.forward(6))?;
        let passed = driver_calls() - before;
        assert_eq!(bits(&output)?, expected, "step {turn}");
        drop(output);
        let stats = memory.stats();
        assert_eq!((passed, stats.breaks_step), (0, 0), "step {turn}");
        assert!(
            turn == 0 || stats.device_calls_step == 0,
            "step {turn}: {stats}"
        );
        assert_eq!(stats.live, Bytes::ZERO);
    }
    Ok(())
}

#[test]
fn a_graph_break_settles_and_both_branches_replay() -> Result<()> {
    let Some((device, _alone)) = gpu(0) else {
        return Ok(());
    };
    let network = Network::new(&device)?;
    let expected = [bits(&network.forward(1)?)?, bits(&network.forward(3)?)?];
    let mut memory = compiler(&device)?;
    for turn in 0..6 {
        let which = turn % 2;
        let half = network.input.narrow(2, 0, 16)?;
        let output = memory.step(|| {
            if which == 1 {
                // A size of its own.
                let sum = (&half + &half)?;
                drop(sum);
            }
            network.forward(1 + 2 * which)
        })?;
        assert_eq!(bits(&output)?, expected[which]);
        let stats = memory.stats();
        assert!(turn < 2 || (stats.breaks_step, stats.device_calls_step) == (0, 0));
    }
    Ok(())
}

#[test]
fn a_tensor_that_another_thread_still_uses_when_it_drops_it_is_not_overwritten() -> Result<()> {
    let Some((device, _alone)) = gpu(0) else {
        return Ok(());
    };
    let mut memory = compiler(&device)?;
    for turn in 0..8_u8 {
        let (send, receive) = mpsc::channel::<Tensor>();
        let reader = std::thread::spawn(move || -> Result<Vec<f32>> {
            let mut sums = Vec::new();
            for tensor in receive {
                // Work on this thread's own stream, some of it still running when the tensor goes.
                let mut sum = tensor.sqr()?;
                for _ in 0..16 {
                    sum = (sum + &tensor)?;
                }
                drop(tensor);
                sums.push(sum.mean_all()?.to_scalar::<f32>()?);
            }
            Ok(sums)
        });
        memory.step(|| {
            for value in 1..=4_u8 {
                let tensor = Tensor::full(f32::from(value + turn), (1024, 1024), &device)?;
                // Candle orders nothing between streams of two threads.
                device.synchronize()?;
                send.send(tensor).expect("the reader listens");
                let noise = Tensor::full(-1000f32, (1024, 1024), &device)?;
                drop((noise * 2.0)?);
            }
            Ok(())
        })?;
        drop(send);
        let sums = reader.join().expect("no panic")?;
        for (value, sum) in (1..).zip(sums) {
            let value = f32::from(value + turn);
            assert_eq!(sum, value * value + 16.0 * value, "turn {turn}");
        }
    }
    let stats = memory.stats();
    assert_eq!((stats.live, stats.bad_frees), (Bytes::ZERO, 0));
    Ok(())
}

#[test]
fn a_device_with_a_stream_of_its_own_is_served_on_it() -> Result<()> {
    let Some((other, _alone)) = gpu(0) else {
        return Ok(());
    };
    let device = Device::new_cuda_with_stream(0)?;
    let network = Network::new(&device)?;
    let expected = bits(&network.forward(3)?)?;
    let mut memory = compiler(&device)?;
    for turn in 0..3 {
        let foreign = Tensor::zeros(1000, DType::F32, &other)?;
        let before = driver_calls();
        let output = memory.step(|| {
            // Another stream: the driver's.
            drop((&foreign + 1.0)?);
            network.forward(3)
        })?;
        assert!(
            driver_calls() - before >= 2,
            "the other stream's buffers pass"
        );
        assert_eq!(bits(&output)?, expected);
        let stats = memory.stats();
        assert!(turn == 0 || stats.device_calls_step == 0, "{stats}");
    }
    Ok(())
}

#[test]
fn a_replayed_step_is_captured_into_a_graph_and_launched() -> Result<()> {
    use candle_core::cuda_backend::cudarc::driver::sys;
    let Some((device, _alone)) = gpu(0) else {
        return Ok(());
    };
    device.set_seed(5)?;
    let weight = (Tensor::randn(0f32, 1f32, (256, 256), &device)? * 0.05)?;
    let inputs = [0, 1].map(|_| Tensor::randn(0f32, 1f32, (64, 256), &device));
    let [first, second] = inputs;
    let (first, second) = (first?, second?);
    let forward = |input: &Tensor| {
        let mut x = input.clone();
        for _ in 0..4 {
            x = (x.matmul(&weight)?.relu()? + &x)?;
        }
        Ok(x)
    };
    let expected = bits(&forward(&second)?)?;
    let mut memory = compiler(&device)?;
    for _ in 0..6 {
        let output = memory.step(|| forward(&first))?;
        assert_ne!(bits(&output)?, expected);
    }
    let _pinned = memory.pin_layout()?;
    let Device::Cuda(cuda) = &device else {
        unreachable!("a GPU");
    };
    let stream = cuda.cuda_stream();
    let wrapped = candle_core::Error::wrap;
    stream
        .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .map_err(wrapped)?;
    let output = memory.step(|| forward(&second));
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).map_err(wrapped)?;
    let (output, graph) = (output?, graph.expect("something was captured"));
    let stats = memory.stats();
    assert_eq!((stats.device_calls_step, stats.breaks_total), (0, 0));
    for _ in 0..3 {
        graph.launch().map_err(wrapped)?;
        assert_eq!(bits(&output)?, expected);
    }
    Ok(())
}

#[test]
fn one_thread_serves_two_gpus() -> Result<()> {
    let (Some((second, alone)), true) = (gpu(1), Cuda::count() > 1) else {
        return Ok(());
    };
    let first = Device::new_cuda(0)?;
    let networks = [Network::new(&first)?, Network::new(&second)?];
    let expected = [
        bits(&networks[0].forward(3)?)?,
        bits(&networks[1].forward(3)?)?,
    ];
    let mut memories = [compiler(&first)?, compiler(&second)?];
    for _ in 0..3 {
        let [one, two] = &mut memories;
        let before = driver_calls();
        let (a, b) = one.step(|| {
            let b = two.step(|| networks[1].forward(3))?;
            // While the second's step is over its device passes through.
            drop(networks[1].forward(1)?);
            Ok((networks[0].forward(3)?, b))
        })?;
        assert!(driver_calls() > before);
        assert_eq!([bits(&a)?, bits(&b)?], expected);
    }
    for memory in &mut memories {
        let stats = memory.stats();
        assert_eq!(
            (stats.breaks_total, stats.device_calls_step),
            (0, 0),
            "{stats}"
        );
    }
    drop(alone);
    Ok(())
}

#[test]
fn empty_tensors_and_paused_work_get_the_drivers_answer() -> Result<()> {
    let Some((device, _alone)) = gpu(0) else {
        return Ok(());
    };
    let empty = Tensor::zeros((0, 3), DType::F32, &device).map_err(|error| error.to_string());
    let mut memory = compiler(&device)?;
    memory.step(|| {
        let inside = Tensor::zeros((0, 3), DType::F32, &device).map_err(|error| error.to_string());
        assert_eq!(
            inside.map(|tensor| tensor.elem_count()).is_ok(),
            empty.map(|tensor| tensor.elem_count()).is_ok()
        );
        let before = driver_calls();
        let _pause = pause();
        drop(Tensor::zeros(1000, DType::F32, &device)?);
        assert_eq!(driver_calls() - before, 2);
        Ok(())
    })?;
    assert_eq!(memory.stats().passed_through, 1);
    Ok(())
}

#[test]
fn sixteen_steps_enqueued_at_once_hold_no_more_than_one() -> Result<()> {
    let Some((device, _alone)) = gpu(0) else {
        return Ok(());
    };
    let network = Network::new(&device)?;
    drop(network.forward(6)?);
    let gpu = Cuda::new(0).map_err(candle_core::Error::wrap)?;
    let in_use = || -> Result<u64> {
        let info = gpu.memory().map_err(candle_core::Error::wrap)?;
        Ok(info.total.0 - info.free.0)
    };
    let mut memory = compiler(&device)?;
    drop(memory.step(|| network.forward(6))?);
    device.synchronize()?;
    gpu.trim_pool().map_err(candle_core::Error::wrap)?;
    let (one, held) = (in_use()?, memory.stats().held);
    for _ in 0..16 {
        drop(memory.step(|| network.forward(6))?);
    }
    assert_eq!(in_use()?, one);
    device.synchronize()?;
    assert_eq!(memory.stats().held, held);
    let floor = memory.stats().floor;
    drop(memory);
    let without = in_use()?;
    assert_eq!(
        one - without,
        held.0,
        "cuMemGetInfo agrees with the statistics"
    );
    eprintln!("held {held}, floor {floor}");
    Ok(())
}

#[test]
fn over_the_budget_candle_gets_the_error_and_the_next_step_runs() -> Result<()> {
    let Some((device, _alone)) = gpu(0) else {
        return Ok(());
    };
    let options = Options {
        budget: Some(Bytes::mib(16)),
        ..Options::default()
    };
    let mut memory = compiler_with(&device, &options)?;
    let before = driver_calls();
    let refused = memory.step(|| Tensor::zeros(8 << 20, DType::F32, &device));
    assert!(refused.is_err());
    assert_eq!(driver_calls(), before, "the driver was not asked");
    let served = memory.step(|| Tensor::ones(1 << 20, DType::F32, &device)?.sum_all())?;
    assert_eq!(served.to_scalar::<f32>()?, (1 << 20) as f32);
    Ok(())
}
