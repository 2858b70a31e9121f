//! The life of a step: begin, end, abort; survivors; trim; numbers.
//!
//! May import: what `engine` may.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::shared::Home;
use super::{Active, Counts, Engine};
use crate::accounts::Account;
use crate::device::{Call, StreamId};
use crate::error::Error;
use crate::graph::Kind;
use crate::graph::tape::{SURVIVOR, Tapes};
use crate::path;
use crate::placer::{NO_FRAME, Space};
use crate::stats::{BranchStats, Stats, StepReport};
use crate::units::{ALIGNMENT, Address, Bytes};

/// How long a compile between two steps may plan.
pub(crate) const COMPILE_TIME: Duration = Duration::from_millis(200);
/// Recorded allocations between two attempts to win addresses back.
const RECLAIM_EVERY: u64 = 1_000;

/// Steps of the process so far.
static SERIAL: AtomicU64 = AtomicU64::new(1);

impl Engine {
    /// Begins a step; none is active. A refusal changes nothing.
    pub fn begin(&mut self, name: &str) -> Result<(), Error> {
        debug_assert!(self.active.is_none());
        self.move_home()?;
        self.drain();
        self.end_young();
        self.settle_survivors(true);
        self.forget_oldest();
        self.give_windows_up();
        self.reclaim_when_crowded();
        self.compile_when_quiet();
        self.serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = self.scopes.root(name);
        self.step = Counts::default();
        self.totals.steps += 1;
        self.recording = None;
        let is_apart = self.is_pinned();
        if is_apart {
            // Each allocation is asked for what it is.
            self.tapes.begin(None);
        } else {
            self.check_tapes(name);
            let branch = self.tapes.last_of(name);
            self.tapes.begin(
                branch.filter(|&branch| self.tapes.branches[branch as usize].epoch == self.epoch),
            );
        }
        self.recent_peak = self.live;
        self.scopes.enter_root(name, self.live);
        self.active = Some(Active {
            name,
            graded: self.finished.contains(&name),
            is_apart,
            began: Instant::now(),
            calls_before: self.arena.calls(),
            error: None,
        });
        Ok(())
    }

    /// What was made in the survivors' space in the last step is of an earlier one now.
    pub(super) fn end_young(&mut self) {
        for number in self.young.drain(..) {
            let kind = &mut self.graph.placements[number as usize].kind;
            if *kind == Kind::Young {
                *kind = Kind::Survivor;
            }
        }
        (self.young_count, self.young_len) = (0, 0);
    }

    /// Takes windows away that nothing uses, before new ones use the addresses up.
    fn reclaim_when_crowded(&mut self) {
        if self.is_pinned() {
            return;
        }
        if self.arena.placer.is_crowded(Space::Survivors) {
            self.sync_placer();
            self.sweep_survivors();
        }
        // Where it does not help, as beside a buffer that never goes, it is not tried at every step.
        let is_soon = self.totals.recorded < self.reclaim_at;
        if is_soon || !self.arena.placer.is_crowded(Space::Step) {
            return;
        }
        self.reclaim_at = self.totals.recorded + RECLAIM_EVERY;
        match self.reclaim_addresses(COMPILE_TIME) {
            Ok(compiled) => tracing::debug!(?compiled, "addresses were running out"),
            Err(error) => tracing::warn!(%error, "addresses are running out"),
        }
        self.arena.placer.look_again_later(Space::Step);
    }

    /// Compiles after as many steps without a recording as the option says, once.
    fn compile_when_quiet(&mut self) {
        if self.compile_after == Some(self.quiet_steps) && !self.is_pinned() {
            self.quiet_steps += 1;
            if let Err(error) = self.compile(COMPILE_TIME) {
                tracing::warn!(%error, "the recorded layout stays");
            }
        }
    }

    /// Buffers of the last step that are still live leave the state and stay where they are. If `learn`,
    /// their positions are served from the survivors' space from now on.
    pub(super) fn settle_survivors(&mut self, learn: bool) {
        if self.own_count == 0 {
            debug_assert_eq!(self.hash, 0);
            return;
        }
        self.fold_peak();
        let live: Vec<_> = self
            .tapes
            .run()
            .filter(|entry| entry.edge != SURVIVOR && self.table.holds(entry.slot, entry.placement))
            .map(|entry| (entry.placement, (entry.counter, entry.nth)))
            .collect();
        let mut found = false;
        // The last allocation at a placement is the one that is live.
        for (number, position) in live.into_iter().rev() {
            let placement = &mut self.graph.placements[number as usize];
            if placement.kind != Kind::Own {
                continue;
            }
            placement.kind = Kind::Obstacle;
            self.hash ^= placement.mix;
            self.own_count -= 1;
            self.outside += u64::from(placement.place.len);
            self.outside_count += 1;
            self.obstacles += 1;
            if learn && !self.last_aborted && self.survivors.insert(position) {
                // The next run of that name goes another way, and records it.
                let name = self.scopes.add_survivor(position);
                self.finished.remove(&name);
                found = true;
            }
        }
        debug_assert_eq!(
            (self.hash, self.own_count),
            (0, 0),
            "every live buffer was made in the last step"
        );
        self.epoch += 1;
        self.fold_peak();
        if found {
            for entry in self
                .tapes
                .branches
                .iter_mut()
                .flat_map(|branch| &mut branch.tape)
            {
                if self.survivors.contains(&(entry.counter, entry.nth)) {
                    entry.edge = SURVIVOR;
                }
            }
        }
    }

    /// Finds out which tapes of a name may be followed, where something has changed since.
    fn check_tapes(&mut self, name: u32) {
        let outdated = |engine: &Self, at: usize| {
            let branch = &engine.tapes.branches[at];
            branch.name == name && branch.epoch != engine.epoch
        };
        if !(0..self.tapes.branches.len()).any(|at| outdated(self, at)) {
            return;
        }
        // Nothing of the state is live: what is in the way now are obstacles.
        self.sync_placer();
        for at in 0..self.tapes.branches.len() {
            if outdated(self, at) && self.tape_is_safe(at) {
                self.tapes.branches[at].epoch = self.epoch;
            }
        }
    }

    fn tape_is_safe(&self, branch: usize) -> bool {
        let all_free = self.obstacles == 0 && !self.arena.is_trimmed();
        self.tapes.branches[branch].tape.iter().all(|entry| {
            if entry.edge == SURVIVOR {
                return true;
            }
            let place = self.graph.placements[entry.placement as usize].place;
            !self.graph.edges[entry.edge as usize].dead
                && (all_free || self.arena.placer.is_free(place) && self.arena.is_complete(place))
        })
    }

    /// Ends the active step.
    pub fn end(&mut self) -> Result<StepReport, Error> {
        self.drain();
        let active = self.active.take().ok_or(Error::NoStep)?;
        self.resume_all();
        if self.scopes.depth() > 1 {
            self.totals.bad_scopes += self.scopes.depth() as u64 - 1;
        }
        self.fold_peak();
        let captured = match active.error {
            None => self.end_captured(),
            Some(_) => {
                self.give_up_captured();
                Ok(())
            }
        };
        self.close_scopes();
        self.step.calls = self.arena.calls() - active.calls_before;
        let report = self.report();
        self.totals.replayed += report.replayed;
        if active.is_apart || active.error.is_some() {
            // Some of its buffers lie elsewhere: nothing to learn from.
            self.tapes.leave();
            self.last_aborted = true;
            return active.error.map_or(captured.map(|()| report), Err);
        }
        self.last_aborted = false;
        self.quiet_steps = match self.step.recorded {
            0 => self.quiet_steps.saturating_add(1),
            _ => 0,
        };
        self.finished.insert(active.name);
        #[cfg(debug_assertions)]
        self.validate();
        let safe = self.obstacles == 0 && !self.arena.is_trimmed() && self.step.recorded == 0;
        let (at, replayed) = self.tapes.end(active.name, self.serial);
        let epoch = self.epoch;
        let branch = &mut self.tapes.branches[at as usize];
        if !replayed {
            // Recorded tapes are checked when they are first used.
            branch.epoch = if safe { epoch } else { 0 };
            for (index, entry) in branch.tape.iter().enumerate() {
                if entry.edge != SURVIVOR {
                    self.graph.edges[entry.edge as usize].hint = (at, index as u32);
                }
            }
        }
        branch.last_run = self.serial;
        branch.events = self.step.events;
        branch.runs += 1;
        branch.replays += u64::from(replayed);
        branch.breaks += self.step.breaks;
        branch.last_breaks = self.step.breaks;
        branch.device_calls += self.step.calls;
        branch.last_device_calls = self.step.calls;
        branch.peak = self.step.peak;
        branch.time += active.began.elapsed();
        Ok(report)
    }

    /// Has the independent validator look at what is live, where that is little.
    #[cfg(debug_assertions)]
    fn validate(&self) {
        let (base, granule) = (self.shared.base, self.arena.granule());
        let frame_at = |page: Address| {
            let number = (page.0 - base.0) / granule.0;
            Some(self.arena.placer.frame_of(number as u32)).filter(|&frame| frame != NO_FRAME)
        };
        if self.step.recorded > 0 && self.live * ALIGNMENT.0 < 256 * granule.0 {
            crate::validate::disjoint(&self.live(), granule, frame_at)
                .unwrap_or_else(|fault| panic!("{fault}"));
        }
    }

    /// Ends the active step without learning from it. Live buffers stay valid.
    pub fn abort(&mut self) {
        self.drain();
        let Some(active) = self.active.take() else {
            return;
        };
        self.resume_all();
        self.fold_peak();
        self.close_scopes();
        // Whoever gives a step up gives up what was captured of it.
        self.give_up_captured();
        self.tapes.leave();
        self.step.calls = self.arena.calls() - active.calls_before;
        self.totals.replayed += self.report().replayed;
        self.last_aborted = true;
        self.totals.aborts += 1;
    }

    fn close_scopes(&mut self) {
        self.step.peak = self.scopes.step_peak();
        while self.scopes.depth() > 0 {
            self.scopes.leave();
        }
    }

    /// What the step did so far, or the last one.
    pub fn report(&self) -> StepReport {
        StepReport {
            events: self.step.events,
            replayed: self.step.allocs - self.step.recorded - self.step.survivors,
            recorded: self.step.recorded,
            survivors: self.step.survivors,
            breaks: self.step.breaks,
            device_calls: self.calls_in_step(),
            peak: Bytes(self.step.peak * ALIGNMENT.0),
        }
    }

    fn calls_in_step(&self) -> u64 {
        self.active.as_ref().map_or(self.step.calls, |active| {
            self.arena.calls() - active.calls_before
        })
    }

    /// Whether a step is active.
    pub fn is_active(&self) -> bool {
        self.active.is_some()
    }

    /// Opens a scope; returns the number of its run.
    pub fn enter(&mut self, name: &str, strict: bool) -> u64 {
        self.fold_peak();
        self.count_replayed();
        self.scopes.enter(name, self.live, strict)
    }

    /// Counts what was served from the tape in the scopes, as recording would have.
    pub(super) fn count_replayed(&mut self) {
        let Tapes {
            tape,
            cursor,
            counted,
            ..
        } = &mut self.tapes;
        for entry in tape.get(*counted..*cursor).unwrap_or_default() {
            self.scopes.count_only((entry.counter, entry.nth));
        }
        *counted = *cursor;
    }

    /// Closes a run of a scope, and those in it that were left open; none when it was closed with one
    /// around it.
    pub fn leave(&mut self, run: u64) {
        self.count_replayed();
        let above = self.scopes.opened_since(run);
        if above != Some(0) {
            self.totals.bad_scopes += 1;
        }
        for _ in 0..above.map_or(0, |above| above + 1) {
            self.fold_peak();
            self.scopes.leave();
        }
    }

    /// Passes allocations through until as many `resume` have come.
    pub fn pause(&mut self) {
        if self.paused == 0 {
            self.count_replayed();
            self.paused_cursor = std::mem::replace(&mut self.tapes.cursor, usize::MAX);
        }
        self.paused += 1;
    }

    /// Undoes one `pause`.
    pub fn resume(&mut self) {
        if self.paused == 1 {
            self.tapes.cursor = self.paused_cursor;
            self.tapes.counted = self.paused_cursor;
        }
        self.paused = self.paused.saturating_sub(1);
    }

    fn resume_all(&mut self) {
        while self.paused > 0 {
            self.resume();
        }
    }

    /// Serves another stream from now on, behind the work of the former one: that work may still use
    /// places that are free in program order.
    pub fn use_stream(&mut self, stream: StreamId) -> Result<(), Error> {
        if stream == self.stream {
            self.shared.stream_is_there();
            return Ok(());
        }
        let refused = |call| move |source| Error::Device { call, source };
        let device = self.arena.device();
        device.check_stream(stream).map_err(refused(Call::Wait))?;
        if self.shared.is_stream_gone() {
            // Its work was waited for when it went.
        } else if !self.is_abroad() {
            let fence = device.fence(self.stream).map_err(refused(Call::Fence))?;
            device.wait(stream, fence).map_err(refused(Call::Wait))?;
        } else if self.home_thread != 0 {
            // The handles may mean other streams here than where the steps ran.
            device.synchronise().map_err(refused(Call::Synchronise))?;
        }
        self.stream = stream;
        let thread = self.home_thread;
        self.shared.set_home(Home { thread, stream });
        self.shared.stream_is_there();
        Ok(())
    }

    /// An allocation was large enough to be served and was not.
    pub fn count_passed_through(&mut self) {
        self.totals.passed_through += 1;
    }

    /// Gives the memory of idle frames back.
    pub fn trim(&mut self) -> Result<Bytes, Error> {
        self.drain();
        if self.is_pinned() {
            return Err(Error::Pinned);
        }
        self.sync_placer();
        let trimmed = self.arena.trim();
        self.note_trims();
        trimmed.map_err(|refusal| self.error(refusal, 0))
    }

    /// Gives up to `wanted` bytes of idle frames back, for a step of another compiler; none where the layout is
    /// pinned. The next step maps others under the same addresses.
    pub fn lend(&mut self, wanted: Bytes) {
        debug_assert!(self.active.is_none(), "a step has nothing to lend");
        self.drain();
        if self.is_pinned() {
            return;
        }
        self.sync_placer();
        self.arena.is_pinned = false;
        self.arena.lend(wanted.0.div_ceil(self.arena.granule().0));
        self.note_trims();
    }

    /// What others see of the memory.
    pub fn account(&self) -> &Account {
        self.arena.account()
    }

    /// Live buffers, by address.
    pub fn live(&self) -> Vec<(Address, Bytes)> {
        let mut live: Vec<_> = self
            .table
            .iter()
            .map(|number| {
                let place = self.graph.placements[number as usize].place;
                (
                    self.shared.address(place.start),
                    Bytes(u64::from(place.len) * ALIGNMENT.0),
                )
            })
            .collect();
        live.sort_unstable();
        live
    }

    /// The frame under every virtual page.
    pub fn frames(&self) -> Vec<(u32, u32)> {
        let placer = &self.arena.placer;
        let pages = placer
            .page_ranges()
            .into_iter()
            .flat_map(|(first, count)| first..first + count);
        pages
            .map(|page| (page, placer.frame_of(page)))
            .filter(|&(_, frame)| frame != NO_FRAME)
            .collect()
    }

    /// All numbers.
    pub fn stats(&mut self) -> Stats {
        self.drain();
        self.fold_peak();
        let bytes = |units: u64| Bytes(units * ALIGNMENT.0);
        let granule = self.arena.granule();
        let report = self.report();
        Stats {
            live: bytes(self.live),
            peak: bytes(self.peak),
            held: self.arena.held(),
            floor: Bytes(bytes(self.peak).0.next_multiple_of(granule.0)),
            virtual_bytes: Bytes(u64::from(self.arena.placer.page_count()) * granule.0),
            granule,
            states: self.graph.state_count(),
            edges: self.graph.edge_count(),
            edges_forgotten: self.totals.forgotten,
            compiled: self.compiled,
            steps: self.totals.steps,
            breaks_step: report.breaks,
            breaks_total: self.totals.breaks,
            recorded_step: report.recorded,
            recorded_total: self.totals.recorded,
            replayed_step: report.replayed,
            replayed_total: self.totals.replayed
                + if self.is_active() { report.replayed } else { 0 },
            device_calls_step: report.device_calls,
            device_calls_total: self.arena.calls(),
            survivors: if self.is_active() {
                self.outside_count - self.young_count
            } else {
                self.live_count()
            },
            survivor_bytes: bytes(if self.is_active() {
                self.outside - self.young_len
            } else {
                self.live
            }),
            survivor_positions: self.survivors.len() as u64,
            obstructed: self.totals.obstructed,
            passed_through: self.totals.passed_through,
            bad_frees: self.totals.bad_frees,
            bad_scopes: self.totals.bad_scopes,
            aborts: self.totals.aborts,
            branches: self
                .tapes
                .latest_first()
                .into_iter()
                .map(|at| (at, &self.tapes.branches[at]))
                .map(|(at, branch)| BranchStats {
                    name: path::of_name(self.scopes.name(branch.name)).into_owned(),
                    allocs: self.tapes.len_of(at) as u64,
                    events: branch.events,
                    runs: branch.runs,
                    replays: branch.replays,
                    breaks: branch.breaks,
                    last_breaks: branch.last_breaks,
                    device_calls: branch.device_calls,
                    last_device_calls: branch.last_device_calls,
                    peak: bytes(branch.peak),
                    time: branch.time,
                })
                .collect(),
            scopes: self.scopes.stats(),
        }
    }
}
