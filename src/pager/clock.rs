//! How long the work of each group takes, and a copy: what the arrangement of pages is made for.
//!
//! ```text
//!   enter   | wait for copies |  work of a  | wait |  work of b  | …
//!                             ^ after       ^ before of the next
//! ```
//!
//! Times are taken in one round and asked for at its end, which waits for the device once.
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

/// The longest work that is distinguished, in nanoseconds: an hour.
const LONGEST: u64 = 3600 * 1_000_000_000;

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

    /// The work of the last group is over here.
    pub fn stop(&mut self, carrier: &mut dyn Carrier) {
        if let Some((last, from)) = self.open.take()
            && let Some(to) = carrier.moment()
        {
            self.laps.push((last, from, to));
        }
    }

    /// Whether it has taken the times of more groups than a round has.
    pub fn is_full(&self) -> bool {
        self.laps.len() >= GROUPS
    }

    /// The work of `group` begins here.
    pub fn start(&mut self, group: Group, carrier: &mut dyn Carrier) {
        self.open = carrier.moment().map(|from| (group, from));
    }

    /// Ends the round, with the work of its last group; `None` where no times are known. Every moment is asked for,
    /// since a device keeps those that were not.
    pub fn end(mut self, carrier: &mut dyn Carrier) -> Option<Round> {
        self.stop(carrier);
        let copying = carrier.copying();
        carrier.take_times(false);
        let mut work: BTreeMap<Group, Option<Duration>> = BTreeMap::new();
        for (group, from, to) in self.laps {
            let sum = work.entry(group).or_insert(Some(Duration::ZERO));
            let lap = carrier.elapsed(from, to);
            *sum = sum.zip(lap).map(|(sum, lap)| sum + lap);
        }
        let known = |(group, took): (Group, Option<Duration>)| Some((group, took?));
        let work: BTreeMap<Group, Duration> = work.into_iter().map(known).collect::<Option<_>>()?;
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
            // Sums of them are formed.
            Some(u64::try_from(took.as_nanos()).map_or(LONGEST, |took| took.min(LONGEST)))
        });
        Some(plan::Times {
            work: work.collect::<Option<_>>()?,
            page: (self.copy * granule.0 as f64).ceil() as u64,
        })
    }
}
