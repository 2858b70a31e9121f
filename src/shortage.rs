//! Layer 0: memory that is not there: who has it, and what would help.
//!
//! Of a budget the parts add up: `held + other_compilers + weights + free = limit`. Of a device they do with
//! `elsewhere`, which is what the device says is used less all that this process owns through this library.
//! While other threads take and give memory, each number is true of a moment of its own.
//!
//! May import: `units`.

use std::fmt;

use crate::units::Bytes;

/// Why a buffer has no memory: the numbers of [`Error::OverBudget`](crate::Error::OverBudget) and
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shortage {
    /// Path of the innermost open scope; empty outside of steps.
    pub scope: String,
    /// Size of the allocation that failed, rounded up to 512 B.
    pub asked: Bytes,
    /// What it needs in new pages, beside idle ones that the compiler has.
    pub needed: Bytes,
    /// The budget, or all memory of the device.
    pub limit: Bytes,
    /// Bytes of it that nobody has.
    pub free: Bytes,
    /// Physical bytes that this compiler owns.
    pub held: Bytes,
    /// Bytes in live buffers of this compiler.
    pub live: Bytes,
    /// Physical bytes that other compilers own and need: in a step, under live buffers, or pinned.
    pub other_compilers: Bytes,
    /// Physical bytes of weights that may not leave for it: pinned ones, or another pager's.
    pub weights: Bytes,
    /// Bytes of the device that are used and none of this library's. Zero for a budget, which is nobody else's.
    pub elsewhere: Bytes,
    /// One thing that would have helped.
    pub remedy: Remedy,
}

/// Why weights that are used at once are not in memory: the numbers of
/// [`Error::WeightBudget`](crate::Error::WeightBudget).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightShortage {
    /// Bytes that must be in memory together, in whole pages.
    pub needed: Bytes,
    /// Bytes that they can have.
    pub limit: Bytes,
    /// The budget that weights and steps share, or all memory of the device where that is less.
    pub whole: Bytes,
    /// Bytes of it that nobody has.
    pub free: Bytes,
    /// Physical bytes that weights own.
    pub held: Bytes,
    /// Physical bytes that compilers own.
    pub compilers: Bytes,
    /// Bytes of the device that are used and none of this library's; zero where the budget is what is short.
    pub elsewhere: Bytes,
    /// One thing that would have helped.
    pub remedy: Remedy,
}

/// One thing that would have helped against a shortage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// A budget of so many bytes, which is the smallest that suffices.
    Budget(Bytes),
    /// So many bytes for weights ([`Pager::with_limit`](crate::pager::Pager::with_limit)).
    WeightLimit(Bytes),
    /// So many bytes freed by other owners of the device: other processes, other libraries of this one.
    FreeElsewhere(Bytes),
    /// So many bytes given up by other compilers, at the end of their steps and buffers, or by weights, which
    /// are pinned.
    FreeOthers(Bytes),
    /// A request of at most so many bytes.
    Smaller(Bytes),
    /// So many bytes of this compiler's live buffers, in whole pages, freed before.
    FreeLive(Bytes),
    /// Weights in groups of at most so many bytes.
    SmallerGroups(Bytes),
}

impl Default for Remedy {
    fn default() -> Self {
        Self::FreeLive(Bytes::ZERO)
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Budget(bytes) => write!(f, "a budget of {bytes:#} suffices"),
            Self::WeightLimit(bytes) => write!(f, "a limit of weights of {bytes:#} suffices"),
            Self::FreeElsewhere(bytes) => write!(
                f,
                "free {bytes:#} elsewhere: other processes or libraries use this device"
            ),
            Self::FreeOthers(bytes) => write!(
                f,
                "have other compilers or weights give up {bytes:#}: end their steps, free their buffers, unpin"
            ),
            Self::Smaller(bytes) => write!(f, "at most {bytes:#} at once fit"),
            Self::FreeLive(bytes) => write!(f, "free {bytes:#} of live buffers first"),
            Self::SmallerGroups(bytes) => {
                write!(f, "use them in scopes of at most {bytes:#} each")
            }
        }
    }
}

/// Of a budget: what is said after its name.
pub(crate) struct OfBudget<'s>(pub &'s Shortage);

impl fmt::Display for OfBudget<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage {
            scope,
            asked,
            needed,
            limit,
            free,
            held,
            live,
            other_compilers,
            weights,
            remedy,
            ..
        } = self.0;
        write!(
            f,
            "over the budget of {limit:#}{}: asked for {asked}, which needs {needed:#} of new pages; held {held}, \
             live {live}, other compilers {other_compilers:#}, weights {weights:#}, free {free} ({remedy})",
            within(scope)
        )
    }
}

/// Of a device.
pub(crate) struct OfDevice<'s>(pub &'s Shortage);

impl fmt::Display for OfDevice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage {
            scope,
            asked,
            needed,
            limit,
            free,
            held,
            live,
            other_compilers,
            weights,
            elsewhere,
            remedy,
        } = self.0;
        write!(
            f,
            "device out of memory{}: asked for {asked}, which needs {needed:#} of new pages; device {limit:#}, held \
             {held}, live {live}, other compilers {other_compilers:#}, weights {weights:#}, others {elsewhere:#}, \
             free {free} ({remedy})",
            within(scope)
        )
    }
}

impl fmt::Display for WeightShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            needed,
            limit,
            whole,
            free,
            held,
            compilers,
            elsewhere,
            remedy,
        } = self;
        write!(
            f,
            "weights that are used at once need {needed:#}, and {limit:#} is what they can have of {whole:#}: weights \
             hold {held:#}, compilers {compilers:#}, others {elsewhere:#}, free {free:#} ({remedy})"
        )
    }
}

pub(crate) fn within(scope: &str) -> String {
    match scope {
        "" => String::new(),
        scope => format!(" in {scope}"),
    }
}
