//! The trace reader: any bytes give a trace or an error, and a trace reads back as it was written.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memory_compiler::trace::Trace;

fuzz_target!(|bytes: &[u8]| {
    let Ok(trace) = Trace::read(bytes) else { return };
    let mut written = Vec::new();
    trace.write(&mut written).expect("a vector takes everything");
    assert_eq!(Trace::read(&*written).expect("what was written is sound"), trace);
    assert!(trace.live_peak().0 % 512 == 0);
});
