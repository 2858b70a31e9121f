//! The CPU hook and children made by fork(2), with real buffers: children read, overwrite, grow and drop what they
//! inherit and allocate what they need; programs start with arguments and environments that a step served.

#![cfg(target_os = "linux")]

mod reference;

use std::ffi::{CStr, CString};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use memory_compiler::device::adaptor::Counting;
use memory_compiler::device::{Device, Host};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::hook::weights::VecRange;
use memory_compiler::pager::{Pager, Pin, Stamp};
use memory_compiler::{Bytes, Compiler, Error, Options, Step, scope};

use reference::child::{fork, in_child};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

const KIB: usize = 1 << 10;

type Counted = Arc<Counting<Host>>;

fn compiler() -> (Counted, Compiler) {
    let device = Arc::new(Counting::new(Host::new(Bytes::kib(4)).expect("memory")));
    let options = Options {
        address_space: Bytes::gib(1),
        ..Options::default()
    };
    let compiler = Compiler::new(Arc::clone(&device) as Arc<dyn Device>, options);
    (device, compiler.expect("a compiler"))
}

/// A buffer whose contents are checked when it goes.
#[derive(Debug)]
struct Filled(Vec<u8>, u8);

impl Filled {
    fn new(len: usize, value: u8) -> Self {
        Self(vec![value; len], value)
    }

    #[track_caller]
    fn check(&self) {
        assert!(self.0.iter().all(|&byte| byte == self.1), "overwritten");
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.check();
        }
    }
}

/// Whether memory of this vector is a step's.
fn is_served<T>(step: &Step<'_>, vector: &[T]) -> bool {
    let live = step.snapshot().live;
    live.iter()
        .any(|&(at, _)| at.0 == vector.as_ptr().addr() as u64)
}

fn step(compiler: &mut Compiler, value: u8) -> Filled {
    let made = compiler.step(|| {
        drop(Filled::new(100 * KIB, !value));
        Ok::<_, Error>(Filled::new(64 * KIB, value))
    });
    made.expect("a step")
}

#[test]
fn a_child_reads_overwrites_grows_and_drops_the_buffers_that_it_inherited() {
    let (device, mut compiler) = compiler();
    let kept: Vec<Filled> = (0..4).map(|value| step(&mut compiler, value)).collect();
    let books = device.books();
    in_child(|child| {
        kept.iter().for_each(Filled::check);
        let mut kept = child.own(&raw const kept);
        for buffer in &mut kept {
            buffer.1 ^= 0xff;
            buffer.0.fill(buffer.1);
        }
        // To another size, to about the same one, and to a small one.
        let sizes = [256 * KIB, 64 * KIB + 100, 1];
        for (buffer, size) in kept.iter_mut().zip(sizes) {
            let value = buffer.1;
            buffer.0.resize(size, value);
            buffer.0.shrink_to_fit();
            buffer.check();
        }
        drop(kept);
        drop(child.own(&raw const compiler));
        drop(child.own(&raw const device));
        // What was freed is not given out again.
        let zeroes = vec![0_u8; 300 * KIB];
        assert!(zeroes.iter().all(|&byte| byte == 0));
    });
    assert_eq!(device.books(), books);
    kept.iter().for_each(Filled::check);
    assert_eq!(compiler.stats().bad_frees, 0);
    drop(kept);
    drop(compiler);
    assert!(device.is_empty(), "{:?}", device.books());
}

#[test]
fn a_child_forked_inside_a_step_allocates_past_it() {
    let (device, mut compiler) = compiler();
    for round in 0..6 {
        let step = compiler.begin("step").expect("a step");
        let _scope = scope("block");
        let first = Filled::new(64 * KIB, 1);
        let mut grows = vec![7_u8; 20 * KIB];
        assert!(is_served(&step, &first.0) && is_served(&step, &grows));
        let low = step.snapshot().base.0;
        let is_past = |vector: &Vec<u8>| {
            !(low..low + Bytes::gib(1).0).contains(&(vector.as_ptr().addr() as u64))
        };
        in_child(|child| {
            let more: Vec<Filled> = (0..50).map(|value| Filled::new(40 * KIB, value)).collect();
            assert!(more.iter().all(|buffer| is_past(&buffer.0)));
            let zeroes = vec![0_u8; 64 * KIB];
            assert!(is_past(&zeroes) && zeroes.iter().all(|&byte| byte == 0));
            let mut grown = child.own(&raw const grows);
            grown.extend_from_slice(&[7; 40 * KIB]);
            assert!(is_past(&grown) && grown.iter().all(|&byte| byte == 7));
            drop(child.own(&raw const first));
            drop(grown);
            if round % 2 == 0 {
                drop(child.own(&raw const step));
            } else {
                let finished = child.own(&raw const step).finish();
                assert_eq!(finished.err(), Some(Error::Forked));
            }
            drop(more);
            // A step of the child's own.
            let (device, mut compiler) = self::compiler();
            for value in 0..4 {
                self::step(&mut compiler, value).check();
            }
            assert_eq!(compiler.stats().breaks_step, 0);
            drop(compiler);
            assert!(device.is_empty());
        });
        grows.extend_from_slice(&[7; 40 * KIB]);
        let last = Filled::new(30 * KIB, 3);
        assert!(is_served(&step, &grows) && is_served(&step, &last.0));
        assert!(grows.iter().all(|&byte| byte == 7));
        first.check();
        drop((first, grows, last));
        step.finish().expect("the step ends well");
    }
    let stats = compiler.stats();
    assert_eq!(
        (stats.breaks_step, stats.device_calls_step),
        (0, 0),
        "{stats}"
    );
    assert_eq!((stats.recorded_step, stats.bad_frees), (0, 0), "{stats}");
    drop(compiler);
    assert!(device.is_empty(), "{:?}", device.books());
}

/// A program that ends well if its argument and its variable have this many bytes.
const SCRIPT: &str = "test ${#1} -eq 20000 && test ${#LONG} -eq 30000 && test $2 = last";

#[test]
fn a_program_starts_by_fork_and_execve_with_arguments_and_environment_in_the_arena() {
    let (_device, mut compiler) = compiler();
    for _ in 0..3 {
        let step = compiler.begin("step").expect("a step");
        let long = CString::new(vec![b'a'; 20_000]).expect("no zero");
        let variable = CString::new([&b"LONG="[..], &vec![b'v'; 30_000]].concat());
        let variable = variable.expect("no zero");
        let script = CString::new(SCRIPT).expect("no zero");
        let words: [&CStr; 6] = [c"sh", c"-c", &script, c"sh", &long, c"last"];
        // So many empty words that the list itself is large.
        let mut arguments: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
        arguments.resize(4_000, c"".as_ptr());
        arguments.push(std::ptr::null());
        let mut environment = vec![c"A=b".as_ptr(); 4_000];
        environment.push(variable.as_ptr());
        environment.push(std::ptr::null());
        assert!(is_served(&step, &arguments) && is_served(&step, &environment));
        let lies_there = |text: &CStr| {
            let at = text.as_ptr().addr() as u64;
            step.snapshot().live.iter().any(|live| live.0.0 == at)
        };
        assert!(lies_there(&long) && lies_there(&variable));
        in_child(|_| {
            // SAFETY: the lists end with null and all words with a zero.
            let _ = unsafe {
                libc::execve(
                    c"/bin/sh".as_ptr(),
                    arguments.as_ptr(),
                    environment.as_ptr(),
                )
            };
            panic!("execve(2): {}", std::io::Error::last_os_error());
        });
        drop((long, variable, arguments, environment));
        step.finish().expect("the step ends well");
    }
    assert_eq!(compiler.stats().breaks_step, 0);
}

#[test]
fn a_command_starts_with_arguments_and_environment_in_the_arena() {
    let (device, mut compiler) = compiler();
    for with_fork in [true, false, true, false] {
        let kept = step(&mut compiler, 4);
        let done = compiler.step(|| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", SCRIPT, "sh", &"a".repeat(20_000), "last"]);
            command.env("LONG", "v".repeat(30_000));
            if with_fork {
                // SAFETY: the closure does nothing.
                unsafe { command.pre_exec(|| Ok(())) };
            }
            let status = command.status();
            Ok::<_, Error>(status.map_err(|error| error.to_string()))
        });
        let status = done.expect("the step ends well").expect("it starts");
        assert!(status.success(), "with fork: {with_fork}: {status}");
        kept.check();
    }
    assert_eq!(compiler.stats().bad_frees, 0);
    drop(compiler);
    assert!(device.is_empty(), "{:?}", device.books());
}

#[test]
fn vectors_of_weights_are_read_and_dropped_in_a_child() {
    let device = Arc::new(Counting::new(Host::new(Bytes::kib(4)).expect("memory")));
    let pager = Pager::new(Arc::clone(&device) as Arc<dyn Device>, None).expect("a pager");
    let vectors = VecRange::new(pager.range(Bytes::kib(64)).expect("addresses"));
    let vectors = vectors.expect("the hook is there");
    let range = vectors.range().clone();
    let Ok(Pin::Resident(pinned)) = range.pin(Bytes::ZERO, Bytes::kib(64), Stamp::NEVER) else {
        panic!("it fits")
    };
    // SAFETY: the bytes are pinned as long as the vector lives, and no other vector lies there.
    let vector = unsafe { vectors.vec::<u8>(Bytes::ZERO, 64 * KIB) };
    let mut vector = vector.expect("in the range");
    vector.resize(64 * KIB, 5);
    let kept = device.books().held;
    in_child(|child| {
        assert!(vector.iter().all(|&byte| byte == 5));
        // SAFETY: none is made.
        assert_eq!(unsafe { vectors.vec::<u8>(Bytes::ZERO, 64 * KIB) }, None);
        assert_eq!(VecRange::new(range.clone()).err(), Some(Error::Forked));
        drop(child.own(&raw const vectors));
        let mut own = child.own(&raw const vector);
        own.fill(6);
        drop(own);
        // The last one that the parent has too.
        drop(child.own(&raw const pinned));
        drop(child.own(&raw const range));
        drop(child.own(&raw const pager));
    });
    assert_eq!(device.books().held, kept);
    assert!(vector.iter().all(|&byte| byte == 5));
    drop((vector, pinned, vectors, range, pager));
    assert!(device.is_empty(), "{:?}", device.books());
}

/// Buffers go from thread to thread when the fork comes.
#[test]
fn a_thousand_forks_beside_threads_that_allocate_and_free_end_all() {
    const FORKS: usize = 1_000;
    let (_device, mut kept_compiler) = compiler();
    let kept: Vec<Filled> = (0..4)
        .map(|value| step(&mut kept_compiler, value))
        .collect();
    let (over, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    let (give, take) = std::sync::mpsc::sync_channel::<Filled>(8);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let give = give;
            while !over.load(Ordering::Relaxed) {
                let (device, mut compiler) = compiler();
                for value in 0..8 {
                    let buffer = step(&mut compiler, value);
                    steps.fetch_add(1, Ordering::Relaxed);
                    give.send(buffer).expect("the other thread takes it");
                }
                // The other thread ends the engine.
                drop((compiler, device));
            }
        });
        threads.spawn(move || take.into_iter().for_each(drop));
        for number in 0..FORKS {
            let mut inside = None;
            if number % 2 == 0 {
                inside = Some(kept_compiler.begin("inside").expect("a step"));
            }
            let scratch = Filled::new(32 * KIB, 9);
            let child = fork(|child| {
                drop(Filled::new(48 * KIB, 1));
                drop(child.own(&raw const scratch));
                drop(child.own(&raw const kept));
                drop(child.own(&raw const inside));
                if number % 10 == 0 {
                    let (device, mut compiler) = compiler();
                    step(&mut compiler, 3).check();
                    drop(compiler);
                    assert!(device.is_empty());
                }
            });
            scratch.check();
            drop(scratch);
            drop(inside);
            child.succeeds();
        }
        over.store(true, Ordering::Relaxed);
    });
    let steps = steps.into_inner();
    assert!(steps > 100, "{steps} steps are few");
    kept.iter().for_each(Filled::check);
}
