//! The CPU hook, in a binary whose global allocator it is.

use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use memory_compiler::device::adaptor::{Counting, Limiting};
use memory_compiler::device::{Device, Host};
use memory_compiler::hook::host::{ScopedAllocator, is_installed};
use memory_compiler::{
    Address, Bytes, Compiler, Error, Expected, Options, pause, scope, strict_scope,
};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

const KIB: usize = 1 << 10;

type Counted = Counting<Limiting<Host>>;

fn device(limit: Bytes) -> Arc<Counted> {
    Arc::new(Counting::new(Limiting::new(
        Host::new(Bytes::kib(4)).unwrap(),
        limit,
    )))
}

fn compiler_on(device: &Arc<Counted>, options: Options) -> Compiler {
    Compiler::new(Arc::clone(device) as Arc<dyn Device>, options).unwrap()
}

fn compiler() -> (Arc<Counted>, Compiler) {
    let device = device(Bytes::gib(1));
    let compiler = compiler_on(&device, Options::default());
    (device, compiler)
}

fn filled(len: usize, value: u8) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    bytes.resize(len, value);
    bytes
}

/// Whether the compiler owns the buffer: between steps its address must lie in the snapshot's range.
fn is_served(compiler: &mut Compiler, buffer: &[u8]) -> bool {
    let at = Address(buffer.as_ptr() as u64);
    compiler
        .snapshot()
        .live
        .iter()
        .any(|&(start, size)| start <= at && at.0 < start.0 + size.0)
}

#[test]
fn the_hook_is_installed() {
    assert!(is_installed());
}

#[test]
fn large_buffers_of_a_step_are_served_and_small_ones_are_not() {
    let (_device, mut compiler) = compiler();
    let (large, small) = compiler
        .step(|| Ok::<_, Error>((filled(16 * KIB, 1), filled(16 * KIB - 1, 2))))
        .unwrap();
    assert!(is_served(&mut compiler, &large));
    assert!(!is_served(&mut compiler, &small));
    assert!(
        !is_served(&mut compiler, &filled(64 * KIB, 3)),
        "no step is active"
    );
}

#[test]
fn the_threshold_is_an_option_with_a_least_value() {
    let device = device(Bytes::gib(1));
    let mut compiler = compiler_on(
        &device,
        Options {
            threshold: Bytes::kib(4),
            ..Options::default()
        },
    );
    let buffer = compiler
        .step(|| Ok::<_, Error>(filled(4 * KIB, 1)))
        .unwrap();
    assert!(is_served(&mut compiler, &buffer));
    let too_small = Options {
        threshold: Bytes(4095),
        ..Options::default()
    };
    let error = Compiler::new(device, too_small).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Option {
                option: "threshold",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_step_of_vectors_replays_without_device_calls() {
    let (device, mut compiler) = compiler();
    let mut step = || {
        compiler
            .step(|| {
                let _scope = scope("grow");
                let mut grown = Vec::new();
                for i in 0..20_000_u32 {
                    grown.push(i);
                }
                let copy = grown.clone();
                drop(grown);
                let sum: u64 = copy.iter().map(|&i| u64::from(i)).sum();
                Ok::<_, Error>(sum)
            })
            .unwrap()
    };
    assert_eq!(step(), 199_990_000);
    let calls = device.memory_calls();
    for _ in 0..5 {
        assert_eq!(step(), 199_990_000);
    }
    assert_eq!(device.memory_calls(), calls);
    let stats = compiler.stats();
    assert_eq!(
        (
            stats.breaks_total,
            stats.device_calls_step,
            stats.recorded_step
        ),
        (0, 0, 0)
    );
    assert!(stats.replayed_step >= 4, "{stats}");
}

#[test]
fn zeroed_memory_is_zero_where_earlier_buffers_lay() {
    let (_device, mut compiler) = compiler();
    for _ in 0..3 {
        compiler
            .step(|| {
                drop(filled(64 * KIB, 0xAB));
                let zeroed = vec![0_u8; 64 * KIB];
                assert!(zeroed.iter().all(|&byte| byte == 0));
                Ok::<_, Error>(())
            })
            .unwrap();
    }
}

#[test]
fn reallocation_keeps_contents_across_the_threshold_and_between_owners() {
    let (_device, mut compiler) = compiler();
    let mut outside = filled(8 * KIB, 7);
    let mut inside = compiler
        .step(|| {
            outside.resize(100 * KIB, 8);
            Ok::<_, Error>(filled(32 * KIB, 9))
        })
        .unwrap();
    assert!(is_served(&mut compiler, &outside) && is_served(&mut compiler, &inside));
    inside.resize(200 * KIB, 10);
    assert!(
        !is_served(&mut compiler, &inside),
        "it grew outside of any step"
    );
    inside.truncate(KIB);
    inside.shrink_to_fit();
    assert!(inside.iter().all(|&byte| byte == 9));
    assert!(outside[..8 * KIB].iter().all(|&byte| byte == 7));
    assert!(outside[8 * KIB..].iter().all(|&byte| byte == 8));
    outside.truncate(KIB);
    outside.shrink_to_fit();
    assert!(outside.iter().all(|&byte| byte == 7));
    assert_eq!(compiler.stats().live, Bytes::ZERO);
}

#[test]
fn alignment_above_512_passes_through() {
    #[repr(align(4096))]
    struct Page([u8; 64 * KIB]);
    let (_device, mut compiler) = compiler();
    let page = compiler
        .step(|| Ok::<_, Error>(Box::new(Page([5; 64 * KIB]))))
        .unwrap();
    assert_eq!(page.0.as_ptr() as usize % 4096, 0);
    assert!(!is_served(&mut compiler, &page.0));
}

#[test]
fn buffers_freed_on_other_threads_come_back_to_their_step() {
    let (device, mut compiler) = compiler();
    for round in 0..6_u8 {
        let (send, receive) = mpsc::channel::<Vec<u8>>();
        let reader = thread::spawn(move || {
            receive
                .iter()
                .map(|buffer| buffer.iter().map(|&byte| u64::from(byte)).sum::<u64>())
                .sum::<u64>()
        });
        let sent = compiler
            .step(|| {
                for _ in 0..8 {
                    send.send(filled(40 * KIB, round)).unwrap();
                }
                drop(send);
                Ok::<_, Error>(reader.join().unwrap())
            })
            .unwrap();
        assert_eq!(sent, 8 * 40 * 1024 * u64::from(round));
    }
    let stats = compiler.stats();
    assert_eq!((stats.live, stats.bad_frees), (Bytes::ZERO, 0));
    drop(compiler);
    assert!(device.is_empty());
}

#[test]
fn other_threads_have_no_step_so_their_buffers_pass_through() {
    let (_device, mut compiler) = compiler();
    let theirs = compiler
        .step(|| Ok::<_, Error>(thread::spawn(|| filled(64 * KIB, 1)).join().unwrap()))
        .unwrap();
    assert!(!is_served(&mut compiler, &theirs));
}

#[test]
fn a_strict_break_inside_the_allocator_is_served_and_the_step_returns_it() {
    let (_device, mut compiler) = compiler();
    let mut step = |len: usize, strict: bool| {
        compiler.step_named("strict", || {
            let _scope = if strict {
                strict_scope("inner")
            } else {
                scope("inner")
            };
            let buffer = filled(len, 3);
            assert!(buffer.iter().all(|&byte| byte == 3));
            Ok::<_, Error>(())
        })
    };
    step(64 * KIB, true).unwrap();
    for _ in 0..2 {
        let expected = Error::Strict {
            scope: "strict/inner".into(),
            event: 0,
            asked: Bytes::kib(128),
            expected: Expected::Size(Bytes::kib(64)),
        };
        assert_eq!(
            step(128 * KIB, true),
            Err(expected),
            "a strict break is not recorded"
        );
    }
    step(64 * KIB, true).unwrap();
    step(128 * KIB, false).unwrap();
    let stats = compiler.stats();
    assert_eq!((stats.breaks_total, stats.live), (1, Bytes::ZERO));
}

#[test]
fn an_idle_compiler_gives_memory_to_a_step_whose_buffers_come_through_the_allocator() {
    let device = device(Bytes::kib(64));
    let [mut a, mut b] = [(); 2].map(|()| compiler_on(&device, Options::default()));
    for round in 0..10 {
        for compiler in [&mut a, &mut b] {
            compiler
                .step(|| {
                    let buffer = filled(48 * KIB, round);
                    assert!(buffer.iter().all(|&byte| byte == round));
                    Ok::<_, Error>(())
                })
                .expect("the other one idles");
            let stats = compiler.stats();
            assert_eq!((stats.passed_through, stats.breaks_total), (0, 0));
            assert_eq!(stats.held, Bytes::kib(48));
        }
    }
}

#[test]
fn without_memory_the_system_serves_and_the_step_reports_it() {
    for (limit, budget) in [
        (Bytes::kib(64), None),
        (Bytes::gib(1), Some(Bytes::kib(64))),
    ] {
        let device = device(limit);
        let mut compiler = compiler_on(
            &device,
            Options {
                budget,
                ..Options::default()
            },
        );
        let error = compiler
            .step(|| {
                let fits = filled(32 * KIB, 1);
                let does_not = filled(64 * KIB, 2);
                assert!(
                    fits.iter().all(|&byte| byte == 1) && does_not.iter().all(|&byte| byte == 2)
                );
                Ok::<_, Error>(())
            })
            .unwrap_err();
        let numbers = (
            Bytes::kib(64),
            Bytes::kib(32),
            Bytes::kib(32),
            Bytes::kib(32),
        );
        match error {
            Error::OutOfMemory(short) if budget.is_none() => {
                assert_eq!((short.asked, short.held, short.live, short.free), numbers);
            }
            Error::OverBudget(short) if budget.is_some() => {
                assert_eq!((short.asked, short.held, short.live, short.free), numbers);
            }
            other => panic!("{other}"),
        }
        compiler
            .step(|| {
                drop(filled(32 * KIB, 1));
                Ok::<_, Error>(())
            })
            .unwrap();
        assert_eq!(compiler.stats().passed_through, 1);
    }
}

#[test]
fn paused_buffers_pass_through_and_pauses_nest() {
    let (_device, mut compiler) = compiler();
    let (inner, outer, after) = compiler
        .step(|| {
            let outer_pause = pause();
            let inner = {
                let _inner = pause();
                filled(64 * KIB, 1)
            };
            let outer = filled(64 * KIB, 2);
            drop(outer_pause);
            Ok::<_, Error>((inner, outer, filled(64 * KIB, 3)))
        })
        .unwrap();
    assert!(!is_served(&mut compiler, &inner) && !is_served(&mut compiler, &outer));
    assert!(is_served(&mut compiler, &after));
}

#[test]
fn panics_and_early_returns_abort_the_step_and_keep_its_buffers() {
    let (device, mut compiler) = compiler();
    let kept = Mutex::new(Vec::new());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        compiler.step(|| -> Result<(), Error> {
            let _scope = scope("outer");
            kept.lock().unwrap().push(filled(64 * KIB, 4));
            // Not `panic!`: its backtrace would allocate, and keep, large buffers of its own.
            std::panic::resume_unwind(Box::new("on purpose"))
        })
    }));
    assert!(panicked.is_err());
    let returned: Result<(), String> = compiler
        .step(|| {
            let _scope = scope("outer");
            kept.lock().unwrap().push(filled(64 * KIB, 5));
            Err(Ours("on purpose".into()))
        })
        .map_err(|Ours(text)| text);
    assert_eq!(returned, Err("on purpose".into()));
    let stats = compiler.stats();
    assert_eq!((stats.aborts, stats.survivors, stats.bad_scopes), (2, 2, 0));
    compiler
        .step(|| {
            drop(filled(64 * KIB, 6));
            Ok::<_, Error>(())
        })
        .unwrap();
    let kept = kept.into_inner().unwrap();
    assert!(kept[0].iter().all(|&byte| byte == 4) && kept[1].iter().all(|&byte| byte == 5));
    drop(compiler);
    assert!(!device.is_empty(), "the buffers are still readable");
    assert!(kept[1].iter().all(|&byte| byte == 5));
    drop(kept);
    assert!(
        device.is_empty(),
        "the last buffer ended the compiler's memory"
    );
}

#[derive(Debug)]
struct Ours(String);

impl From<Error> for Ours {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

#[test]
fn the_compilers_own_books_never_land_in_a_step() {
    // Another compiler's books grow far beyond the threshold while a step is active here.
    let (_device, mut outer) = compiler();
    outer
        .step(|| {
            let (_device, mut inner) = compiler();
            let step = inner.begin("inner")?;
            for i in 1..4_000_u64 {
                let memory_compiler::Allocation::Here(at) = step.alloc(Bytes(512 * i))? else {
                    panic!()
                };
                step.free(at)?;
            }
            let _ = step.stats();
            step.finish()?;
            drop(inner);
            Ok::<_, Error>(())
        })
        .unwrap();
    let stats = outer.stats();
    assert_eq!(
        (stats.peak, stats.live),
        (Bytes::ZERO, Bytes::ZERO),
        "{stats}"
    );
}

#[test]
fn a_thread_that_ends_frees_its_buffers_in_its_thread_local_destructors() {
    thread_local! { static KEPT: std::cell::RefCell<Vec<Vec<u8>>> = const { std::cell::RefCell::new(Vec::new()) } }
    let device = device(Bytes::gib(1));
    let for_thread = Arc::clone(&device);
    thread::spawn(move || {
        let mut compiler = compiler_on(&for_thread, Options::default());
        let buffer = compiler
            .step(|| Ok::<_, Error>(filled(64 * KIB, 1)))
            .unwrap();
        KEPT.with_borrow_mut(|kept| kept.push(buffer));
    })
    .join()
    .unwrap();
    assert!(device.is_empty());
}

/// A subscriber that lets go of a buffer at the first event that it hears.
struct Dropping(Mutex<Option<Vec<u8>>>);

impl tracing::Subscriber for Dropping {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        drop(self.0.lock().unwrap().take());
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_buffer_that_is_freed_from_within_the_compilers_own_work_finds_its_owner() {
    use memory_compiler::device::adaptor::{Failing, Repeat};
    use memory_compiler::device::{Call, DeviceError};

    // The last buffer of a compiler that is gone, held by the subscriber.
    let (device, mut gone) = compiler();
    let last = gone.step(|| Ok::<_, Error>(filled(64 * KIB, 1))).unwrap();
    drop(gone);
    assert!(!device.is_empty());
    let subscriber = Dropping(Mutex::new(Some(last)));
    tracing::subscriber::with_default(subscriber, || {
        // A compiler whose device refuses to take its memory back: it says so while it goes.
        let failing = Arc::new(Failing::new(Host::new(Bytes::kib(4)).unwrap()));
        let mut compiler =
            Compiler::new(Arc::clone(&failing) as Arc<dyn Device>, Options::default()).unwrap();
        compiler
            .step(|| {
                drop(filled(64 * KIB, 1));
                Ok::<_, Error>(())
            })
            .unwrap();
        let refused = DeviceError::Driver {
            call: Call::Unmap,
            code: 1,
        };
        failing.fail_call_at(Call::Unmap, 0, refused, Repeat::Once);
        drop(compiler);
        assert_eq!(failing.failures(), 1);
    });
    assert!(device.is_empty(), "the buffer went back where it came from");
}

/// A compile and a limit to what is remembered make the books afresh: who owns a buffer stays known.
#[test]
fn safe_code_cannot_free_a_survivor_after_a_compile_or_a_forgetting() {
    for forgets in [false, true] {
        let device = device(Bytes::gib(1));
        let options = Options {
            edge_limit: if forgets { 4 } else { 1_000 },
            ..Options::default()
        };
        let mut compiler = compiler_on(&device, options);
        // In the step's own space, and in the survivors'.
        let mut kept = Vec::new();
        for n in 0..4 {
            let step = || {
                // Half a page is left empty by most: a compile holds less.
                let mut live = Vec::new();
                for i in 0..24 {
                    live.push(filled(4 * KIB * (4 + i * 7 % 3) + 512 * (1 + i * 5 % 7), 1));
                    if i % 3 == 2 {
                        drop(live.remove(i * 11 % live.len()));
                    }
                }
                let sizes = if n == 0 || !forgets { 40..41 } else { 40..48 };
                Ok::<_, Error>(sizes.map(|size| filled(size * KIB, 3)).collect::<Vec<_>>())
            };
            kept.extend(compiler.step(step).unwrap());
        }
        if !forgets {
            compiler.compile().unwrap();
        }
        let owned = |compiler: &mut Compiler| {
            compiler
                .step(|| {
                    for buffer in &kept {
                        let freed = memory_compiler::free(Address(buffer.as_ptr() as u64));
                        let reason = memory_compiler::BadFree::Hooked;
                        assert!(
                            matches!(freed, Err(Error::BadFree { reason: r, .. }) if r == reason),
                            "{freed:?}"
                        );
                    }
                    Ok::<_, Error>(())
                })
                .unwrap();
        };
        owned(&mut compiler);
        owned(&mut compiler);
        let stats = compiler.stats();
        assert_eq!(stats.edges_forgotten > 0, forgets, "{stats}");
        assert_eq!(stats.compiled.is_some_and(|c| c.is_installed), !forgets);
        assert_eq!(stats.survivors, kept.len() as u64);
        drop(compiler);
        drop(kept);
        assert!(device.is_empty());
    }
}

#[test]
fn safe_code_cannot_free_a_block_that_a_value_owns() {
    let (_device, mut compiler) = compiler();
    for _ in 0..3 {
        compiler
            .step(|| {
                let owned = filled(64 * KIB, 1);
                let freed = memory_compiler::free(Address(owned.as_ptr() as u64));
                assert!(matches!(
                    freed,
                    Err(Error::BadFree {
                        reason: memory_compiler::BadFree::Hooked,
                        ..
                    })
                ));
                let other = filled(64 * KIB, 2);
                assert!(owned.iter().all(|&byte| byte == 1) && other[0] == 2);
                Ok::<_, Error>(())
            })
            .unwrap();
    }
    let kept = compiler
        .step(|| Ok::<_, Error>(filled(64 * KIB, 3)))
        .unwrap();
    // From outside a step the owner hears of it, and refuses, at its next event.
    memory_compiler::free(Address(kept.as_ptr() as u64)).unwrap();
    let stats = compiler.stats();
    assert_eq!((stats.live, stats.bad_frees), (Bytes::kib(64), 4));
    assert!(kept.iter().all(|&byte| byte == 3));
}
