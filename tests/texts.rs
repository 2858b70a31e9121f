//! Any bytes are read, or refused with the line that is wrong: traces and planner problems. The fuzz targets
//! `traces` and `problems` run the same programs.

#[path = "texts/mod.rs"]
mod texts;

use proptest::prelude::*;
use texts::{check_csv, check_trace, csv_text, trace_text};

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..200)
}

/// What files are made of, and a few bytes that they are not.
fn characters() -> impl Strategy<Value = String> {
    let parts = prop::sample::select(vec![
        "id",
        "lower",
        "upper",
        "size",
        "offset",
        "frames",
        "0",
        "7",
        "12",
        "4096",
        "-",
        "+",
        ",",
        ",",
        ",",
        "\n",
        "\n",
        "\r\n",
        " ",
        "\t",
        "#",
        "a ",
        "f ",
        "s ",
        "e",
        "ä",
        "18446744073709551615",
        "id,lower,upper,size\n",
    ]);
    prop::collection::vec(parts, 0..40).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_048, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_a_problem_or_an_error(bytes in bytes()) {
        check_csv(&csv_text(&bytes));
    }

    #[test]
    fn any_bytes_are_a_trace_or_an_error(bytes in bytes()) {
        check_trace(&trace_text(&bytes));
    }

    #[test]
    fn any_words_are_read_or_refused(text in characters()) {
        check_csv(text.as_bytes());
        check_trace(text.as_bytes());
    }
}

/// The properties above prove something only while some of their texts are sound, and others are not.
#[test]
fn the_texts_reach_what_comes_behind_the_readers() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let (mut rows, mut placed, mut events, mut refused) = (0, 0, 0, 0);
    for _ in 0..512 {
        let bytes = bytes().new_tree(&mut runner).expect("one").current();
        match check_csv(&csv_text(&bytes)) {
            Some(read) => {
                placed += read.iter().filter(|row| row.spot.is_some()).count();
                rows += read.len();
            }
            None => refused += 1,
        }
        match check_trace(&trace_text(&bytes)) {
            Some(trace) => events += trace.events.len(),
            None => refused += 1,
        }
    }
    assert!(
        rows > 500 && placed > 100 && events > 2_000 && refused > 100,
        "{rows} rows, {placed} placed, {events} events, {refused} refused"
    );
}

/// A damaged file must not fill the memory, row by row.
#[test]
fn all_frames_of_a_file_are_limited_together() {
    let mut text = "id,lower,upper,size,offset,frames\n".to_owned();
    for n in 0..4_000 {
        text += &format!("{n},0,1,8,0,0-8388607\n");
    }
    assert_eq!(check_csv(text.as_bytes()), None);
}
