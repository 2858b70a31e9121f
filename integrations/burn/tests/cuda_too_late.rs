//! A program that uses the GPU before it makes the compiler. Skips aloud without a GPU.
#![cfg(feature = "cuda")]

use burn::tensor::{Device, Tensor};
use memory_compiler_burn::Error;

#[test]
fn the_error_says_what_to_do_first() {
    if memory_compiler::device::Cuda::count() == 0 {
        let error = memory_compiler_burn::compiler(&Device::cuda(0)).unwrap_err();
        assert!(
            error.to_string().contains("GPUs that the driver shows"),
            "{error}"
        );
        println!("SKIPPED: no NVIDIA GPU");
        return;
    }
    let device = Device::cuda(0);
    let x = Tensor::<1>::ones([4096], &device);
    let error = memory_compiler_burn::compiler(&device).unwrap_err();
    assert_eq!(error, Error::TooLate);
    assert!(error.to_string().contains("before anything uses the GPU"));
    let sum = x.sum().into_data().try_into_vec::<f32>().unwrap();
    assert_eq!(sum, [4096.0], "Burn works as before");
}
