//! Programs of events against the reference model, which is asked after each of them.

mod reference;

use memory_compiler::Stats;
use proptest::prelude::*;
use reference::program::Program;

/// Records rather than bytes, so that shrinking leaves out whole ones.
fn programs() -> impl Strategy<Value = Program> {
    let record = any::<[u8; 4]>();
    prop::collection::vec(record, 0..160).prop_map(|records| Program::decode(&records.concat()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn every_program_is_served_as_the_model_says(program in programs()) {
        let stats = program.run();
        prop_assert_eq!(stats.steps, program.steps.len() as u64);
    }
}

/// The property above proves something only while its programs do.
#[test]
fn the_programs_reach_every_kind_of_answer() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    use reference::program::{Between, End, Event};

    let mut runner = TestRunner::deterministic();
    let made: Vec<Program> = (0..256)
        .map(|_| {
            programs()
                .new_tree(&mut runner)
                .expect("a program")
                .current()
        })
        .collect();
    let steps = || made.iter().flat_map(|program| &program.steps);
    let events = || steps().flat_map(|step| &step.events);
    assert!(
        events().count() > 256 * 100,
        "{} events are few",
        events().count()
    );
    assert!(made.iter().any(|program| program.strict));
    assert!(steps().any(|step| step.before.contains(&Between::Trim)));
    assert!(steps().any(|step| matches!(step.end, End::Abort { close_first: false })));
    assert!(events().any(|event| matches!(event, Event::Pause)));
    assert!(events().any(|event| matches!(event, Event::Open { strict: true, .. })));
    assert!(events().any(|event| matches!(event, Event::FreeInside { .. })));

    let ran: Vec<Stats> = made.iter().map(Program::run).collect();
    let sum = |number: fn(&Stats) -> u64| ran.iter().map(number).sum::<u64>();
    let (replayed, recorded) = (
        sum(|stats| stats.replayed_total),
        sum(|stats| stats.recorded_total),
    );
    assert!(
        replayed > recorded && recorded > 1000,
        "{replayed} replayed, {recorded} recorded"
    );
    assert!(sum(|stats| stats.breaks_total) > 100);
    assert!(sum(|stats| stats.survivor_positions) > 100);
    assert!(
        sum(|stats| stats.obstructed) > 10,
        "{}",
        sum(|stats| stats.obstructed)
    );
    assert!(sum(|stats| stats.bad_frees) > 100);
    assert!(sum(|stats| stats.aborts) > 10);
}
