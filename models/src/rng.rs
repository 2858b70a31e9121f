//! Randomness that depends on a seed and on nothing else.
//!
//! Candle's CPU generator cannot be seeded, so noise and initial weights are drawn here.

use candle_core::{Device, Result, Shape, Tensor};
use rand::{SeedableRng, rngs::StdRng};
use rand_distr::{Distribution, StandardNormal};

/// A generator for `seed` and a path of numbers below it (a step and a shard, say): neighbouring
/// paths give unrelated streams.
pub fn seeded(seed: u64, path: &[u64]) -> StdRng {
    let mixed = path
        .iter()
        .fold(split_mix(seed), |state, &part| split_mix(state ^ part));
    StdRng::seed_from_u64(mixed)
}

/// Standard normal noise on the CPU.
pub fn normal(rng: &mut StdRng, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let values: Vec<f32> = StandardNormal
        .sample_iter(rng)
        .take(shape.elem_count())
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// One round of SplitMix64 (Steele, Lea, Flood 2014).
fn split_mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
