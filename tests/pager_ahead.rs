//! Weights that come in while other work runs: on `Host` with streams whose work runs in any legal order,
//! and with a thread that copies. What the work reads is compared with what the weights are.

mod reference;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use memory_compiler::device::{Call, Device, DeviceError};
use memory_compiler::pager::{Ahead, Group, OnThread, Pager, Part, Pin, Stamp};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options, Remedy};

use reference::devices::limited_host;
use reference::weights::{Model, PAGE, Random, Read, StreamedHost, WORK, check, device, pages};

#[test]
fn a_model_that_fits_is_copied_once_and_then_costs_no_call() {
    let device = device();
    let pager = Pager::with_limit(device.clone(), None, Some(pages(12))).unwrap();
    let mut model = Model::new(&device, &pager, &[3 * PAGE, 4 * PAGE, 5 * PAGE], 1);
    let mut reads = Vec::new();
    for step in 0..4 {
        let (calls, fences) = (device.memory_calls(), device.calls(Call::Fence));
        model.step(&device, &mut reads);
        device.upstream().run_all(step);
        check(&device, &mut reads);
        assert_eq!(model.ahead.stats().copied, pages(12));
        if step > 0 {
            assert_eq!(device.memory_calls(), calls);
            assert_eq!(
                device.calls(Call::Fence),
                fences,
                "nothing is to be ordered"
            );
        }
    }
}

#[test]
fn a_model_that_does_not_fit_streams_its_share_and_makes_no_memory_call() {
    for (frames, streamed) in [(56, 6), (40, 30), (24, 54), (20, 60), (14, 60)] {
        let device = device();
        let pager = Pager::with_limit(device.clone(), None, Some(pages(frames))).unwrap();
        let mut model = Model::new(&device, &pager, &[10 * PAGE; 6], 2);
        let mut reads = Vec::new();
        let (mut copied, mut calls, mut waits) = (Bytes::ZERO, 0, 0);
        for step in 0..8 {
            if step == 3 {
                (copied, calls) = (model.ahead.stats().copied, device.memory_calls());
                waits = device.calls(Call::Synchronise);
            }
            model.step(&device, &mut reads);
            device.upstream().run_all(step);
            check(&device, &mut reads);
            assert!(device.books().held_peak <= pages(frames));
        }
        assert_eq!(device.memory_calls(), calls, "{frames} frames");
        let copied = model.ahead.stats().copied.0 - copied.0;
        assert_eq!(copied, 5 * streamed * PAGE, "{frames} frames");
        assert_eq!(model.ahead.stats().arranged, 1);
        assert_eq!(device.calls(Call::Synchronise), waits, "{frames} frames");
    }
}

/// Like a UNet: what computes most has few weights, and most weights are where little is computed.
#[test]
fn copies_of_groups_that_compute_little_come_before_them_beside_those_that_compute_much() {
    let (outer, inner) = ((2, 40), (32, 2));
    let groups: Vec<(u64, u64)> = [[outer; 6], [inner; 6], [outer; 6]].concat();
    let sizes: Vec<u64> = groups.iter().map(|&(size, _)| size * PAGE).collect();
    let work: u64 = groups.iter().map(|&(_, work)| work * PAGE).sum();
    // What a stretch of groups uses beyond the frames has to come in while it works.
    let least = |frames: u64| {
        let stretches = (0..18).flat_map(|from| (1..=18).map(move |count| (from, count)));
        let least = stretches.map(|(from, count)| {
            let stretch = groups.iter().cycle().skip(from).take(count);
            let (size, inside) = stretch.fold((0, 0), |sum, &(size, work)| {
                (sum.0 + size * PAGE, sum.1 + work * PAGE)
            });
            work - inside + inside.max(size.saturating_sub(frames * PAGE))
        });
        least.max().unwrap_or(0)
    };
    for frames in [170, 130, 100, 72, 40] {
        let device = device();
        let pager = Pager::with_limit(device.clone(), None, Some(pages(frames))).unwrap();
        let mut model = Model::new(&device, &pager, &sizes, 11);
        let mut reads = Vec::new();
        let (mut took, mut calls) = (0, 0);
        for step in 0..10 {
            if step == 6 {
                calls = device.memory_calls();
            }
            let began = device.moment(WORK).unwrap();
            for (group, &(size, work)) in groups.iter().enumerate() {
                model.ahead.enter(model.groups[group].0).unwrap();
                for _ in 0..work.div_ceil(size) {
                    reads.push(model.read_part(&device, group, pages(work.min(size))));
                }
                model.ahead.leave(model.groups[group].0);
            }
            let over = device.moment(WORK).unwrap();
            device.upstream().run_all(step);
            check(&device, &mut reads);
            took = device.elapsed(began, over).unwrap().as_nanos() as u64;
            assert!(device.books().held_peak <= pages(frames));
        }
        assert_eq!(device.memory_calls(), calls, "{frames} frames");
        let ratio = took as f64 / least(frames) as f64;
        println!("{frames} frames: {ratio:.4} of what is possible");
        assert!(ratio <= 1.02, "{frames} frames: {ratio}");
    }
}

/// Like a transformer whose blocks have two streams: the halves of a block have names of their own, and are used in
/// turn.
fn blocks(device: &StreamedHost, model: &mut Model, reads: &mut Vec<Read>, halves: &[usize]) {
    if model.groups.len() % 2 == 1 {
        model.run(device, model.groups.len() - 1, reads);
    }
    for block in 0..model.groups.len() / 2 {
        halves
            .iter()
            .for_each(|half| model.run(device, 2 * block + half, reads));
    }
}

#[test]
fn halves_that_are_used_in_turn_are_copied_once_a_step() {
    for halves in [&[0, 1, 0, 1][..], &[0, 1, 1, 0], &[1, 0, 1, 0]] {
        let device = device();
        let pager = Pager::with_limit(device.clone(), None, Some(pages(240))).unwrap();
        // They do not begin with pages.
        let mut sizes = vec![8 * PAGE + 1024; 48];
        sizes.push(10 * PAGE);
        let mut model = Model::new(&device, &pager, &sizes, 12);
        let mut reads = Vec::new();
        let (mut copied, mut calls) = (Bytes::ZERO, 0);
        for step in 0..10 {
            if step == 6 {
                (copied, calls) = (model.ahead.stats().copied, device.memory_calls());
            }
            blocks(&device, &mut model, &mut reads, halves);
            device.upstream().run_all(step);
            check(&device, &mut reads);
            assert!(device.books().held_peak <= pages(240));
        }
        assert_eq!(device.memory_calls(), calls);
        let a_step = (model.ahead.stats().copied.0 - copied.0) / 4 / PAGE;
        // 406 pages, of which 240 fit, less the ring of those that do not.
        println!("{halves:?}: {a_step} pages copied a step");
        assert!((406 - 240..=230).contains(&a_step), "{halves:?}: {a_step}");
    }
}

#[test]
fn rounds_that_seem_short_settle_too() {
    for halves in [&[0, 1, 0, 1][..], &[0, 1, 1, 0], &[1, 0, 1, 0]] {
        let device = device();
        let pager = Pager::with_limit(device.clone(), None, Some(pages(240))).unwrap();
        let mut model = Model::new(&device, &pager, &[8 * PAGE; 48], 14);
        let (mut reads, mut calls) = (Vec::new(), 0);
        for step in 0..20 {
            if step == 14 {
                calls = device.memory_calls();
            }
            blocks(&device, &mut model, &mut reads, halves);
            device.upstream().run_all(step);
            check(&device, &mut reads);
        }
        assert_eq!(device.memory_calls(), calls, "{halves:?}");
    }
}

#[test]
fn what_became_one_is_parted_where_it_does_not_fit_any_more() {
    let device = device();
    let pager = Pager::new(device.clone(), Some(pages(80))).unwrap();
    let mut sizes = vec![8 * PAGE; 24];
    sizes.push(2 * PAGE);
    let mut model = Model::new(&device, &pager, &sizes, 13);
    let mut reads = Vec::new();
    for step in 0..4 {
        blocks(&device, &mut model, &mut reads, &[0, 1, 0, 1]);
        device.upstream().run_all(step);
        check(&device, &mut reads);
    }
    // Somebody needs so much that two halves do not fit beside it.
    let other = pager.range(pages(70)).unwrap();
    let pinned = other.pin(Bytes::ZERO, pages(70), Stamp::NEVER).unwrap();
    assert!(matches!(pinned, Pin::Resident(_)));
    for step in 0..4 {
        blocks(&device, &mut model, &mut reads, &[0, 1, 0, 1]);
        device.upstream().run_all(step);
        check(&device, &mut reads);
        assert!(device.books().held_peak <= pages(80));
    }
}

#[test]
fn a_group_that_comes_only_once_keeps_nothing_from_being_arranged() {
    let device = device();
    let pager = Pager::with_limit(device.clone(), None, Some(pages(24))).unwrap();
    let mut model = Model::new(&device, &pager, &[8 * PAGE; 6], 9);
    let mut reads = Vec::new();
    model.run(&device, 5, &mut reads);
    let mut calls = 0;
    for step in 0..12 {
        if step == 10 {
            calls = device.memory_calls();
        }
        (0..5).for_each(|group| model.run(&device, group, &mut reads));
        device.upstream().run_all(step);
        check(&device, &mut reads);
    }
    assert_eq!(device.memory_calls(), calls);
    let arranged = model.ahead.stats().arranged;
    assert!((1..=2).contains(&arranged), "{arranged}");
}

#[test]
fn the_next_group_is_in_memory_before_the_work_of_this_one_ran() {
    let device = device();
    let pager = Pager::with_limit(device.clone(), None, Some(pages(24))).unwrap();
    let mut model = Model::new(&device, &pager, &[8 * PAGE; 6], 3);
    let copies = device.copy_stream().unwrap();
    let mut reads = Vec::new();
    for step in 0..3 {
        model.step(&device, &mut reads);
        device.upstream().run_all(step);
    }
    check(&device, &mut reads);
    for group in 0..6 {
        model.ahead.enter(model.groups[group].0).unwrap();
        let read = model.read(&device, group);
        while device.upstream().run_next(copies) {}
        assert!(device.upstream().saw(read.work).is_none());
        let (_, offset, size) = model.groups[(group + 1) % 6];
        let mut seen = vec![0; size.0 as usize];
        let at = Address(model.base.0 + offset.0);
        device.read(at, &mut seen).unwrap();
        let is_in = seen == model.image.bytes()[offset.0 as usize..][..seen.len()];
        // The first one shares frames with the last one, and comes in after it.
        assert!(is_in || group == 5, "group {group}");
        model.ahead.leave(model.groups[group].0);
        reads.push(read);
        device.upstream().run_all(group as u64);
    }
    check(&device, &mut reads);
}

#[test]
fn a_thread_copies_the_next_group_while_this_one_is_in_use() {
    let device = limited_host(Bytes(PAGE), Bytes(u64::MAX));
    let pager = Pager::with_limit(device.clone(), None, Some(pages(24))).unwrap();
    let range = pager.range(pages(48)).unwrap();
    let base = range.base();
    let mut random = Random(8);
    let mut image: Vec<u8> = Vec::new();
    image.resize_with(48 * PAGE as usize, || random.below(256) as u8);
    let (target, source) = (device.clone(), image.clone());
    let fill = move |part: Part| {
        let from = part.offset.0 as usize;
        target.write(part.address, &source[from..from + part.size.0 as usize])
    };
    let mut ahead = Ahead::new(range, Box::new(OnThread::new(fill).unwrap()));
    let groups: Vec<Group> = (0..6)
        .map(|group| ahead.group([(pages(8 * group), pages(8))]).unwrap())
        .collect();
    let mut calls = 0;
    for step in 0..60 {
        if step == 3 {
            calls = device.memory_calls();
        }
        // Now and then another order.
        let order: Vec<usize> = match step % 20 {
            17 => vec![0, 1, 4, 5],
            18 => vec![0, 2, 1, 3, 5, 4],
            _ => (0..6).collect(),
        };
        for group in order {
            ahead.enter(groups[group]).unwrap();
            let (from, len) = (8 * group * PAGE as usize, 8 * PAGE as usize);
            let mut seen = vec![0; len];
            device
                .read(Address(base.0 + from as u64), &mut seen)
                .unwrap();
            assert!(
                seen == image[from..from + len],
                "step {step}, group {group}"
            );
            ahead.leave(groups[group]);
        }
        if step == 15 {
            assert_eq!(device.memory_calls(), calls);
        }
        assert!(device.books().held_peak <= pages(24));
    }
    let stats = ahead.stats();
    assert!(stats.copied_ahead.0 > stats.copied.0 / 2, "{stats:?}");
    drop((ahead, pager));
    assert!(device.is_empty());
}

#[test]
fn a_copy_that_failed_ahead_is_made_again_whoever_was_told_of_it() {
    // Another group is entered in its place, or the one before it has to come in again.
    for told in [2, 0] {
        let device = limited_host(Bytes(PAGE), Bytes(u64::MAX));
        let pager = Pager::with_limit(device.clone(), None, Some(pages(24))).unwrap();
        let range = pager.range(pages(24)).unwrap();
        let base = range.base();
        let image: Vec<u8> = (0..24 * PAGE).map(|n| (n / 7) as u8 | 1).collect();
        let (target, source) = (device.clone(), image.clone());
        let fails = Arc::new(AtomicBool::new(false));
        let is_due = Arc::clone(&fails);
        let fill = move |part: Part| {
            if part.offset == pages(8) && is_due.swap(false, Ordering::SeqCst) {
                let (call, code) = (Call::Write, 5);
                return Err(DeviceError::Driver { call, code });
            }
            let from = part.offset.0 as usize;
            target.write(part.address, &source[from..from + part.size.0 as usize])
        };
        let mut ahead = Ahead::new(range.clone(), Box::new(OnThread::new(fill).unwrap()));
        let groups: Vec<Group> = (0..3)
            .map(|group| ahead.group([(pages(8 * group), pages(8))]).unwrap())
            .collect();
        let mut run = |group: usize| {
            ahead.enter(groups[group])?;
            let (from, len) = (8 * group * PAGE as usize, 8 * PAGE as usize);
            let mut seen = vec![0; len];
            device
                .read(Address(base.0 + from as u64), &mut seen)
                .unwrap();
            ahead.leave(groups[group]);
            assert!(
                seen == image[from..from + len],
                "group {group} has other bytes than the weights"
            );
            Ok(())
        };
        for group in (0..3).cycle().take(9) {
            run(group).unwrap();
        }
        range.evict().unwrap();
        fails.store(true, Ordering::SeqCst);
        run(0).unwrap();
        range.evict().unwrap();
        let refused: Result<(), Error> = run(told);
        assert!(
            matches!(refused, Err(Error::Device { .. })),
            "the second group's copy failed: {refused:?}"
        );
        for group in [1, 2, 0] {
            run(group).unwrap();
        }
    }
}

#[test]
fn a_group_of_another_model_is_refused() {
    let device = limited_host(Bytes(PAGE), Bytes(u64::MAX));
    let pager = Pager::with_limit(device, None, Some(pages(8))).unwrap();
    let ahead = || {
        let fill = |_: Part| Ok(());
        Ahead::new(
            pager.range(pages(4)).unwrap(),
            Box::new(OnThread::new(fill).unwrap()),
        )
    };
    let (mut one, mut other) = (ahead(), ahead());
    let (mine, theirs) = (
        one.group([(pages(0), pages(1))]).unwrap(),
        other.group([(pages(0), pages(1))]).unwrap(),
    );
    one.enter(mine).unwrap();
    let refused = one.enter(theirs);
    assert!(
        matches!(
            refused,
            Err(Error::Option {
                option: "group",
                ..
            })
        ),
        "{refused:?}"
    );
    one.leave(theirs);
    assert_eq!(pager.stats().pinned, pages(1), "mine is entered still");
    one.leave(mine);
    assert_eq!(pager.stats().pinned, pages(0));
}

#[test]
fn a_dropped_model_leaves_no_fence_with_its_device() {
    let device = device();
    let pager = Pager::with_limit(device.clone(), None, Some(pages(20))).unwrap();
    for round in 1..=3 {
        let mut model = Model::new(&device, &pager, &[10 * PAGE; 6], 15);
        let mut reads = Vec::new();
        for step in 0..8 {
            model.step(&device, &mut reads);
            device.upstream().run_all(step);
            check(&device, &mut reads);
        }
        let open = device.calls(Call::Fence) - device.calls(Call::Wait);
        assert!(open > 0, "copies were asked for ahead");
        drop(model);
        assert_eq!(
            device.calls(Call::Fence),
            device.calls(Call::Wait),
            "model {round}"
        );
    }
}

#[test]
fn a_group_that_does_not_fit_is_told_what_it_needs() {
    let device = device();
    let pager = Pager::with_limit(device.clone(), None, Some(pages(8))).unwrap();
    let mut model = Model::new(&device, &pager, &[4 * PAGE, 9 * PAGE, 2 * PAGE], 4);
    let mut reads = Vec::new();
    for step in 0..3 {
        model.run(&device, 0, &mut reads);
        let refused = model.ahead.enter(model.groups[1].0);
        let Err(Error::WeightBudget(short)) = refused else {
            panic!("nine pages do not fit into eight: {refused:?}");
        };
        assert_eq!((short.needed, short.limit), (pages(9), pages(8)));
        assert_eq!(short.remedy, Remedy::WeightLimit(pages(9)));
        model.run(&device, 2, &mut reads);
        device.upstream().run_all(step);
        check(&device, &mut reads);
    }
    assert!(device.books().held_peak <= pages(8));
}

#[test]
fn a_second_model_takes_only_the_shortfall_and_the_first_one_only_takes_that_back() {
    let device = device();
    let pager = Pager::new(device.clone(), Some(pages(40))).unwrap();
    let mut model = Model::new(&device, &pager, &[6 * PAGE; 6], 5);
    let mut decoder = Model::new(&device, &pager, &[5 * PAGE; 2], 6);
    let mut reads = Vec::new();
    for turn in 0..4 {
        for _ in 0..3 {
            model.step(&device, &mut reads);
        }
        let before = (model.ahead.stats().copied, device.calls(Call::Map));
        model.step(&device, &mut reads);
        assert_eq!(
            (model.ahead.stats().copied, device.calls(Call::Map)),
            before
        );
        decoder.step(&device, &mut reads);
        let whole = model.ahead.range().size();
        let left = model.ahead.range().residency(Bytes::ZERO, whole).unwrap();
        assert_eq!(
            left.evicted,
            pages(6),
            "40 pages, of which 10 are the decoder's"
        );
        let maps = device.calls(Call::Map);
        model.step(&device, &mut reads);
        assert_eq!(model.ahead.stats().copied.0 - before.0.0, 6 * PAGE);
        assert_eq!(
            device.calls(Call::Map) - maps,
            6,
            "what was left alone costs no call"
        );
        device.upstream().run_all(turn);
        check(&device, &mut reads);
    }
}

#[test]
fn steps_take_from_streaming_weights_and_give_back_at_trim() {
    let device = device();
    let pager = Pager::new(device.clone(), Some(pages(40))).unwrap();
    let mut model = Model::new(&device, &pager, &[8 * PAGE; 6], 7);
    let options = Options {
        address_space: Bytes::mib(1),
        ..Options::default()
    };
    let mut compiler = Compiler::with_pager(&pager, options).unwrap();
    compiler.use_stream(WORK).unwrap();
    let mut reads = Vec::new();
    for step in 0..12 {
        let calls = device.memory_calls();
        let running = compiler.begin("step").unwrap();
        for group in 0..6 {
            let Allocation::Here(at) = running.alloc(pages(9)).unwrap() else {
                panic!("a step is active");
            };
            model.run(&device, group, &mut reads);
            running.free(at).unwrap();
        }
        running.finish().unwrap();
        device.upstream().run_all(step);
        check(&device, &mut reads);
        if step > 3 {
            assert_eq!(device.memory_calls(), calls, "step {step}");
        }
        assert!(device.books().held_peak <= pages(40));
    }
    compiler.trim().unwrap();
    for step in 0..4 {
        model.step(&device, &mut reads);
        device.upstream().run_all(step);
        check(&device, &mut reads);
    }
    assert_eq!(pager.stats().resident, pages(40));
}
