//! Programs of events against the reference model, which is asked after each of them.

mod reference;

use memory_compiler::Stats;
use proptest::prelude::*;
use reference::faulty::Faulty;
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

/// The same on a device that fails.
fn faulty_programs() -> impl Strategy<Value = Faulty> {
    let faults = prop::collection::vec(any::<[u8; 4]>(), 1..=4);
    let records = prop::collection::vec(any::<[u8; 4]>(), 0..120);
    (faults, records).prop_map(|(faults, records)| {
        let mut bytes = vec![faults.len() as u8 - 1];
        bytes.extend(faults.concat());
        bytes.extend(records.concat());
        Faulty::decode(&bytes)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 384, ..ProptestConfig::default() })]

    #[test]
    fn a_device_that_fails_loses_nothing_of_any_program(faulty in faulty_programs()) {
        let outcome = faulty.run();
        prop_assert!(outcome.errors <= outcome.failures);
    }
}

#[test]
fn the_faults_reach_the_programs() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let (mut failures, mut errors) = (0, 0);
    for _ in 0..128 {
        let faulty = faulty_programs().new_tree(&mut runner).expect("one");
        let outcome = faulty.current().run();
        failures += outcome.failures;
        errors += outcome.errors;
    }
    assert!(
        failures > 300 && errors > 100,
        "{failures} calls failed, {errors} errors"
    );
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
