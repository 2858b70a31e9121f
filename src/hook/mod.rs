//! Layer 6: where a framework's allocations arrive.
//!
//! May import: `current`, `units`.

pub mod host;
