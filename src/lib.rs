//! Records the allocations of a repeated inference step once and replays them.

pub mod device;
pub mod units;

/// A place holder until the compiler exists.
pub fn scope(_name: &str) -> ScopeGuard {
    ScopeGuard
}

/// A place holder until the compiler exists.
#[derive(Debug)]
pub struct ScopeGuard;
