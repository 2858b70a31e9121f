//! Layer 5: numbers about a compiler, at any time.
//!
//! Plain data, copied out of the engine; nothing here computes on a hot path.
//!
//! May import: `units`.

use std::fmt;

use crate::units::Bytes;

/// Numbers about a compiler. Sizes of buffers are rounded up to 512 B each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes in buffers that are live now.
    pub live: Bytes,
    /// Most bytes live at once, survivors included, since the compiler was made.
    pub peak: Bytes,
    /// Physical bytes that the compiler owns now.
    pub held: Bytes,
    /// The least that had to be held at the peak: [`peak`](Self::peak), rounded up to a granule.
    pub floor: Bytes,
    /// Addresses in use, mapped or once mapped.
    pub virtual_bytes: Bytes,
    /// The smallest page of the device.
    pub granule: Bytes,
    /// States in the step graph.
    pub states: u64,
    /// Edges in the step graph.
    pub edges: u64,
    /// Edges that were forgotten because there were more than `Options::edge_limit`.
    pub edges_forgotten: u64,
    /// What the last compile did: the recorded layout and its cost beside the compiled one.
    pub compiled: Option<Compiled>,
    /// Steps begun.
    pub steps: u64,
    /// Graph breaks of the step that is active, or of the last one.
    pub breaks_step: u64,
    /// Graph breaks of all steps.
    pub breaks_total: u64,
    /// Allocations recorded in the step that is active, or in the last one.
    pub recorded_step: u64,
    /// Allocations recorded in all steps.
    pub recorded_total: u64,
    /// Allocations answered by an edge in the step that is active, or in the last one.
    pub replayed_step: u64,
    /// Allocations answered by an edge in all steps.
    pub replayed_total: u64,
    /// Device memory calls in the step that is active, or in the last one.
    pub device_calls_step: u64,
    /// Device memory calls since the compiler was made.
    pub device_calls_total: u64,
    /// Buffers that are live and outlived the step that made them.
    pub survivors: u64,
    /// Bytes in those.
    pub survivor_bytes: Bytes,
    /// Positions that are served from the survivor region.
    pub survivor_positions: u64,
    /// Edges that were placed anew because a survivor lay in their place.
    pub obstructed: u64,
    /// Buffers that the framework's own allocator served during steps although they were large enough:
    /// paused, on another stream, or after a failure.
    pub passed_through: u64,
    /// Frees at which no buffer was live.
    pub bad_frees: u64,
    /// Scopes closed out of order or left open.
    pub bad_scopes: u64,
    /// Steps aborted.
    pub aborts: u64,
    /// Branches, the most recent first.
    pub branches: Vec<BranchStats>,
    /// Scopes that were entered, each after its parent.
    pub scopes: Vec<ScopeStats>,
}

/// What a compile found and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    /// Whether the plan holds fewer bytes than the layout before, and was installed.
    pub is_installed: bool,
    /// Physical bytes before.
    pub held_before: Bytes,
    /// Physical bytes after, survivors included.
    pub held_after: Bytes,
    /// What the plan needs for the step's own buffers.
    pub planned: Bytes,
    /// Name of the strategy that found the plan.
    pub strategy: &'static str,
    /// Device memory calls to install it.
    pub device_calls: u64,
    /// Time to plan and install it.
    pub time: std::time::Duration,
}

/// One distinct path of a step through the graph: a step's name and its sequence of sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BranchStats {
    /// Name of the step; both ends of one of more than 128 bytes.
    pub name: String,
    /// Allocations in it.
    pub allocs: u64,
    /// Allocations and frees in the last run.
    pub events: u64,
    /// Runs that took it.
    pub runs: u64,
    /// Runs that took it from its tape alone.
    pub replays: u64,
    /// Graph breaks in those runs.
    pub breaks: u64,
    /// Graph breaks in the last run.
    pub last_breaks: u64,
    /// Device memory calls in those runs.
    pub device_calls: u64,
    /// Device memory calls in the last run.
    pub last_device_calls: u64,
    /// Most bytes live at once in the last run, survivors included.
    pub peak: Bytes,
    /// Time of all runs together.
    pub time: std::time::Duration,
}

/// One scope path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScopeStats {
    /// Names from the step down, joined by `/`. Of more than 32 names the first and the last 16, of a name of more than
    /// 128 bytes both ends: what is between is `…`, so that deep paths may have the same text.
    pub path: String,
    /// Runs.
    pub runs: u64,
    /// Most bytes live at once in any run of it.
    pub peak: Bytes,
    /// Graph breaks that began in it.
    pub breaks: u64,
    /// Positions in it whose buffers survive.
    pub survivor_positions: u64,
}

/// What one finished step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Allocations and frees.
    pub events: u64,
    /// Allocations answered by an edge.
    pub replayed: u64,
    /// Allocations recorded.
    pub recorded: u64,
    /// Allocations served from the survivor region.
    pub survivors: u64,
    /// Graph breaks.
    pub breaks: u64,
    /// Device memory calls.
    pub device_calls: u64,
    /// Most bytes live at once.
    pub peak: Bytes,
}

impl Stats {
    /// What went wrong, if anything did: how often, what, and how that comes about.
    pub(crate) fn troubles(&self) -> impl Iterator<Item = (u64, &'static str, &'static str)> {
        let troubles = [
            (self.bad_frees, "bad frees", "no buffer was live there"),
            (
                self.bad_scopes,
                "scopes closed out of order",
                "their peaks and positions may be another's",
            ),
            (self.aborts, "steps aborted", "nothing was learnt from them"),
            (
                self.passed_through,
                "large buffers passed through",
                "paused, on another stream, or after a failure, the framework's own allocator serves them",
            ),
            (
                self.edges_forgotten,
                "edges forgotten (Options::edge_limit)",
                "sizes that never repeat record for ever",
            ),
        ];
        troubles.into_iter().filter(|(count, ..)| *count > 0)
    }
}

/// Scopes that are named in the table.
const SHOWN_SCOPES: usize = 8;

impl fmt::Display for Stats {
    /// A table: one line a branch, then the memory, which scopes' buffers outlive their step (and how
    /// many positions in each), then what went wrong, if anything did.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<16} {:>7} {:>7} {:>8} {:>7} {:>12} {:>11} {:>11}",
            "branch", "events", "runs", "replays", "breaks", "driver calls", "peak", "time a run"
        )?;
        for branch in &self.branches {
            let mean = branch.time.as_secs_f64() * 1e3 / branch.runs.max(1) as f64;
            writeln!(
                f,
                "{:<16} {:>7} {:>7} {:>8} {:>7} {:>12} {:>11} {:>8.2} ms",
                branch.name,
                branch.events,
                branch.runs,
                branch.replays,
                branch.breaks,
                branch.device_calls,
                branch.peak,
                mean
            )?;
        }
        writeln!(
            f,
            "peak {}, floor {}, held {}, virtual {}",
            self.peak, self.floor, self.held, self.virtual_bytes
        )?;
        write!(
            f,
            "last step: {} breaks, {} driver calls; in all: {} breaks, {} driver calls, {} states, {} edges, \
             {} buffers of {} outlive their step now",
            self.breaks_step,
            self.device_calls_step,
            self.breaks_total,
            self.device_calls_total,
            self.states,
            self.edges,
            self.survivors,
            self.survivor_bytes
        )?;
        if let Some(compiled) = &self.compiled {
            let verb = if compiled.is_installed {
                "installed"
            } else {
                "not installed"
            };
            write!(
                f,
                "\ncompiled by {} and {verb}: held {} before, {} after; {} driver calls, {:.1} ms",
                compiled.strategy,
                compiled.held_before,
                compiled.held_after,
                compiled.device_calls,
                compiled.time.as_secs_f64() * 1e3
            )?;
        }
        let surviving = || {
            let scopes = self.scopes.iter();
            scopes.filter(|scope| scope.survivor_positions > 0)
        };
        for (nth, scope) in surviving().take(SHOWN_SCOPES).enumerate() {
            let before = if nth == 0 {
                "\npositions whose buffers do: "
            } else {
                ", "
            };
            let (path, count) = (&scope.path, scope.survivor_positions);
            write!(f, "{before}{path} ({count})")?;
        }
        if let Some(more) = surviving().count().checked_sub(SHOWN_SCOPES + 1) {
            write!(f, " and {} scopes more", more + 1)?;
        }
        self.troubles()
            .try_for_each(|(count, what, _)| write!(f, "\n{count} {what}"))
    }
}
