//! Weights that are used on more than one stream: the copies arrive before the work of the stream that uses them, and
//! memory leaves behind it. On `Host` with streams whose work runs in any legal order.

mod reference;

use std::sync::Arc;

use memory_compiler::device::adaptor::Repeat;
use memory_compiler::device::{Call, DeviceError, StreamId};
use memory_compiler::pager::{Carrier, OnStream, Pager, Part};
use memory_compiler::{Address, Bytes, Error};

use reference::weights::{Model, PAGE, Random, Read, StreamedHost, WORK, check, device, pages};

const OTHERS: [StreamId; 2] = [StreamId(2), StreamId(3)];

/// Work of a stream that reads a group.
fn read_on(device: &StreamedHost, model: &Model, stream: StreamId, group: usize) -> Read {
    let (_, offset, size) = model.groups[group];
    let at = Address(model.base.0 + offset.0);
    Read {
        work: device.upstream().enqueue_read(stream, at, size),
        truth: model.image.bytes()[offset.0 as usize..(offset.0 + size.0) as usize].to_vec(),
    }
}

#[test]
fn work_reads_its_weights_on_whichever_stream_it_is_enqueued() {
    for (frames, seed) in [56, 40, 24, 20, 14].into_iter().zip(0..) {
        let device = device();
        let pager = Pager::with_limit(device.clone(), None, Some(pages(frames))).unwrap();
        let mut model = Model::new(&device, &pager, &[10 * PAGE; 6], seed);
        let mut random = Random(seed);
        let (mut reads, mut now, mut changes) = (Vec::new(), WORK, 0);
        for step in 0..24 {
            for group in 0..6 {
                let next = [WORK, OTHERS[0], OTHERS[1]][random.below(3) as usize];
                if next != now && random.below(3) == 0 {
                    let waits = device.calls(Call::Synchronise);
                    model.ahead.work_on(next).unwrap();
                    assert_eq!(device.calls(Call::Synchronise), waits + 1);
                    (now, changes) = (next, changes + 1);
                }
                model.ahead.enter(model.groups[group].0).unwrap();
                for _ in 0..2 {
                    reads.push(read_on(&device, &model, now, group));
                }
                model.ahead.leave(model.groups[group].0);
            }
            if random.below(3) == 0 {
                device.upstream().run_all(step);
                check(&device, &mut reads);
            }
        }
        device.upstream().run_all(seed);
        check(&device, &mut reads);
        assert!(changes > 20, "{changes} changes are few");
    }
}

#[test]
fn a_stream_is_not_changed_while_the_device_cannot_be_waited_for() {
    let device = device();
    let pager = Pager::with_limit(device.clone(), None, Some(pages(4))).unwrap();
    let mut model = Model::new(&device, &pager, &[2 * PAGE; 4], 9);
    let mut reads = Vec::new();
    model.step(&device, &mut reads);
    let error = DeviceError::Driver {
        call: Call::Synchronise,
        code: 700,
    };
    let failing = device.upstream().upstream().upstream();
    failing.fail_call_at(Call::Synchronise, 0, error, Repeat::Once);
    let refused = model.ahead.work_on(OTHERS[0]);
    assert!(matches!(refused, Err(Error::Device { .. })), "{refused:?}");
    // It goes on where it was, and changes later.
    model.step(&device, &mut reads);
    model.ahead.work_on(OTHERS[0]).unwrap();
    for group in 0..4 {
        model.ahead.enter(model.groups[group].0).unwrap();
        reads.push(read_on(&device, &model, OTHERS[0], group));
        model.ahead.leave(model.groups[group].0);
    }
    device.upstream().run_all(11);
    check(&device, &mut reads);
}

/// The stream that is left may be gone: no fence is asked of it, also not for what was used there last.
#[test]
fn a_stream_that_was_left_is_asked_for_nothing() {
    let device = device();
    let image = Arc::new(memory_compiler::device::HostMemory::ordinary(pages(1)).unwrap());
    let pager = Pager::new(device.clone(), None).unwrap();
    let range = pager.range(pages(1)).unwrap();
    let mut carrier = OnStream::new(device.clone(), WORK, image).unwrap();
    let pin = range.pin(Bytes(0), pages(1), memory_compiler::pager::Stamp::NEVER);
    let at = Part {
        offset: Bytes(0),
        address: range.base(),
        size: pages(1),
    };
    carrier.work_on(OTHERS[0]).unwrap();
    let fences = device.calls(Call::Fence);
    device
        .upstream()
        .enqueue_read(OTHERS[0], at.address, Bytes(8));
    carrier.mark(1).unwrap();
    assert_eq!(device.calls(Call::Fence), fences + 1);
    carrier.after(1).unwrap();
    carrier.copy(at).unwrap();
    carrier.close(1).unwrap();
    // The copy waits for the other stream's read, and for nothing of the first one.
    let copies = StreamId(u64::MAX);
    while device.upstream().run_next(copies) {}
    assert_eq!(
        device.upstream().pending(),
        3,
        "the read, the wait, the copy"
    );
    device.upstream().enqueue_read(WORK, at.address, Bytes(8));
    while device.upstream().run_next(OTHERS[0]) {}
    while device.upstream().run_next(copies) {}
    assert_eq!(device.upstream().pending(), 1, "the first stream's");
    device.upstream().run_all(0);
    drop((carrier, pin));
}
