//! Layer 6: where a framework's allocations arrive.
//!
//! May import: `compiler`, `current`, `pager`, `units`.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
pub mod weights;
