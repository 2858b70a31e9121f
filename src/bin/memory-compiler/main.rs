//! The command-line program: plan a trace or a planner problem, check a plan, replay a trace.
//!
//! Results go to standard output, progress and errors to standard error. Exit code 0: done; 1: a plan
//! is wrong, or a step failed; 2: a file is damaged or cannot be read, or the command line is wrong.

mod input;

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use memory_compiler::device::{Device, Host};
use memory_compiler::lifespans::{self, Row, Spot};
use memory_compiler::planner::{self, Outcome, Problem, Rules};
use memory_compiler::trace::{Event, Trace};
use memory_compiler::{ALIGNMENT, Address, Allocation, Bytes, Compiler, Options, Step};

use input::{Input, Wrong};

/// Plan and replay the memory of a repeated inference step.
///
/// Files are traces (one event a line: `a <id> <bytes>`, `f <id>`, `s <scope>`, `e`) or planner
/// problems (CSV: `id,lower,upper,size`), plain or gzip.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Place every buffer with all lifespans known, and say what the plan holds.
    ///
    /// Prints L (the most bytes live at once, each size rounded up to 512 B), the floor (L rounded up
    /// to a granule), the height or the pages held, held over L, the strategy and the time.
    Plan {
        /// Traces or CSV files.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// After this time the best plan so far is used: `200ms`, `2s`.
        #[arg(long, default_value = "200ms", value_parser = duration)]
        time_limit: Duration,
        /// The device's smallest page: `2MiB`, `64KiB`, `1024`.
        #[arg(long, default_value = "2MiB", value_parser = bytes)]
        granule: Bytes,
        /// Only contiguous plans: no page stands at two places.
        #[arg(long)]
        contiguous: bool,
        /// Write the plan as CSV with an offset column, and a frames column where pages are aliased.
        #[arg(long, value_name = "FILE.csv")]
        out: Option<PathBuf>,
        /// One JSON object a file instead of the table.
        #[arg(long)]
        json: bool,
    },
    /// Check a file, and that its plan (or PLAN's) lets no two live buffers share a byte.
    Validate {
        /// A trace, a problem, or a problem with its plan.
        file: PathBuf,
        /// What `plan --out` wrote for it.
        plan: Option<PathBuf>,
        /// The granule that the plan was made for.
        #[arg(long, default_value = "2MiB", value_parser = bytes)]
        granule: Bytes,
    },
    /// Run a trace as repeated steps on a device, and print the statistics.
    Replay {
        /// A trace.
        file: PathBuf,
        /// Where the memory comes from.
        #[arg(long, value_enum, default_value_t = Place::Host)]
        device: Place,
        /// Steps to run; the first one records.
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
        steps: u64,
        /// The smallest page of the host device.
        #[arg(long, default_value = "2MiB", value_parser = bytes)]
        granule: Bytes,
        /// Write a page of HTML that shows where the memory goes.
        #[arg(long, value_name = "FILE")]
        report: Option<PathBuf>,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Place {
    /// Memory of this machine.
    Host,
    /// The driver's virtual memory. Needs a build with CUDA.
    Cuda,
}

fn duration(text: &str) -> Result<Duration, String> {
    let units = [("ms", 1e-3), ("us", 1e-6), ("µs", 1e-6), ("s", 1.0)];
    units
        .iter()
        .find_map(|(unit, seconds)| {
            Some(text.strip_suffix(unit)?.trim().parse::<f64>().ok()? * seconds)
        })
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| "expected a number and a unit: 200ms, 2s".into())
}

fn bytes(text: &str) -> Result<Bytes, String> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("B", 0), ("", 0)];
    let (number, shift) = units
        .iter()
        .find_map(|(unit, shift)| {
            Some((text.strip_suffix(unit)?.trim().parse::<u64>().ok()?, shift))
        })
        .ok_or("expected bytes: 2MiB, 64KiB, 1024")?;
    let bytes = number.checked_mul(1 << shift).ok_or("more than 64 bits")?;
    if bytes == 0 || bytes % ALIGNMENT.0 != 0 || bytes > Bytes::gib(1).0 {
        return Err(format!("not a multiple of {ALIGNMENT} up to 1 GiB"));
    }
    Ok(Bytes(bytes))
}

/// Why the program ends early.
enum Failure {
    /// Damaged or unreadable input: exit code 2.
    Input(Wrong),
    /// Anything else: exit code 1.
    Other(String),
}

impl From<Wrong> for Failure {
    fn from(wrong: Wrong) -> Self {
        Self::Input(wrong)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Other(error.to_string())
    }
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Plan {
            files,
            time_limit,
            granule,
            contiguous,
            out,
            json,
        } => {
            let rules = Rules {
                time_limit,
                aliasing: !contiguous,
                ..Rules::default()
            };
            plan(&files, rules, granule, out.as_deref(), json)
        }
        Command::Validate {
            file,
            plan,
            granule,
        } => validate(&file, plan.as_deref(), granule),
        Command::Replay {
            file,
            device,
            steps,
            granule,
            report,
        } => replay(&file, device, steps, granule, report.as_deref()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Input(wrong)) => {
            eprintln!("{wrong}");
            ExitCode::from(2)
        }
        // A reader that has seen enough, such as `head`, is no failure.
        Err(Failure::Other(reason)) if reason.contains("Broken pipe") => ExitCode::SUCCESS,
        Err(Failure::Other(reason)) => {
            eprintln!("{reason}");
            ExitCode::from(1)
        }
    }
}

/// Says on a terminal what takes a while.
fn progress(what: fmt::Arguments<'_>) {
    if io::stderr().is_terminal() {
        eprintln!("{what} …");
    }
}

fn problem(file: &Path, granule: Bytes, rows: &[Row]) -> Result<Problem, Wrong> {
    Problem::new(
        granule,
        rows.iter()
            .map(|row| (row.buffer.size, [row.buffer.lifespan.clone()])),
    )
    .map_err(|error| Wrong::whole(file, &error))
}

fn plan(
    files: &[PathBuf],
    rules: Rules,
    granule: Bytes,
    out: Option<&Path>,
    json: bool,
) -> Result<(), Failure> {
    if out.is_some() && files.len() > 1 {
        return Err(Failure::Input(Wrong::command(
            "--out takes one file at a time",
        )));
    }
    let mut target = io::stdout().lock();
    let widest = files
        .iter()
        .map(|file| file.display().to_string().chars().count())
        .max()
        .unwrap_or(0);
    if !json {
        writeln!(
            target,
            "{:<widest$} {:>8} {:>14} {:>14} {:>14} {:>14} {:>7} {:>9}  strategy",
            "file", "buffers", "L", "floor", "held", "addresses", "held/L", "time"
        )?;
    }
    for file in files {
        let rows = Input::open(file)?.rows()?;
        let problem = problem(file, granule, &rows)?;
        progress(format_args!(
            "planning {} ({} buffers)",
            file.display(),
            problem.len()
        ));
        let outcome = planner::plan(&problem, rules);
        let (held, plan) = (outcome.plan.held(&problem), &outcome.plan);
        if json {
            writeln!(target, "{}", object(file, &problem, &outcome))?;
        } else {
            writeln!(
                target,
                "{:<widest$} {:>8} {:>14} {:>14} {:>14} {:>14} {:>7.4} {:>6.1} ms  {}{}",
                file.display().to_string(),
                problem.len(),
                problem.live_peak().to_string(),
                problem.floor().to_string(),
                held.to_string(),
                plan.virtual_bytes(&problem).to_string(),
                held.0 as f64 / problem.live_peak().0.max(1) as f64,
                outcome.time.as_secs_f64() * 1e3,
                plan.strategy,
                if outcome.cut_off {
                    " (time limit reached)"
                } else {
                    ""
                }
            )?;
        }
        target.flush()?;
        if let Some(out) = out {
            let placed = placed(rows, &outcome, granule);
            let written = std::fs::File::create(out)
                .map(BufWriter::new)
                .and_then(|mut file| {
                    lifespans::write_csv(&placed, &mut file).and_then(|()| file.flush())
                });
            written.map_err(|error| Failure::Other(format!("{}: {error}", out.display())))?;
        }
    }
    Ok(())
}

fn object(file: &Path, problem: &Problem, outcome: &Outcome) -> serde_json::Value {
    serde_json::json!({
        "file": file.display().to_string(),
        "buffers": problem.len(),
        "live_peak_bytes": problem.live_peak().0,
        "floor_bytes": problem.floor().0,
        "held_bytes": outcome.plan.held(problem).0,
        "virtual_bytes": outcome.plan.virtual_bytes(problem).0,
        "strategy": outcome.plan.strategy,
        "seconds": outcome.time.as_secs_f64(),
    })
}

fn placed(mut rows: Vec<Row>, outcome: &Outcome, granule: Bytes) -> Vec<Row> {
    for (row, &start) in rows.iter_mut().zip(&outcome.plan.starts) {
        let offset = start * ALIGNMENT.0;
        let frames = match outcome.plan.frames {
            None => Vec::new(),
            Some(_) => pages(offset, row.buffer.size, granule)
                .filter_map(|page| outcome.plan.frame_at(page))
                .collect(),
        };
        row.spot = Some(Spot {
            offset: Bytes(offset),
            frames,
        });
    }
    rows
}

/// The virtual pages that a buffer touches.
fn pages(offset: u64, size: Bytes, granule: Bytes) -> impl Iterator<Item = u64> {
    let end = offset.saturating_add(size.0.max(1).next_multiple_of(ALIGNMENT.0));
    offset / granule.0..end.div_ceil(granule.0)
}

fn validate(file: &Path, plan: Option<&Path>, granule: Bytes) -> Result<(), Failure> {
    let mut rows = Input::open(file)?.rows()?;
    let problem = problem(file, granule, &rows)?;
    let plan_file = plan.unwrap_or(file);
    if let Some(plan) = plan {
        let mut spots: HashMap<String, Row> = Input::open(plan)?
            .rows()?
            .into_iter()
            .map(|row| (row.buffer.id.clone(), row))
            .collect();
        for row in &mut rows {
            let id = &row.buffer.id;
            let found = spots.remove(id).filter(|found| found.buffer == row.buffer);
            let found = found.ok_or_else(|| {
                Wrong::command(&format!(
                    "{}: buffer {id} is not in it, or has another size or lifespan than in {}",
                    plan.display(),
                    file.display()
                ))
            })?;
            row.spot = found.spot;
        }
        if let Some(id) = spots.keys().min() {
            let text = format!(
                "{}: buffer {id} is not in {}",
                plan.display(),
                file.display()
            );
            return Err(Wrong::command(&text).into());
        }
    }
    let mut target = io::stdout().lock();
    let summary = format!(
        "{} buffers, L {}, floor {}",
        rows.len(),
        problem.live_peak(),
        problem.floor()
    );
    if rows.iter().any(|row| row.spot.is_none()) {
        if plan.is_some() {
            return Err(Wrong::command(&format!(
                "{}: it has no offset column",
                plan_file.display()
            ))
            .into());
        }
        writeln!(
            target,
            "{}: sound; {summary}; no plan in it",
            file.display()
        )?;
        return Ok(());
    }
    // What the plan says of each page: every buffer must agree.
    let mut frames: HashMap<u64, u32> = HashMap::new();
    let mut starts = Vec::new();
    for row in &rows {
        let (buffer, spot) = (&row.buffer, row.spot.as_ref().expect("seen above"));
        let wrong = |reason: String| {
            Failure::Other(format!(
                "{}: buffer {}: {reason}",
                plan_file.display(),
                buffer.id
            ))
        };
        if spot.offset.0 % ALIGNMENT.0 != 0 || spot.offset.0 > u64::MAX >> 2 {
            return Err(wrong(format!(
                "offset {} is not a multiple of {ALIGNMENT}, or too large",
                spot.offset.0
            )));
        }
        let count = pages(spot.offset.0, buffer.size, granule).count();
        if !spot.frames.is_empty() && spot.frames.len() != count {
            return Err(wrong(format!(
                "{} frames for {count} pages of {granule}",
                spot.frames.len()
            )));
        }
        for (nth, page) in pages(spot.offset.0, buffer.size, granule).enumerate() {
            let frame = match spot.frames.get(nth) {
                Some(&frame) => frame,
                None => u32::try_from(page).map_err(|_| wrong("offset is too large".into()))?,
            };
            if *frames.entry(page).or_insert(frame) != frame {
                return Err(wrong(format!(
                    "page {page} has frame {frame} here and {} elsewhere",
                    frames[&page]
                )));
            }
        }
        starts.push(spot.offset.0 / ALIGNMENT.0);
    }
    let page_count = frames.keys().max().map_or(0, |last| last + 1);
    let distinct: std::collections::HashSet<u32> = frames.values().copied().collect();
    planner::check_places(&problem, &starts, |page| frames.get(&page).copied())
        .map_err(|fault| Failure::Other(format!("{}: {fault}", plan_file.display())))?;
    writeln!(
        target,
        "{}: sound plan; {summary}; held {}, addresses {}",
        plan_file.display(),
        Bytes(distinct.len() as u64 * granule.0),
        Bytes(page_count * granule.0)
    )?;
    Ok(())
}

/// The first GPU.
#[cfg(feature = "cuda")]
fn cuda() -> Result<Arc<dyn Device>, Failure> {
    let device = memory_compiler::device::Cuda::new(0);
    Ok(Arc::new(device.map_err(|error| {
        Failure::Other(format!("GPU 0: {error}"))
    })?))
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Arc<dyn Device>, Failure> {
    let why = "this build has no GPU: build it with `--features cli,cuda`";
    Err(Failure::Other(why.into()))
}

fn replay(
    file: &Path,
    device: Place,
    steps: u64,
    granule: Bytes,
    report: Option<&Path>,
) -> Result<(), Failure> {
    let trace = Input::open(file)?.trace()?;
    let device: Arc<dyn Device> = match device {
        Place::Host => {
            let host = Host::new(granule).map_err(|error| Failure::Other(error.to_string()))?;
            Arc::new(host)
        }
        Place::Cuda => cuda()?,
    };
    let failed = |error: memory_compiler::Error| Failure::Other(error.to_string());
    let mut compiler = Compiler::new(device, Options::default()).map_err(failed)?;
    let mut survivors = Vec::new();
    for nth in 0..steps {
        progress(format_args!("step {} of {steps}", nth + 1));
        let mut kept = Vec::new();
        let step = compiler.begin("step").map_err(failed)?;
        // What outlived the last step goes when this one has begun, as a step's output does.
        for address in std::mem::take(&mut survivors) {
            step.free(address).map_err(failed)?;
        }
        run(&step, &trace, &mut kept).map_err(failed)?;
        step.finish().map_err(failed)?;
        survivors = kept;
    }
    writeln!(io::stdout().lock(), "{}", compiler.stats())?;
    if let Some(path) = report {
        std::fs::write(path, compiler.report().html())
            .map_err(|error| Failure::Other(format!("{}: {error}", path.display())))?;
    }
    Ok(())
}

/// One step; what it leaves live is in `kept`.
fn run(
    step: &Step<'_>,
    trace: &Trace,
    kept: &mut Vec<Address>,
) -> Result<(), memory_compiler::Error> {
    let mut live: HashMap<u64, Address> = HashMap::new();
    let mut scopes = Vec::new();
    for event in &trace.events {
        match event {
            Event::Alloc { buffer, size } => {
                if let Allocation::Here(address) = step.alloc(*size)? {
                    live.insert(*buffer, address);
                }
            }
            Event::Free { buffer } => {
                if let Some(address) = live.remove(buffer) {
                    step.free(address)?;
                }
            }
            Event::Enter(name) => scopes.push(memory_compiler::scope(name)),
            Event::Leave => drop(scopes.pop()),
        }
    }
    while scopes.pop().is_some() {}
    kept.extend(live.into_values());
    kept.sort_unstable();
    Ok(())
}
