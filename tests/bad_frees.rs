//! Frees of what is no buffer: typed where somebody waits for the answer, counted where nobody does,
//! and harmless everywhere.

mod reference;

use memory_compiler::device::StreamId;
use memory_compiler::{
    Address, Allocation, BadFree, Bytes, Compiler, Error, Options, Step, free, free_on,
};

use reference::devices::{CountingHost, Pattern, counting_host};
use reference::pair::on_thread;

const PAGE: u64 = 4096;
const WORKER: StreamId = StreamId(9);

fn compiler() -> (CountingHost, Compiler) {
    let device = counting_host(Bytes(PAGE));
    let options = Options {
        address_space: Bytes::mib(64),
        ..Options::default()
    };
    let compiler = Compiler::new(device.clone(), options).expect("a compiler");
    (device, compiler)
}

fn here(step: &Step<'_>, size: u64) -> Address {
    match step.alloc(Bytes(size)) {
        Ok(Allocation::Here(address)) => address,
        other => panic!("{size} bytes were not served: {other:?}"),
    }
}

fn bad(address: Address, reason: BadFree) -> Result<(), Error> {
    Err(Error::BadFree { address, reason })
}

/// Addresses that no compiler of this test gave out, and why freeing them is bad.
fn foreign() -> Vec<Address> {
    let on_heap = Box::new(7_u8);
    let on_stack = 7_u8;
    vec![
        Address(0),
        Address(1),
        Address(u64::MAX),
        Address(std::ptr::from_ref(&*on_heap) as u64),
        Address(std::ptr::from_ref(&on_stack) as u64),
        Address(foreign as fn() -> Vec<Address> as usize as u64),
    ]
}

#[test]
fn addresses_of_no_compiler_are_unknown_to_all() {
    let (device, mut compiler) = compiler();
    let step = compiler.begin("step").expect("a step");
    let buffer = here(&step, 2 * PAGE);
    for address in foreign() {
        let unknown = bad(address, BadFree::Unknown);
        assert_eq!(step.free(address), unknown);
        assert_eq!(step.free_on(WORKER, address), unknown);
        assert_eq!(on_thread(move || free(address)), unknown);
        assert_eq!(on_thread(move || free_on(WORKER, address)), unknown);
    }
    assert_eq!(step.stats().bad_frees, 0, "they are not this compiler's");
    step.free(buffer).expect("live");
    step.finish().expect("the step ends well");
    for address in foreign() {
        assert_eq!(free(address), bad(address, BadFree::Unknown));
    }
    drop(compiler);
    assert!(device.is_empty());
}

#[test]
fn what_is_not_live_in_a_range_is_told_or_counted_and_harms_nothing() {
    let (device, mut compiler) = compiler();
    let pattern = Pattern {
        seed: 3,
        size: 3 * PAGE,
    };
    let step = compiler.begin("step").expect("a step");
    let (buffer, twice) = (here(&step, pattern.size), here(&step, PAGE));
    pattern.write(&*device, buffer.0);
    step.free(twice).expect("live");
    let base = step.snapshot().base;
    let end = base.0 + Bytes::mib(64).0;
    let not_live = [
        twice,
        Address(buffer.0 + 1),
        Address(buffer.0 + 512),
        Address(buffer.0 + PAGE),
        Address(buffer.0 + pattern.size - 1),
        // Never given out: the last page of either half.
        Address(base.0 + (end - base.0) / 2 - PAGE),
        Address(end - PAGE),
        Address(end - 1),
    ];
    let mut count = 0;
    for address in not_live {
        assert_eq!(step.free(address), bad(address, BadFree::NotLive));
        assert_eq!(free(address), bad(address, BadFree::NotLive));
        assert_eq!(free_on(WORKER, address), bad(address, BadFree::NotLive));
        // Nobody waits for these two.
        assert_eq!(on_thread(move || free(address)), Ok(()));
        assert_eq!(on_thread(move || free_on(WORKER, address)), Ok(()));
        count += 5;
        assert_eq!(step.stats().bad_frees, count);
        pattern.check(&*device, buffer.0);
    }
    step.finish().expect("the step ends well");
    for address in not_live {
        assert_eq!(free(address), Ok(()), "between steps the owner looks later");
    }
    assert_eq!(compiler.stats().bad_frees, count + not_live.len() as u64);
    pattern.check(&*device, buffer.0);

    // After the drop the last buffer still holds the range.
    drop(compiler);
    for address in not_live {
        assert_eq!(free(address), Ok(()));
        pattern.check(&*device, buffer.0);
    }
    free(buffer).expect("live");
    assert!(device.is_empty());
}

#[test]
fn a_buffer_freed_twice_from_elsewhere_is_counted_once() {
    let (device, mut compiler) = compiler();
    let step = compiler.begin("step").expect("a step");
    let (buffer, other) = (here(&step, PAGE), here(&step, PAGE));
    on_thread(move || (free(buffer), free(buffer), free_on(WORKER, buffer)))
        .0
        .expect("live");
    let stats = step.stats();
    assert_eq!((stats.live, stats.bad_frees), (Bytes(PAGE), 2));
    step.free(other).expect("live");
    step.finish().expect("the step ends well");
    drop(compiler);
    assert!(device.is_empty());
}

#[test]
fn after_the_last_buffer_of_a_dropped_compiler_its_addresses_are_unknown() {
    let (device, mut gone) = compiler();
    let step = gone.begin("step").expect("a step");
    let buffer = here(&step, PAGE);
    step.finish().expect("the step ends well");
    drop(gone);
    free(buffer).expect("live");
    assert!(device.is_empty());
    let again = free(buffer);
    // Another compiler of this process may own the address by now: then it counts it.
    assert!(
        again == Ok(()) || again == bad(buffer, BadFree::Unknown),
        "{again:?}"
    );
}
