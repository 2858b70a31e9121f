//! A device that cannot be waited for: nothing is taken away under work that may still run, and what is kept for
//! good is told.
//!
//! `Streams` holds work back until a test runs it, `Failing` refuses to wait, `Counting` says what is there.

#![cfg(target_os = "linux")]

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use memory_compiler::device::adaptor::{Books, Counting, Failing, Repeat, Streams};
use memory_compiler::device::{Call, Device, DeviceError, Host, StreamId};
use memory_compiler::pager::{Pager, Pin, Stamp};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options, Step, free};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const PAGE: u64 = 4096;
const STREAM: StreamId = StreamId(1);

type Held = Counting<Failing<Streams<Host>>>;

fn device() -> Arc<Held> {
    let host = Host::new(Bytes(PAGE)).expect("memory");
    Arc::new(Counting::new(Failing::new(Streams::new(host))))
}

fn streams(device: &Held) -> &Streams<Host> {
    device.upstream().upstream()
}

/// From now on the device is waited for in vain.
fn refuse(device: &Held, repeat: Repeat) {
    let error = DeviceError::Driver {
        call: Call::Synchronise,
        code: 700,
    };
    device
        .upstream()
        .fail_call_at(Call::Synchronise, 0, error, repeat);
}

fn compiler(device: &Arc<Held>) -> Compiler {
    let options = Options {
        address_space: Bytes(256 * PAGE),
        ..Options::default()
    };
    let mut compiler = Compiler::new(Arc::clone(device) as Arc<dyn Device>, options).unwrap();
    compiler.use_stream(STREAM).unwrap();
    compiler
}

fn here(step: &Step<'_>, size: u64) -> Address {
    match step.alloc(Bytes(size)) {
        Ok(Allocation::Here(address)) => address,
        other => panic!("{size} bytes were not served: {other:?}"),
    }
}

/// What is reserved, created and mapped.
fn owned(books: &Books) -> (Bytes, u64, u64) {
    (books.reserved, books.pages_alive, books.mappings_alive)
}

fn is_refused<T: Debug>(result: Result<T, Error>) {
    let refused = matches!(
        result,
        Err(Error::Device {
            call: Call::Synchronise,
            ..
        })
    );
    assert!(refused, "{result:?}");
}

/// Warnings of this thread, as text.
#[derive(Default)]
struct Warnings(Arc<Mutex<String>>);

struct Text<'a>(&'a mut String);

impl Visit for Text<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{field}={value:?} ").expect("text");
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Text(&mut self.0.lock().expect("no panic")));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_compiler_that_cannot_wait_for_its_device_keeps_what_work_may_use_and_says_how_much() {
    let device = device();
    let mut compiler = compiler(&device);
    let step = compiler.begin("step").unwrap();
    let buffer = here(&step, 3 * PAGE);
    device.write(buffer, b"mine").unwrap();
    let read = streams(&device).enqueue_read(STREAM, buffer, Bytes(4));
    step.free_on(STREAM, buffer).unwrap();
    step.finish().unwrap();
    let before = device.books();
    refuse(&device, Repeat::Always);
    let warnings = Warnings::default();
    let said = Arc::clone(&warnings.0);
    tracing::subscriber::with_default(warnings, || drop(compiler));
    let after = device.books();
    assert_eq!(owned(&after), owned(&before));
    assert_eq!(after.memory_calls(), before.memory_calls());
    streams(&device).run_all(3);
    assert_eq!(streams(&device).saw(read), Some(Ok(b"mine".to_vec())));
    let said = said.lock().unwrap();
    for part in ["held=12.00 KiB", "reserved=1.00 MiB", "is kept until"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_device_that_is_waited_for_the_second_time_gets_everything_back() {
    let device = device();
    let mut compiler = compiler(&device);
    let step = compiler.begin("step").unwrap();
    let buffer = here(&step, PAGE);
    device.write(buffer, b"mine").unwrap();
    let read = streams(&device).enqueue_read(STREAM, buffer, Bytes(4));
    step.free_on(STREAM, buffer).unwrap();
    step.finish().unwrap();
    refuse(&device, Repeat::Once);
    drop(compiler);
    assert!(device.is_empty());
    assert_eq!(streams(&device).saw(read), Some(Ok(b"mine".to_vec())));
}

#[test]
fn the_last_buffer_of_a_dropped_compiler_takes_nothing_with_it_that_work_may_use() {
    let device = device();
    let mut compiler = compiler(&device);
    let step = compiler.begin("step").unwrap();
    let buffer = here(&step, PAGE);
    step.finish().unwrap();
    drop(compiler);
    device.write(buffer, b"mine").unwrap();
    let read = streams(&device).enqueue_read(STREAM, buffer, Bytes(4));
    let before = device.books();
    refuse(&device, Repeat::Always);
    free(buffer).unwrap();
    assert_eq!(owned(&device.books()), owned(&before));
    streams(&device).run_all(5);
    assert_eq!(streams(&device).saw(read), Some(Ok(b"mine".to_vec())));
}

#[test]
fn a_range_of_weights_that_cannot_wait_for_its_device_keeps_what_work_may_use() {
    for repeat in [Repeat::Always, Repeat::Once] {
        let device = device();
        let shared: Arc<dyn Device> = Arc::clone(&device) as _;
        let pager = Pager::new(shared, Some(Bytes(8 * PAGE))).unwrap();
        let range = pager.range(Bytes(4 * PAGE)).unwrap();
        let Pin::Resident(pinned) = range.pin(Bytes(0), Bytes(2 * PAGE), Stamp::NEVER).unwrap()
        else {
            panic!("two pages fit");
        };
        device.write(range.base(), b"mine").unwrap();
        let read = streams(&device).enqueue_read(STREAM, range.base(), Bytes(4));
        let before = device.books();
        refuse(&device, repeat);
        drop((pinned, range));
        let is_kept = repeat == Repeat::Always;
        assert_eq!(owned(&device.books()) == owned(&before), is_kept);
        assert_eq!(device.is_empty(), !is_kept);
        // What is kept is in use: nobody else has it.
        let used = if is_kept { 2 * PAGE } else { 0 };
        assert_eq!(pager.stats().used, Bytes(used));
        streams(&device).run_all(7);
        assert_eq!(streams(&device).saw(read), Some(Ok(b"mine".to_vec())));
    }
}

/// Trim, compile, weights that have to go for a step or for others: with work that is not over, and a device that
/// cannot be waited for, no mapping goes.
#[test]
fn nothing_is_unmapped_while_the_device_cannot_be_waited_for() {
    let device = device();
    let shared: Arc<dyn Device> = Arc::clone(&device) as _;
    let pager = Pager::new(shared, Some(Bytes(12 * PAGE))).unwrap();
    let options = Options {
        address_space: Bytes(256 * PAGE),
        ..Options::default()
    };
    let mut compiler = Compiler::with_pager(&pager, options).unwrap();
    compiler.use_stream(STREAM).unwrap();
    // Trim has them to give back.
    let step = compiler.begin("step").unwrap();
    let (a, b) = (here(&step, 3 * PAGE), here(&step, PAGE));
    step.free(a).unwrap();
    let c = here(&step, 4 * PAGE);
    step.free(b).unwrap();
    step.free(c).unwrap();
    step.finish().unwrap();
    let (weights, others) = (pager.range(Bytes(2 * PAGE)), pager.range(Bytes(7 * PAGE)));
    let (weights, others) = (weights.unwrap(), others.unwrap());
    let pin = weights.pin(Bytes(0), Bytes(2 * PAGE), Stamp::NEVER);
    assert!(matches!(pin.unwrap(), Pin::Resident(_)), "and let go again");
    let mut reads = Vec::new();
    for (at, bytes) in [(a, b"buff"), (weights.base(), b"weig")] {
        device.write(at, bytes).unwrap();
        let read = streams(&device).enqueue_read(STREAM, at, Bytes(4));
        reads.push((read, bytes));
    }
    refuse(&device, Repeat::Always);
    let before = device.books();
    is_refused(compiler.trim());
    is_refused(others.pin(Bytes(0), Bytes(7 * PAGE), Stamp::NEVER));
    compiler.compile().map_or_else(
        |error| is_refused::<()>(Err(error)),
        |compiled| assert!(!compiled.is_installed),
    );
    let step = compiler.begin("step").unwrap();
    let large = step.alloc(Bytes(11 * PAGE));
    assert!(large.is_err(), "{large:?}");
    step.finish().unwrap();
    let after = device.books();
    for call in [Call::Unmap, Call::Release, Call::Unreserve] {
        assert_eq!(after.calls(call), before.calls(call), "{call:?}");
    }
    device.upstream().disarm();
    streams(&device).run_all(9);
    for (read, bytes) in reads {
        assert_eq!(streams(&device).saw(read), Some(Ok(bytes.to_vec())));
    }
    drop((compiler, weights, others, pager));
    assert!(device.is_empty());
}
