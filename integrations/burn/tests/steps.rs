//! Burn tensors in steps: contents, branches, survivors, errors. The models of `models/` are the larger test.

mod common;

use burn::tensor::activation::{gelu, softmax};
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Tensor};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::{Bytes, scope};
use memory_compiler_burn::{Error, Memory, Options, compiler, compiler_with};

use common::{assert_replayed, bits};

/// Events of a replayed step, at least.
const LEAST: u64 = 11;

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

/// Something like a block: a convolution, attention, an MLP, temporaries of several sizes, and an output
/// that outlives it. `[batch, 16, side, side]` to the same shape.
fn block(x: &Tensor<4>) -> Tensor<4> {
    let _scope = scope("block");
    let device = x.device();
    let [batch, channels, height, width] = x.dims();
    let kernel = Tensor::ones([channels, channels, 3, 3], &device) * 0.01;
    let same = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
    let seen = conv2d(x.clone(), kernel, None, same);
    let tokens: Tensor<3> = seen.flatten::<3>(2, 3).swap_dims(1, 2);
    let attended = {
        let _scope = scope("attention");
        let scores = tokens.clone().matmul(tokens.clone().transpose()) * 0.25;
        softmax(scores, 2).matmul(tokens)
    };
    let hidden = {
        let _scope = scope("mlp");
        let weight = Tensor::<2>::ones([channels, 4 * channels], &device) * 0.02;
        gelu(attended.matmul(weight.unsqueeze()))
    };
    let back = Tensor::<2>::ones([4 * channels, channels], &device) * 0.02;
    let out = hidden.matmul(back.unsqueeze()).swap_dims(1, 2);
    out.reshape([batch, channels, height, width]) + x.clone()
}

fn input(side: i64, offset: f64) -> Tensor<4> {
    let device = Device::flex();
    let side_length = side as usize;
    Tensor::<1, burn::tensor::Int>::arange(0..2 * 16 * side * side, &device)
        .float()
        .reshape([2, 16, side_length, side_length])
        / 5_000.0
        + offset
}

#[test]
fn a_chain_of_steps_gives_the_same_bits_and_settles() -> Result<(), Error> {
    let mut memory = compiler(&Device::flex())?;
    let (mut compiled, mut plain) = (input(16, 0.0), input(16, 0.0));
    for n in 0..10 {
        compiled = memory.step(|| block(&block(&compiled)))?;
        plain = block(&block(&plain));
        assert_eq!(bits(&compiled), bits(&plain), "step {n}");
        let stats = memory.stats();
        assert_eq!(stats.breaks_step, 0, "{stats}");
        if n >= 3 {
            assert_replayed(&stats, LEAST, &format!("step {n}"));
        }
    }
    Ok(())
}

#[test]
fn cond_and_uncond_in_turn_are_two_branches_that_share_their_memory() -> Result<(), Error> {
    let mut memory = compiler(&Device::flex())?;
    let x = input(16, 0.0);
    // As guidance does it: the conditional half works on twice the tokens.
    let twice = Tensor::cat(vec![x.clone(), x.clone() * 0.5], 0);
    let expected = [bits(&block(&twice)), bits(&block(&x))];
    for n in 0..10 {
        let cond = memory.step_named("cond", || block(&twice))?;
        let cond_stats = memory.stats();
        let uncond = memory.step_named("uncond", || block(&x))?;
        let uncond_stats = memory.stats();
        assert_eq!([bits(&cond), bits(&uncond)], expected, "step {n}");
        if n >= 5 {
            assert_replayed(&cond_stats, LEAST, &format!("cond {n}"));
            assert_replayed(&uncond_stats, LEAST, &format!("uncond {n}"));
        }
    }
    let stats = memory.stats();
    assert_eq!(stats.breaks_total, 0, "{stats}");
    let peaks = stats.branches.iter().map(|branch| branch.peak.0);
    let (larger, sum) = (peaks.clone().max().unwrap(), peaks.sum::<u64>());
    assert!(stats.held.0 < sum, "{stats}");
    assert!(
        stats.held.0 <= larger + larger / 10 + 4 * stats.granule.0,
        "{stats}"
    );
    Ok(())
}

#[test]
fn two_resolutions_in_turn_settle() -> Result<(), Error> {
    let mut memory = compiler(&Device::flex())?;
    for n in 0..10 {
        let x = input(if n % 2 == 0 { 12 } else { 20 }, 0.0);
        let y = memory.step(|| block(&x))?;
        assert_eq!(bits(&y), bits(&block(&x)), "step {n}");
        if n >= 6 {
            assert_replayed(&memory.stats(), LEAST, &format!("step {n}"));
        }
    }
    assert!(memory.stats().breaks_total <= 2, "{}", memory.stats());
    Ok(())
}

#[test]
fn outputs_that_outlive_their_step_keep_their_contents() -> Result<(), Error> {
    let mut memory = compiler(&Device::flex())?;
    let mut history = Vec::new();
    for n in 0..12 {
        let x = input(16, f64::from(n));
        history.push((memory.step(|| block(&x))?, bits(&block(&x))));
    }
    let stats = memory.stats();
    assert_eq!((stats.survivors, stats.breaks_step), (12, 0), "{stats}");
    drop(memory);
    for (output, expected) in &history {
        assert_eq!(&bits(output), expected, "after the compiler is gone");
    }
    Ok(())
}

/// The step after an abort: the same bits, served, and nothing counted as left open.
fn goes_on(memory: &mut Memory, x: &Tensor<4>, aborts: u64) -> Result<(), Error> {
    let y = memory.step(|| block(x))?;
    assert_eq!(bits(&y), bits(&block(x)));
    let stats = memory.stats();
    assert_eq!((stats.aborts, stats.bad_scopes), (aborts, 0), "{stats}");
    assert!(stats.replayed_step + stats.recorded_step > 10, "{stats}");
    Ok(())
}

#[test]
fn a_panic_inside_a_step_aborts_it_and_goes_on() -> Result<(), Error> {
    let mut memory = compiler(&Device::flex())?;
    let x = input(16, 0.0);
    for round in 1..=3 {
        goes_on(&mut memory, &x, round - 1)?;
        let kept = std::sync::Mutex::new(None);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            memory.step(|| {
                let _scope = scope("wrong");
                let y = block(&x);
                *kept.lock().unwrap() = Some(y.clone());
                // Burn refuses operands that do not fit by a panic.
                y.matmul(Tensor::ones([2, 16, 3, 5], &x.device()))
            })
        }));
        let panic = panic.unwrap_err();
        let message = panic.downcast_ref::<String>().expect("Burn says why");
        assert!(
            message.contains("ultipl") || message.contains("atmul"),
            "{message}"
        );
        let kept = kept.into_inner().unwrap().unwrap();
        assert_eq!(bits(&kept), bits(&block(&x)), "live buffers stay valid");
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum Mine {
    Stopped(u32),
    Memory(Error),
}

impl From<Error> for Mine {
    fn from(error: Error) -> Self {
        Self::Memory(error)
    }
}

#[test]
fn an_early_return_aborts_the_step_and_comes_through() -> Result<(), Error> {
    let mut memory = compiler(&Device::flex())?;
    let x = input(16, 0.0);
    for round in 1..=3 {
        goes_on(&mut memory, &x, u64::from(round) - 1)?;
        let stopped = memory.try_step(|| {
            let y = block(&x);
            Err::<(), _>(Mine::Stopped(round))?;
            Ok(y)
        });
        assert_eq!(stopped.err(), Some(Mine::Stopped(round)));
    }
    Ok(())
}

#[test]
fn a_strict_break_names_scope_and_sizes() -> Result<(), Error> {
    let options = Options {
        strict: true,
        ..Options::default()
    };
    let mut memory = compiler_with(&Device::flex(), &options)?;
    let (small, large) = (input(12, 0.0), input(20, 0.0));
    // The output survives its first step, so the second records again.
    for _ in 0..4 {
        memory.step(|| block(&small))?;
    }
    let error = memory.step(|| block(&large)).unwrap_err().to_string();
    assert!(error.contains("strict step broke at step/block"), "{error}");
    assert!(
        error.contains("asked for") && error.contains("expected"),
        "{error}"
    );
    let y = memory.step(|| block(&small))?;
    assert_eq!(bits(&y), bits(&block(&small)));
    Ok(())
}

#[test]
fn a_budget_that_does_not_suffice_is_an_error_and_the_step_still_right() {
    let options = Options {
        budget: Some(Bytes::kib(128)),
        ..Options::default()
    };
    let mut memory = compiler_with(&Device::flex(), &options).unwrap();
    let x = input(16, 0.0);
    let kept = std::sync::Mutex::new(None);
    let error = memory
        .step(|| *kept.lock().unwrap() = Some(block(&x)))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("over the budget of 128.00 KiB"),
        "{error}"
    );
    let kept = kept.into_inner().unwrap().unwrap();
    assert_eq!(bits(&kept), bits(&block(&x)));
}

#[test]
fn a_settled_step_holds_its_floor_after_compile() -> Result<(), Error> {
    let mut memory = compiler(&Device::flex())?;
    let x = input(16, 0.0);
    for _ in 0..5 {
        memory.step(|| block(&block(&x)))?;
    }
    memory.compile()?;
    for n in 0..3 {
        let y = memory.step(|| block(&block(&x)))?;
        assert_eq!(bits(&y), bits(&block(&block(&x))), "step {n}");
        assert_replayed(&memory.stats(), LEAST, &format!("step {n} after compile"));
    }
    memory.snapshot().validate().unwrap();
    let stats = memory.stats();
    assert!(stats.held.0 <= stats.floor.0 + stats.granule.0, "{stats}");
    Ok(())
}

#[test]
fn options_that_cannot_work_are_refused_in_words() {
    let refused = |options: Options| {
        let error = compiler_with(&Device::flex(), &options).unwrap_err();
        error.to_string()
    };
    let granule = Options {
        granule: Bytes(5000),
        ..Options::default()
    };
    assert!(refused(granule).contains("option granule"));
    let budget = Options {
        budget: Some(Bytes(1)),
        ..Options::default()
    };
    assert!(refused(budget).contains("option budget"));
}
