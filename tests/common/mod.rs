//! What several test binaries share. Each uses a part of it.

#![allow(dead_code, reason = "no test binary uses all of it")]

pub mod contract;

use memory_compiler::device::{Call, DeviceError};
use memory_compiler::units::{Address, Bytes};

/// The place `count` granules behind `base`.
pub fn nth(base: Address, granule: Bytes, count: u64) -> Address {
    base.checked_add(times(granule, count))
        .expect("an address of the test")
}

/// `count` granules.
pub fn times(granule: Bytes, count: u64) -> Bytes {
    Bytes(granule.0 * count)
}

/// Asserts that `result` is an `Invalid` of `call`.
#[track_caller]
pub fn assert_invalid<T: std::fmt::Debug>(call: Call, result: Result<T, DeviceError>) {
    match result {
        Err(DeviceError::Invalid { call: named, .. }) if named == call => {}
        other => panic!("{call:?} is refused as invalid, not {other:?}"),
    }
}

/// Mappings of this process that touch `base .. base + size`, as (rights, path), by `/proc/self/maps`
/// (proc_pid_maps(5)).
#[cfg(target_os = "linux")]
pub fn kernel_mappings(base: Address, size: Bytes) -> Vec<(String, String)> {
    let text = std::fs::read_to_string("/proc/self/maps").expect("/proc is mounted");
    let mut mappings = Vec::new();
    for line in text.lines() {
        let mut fields = line.split_whitespace();
        let (start, end) = fields
            .next()
            .and_then(|range| range.split_once('-'))
            .expect("a range");
        let number = |hex| u64::from_str_radix(hex, 16).expect("a hexadecimal address");
        if number(start) < base.0 + size.0 && base.0 < number(end) {
            let rights = fields.next().expect("rights").to_owned();
            mappings.push((rights, fields.nth(3).unwrap_or_default().to_owned()));
        }
    }
    mappings
}
