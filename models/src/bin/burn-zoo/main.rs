//! Measures both networks in Burn on an NVIDIA GPU: on compiled memory, and on Burn's own pools.
//!
//! Plain Burn has features, fusion above all, that steps cannot have, and a program has one set of features. So
//! there are two builds of this program, and the one without fusion runs the other one, each network in turn:
//!
//! ```text
//!   burn-zoo --beside PLAIN ──┬─ itself: "compiled", then "pools" (the same build on plain memory)
//!                             └─ PLAIN --plain: "default", Burn with fusion
//! ```
//!
//! "memory" is what the device has less than with weights and inputs alone, at most, by `cuMemGetInfo`, which
//! another thread asks all the time. "calls" are allocations and frees that reach the driver in a step. In "each" the
//! device is waited for after every step, in "none" after the last one.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::{Device, Distribution, Int, Tensor};
use clap::Parser;
use memory_compiler::device::{Cuda, Device as _};
use memory_compiler::{Bytes, Stats, hook};
use memory_compiler_burn::compiler;
use memory_compiler_models::burn::Network;
use memory_compiler_models::burn::dit::{Dit, DitSize};
use memory_compiler_models::burn::unet::{UNet, UNetSize};
use memory_compiler_models::{Error, ModelKind, Result};

/// Measures both networks in Burn on an NVIDIA GPU.
#[derive(Debug, Parser)]
struct Arguments {
    /// The network; both without.
    #[arg(long, value_enum)]
    model: Option<ModelKind>,
    /// Images in a batch.
    #[arg(long, default_value_t = 2)]
    batch: usize,
    /// Steps of a measurement.
    #[arg(long, default_value_t = 50)]
    steps: usize,
    /// Small networks, for trying the program.
    #[arg(long)]
    small: bool,
    /// Measure Burn's own memory alone, whatever this build's features.
    #[arg(long)]
    plain: bool,
    /// The build of this program with fusion, to be run beside.
    #[arg(long, value_name = "PROGRAM")]
    beside: Option<PathBuf>,
}

/// First runs, in which kernels are compiled and tuned, and in which a step finds its form.
const WARM_UPS: usize = 5;
const SETTLING: usize = 12;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match measure(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn measure(arguments: &Arguments) -> Result<bool> {
    if !arguments.plain {
        println!(
            "{:<6} {:<9} {:>9} {:>9} {:>8} {:>7} {:>6} {:>10} {:>10} {:>10} {:>10}",
            "model",
            "memory of",
            "each",
            "none",
            "buffers",
            "calls",
            "breaks",
            "memory",
            "held",
            "floor",
            "L"
        );
    }
    let kinds = match arguments.model {
        Some(kind) => vec![kind],
        None => vec![ModelKind::Unet, ModelKind::Dit],
    };
    let mut is_right = true;
    for kind in kinds {
        if let Some(program) = &arguments.beside {
            let mut command = Command::new(program);
            command.args(["--plain", "--model", kind.name()]);
            command.args(["--batch", &arguments.batch.to_string()]);
            command.args(["--steps", &arguments.steps.to_string()]);
            if arguments.small {
                command.arg("--small");
            }
            let status = command.status();
            let status = status.map_err(|error| Error::read(program, error))?;
            is_right &= status.success();
        }
        is_right &= network(arguments, kind)?;
    }
    Ok(is_right)
}

/// Measures one network.
fn network(arguments: &Arguments, kind: ModelKind) -> Result<bool> {
    let device = Device::cuda(0);
    // Before anything else uses the GPU.
    let mut memory = match arguments.plain {
        true => None,
        false => Some(compiler(&device)?),
    };
    device.seed(7);
    let mut bench = match &mut memory {
        Some(memory) => memory.outside(|| Bench::new(arguments, kind, &device))??,
        None => Bench::new(arguments, kind, &device)?,
    };
    bench.count_from_here()?;
    let mut compiled = None;
    if let Some(memory) = &mut memory {
        bench.first_runs(|f| Ok(memory.step(f)?))?;
        for _ in 0..SETTLING {
            memory.step(|| bench.forward())?;
        }
        memory.compile()?;
        bench.sync()?;
        bench.tell("steps settled and compiled")?;
        let memory = std::cell::RefCell::new(memory);
        let found = bench.run(
            arguments.steps,
            |f| Ok(memory.borrow_mut().step(f)?),
            || Some(memory.borrow_mut().stats()),
        )?;
        found.print(kind, "compiled");
        compiled = Some(found);
        bench.tell("compiled steps done")?;
    }
    // Last, since cubecl's pools do not give back all that they took.
    drop(memory);
    bench.first_runs(|f| Ok(f()))?;
    bench.clean()?;
    bench.tell("what they freed given back")?;
    let plain = bench.run(arguments.steps, |f| Ok(f()), || None)?;
    bench.tell("steps on Burn's memory done")?;
    plain.print(kind, if arguments.plain { "default" } else { "pools" });
    let Some(compiled) = compiled else {
        return Ok(true);
    };
    let is_same = compiled.bits == plain.bits;
    println!(
        "{:<6} outputs of {} values are {}",
        kind.name(),
        plain.bits.len(),
        if is_same {
            "bit-identical"
        } else {
            "DIFFERENT"
        }
    );
    Ok(is_same)
}

/// A network with its input.
struct Bench {
    network: Network,
    latents: Tensor<4>,
    timestep: Tensor<1>,
    class: Tensor<1, Int>,
    device: Device,
    gpu: Cuda,
    /// Free memory with weights and inputs there.
    free: Bytes,
}

/// What a measurement found.
struct Found {
    each: Duration,
    none: Duration,
    calls: Option<u64>,
    memory: Bytes,
    stats: Option<Stats>,
    breaks: u64,
    bits: Vec<u32>,
}

impl Bench {
    fn new(arguments: &Arguments, kind: ModelKind, device: &Device) -> Result<Self> {
        let (network, side) = match (kind, arguments.small) {
            (ModelKind::Unet, small) => {
                let size = UNetSize {
                    image: 4,
                    channels: if small {
                        vec![32, 64, 64]
                    } else {
                        vec![320, 640, 1280]
                    },
                    heads: vec![8, 10, 20]
                        .into_iter()
                        .map(|heads| if small { 4 } else { heads })
                        .collect(),
                    condition: if small { 128 } else { 1280 },
                };
                (
                    Network::Unet(UNet::new(&size, device)),
                    if small { 32 } else { 64 },
                )
            }
            (ModelKind::Dit, small) => {
                let size = DitSize {
                    image: 4,
                    patch: 2,
                    grid: if small { 16 } else { 32 },
                    width: if small { 96 } else { 1152 },
                    heads: if small { 4 } else { 16 },
                    depth: if small { 4 } else { 28 },
                    smooth: 64,
                };
                (
                    Network::Dit(Dit::new(&size, device)),
                    if small { 32 } else { 64 },
                )
            }
        };
        let gpu = Cuda::new(0).map_err(|error| Error::Setting(error.to_string()))?;
        let batch = arguments.batch;
        let bench = Self {
            network,
            latents: Tensor::random(
                [batch, 4, side, side],
                Distribution::Normal(0.0, 1.0),
                device,
            ),
            timestep: Tensor::full([batch], 0.5, device),
            class: Tensor::full([batch], 3, device),
            device: device.clone(),
            gpu,
            free: Bytes::ZERO,
        };
        // Burn makes weights when they are first asked for. They get places of their exact size.
        device.memory_persistent_allocations((), |()| bench.network.make());
        Ok(bench)
    }

    /// Counts memory from here.
    fn count_from_here(&mut self) -> Result<()> {
        self.clean()?;
        self.free = self.memory()?;
        self.tell("weights and inputs made")
    }

    /// The first runs, in which kernels are compiled and tuned.
    fn first_runs(
        &self,
        mut step: impl FnMut(&(dyn Fn() -> Tensor<4> + Sync)) -> Result<Tensor<4>>,
    ) -> Result<()> {
        for run in 1..=WARM_UPS {
            let began = Instant::now();
            step(&|| self.forward())?;
            self.sync()?;
            eprintln!(
                "run {run} of {WARM_UPS} before measuring took {:.1} s",
                began.elapsed().as_secs_f64()
            );
        }
        self.tell("first runs done")
    }

    fn forward(&self) -> Tensor<4> {
        let (latents, timestep) = (self.latents.clone(), self.timestep.clone());
        self.network.forward(latents, timestep, self.class.clone())
    }

    /// Lets Burn give back what it does not use.
    fn clean(&self) -> Result<()> {
        self.sync()?;
        self.device.memory_cleanup();
        self.sync()
    }

    fn sync(&self) -> Result<()> {
        let synced = self.device.sync();
        synced.map_err(|error| Error::Setting(format!("the device failed: {error:?}")))
    }

    /// Says where the device's memory is: on the GPU, and in cubecl's pools.
    fn tell(&self, when: &str) -> Result<()> {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let pools = self.device.memory_pool_usage();
        let (reserved, used) =
            pools.map_or((0, 0), |pools| (pools.bytes_reserved, pools.bytes_in_use));
        eprintln!(
            "{when}: {:.1} MiB more than with weights and inputs; cubecl's pools {:.1} MiB, {:.1} of them in use",
            mib(self.free.0.saturating_sub(self.memory()?.0)),
            mib(reserved),
            mib(used),
        );
        Ok(())
    }

    /// Free device memory.
    fn memory(&self) -> Result<Bytes> {
        let info = self.gpu.memory();
        Ok(info
            .map_err(|error| Error::Setting(error.to_string()))?
            .free)
    }

    /// Runs the network `steps` times, and again.
    fn run(
        &self,
        steps: usize,
        mut step: impl FnMut(&(dyn Fn() -> Tensor<4> + Sync)) -> Result<Tensor<4>>,
        stats: impl Fn() -> Option<Stats>,
    ) -> Result<Found> {
        let forward = || self.forward();
        let calls = || hook::cuda::counts().allocs + hook::cuda::counts().frees;
        let least = AtomicU64::new(u64::MAX);
        let done = AtomicBool::new(false);
        // What was freed before goes back to the device.
        self.sync()?;
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    if let Ok(free) = self.memory() {
                        least.fetch_min(free.0, Ordering::Relaxed);
                    }
                    std::thread::sleep(Duration::from_micros(500));
                }
            });
            let mut measure = || -> Result<Found> {
                step(&forward)?;
                self.sync()?;
                let (before, mut times, mut breaks) = (calls(), Vec::new(), 0);
                for _ in 0..steps {
                    let began = Instant::now();
                    step(&forward)?;
                    self.sync()?;
                    times.push(began.elapsed());
                    breaks += stats().map_or(0, |stats| stats.breaks_step);
                }
                let reached = calls() - before;
                let began = Instant::now();
                for _ in 0..steps {
                    step(&forward)?;
                }
                self.sync()?;
                let none = began.elapsed() / steps as u32;
                times.sort();
                let stats = stats();
                let values = step(&forward)?.try_into_data().ok();
                let values = values.and_then(|data| data.try_into_vec::<f32>().ok());
                let values = values.ok_or_else(|| Error::Setting("no output".into()))?;
                Ok(Found {
                    each: times[steps / 2],
                    none,
                    calls: hook::cuda::check()
                        .is_ok()
                        .then_some(reached / steps as u64),
                    memory: Bytes::ZERO,
                    breaks,
                    stats,
                    bits: values.into_iter().map(f32::to_bits).collect(),
                })
            };
            let found = measure();
            done.store(true, Ordering::Relaxed);
            let mut found = found?;
            found.memory = Bytes(self.free.0.saturating_sub(least.load(Ordering::Relaxed)));
            Ok(found)
        })
    }
}

impl Found {
    fn print(&self, kind: ModelKind, title: &str) {
        let ms = |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3);
        let mib = |bytes: Bytes| format!("{:.1} MiB", bytes.0 as f64 / f64::from(1 << 20));
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let stats = self.stats.as_ref();
        let buffers = stats.map(|stats| stats.replayed_step.to_string());
        let peak = |stats: &Stats| stats.branches.first().map(|branch| mib(branch.peak));
        println!(
            "{:<6} {:<9} {:>9} {:>9} {:>8} {:>7} {:>6} {:>10} {:>10} {:>10} {:>10}",
            kind.name(),
            title,
            ms(self.each),
            ms(self.none),
            or_none(buffers),
            or_none(self.calls.map(|calls| calls.to_string())),
            or_none(stats.map(|_| self.breaks.to_string())),
            mib(self.memory),
            or_none(stats.map(|stats| mib(stats.held))),
            or_none(stats.map(|stats| mib(stats.floor))),
            or_none(stats.and_then(peak)),
        );
    }
}
