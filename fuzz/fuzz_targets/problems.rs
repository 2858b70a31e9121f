//! The reader of planner problems: any bytes give rows, which are planned, or an error, as in `tests/texts.rs`.
#![no_main]

#[allow(dead_code, reason = "each target reads one of the two formats")]
#[path = "../../tests/texts/mod.rs"]
mod texts;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    texts::check_csv(&texts::csv_text(bytes));
});
