//! Steps that are left at each of their events, and processes that end with buffers alive: direct API;
//! `hook_threads.rs` does the same through the allocator.

mod reference;

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::Mutex;

use memory_compiler::device::StreamId;
use memory_compiler::{
    Address, Allocation, Bytes, Compiler, Error, Options, Step, free, pause, scope, strict_scope,
};

use reference::devices::{CountingHost, Pattern, counting_host};
use reference::pair::on_thread;

const PAGE: u64 = 4096;
const OTHER: StreamId = StreamId(9);

fn compiler(device: &CountingHost) -> Compiler {
    let options = Options {
        address_space: Bytes::mib(64),
        ..Options::default()
    };
    Compiler::new(device.clone(), options).expect("a compiler")
}

/// Buffers that are alive, with their contents.
#[derive(Default)]
struct Live {
    buffers: Vec<(Address, Pattern)>,
    seeds: u64,
}

impl Live {
    fn alloc(&mut self, device: &CountingHost, step: &Step<'_>, size: u64) -> Result<(), Error> {
        let Allocation::Here(at) = step.alloc(Bytes(size))? else {
            panic!("a step serves its own stream")
        };
        self.seeds += 1;
        let seed = self.seeds;
        let pattern = Pattern { seed, size };
        pattern.write(&**device, at.0);
        self.buffers.push((at, pattern));
        Ok(())
    }

    fn take(&mut self, device: &CountingHost, at: usize) -> Address {
        let (address, pattern) = self.buffers.remove(at);
        pattern.check(&**device, address.0);
        address
    }

    fn check(&self, device: &CountingHost) {
        self.buffers
            .iter()
            .for_each(|(at, pattern)| pattern.check(&**device, at.0));
    }
}

/// How a step is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leave {
    Panic,
    Return,
    /// With scopes and pauses that are dropped after their step.
    GuardsLast,
    /// The step is leaked, and its guards with it.
    Forget,
}

const EVERY: [Leave; 4] = [
    Leave::Panic,
    Leave::Return,
    Leave::GuardsLast,
    Leave::Forget,
];

/// A step of every kind of event. `event` says before each whether to go on.
fn program(
    device: &CountingHost,
    step: &Step<'_>,
    live: &mut Live,
    guards: &mut Vec<Box<dyn std::any::Any>>,
    event: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    event()?;
    live.alloc(device, step, 3 * PAGE)?;
    event()?;
    live.alloc(device, step, 512)?;
    for turn in 0..3 {
        guards.push(Box::new(scope("block")));
        event()?;
        live.alloc(device, step, PAGE * (1 + turn % 2))?;
        event()?;
        live.alloc(device, step, PAGE / 2 + 512 * turn)?;
        event()?;
        let at = live.take(device, live.buffers.len() - 2);
        on_thread(move || memory_compiler::free_on(OTHER, at))?;
        event()?;
        guards.push(Box::new(pause()));
        event()?;
        assert_eq!(step.alloc(Bytes(PAGE)), Ok(Allocation::Elsewhere));
        let at = live.take(device, 0);
        step.free(at)?;
        event()?;
        drop(guards.pop());
        event()?;
        guards.push(Box::new(strict_scope("strict")));
        event()?;
        drop(guards.pop());
        step.use_stream(StreamId(turn % 2))?;
        event()?;
        drop(guards.pop());
    }
    event()?;
    while live.buffers.len() > 1 {
        let at = live.take(device, 0);
        free(at)?;
        event()?;
    }
    event()
}

/// Runs the program, leaving it at an event; whether it came to that.
fn leave_at(
    device: &CountingHost,
    compiler: &mut Compiler,
    live: &mut Live,
    at: u32,
    how: Leave,
) -> bool {
    let mut count = 0;
    let mut event = || {
        count += 1;
        match count > at {
            true if how == Leave::Panic => resume_unwind(Box::new(at)),
            true => Err(Error::NoStep),
            false => Ok(()),
        }
    };
    // Goes last where the step goes first.
    let mut guards: Vec<Box<dyn std::any::Any>> = Vec::new();
    let step = compiler.begin("step").expect("a step");
    let left = catch_unwind(AssertUnwindSafe(|| {
        program(device, &step, live, &mut guards, &mut event)
    }));
    match left {
        Ok(Ok(())) => {
            step.finish().expect("the step ends well");
            return false;
        }
        Ok(Err(error)) => assert_eq!(error, Error::NoStep),
        Err(payload) => assert_eq!(payload.downcast_ref(), Some(&at)),
    }
    match how {
        Leave::Forget => {
            std::mem::forget(guards);
            std::mem::forget(step);
        }
        Leave::GuardsLast => {
            drop(step);
            guards.into_iter().rev().for_each(drop);
        }
        Leave::Panic | Leave::Return => {
            guards.into_iter().rev().for_each(drop);
            drop(step);
        }
    }
    true
}

#[test]
fn a_step_may_be_left_at_each_of_its_events_in_any_way() {
    let mut ways = 0;
    for (how, recorded) in EVERY
        .into_iter()
        .flat_map(|how| [(how, 0), (how, 1), (how, 4)])
    {
        for at in 0.. {
            let device = counting_host(Bytes(PAGE));
            let mut compiler = compiler(&device);
            let mut live = Live::default();
            for _ in 0..recorded {
                live.buffers
                    .drain(..)
                    .for_each(|(at, _)| free(at).expect("live"));
                assert!(!leave_at(&device, &mut compiler, &mut live, u32::MAX, how));
            }
            if at % 3 == 2 {
                compiler.trim().expect("trimming works");
            }
            let came = leave_at(&device, &mut compiler, &mut live, at, how);
            live.check(&device);
            let stats = compiler.stats();
            assert_eq!(stats.aborts, u64::from(came), "{how:?} {at}");
            assert_eq!(stats.live.0 > 0, !live.buffers.is_empty());
            assert_eq!(stats.bad_frees, 0, "{how:?} {at}");
            compiler
                .snapshot()
                .validate()
                .unwrap_or_else(|fault| panic!("{how:?} {at}: {fault}"));
            // The next steps run, and settle.
            for _ in 0..4 {
                live.check(&device);
                live.buffers
                    .drain(..)
                    .for_each(|(at, _)| free(at).expect("live"));
                assert!(!leave_at(&device, &mut compiler, &mut live, u32::MAX, how));
            }
            let stats = compiler.stats();
            assert_eq!(
                (stats.breaks_step, stats.device_calls_step),
                (0, 0),
                "{how:?} {at}: {stats}"
            );
            if at % 2 == 0 {
                compiler.compile().expect("compiling works");
            }
            drop(compiler);
            live.check(&device);
            live.buffers
                .drain(..)
                .for_each(|(at, _)| free(at).expect("live"));
            assert!(device.is_empty(), "{how:?} {at}: {:?}", device.books());
            if !came {
                assert!(at > 30, "{at} events are few");
                ways += at;
                break;
            }
        }
    }
    println!("left in {ways} ways");
}

/// Frees what it has when it goes.
struct FreedOnDrop(Vec<(CountingHost, Address, Pattern)>);

impl Drop for FreedOnDrop {
    fn drop(&mut self) {
        for (device, at, pattern) in self.0.drain(..) {
            pattern.check(&*device, at.0);
            free(at).expect("live");
        }
        println!("a destructor ran");
    }
}

thread_local! {
    static LAST: RefCell<FreedOnDrop> = const { RefCell::new(FreedOnDrop(Vec::new())) };
    static COMPILER: RefCell<Option<Compiler>> = const { RefCell::new(None) };
}

static AT_EXIT: Mutex<Vec<(CountingHost, Address, Pattern)>> = Mutex::new(Vec::new());

/// A compiler and three buffers of it.
fn made() -> (Compiler, Vec<(CountingHost, Address, Pattern)>) {
    let device = counting_host(Bytes(PAGE));
    let mut compiler = compiler(&device);
    let mut live = Live::default();
    let step = compiler.begin("step").expect("a step");
    for pages in 1..4 {
        live.alloc(&device, &step, pages * PAGE).expect("served");
    }
    step.finish().expect("the step ends well");
    let buffers = live.buffers.into_iter();
    let buffers = buffers.map(|(at, pattern)| (device.clone(), at, pattern));
    (compiler, buffers.collect())
}

/// Ends with buffers in a handler of `exit`, in thread-locals of the main thread and of one that still
/// runs, with compilers that are gone, in a static, in a thread-local, and in the middle of a step.
#[test]
#[ignore = "exits: run by the test below, in a process of its own"]
fn a_process_that_exits() {
    extern "C" fn handler() {
        let buffers = std::mem::take(&mut *AT_EXIT.lock().expect("no thread panicked"));
        let count = buffers.len();
        drop(FreedOnDrop(buffers));
        // A whole compiler while the process exits.
        let (compiler, buffers) = made();
        drop(compiler);
        drop(FreedOnDrop(buffers));
        println!("the handler freed {count}");
    }
    // SAFETY: the handler is a function of this process; what panics in it aborts, as it may not unwind.
    assert_eq!(unsafe { libc::atexit(handler) }, 0);
    let (gone, mut buffers) = made();
    drop(gone);
    AT_EXIT.lock().expect("ours").append(&mut buffers);
    static KEPT: Mutex<Option<Compiler>> = Mutex::new(None);
    let (kept, mut buffers) = made();
    *KEPT.lock().expect("ours") = Some(kept);
    AT_EXIT.lock().expect("ours").extend(buffers.drain(..2));
    LAST.with_borrow_mut(|last| last.0.append(&mut buffers));
    let (local, mut buffers) = made();
    LAST.with_borrow_mut(|last| last.0.extend(buffers.drain(..1)));
    AT_EXIT.lock().expect("ours").append(&mut buffers);
    COMPILER.set(Some(local));
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut busy, mut buffers) = made();
        LAST.with_borrow_mut(|last| last.0.append(&mut buffers));
        ready.send(()).expect("the main thread waits");
        loop {
            // In the middle of a step when the process goes.
            let step = busy.begin("step").expect("a step");
            for pages in 1..9 {
                if let Ok(Allocation::Here(at)) = step.alloc(Bytes(pages * PAGE)) {
                    step.free(at).expect("live");
                }
            }
        }
    });
    is_ready.recv().expect("it runs");
    // A step of this thread that never ends.
    let (open, mut buffers) = made();
    let open = Box::leak(Box::new(open));
    std::mem::forget(open.begin("never ended").expect("a step"));
    AT_EXIT.lock().expect("ours").append(&mut buffers);
    std::process::exit(0);
}

#[test]
fn buffers_may_be_freed_while_the_process_exits() {
    for _ in 0..20 {
        let child = Command::new(std::env::current_exe().expect("this test"))
            .args([
                "--exact",
                "a_process_that_exits",
                "--ignored",
                "--nocapture",
            ])
            .output()
            .expect("a child");
        let said = String::from_utf8_lossy(&child.stdout);
        let errors = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{}\n{said}{errors}", child.status);
        assert!(said.contains("the handler freed 10"), "{said}{errors}");
    }
}

/// Destructors of thread-locals free buffers of their own compiler and of others, and the compiler itself
/// goes in one.
#[test]
fn thread_locals_free_buffers_and_compilers_when_their_thread_ends() {
    for round in 0..30 {
        let (mut mine, mut theirs) = made();
        let device = theirs[0].0.clone();
        let ended = on_thread(move || {
            // Which of the two goes first depends on which was used first.
            if round % 2 == 0 {
                COMPILER.set(None);
            }
            LAST.with_borrow_mut(|last| last.0.extend(theirs.drain(..2)));
            let (own, mut buffers) = made();
            let device = buffers[0].0.clone();
            LAST.with_borrow_mut(|last| last.0.append(&mut buffers));
            if round % 3 > 0 {
                COMPILER.set(Some(own));
            }
            (device, theirs)
        });
        let (other, theirs) = ended;
        assert!(other.is_empty(), "round {round}: {:?}", other.books());
        let stats = mine.stats();
        assert_eq!((stats.live, stats.bad_frees), (Bytes(3 * PAGE), 0));
        drop(mine);
        drop(FreedOnDrop(theirs));
        assert!(device.is_empty());
    }
}
