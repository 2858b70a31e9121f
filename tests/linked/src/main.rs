//! Exits with 0 if the hook has the effect that it should have in this build: with the line, all of it;
//! with feature `forgotten`, none, and an error that says which line to add.

use std::process::ExitCode;

use memory_compiler::{Error, hook};

#[cfg(not(feature = "forgotten"))]
memory_compiler::interpose_cuda!();

fn main() -> ExitCode {
    let expected = if cfg!(feature = "forgotten") {
        Err(Error::CudaHookMissing)
    } else {
        Ok(())
    };
    let found = hook::cuda::check();
    println!("{found:?}");
    // SAFETY: asks for nothing, so that it may be called in any state.
    let _ = unsafe { cudarc::driver::sys::cuInit(0) };
    if found == expected {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
