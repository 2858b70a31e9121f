//! Programs of events against the reference model, as in `tests/properties.rs`.
#![no_main]

#[path = "../../tests/reference/mod.rs"]
mod reference;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let program = reference::program::Program::decode(bytes);
    let stats = program.run();
    assert_eq!(stats.steps, program.steps.len() as u64);
});
