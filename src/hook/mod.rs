//! Layer 6: where a framework's allocations arrive.
//!
//! May import: `compiler`, `current`, `pager`, `units`.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
#[cfg(all(feature = "cuda", unix))]
pub mod uses;
pub mod weights;
