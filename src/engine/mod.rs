//! Layer 5: one compiler's working parts, and the two calls that a replayed step consists of.
//!
//! ```text
//!   alloc --> next tape entry agrees? --yes--> its address                       (this file)
//!                     | no
//!                     v
//!             position survives? edge recorded? neither? --> survivors' space,
//!             another tape, or a new edge over placer and arena                  (record.rs)
//!
//!   begin / end / abort, survivors of the last step, trim                        (steps.rs)
//!   a limit to what is remembered                                               (forget.rs)
//!   all places anew, once lifespans are known                                   (compile.rs)
//!   the graph made afresh for either; windows that nothing uses                 (rebuild.rs)
//!   addresses that were captured                                                (pinned.rs)
//!   windows given up where mappings or addresses run out                        (windows.rs)
//!   what a report shows of all this                                             (buffers.rs)
//! ```
//!
//! An engine belongs to whoever holds its box: the compiler between steps, the thread during one
//! (`current`), the orphanage after the compiler was dropped. So it needs no lock. Frees that arrive
//! elsewhere wait in [`Shared`] and are applied at its next call.
//!
//! Words of this layer: an engine's *home* is the thread and stream of its steps (`shared`); what passes
//! between it and other threads is its *handover* (`handover`); a *slot* is an entry of the live table, one
//! for each start of a buffer (`graph::live`).
//!
//! The hot path is `alloc` and `free` below: no lock, no device call, no allocation. An
//! alloc looks nothing up; a free finds its slot in the live table's index.
//!
//! May import: layers 0 to 4, `scopes`, `stats`, `report`.

mod buffers;
mod compile;
mod forget;
mod handover;
mod pinned;
mod rebuild;
mod record;
mod shared;
mod steps;
mod windows;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use pinned::Captured;
use shared::{Home, this_thread};

pub(crate) use shared::{Remote, Shared};
pub(crate) use steps::COMPILE_TIME;

use crate::arena::{Arena, Refusal};
use crate::device::{Call, DeviceError, Fence, GpuIdentity, Mappings, StreamId};
use crate::error::{BadFree, Error};
use crate::graph::live::{Live, LiveTable};
use crate::graph::tape::{SURVIVOR, Tapes};
use crate::graph::{Graph, Kind};
use crate::mix::{Key, MixBuild};
use crate::options::Options;
use crate::placer::{Space, Units};
use crate::prefetch::prefetch;
use crate::scopes::{Position, Scopes};
use crate::shortage::Shortage;
use crate::stats::Compiled;
use crate::units::{ALIGNMENT, Address, Bytes};

/// Where an allocation went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Allocation {
    /// Served by the compiler at this address.
    Here(Address),
    /// Not served: no bytes, paused, or for another stream. The framework's own allocator has it.
    Elsewhere,
}

/// What to do with an allocation that breaks a strict step or finds no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnError {
    /// Return the error at the call.
    Fail,
    /// Serve it or pass it on; the step returns the error at its end.
    Postpone,
    /// Serve a strict break, and let the step return it; return at the call that there is no memory.
    #[cfg(feature = "cuda")]
    Refuse,
}

/// Who frees a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// The program, by an address that it may have from anywhere: not what a value still owns.
    Program,
    /// A hook: the value that owned the block is gone, or the framework calls the driver's free.
    Hook,
}

/// Numbers of the step that is active, or of the last one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub events: u64,
    pub allocs: u64,
    pub recorded: u64,
    pub survivors: u64,
    pub breaks: u64,
    pub calls: u64,
    pub peak: u64,
}

/// Numbers of all steps.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub steps: u64,
    pub recorded: u64,
    pub replayed: u64,
    pub breaks: u64,
    pub obstructed: u64,
    pub forgotten: u64,
    pub passed_through: u64,
    pub bad_frees: u64,
    pub bad_scopes: u64,
    pub aborts: u64,
}

/// See the module's page.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Engine {
    // What a replayed event touches comes first and together; the rest of `tapes`, `table` and `scopes`
    // lies behind their own first lines.
    pub shared: Arc<Shared>,
    /// The smallest buffer that the CPU hook takes from here; more than any, for other memory.
    pub host_threshold: Bytes,
    /// Whose memory it is, for the GPU hook.
    pub gpu: Option<GpuIdentity>,
    pub stream: StreamId,
    /// Number of the step, unique in the process; guards compare it.
    pub serial: u64,
    /// Hash of the state.
    hash: u128,
    tapes: Tapes,
    table: LiveTable,
    /// Units in live buffers.
    live: u64,
    /// Most of those since `fold_peak`.
    recent_peak: u64,
    /// Live buffers that are part of the state.
    own_count: u64,
    outside_count: u64,
    step: Counts,
    pub scopes: Scopes,

    graph: Graph,
    arena: Arena,
    /// Units in live survivors and obstacles.
    outside: u64,
    obstacles: u64,
    /// Placements that became live in the survivors' space in this step, and what of them still is.
    young: Vec<u32>,
    young_count: u64,
    young_len: u64,
    peak: u64,

    survivors: HashSet<Position, MixBuild>,
    /// Grows when an entry of a tape may have become unsafe to follow.
    epoch: u64,
    seen_trims: u64,
    /// The run of recorded allocations that is going on.
    recording: Option<Recording>,
    strict: bool,
    edge_limit: usize,
    /// Most placements, of edges and of survivors.
    place_limit: usize,
    /// Most scope paths and positions.
    scope_limit: usize,
    paused: u32,
    paused_cursor: usize,
    /// The thread of the last step; 0 before the first.
    home_thread: u64,
    /// Guards that hold the layout.
    pins: u64,
    captured: Captured,
    active: Option<Active>,
    last_aborted: bool,
    finished: HashSet<u32, MixBuild>,
    /// What the last compile did.
    compiled: Option<Compiled>,
    compile_after: Option<u32>,
    /// Recorded allocations at which addresses may be won back again.
    reclaim_at: u64,
    /// What is known of the need for windows.
    pressure: windows::Pressure,
    /// Finished steps since something was recorded.
    quiet_steps: u32,
    totals: Totals,
}

/// A run of recorded allocations; it ends at the first one that an older edge answers.
#[derive(Clone, Copy, Debug)]
struct Recording {
    first_edge: u32,
    /// Whether it is a graph break: not in a step that records for the first time, or again after
    /// survivors were learnt, and not where a survivor of an earlier step is in the way.
    is_break: bool,
}

/// A step that is going on.
#[derive(Debug)]
struct Active {
    name: u32,
    /// Whether a step of this name has finished and no survivor of it was learnt since: breaks count,
    /// and strict applies.
    graded: bool,
    /// Whether the step is run for what it does alone: its layout is pinned, and nothing is learnt from it.
    is_apart: bool,
    began: Instant,
    calls_before: u64,
    error: Option<Error>,
}

impl Engine {
    pub fn new(
        shared: Arc<Shared>,
        arena: Arena,
        options: &Options,
        host_threshold: Bytes,
    ) -> Self {
        Self {
            gpu: shared.device.gpu(),
            shared,
            host_threshold,
            tapes: Tapes::default(),
            hash: 0,
            scopes: Scopes::default(),
            table: LiveTable::default(),
            graph: Graph::new(Key::new(options.hash_seed)),
            live: 0,
            recent_peak: 0,
            own_count: 0,
            arena,
            outside: 0,
            outside_count: 0,
            obstacles: 0,
            young: Vec::new(),
            young_count: 0,
            young_len: 0,
            peak: 0,
            survivors: HashSet::default(),
            epoch: 1,
            seen_trims: 0,
            recording: None,
            strict: options.strict,
            edge_limit: options.edge_limit as usize,
            place_limit: 2 * options.edge_limit as usize,
            scope_limit: options.edge_limit as usize,
            paused: 0,
            paused_cursor: usize::MAX,
            stream: StreamId::default(),
            home_thread: 0,
            pins: 0,
            captured: Captured::default(),
            serial: 0,
            active: None,
            last_aborted: false,
            finished: HashSet::default(),
            compiled: None,
            compile_after: options.compile_after,
            reclaim_at: 0,
            pressure: windows::Pressure::default(),
            quiet_steps: 0,
            step: Counts::default(),
            totals: Totals::default(),
        }
    }

    /// Live buffers of any kind.
    pub fn live_count(&self) -> u64 {
        self.own_count + self.outside_count
    }

    /// Serves an allocation of the active step.
    #[inline]
    pub fn alloc(&mut self, size: Bytes, on_error: OnError) -> Result<Allocation, Error> {
        match self.replay(size, on_error) {
            Some(address) => Ok(Allocation::Here(address)),
            None => self.alloc_slow(size, on_error),
        }
    }

    /// Serves an allocation from the next tape entry, if that agrees and no frees wait; else nothing has
    /// happened, and [`alloc_slow`](Self::alloc_slow) comes next.
    ///
    /// Small on purpose: after a launch its instructions come from the second cache.
    #[inline]
    pub fn replay(&mut self, size: Bytes, on_error: OnError) -> Option<Address> {
        let wide = wide_units(size);
        let entry = self.tapes.tape.get(self.tapes.cursor)?;
        if u64::from(entry.len) != wide
            || entry.context != self.scopes.context
            || entry.state != self.hash
            || entry.edge == SURVIVOR
            || self.shared.handover.has_waiting()
        {
            return None;
        }
        self.tapes.cursor += 1;
        self.hash ^= entry.mix;
        self.table
            .set(entry.slot, entry.live(), on_error != OnError::Fail);
        self.scopes.go_on(entry.len);
        self.own_count += 1;
        self.live += wide;
        self.recent_peak = self.recent_peak.max(self.live);
        self.step.events += 1;
        self.step.allocs += 1;
        let address = self.shared.address(entry.start);
        self.prefetch();
        Some(address)
    }

    /// Asks for what the next alloc of the tape will touch, and the one after it.
    #[inline]
    fn prefetch(&self) {
        let (tape, next) = (&self.tapes.tape, self.tapes.cursor);
        if let Some(entry) = tape.get(next) {
            self.table.prefetch(entry.slot, entry.start);
        }
        prefetch(tape, next + 1);
    }

    /// Frees the buffer that starts at `address`, which lies in this engine's range.
    #[inline]
    pub fn free(&mut self, address: Address, by: By) -> Result<(), Error> {
        if self.free_live(address, by) {
            return Ok(());
        }
        self.drain();
        self.apply_free(address, by)
    }

    /// Frees the buffer that starts at `address`, which lies in this engine's range, if there is one, it
    /// is `by`'s to free, and no frees wait; else nothing has happened.
    #[inline]
    pub fn free_live(&mut self, address: Address, by: By) -> bool {
        !self.shared.handover.has_waiting() && self.end_live(address, by)
    }

    /// A free that may be a bad one.
    #[cold]
    fn apply_free(&mut self, address: Address, by: By) -> Result<(), Error> {
        if self.end_live(address, by) {
            return Ok(());
        }
        self.totals.bad_frees += 1;
        let is_live = address.0.is_multiple_of(ALIGNMENT.0)
            && self
                .table
                .find(self.shared.unit(address))
                .is_some_and(|slot| self.table.get(slot).is_some());
        let reason = if is_live {
            BadFree::Hooked
        } else {
            BadFree::NotLive
        };
        Err(Error::BadFree { address, reason })
    }

    /// Ends the buffer that starts at an address of the range, unless there is none or only a hook may.
    #[inline]
    fn end_live(&mut self, address: Address, by: By) -> bool {
        let offset = address.0 - self.shared.base.0;
        if !offset.is_multiple_of(ALIGNMENT.0) {
            return false;
        }
        let Some(slot) = self.table.find((offset / ALIGNMENT.0) as u32) else {
            return false;
        };
        let Some(Live { number, len, mix }) = self.table.get(slot) else {
            return false;
        };
        if by == By::Program && self.table.is_hooked(slot) {
            return false;
        }
        self.table.clear(slot);
        self.step.events += 1;
        self.live -= u64::from(len);
        // Where nothing is outside the state, what ends is part of it.
        if self.outside_count == 0 || self.graph.placements[number as usize].kind == Kind::Own {
            self.hash ^= mix;
            self.own_count -= 1;
        } else {
            self.free_outside(number);
        }
        true
    }

    #[cold]
    fn free_outside(&mut self, number: u32) {
        let placement = &mut self.graph.placements[number as usize];
        let len = u64::from(placement.place.len);
        match placement.kind {
            Kind::Obstacle => {
                placement.kind = Kind::Own;
                self.obstacles -= 1;
            }
            Kind::Young => {
                placement.kind = Kind::Survivor;
                self.young_count -= 1;
                self.young_len -= len;
            }
            Kind::Own | Kind::Survivor => {}
        }
        // `live` is already without it.
        self.fold_peak_at(self.live + len);
        self.outside -= len;
        self.outside_count -= 1;
        self.recent_peak = self.live;
    }

    /// Applies what other threads queued. A free that the device cannot order behind the work of
    /// its stream, or not while that is captured into a graph, stays queued, and its buffer live, until a
    /// later call can.
    #[cold]
    pub fn drain(&mut self) {
        for remote in self.shared.handover.take() {
            let Remote::Freed(freed) = remote else {
                self.unpin();
                continue;
            };
            if freed
                .fence
                .is_some_and(|fence| self.is_captured() || !self.is_behind(fence))
            {
                self.shared.handover.push(remote);
                continue;
            }
            // Counted where it is bad; nobody waits for the answer.
            drop(self.apply_free(freed.address, freed.by));
        }
    }

    /// Whether the steps' stream may be another than the one that its handle names on this thread.
    pub(super) fn is_abroad(&self) -> bool {
        self.gpu.is_some() && self.home_thread != this_thread()
    }

    /// Comes to the thread where the next step runs: its stream begins behind all earlier work. Where that cannot
    /// be waited for, the engine stays where it is: the step may not use places that the work still uses.
    fn move_home(&mut self) -> Result<(), Error> {
        if self.home_thread == this_thread() {
            return Ok(());
        }
        if self.home_thread != 0 && self.is_abroad() {
            let waited = self.arena.device().synchronise();
            waited.map_err(|source| Error::Device {
                call: Call::Synchronise,
                source,
            })?;
        }
        self.home_thread = this_thread();
        self.shared.set_home(Home {
            thread: self.home_thread,
            stream: self.stream,
        });
        Ok(())
    }

    /// Lets the stream wait for a fence, or this thread for the device, which is behind it too.
    fn is_behind(&self, fence: Fence) -> bool {
        let device = self.arena.device();
        match self.wait_for(fence) {
            Ok(()) if !self.is_abroad() => return true,
            Ok(()) => {}
            Err(error) => {
                tracing::warn!(%error, "waiting for a fence failed; waiting for the device");
            }
        }
        device.synchronise().is_ok()
    }

    /// Whether the steps' stream is being captured into a graph.
    pub fn is_captured(&self) -> bool {
        !self.shared.is_stream_gone() && self.arena.device().is_capturing(self.stream)
    }

    /// Has the steps' stream wait for a fence; where it was destroyed, this thread waits for the device instead, which
    /// is behind the fence too.
    pub fn wait_for(&self, fence: Fence) -> Result<(), DeviceError> {
        let device = self.arena.device();
        if !self.shared.is_stream_gone() {
            return device.wait(self.stream, fence);
        }
        device.synchronise()?;
        // On a stream that is always there: nothing is left to wait for, and the fence is forgotten.
        device.wait(StreamId::default(), fence)
    }

    /// Applies the frees of an engine that serves no more. Nothing is placed where they were, and the
    /// device is waited for before its memory goes: so a fence that cannot be waited for is no obstacle.
    pub fn drain_orphan(&mut self) {
        for remote in self.shared.handover.take() {
            let Remote::Freed(freed) = remote else {
                self.unpin();
                continue;
            };
            if let Some(fence) = freed.fence {
                drop(self.wait_for(fence));
            }
            drop(self.apply_free(freed.address, freed.by));
        }
    }

    /// Tells scopes and totals how much was live at most, before what the peaks consist of changes.
    fn fold_peak(&mut self) {
        self.fold_peak_at(self.live);
    }

    fn fold_peak_at(&mut self, live: u64) {
        let peak = self.recent_peak.max(live);
        self.scopes.fold_peak(peak);
        self.peak = self.peak.max(peak);
        self.recent_peak = self.live;
    }

    /// Brings the placer up to date with what was allocated and freed since.
    fn sync_placer(&mut self) {
        let placements = &self.graph.placements;
        let placer = std::cell::RefCell::new(&mut self.arena.placer);
        let (tapes, is_step) = (&mut self.tapes, self.active.is_some());
        self.table.sync(
            |number| {
                if is_step {
                    tapes.note_end(number);
                }
                placer
                    .borrow_mut()
                    .vacate(placements[number as usize].place)
            },
            |number| {
                placer
                    .borrow_mut()
                    .occupy(placements[number as usize].place)
            },
        );
    }

    /// What a refusal of the arena means to the caller.
    fn error(&self, refusal: Refusal, len: Units) -> Error {
        self.error_of(refusal, Bytes(u64::from(len) * ALIGNMENT.0))
    }

    fn error_of(&self, refusal: Refusal, asked: Bytes) -> Error {
        let told = |mut short: Box<Shortage>| {
            short.scope = self.scopes.path();
            (short.asked, short.live) = (asked, Bytes(self.live * ALIGNMENT.0));
            short
        };
        match refusal {
            Refusal::OverBudget(short) => Error::OverBudget(told(short)),
            Refusal::OutOfMemory(short) => Error::OutOfMemory(told(short)),
            Refusal::AddressSpace => Error::AddressSpace {
                asked,
                reserved: self.arena.reserved(),
            },
            Refusal::Mappings(Mappings { count, limit }) => Error::Mappings {
                scope: self.scopes.path(),
                asked,
                granule: self.arena.granule(),
                count,
                limit,
            },
            Refusal::Device { call, source } => Error::refused(call, source),
        }
    }

    /// Places a buffer in a space and makes it live, outside the state where `kind` says so.
    fn place(&mut self, len: Units, space: Space) -> Result<u32, Error> {
        self.sync_placer();
        self.arena.is_pinned = self.is_pinned();
        let mut place = self.arena.place(len, space);
        let helps = match &place {
            Err(Refusal::AddressSpace) => {
                space == Space::Survivors && !self.arena.is_pinned && self.sweep_survivors()
            }
            Err(Refusal::Mappings(_)) => self.find_mappings(),
            _ => false,
        };
        if helps {
            place = self.arena.place(len, space);
        }
        self.note_trims();
        let place = place.map_err(|refusal| self.error(refusal, len))?;
        // Outside of the state nothing counts on the pages under a place.
        let (kind, since) = match space {
            Space::Step => (Kind::Own, self.arena.placer.since(place)),
            Space::Survivors => (Kind::Survivor, 0),
        };
        let number = match self.graph.placement_at(place, since) {
            Some(number) => number,
            None => {
                let slot = self.table.slot(place.start);
                self.graph.add_placement(place, since, slot, kind)
            }
        };
        self.set_known(number);
        Ok(number)
    }

    /// Makes a placement live that the placer has marked itself.
    fn set_known(&mut self, number: u32) {
        let placement = &self.graph.placements[number as usize];
        self.table.set_known(placement.slot, placement.live(number));
    }

    /// Leaves tapes alone whose frames may have lost their memory.
    fn note_trims(&mut self) {
        if self.arena.trims != self.seen_trims {
            self.seen_trims = self.arena.trims;
            self.epoch += 1;
            self.tapes.leave();
        }
    }
}

/// A size in whole units; 0 for no bytes, and for the last few below 2^64.
#[inline]
fn wide_units(size: Bytes) -> u64 {
    size.0.wrapping_add(ALIGNMENT.0 - 1) / ALIGNMENT.0
}
