//! A model whose weights do not all stay on the GPU, at several budgets: what a step costs against the same
//! model with all weights there, and against the time that copying takes at the bandwidth that was measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor};
use memory_compiler::device::{Cuda, Device as _};
use memory_compiler::pager::Pager;
use memory_compiler::{Bytes, hook};
use memory_compiler_candle::{Memory, Options, Paged};

use crate::measure::summary;
use crate::networks::{self, Job, Network};
use crate::random::weights;

/// Steps before anything is measured: two to see the order and to arrange for it, one that is timed, one to arrange
/// for the times, and two more.
const SETTLING: usize = 6;

/// What some steps of a network came to.
struct Run {
    output: Vec<u32>,
    first: Duration,
    /// Each synchronised.
    steps: Vec<Duration>,
    held: Bytes,
    /// Driver memory calls of the last step: by the hook, by steps, and for weights.
    calls: u64,
}

/// What weights may take.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    Bytes(Bytes),
    /// Percent of all of them.
    Share(u64),
}

impl Limit {
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        match text.strip_suffix('%').map(str::parse) {
            Some(Ok(percent @ 1..=1000)) => Ok(Self::Share(percent)),
            Some(_) => Err("a share is 1 to 1000 %".into()),
            None => {
                memory_compiler_models::parse_bytes(text).map(|bytes| Self::Bytes(Bytes(bytes)))
            }
        }
    }
}

/// What is to be measured.
pub struct Plan {
    pub job: Job,
    /// For the weights, each a line.
    pub limits: Vec<Limit>,
    pub steps: usize,
    /// A second model on the same budget, run after the steps.
    pub then: Option<Job>,
}

/// Prints a line for each budget; whether all computed the same bits and kept to their budgets.
pub fn table(plan: &Plan, device: &Device, gpu: &Cuda) -> Result<bool> {
    let (job, count) = (plan.job, plan.steps);
    let bandwidth = bandwidth(gpu)?;
    println!("host to device: {:.1} GB/s", bandwidth / 1e9);
    let (resident, capacity) = {
        device.set_seed(1)?;
        let before = in_use(gpu)?;
        let network = networks::build(job, device, weights(job, device))?;
        settle(device, gpu)?;
        let taken = in_use(gpu)? - before;
        let mut memory = memory_compiler_candle::compiler(device)?;
        let run = run(device, &network, &mut memory, count, || 0)?;
        // As the driver's pool has it, in whole chunks.
        (run, Bytes(taken + taken / 16 + (64 << 20)))
    };
    let mut weights_size = None;
    settle(device, gpu)?;
    let compute = summary(&resident.steps).0;
    println!(
        "all weights on the GPU: {:.1} ms a step, {} held by the step",
        ms(compute),
        resident.held
    );
    println!(
        "{:>9} {:>10} {:>10} {:>10} {:>12} {:>10} {:>9} {:>9} {:>9} {:>7} {:>9} {:>6} {:>10} {:>10}",
        "budget",
        "weights",
        "resident",
        "evicted",
        "copied/step",
        "waited/ms",
        "step ms",
        "copy ms",
        "floor ms",
        "ratio",
        "first ms",
        "calls",
        "held",
        "peak"
    );
    let mut kept = true;
    for &limit in &plan.limits {
        let budget = match limit {
            Limit::Bytes(bytes) => bytes,
            Limit::Share(percent) => {
                let size = match weights_size {
                    Some(size) => size,
                    None => size_of_weights(job, device, capacity)?,
                };
                weights_size = Some(size);
                let pages = Bytes(size.0 * percent / 100).checked_round_up(gpu.granule());
                pages.unwrap_or(size)
            }
        };
        let began = Instant::now();
        let pager = memory_compiler_candle::pager(device, &Options::default(), Some(budget))?;
        device.set_seed(1)?;
        let source = weights(job, device);
        // SAFETY: the model reads its weights by kernels of Candle and products of cuBLAS, which the hook sees,
        // and nothing writes to them.
        let paged = unsafe { Paged::over(&pager, device, source, capacity) }?;
        let network = networks::build(job, device, paged.var_builder())?;
        settle(device, gpu)?;
        let loaded = began.elapsed();
        // No weight is there yet, but for what is too small to be paged.
        let base = in_use(gpu)?;
        let mut memory =
            memory_compiler_candle::compiler_sharing(device, &Options::default(), &pager)?;
        let mut copied = Vec::new();
        let mut waited = Vec::new();
        let mut calls = 0;
        let watch = Peak::new(gpu.ordinal());
        let run = run(device, &network, &mut memory, count, || {
            let stats = paged.stats();
            copied.push(stats.copied.0);
            waited.push(stats.waited);
            let before = std::mem::replace(&mut calls, stats.pager.device_calls);
            stats.pager.device_calls - before
        })?;
        let peak = watch.end().saturating_sub(base);
        let stats = paged.stats();
        let a_step = |first: u64, last: u64| (last - first) / count as u64;
        let copied = Bytes(a_step(copied[SETTLING - 1], copied[copied.len() - 1]));
        let waited = (waited[waited.len() - 1] - waited[SETTLING - 1]) / count as u32;
        let copy = Duration::from_secs_f64(copied.0 as f64 / bandwidth);
        let (step, floor) = (summary(&run.steps).0, compute.max(copy));
        println!(
            "{:>9} {:>10} {:>10} {:>10} {:>12} {:>10.1} {:>9.1} {:>9.1} {:>9.1} {:>7.3} {:>9.0} {:>6} {:>10} {:>10}",
            budget.to_string(),
            mib(stats.weights),
            mib(stats.resident),
            mib(stats.weights.saturating_sub(stats.resident)),
            mib(copied),
            ms(waited),
            ms(step),
            ms(copy),
            ms(floor),
            step.as_secs_f64() / floor.as_secs_f64(),
            ms(run.first),
            run.calls,
            mib(run.held),
            mib(Bytes(peak)),
        );
        println!("          loaded in {:.1} s", loaded.as_secs_f64());
        if run.output != resident.output {
            println!("FAILED: other bits than with all weights on the GPU");
            kept = false;
        }
        if peak > budget.0 + run.held.0 + (64 << 20) {
            println!(
                "FAILED: {} in use, more than the budget and the step",
                Bytes(peak)
            );
            kept = false;
        }
        if run.calls > 0 {
            println!("FAILED: {} memory calls in a step", run.calls);
            kept = false;
        }
        if let Some(then) = plan.then {
            let output = after(then, device, &pager, &paged, &network, &mut memory)?;
            if output != resident.output {
                println!("FAILED: other bits after the second model");
                kept = false;
            }
        }
        drop((network, memory, paged, pager));
        settle(device, gpu)?;
    }
    Ok(kept)
}

/// Bytes of the weights that are paged.
fn size_of_weights(job: Job, device: &Device, capacity: Bytes) -> Result<Bytes> {
    let pager = memory_compiler_candle::pager(device, &Options::default(), None)?;
    // SAFETY: nothing reads them.
    let paged = unsafe { Paged::over(&pager, device, weights(job, device), capacity) }?;
    drop(networks::build(job, device, paged.var_builder())?);
    Ok(paged.stats().weights)
}

/// Runs a second model on the same budget, then the first one again; returns what that computes.
fn after(
    then: Job,
    device: &Device,
    pager: &Pager,
    paged: &Paged,
    network: &Network,
    memory: &mut Memory,
) -> Result<Vec<u32>> {
    let source = weights(then, device);
    // SAFETY: as for the first model.
    let second = unsafe { Paged::over(pager, device, source, Bytes::gib(1)) }?;
    let decode = networks::build(then, device, second.var_builder())?;
    let before = paged.stats();
    paged.rest();
    for _ in 0..2 {
        drop(memory.step_named("then", &decode)?);
    }
    device.synchronize()?;
    second.rest();
    let left = paged.stats();
    let mut line = format!(
        "          then {:?}: its weights {}, ours {} before and {} after it",
        then.model,
        second.stats().weights,
        before.resident,
        left.resident
    );
    let mut last = left;
    let mut output = Vec::new();
    for turn in ["back", "again", "and again"] {
        output = bits(&memory.step(network)?)?;
        let now = paged.stats();
        line += &format!(
            "; {turn}: {} copied, {} calls",
            Bytes(now.copied.0 - last.copied.0),
            now.pager.device_calls - last.pager.device_calls
        );
        last = now;
    }
    println!("{line}");
    Ok(output)
}

fn run(
    device: &Device,
    network: &Network,
    memory: &mut Memory,
    count: usize,
    mut after: impl FnMut() -> u64,
) -> Result<Run> {
    let mut steps = Vec::new();
    let mut calls = 0;
    let mut output = Vec::new();
    for _ in 0..SETTLING + count {
        let before = hook::cuda::counts();
        let began = Instant::now();
        let result = memory.step(network)?;
        device.synchronize()?;
        steps.push(began.elapsed());
        let counts = hook::cuda::counts();
        calls = counts.allocs + counts.frees - before.allocs - before.frees;
        calls += memory.stats().device_calls_step + after();
        output = bits(&result)?;
    }
    let first = steps[0];
    Ok(Run {
        output,
        first,
        steps: steps.split_off(SETTLING),
        held: memory.stats().held,
        calls,
    })
}

fn bits(output: &Tensor) -> Result<Vec<u32>> {
    let values = output.flatten_all()?.to_dtype(DType::F32)?;
    let values = values.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn mib(bytes: Bytes) -> String {
    format!("{:.1}", bytes.as_mib())
}

fn in_use(gpu: &Cuda) -> Result<u64> {
    let info = gpu.memory().map_err(candle_core::Error::wrap)?;
    Ok(info.total.0 - info.free.0)
}

fn settle(device: &Device, gpu: &Cuda) -> Result<()> {
    device.synchronize()?;
    gpu.trim_pool().map_err(candle_core::Error::wrap)
}

/// Bytes a second from page-locked memory of the host, as weights are copied: the best of some copies.
fn bandwidth(gpu: &Cuda) -> Result<f64> {
    let size = Bytes::gib(1);
    let granule = gpu.granule();
    let copy = || -> std::result::Result<f64, memory_compiler::device::DeviceError> {
        let image = Arc::new(gpu.host_memory(size)?);
        let stream = gpu.copy_stream()?;
        let base = gpu.reserve(size)?;
        let mut pages = Vec::new();
        for at in (0..size.0).step_by(granule.0 as usize) {
            let page = gpu.create()?;
            gpu.map(memory_compiler::Address(base.0 + at), page)?;
            pages.push(page);
        }
        gpu.allow(base, size)?;
        let mut best = 0_f64;
        for _ in 0..5 {
            gpu.synchronise()?;
            let began = Instant::now();
            for _ in 0..4 {
                gpu.enqueue_copy(stream, base, &image, Bytes::ZERO, size)?;
            }
            gpu.synchronise()?;
            best = best.max(4.0 * size.0 as f64 / began.elapsed().as_secs_f64());
        }
        gpu.unmap(base, size)?;
        for page in pages {
            gpu.release(page)?;
        }
        gpu.unreserve(base, size)?;
        Ok(best)
    };
    copy().map_err(candle_core::Error::wrap)
}

/// The most device memory that is in use, looked at every few milliseconds.
struct Peak {
    most: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Peak {
    fn new(ordinal: usize) -> Self {
        let (most, is_over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (sum, end) = (Arc::clone(&most), Arc::clone(&is_over));
        let look = move || {
            let Ok(gpu) = Cuda::new(ordinal) else { return };
            while !end.load(Ordering::Relaxed) {
                if let Ok(used) = in_use(&gpu) {
                    sum.fetch_max(used, Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        Self {
            most,
            is_over,
            thread: Some(std::thread::spawn(look)),
        }
    }

    fn end(mut self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Without it the peak is what was seen until then.
            drop(thread.join());
        }
        self.most.load(Ordering::Relaxed)
    }
}
