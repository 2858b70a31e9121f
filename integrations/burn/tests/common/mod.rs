//! What the tests on both kinds of device share.

use burn::tensor::Tensor;
use memory_compiler::Stats;

/// A tensor's values, to be compared bit for bit.
pub fn bits<const D: usize>(x: &Tensor<D>) -> Vec<u32> {
    let values = x.to_data().try_to_vec::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// That the last step was replayed as a whole, with at least so many events.
pub fn assert_replayed(stats: &Stats, least: u64, what: &str) {
    let nothing = (
        stats.breaks_step,
        stats.recorded_step,
        stats.device_calls_step,
    );
    assert_eq!(nothing, (0, 0, 0), "{what}: {stats}");
    assert!(stats.replayed_step >= least, "{what}: {stats}");
}
