//! Layer 0: what a program may choose.
//!
//! May import: `units`, `error`.

use crate::error::Error;
use crate::units::Bytes;

/// The smallest threshold that a compiler may ask for: what is smaller never asks for a step.
pub const SMALLEST_THRESHOLD: Bytes = Bytes::kib(4);
/// The largest page that a device may have: larger ones would waste more than most buffers are.
pub(crate) const LARGEST_GRANULE: Bytes = Bytes::mib(32);

/// Checks that `granule` can be the page of a device or plan whose pages are at least `smallest`.
///
/// # Errors
/// [`Error::Option`], which says what can be.
pub fn check_granule(granule: Bytes, smallest: Bytes) -> Result<(), Error> {
    if granule.0.is_power_of_two() && (smallest..=LARGEST_GRANULE).contains(&granule) {
        return Ok(());
    }
    Err(Error::Option {
        option: "granule",
        reason: format!("{granule:#} is no power of two from {smallest} to {LARGEST_GRANULE}"),
    })
}

/// How a compiler works. `..Options::default()` for the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// A graph break is an error, from the second run of a step's name on.
    pub strict: bool,
    /// Most physical bytes that the compiler may own; `None` for what the device has.
    pub budget: Option<Bytes>,
    /// The smallest buffer that the CPU hook serves; at least
    /// [`SMALLEST_THRESHOLD`](crate::hook::host::SMALLEST_THRESHOLD). Smaller ones are many and cost
    /// little where they are.
    pub threshold: Bytes,
    /// Most edges of the step graph (about 370 bytes each with their state and tape). A program whose
    /// sizes never repeat would record for ever: beyond the limit the branches that ran longest ago
    /// are forgotten, until half of it is free. What was forgotten is recorded again when it comes.
    /// Names of steps and scopes that never repeat are forgotten beyond the same number.
    pub edge_limit: u32,
    /// Plan all buffers again after so many steps in a row in which nothing was recorded, as
    /// [`Compiler::compile`](crate::Compiler::compile) does; `None` for only when that is called.
    pub compile_after: Option<u32>,
    /// Addresses to reserve, half of them for buffers that outlive their step; 2 TiB at most, also
    /// when this is more. They cost no memory. Where the system refuses so many (`ulimit -v`, valgrind), half of them
    /// are reserved, or half again, but not less than 1 GiB.
    pub address_space: Bytes,
    /// What the hashes of states are keyed with; `None` for a random key, so that no program can be made to
    /// confuse two states. For runs that are to be the same, bit for bit of their books.
    pub hash_seed: Option<u64>,
}

impl Default for Options {
    /// Not strict, no budget, a threshold of 16 KiB, 200,000 edges, 256 GiB of addresses, a random key.
    fn default() -> Self {
        Self {
            strict: false,
            budget: None,
            threshold: Bytes::kib(16),
            edge_limit: 200_000,
            compile_after: None,
            address_space: Bytes::gib(256),
            hash_seed: None,
        }
    }
}
