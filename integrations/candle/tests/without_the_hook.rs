//! A program that forgot the line in its `main.rs`.

use candle_core::Device;

#[test]
fn the_error_is_the_line_to_add() {
    let error = memory_compiler_candle::compiler(&Device::Cpu)
        .unwrap_err()
        .to_string();
    assert!(error.contains("#[global_allocator]"), "{error}");
    assert!(error.contains("ScopedAllocator::new();"), "{error}");
}
