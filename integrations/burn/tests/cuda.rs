//! Burn tensors in steps on an NVIDIA GPU. Run with `--test-threads=1`: patching the driver's calls wants nobody
//! else in them. Skips aloud without a GPU.
#![cfg(feature = "cuda")]

mod common;

use burn::tensor::activation::softmax;
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Int, Tensor};
use memory_compiler::device::{Cuda, Device as _};
use memory_compiler::hook::cuda::{check, counts};
use memory_compiler::{Bytes, scope};
use memory_compiler_burn::{Error, Options, compiler, compiler_with};

use common::{assert_replayed, bits};

/// Events of a replayed step, at least.
const LEAST: u64 = 9;

/// The device; `None`, said aloud, without one.
fn gpu() -> Option<Device> {
    let found = (Cuda::count() > 0).then(|| Device::cuda(0));
    if found.is_none() {
        println!("SKIPPED: no NVIDIA GPU");
    }
    found
}

/// A convolution, attention and an MLP; `[batch, 16, side, side]` to the same shape.
fn block(x: &Tensor<4>) -> Tensor<4> {
    let _scope = scope("block");
    let device = x.device();
    let [batch, channels, height, width] = x.dims();
    let kernel = Tensor::ones([channels, channels, 3, 3], &device) * 0.01;
    let same = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
    let seen = conv2d(x.clone(), kernel, None, same);
    let tokens: Tensor<3> = seen.flatten::<3>(2, 3).swap_dims(1, 2);
    let scores = tokens.clone().matmul(tokens.clone().transpose()) * 0.25;
    let attended = softmax(scores, 2).matmul(tokens);
    let weight = Tensor::<2>::ones([channels, 4 * channels], &device) * 0.02;
    let back = Tensor::<2>::ones([4 * channels, channels], &device) * 0.02;
    let hidden = attended.matmul(weight.unsqueeze()).tanh();
    let out = hidden.matmul(back.unsqueeze()).swap_dims(1, 2);
    out.reshape([batch, channels, height, width]) + x.clone()
}

fn input(side: usize, device: &Device) -> Tensor<4> {
    let count = (2 * 16 * side * side) as i64;
    Tensor::<1, Int>::arange(0..count, device)
        .float()
        .reshape([2, 16, side, side])
        / 50_000.0
}

#[test]
fn steps_give_the_same_bits_and_make_no_driver_call_once_they_have_settled() -> Result<(), Error> {
    let Some(device) = gpu() else { return Ok(()) };
    let mut memory = compiler(&device)?;
    let x = input(64, &device);
    let expected = bits(&block(&block(&x)));
    for n in 0..20 {
        let before = counts();
        let y = memory.step(|| block(&block(&x)))?;
        let stats = memory.stats();
        let after = counts();
        if n >= 8 {
            assert_replayed(&stats, LEAST, &format!("step {n}"));
            assert_eq!(
                (after.allocs, after.frees),
                (before.allocs, before.frees),
                "step {n}"
            );
        }
        assert_eq!(bits(&y), expected, "step {n}");
    }
    memory.compile()?;
    for n in 0..3 {
        let y = memory.step(|| block(&block(&x)))?;
        assert_eq!(bits(&y), expected, "step {n} after compile");
        assert_replayed(&memory.stats(), LEAST, "after compile");
    }
    memory.snapshot().validate().unwrap();
    let stats = memory.stats();
    assert_eq!(
        (stats.breaks_total, stats.bad_frees, stats.passed_through),
        (0, 0, 0),
        "{stats}"
    );
    println!("{stats}");
    Ok(())
}

#[test]
fn cond_and_uncond_in_turn_and_two_resolutions_settle() -> Result<(), Error> {
    let Some(device) = gpu() else { return Ok(()) };
    let mut memory = compiler(&device)?;
    let sizes = [("cond", 32), ("uncond", 64), ("cond", 48)];
    let inputs = sizes.map(|(_, side)| input(side, &device));
    let expected = inputs.each_ref().map(|x| bits(&block(x)));
    for n in 0..30 {
        let at = n % 3;
        let y = memory.step_named(sizes[at].0, || block(&inputs[at]))?;
        if n >= 21 {
            assert_replayed(&memory.stats(), LEAST, &format!("step {n}"));
        }
        assert_eq!(bits(&y), expected[at], "step {n}");
    }
    Ok(())
}

#[test]
fn outputs_outlive_their_step_and_their_compiler() -> Result<(), Error> {
    let Some(device) = gpu() else { return Ok(()) };
    let mut memory = compiler(&device)?;
    let mut kept = Vec::new();
    for n in 0..12 {
        let x = input(32, &device) + f64::from(n) / 10.0;
        let y = memory.step(|| block(&x))?;
        kept.push((y, bits(&block(&x))));
    }
    assert_eq!(memory.stats().breaks_step, 0, "{}", memory.stats());
    drop(memory);
    for (n, (y, expected)) in kept.iter().enumerate() {
        assert_eq!(&bits(y), expected, "output {n}");
    }
    // Their buffers are live, so the way for their frees stays.
    assert_eq!(check(), Ok(()));
    drop(kept);
    device.sync().unwrap();
    Ok(())
}

#[derive(Debug, PartialEq)]
enum Mine {
    Stopped,
    Memory(Error),
}

impl From<Error> for Mine {
    fn from(error: Error) -> Self {
        Self::Memory(error)
    }
}

#[test]
fn a_panic_and_an_early_return_abort_the_step_and_come_through() -> Result<(), Error> {
    let Some(device) = gpu() else { return Ok(()) };
    let mut memory = compiler(&device)?;
    let x = input(32, &device);
    let expected = bits(&block(&x));
    for round in 1..=3 {
        for _ in 0..4 {
            assert_eq!(bits(&memory.step(|| block(&x))?), expected);
        }
        let stopped = memory.try_step(|| {
            let y = block(&x);
            Err::<(), _>(Mine::Stopped)?;
            Ok(y)
        });
        assert_eq!(stopped.err(), Some(Mine::Stopped));
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            memory.step(|| {
                let y = block(&x);
                assert!(y.dims()[0] > 2, "on purpose");
            })
        }));
        let panic = panic.unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
        assert_eq!(memory.stats().aborts, 2 * round);
    }
    Ok(())
}

#[test]
fn a_strict_break_is_served_and_the_step_returns_it() -> Result<(), Error> {
    let Some(device) = gpu() else { return Ok(()) };
    let options = Options {
        strict: true,
        ..Options::default()
    };
    let mut memory = compiler_with(&device, &options)?;
    let (small, large) = (input(32, &device), input(64, &device));
    for _ in 0..8 {
        memory.step(|| block(&small))?;
    }
    memory.outside(|| block(&large))?;
    let error = memory.step(|| block(&large)).unwrap_err().to_string();
    assert!(error.contains("strict step broke at step/block"), "{error}");
    let expected = bits(&block(&small));
    assert_eq!(bits(&memory.step(|| block(&small))?), expected);
    Ok(())
}

/// Elsewhere the small tensor would lie in a page of cubecl's as large as the large one, and keep it.
#[test]
fn what_is_made_outside_takes_its_size() -> Result<(), Error> {
    let Some(device) = gpu() else { return Ok(()) };
    let mut memory = compiler(&device)?;
    let cuda = Cuda::new(0).unwrap();
    let free = || cuda.memory().unwrap().free;
    let make = |count: usize| {
        let large = Tensor::<1>::ones([count], &device);
        (large.narrow(0, 0, 100_000) + 1.0, count)
    };
    // The kernels.
    memory.outside(|| make(200_000))?;
    let before = free();
    let (kept, count) = memory.outside(|| make(256 << 18))?;
    let taken = Bytes(before.0.saturating_sub(free().0));
    // The driver's own pool grows by 32 MiB.
    assert!(taken <= Bytes::mib(64), "{taken} of {} MiB", count >> 18);
    assert_eq!(bits(&kept), vec![2f32.to_bits(); 100_000]);
    Ok(())
}

/// By its name the first: the patches stay once a buffer has outlived its compiler.
#[test]
fn a_compiler_without_live_buffers_takes_its_patches_with_it() -> Result<(), Error> {
    let Some(device) = gpu() else { return Ok(()) };
    for _ in 0..3 {
        let mut memory = compiler(&device)?;
        let x = input(32, &device);
        for _ in 0..6 {
            memory.step(|| block(&x))?;
        }
        assert_eq!(check(), Ok(()));
        drop(memory);
        assert!(check().is_err(), "the driver's own calls are back");
        block(&x).to_data();
    }
    Ok(())
}
