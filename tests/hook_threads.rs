//! The CPU hook and threads: real buffers that end on other threads, in thread-local destructors and
//! while the process exits, and steps that are left at every event.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use memory_compiler::device::adaptor::Counting;
use memory_compiler::device::{Device, Host};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::{Bytes, Compiler, Error, Options, pause, scope};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

const KIB: usize = 1 << 10;

type Counted = Arc<Counting<Host>>;

fn compiler() -> (Counted, Compiler) {
    let device = Arc::new(Counting::new(Host::new(Bytes::kib(4)).unwrap()));
    let options = Options {
        address_space: Bytes::gib(1),
        ..Options::default()
    };
    let compiler = Compiler::new(Arc::clone(&device) as Arc<dyn Device>, options).unwrap();
    (device, compiler)
}

/// A buffer whose contents are checked when it goes.
struct Filled(Vec<u8>, u8);

impl Filled {
    fn new(len: usize, value: u8) -> Self {
        Self(vec![value; len], value)
    }

    fn check(&self) {
        assert!(self.0.iter().all(|&byte| byte == self.1), "overwritten");
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        // A destructor of a thread-local must not unwind.
        if !self.0.iter().all(|&byte| byte == self.1) {
            eprintln!("a buffer of {} bytes was overwritten", self.0.len());
            std::process::abort();
        }
    }
}

fn step(compiler: &mut Compiler, value: u8) -> Filled {
    compiler
        .step(|| {
            drop(Filled::new(100 * KIB, !value));
            Ok::<_, Error>(Filled::new(64 * KIB, value))
        })
        .unwrap()
}

thread_local! {
    static EARLY: RefCell<Vec<Filled>> = const { RefCell::new(Vec::new()) };
    static LATE: RefCell<Option<(Filled, Compiler)>> = const { RefCell::new(None) };
}

#[test]
fn thread_local_destructors_free_buffers_of_their_own_and_of_other_threads() {
    let (device, mut shared) = compiler();
    for round in 0..20 {
        let theirs = step(&mut shared, round);
        let (of_thread, ended) = (Arc::clone(&device), round % 2 == 0);
        let thread = thread::spawn(move || {
            // Registered before this thread knows of any step, so destroyed after what comes later.
            EARLY.with_borrow_mut(|kept| kept.push(theirs));
            let (device, mut own) = compiler();
            let (first, second) = (step(&mut own, 1), step(&mut own, 2));
            EARLY.with_borrow_mut(|kept| kept.push(first));
            if ended {
                drop(own);
                EARLY.with_borrow_mut(|kept| kept.push(second));
            } else {
                // The compiler itself goes in a destructor, beside its buffer.
                LATE.set(Some((second, own)));
            }
            drop(of_thread);
            device
        });
        assert!(thread.join().unwrap().is_empty());
    }
    assert_eq!(shared.stats().live, Bytes::ZERO);
    drop(shared);
    assert!(device.is_empty());
}

#[test]
fn a_thread_that_panics_in_its_step_leaves_readable_buffers() {
    let (device, mut compiler) = compiler();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let there = Arc::clone(&kept);
    let panicked = thread::spawn(move || {
        compiler.step(|| -> Result<(), Error> {
            for i in 0..5 {
                there.lock().unwrap().push(Filled::new(64 * KIB, i));
            }
            resume_unwind(Box::new("on purpose"))
        })
    })
    .join();
    assert!(panicked.is_err());
    assert!(!device.is_empty(), "the compiler is gone, its buffers not");
    kept.lock().unwrap().iter().for_each(Filled::check);
    drop(kept);
    assert!(device.is_empty());
}

#[test]
fn steps_on_several_threads_pass_their_buffers_round() {
    const THREADS: usize = 4;
    let (give, take): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel::<Filled>()).unzip();
    let threads: Vec<_> = take
        .into_iter()
        .enumerate()
        .map(|(own, take)| {
            let give = give[(own + 1) % THREADS].clone();
            thread::spawn(move || {
                let (device, mut compiler) = compiler();
                for round in 0..100_u8 {
                    compiler
                        .step(|| {
                            let _scope = scope("round");
                            let scratch = Filled::new((20 + own) * KIB, round);
                            give.send(Filled::new(40 * KIB, round ^ own as u8)).unwrap();
                            take.try_iter().for_each(drop);
                            scratch.check();
                            Ok::<_, Error>(())
                        })
                        .unwrap();
                }
                drop(give);
                take.iter().for_each(drop);
                (device, compiler)
            })
        })
        .collect();
    drop(give);
    // All of them first: a buffer may be on its way to the last.
    let ended: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    for (device, mut compiler) in ended {
        let stats = compiler.stats();
        assert_eq!((stats.live, stats.bad_frees), (Bytes::ZERO, 0));
        drop(compiler);
        assert!(device.is_empty());
    }
}

/// What a step of the program below does; `event` panics or returns when its turn has come.
fn program(
    event: &mut dyn FnMut() -> Result<(), Error>,
    kept: &RefCell<Vec<Filled>>,
) -> Result<(), Error> {
    event()?;
    let first = Filled::new(40 * KIB, 1);
    event()?;
    for turn in 0..3_u8 {
        let _block = scope("block");
        event()?;
        let mut grows = vec![turn; 20 * KIB];
        event()?;
        grows.resize(50 * KIB, turn);
        event()?;
        kept.borrow_mut().push(Filled::new(16 * KIB, 7 + turn));
        event()?;
        {
            let _pause = pause();
            event()?;
            drop(Filled::new(64 * KIB, 9));
        }
        event()?;
        drop(grows);
        if turn == 1 {
            let oldest = kept.borrow_mut().remove(0);
            event()?;
            drop(oldest);
        }
        event()?;
    }
    first.check();
    event()
}

/// Runs the program so that event `at` is left by `leave`; whether it came to that.
fn leave_at(compiler: &mut Compiler, at: u32, kept: &RefCell<Vec<Filled>>, panics: bool) -> bool {
    let mut count = 0;
    let mut event = || {
        count += 1;
        match count > at {
            true if panics => resume_unwind(Box::new(at)),
            true => Err(Error::NoStep),
            false => Ok(()),
        }
    };
    let left = catch_unwind(AssertUnwindSafe(|| {
        compiler.step(|| program(&mut event, kept))
    }));
    match left {
        Ok(Ok(())) => return false,
        Ok(Err(error)) => assert_eq!(error, Error::NoStep),
        Err(payload) => assert_eq!(payload.downcast_ref(), Some(&at)),
    }
    true
}

#[test]
fn a_step_may_be_left_at_every_event_by_a_panic_or_an_early_return() {
    for (panics, recorded) in [(true, 0), (true, 3), (false, 0), (false, 3)] {
        let mut events = 0;
        for at in 0.. {
            let (device, mut compiler) = compiler();
            let kept = RefCell::new(Vec::new());
            for _ in 0..recorded {
                assert!(!leave_at(&mut compiler, u32::MAX, &kept, false));
            }
            let came = leave_at(&mut compiler, at, &kept, panics);
            kept.borrow().iter().for_each(Filled::check);
            let stats = compiler.stats();
            assert_eq!(stats.aborts, u64::from(came));
            assert_eq!(stats.survivors, kept.borrow().len() as u64);
            assert_eq!((stats.bad_frees, stats.bad_scopes), (0, 0), "event {at}");
            // The next steps run, and settle.
            for _ in 0..4 {
                kept.borrow_mut().clear();
                assert!(!leave_at(&mut compiler, u32::MAX, &kept, false));
            }
            let stats = compiler.stats();
            assert_eq!(
                (stats.breaks_step, stats.device_calls_step),
                (0, 0),
                "event {at}"
            );
            drop(compiler);
            kept.borrow().iter().for_each(Filled::check);
            drop(kept);
            assert!(device.is_empty(), "event {at}: {:?}", device.books());
            if !came {
                events = at;
                break;
            }
        }
        println!("left at each of {events} events; by panic: {panics}, recorded runs: {recorded}");
        assert!(events > 20, "{events} events are few");
    }
}

/// Ends while buffers and compilers are in statics, in thread-locals of the main thread and of a
/// thread that still runs; a C handler frees one of them after everything else.
#[test]
#[ignore = "exits: run by the test below, in a process of its own"]
fn a_process_that_exits() {
    static LAST: Mutex<Option<Filled>> = Mutex::new(None);
    static NEVER: Mutex<Vec<(Filled, Compiler)>> = Mutex::new(Vec::new());
    extern "C" fn at_exit() {
        let mut last = LAST.lock().unwrap();
        last.as_ref().unwrap().check();
        drop(last.take());
        // A step while the process exits.
        let (device, mut compiler) = compiler();
        drop(step(&mut compiler, 3));
        drop(compiler);
        assert!(device.is_empty());
        println!("the handler ran");
    }
    // SAFETY: the handler is a function of this process, does not unwind past C on success, and aborts
    // where it would.
    assert_eq!(unsafe { libc::atexit(at_exit) }, 0);
    let (_device, mut first) = compiler();
    *LAST.lock().unwrap() = Some(step(&mut first, 1));
    let second = step(&mut first, 2);
    NEVER.lock().unwrap().push((second, first));
    let (_device, mut third) = compiler();
    let buffer = step(&mut third, 4);
    LATE.set(Some((buffer, third)));
    let (_device, mut fourth) = compiler();
    let busy = step(&mut fourth, 5);
    let (ready, is_ready) = mpsc::channel();
    thread::spawn(move || {
        ready.send(()).unwrap();
        loop {
            // In the middle of a step when the process goes.
            drop(step(&mut fourth, 6));
            busy.check();
        }
    });
    is_ready.recv().unwrap();
    fourth_step_is_open();
    std::process::exit(0);
}

/// A step of this thread that never ends.
fn fourth_step_is_open() {
    let (_device, compiler) = compiler();
    let compiler = Box::leak(Box::new(compiler));
    std::mem::forget(compiler.begin("never ended").unwrap());
    EARLY.with_borrow_mut(|kept| kept.push(Filled::new(64 * KIB, 8)));
}

#[test]
fn buffers_may_be_freed_while_the_process_exits() {
    for _ in 0..20 {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "a_process_that_exits",
                "--ignored",
                "--nocapture",
            ])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        let errors = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{}\n{said}{errors}", child.status);
        assert!(said.contains("the handler ran"), "{said}{errors}");
    }
}
