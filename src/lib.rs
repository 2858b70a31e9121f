#![doc = include_str!("../README.md")]

pub mod device;
pub mod hook;
pub mod lifespans;
pub mod pager;
pub mod planner;
pub mod report;
pub mod trace;
pub mod units;
pub mod validate;

mod accounts;
mod arena;
mod bits;
mod bookkeeping;
mod budget;
mod codes;
mod compiler;
mod current;
mod device_error;
mod engine;
mod error;
mod graph;
mod lending;
mod mix;
mod options;
mod pages;
mod path;
mod placer;
mod prefetch;
mod ranges;
mod scopes;
mod shortage;
mod stats;
mod watch;

pub use compiler::{
    Compiler, Pause, PinnedLayout, Scope, Snapshot, Step, pause, scope, strict_scope,
};
pub use current::{free, free_on};
pub use engine::Allocation;
pub use error::{BadFree, Error, Expected, Uncapturable};
pub use options::Options;
pub use shortage::{Remedy, Shortage, WeightShortage};
pub use stats::{BranchStats, Compiled, ScopeStats, Stats, StepReport};
pub use units::{ALIGNMENT, Address, Bytes};
pub use watch::{Refusal, ScopeWatch, catch_scopes, watch_scopes};
