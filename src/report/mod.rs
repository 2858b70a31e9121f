//! Layer 5: where the memory goes, for people: every buffer of every branch with its scope, its lifespan and its
//! place, and a page of HTML that shows them.
//!
//! ```text
//!   tapes + ends + scopes ──engine──> Report ──> which scopes have what is live at the peak
//!                                            └─> html(): one file, no scripts, nothing to fetch
//! ```
//!
//! Time is counted in the allocations of a branch. Plain data, copied out of the engine between two steps.
//!
//! May import: `stats`, `units`.

mod html;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::stats::Stats;
use crate::units::Bytes;

/// Where a compiler's memory goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// All numbers.
    pub stats: Stats,
    /// The scope paths that buffers name, as in [`ScopeStats::path`](crate::ScopeStats::path).
    pub scopes: Vec<String>,
    /// Branches, the most recent first, as in [`Stats::branches`].
    pub branches: Vec<Branch>,
}

/// The last run of one branch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Branch {
    /// Name of the step; both ends of one of more than 128 bytes.
    pub name: String,
    /// Its buffers in the order in which they were allocated. None where it is not known how long they lived: of
    /// branches that were forgotten (`Options::edge_limit`), and of runs put together from several others.
    pub buffers: Vec<Buffer>,
}

/// A buffer of a branch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Its scope, an index of [`Report::scopes`].
    pub scope: usize,
    /// Which allocation of its size it was in that run of the scope, from zero.
    pub nth: u32,
    /// Its size, rounded up to 512 B.
    pub size: Bytes,
    /// From its own allocation, by number in the branch, to the first one before which it was freed.
    pub lifespan: Range<u64>,
    /// Its bytes in the pages that the branches' buffers share, which are numbered from zero as long as they are
    /// in use; none where no page is there now.
    pub pieces: Vec<Range<Bytes>>,
    /// Whether it is one of those that outlive their step, which lie apart.
    pub outlives: bool,
}

impl Report {
    /// What each scope has of what is live at the peak of a branch, the most first: the scope's number in
    /// [`scopes`](Self::scopes), bytes and buffers.
    #[must_use]
    pub fn scopes_at_peak(&self, branch: &Branch) -> Vec<(usize, Bytes, usize)> {
        let mut of_scope: BTreeMap<usize, (Bytes, usize)> = BTreeMap::new();
        for buffer in branch.at_peak() {
            let (bytes, count) = of_scope.entry(buffer.scope).or_default();
            bytes.0 += buffer.size.0;
            *count += 1;
        }
        let scopes = of_scope.into_iter();
        let mut scopes: Vec<_> = scopes.map(|(scope, (b, n))| (scope, b, n)).collect();
        scopes.sort_by_key(|&(_, bytes, _)| std::cmp::Reverse(bytes));
        scopes
    }

    /// One page of HTML, with its style in it and no scripts, which shows for every branch what is live when, which
    /// scopes have it at the peak, and where it lies; some 300 bytes a buffer.
    ///
    /// ```no_run
    /// # fn show(compiler: &mut memory_compiler::Compiler) -> std::io::Result<()> {
    /// std::fs::write("memory.html", compiler.report().html())
    /// # }
    /// ```
    #[must_use]
    pub fn html(&self) -> String {
        html::page(self)
    }
}

impl Branch {
    /// Bytes that are live after each allocation. Buffers of earlier steps are not among them.
    #[must_use]
    pub fn live(&self) -> Vec<Bytes> {
        let mut changes = vec![(0, 0); self.buffers.len() + 1];
        for buffer in &self.buffers {
            let Range { start, end } = buffer.lifespan;
            changes[start as usize].0 += buffer.size.0;
            if let Some(end) = changes.get_mut(end as usize) {
                end.1 += buffer.size.0;
            }
        }
        changes.pop();
        let mut live = 0;
        let live = changes.into_iter().map(|(more, less)| {
            live = live + more - less;
            Bytes(live)
        });
        live.collect()
    }

    /// The first allocation after which most is live, and how much is; `None` without buffers.
    #[must_use]
    pub fn peak(&self) -> Option<(u64, Bytes)> {
        let live = (0..).zip(self.live());
        live.max_by_key(|&(at, live)| (live, std::cmp::Reverse(at)))
    }

    /// The buffers that are live at the peak.
    pub fn at_peak(&self) -> impl Iterator<Item = &Buffer> {
        let peak = self.peak().map(|(at, _)| at);
        let buffers = self.buffers.iter();
        buffers.filter(move |buffer| peak.is_some_and(|at| buffer.lifespan.contains(&at)))
    }
}
