//! Candle tensors in steps: contents, branches, errors. The models of `models/` are the larger test.

use candle_core::{D, DType, Device, Result, Tensor};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::{Bytes, scope};
use memory_compiler_candle::{Options, compiler, compiler_with};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

/// Something like a block: temporaries of several sizes, and an output that outlives it.
fn block(x: &Tensor) -> Result<Tensor> {
    let _scope = scope("block");
    let hidden = {
        let _scope = scope("mlp");
        let width = x.dim(D::Minus1)?;
        let weight = (Tensor::ones((width, 4 * width), DType::F32, x.device())? * 0.01)?;
        x.matmul(&weight)?.gelu()?
    };
    let back = (Tensor::ones((hidden.dim(1)?, x.dim(1)?), DType::F32, x.device())? * 0.01)?;
    hidden.matmul(&back)? + x
}

fn values(x: &Tensor) -> Result<Vec<u32>> {
    let values = x.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

fn input(rows: usize) -> Result<Tensor> {
    Tensor::arange(0f32, (rows * 96) as f32, &Device::Cpu)?.reshape((rows, 96))? / 1000.0
}

#[test]
fn a_chain_of_steps_gives_the_same_bits_and_settles() -> Result<()> {
    let mut memory = compiler(&Device::Cpu)?;
    let (mut compiled, mut plain) = (input(128)?, input(128)?);
    for n in 0..10 {
        compiled = memory.step(|| block(&block(&compiled)?))?;
        plain = block(&block(&plain)?)?;
        assert_eq!(values(&compiled)?, values(&plain)?, "step {n}");
        let stats = memory.stats();
        assert_eq!(stats.breaks_step, 0, "{stats}");
        if n >= 3 {
            assert_eq!(
                (stats.recorded_step, stats.device_calls_step),
                (0, 0),
                "step {n}: {stats}"
            );
        }
    }
    Ok(())
}

#[test]
fn two_resolutions_in_turn_become_two_branches_that_share_their_memory() -> Result<()> {
    let mut memory = compiler(&Device::Cpu)?;
    let mut peaks = Vec::new();
    for n in 0..10 {
        let rows = if n % 2 == 0 { 64 } else { 160 };
        let x = input(rows)?;
        let y = memory.step(|| block(&x))?;
        assert_eq!(values(&y)?, values(&block(&x)?)?);
        if n >= 6 {
            let stats = memory.stats();
            assert_eq!(
                (stats.breaks_step, stats.device_calls_step),
                (0, 0),
                "{n}: {stats}"
            );
            peaks.push(stats.branches[0].peak);
        }
    }
    let stats = memory.stats();
    let larger = peaks.iter().max().unwrap();
    assert!(stats.held.0 <= larger.0 + 4 * stats.granule.0, "{stats}");
    Ok(())
}

#[test]
fn a_history_of_outputs_keeps_its_contents() -> Result<()> {
    let mut memory = compiler(&Device::Cpu)?;
    let mut history = Vec::new();
    for n in 0..12 {
        let x = (input(64)? + n as f64)?;
        history.push((memory.step(|| block(&x))?, values(&block(&x)?)?));
    }
    let stats = memory.stats();
    assert_eq!((stats.survivors, stats.breaks_step), (12, 0), "{stats}");
    drop(memory);
    for (output, expected) in &history {
        assert_eq!(&values(output)?, expected, "after the compiler is gone");
    }
    Ok(())
}

#[test]
fn an_error_of_candle_aborts_the_step_and_comes_through() -> Result<()> {
    let mut memory = compiler(&Device::Cpu)?;
    let x = input(64)?;
    memory.step(|| block(&x))?;
    let error = memory
        .step(|| {
            let _scope = scope("wrong");
            block(&x)?.matmul(&x)
        })
        .unwrap_err();
    assert!(error.to_string().contains("matmul"), "{error}");
    let y = memory.step(|| block(&x))?;
    assert_eq!(values(&y)?, values(&block(&x)?)?);
    assert_eq!((memory.stats().aborts, memory.stats().bad_scopes), (1, 0));
    Ok(())
}

#[test]
fn a_strict_break_names_scope_and_sizes() -> Result<()> {
    let options = Options {
        strict: true,
        ..Options::default()
    };
    let mut memory = compiler_with(&Device::Cpu, &options)?;
    let (small, large) = (input(64)?, input(160)?);
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
    memory.step(|| block(&small))?;
    Ok(())
}

#[test]
fn options_that_cannot_work_are_refused_in_words() {
    let refused = |options: Options| {
        let error = compiler_with(&Device::Cpu, &options).unwrap_err();
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
    let space = Options {
        address_space: Bytes::kib(64),
        ..Options::default()
    };
    assert!(refused(space).contains("option address_space"));
}
