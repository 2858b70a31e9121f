//! A program that forgot `interpose_cuda!`. Without a GPU the test says so and passes.

#![cfg(feature = "cuda")]

use candle_core::Device;
use memory_compiler::device::Cuda;

#[test]
fn the_error_is_the_line_to_add() {
    if Cuda::count() == 0 {
        eprintln!("SKIPPED: no GPU here");
        return;
    }
    let device = Device::new_cuda(0).expect("the GPU");
    let error = memory_compiler_candle::compiler(&device).expect_err("there is no hook");
    let text = error.to_string();
    assert!(
        text.contains("memory_compiler::interpose_cuda!();"),
        "{text}"
    );
}
