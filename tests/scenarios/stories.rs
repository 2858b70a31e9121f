//! Rows that need more than a list of steps: threads, failures, aborts, many rounds.

use std::panic::{AssertUnwindSafe, catch_unwind};

use memory_compiler::device::{Call, StreamId};
use memory_compiler::{
    Address, Allocation, BadFree, Bytes, Compiler, Error, Expected, Options, Remedy, Shortage,
    Stats,
};

use crate::reference::Expect;
use crate::reference::devices::{Pattern, counting_host, limited_host};
use crate::reference::pair::{OTHER_STREAM, Pair, on_thread};
use crate::row::{GRANULE, Held, MIB, Player, Row, play, steps};

#[test]
fn case_06_steps_without_a_buffer_hold_nothing() {
    let mut player = Player::new();
    for text in ["", "a{ } b{ c{ } }", "zero=0", "a{ zero=0 }", ""] {
        let log = player.step(text);
        assert!(
            log.buffers
                .iter()
                .all(|served| served.expect == Expect::Elsewhere)
        );
    }
    player.check_held(&Held::Mib(0));
    let books = player.pair.book.counting.books();
    assert!(
        books.calls(Call::Reserve) <= 1,
        "reserved {} times",
        books.calls(Call::Reserve)
    );
    assert_eq!((books.pages_created, books.mappings_alive), (0, 0));
    player.pair.end();
}

#[test]
fn case_07_other_scopes_around_the_same_buffers_are_no_break() {
    let mut player = Player::new();
    let variations = [
        "down{ x=8 y=16 -x up{ z=8 -z } -y }",
        "left{ x=8 y=16 -x right{ z=8 -z } -y }",
        "x=8 y=16 -x z=8 -z -y",
        "down{ x=8 } down{ y=16 } down{ -x } up{ } up{ z=8 -z } -y",
        "up{ x=8 down{ y=16 -x } } z=8 -z -y",
        "down{ down{ down{ down{ x=8 y=16 -x z=8 } } } } -z -y",
    ];
    for text in variations {
        let log = player.step(text);
        assert_eq!(log.breaks, 0, "{text}");
        let before = log
            .buffers
            .iter()
            .map(|served| served.address)
            .collect::<Vec<_>>();
        assert_eq!(
            player
                .step(text)
                .buffers
                .iter()
                .map(|served| served.address)
                .collect::<Vec<_>>(),
            before
        );
    }
    player.check_held(&Held::Mib(24));
    let stats = player.pair.compiler().stats();
    let scope = |path: &str| {
        stats
            .scopes
            .iter()
            .find(|scope| scope.path == path)
            .unwrap_or_else(|| panic!("{path}"))
    };
    assert_eq!(
        (scope("step").runs, scope("step").peak),
        (12, Bytes::mib(24))
    );
    assert_eq!(scope("step/left").runs, 2);
    assert_eq!(
        (scope("step/left/right").runs, scope("step/left/right").peak),
        (2, Bytes::mib(24))
    );
    assert_eq!(scope("step/down").runs, 2 + 2 * 3 + 2);
    assert_eq!(scope("step/down/down/down/down").runs, 2);
    player.pair.end();
}

#[test]
fn case_08_a_thousand_scopes_and_a_million_events_need_no_deep_stack() {
    let program = || {
        let mut player = Player::new();
        player.pair.book.thorough = false;
        let down: String = (1..=1000).map(|n| format!("s{{ a{n}=64K ")).collect();
        let up: String = (1..=1000).rev().map(|n| format!("-a{n} }} ")).collect();
        let deep = down + &up;
        let recorded = player.step(&deep);
        assert_eq!((recorded.recorded, recorded.breaks), (1000, 0));
        let replayed = player.step(&deep);
        assert_eq!(
            (replayed.recorded, replayed.breaks, replayed.calls),
            (0, 0, 0)
        );

        let mut run = player.pair.begin("long");
        run.open("scope");
        for _ in 0..250_000 {
            let (a, b) = (run.here(64 << 10), run.here(32 << 10));
            run.free(a, true);
            run.free(b, true);
        }
        let report = run.finish();
        assert_eq!((report.events, report.breaks), (1_000_000, 0));
        assert!(report.recorded <= 8, "{} were recorded", report.recorded);
        player.check_held(&Held::Peak);
        player.pair.end();
    };
    let small = std::thread::Builder::new()
        .stack_size(256 << 10)
        .spawn(program);
    small
        .expect("a thread")
        .join()
        .expect("256 KiB of stack suffice");
}

#[test]
fn case_09_a_step_serves_its_own_thread_and_stream_only() {
    let mut pair = Pair::new(GRANULE, Options::default());
    for _ in 0..2 {
        let mut run = pair.begin("step");
        run.alloc_on_other_stream(8 * MIB);
        on_thread(|| {
            // No step is active there: a scope and a pause mean nothing.
            let _scope = memory_compiler::scope("elsewhere");
            let _pause = memory_compiler::pause();
        });
        let own = run.here(8 * MIB);
        run.step.use_stream(OTHER_STREAM).expect("a fence");
        let other = run.here(8 * MIB);
        assert_eq!(
            run.step.alloc_on(StreamId(0), Bytes::mib(8)),
            Ok(Allocation::Elsewhere)
        );
        run.free(other, true);
        run.free(own, true);
        // The binding holds for later steps too.
        run.step.use_stream(StreamId(0)).expect("a fence");
        assert_eq!(run.finish().breaks, 0);
    }
    assert_eq!(pair.compiler().stats().passed_through, 4);
    assert_eq!(pair.book.held(), 16 * MIB);
    pair.end();
}

#[test]
fn case_17_strict_refuses_a_break_and_the_next_step_replays() {
    let mut player = Player::with(Options {
        strict: true,
        ..Options::default()
    });
    let first = player.step("a=8 -a");
    let run = player.pair.begin("step");
    let refused = run.step.alloc(Bytes::mib(16));
    let expected = Error::Strict {
        scope: "step".to_owned(),
        event: 0,
        asked: Bytes::mib(16),
        expected: Expected::Size(Bytes::mib(8)),
    };
    assert_eq!(refused, Err(expected));
    run.compare();
    run.finish();
    let next = player.step("a=8 -a");
    assert_eq!(
        (next.recorded, next.calls, next.address("a")),
        (0, 0, first.address("a"))
    );
    player.check_held(&Held::Mib(8));

    // A strict scope refuses under a lenient step, and says where.
    let mut lenient = Player::new();
    lenient.step("h=8 inner{ x=8 -x } -h");
    let mut run = lenient.pair.begin("step");
    let h = run.here(8 * MIB);
    run.open_strict("inner");
    let Err(Error::Strict {
        scope,
        event,
        asked,
        ..
    }) = run.step.alloc(Bytes::mib(16))
    else {
        panic!("the scope is strict");
    };
    assert_eq!(
        (scope.as_str(), event, asked),
        ("step/inner", 1, Bytes::mib(16))
    );
    run.close();
    let outside = run.here(16 * MIB);
    run.free(outside, true);
    run.free(h, true);
    assert_eq!(run.finish().breaks, 1);
    player.pair.end();
    lenient.pair.end();
}

#[test]
fn case_18_a_foreign_buffer_freed_inside_a_step_changes_nothing() {
    let mut player = Player::new();
    let outside = vec![0x5A_u8; 8 << 20];
    let address = Address(outside.as_ptr() as u64);
    let unknown = Err(Error::BadFree {
        address,
        reason: BadFree::Unknown,
    });
    let mut logs = Vec::new();
    for _ in 0..3 {
        let mut run = player.pair.begin("step");
        let mut served = Vec::new();
        play(&mut run, &mut player.names, "a=8", &mut served);
        assert_eq!(run.step.free(address), unknown);
        run.open("scope");
        assert_eq!(memory_compiler::free(address), unknown);
        run.close();
        play(&mut run, &mut player.names, "b=8 -b -a", &mut served);
        let report = run.step.stats();
        assert_eq!(report.breaks_step, 0);
        let (model, step) = (&run.book.model, &run.step);
        assert_eq!(step.snapshot().live.len(), model.live.len());
        logs.push(
            served
                .iter()
                .map(|served| served.address)
                .collect::<Vec<_>>(),
        );
        run.book.model.stats.bad_frees = run.step.stats().bad_frees;
        run.finish();
    }
    assert!(logs.iter().all(|log| *log == logs[0]));
    assert!(outside.iter().all(|&byte| byte == 0x5A));
    player.check_held(&Held::Mib(16));
    player.pair.end();
}

#[test]
fn case_28_ten_thousand_replays_grow_nothing() {
    let mut player = Player::new();
    let text = "h=8 inner{ x=16 -x } tail=8 -tail -h";
    let first = player.step(text);
    player.step(text);
    let before = player.pair.compiler().stats();
    for _ in 0..10_000 {
        let log = player.step(text);
        assert_eq!((log.calls, log.recorded, log.breaks), (0, 0, 0));
        for (served, at_first) in log.buffers.iter().zip(&first.buffers) {
            assert_eq!(served.address, at_first.address);
        }
    }
    let after = player.pair.compiler().stats();
    let sizes = |stats: &Stats| {
        (
            (
                stats.live,
                stats.peak,
                stats.held,
                stats.floor,
                stats.virtual_bytes,
            ),
            (
                stats.states,
                stats.edges,
                stats.recorded_total,
                stats.device_calls_total,
            ),
            (stats.branches.len(), stats.scopes.len()),
        )
    };
    assert_eq!(sizes(&before), sizes(&after));
    assert_eq!(after.branches[0].runs, 10_002);
    player.check_held(&Held::Mib(24));
    player.pair.end();
}

#[test]
fn case_29_two_compilers_keep_their_addresses() {
    let mut players = [Player::new(), Player::new()];
    let texts = [
        "-kept? a=8 b=16 -a kept=8 -b",
        "-kept? a=24 kept=8 b=8 -b -a",
    ];
    let mut logs: [Vec<_>; 2] = Default::default();
    for round in 0..8 {
        for (own, text) in texts.iter().enumerate() {
            let log = players[own].step(text);
            if round >= 3 {
                assert_eq!(
                    (log.breaks, log.calls),
                    (0, 0),
                    "round {round} of compiler {own}"
                );
            }
            logs[own].push((log.address("a"), log.address("b")));
        }
        // A buffer of each is freed while the other steps.
        let [first, second] = &mut players;
        let mut run = second.pair.begin("other");
        if let Some(kept) = first.names.remove("kept") {
            first.pair.free(kept);
        }
        let own = run.here(8 * MIB);
        run.free(own, true);
        run.finish();
    }
    for log in &logs {
        assert!(
            log[1..].iter().all(|addresses| *addresses == log[1]),
            "{log:x?}"
        );
    }
    let threads: Vec<_> = texts
        .map(|text| {
            std::thread::spawn(move || {
                let mut player = Player::new();
                let first = player.step(text);
                for _ in 0..50 {
                    assert_eq!(player.step(text).address("a"), first.address("a"));
                }
                player.pair.end();
            })
        })
        .into_iter()
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().expect("each keeps its addresses"));
    players.into_iter().for_each(|player| player.pair.end());
}

#[test]
fn case_30_the_books_return_to_the_start_when_the_last_survivor_goes() {
    let counting = counting_host(GRANULE);
    for round in 0..100_u64 {
        let mut pair = Pair::over(counting.clone(), counting.clone(), Options::default());
        let mut survivors = Vec::new();
        for _ in 0..3 {
            let mut run = pair.begin("step");
            let (a, b) = (run.here(8 * MIB), run.here(4 * MIB));
            run.free(a, true);
            survivors.push(b);
            run.finish();
        }
        survivors.truncate((round % 4) as usize);
        for address in pair.book.addresses() {
            if !survivors.contains(&address) {
                pair.free(address);
            }
        }
        pair.drop_compiler();
        if round % 2 == 0 {
            survivors.reverse();
        }
        for address in survivors {
            assert!(!counting.is_empty(), "a survivor has memory");
            pair.book.check_contents();
            pair.free_on_thread(address);
        }
        assert!(
            counting.is_empty(),
            "round {round} left {:?}",
            counting.books()
        );
        pair.end();
    }
}

#[test]
fn case_31_an_aborted_step_leaves_its_buffers_and_the_next_one_runs() {
    for aborts_first in [true, false] {
        for depth in [0, 1, 3] {
            let mut player = Player::new();
            let text = "x=8 d{ y=8 e{ z=8 -z } -y } -x";
            if !aborts_first {
                player.step(text);
                player.step(text);
            }
            for twice in 0..2 {
                let mut run = player.pair.begin("step");
                run.here(8 * MIB);
                for scope in ["d", "e", "f"].into_iter().take(depth) {
                    run.open(scope);
                    run.here(4 * MIB);
                }
                run.abort(twice == 1);
            }
            assert_eq!(player.pair.book.model.live.len(), 2 * (depth + 1));
            player.step(text);
            for address in player.pair.book.addresses() {
                player.pair.free(address);
            }
            player.step(text);
            let log = player.step(text);
            assert_eq!((log.breaks, log.calls), (0, 0), "depth {depth}");
            assert_eq!(player.pair.compiler().stats().aborts, 2);
            player.pair.end();
        }
    }
}

#[test]
fn case_31_a_panic_and_an_early_return_abort() {
    let counting = counting_host(GRANULE);
    let mut compiler = Compiler::new(counting.clone(), Options::default()).expect("a compiler");
    let mut kept = Vec::new();
    let pattern = |address: Address| Pattern {
        seed: address.0 / 512,
        size: 8 * MIB,
    };

    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let step = compiler.begin("step").expect("a step");
        let _scope = memory_compiler::scope("inner");
        let Ok(Allocation::Here(address)) = step.alloc(Bytes::mib(8)) else {
            panic!("served")
        };
        pattern(address).write(&*counting, address.0);
        kept.push(address);
        std::panic::resume_unwind(Box::new("the step fails"));
    }));
    assert!(panicked.is_err());

    let early = |compiler: &mut Compiler, kept: &mut Vec<Address>| -> Result<(), Error> {
        let step = compiler.begin("step")?;
        let _scope = memory_compiler::scope("inner");
        let Allocation::Here(address) = step.alloc(Bytes::mib(8))? else {
            panic!("served")
        };
        pattern(address).write(&*counting, address.0);
        kept.push(address);
        step.free(Address(512))?;
        unreachable!("that free is bad");
    };
    assert!(matches!(
        early(&mut compiler, &mut kept),
        Err(Error::BadFree { .. })
    ));

    let closure: Result<(), Error> = compiler.step(|| Err(Error::NoStep));
    assert_eq!(closure, Err(Error::NoStep));
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        compiler.step_named("other", || -> Result<(), Error> {
            std::panic::resume_unwind(Box::new("again"))
        })
    }));
    assert!(unwound.is_err());
    assert_eq!(compiler.stats().aborts, 4);

    assert_eq!(compiler.step(|| Ok::<_, Error>(5)), Ok(5));
    for address in kept {
        pattern(address).check(&*counting, address.0);
        memory_compiler::free(address).expect("live");
    }
    drop(compiler);
    assert!(counting.is_empty());
}

#[test]
fn case_32_pauses_nest_and_frees_find_their_owner_while_paused() {
    let mut pair = Pair::new(GRANULE, Options::default());
    for _ in 0..3 {
        let mut run = pair.begin("step");
        let a = run.here(8 * MIB);
        run.pause();
        assert_eq!(run.alloc(8 * MIB).0, Expect::Elsewhere);
        run.pause();
        assert_eq!(run.alloc(8 * MIB).0, Expect::Elsewhere);
        run.free(a, true);
        run.resume();
        assert_eq!(run.alloc(8 * MIB).0, Expect::Elsewhere);
        run.resume();
        let b = run.here(16 * MIB);
        run.free(b, false);
        assert_eq!(run.finish().breaks, 0);
    }
    assert_eq!(pair.compiler().stats().passed_through, 9);
    assert_eq!(pair.book.held(), 16 * MIB);
    pair.end();
}

#[test]
fn case_35_a_growing_buffer_uses_up_neither_addresses_nor_mappings() {
    let text: String = (1..=127).map(|n| format!("a={} -a ", 8 * n)).collect();
    let mut player = Player::new();
    let first = player.step(&text);
    player.pair.book.thorough = false;
    let virtual_bytes = player.pair.compiler().stats().virtual_bytes;
    for round in 2..=100 {
        let log = player.step(&text);
        assert_eq!((log.breaks, log.calls), (0, 0), "round {round}");
        assert!(
            log.buffers
                .iter()
                .zip(&first.buffers)
                .all(|(now, then)| now.address == then.address)
        );
    }
    assert_eq!(player.pair.compiler().stats().virtual_bytes, virtual_bytes);
    let mappings = player.pair.book.counting.books().mappings_alive;
    assert!(mappings < 30_000, "{mappings} mappings");
    player.check_held(&Held::Mib(1016));
    player.pair.end();
}

#[test]
fn case_36_a_full_device_is_a_typed_error_and_a_smaller_retry_works() {
    let counting = limited_host(GRANULE, Bytes::mib(512));
    let mut pair = Pair::over(counting.clone(), counting, Options::default());
    let mut run = pair.begin("step");
    let a = run.here(256 * MIB);
    let failed = run.try_alloc(384 * MIB);
    let expected = Error::OutOfMemory(Box::new(Shortage {
        scope: "step".into(),
        asked: Bytes::mib(384),
        needed: Bytes::mib(384),
        limit: Bytes::mib(512),
        free: Bytes::mib(256),
        held: Bytes::mib(256),
        live: Bytes::mib(256),
        other_compilers: Bytes::ZERO,
        weights: Bytes::ZERO,
        elsewhere: Bytes::ZERO,
        remedy: Remedy::Smaller(Bytes::mib(256)),
    }));
    assert!(
        expected
            .to_string()
            .starts_with("device out of memory in step: asked for 384.00 MiB")
    );
    assert_eq!(failed, Err(expected));
    assert_eq!(
        run.book.held(),
        256 * MIB,
        "the pages created for b were given back"
    );
    run.free(a, true);
    let (small, large) = (run.here(128 * MIB), run.here(192 * MIB));
    run.free(large, true);
    run.free(small, true);
    run.finish();
    assert_eq!(pair.book.held(), 320 * MIB);
    pair.end();
}

/// The player itself: a text means what the table in `row` says.
#[test]
fn the_text_of_a_step_means_what_it_says() {
    let logs = Row {
        steps: steps(&["s: in*2{ k$=1 } k2>k? -k -k1 -gone? *2{ x=1+1B -x }"]),
        ..Row::default()
    }
    .check();
    let names: Vec<_> = logs[0]
        .buffers
        .iter()
        .map(|served| (served.name.as_str(), served.scope.as_str()))
        .collect();
    assert_eq!(
        names,
        [("k1", "s/in"), ("k2", "s/in"), ("x", "s"), ("x", "s")]
    );
}
