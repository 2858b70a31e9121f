//! When the pages of weights are arranged, and for what: the order of use, the memory that there is, and times.
//!
//! ```text
//!   round   1 order seen │ 2 arranged for it │ 3 timed │ 4 arranged for the times, if another plan is better
//! ```
//!
//! May import: what `ahead` may, and `plan`.

use std::collections::BTreeSet;

use super::{Ahead, Group};
use crate::error::Error;
use crate::pager::clock::Clock;
use crate::pager::failed;
use crate::pager::plan::plan;

/// What the pages were arranged for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Arranged {
    order: Vec<Group>,
    frames: u64,
    rings: Vec<Vec<u32>>,
    /// Whether it was made for times that were taken, or none can be.
    is_timed: bool,
    /// How often they were arranged again for the same, because a page had to leave its ring.
    repeats: u32,
}

/// How often pages are arranged again for an order that does not fit their use: groups that are in use
/// together and were not one after the other.
const REPEATS: u32 = 2;

/// For how many orders pages are arranged one after the other; the next ones are added to each other. Where a model's
/// first group comes again within a round, rounds seem shorter than they are, and each has another order.
const ORDERS: u32 = 4;

impl Ahead {
    /// When the first group comes round, arranges the pages for the order of use, unless they are already.
    pub(super) fn arrange_if_due(&mut self, group: Group) -> Result<(), Error> {
        if self.first != Some(group) || self.round.is_empty() {
            return Ok(());
        }
        let (frames, is_disturbed) = {
            let mut locked = self.range.0.pager.lock();
            let id = self.range.0.id;
            (locked.books.capacity(id), locked.books.is_disturbed(id))
        };
        let mut order = std::mem::take(&mut self.round);
        let mut repeats = 0;
        if let Some(arranged) = &mut self.arranged {
            let known: BTreeSet<Group> = arranged.order.iter().copied().collect();
            let is_known = order.iter().all(|group| known.contains(group));
            // A little more memory is not worth it.
            let is_enough =
                frames >= arranged.frames && frames - arranged.frames <= 1 + arranged.frames / 16;
            if is_known && is_enough {
                if is_disturbed && arranged.repeats < REPEATS {
                    repeats = arranged.repeats + 1;
                } else if arranged.is_timed {
                    return Ok(());
                } else if let Some(clock) = self.clock.take() {
                    self.timed = clock.end(&mut *self.carrier);
                    // Once, whatever was found.
                    arranged.is_timed = true;
                    repeats = arranged.repeats;
                } else {
                    self.clock = Some(Clock::begin(&mut *self.carrier));
                    return Ok(());
                }
            }
            if is_known {
                // Those that were skipped in this round come again.
                order.clone_from(&arranged.order);
            } else {
                self.orders += 1;
                if self.orders > ORDERS {
                    let seen: BTreeSet<Group> = order.iter().copied().collect();
                    let others = arranged.order.iter().filter(|group| !seen.contains(group));
                    order.extend(others);
                }
            }
        }
        self.stop_clock();
        if self.merge(frames)? {
            let mut seen = BTreeSet::new();
            order = order.into_iter().map(|group| self.whole(group)).collect();
            order.retain(|&group| seen.insert(group));
        }
        let pages: Vec<Vec<u32>> = order
            .iter()
            .map(|&group| self.pages_of(group).to_vec())
            .collect();
        let granule = self.range.granule();
        let times = self.timed.as_ref();
        let times = times.and_then(|timed| timed.times(&order, granule));
        let frame_count = usize::try_from(frames).unwrap_or(usize::MAX);
        // What cannot be arranged is served as it comes.
        let rings = plan(&pages, frame_count, times.as_ref()).unwrap_or_default();
        let is_new = is_disturbed
            || self
                .arranged
                .as_ref()
                .is_none_or(|arranged| arranged.rings != rings);
        // Where nothing streams, and where no times are taken, there is nothing to find out.
        let is_timed = times.is_some()
            || rings.is_empty()
            || self
                .arranged
                .as_ref()
                .is_some_and(|arranged| arranged.is_timed && arranged.order == order);
        self.arranged = Some(Arranged {
            order,
            frames,
            rings: rings.clone(),
            is_timed,
            repeats,
        });
        if !is_new || (rings.is_empty() && !self.is_streaming) {
            return Ok(());
        }
        tracing::debug!(
            groups = pages.len(),
            frames,
            ring = rings.len(),
            streamed = rings.iter().map(Vec::len).sum::<usize>(),
            is_timed,
            "weights are arranged"
        );
        let installed = self.install(rings);
        if !matches!(installed, Ok(true)) {
            // What is not there is tried again in the next round.
            self.arranged = None;
        }
        installed.map(|_| ())
    }

    /// Has the pages share frames; whether they do.
    fn install(&mut self, rings: Vec<Vec<u32>>) -> Result<bool, Error> {
        // Work waits for no copy that is not done, and nothing is being copied when pages go.
        self.settle()?;
        self.let_go_all();
        let is_streaming = !rings.is_empty();
        let mut locked = self.range.0.pager.lock();
        let arranged = locked.books.arrange(self.range.0.id, rings);
        drop(locked);
        let is_arranged = arranged.map_err(failed)?;
        if is_arranged {
            self.is_streaming = is_streaming;
            self.stats.arranged += 1;
        }
        Ok(is_arranged)
    }
}
