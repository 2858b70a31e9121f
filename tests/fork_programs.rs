//! Random programs with forks at random events, inside of steps: children check, overwrite and drop all that is live, and
//! some go on with the rest of the program, and children of their own.

#![cfg(target_os = "linux")]

mod reference;

use memory_compiler::{Bytes, Compiler, Error, Options};
use proptest::prelude::*;

use reference::child::{Buffer, alloc, fork};
use reference::devices::counting_host;

const PAGE: u64 = 4096;

/// What a random program does.
#[derive(Clone, Copy, Debug)]
enum Event {
    Begin,
    End,
    Alloc {
        class: u8,
    },
    Free {
        which: u8,
    },
    Compile,
    Trim,
    Fork {
        spoils: bool,
        drops: bool,
        goes_on: bool,
    },
}

fn events() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => Just(Event::Begin),
        2 => Just(Event::End),
        10 => (0..24_u8).prop_map(|class| Event::Alloc { class }),
        8 => any::<u8>().prop_map(|which| Event::Free { which }),
        1 => Just(Event::Compile),
        1 => Just(Event::Trim),
        2 => any::<[bool; 3]>().prop_map(|[spoils, drops, goes_on]| Event::Fork { spoils, drops, goes_on }),
    ]
}

/// Runs a program; returns how many children it had. In a child that goes on, `depth` is its generation.
fn run_program(program: &[Event], depth: u32) -> u32 {
    let device = counting_host(Bytes(PAGE));
    let options = Options {
        address_space: Bytes::mib(64),
        ..Options::default()
    };
    let mut compiler = Compiler::new(device.clone(), options).expect("a compiler");
    let mut live: Vec<Buffer> = Vec::new();
    let (mut seed, mut children) = (u64::from(depth) << 32, 0);
    let mut at = 0;
    while at < program.len() {
        match program[at] {
            Event::Compile => drop(compiler.compile().expect("compiles")),
            Event::Trim => drop(compiler.trim().expect("trims")),
            _ => {}
        }
        let outside = &raw const compiler;
        let step = compiler.begin("step").expect("a step");
        for &event in &program[at..] {
            at += 1;
            match event {
                Event::Begin | Event::Compile | Event::Trim => {}
                Event::End => break,
                Event::Alloc { class } => {
                    seed += 1;
                    let size = 512 * (1 + u64::from(class) * u64::from(class) / 3);
                    live.push(alloc(&device, &step, size, seed));
                }
                Event::Free { .. } if live.is_empty() => {}
                Event::Free { which } => {
                    let buffer = live.swap_remove(usize::from(which) % live.len());
                    buffer.check();
                }
                Event::Fork { .. } if depth > 1 => {}
                Event::Fork {
                    spoils,
                    drops,
                    goes_on,
                } => {
                    children += 1;
                    let rest = &program[at..];
                    let child = fork(|child| {
                        live.iter().for_each(Buffer::check);
                        if spoils {
                            live.iter().for_each(Buffer::spoil);
                        }
                        assert_eq!(step.alloc(Bytes(PAGE)), Err(Error::Forked));
                        if drops {
                            drop(child.own(&raw const live));
                        }
                        if goes_on {
                            run_program(rest, depth + 1);
                        }
                        drop(child.own(&raw const step));
                        drop(child.own(outside));
                    });
                    child.succeeds();
                    live.iter().for_each(Buffer::check);
                }
            }
        }
        step.finish().expect("the step ends well");
        live.iter().for_each(Buffer::check);
        compiler.snapshot().validate().expect("nothing is shared");
    }
    assert_eq!(compiler.stats().bad_frees, 0);
    drop(compiler);
    live.iter().for_each(Buffer::check);
    drop(live);
    assert!(device.is_empty(), "{:?}", device.books());
    children
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn no_child_of_any_program_reaches_its_parent(program in prop::collection::vec(events(), 0..80)) {
        run_program(&program, 0);
    }
}
