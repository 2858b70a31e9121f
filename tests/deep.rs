//! Scopes nested as deep, and with names as long, as no program has them: everything about them costs time and memory
//! in proportion to their number, and no stack.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use memory_compiler::device::{Device, Host};
use memory_compiler::{
    Address, Allocation, Bytes, Compiler, Error, Options, Refusal, Scope, ScopeWatch, Step, scope,
    strict_scope, watch_scopes,
};

const DEPTH: usize = 100_000;
const SECOND: Duration = Duration::from_secs(1);
/// No text of a path is longer.
const LONGEST_PATH: usize = 8 << 10;

/// Times are measured, and watches are of the process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs in a thread whose stack holds no recursion over 100,000 of anything.
fn on_a_small_stack<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let small = std::thread::Builder::new().stack_size(256 << 10);
    small
        .spawn(f)
        .expect("a thread")
        .join()
        .expect("it ends well")
}

fn timed<T>(what: &str, limit: Duration, f: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = f();
    let took = began.elapsed();
    println!("{what}: {took:?}");
    let limit = limit * if cfg!(debug_assertions) { 5 } else { 1 };
    assert!(took < limit, "{what} took {took:?}");
    result
}

fn compiler(strict: bool) -> Compiler {
    let device: Arc<dyn Device> = Arc::new(Host::new(Bytes::kib(64)).expect("a device"));
    let options = Options {
        strict,
        edge_limit: 4_000_000,
        ..Options::default()
    };
    Compiler::new(device, options).expect("a compiler")
}

fn names() -> Vec<String> {
    (0..DEPTH).map(|depth| format!("level{depth}")).collect()
}

fn here(allocation: Result<Allocation, Error>) -> Address {
    match allocation {
        Ok(Allocation::Here(address)) => address,
        other => panic!("{other:?}"),
    }
}

/// A step with a buffer in each of the nested scopes.
fn nested(step: &Step<'_>, names: &[String]) -> Vec<Address> {
    let mut open: Vec<Scope> = Vec::with_capacity(names.len());
    let mut buffers = Vec::with_capacity(names.len());
    for name in names {
        open.push(scope(name));
        buffers.push(here(step.alloc(Bytes(512))));
    }
    while open.pop().is_some() {}
    buffers
}

#[test]
fn a_hundred_thousand_nested_scopes_take_less_than_a_second() {
    let _alone = alone();
    on_a_small_stack(|| {
        let names = names();
        let mut compiler = compiler(false);
        for round in 0..3 {
            let step = compiler.begin("step").expect("a step");
            let buffers = timed("nested scopes", SECOND, || nested(&step, &names));
            buffers
                .into_iter()
                .for_each(|at| step.free(at).expect("live"));
            let report = step.finish().expect("the step ends well");
            assert_eq!(report.recorded == 0, round > 0);
        }
        let stats = timed("statistics", SECOND, || compiler.stats());
        assert_eq!(stats.scopes.len(), DEPTH + 1);
        assert!(
            stats
                .scopes
                .iter()
                .all(|scope| scope.path.len() <= LONGEST_PATH)
        );
        let text: usize = stats.scopes.iter().map(|scope| scope.path.len()).sum();
        assert!(text < 64 << 20, "{text} bytes of paths");
        assert_eq!(stats.scopes[2].path, "step/level0/level1");
        let last = &stats.scopes[DEPTH].path;
        assert!(last.starts_with("step/level0/level1/level2/"), "{last}");
        assert!(last.contains("/…99969 more…/"), "{last}");
        assert!(last.ends_with("/level99998/level99999"), "{last}");
        assert!(stats.to_string().len() < 64 << 10);
        let report = timed("a report", 3 * SECOND, || compiler.report());
        let page = timed("a page of it", 5 * SECOND, || report.html());
        assert!(page.len() < 256 << 20, "{} bytes", page.len());
        timed("forgetting it", SECOND, move || drop((report, page, stats)));
        timed("the compiler's end", SECOND, move || drop(compiler));
    });
}

/// Statistics in the middle: all of them are open.
#[test]
fn statistics_of_open_scopes_are_linear_too() {
    let _alone = alone();
    on_a_small_stack(|| {
        let names = names();
        let mut compiler = compiler(false);
        let step = compiler.begin("step").expect("a step");
        let open: Vec<Scope> = names.iter().map(|name| scope(name)).collect();
        let buffer = here(step.alloc(Bytes(512)));
        let stats = timed("statistics", SECOND, || step.stats());
        assert_eq!(stats.scopes.len(), DEPTH + 1);
        assert_eq!(stats.scopes[DEPTH].peak, Bytes(512));
        step.free(buffer).expect("live");
        drop(open);
        step.finish().expect("the step ends well");
    });
}

#[test]
fn positions_in_deep_scopes_survive_in_linear_time() {
    let _alone = alone();
    on_a_small_stack(|| {
        let names = names();
        let mut compiler = compiler(false);
        let mut kept: Vec<Address> = Vec::new();
        for _ in 0..4 {
            let step = timed("a beginning", SECOND, || {
                compiler.begin("step").expect("a step")
            });
            let buffers = nested(&step, &names);
            for old in std::mem::replace(&mut kept, buffers) {
                step.free(old).expect("live");
            }
            step.finish().expect("the step ends well");
        }
        let stats = compiler.stats();
        assert_eq!(stats.survivor_positions, DEPTH as u64);
        kept.into_iter()
            .for_each(|at| memory_compiler::free(at).expect("live"));
    });
}

/// A vector of guards drops the outermost first.
#[test]
fn scopes_may_be_closed_in_any_order_in_linear_time() {
    let _alone = alone();
    let watch = Arc::new(Watch::default());
    let weak: Weak<Watch> = Arc::downgrade(&watch);
    watch_scopes(weak);
    on_a_small_stack(|| {
        let names = names();
        let mut compiler = compiler(false);
        let step = compiler.begin("step").expect("a step");
        let open = timed("opening", SECOND, || {
            names.iter().map(|name| scope(name)).collect::<Vec<_>>()
        });
        timed("closing the outermost first", SECOND, || drop(open));
        // Half of them stay open while guards of closed ones go.
        let _outer: Vec<Scope> = names[..DEPTH / 2].iter().map(|name| scope(name)).collect();
        let first = scope("first");
        let stale: Vec<Scope> = names[DEPTH / 2..].iter().map(|name| scope(name)).collect();
        timed("closing those around them", SECOND, || drop(first));
        timed("closing closed ones", SECOND, || drop(stale));
        let buffer = here(step.alloc(Bytes(512)));
        step.free(buffer).expect("live");
    });
    assert_eq!(watch.open.load(Ordering::SeqCst), 0);
}

#[derive(Default)]
struct Watch {
    open: Arc<AtomicUsize>,
    deepest: AtomicUsize,
}

struct Kept(Arc<AtomicUsize>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ScopeWatch for Watch {
    fn opened(&self, path: &[String]) -> Result<Option<Box<dyn Any>>, Refusal> {
        self.deepest.fetch_max(path.len(), Ordering::SeqCst);
        if path.last().is_some_and(|name| name == "missing") {
            return Err("no weights".into());
        }
        // It may not open scopes, and nothing comes of it if it does.
        drop(scope("inside"));
        self.open.fetch_add(1, Ordering::SeqCst);
        Ok(Some(Box::new(Kept(Arc::clone(&self.open)))))
    }
}

#[test]
fn watched_scopes_are_linear_too() {
    let _alone = alone();
    let watch = Arc::new(Watch::default());
    let weak: Weak<Watch> = Arc::downgrade(&watch);
    watch_scopes(weak);
    on_a_small_stack(|| {
        let names = names();
        let mut open: Vec<Scope> = Vec::new();
        timed("opening", SECOND, || {
            names.iter().for_each(|name| open.push(scope(name)))
        });
        let refused = memory_compiler::catch_scopes(|| scope("missing"));
        let Err(Error::Scope { path, reason }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(reason, "no weights");
        assert!(
            path.len() < LONGEST_PATH && path.starts_with("level0/"),
            "{path}"
        );
        assert!(path.ends_with("/level99999/missing"), "{path}");
        timed("closing", SECOND, || while open.pop().is_some() {});
    });
    assert_eq!(watch.open.load(Ordering::SeqCst), 0);
    assert_eq!(watch.deepest.load(Ordering::SeqCst), DEPTH + 1);
}

#[test]
fn errors_in_deep_scopes_are_short() {
    let _alone = alone();
    on_a_small_stack(|| {
        let names = names();
        let mut compiler = compiler(false);
        let step = compiler.begin("step").expect("a step");
        step.finish().expect("the step ends well");
        let step = compiler.begin("step").expect("a step");
        let errors: Vec<Error> = timed("a hundred thousand errors", SECOND, || {
            let mut open: Vec<Scope> = Vec::new();
            let errors = names.iter().map(|name| {
                open.push(strict_scope(name));
                step.alloc(Bytes(512)).expect_err("a strict break")
            });
            let errors = errors.collect();
            while open.pop().is_some() {}
            errors
        });
        for error in &errors {
            let Error::Strict { scope, .. } = error else {
                panic!("{error}");
            };
            assert!(scope.len() <= LONGEST_PATH);
        }
        assert!(
            errors[DEPTH - 1]
                .to_string()
                .contains("/level99998/level99999,")
        );
    });
}

#[test]
fn names_of_any_length_are_counted_and_shown_by_their_ends() {
    let _alone = alone();
    on_a_small_stack(|| {
        // Letters of two bytes, so that the middle of none is cut.
        let long = format!("a{}z", "ü".repeat(4 << 20));
        let other = format!("b{}z", "ü".repeat(4 << 20));
        let mut compiler = compiler(false);
        for _ in 0..2 {
            let step = compiler.begin(&other).expect("a step");
            for name in [&long, &other, &long] {
                let _outer = scope(name);
                let _inner = scope(name);
                let at = here(step.alloc(Bytes(512)));
                step.free(at).expect("live");
            }
            step.finish().expect("the step ends well");
        }
        let stats = compiler.stats();
        let runs: Vec<u64> = stats.scopes.iter().map(|scope| scope.runs).collect();
        assert_eq!(runs, [2, 4, 4, 2, 2]);
        for scope in &stats.scopes {
            assert!(scope.path.len() < 1_000, "{} bytes", scope.path.len());
            assert!(
                scope.path.starts_with("büü") && scope.path.ends_with("üüz"),
                "{}",
                scope.path
            );
            assert!(scope.path.contains('…'), "{}", scope.path);
        }
        let page = compiler.report().html();
        assert!(page.len() < 1 << 20, "{} bytes", page.len());
        assert!(compiler.stats().to_string().len() < 64 << 10);
    });
}
