//! Layer 6: where a framework's allocations arrive.
//!
//! May import: `current`, `pager`, `units`.

pub mod host;
pub mod weights;
