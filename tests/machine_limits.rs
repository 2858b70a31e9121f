//! Requests for more than there is: of the machine, of a control group, of what `ulimit` leaves. None takes the
//! process or the machine down, and none costs time or memory for what is not there.
//!
//! The global allocator is the CPU hook. What a limit must not do is tried in processes of their own.

#![cfg(target_os = "linux")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memory_compiler::device::adaptor::{Counting, Limiting};
use memory_compiler::device::{Call, Device, DeviceError, Host, HostMemory};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::pager::{Pager, Pin, Stamp};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

const PAGE: Bytes = Bytes::kib(4);
const FAST: Duration = Duration::from_millis(1);

type Limited = Arc<Counting<Limiting<Host>>>;

fn limited(granule: Bytes, limit: Bytes) -> Limited {
    let host = Host::new(granule).expect("a device");
    Arc::new(Counting::new(Limiting::new(host, limit)))
}

fn whole_machine(granule: Bytes) -> Limited {
    limited(granule, Bytes(u64::MAX))
}

fn largest_space() -> Options {
    Options {
        address_space: Bytes::gib(2048),
        ..Options::default()
    }
}

/// What these tests look at is of the process or of the machine: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory of this process, in bytes.
fn in_memory() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("proc_pid_statm(5)");
    let pages = statm.split(' ').nth(1).expect("the second number");
    pages.parse::<u64>().expect("a number") * 4096
}

/// The shortest of five runs: others use the machine too.
fn fastest<T>(mut f: impl FnMut() -> T) -> (Duration, T) {
    let runs = (0..5).map(|_| {
        let began = Instant::now();
        let result = f();
        (began.elapsed(), result)
    });
    runs.min_by_key(|&(time, _)| time).expect("five runs")
}

fn here(allocation: Result<Allocation, Error>) -> Address {
    match allocation {
        Ok(Allocation::Here(address)) => address,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_larger_than_the_machine_is_a_typed_error_in_under_a_millisecond() {
    let _alone = alone();
    for granule in [PAGE, Bytes::mib(2)] {
        let device = whole_machine(granule);
        let total = device.memory().expect("a machine").total;
        let mut compiler = Compiler::new(device.clone(), largest_space()).expect("a compiler");
        let step = compiler.begin("step").expect("a step");
        let first = here(step.alloc(Bytes::mib(6)));
        let sizes = [
            // Within what the machine has, and more than is free.
            device.memory().expect("a machine").free.0 + Bytes::mib(128).0,
            total.0 + 1,
            Bytes::gib(200).0,
            Bytes::gib(1023).0,
            Bytes::gib(1 << 20).0,
            u64::MAX - 511,
            u64::MAX - 1,
            u64::MAX,
        ];
        for size in sizes.map(Bytes) {
            let (stats, books, memory) = (step.stats(), device.books(), in_memory());
            let snapshot = step.snapshot();
            let (time, refused) = fastest(|| step.alloc(size));
            let Err(Error::OutOfMemory(short)) = refused else {
                panic!("{size} of {total}: {refused:?}");
            };
            let (asked, free) = (short.asked, short.free);
            assert!(
                asked >= size || size.0 > u64::MAX - 512,
                "{asked} for {size}"
            );
            assert!(free < size, "{free} of {size}");
            assert!(time < FAST, "{size} took {time:?}");
            let mut after = device.books();
            assert_eq!(after.pages_created, books.pages_created);
            assert_eq!(after.held_peak, books.held_peak);
            after = device.books();
            assert_eq!(after.memory_calls(), books.memory_calls());
            assert_eq!(step.stats(), stats);
            assert_eq!(step.snapshot(), snapshot);
            let grown = in_memory().saturating_sub(memory);
            assert!(grown < Bytes::mib(1).0, "{} more for {size}", Bytes(grown));
        }
        // All is as it was.
        let second = here(step.alloc(Bytes::mib(4)));
        step.free(first).expect("live");
        step.free(second).expect("live");
        step.finish().expect("the step ends well");
        drop(compiler);
        assert!(device.is_empty());
    }
}

#[test]
fn a_place_that_the_device_has_not_is_refused_before_its_first_page() {
    let _alone = alone();
    let device = limited(PAGE, Bytes::mib(64));
    let mut compiler = Compiler::new(device.clone(), largest_space()).expect("a compiler");
    let step = compiler.begin("step").expect("a step");
    let kept = here(step.alloc(Bytes::mib(24)));
    for size in [Bytes::mib(41), Bytes::mib(65), Bytes::gib(2)] {
        let created = device.calls(Call::Create);
        let (time, refused) = fastest(|| step.alloc(size));
        let Err(Error::OutOfMemory(short)) = refused else {
            panic!("{size}: {refused:?}");
        };
        let (free, held) = (short.free, short.held);
        assert_eq!((free, held), (Bytes::mib(40), Bytes::mib(24)));
        assert_eq!(device.calls(Call::Create), created, "{size}");
        if size > Bytes::mib(64) {
            assert!(time < FAST, "{size} took {time:?}");
        }
    }
    // To the last page.
    let rest = here(step.alloc(Bytes::mib(40)));
    step.free(kept).expect("live");
    step.free(rest).expect("live");
    step.finish().expect("the step ends well");
}

#[test]
fn a_request_larger_than_the_budget_is_refused_before_it_is_planned() {
    let _alone = alone();
    let device = whole_machine(PAGE);
    let options = Options {
        budget: Some(Bytes::mib(64)),
        ..largest_space()
    };
    let mut compiler = Compiler::new(device.clone(), options).expect("a compiler");
    let step = compiler.begin("step").expect("a step");
    for size in [Bytes::mib(65), Bytes::gib(200), Bytes(u64::MAX)] {
        let (time, refused) = fastest(|| step.alloc(size));
        let is_typed = matches!(
            &refused,
            Err(Error::OverBudget(short)) if short.limit == Bytes::mib(64) && short.free == short.limit
        );
        assert!(is_typed, "{refused:?}");
        assert!(time < FAST, "{size} took {time:?}");
    }
    assert_eq!(device.calls(Call::Create), 0);
}

/// What weights and idle buffers would give up is not forgotten by the refusal.
#[test]
fn a_request_that_fits_once_others_give_way_is_served() {
    let _alone = alone();
    let device = limited(PAGE, Bytes::mib(32));
    let pager = Pager::new(device.clone(), None).expect("a pager");
    let weights = pager.range(Bytes::mib(24)).expect("a range");
    drop(weights.pin(Bytes::ZERO, Bytes::mib(24), Stamp::NEVER));
    let mut compiler = Compiler::with_pager(&pager, Options::default()).expect("a compiler");
    for size in [Bytes::mib(16), Bytes::mib(31)] {
        let step = compiler.begin("step").expect("a step");
        let served = here(step.alloc(size));
        step.free(served).expect("live");
        step.finish().expect("the step ends well");
        // Not more than needed went.
        let kept = Bytes::mib(32).saturating_sub(size);
        assert_eq!(pager.stats().resident, kept, "{size}");
    }
}

#[test]
fn the_hook_lets_the_wrapped_allocator_answer_what_the_machine_has_not() {
    let _alone = alone();
    let device = whole_machine(PAGE);
    let mut compiler = Compiler::new(device.clone(), largest_space()).expect("a compiler");
    let info = device.memory().expect("a machine");
    // The system may promise more than is free, and nothing of it is touched.
    for size in [info.free.0 + Bytes::mib(16).0, 1 << 40, 1 << 46] {
        let layout = Layout::from_size_align(size as usize, 64).expect("a layout");
        let ended = compiler.step(|| {
            // SAFETY: the size is not zero.
            let ours = unsafe { MEMORY.alloc(layout) };
            // SAFETY: the same.
            let theirs = unsafe { System.alloc(layout) };
            assert_eq!(ours.is_null(), theirs.is_null(), "{}", Bytes(size));
            for block in [ours, theirs].into_iter().filter(|block| !block.is_null()) {
                // SAFETY: the system's allocator made it, the one through the hook too.
                unsafe { System.dealloc(block, layout) };
            }
            Ok::<_, Error>(())
        });
        assert!(
            matches!(ended, Err(Error::OutOfMemory { .. })),
            "{}: {ended:?}",
            Bytes(size)
        );
        assert_eq!(device.calls(Call::Create), 0);
        assert_eq!(compiler.stats().held, Bytes::ZERO);
    }
}

#[test]
fn weights_larger_than_the_machine_stream_and_commit_nothing() {
    let _alone = alone();
    let device = whole_machine(Bytes::mib(2));
    let pager = Pager::new(device.clone(), None).expect("a pager");
    let size = Bytes::gib(200);
    let weights = pager.range(size).expect("addresses");
    let pinned = weights.pin(Bytes::ZERO, size, Stamp::NEVER);
    assert!(matches!(pinned, Ok(Pin::Stream)), "{pinned:?}");
    let beyond = weights.pin_beyond(Bytes::ZERO, size, Stamp::NEVER);
    let Err(Error::WeightBudget(short)) = beyond else {
        panic!("{beyond:?}");
    };
    let (needed, limit) = (short.needed, short.limit.min(short.whole));
    assert!(needed == size && limit < size, "{needed} of {limit}");
    assert_eq!(device.calls(Call::Create), 0);
    let few = weights.pin(Bytes::ZERO, Bytes::mib(4), Stamp::NEVER);
    assert!(matches!(few, Ok(Pin::Resident(_))), "{few:?}");
}

#[test]
fn weights_that_the_device_has_not_stream_without_a_look_at_each_page() {
    let _alone = alone();
    let device = limited(PAGE, Bytes::mib(64));
    let pager = Pager::new(device.clone(), None).expect("a pager");
    let size = Bytes::gib(4);
    let weights = pager.range(size).expect("addresses");
    let _few = weights.pin(Bytes::ZERO, Bytes::mib(32), Stamp::NEVER);
    let created = device.calls(Call::Create);
    let (time, pinned) = fastest(|| weights.pin(Bytes::ZERO, size, Stamp::NEVER));
    assert!(matches!(pinned, Ok(Pin::Stream)), "{pinned:?}");
    assert!(time < FAST, "{time:?}");
    assert_eq!(device.calls(Call::Create), created);
    // What fits once others leave still does.
    let rest = weights.pin(Bytes::mib(32), Bytes::mib(32), Stamp::NEVER);
    assert!(matches!(rest, Ok(Pin::Resident(_))), "{rest:?}");
}

#[test]
fn the_books_of_a_range_are_no_larger_than_the_machine_either() {
    let _alone = alone();
    let device = whole_machine(PAGE);
    let pager = Pager::new(device.clone(), None).expect("a pager");
    let refused = pager
        .range(Bytes::gib(8 << 10))
        .expect_err("some hundred GiB of books");
    let Error::Option {
        option: "size",
        reason,
    } = &refused
    else {
        panic!("{refused}");
    };
    assert!(reason.contains("make the pages larger"), "{reason}");
    assert!(device.is_empty());
}

#[test]
fn host_memory_that_the_machine_has_not_is_none() {
    let _alone = alone();
    let device = whole_machine(PAGE);
    let free = device.memory().expect("a machine").free;
    let before = in_memory();
    for size in [
        Bytes(free.0 + Bytes::mib(64).0),
        Bytes::gib(1024),
        Bytes(u64::MAX),
    ] {
        let (time, memory) = fastest(|| HostMemory::ordinary(size));
        assert!(memory.is_none(), "{size}");
        assert!(time < FAST, "{size} took {time:?}");
        assert!(device.host_memory(size).is_err());
    }
    assert!(in_memory().saturating_sub(before) < Bytes::mib(1).0);
    let some = HostMemory::ordinary(Bytes::mib(32)).expect("a little");
    assert!(some.bytes().iter().all(|&byte| byte == 0));
}

#[test]
fn creating_a_page_costs_no_look_at_the_machine() {
    let _alone = alone();
    let host = Host::new(PAGE).expect("a device");
    let count = 16_384;
    let began = Instant::now();
    let pages: Vec<_> = (0..count).map(|_| host.create().expect("a page")).collect();
    let create = began.elapsed() / count;
    pages
        .into_iter()
        .for_each(|page| host.release(page).expect("ours"));
    let (look, _) = fastest(|| host.memory());
    println!("a page of 4 KiB is created in {create:?}; a look takes {look:?}");
    assert!(create < look, "{create:?} for a page, {look:?} for a look");
}

/// Runs one of the tests below in a process of its own, from a shell that runs `limit` first.
fn child(test: &str, limit: &str) -> Output {
    let exe = std::env::current_exe().expect("this test");
    Command::new("sh")
        .arg("-c")
        .arg(format!("{limit} && exec \"$0\" \"$@\""))
        .arg(exe)
        .args([
            "--exact",
            test,
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .output()
        .expect("a child")
}

fn assert_ended_well(child: &Output) {
    let said = String::from_utf8_lossy(&child.stdout);
    let errors = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{}\n{said}{errors}", child.status);
    assert!(said.contains("1 passed"), "{said}{errors}");
}

/// A number of KiB as the shell's `ulimit -f` counts: in blocks of 512 bytes, or of 1,024 where that is bash.
fn file_limit(kib: u64) -> String {
    format!(
        "if [ -n \"$BASH_VERSION\" ]; then ulimit -f {kib}; else ulimit -f {}; fi",
        2 * kib
    )
}

#[test]
fn a_limit_of_file_sizes_ends_no_process() {
    let _alone = alone();
    let child = child("in_a_process_with_files_of_four_mib", &file_limit(4096));
    assert_ended_well(&child);
}

#[test]
#[ignore = "needs ulimit -f: run by the test above"]
fn in_a_process_with_files_of_four_mib() {
    let device = whole_machine(PAGE);
    let info = device.memory().expect("a machine");
    assert_eq!((info.free, info.total), (Bytes::mib(4), Bytes::mib(4)));
    let mut compiler = Compiler::new(device.clone(), Options::default()).expect("a compiler");
    let step = compiler.begin("step").expect("a step");
    let one = here(step.alloc(Bytes::mib(1)));
    for size in [Bytes::mib(4), Bytes::gib(1)] {
        let refused = step.alloc(size);
        let is_typed =
            matches!(&refused, Err(Error::OutOfMemory(short)) if short.free == Bytes::mib(3));
        assert!(is_typed, "{refused:?}");
    }
    let three = here(step.alloc(Bytes::mib(3)));
    // Page by page.
    let full = device.create();
    assert!(
        matches!(full, Err(DeviceError::OutOfMemory { .. })),
        "{full:?}"
    );
    step.free(one).expect("live");
    step.free(three).expect("live");
    step.finish().expect("the step ends well");
    // Pieces of the file that were given back are there again.
    assert_eq!(compiler.trim(), Ok(Bytes::mib(4)));
    let page = device.create().expect("a page");
    device.release(page).expect("ours");
    // Through the hook the system serves what the file has not.
    let ended = compiler.step(|| Ok::<_, Error>(vec![7_u8; 8 << 20]));
    assert!(matches!(ended, Err(Error::OutOfMemory { .. })), "{ended:?}");
}

#[test]
fn fewer_addresses_are_reserved_where_the_process_may_not_have_so_many() {
    let _alone = alone();
    let child = child(
        "in_a_process_with_four_gib_of_addresses",
        "ulimit -v 4194304",
    );
    assert_ended_well(&child);
}

#[test]
#[ignore = "needs ulimit -v: run by the test above"]
fn in_a_process_with_four_gib_of_addresses() {
    let device = whole_machine(PAGE);
    let mut compiler = Compiler::new(device.clone(), Options::default()).expect("a compiler");
    // 256, 128, 64, 32, 16, 8, 4.
    assert_eq!(device.books().reserved, Bytes::gib(2));
    assert_eq!(device.calls(Call::Reserve), 8);
    // There is something left for everything else.
    let served = compiler
        .step(|| Ok::<_, Error>(vec![7_u8; 8 << 20]))
        .expect("a step");
    let joined = std::thread::spawn(move || served.iter().map(|&byte| u64::from(byte)).sum());
    assert_eq!(joined.join().ok(), Some(7 * (8_u64 << 20)));
    // Weights have exactly what they ask for, or say why not.
    let pager = Pager::new(device.clone(), None).expect("a pager");
    let refused = pager
        .range(Bytes::gib(8))
        .expect_err("more than the process may have");
    let Error::Device {
        call: Call::Reserve,
        source,
    } = &refused
    else {
        panic!("{refused}");
    };
    let DeviceError::NoAddresses { asked, used, limit } = *source else {
        panic!("{refused}");
    };
    assert_eq!((asked, limit), (Bytes::gib(8), Bytes::gib(4)));
    assert!(used > Bytes::gib(2) && used < limit, "{used}");
    assert!(
        refused.to_string().contains("RLIMIT_AS (ulimit -v)"),
        "{refused}"
    );
    // A second compiler of a default size has of what is left.
    let second = Compiler::new(device.clone(), Options::default()).expect("1 GiB is left");
    assert_eq!(device.books().reserved, Bytes::gib(3));
    drop(second);
    let small = Options {
        address_space: Bytes::mib(64),
        ..Options::default()
    };
    drop(Compiler::new(device.clone(), small).expect("so much is left"));
    assert!(HostMemory::ordinary(Bytes::gib(2)).is_none());
}

#[test]
fn a_reservation_that_is_refused_names_the_option_and_the_limit() {
    let _alone = alone();
    let child = child(
        "in_a_process_with_one_gib_of_addresses",
        "ulimit -v 1048576",
    );
    assert_ended_well(&child);
}

#[test]
#[ignore = "needs ulimit -v: run by the test above"]
fn in_a_process_with_one_gib_of_addresses() {
    let device = whole_machine(PAGE);
    for (asked, least) in [
        (Options::default().address_space, Bytes::gib(1)),
        (Bytes::mib(1536), Bytes::gib(1)),
        (Bytes::mib(1000), Bytes::mib(1000)),
    ] {
        let options = Options {
            address_space: asked,
            ..Options::default()
        };
        let refused = Compiler::new(device.clone(), options).expect_err("1 GiB is not left");
        let Error::Reservation {
            asked: said,
            least: tried,
            source,
        } = &refused
        else {
            panic!("{refused}");
        };
        assert_eq!((*said, *tried), (asked, least));
        let limit = Bytes::gib(1);
        assert!(matches!(source, DeviceError::NoAddresses { limit: said, .. } if *said == limit));
        let text = refused.to_string();
        for part in ["address_space", "RLIMIT_AS (ulimit -v)", "1.00 GiB"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    let options = Options {
        address_space: Bytes::mib(256),
        ..Options::default()
    };
    drop(Compiler::new(device.clone(), options).expect("so much is left"));
    assert!(device.is_empty());
}

/// A control group below this process's, which goes with this value; `None` where we may not make one.
struct Group(PathBuf);

impl Group {
    fn of_limit(limit: Bytes) -> Option<Self> {
        let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = groups.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, group) = rest.split_once(':')?;
            let is_memory = controllers.split(',').any(|name| name == "memory");
            is_memory.then_some(group)
        })?;
        let own = Path::new("/sys/fs/cgroup/memory").join(own.trim_start_matches('/'));
        let group = own.join(format!("memory-compiler-{}", std::process::id()));
        std::fs::create_dir(&group).ok()?;
        let group = Self(group);
        let limit = limit.0.to_string();
        std::fs::write(group.0.join("memory.limit_in_bytes"), limit).ok()?;
        Some(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its processes have ended; the kernel may take a moment to say so.
        for _ in 0..50 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("{} is left", self.0.display());
    }
}

#[test]
fn a_control_group_ends_no_process() {
    let _alone = alone();
    let Some(group) = Group::of_limit(Bytes::mib(96)) else {
        eprintln!("SKIPPED: no control group of version 1 can be made here");
        return;
    };
    let enter = format!("echo $$ > '{}/tasks'", group.0.display());
    let child = child("in_a_control_group_of_96_mib", &enter);
    drop(group);
    assert_ended_well(&child);
}

#[test]
#[ignore = "needs a control group: run by the test above"]
fn in_a_control_group_of_96_mib() {
    let device = whole_machine(PAGE);
    let info = device.memory().expect("a group");
    assert_eq!(info.total, Bytes::mib(96));
    assert!(
        info.free > Bytes::mib(64) && info.free < Bytes::mib(92),
        "{}",
        info.free
    );
    let mut compiler = Compiler::new(device.clone(), Options::default()).expect("a compiler");
    let step = compiler.begin("step").expect("a step");
    for size in [Bytes::mib(96), Bytes::gib(4)] {
        let refused = step.alloc(size);
        assert!(
            matches!(refused, Err(Error::OutOfMemory { .. })),
            "{refused:?}"
        );
        assert_eq!(device.calls(Call::Create), 0);
    }
    step.finish().expect("the step ends well");
    drop(compiler);
    // Page by page to the end, three times: a page of it is touched through a mapping.
    let base = device.reserve(Bytes::mib(128)).expect("addresses");
    for round in 0..3 {
        let mut pages = Vec::new();
        let full = loop {
            match device.create() {
                Ok(page) => {
                    let at = Address(base.0 + pages.len() as u64 * PAGE.0);
                    device.map(at, page).expect("mapped");
                    device.allow(at, PAGE).expect("allowed");
                    device.fill(at, PAGE, 1).expect("filled");
                    pages.push((at, page));
                }
                Err(error) => break error,
            }
        };
        assert!(matches!(full, DeviceError::OutOfMemory { .. }), "{full}");
        let held = Bytes(pages.len() as u64 * PAGE.0);
        println!("round {round}: {held} of 96 MiB");
        assert!(held > Bytes::mib(64), "{held}");
        for (at, page) in pages {
            device.unmap(at, PAGE).expect("mapped");
            device.release(page).expect("ours");
        }
    }
    device.unreserve(base, Bytes::mib(128)).expect("ours");
    // The books of the tests stay small enough for the group.
    assert!(HostMemory::ordinary(Bytes::mib(95)).is_none());
}
