//! Draws handwritten digits with a small diffusion model whose every forward pass is a recorded and
//! replayed step of the memory compiler.
//!
//! Whatever is wrong with what it is given, it says so in one line and exits with 2.

use candle_core::{DType, Device, Tensor};
use clap::{Parser, error::ErrorKind};
use indicatif::{ProgressBar, ProgressStyle};
use memory_compiler::{Bytes, hook::host::ScopedAllocator, report::Report};
use memory_compiler_candle::{Options, Paged, PagedStats, pager};
use memory_compiler_models::{
    Denoiser, Error, ModelKind, Result,
    compiled::Compiled,
    parse_bytes,
    run::{GuidanceMode, Job, Plain, Stepper, sample},
    sampler::Method,
    sheet,
    weights::{self, Source, load_on, load_paged},
};
use std::{
    fmt,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    str::FromStr,
    time::{Duration, Instant},
};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

#[cfg(feature = "cuda")]
memory_compiler::interpose_cuda!();

#[cfg(feature = "cuda")]
memory_compiler::page_cuda_weights!();

/// Draws handwritten digits with a small diffusion model and writes them as one sheet.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The network.
    #[arg(long, value_enum, default_value = "unet")]
    model: ModelKind,
    /// What computes the network; noise, guidance and samplers are the same for both.
    #[cfg(feature = "burn")]
    #[arg(long, value_enum, default_value = "candle")]
    framework: Framework,
    /// The way from noise to an image.
    #[arg(long, value_enum, default_value = "dpmpp-2m")]
    sampler: Method,
    /// Steps of the sampler.
    #[arg(long, default_value_t = 12, value_parser = parse_count::<usize>, allow_negative_numbers = true)]
    steps: usize,
    /// Guidance: how far to go past the prediction without a digit; 1 draws without guidance.
    #[arg(
        long,
        value_name = "SCALE",
        default_value_t = 2.0,
        allow_negative_numbers = true
    )]
    cfg: f64,
    /// Guidance as two calls in turn or as one with twice the batch.
    #[arg(long, value_enum, default_value = "flip-flop")]
    cfg_mode: GuidanceMode,
    /// The share of the steps, from the first on, that flip-flop guides.
    #[arg(
        long,
        value_name = "FRACTION",
        default_value_t = 0.66,
        allow_negative_numbers = true
    )]
    cfg_until: f64,
    /// A digit, or all of them.
    #[arg(long, value_name = "0-9|all", default_value = "all", value_parser = parse_class, allow_negative_numbers = true)]
    class: Class,
    /// Images of each digit.
    #[arg(long, default_value_t = 2, value_parser = parse_count::<usize>, allow_negative_numbers = true)]
    samples: usize,
    /// Where the noise comes from.
    #[arg(long, default_value_t = 0, value_parser = parse_count::<u64>, allow_negative_numbers = true)]
    seed: u64,
    /// Other weights than the ones that are part of the program.
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// The sheet, a PNG: a column for each digit, a row for each sample.
    #[arg(long, value_name = "FILE", default_value = "sheet.png")]
    out: PathBuf,
    /// The page of HTML that shows where the memory goes; beside the sheet.
    #[arg(long, value_name = "FILE", conflicts_with = "no_compile")]
    report: Option<PathBuf>,
    /// The CPU, or an NVIDIA GPU by its number.
    #[arg(long, value_name = "cpu|cuda[:N]", default_value = "cpu", value_parser = parse_device)]
    device: Place,
    #[command(flatten)]
    memory: Memory,
}

impl Arguments {
    /// Where the report goes, if there is one.
    fn report(&self) -> Option<PathBuf> {
        let beside = || self.out.with_extension("html");
        (!self.memory.no_compile).then(|| self.report.clone().unwrap_or_else(beside))
    }

    /// Checks that all that is drawn can be written.
    fn check_writable(&self) -> Result<()> {
        sheet::check_writable(&self.out)?;
        match self.report() {
            Some(report) => sheet::check_writable(&report),
            None => Ok(()),
        }
    }

    fn write_report(&self, report: &Report) -> Result<()> {
        let Some(path) = self.report() else {
            return Ok(());
        };
        std::fs::write(&path, report.html()).map_err(|error| Error::write(&path, error))?;
        say(format_args!("where the memory goes: {}", path.display()))
    }
}

/// What the memory compiler is told.
#[derive(Debug, clap::Args)]
struct Memory {
    /// Fail when a call leaves the recorded paths after its first run.
    #[arg(long)]
    strict: bool,
    /// Run on plain memory.
    #[arg(long, conflicts_with_all = ["strict", "compare", "threshold", "granule", "budget"])]
    no_compile: bool,
    /// Run on plain memory too, and say whether every pixel is the same.
    #[arg(long)]
    compare: bool,
    /// Serve buffers of at least this size (16KiB); on a GPU all are served.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    threshold: Option<u64>,
    /// The size of a page (64KiB); a GPU has its own.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    granule: Option<u64>,
    /// Hold at most this much; the run fails when a step needs more.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    budget: Option<u64>,
    /// Keep at most this much of the weights in memory; the others come in scope by scope. On the CPU a scope that
    /// needs more takes it from the rest of the budget while it is open.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    weight_budget: Option<u64>,
}

impl Memory {
    fn options(&self, device: &Device) -> Options {
        let defaults = Options::default();
        let granule = match self.weight_budget {
            Some(_) if device.is_cpu() => weights::GRANULE,
            _ => defaults.granule,
        };
        Options {
            strict: self.strict,
            budget: self.budget.map(Bytes),
            granule: self.granule.map_or(granule, Bytes),
            threshold: self.threshold.map_or(defaults.threshold, Bytes),
            ..defaults
        }
    }

    #[cfg(feature = "burn")]
    fn burn_options(&self) -> memory_compiler_burn::Options {
        let Options {
            strict,
            budget,
            granule,
            threshold,
            address_space,
            edge_limit,
            compile_after,
        } = self.options(&Device::Cpu);
        memory_compiler_burn::Options {
            strict,
            budget,
            granule,
            threshold,
            address_space,
            edge_limit,
            compile_after,
            ..memory_compiler_burn::Options::default()
        }
    }
}

/// What computes the network.
#[cfg(feature = "burn")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Framework {
    Candle,
    Burn,
}

/// Where to compute.
#[derive(Clone, Copy, Debug)]
enum Place {
    Cpu,
    Cuda(usize),
}

impl Place {
    /// The number of the GPU; `None` for the CPU.
    #[cfg(feature = "burn")]
    fn number(self) -> Option<usize> {
        match self {
            Self::Cpu => None,
            Self::Cuda(number) => Some(number),
        }
    }

    fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(_) if !cfg!(feature = "cuda") => Err(Error::Setting(
                "this diffuse was built for the CPU; `--features cuda` adds GPUs".into(),
            )),
            Self::Cuda(number) => Ok(Device::new_cuda(number)?),
        }
    }
}

/// Which digits to draw.
#[derive(Clone, Copy, Debug)]
enum Class {
    All,
    One(u32),
}

impl Class {
    fn list(self) -> Vec<u32> {
        match self {
            Self::All => (0..10).collect(),
            Self::One(digit) => vec![digit],
        }
    }
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(help) if is_help(help.kind()) => help.exit(),
        Err(error) => return fail(&one_line(&error.to_string())),
    };
    match draw(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("error: {error}")),
    }
}

fn draw(arguments: &Arguments) -> Result<()> {
    let classes = arguments.class.list();
    let columns = classes.len();
    let job = Job {
        method: arguments.sampler,
        steps: arguments.steps,
        guidance: arguments.cfg,
        mode: arguments.cfg_mode,
        guided_share: arguments.cfg_until,
        classes,
        samples: arguments.samples,
        seed: arguments.seed,
    };
    job.check()?;
    let source = match &arguments.weights {
        Some(path) => Source::File(path),
        None => Source::Embedded,
    };
    #[cfg(feature = "burn")]
    if arguments.framework == Framework::Burn {
        return draw_with_burn(arguments, &job, source);
    }
    let device = arguments.device.open()?;
    let options = arguments.memory.options(&device);
    let pager = match arguments.memory.weight_budget {
        Some(budget) => Some(pager(&device, &options, Some(Bytes(budget)))?),
        None => None,
    };
    let (model, paged) = match &pager {
        Some(pager) => {
            let (model, paged) = load_paged(arguments.model, source, &device, pager)?;
            (model, Some(paged))
        }
        None => (load_on(arguments.model, source, &device)?, None),
    };
    let loaded = paged.as_ref().map(Paged::stats);
    arguments.check_writable()?;

    let mut compiled = match (arguments.memory.no_compile, &pager) {
        (true, _) => None,
        (false, Some(pager)) => Some(Compiled::sharing(&device, &options, pager)?),
        (false, None) => Some(Compiled::on(&device, &options)?),
    };
    if !device.is_cpu() {
        // The first call of each kernel loads it, and cuBLAS takes its workspace: nothing of a step.
        let once = Job {
            steps: 1,
            ..job.clone()
        };
        match &paged {
            Some(paged) => sample(model.as_ref(), &once, &mut &*paged, || ())?,
            None => sample(model.as_ref(), &once, &mut Plain, || ())?,
        };
        device.synchronize()?;
    }
    let (images, time, calls) = match (&mut compiled, &paged) {
        (Some(compiled), _) => run(model.as_ref(), &job, compiled, "compiled memory")?,
        (None, Some(paged)) => run(model.as_ref(), &job, &mut &*paged, "plain memory")?,
        (None, None) => run(model.as_ref(), &job, &mut Plain, "plain memory")?,
    };
    let ran = paged.as_ref().map(Paged::stats);
    let plain = match (arguments.memory.compare, &paged) {
        (true, None) => Some(run(model.as_ref(), &job, &mut Plain, "plain memory")?),
        (true, Some(_)) => {
            let model = load_on(arguments.model, source, &device)?;
            Some(run(model.as_ref(), &job, &mut Plain, "plain memory")?)
        }
        (false, _) => None,
    };
    write(&images, columns, &arguments.out, time)?;
    if let Some(compiled) = &mut compiled {
        say(format_args!("{}", compiled.stats()))?;
        arguments.write_report(&compiled.report())?;
    }
    if let (Some(loaded), Some(ran)) = (loaded, ran) {
        print_weights(&loaded, &ran, calls)?;
    }
    match plain {
        Some((plain, plain_time, _)) => compare(&images, time, &plain, plain_time),
        None => Ok(()),
    }
}

fn write(images: &Tensor, columns: usize, out: &Path, time: Duration) -> Result<()> {
    sheet::write(images, columns, out)?;
    say(format_args!(
        "{} in {:.2} s: {}",
        counted(images.dim(0)?, "image"),
        time.as_secs_f64(),
        out.display()
    ))
}

/// The same with the network in Burn.
#[cfg(feature = "burn")]
fn draw_with_burn(arguments: &Arguments, job: &Job, source: Source<'_>) -> Result<()> {
    use memory_compiler_models::burn::{Session, device};
    use memory_compiler_models::run::sample_from;

    let memory = &arguments.memory;
    if memory.weight_budget.is_some() {
        let why = "--weight-budget pages weights of Candle's; leave it out with --framework burn";
        return Err(Error::Setting(why.into()));
    }
    let device = device(arguments.device.number())?;
    let options = (!memory.no_compile).then(|| memory.burn_options());
    let mut session = Session::load(arguments.model, source, &device, options.as_ref())?;
    arguments.check_writable()?;
    let title = match memory.no_compile {
        true => "plain memory",
        false => "compiled memory",
    };
    if arguments.device.number().is_some() {
        // Kernels are compiled when they are first used: in neither run that is timed.
        let mut first = Session::load(arguments.model, source, &device, None)?;
        let short = Job {
            steps: 3,
            ..job.clone()
        };
        let draw = |progress: &mut dyn FnMut()| sample_from(&mut first, &short, progress);
        watch(
            &short,
            "plain memory, to compile and tune kernels (minutes)",
            draw,
        )?;
    }
    let draw = |progress: &mut dyn FnMut()| sample_from(&mut session, job, progress);
    let (images, time) = watch(job, title, draw)?;
    let plain = match memory.compare {
        true => {
            let mut plain = Session::load(arguments.model, source, &device, None)?;
            let draw = |progress: &mut dyn FnMut()| sample_from(&mut plain, job, progress);
            Some(watch(job, "plain memory", draw)?)
        }
        false => None,
    };
    write(&images, job.classes.len(), &arguments.out, time)?;
    if let Some(report) = session.report() {
        say(format_args!("{}", report.stats))?;
        arguments.write_report(&report)?;
    }
    match plain {
        Some((plain, plain_time)) => compare(&images, time, &plain, plain_time),
        None => Ok(()),
    }
}

/// What the weights did between loading and the end of sampling.
fn print_weights(loaded: &PagedStats, ran: &PagedStats, calls: u64) -> Result<()> {
    let copied = ran.copied.0 - loaded.copied.0;
    let waited = (ran.waited - loaded.waited).as_secs_f64() * 1e3;
    say(format_args!(
        "{:>12} {:>12} {:>12} {:>12} {:>14} {:>15} {:>12}",
        "weights", "budget", "resident", "evicted", "copied a step", "waited a step", "past budget"
    ))?;
    say(format_args!(
        "{:>12} {:>12} {:>12} {:>12} {:>14} {:>12.2} ms {:>12}",
        ran.weights,
        ran.pager.weights_limit,
        ran.resident,
        ran.weights.saturating_sub(ran.resident),
        Bytes(copied / calls.max(1)),
        waited / calls.max(1) as f64,
        ran.pager.beyond_peak,
    ))
}

/// Counts the calls of the model.
struct Counted<'s, S> {
    stepper: &'s mut S,
    calls: u64,
}

impl<S: Stepper> Stepper for Counted<'_, S> {
    fn step<T>(
        &mut self,
        name: &str,
        f: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        self.calls += 1;
        self.stepper.step(name, f)
    }
}

/// Draws the images of a network of Candle's; says how long it took and how many calls of the model.
fn run(
    model: &dyn Denoiser,
    job: &Job,
    stepper: &mut impl Stepper,
    title: &'static str,
) -> Result<(Tensor, Duration, u64)> {
    let mut stepper = Counted { stepper, calls: 0 };
    let draw = |progress: &mut dyn FnMut()| {
        let images = sample(model, job, &mut stepper, progress)?;
        model.device().synchronize()?;
        Ok(images)
    };
    let (images, time) = watch(job, title, draw)?;
    Ok((images, time, stepper.calls))
}

/// Draws with a progress bar, or a line where nobody could see one; says how long it took.
fn watch(
    job: &Job,
    title: &'static str,
    draw: impl FnOnce(&mut dyn FnMut()) -> Result<Tensor>,
) -> Result<(Tensor, Duration)> {
    let bar = ProgressBar::new(job.steps as u64).with_message(title);
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} steps, {eta} left")
    {
        bar.set_style(style);
    }
    if !io::stderr().is_terminal() {
        let images = counted(job.samples * job.classes.len(), "image");
        let steps = counted(job.steps, "step");
        tell(&format!("drawing {images} in {steps} on {title} …"));
    }
    let started = Instant::now();
    let images = draw(&mut || bar.inc(1));
    let time = started.elapsed();
    bar.finish_and_clear();
    Ok((images?, time))
}

/// Says whether both runs drew the same, bit for bit; an error when they did not.
fn compare(
    compiled: &Tensor,
    compiled_time: Duration,
    plain: &Tensor,
    plain_time: Duration,
) -> Result<()> {
    let bits = |images: &Tensor| -> candle_core::Result<Vec<u32>> {
        let values = images
            .to_dtype(DType::F32)?
            .flatten_all()?
            .to_vec1::<f32>()?;
        Ok(values.into_iter().map(f32::to_bits).collect())
    };
    let (compiled, plain) = (bits(compiled)?, bits(plain)?);
    let different = compiled.iter().zip(&plain).filter(|(a, b)| a != b).count();
    say(format_args!(
        "compiled {:.2} s, plain {:.2} s, ratio {:.3}",
        compiled_time.as_secs_f64(),
        plain_time.as_secs_f64(),
        compiled_time.as_secs_f64() / plain_time.as_secs_f64()
    ))?;
    if different > 0 || compiled.len() != plain.len() {
        return Err(Error::Setting(format!(
            "images differ in {different} of {} pixels",
            plain.len()
        )));
    }
    say(format_args!(
        "images are bit-identical ({} pixels)",
        plain.len()
    ))
}

/// A number of things, for people.
fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// Prints one line. A reader that has seen enough, such as `head`, is no failure.
fn say(line: fmt::Arguments<'_>) -> Result<()> {
    match writeln!(io::stdout(), "{line}") {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Error::Print(error)),
        _ => Ok(()),
    }
}

/// A line on standard error, for whoever still reads it.
fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

fn fail(message: &str) -> ExitCode {
    tell(message);
    ExitCode::from(2)
}

fn is_help(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
}

/// What clap says, less how the program is called, as one line: `what; tip; where to read more`.
fn one_line(message: &str) -> String {
    let said: Vec<String> = message
        .split("\n\n")
        .filter(|paragraph| !paragraph.starts_with("Usage:"))
        .map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|paragraph| !paragraph.is_empty())
        .collect();
    let line = said.join("; ").replace("; For more", "; for more");
    line.trim_end_matches('.').to_owned()
}

fn parse_count<N: FromStr>(text: &str) -> std::result::Result<N, String> {
    text.parse()
        .map_err(|_| "expected a whole number, such as 12".into())
}

fn parse_class(text: &str) -> std::result::Result<Class, String> {
    match text.parse() {
        _ if text == "all" => Ok(Class::All),
        Ok(digit @ 0..=9) => Ok(Class::One(digit)),
        _ => Err("a class is 0 to 9 or all".into()),
    }
}

fn parse_device(text: &str) -> std::result::Result<Place, String> {
    let number = match text.split_once(':') {
        None if text == "cpu" => return Ok(Place::Cpu),
        None if text == "cuda" => Some(0),
        Some(("cuda", number)) => number.parse().ok(),
        _ => None,
    };
    number
        .map(Place::Cuda)
        .ok_or_else(|| "a device is cpu, cuda or cuda:N".into())
}
