//! Third-party planner problems: what must be held. They are not in the repository; their folder is
//! named by `MEMORY_COMPILER_PLANNER_DATA`, else it is `../shared/traces`.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::Duration;

use flate2::read::GzDecoder;
use memory_compiler::Bytes;
use memory_compiler::lifespans;
use memory_compiler::planner::{self, Problem, Rules};

fn folder(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("MEMORY_COMPILER_PLANNER_DATA").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/traces"),
        PathBuf::from,
    );
    if folder.join("somas").is_dir() && folder.join("minimalloc").is_dir() {
        return Some(folder);
    }
    eprintln!(
        "SKIPPED {test}: {} has no minimalloc and somas; name their folder in MEMORY_COMPILER_PLANNER_DATA",
        folder.display()
    );
    None
}

fn problem(path: &Path, granule: Bytes) -> Problem {
    let file = File::open(path).unwrap();
    let source: Box<dyn BufRead> = if path.extension().is_some_and(|extension| extension == "gz") {
        Box::new(BufReader::new(GzDecoder::new(file)))
    } else {
        Box::new(BufReader::new(file))
    };
    let rows = lifespans::read_csv(source).unwrap();
    let items = rows
        .into_iter()
        .map(|row| (row.buffer.size, [row.buffer.lifespan]));
    Problem::new(granule, items).unwrap()
}

fn rules(time_limit: Duration) -> Rules {
    Rules {
        time_limit,
        ..Rules::default()
    }
}

fn holds_at_most(path: &Path, granule: Bytes, ratio: f64, time_limit: Duration) {
    let problem = problem(path, granule);
    let outcome = planner::plan(&problem, rules(time_limit));
    planner::check(&problem, &outcome.plan).unwrap();
    let held = outcome.plan.held(&problem);
    let most = problem.live_peak().0 as f64 * ratio;
    assert!(
        held.0 as f64 <= most,
        "{}: held {held}, L {}",
        path.display(),
        problem.live_peak()
    );
}

#[test]
fn minimalloc_problems_hold_their_live_peak() {
    let Some(folder) = folder("minimalloc_problems_hold_their_live_peak") else {
        return;
    };
    for letter in 'A'..='K' {
        let path = folder.join(format!("minimalloc/{letter}.1048576.csv"));
        holds_at_most(&path, Bytes::kib(1), 1.0, Duration::from_millis(200));
    }
}

#[test]
fn somas_resnet_holds_at_most_one_percent_over_its_live_peak() {
    let Some(folder) = folder("somas_resnet_holds_at_most_one_percent_over_its_live_peak") else {
        return;
    };
    holds_at_most(
        &folder.join("somas/resnet50.csv"),
        Bytes::mib(2),
        1.01,
        Duration::from_millis(200),
    );
}

#[test]
fn somas_pangu_holds_at_most_five_percent_over_its_live_peak() {
    let Some(folder) = folder("somas_pangu_holds_at_most_five_percent_over_its_live_peak") else {
        return;
    };
    holds_at_most(
        &folder.join("somas/pangu_2.6B.csv.gz"),
        Bytes::mib(2),
        1.05,
        Duration::from_secs(2),
    );
}
