//! What planning holds and costs: the recorded traces, MiniMalloc A–K, two SOMAS problems, and growth.
//!
//! Beside each plan stands the floor, below which nothing can be held, and the peer: a plain best fit
//! by size, the rule of TFLite and others. Every plan is checked before it is timed.
//!
//! What the numbers do not mean: the last column of the first table stops at the time limit, so it
//! depends on the machine; MiniMalloc itself fits all eleven of its problems into their capacity, with
//! an exact search and without aliasing.
//!
//! The third-party problems are read from where `MEMORY_COMPILER_PLANNER_DATA` says, else from
//! `../shared/traces` beside the repository; without them their rows are left out, aloud.

use std::fs::File;
use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flate2::read::GzDecoder;
use memory_compiler::Bytes;
use memory_compiler::lifespans::{self, Buffer};
use memory_compiler::planner::{self, Outcome, Problem, Rules};
use memory_compiler::trace::Trace;

struct Input {
    name: String,
    buffers: Vec<Buffer>,
    granule: Bytes,
    time_limit: Duration,
}

impl Input {
    fn problem(&self) -> Problem {
        let items = self
            .buffers
            .iter()
            .map(|buffer| (buffer.size, [buffer.lifespan.clone()]));
        Problem::new(self.granule, items).expect("sound input")
    }
}

fn open(path: &Path) -> Box<dyn BufRead> {
    let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    if path.extension().is_some_and(|extension| extension == "gz") {
        Box::new(BufReader::new(GzDecoder::new(file)))
    } else {
        Box::new(BufReader::new(file))
    }
}

fn trace(name: &str) -> Input {
    let path = format!("{}/tests/data/{name}.trace.gz", env!("CARGO_MANIFEST_DIR"));
    let trace = Trace::read(open(Path::new(&path))).expect("a sound trace");
    Input {
        name: name.into(),
        buffers: lifespans::of_trace(&trace),
        granule: Bytes::mib(2),
        time_limit: Duration::from_millis(200),
    }
}

fn third_party() -> Option<PathBuf> {
    let folder = std::env::var_os("MEMORY_COMPILER_PLANNER_DATA").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/traces"),
        PathBuf::from,
    );
    if folder.join("somas").is_dir() {
        return Some(folder);
    }
    println!("SKIPPED: no third-party problems; MEMORY_COMPILER_PLANNER_DATA names their folder");
    None
}

fn csv(path: &Path, name: &str, granule: Bytes, time_limit: Duration) -> Input {
    let rows = lifespans::read_csv(open(path)).expect("a sound problem");
    let buffers = rows.into_iter().map(|row| row.buffer).collect();
    Input {
        name: name.into(),
        buffers,
        granule,
        time_limit,
    }
}

fn inputs(folder: Option<&Path>) -> Vec<Input> {
    let mut inputs: Vec<Input> = ["sd15", "sdxl", "flux"].map(trace).into();
    let Some(folder) = folder else { return inputs };
    let limit = Duration::from_millis(200);
    for letter in 'A'..='K' {
        let path = folder.join(format!("minimalloc/{letter}.1048576.csv"));
        inputs.push(csv(
            &path,
            &format!("minimalloc {letter}"),
            Bytes::kib(1),
            limit,
        ));
    }
    let somas = folder.join("somas");
    inputs.push(csv(
        &somas.join("resnet50.csv"),
        "somas resnet50",
        Bytes::mib(2),
        limit,
    ));
    let pangu = somas.join("pangu_2.6B.csv.gz");
    inputs.push(csv(
        &pangu,
        "somas pangu",
        Bytes::mib(2),
        Duration::from_secs(2),
    ));
    inputs
}

fn checked(problem: &Problem, rules: Rules) -> Outcome {
    let outcome = planner::plan(problem, rules);
    planner::check(problem, &outcome.plan).expect("no two live buffers share a byte");
    outcome
}

/// The plain best fit by size, alone.
const PEER: Rules = Rules {
    time_limit: Duration::ZERO,
    more_orders: false,
    aliasing: false,
    both_ends: false,
    search: false,
};

const MINIMALLOC_CAPACITY: Bytes = Bytes::mib(1);

fn mib(bytes: Bytes) -> String {
    format!("{:.2} MiB", bytes.as_mib())
}

fn table(inputs: &[Input]) {
    println!(
        "{:<16} {:>7} {:>14} {:>14} {:>14} {:>7} {:>10} | {:>8} | {:>10} {:>6}  strategy",
        "input", "buffers", "L", "floor", "held", "/ L", "time", "peer / L", "contiguous", "/ L"
    );
    let (mut fit, mut over, mut count) = (0, 0.0, 0);
    for input in inputs {
        let problem = input.problem();
        let rules = Rules {
            time_limit: input.time_limit,
            ..Rules::default()
        };
        let outcome = checked(&problem, rules);
        let contiguous = checked(
            &problem,
            Rules {
                aliasing: false,
                ..rules
            },
        )
        .plan;
        let peer = checked(&problem, PEER).plan;
        let of_peak = |bytes: Bytes| bytes.0 as f64 / problem.live_peak().0 as f64;
        let height = contiguous.height(&problem);
        if input.name.starts_with("minimalloc") {
            count += 1;
            fit += usize::from(height <= MINIMALLOC_CAPACITY);
            over += height.0 as f64 / MINIMALLOC_CAPACITY.0 as f64;
        }
        println!(
            "{:<16} {:>7} {:>14} {:>14} {:>14} {:>7.4} {:>7.1} ms | {:>8.4} | {:>10} {:>6.3}  {}",
            input.name,
            problem.len(),
            mib(problem.live_peak()),
            mib(problem.floor()),
            mib(outcome.plan.held(&problem)),
            of_peak(outcome.plan.held(&problem)),
            outcome.time.as_secs_f64() * 1e3,
            of_peak(peer.held(&problem)),
            mib(height),
            of_peak(height),
            outcome.plan.strategy,
        );
    }
    if count > 0 {
        println!(
            "MiniMalloc, contiguous only, within the time limit: {fit} of {count} reach the capacity, \
             mean height / capacity {:.3}",
            over / count as f64
        );
    }
}

/// A step whose buffers live for a few hundred events, some for much longer: sizes and lifespans drawn
/// as a model's are, a few sizes many times.
fn synthetic(count: u64) -> Input {
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut below = |limit: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % limit
    };
    let buffers = (0..count)
        .map(|begin| {
            let long = below(50) == 0;
            let len = 1 + below(if long { count / 10 } else { 60 });
            let size =
                Bytes((1 + below(40)) * [512, 20_480, 655_360, 2_621_440][below(4) as usize]);
            Buffer {
                id: begin.to_string(),
                lifespan: begin..begin + len,
                size,
            }
        })
        .collect();
    Input {
        name: format!("{count}"),
        buffers,
        granule: Bytes::mib(2),
        time_limit: Duration::from_secs(60),
    }
}

fn growth() {
    println!("growth, without a time limit: time until the first plan, and until the last");
    println!(
        "{:>8} {:>14} {:>12} {:>8} | {:>12} {:>8}",
        "buffers", "L", "first", "/ L", "all", "/ L"
    );
    for count in [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000] {
        let input = synthetic(count);
        let problem = input.problem();
        let began = Instant::now();
        let first = planner::plan(&problem, PEER);
        let first_time = began.elapsed();
        let all = checked(
            &problem,
            Rules {
                time_limit: input.time_limit,
                ..Rules::default()
            },
        );
        let of_peak =
            |outcome: &Outcome| outcome.plan.held(&problem).0 as f64 / problem.live_peak().0 as f64;
        println!(
            "{count:>8} {:>14} {:>9.1} ms {:>8.4} | {:>9.1} ms {:>8.4}",
            mib(problem.live_peak()),
            first_time.as_secs_f64() * 1e3,
            of_peak(&first),
            all.time.as_secs_f64() * 1e3,
            of_peak(&all)
        );
    }
}

fn plans(c: &mut Criterion) {
    let folder = third_party();
    let inputs = inputs(folder.as_deref());
    table(&inputs);
    growth();
    let mut group = c.benchmark_group("plan");
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(1))
        .warm_up_time(Duration::from_millis(200));
    for input in inputs.iter().take(3) {
        let problem = input.problem();
        group.throughput(Throughput::Elements(problem.len() as u64));
        group.bench_function(BenchmarkId::new("default", &input.name), |b| {
            b.iter(|| black_box(planner::plan(&problem, Rules::default())));
        });
    }
    group.finish();
}

criterion_group!(benches, plans);
criterion_main!(benches);
