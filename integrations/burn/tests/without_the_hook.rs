//! A program that forgot the line in its `main.rs`.

use burn::tensor::Device;

#[test]
fn the_error_is_the_line_to_add() {
    let error = memory_compiler_burn::compiler(&Device::flex())
        .unwrap_err()
        .to_string();
    assert!(error.contains("#[global_allocator]"), "{error}");
    assert!(error.contains("ScopedAllocator::new();"), "{error}");
}
