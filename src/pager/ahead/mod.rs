//! Weights that are used group by group, in an order that repeats: the next group comes in while the work of
//! this one runs.
//!
//! ```text
//!   program    enter a   leave a   enter b   leave b   enter c   …
//!   work       | wait a |  work of a  | wait b |  work of b  | …
//!   copies     | a |  b (beside a)  |  c (after a, beside b)  | …
//! ```
//!
//! A group is what a scope, or a kernel, needs in memory at once. [`Ahead::enter`] makes it so for work that
//! is enqueued from then on, [`Ahead::leave`] says that no more is. Neither waits for the device: copies wait
//! on their stream for the last work that used the memory, and work waits on its stream for its copies.
//!
//! When the first group comes round again, the pages are arranged for the order that was seen: every group
//! keeps a share of its pages in memory, and the others share the frames of a ring ([`super::plan`],
//! [`super::range`]). From then on a step makes no call of the device but copies and fences. The third round is
//! timed ([`super::clock`]), and the pages are arranged once more where another plan is better. Another order, a
//! skipped group, memory that a step or another model took: all of that is served as it comes, and arranged
//! again when the order repeats.
//!
//! Groups that are used in turn, again and again within a few turns, are one from the second round on.
//!
//! Groups come in ahead one after the other, as far as frames are free: the next ones that are expected take no
//! frame of one that is expected before them. A page that a step took comes in behind those copies, when its group is
//! entered.
//!
//! Invariants:
//! - a page's contents are the weights' exactly when `filled` has its stamp;
//! - a copy into a frame that was taken over comes after the last mark of whoever held it;
//! - what is being copied is pinned until it has arrived or the copies have settled, unless whoever takes pages
//!   away waits for the copies anyhow.
//!
//! May import: layers 0 and 3; `bookkeeping`.

mod arrange;
mod expect;
mod merge;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use self::arrange::Arranged;
use super::books::Reached;
use super::carrier::Carrier;
use super::clock::{Clock, Round};
use super::{Part, WeightRange};
use crate::bookkeeping::Bookkeeping;
use crate::device::{Call, DeviceError, StreamId};
use crate::error::Error;
use crate::units::{Address, Bytes};

/// A group of weights, by its number and its [`Ahead`]'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group {
    number: u32,
    of: u64,
}

/// How many there were in this process.
static AHEADS: AtomicU64 = AtomicU64::new(0);

/// What looking ahead came to so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AheadStats {
    /// Bytes copied.
    pub copied: Bytes,
    /// Those of them that were asked for before their group was entered.
    pub copied_ahead: Bytes,
    /// Groups entered.
    pub entered: u64,
    /// How often the pages were arranged anew.
    pub arranged: u64,
    /// How long work waited for copies, where the carrier knows.
    pub waited: Duration,
}

#[derive(Debug, Default)]
struct Page {
    /// Its stamp when its bytes were asked for last.
    filled: u64,
    /// In which batch.
    batch: u64,
    /// The mark after the last work that used it.
    used: u64,
    /// How many of the groups that are expected have it.
    expected: u32,
}

#[derive(Debug, Default)]
struct Pages {
    /// Ascending.
    pages: Vec<u32>,
    entered: u32,
    /// Those that it was made with.
    own: Vec<u32>,
    /// The group that has its pages.
    part_of: Option<Group>,
}

/// A group that is expected.
#[derive(Debug)]
struct Expected {
    group: Group,
    /// Its pages that are pinned.
    pinned: Vec<u32>,
    /// Whether all of it is in memory, or will be when the copies are done.
    is_whole: bool,
}

/// See the module's page.
#[derive(Debug)]
pub struct Ahead {
    id: u64,
    range: WeightRange,
    carrier: Box<dyn Carrier>,
    groups: Vec<Pages>,
    pages: Vec<Page>,
    /// Entered now, each once.
    active: BTreeSet<Group>,
    /// The groups that are expected and come in, in order.
    next: VecDeque<Expected>,
    /// What followed a group, after which other one.
    follows: BTreeMap<(Option<Group>, Group), Group>,
    /// The two groups entered last.
    last: (Option<Group>, Option<Group>),
    /// Groups in the order in which they were entered since the first one came round.
    round: Vec<Group>,
    in_round: BTreeSet<Group>,
    /// The same, each as often as it was entered.
    turns: Vec<Group>,
    /// Whether groups that were merged did not fit.
    is_parted: bool,
    first: Option<Group>,
    /// Groups entered since the first one was.
    since_first: usize,
    arranged: Option<Arranged>,
    /// How often another order came than the pages were arranged for.
    orders: u32,
    /// While times are taken.
    clock: Option<Clock>,
    /// What a round took when times were taken last.
    timed: Option<Round>,
    /// Whether frames are shared, so that copies have to wait for work.
    is_streaming: bool,
    /// Whether a copy was given up after its frame was taken over: the next ones wait for all work.
    is_unordered: bool,
    mark: u64,
    batch: u64,
    arrived: u64,
    stats: AheadStats,
}

impl Ahead {
    /// Has `carrier` fill `range`, of which nobody else may pin parts.
    #[must_use]
    pub fn new(range: WeightRange, carrier: Box<dyn Carrier>) -> Self {
        let page_count = range.0.page_count as usize;
        Self {
            id: AHEADS.fetch_add(1, Ordering::Relaxed),
            range,
            carrier,
            groups: Vec::new(),
            pages: (0..page_count).map(|_| Page::default()).collect(),
            active: BTreeSet::new(),
            next: VecDeque::new(),
            follows: BTreeMap::new(),
            last: (None, None),
            round: Vec::new(),
            in_round: BTreeSet::new(),
            turns: Vec::new(),
            is_parted: false,
            first: None,
            since_first: 0,
            arranged: None,
            orders: 0,
            clock: None,
            timed: None,
            is_streaming: false,
            is_unordered: false,
            mark: 0,
            batch: 0,
            arrived: 0,
            stats: AheadStats::default(),
        }
    }

    /// The range.
    #[must_use]
    pub fn range(&self) -> &WeightRange {
        &self.range
    }

    /// The numbers of now.
    pub fn stats(&mut self) -> AheadStats {
        AheadStats {
            waited: self.carrier.waited(),
            ..self.stats
        }
    }

    /// Names bytes that are used together: offsets in the range, and sizes.
    ///
    /// # Errors
    /// [`Error::Option`] for bytes outside the range.
    pub fn group(
        &mut self,
        parts: impl IntoIterator<Item = (Bytes, Bytes)>,
    ) -> Result<Group, Error> {
        let _bookkeeping = Bookkeeping::begin();
        let mut pages = BTreeSet::new();
        for (offset, size) in parts {
            pages.extend(self.range.pages(offset, size)?);
        }
        let pages: Vec<u32> = pages.into_iter().collect();
        self.groups.push(Pages {
            own: pages.clone(),
            pages,
            ..Pages::default()
        });
        let number = self.groups.len() as u32 - 1;
        Ok(Group {
            number,
            of: self.id,
        })
    }

    /// Says that work is enqueued on `stream` from now on, or on this thread where a stream's handle means another one
    /// on each: it comes behind all work and copies so far, and waits for copies there. To be called whenever the
    /// stream is another one than before, also one whose handle has come back after it was destroyed; costs a wait for
    /// the device.
    ///
    /// # Errors
    /// [`Error::Device`] when the device cannot be waited for, or a copy failed: then nothing may be enqueued there.
    pub fn work_on(&mut self, stream: StreamId) -> Result<(), Error> {
        let _bookkeeping = Bookkeeping::begin();
        self.wait(|carrier| carrier.work_on(stream))
            .map_err(refused(Call::Synchronise))
    }

    fn pages_of(&self, group: Group) -> &[u32] {
        &self.groups[group.number as usize].pages
    }

    /// Makes a group's bytes be in memory for work that is enqueued from now on, until it was left as often.
    ///
    /// # Errors
    /// [`Error::WeightBudget`] when there is not enough memory for it beside the groups that are entered,
    /// whatever else goes; [`Error::Device`] when the device refuses, or a copy that was made ahead failed, of whichever
    /// group; [`Error::Option`] for a group of another `Ahead`; [`Error::Forked`] in a forked child. Then it is not
    /// entered.
    pub fn enter(&mut self, group: Group) -> Result<(), Error> {
        let _bookkeeping = Bookkeeping::begin();
        self.range.0.pager.check_process()?;
        if group.of != self.id {
            return Err(Error::Option {
                option: "group",
                reason: "it is one of another `Ahead`".into(),
            });
        }
        let entered = match self.enter_whole(group) {
            // Its parts may fit.
            Err(Error::WeightBudget { .. }) if self.part()? => self.enter_whole(group),
            result => result,
        };
        match entered {
            Err(Error::WeightBudget(short)) if self.range.borrow(&short) => self.enter_whole(group),
            result => result,
        }
    }

    fn enter_whole(&mut self, group: Group) -> Result<(), Error> {
        let mut group = self.whole(group);
        if self.active.contains(&group) {
            self.groups[group.number as usize].entered += 1;
            return Ok(());
        }
        // What lies inside of an outer group is no turn of its own, nor is what was left last and comes again.
        let is_turn = !self.is_inside(group) && self.last.1 != Some(group);
        if is_turn {
            self.forget_unless(group)?;
            if self.active.is_empty() {
                self.arrange_if_due(group)?;
                group = self.whole(group);
            }
        }
        if let (true, Some(clock)) = (is_turn, &mut self.clock) {
            clock.stop(&mut *self.carrier);
        }
        self.bring(group)?;
        if let (true, Some(clock)) = (is_turn, &mut self.clock) {
            clock.start(group, &mut *self.carrier);
            if clock.is_full() {
                self.stop_clock();
            }
        }
        self.groups[group.number as usize].entered = 1;
        self.active.insert(group);
        self.stats.entered += 1;
        if is_turn {
            self.let_go_first();
            self.learn(group);
            self.look_ahead();
        }
        Ok(())
    }

    /// Says that work which is enqueued from now on does not use the group, as often as it was entered. Nothing happens
    /// for one that is not entered.
    pub fn leave(&mut self, group: Group) {
        let _bookkeeping = Bookkeeping::begin();
        if group.of != self.id || self.range.is_inherited() {
            return;
        }
        let group = self.whole(group);
        let books = &mut self.groups[group.number as usize];
        books.entered = books.entered.saturating_sub(1);
        if books.entered > 0 || !self.active.remove(&group) {
            return;
        }
        if self.is_streaming {
            self.mark += 1;
            if let Err(error) = self.carrier.mark(self.mark) {
                tracing::warn!(%error, "no fence behind work on weights");
                self.is_unordered = true;
            }
        }
        let Self {
            range,
            groups,
            pages,
            mark,
            ..
        } = self;
        let left = &groups[group.number as usize].pages;
        left.iter()
            .for_each(|&page| pages[page as usize].used = *mark);
        let mut locked = range.0.pager.lock();
        locked.books.unpin_all(range.0.id, left.iter().copied());
    }

    fn is_inside(&self, group: Group) -> bool {
        let is_held = |page: &u32| {
            self.active
                .iter()
                .any(|&outer| self.pages_of(outer).binary_search(page).is_ok())
        };
        !self.active.is_empty() && self.pages_of(group).iter().all(is_held)
    }

    fn stop_clock(&mut self) {
        if let Some(clock) = self.clock.take() {
            drop(clock.end(&mut *self.carrier));
        }
    }

    /// Waits for copies, or has work wait for them. Of one that failed it is told once, and not which it was: all
    /// that has not arrived is to be copied again.
    fn wait(
        &mut self,
        wait: impl FnOnce(&mut (dyn Carrier + 'static)) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let waited = wait(&mut *self.carrier);
        if waited.is_err() {
            let arrived = self.arrived;
            let lost = self.pages.iter_mut().filter(|page| page.batch > arrived);
            lost.for_each(|page| page.filled = 0);
        }
        waited
    }

    /// Waits until nothing is being copied.
    fn settle(&mut self) -> Result<(), Error> {
        self.wait(Carrier::settle)
            .map_err(refused(Call::Synchronise))
    }

    /// Pins and fills a group, and has work wait for its copies.
    fn bring(&mut self, group: Group) -> Result<(), Error> {
        let id = self.range.0.id;
        let pages = &self.groups[group.number as usize].pages;
        let entered = {
            let mut locked = self.range.0.pager.lock();
            if !locked.books.is_first(id) {
                locked.books.prioritise(id);
            }
            locked.books.enter(id, pages)
        };
        let reached = match entered {
            Ok(Some(reached)) => reached,
            Ok(None) => {
                self.is_unordered = true;
                return Err(Error::WeightBudget(Box::new(self.range.too_much(pages))));
            }
            Err(refused) => {
                self.is_unordered = true;
                return Err(super::failed(refused));
            }
        };
        let filled = self.fill(&reached).and_then(|_| {
            let batches = reached
                .stamps
                .iter()
                .map(|&(page, _)| &self.pages[page as usize]);
            let batch = batches.map(|page| page.batch).max().unwrap_or(0);
            if batch > self.arrived {
                self.wait(|carrier| carrier.arrive(batch))?;
                self.arrived = batch;
            }
            Ok(())
        });
        filled.map_err(|source| {
            self.is_unordered = true;
            let mut locked = self.range.0.pager.lock();
            let pinned = reached.stamps.iter().map(|&(page, _)| page);
            locked.books.unpin_all(id, pinned);
            refused(Call::Write)(source)
        })
    }

    /// Asks for the bytes of the pages that do not have theirs; returns how many bytes.
    fn fill(&mut self, reached: &Reached) -> Result<Bytes, DeviceError> {
        let is_stale = |&&(page, stamp): &&(u32, u64)| self.pages[page as usize].filled != stamp;
        let stale: Vec<(u32, u64)> = reached.stamps.iter().filter(is_stale).copied().collect();
        if stale.is_empty() && reached.taken.is_empty() {
            return Ok(Bytes::ZERO);
        }
        if self.is_unordered {
            self.mark += 1;
            self.carrier.after(self.mark)?;
            self.is_unordered = false;
        } else {
            let used = reached
                .taken
                .iter()
                .map(|&page| self.pages[page as usize].used);
            if let Some(mark) = used.max().filter(|&mark| mark > 0) {
                self.carrier.after(mark)?;
            }
        }
        let granule = self.range.granule().0;
        let mut copied = Bytes::ZERO;
        for run in stale.chunk_by(|a, b| a.0 + 1 == b.0) {
            let offset = Bytes(u64::from(run[0].0) * granule);
            let size = Bytes(run.len() as u64 * granule);
            let address = Address(self.range.base().0 + offset.0);
            self.carrier.copy(Part {
                offset,
                address,
                size,
            })?;
            copied.0 += size.0;
        }
        self.batch += 1;
        self.carrier.close(self.batch)?;
        for (page, stamp) in stale {
            let page = &mut self.pages[page as usize];
            (page.filled, page.batch) = (stamp, self.batch);
        }
        self.stats.copied.0 += copied.0;
        Ok(copied)
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        let _bookkeeping = Bookkeeping::begin();
        if self.range.is_inherited() {
            return;
        }
        // Nothing may be copied into pages that are given back.
        if let Err(error) = self.settle() {
            tracing::warn!(%error, "copies of weights were not waited for");
        }
        self.let_go_all();
        self.stop_clock();
        for group in std::mem::take(&mut self.active) {
            let pages = self.groups[group.number as usize].pages.iter().copied();
            let mut locked = self.range.0.pager.lock();
            locked.books.unpin_all(self.range.0.id, pages);
        }
    }
}

fn refused(call: Call) -> impl Fn(DeviceError) -> Error {
    move |source| Error::Device { call, source }
}
