//! Programs of events on a device that fails, as in `tests/properties.rs`.
#![no_main]

#[path = "../../tests/reference/mod.rs"]
mod reference;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let outcome = reference::faulty::Faulty::decode(bytes).run();
    assert!(outcome.errors <= outcome.failures);
});
