//! Runs a model of candle-transformers, unmodified and at full size, with random weights on a GPU, and
//! prints what a step costs under the driver's allocator, under the memory compiler, and at the floor.

mod fixed;
mod measure;
mod networks;
mod paged;
mod random;

use std::process::ExitCode;
use std::time::Duration;

use candle_core::{DType, Device, Result};
use clap::{Parser, ValueEnum};
use memory_compiler::device::Cuda;
use memory_compiler::{Bytes, hook};

memory_compiler::page_cuda_weights!();

use measure::{Allocator, Bench, Facts, Pace, Subject, summary};
use networks::{Job, Model};
use random::weights;

/// Measures a model of candle-transformers on a GPU, with random weights.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The model.
    #[arg(long, value_enum)]
    model: Model,
    /// The image, in pixels: N for a square, or WIDTHxHEIGHT.
    #[arg(long, value_parser = parse_size)]
    size: Option<(usize, usize)>,
    /// Images at once, both predictions of guidance counted.
    #[arg(long)]
    batch: Option<usize>,
    /// Steps of a round.
    #[arg(long, default_value_t = 16)]
    steps: usize,
    /// Rounds; the allocators take turns.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The number format.
    #[arg(long, value_enum)]
    dtype: Option<Format>,
    /// Who serves the buffers.
    #[arg(long, value_enum, default_value = "compiled")]
    allocator: Allocator,
    /// Wait for the device after each step.
    #[arg(long)]
    sync_each_step: bool,
    /// All allocators, with and without synchronisation, in one process; compares the outputs.
    #[arg(long)]
    compare: bool,
    /// Which GPU.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Keep at most this much of the weights in memory: a table with a line for each of these (4GiB,30%).
    #[arg(long, value_name = "BYTES|%", value_delimiter = ',', value_parser = paged::Limit::parse)]
    weight_budget: Vec<paged::Limit>,
    /// With a weight budget: run this model on the same budget afterwards, then the first one again.
    #[arg(long, value_enum)]
    then: Option<Model>,
    /// No line of titles.
    #[arg(long)]
    bare: bool,
}

/// A number format of the weights and of the computation.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    F16,
    Bf16,
    F32,
}

fn parse_size(text: &str) -> std::result::Result<(usize, usize), String> {
    let (width, height) = text.split_once('x').unwrap_or((text, text));
    let number = |text: &str| match text.parse() {
        Ok(pixels) if pixels > 0 && pixels % 64 == 0 => Ok(pixels),
        _ => Err(format!("{text} is no positive multiple of 64")),
    };
    Ok((number(width)?, number(height)?))
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("zoo: {error}");
            ExitCode::from(2)
        }
    }
}

/// Returns whether the promises held.
fn run(arguments: &Arguments) -> Result<bool> {
    hook::cuda::check().map_err(candle_core::Error::wrap)?;
    let device = Device::new_cuda(arguments.device)?;
    let gpu = Cuda::new(arguments.device).map_err(candle_core::Error::wrap)?;
    let model = arguments.model;
    let (width, height) = arguments
        .size
        .unwrap_or((model.usual_size(), model.usual_size()));
    let dtype = match arguments.dtype {
        Some(Format::F16) => DType::F16,
        Some(Format::Bf16) => DType::BF16,
        Some(Format::F32) => DType::F32,
        None => model.usual_dtype(),
    };
    let batch = arguments.batch.unwrap_or(model.usual_batch());
    let job = Job {
        model,
        width,
        height,
        batch,
        dtype,
    };
    if !arguments.weight_budget.is_empty() {
        let plan = paged::Plan {
            job,
            limits: arguments.weight_budget.clone(),
            steps: arguments.steps,
            then: arguments.then.map(|model| Job {
                model,
                batch: model.usual_batch(),
                dtype: model.usual_dtype(),
                ..job
            }),
        };
        return paged::table(&plan, &device, &gpu);
    }
    device.set_seed(1)?;
    let network = networks::build(job, &device, weights(job, &device))?;
    let bench = Bench { device, gpu };
    bench.warm(&network)?;
    let (allocators, paces): (&[Allocator], &[Pace]) = if arguments.compare {
        (
            &[Allocator::Default, Allocator::Compiled, Allocator::Fixed],
            &[Pace::Sync, Pace::Free],
        )
    } else {
        let pace = if arguments.sync_each_step {
            &[Pace::Sync]
        } else {
            &[Pace::Free]
        };
        (std::slice::from_ref(&arguments.allocator), pace)
    };
    let mut subjects = Vec::new();
    for &allocator in allocators {
        subjects.push(bench.prepare(&network, allocator, arguments.steps)?);
    }
    for _ in 0..arguments.rounds {
        for &pace in paces {
            match pace {
                Pace::Sync => bench.time_in_turn(&mut subjects, arguments.steps)?,
                Pace::Free => bench.time_all(&mut subjects, pace, arguments.steps)?,
            }
        }
    }
    subjects.sort_by_key(|subject| subject.allocator as usize);
    if !arguments.bare {
        print_titles();
    }
    for &pace in paces {
        let default = summary(&subjects[0].times[pace as usize].latency).0;
        for subject in &subjects {
            print_row(&job, subject, pace, default);
        }
    }
    let kept = subjects.iter().all(|subject| check(subject, &subjects[0]));
    bench.end(subjects)?;
    Ok(kept)
}

/// Whether an allocator computes the bits that the first one does, and a compiled step keeps what the
/// memory compiler promises.
fn check(subject: &Subject, first: &Subject) -> bool {
    let Facts {
        outputs,
        calls,
        held,
        floor,
        ..
    } = &subject.facts;
    let who = subject.allocator;
    let mut kept = true;
    if *outputs != first.facts.outputs {
        println!(
            "FAILED: {who:?} computed other bits than {:?}",
            first.allocator
        );
        kept = false;
    }
    let values = || outputs.iter().flatten().map(|&bits| f32::from_bits(bits));
    if !values().any(|value| value.is_finite() && value != 0.0) {
        println!("note: no output is a finite number but 0, so equal bits say little");
    }
    if who == Allocator::Compiled && *calls > 0 {
        println!("FAILED: {calls} driver memory calls in a replayed step");
        kept = false;
    }
    if let (Some(held), Some(floor)) = (held, floor) {
        let allowed = Bytes(floor.0 + (floor.0 / 100).max(2 << 20));
        if *held > allowed {
            println!("over: holds {held}, which is more than {allowed}");
        }
    }
    kept
}

fn print_titles() {
    println!(
        "{:<25} {:<8} {:<4} {:>8} {:>8} {:>8} {:>8} {:>7} {:>6} {:>7} {:>6} {:>6} {:>7} {:>7} {:>7} {:>7} {:>8} {:>7}",
        "model",
        "who",
        "sync",
        "step ms",
        "least",
        "enqueue",
        "least",
        "ns/call",
        "ratio",
        "buffers",
        "calls",
        "breaks",
        "held",
        "floor",
        "L MiB",
        "device",
        "first ms",
        "compile"
    );
}

fn print_row(job: &Job, subject: &Subject, pace: Pace, default: Duration) {
    let name = format!(
        "{:?} {}x{} b{} {:?}",
        job.model, job.width, job.height, job.batch, job.dtype
    );
    let ms = |time: Duration| format!("{:.2}", time.as_secs_f64() * 1e3);
    let mib =
        |bytes: Option<Bytes>| bytes.map_or("-".into(), |bytes| format!("{:.1}", bytes.as_mib()));
    let (facts, times) = (&subject.facts, &subject.times[pace as usize]);
    let (latency, enqueue) = (summary(&times.latency), summary(&times.enqueue));
    println!(
        "{:<25} {:<8} {:<4} {:>8} {:>8} {:>8} {:>8} {:>7.0} {:>6.3} {:>7} {:>6} {:>6} {:>7} {:>7} {:>7} {:>7} {:>8} {:>7}",
        name.to_lowercase(),
        format!("{:?}", subject.allocator).to_lowercase(),
        if pace == Pace::Sync { "each" } else { "none" },
        ms(latency.0),
        ms(latency.1),
        ms(enqueue.0),
        ms(enqueue.1),
        facts.call,
        default.as_secs_f64() / latency.0.as_secs_f64(),
        facts.buffers,
        facts.calls,
        facts.breaks,
        mib(facts.held),
        mib(facts.floor),
        mib(facts.live),
        mib(Some(facts.device[pace as usize])),
        ms(facts.first),
        facts.compile.map_or("-".into(), ms),
    );
}
