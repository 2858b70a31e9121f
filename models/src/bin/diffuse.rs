//! Draws handwritten digits with a small diffusion model.
//!
//! Whatever is wrong with what it is given, it says so in one line and exits with 2.

use clap::{Parser, error::ErrorKind};
use indicatif::{ProgressBar, ProgressStyle};
use memory_compiler_models::{
    Error, ModelKind, Result,
    run::{GuidanceMode, Job, Plain, sample},
    sampler::Method,
    sheet,
    weights::{Source, load},
};
use std::{path::PathBuf, process::ExitCode, time::Instant};

/// Draws handwritten digits with a small diffusion model and writes them as one sheet.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The network.
    #[arg(long, value_enum, default_value = "unet")]
    model: ModelKind,
    /// The way from noise to an image.
    #[arg(long, value_enum, default_value = "dpmpp-2m")]
    sampler: Method,
    /// Steps of the sampler.
    #[arg(long, default_value_t = 16)]
    steps: usize,
    /// Guidance: how far to go past the prediction without a digit; 1 draws without guidance.
    #[arg(long, value_name = "SCALE", default_value_t = 2.0)]
    cfg: f64,
    /// Guidance as two calls in turn or as one with twice the batch.
    #[arg(long, value_enum, default_value = "flip-flop")]
    cfg_mode: GuidanceMode,
    /// The share of the steps, from the first on, that flip-flop guides.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.66)]
    cfg_until: f64,
    /// A digit, or all of them.
    #[arg(long, value_name = "0-9|all", default_value = "all", value_parser = parse_class)]
    class: Class,
    /// Images of each digit.
    #[arg(long, default_value_t = 2)]
    samples: usize,
    /// Where the noise comes from.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Other weights than the ones that are part of the program.
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// The sheet, a PNG: a column for each digit, a row for each sample.
    #[arg(long, value_name = "FILE", default_value = "sheet.png")]
    out: PathBuf,
    #[command(flatten)]
    memory: Memory,
}

/// What the memory compiler is told.
#[derive(Debug, clap::Args)]
struct Memory {
    /// Fail when a step leaves the compiled paths.
    #[arg(long)]
    strict: bool,
    /// Run on plain memory.
    #[arg(long, conflicts_with_all = ["strict", "compare", "threshold", "granule", "budget"])]
    no_compile: bool,
    /// Run on plain memory too, and say whether every pixel is the same.
    #[arg(long)]
    compare: bool,
    /// Serve buffers of at least this size.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    threshold: Option<u64>,
    /// The size of a page.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    granule: Option<u64>,
    /// Hold at most this much.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    budget: Option<u64>,
}

impl Memory {
    /// Whether anything asks for compiled memory.
    fn is_asked_for(&self) -> bool {
        self.strict
            || self.compare
            || [self.threshold, self.granule, self.budget]
                .iter()
                .any(Option::is_some)
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
    if arguments.memory.is_asked_for() && !arguments.memory.no_compile {
        return Err(Error::Setting(
            "this build runs on plain memory only".into(),
        ));
    }
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
    let model = load(arguments.model, source)?;
    sheet::check_writable(&arguments.out)?;

    let bar = ProgressBar::new(job.steps as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} steps, {eta} left") {
        bar.set_style(style);
    }
    let started = Instant::now();
    let images = sample(model.as_ref(), &job, &mut Plain, || bar.inc(1))?;
    bar.finish_and_clear();
    sheet::write(&images, columns, &arguments.out)?;
    println!(
        "{} images in {:.1} s: {}",
        images.dim(0)?,
        started.elapsed().as_secs_f64(),
        arguments.out.display()
    );
    Ok(())
}

fn fail(message: &str) -> ExitCode {
    eprintln!("{message}");
    ExitCode::from(2)
}

fn is_help(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
}

/// The first paragraph of a message, as one line.
fn one_line(message: &str) -> String {
    let lines: Vec<&str> = message
        .lines()
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    lines.join(" ")
}

fn parse_class(text: &str) -> std::result::Result<Class, String> {
    match text.parse() {
        _ if text == "all" => Ok(Class::All),
        Ok(digit @ 0..=9) => Ok(Class::One(digit)),
        _ => Err("a class is 0 to 9 or all".into()),
    }
}

/// A number of bytes, with an optional `K`, `KiB`, `M`, `MiB`, `G` or `GiB` behind it.
fn parse_bytes(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match text[digits.len()..].trim() {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        _ => 0u64,
    };
    match digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit)) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err("sizes look like 65536, 64KiB or 2MiB".into()),
    }
}
