//! How long the work of each group takes, and a copy: what the arrangement of pages is made for.
//!
//! ```text
//!   enter   | wait for copies |  work of a  | wait |  work of b  | …
//!                             ^ after       ^ before of the next
//! ```
//!
//! Times are taken in one round and asked for at its end, when the device is waited for anyhow.
//!
//! May import: layers 0 and 3.

use std::collections::BTreeMap;
use std::time::Duration;

use super::carrier::Carrier;
use super::{Group, plan};
use crate::device::Moment;
use crate::units::Bytes;

/// The most groups of a round whose times are taken.
const GROUPS: usize = 1 << 14;

/// Times of a round that is under way.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// The group that works, since when.
    open: Option<(Group, Moment)>,
    laps: Vec<(Group, Moment, Moment)>,
}

/// What a round took.
#[derive(Clone, Debug)]
pub(super) struct Round {
    work: BTreeMap<Group, Duration>,
    /// Nanoseconds for a byte.
    copy: f64,
}

impl Clock {
    /// Begins to take the times of a round.
    pub fn begin(carrier: &mut dyn Carrier) -> Self {
        carrier.take_times(true);
        Self::default()
    }

    /// The work of the last group was over at `before`; that of `group` begins at `after`.
    pub fn lap(&mut self, group: Group, before: Option<Moment>, after: Option<Moment>) {
        if let (Some((last, from)), Some(to)) = (self.open.take(), before)
            && self.laps.len() < GROUPS
        {
            self.laps.push((last, from, to));
        }
        self.open = after.map(|after| (group, after));
    }

    /// Ends the round, with the work of its last group; `None` where no times are known.
    pub fn end(mut self, carrier: &mut dyn Carrier) -> Option<Round> {
        if let (Some((last, from)), Some(to)) = (self.open.take(), carrier.moment()) {
            self.laps.push((last, from, to));
        }
        let copying = carrier.copying();
        carrier.take_times(false);
        let mut work: BTreeMap<Group, Duration> = BTreeMap::new();
        for (group, from, to) in self.laps {
            *work.entry(group).or_default() += carrier.elapsed(from, to)?;
        }
        let (copied, took) = copying?;
        let copy = took.as_nanos() as f64 / copied.0 as f64;
        (!work.is_empty()).then_some(Round { work, copy })
    }
}

impl Round {
    /// The times of these groups; `None` if one was not in the round.
    pub fn times(&self, order: &[Group], granule: Bytes) -> Option<plan::Times> {
        let work = order.iter().map(|group| {
            let took = self.work.get(group)?;
            Some(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX))
        });
        Some(plan::Times {
            work: work.collect::<Option<_>>()?,
            page: (self.copy * granule.0 as f64).ceil() as u64,
        })
    }
}
