//! Layer 2: where every buffer goes when all lifespans are known.
//!
//! ```text
//!   Problem                        Plan
//!   items: size, lifespans   ->    one place an item in virtual pages, the frame under each page
//!   page size                      held = frames × page
//! ```
//!
//! Two kinds of plan share that form. A *contiguous* plan has frame n under page n: what it holds is
//! its height. An *aliasing* plan puts one frame under many pages: fragmentation of addresses costs
//! nothing, only the slack in partly used pages does.
//!
//! [`plan`] runs its strategies in turn, each behind a small trait, and keeps the plan with the fewest
//! frames, then the fewest virtual pages, then the earliest strategy. It ends early at the floor, which
//! nothing can beat, if that plan is contiguous: it has no page more than it holds either.
//!
//! **Time and determinism.** Every strategy is deterministic, and the searches are bounded by a count
//! of moves. The clock only cuts off: a run that ends within [`Rules::time_limit`] gives the same plan
//! for the same problem on every machine; one that is cut off gives the best plan so far, which depends
//! on the machine's speed ([`Outcome::cut_off`] says so). The first strategy always runs to its end, so
//! that there is a plan.
//!
//! Nothing here checks itself: `validate` does, with code of its own, on every plan of a debug build.
//!
//! May import: `units`, `bits`, `lifespans`; `validate` for the check of debug builds.

mod aliasing;
mod best_fit;
mod overlaps;
mod problem;
mod search;

use std::time::{Duration, Instant};

pub use problem::{Problem, ProblemError, Units};

use crate::units::{ALIGNMENT, Bytes};
use crate::validate::{self, Placed, PlanFault};
use aliasing::Aliasing;
use best_fit::{BestFit, Order};
use search::Perturb;

/// Which strategies run, and for how long. Each rule has a test that it pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// After this time the best plan so far is used.
    pub time_limit: Duration,
    /// Best fit in the order of size × lifespan and of lifespan too, not only of size.
    pub more_orders: bool,
    /// Plans in which several pages stand over one frame.
    pub aliasing: bool,
    /// In those: a large buffer may begin at the end of a page, not only at its start, so that two of
    /// them share a page.
    pub both_ends: bool,
    /// Perturb the order of a contiguous plan and keep what is lower.
    pub search: bool,
}

impl Default for Rules {
    /// All of them, for 200 ms.
    fn default() -> Self {
        Self {
            time_limit: Duration::from_millis(200),
            more_orders: true,
            aliasing: true,
            both_ends: true,
            search: true,
        }
    }
}

/// One place for every item of a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Name of the strategy that found it.
    pub strategy: &'static str,
    /// First unit of each item in the virtual pages.
    pub starts: Vec<u64>,
    /// Virtual pages.
    pub page_count: u64,
    /// The frame under each page; `None` when frame n is under page n.
    pub frames: Option<Vec<u32>>,
    /// Frames.
    pub frame_count: u64,
}

impl Plan {
    fn contiguous(
        strategy: &'static str,
        starts: Vec<u64>,
        height: u64,
        problem: &Problem,
    ) -> Self {
        let pages = height.div_ceil(u64::from(problem.page_units()));
        Self {
            strategy,
            starts,
            page_count: pages,
            frames: None,
            frame_count: pages,
        }
    }

    /// The frame under a virtual page; `None` past the last one.
    #[must_use]
    pub fn frame_at(&self, page: u64) -> Option<u32> {
        match &self.frames {
            Some(frames) => frames.get(usize::try_from(page).ok()?).copied(),
            None => u32::try_from(page).ok().filter(|_| page < self.page_count),
        }
    }

    /// Physical bytes that it takes.
    #[must_use]
    pub fn held(&self, problem: &Problem) -> Bytes {
        Bytes(self.frame_count * problem.page().0)
    }

    /// Addresses that it takes: its height, if it is contiguous.
    #[must_use]
    pub fn virtual_bytes(&self, problem: &Problem) -> Bytes {
        Bytes(self.page_count * problem.page().0)
    }

    /// The highest end of an item, in bytes: the height of a contiguous plan to the byte.
    #[must_use]
    pub fn height(&self, problem: &Problem) -> Bytes {
        let ends = self
            .starts
            .iter()
            .zip(problem.items())
            .map(|(&start, item)| start + u64::from(item.size));
        Bytes(ends.max().unwrap_or(0) * ALIGNMENT.0)
    }

    fn rank(&self) -> (u64, u64) {
        (self.frame_count, self.page_count)
    }
}

/// What [`plan`] found.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The best plan.
    pub plan: Plan,
    /// The time limit ended the search: a faster machine may find a better plan.
    pub cut_off: bool,
    /// How long it took.
    pub time: Duration,
}

/// A way to place the items of a problem.
trait Strategy {
    /// A plan better than `limits.best`, or `None`.
    fn plan(&self, problem: &Problem, limits: &Limits<'_>) -> Option<Plan>;
}

/// What a strategy has to beat, and until when.
#[derive(Debug)]
struct Limits<'a> {
    deadline: Option<Instant>,
    best: Option<&'a Plan>,
}

impl Limits<'_> {
    fn is_over(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Most units that a better contiguous plan may reach to.
    fn height_limit(&self, problem: &Problem) -> u64 {
        let page = u64::from(problem.page_units());
        self.best.map_or(u64::MAX / 2, |best| match best.frames {
            // As many frames without an alias is better too.
            Some(_) => best.frame_count * page,
            None => (best.frame_count - 1) * page,
        })
    }
}

/// Places every item of `problem`; see the module's page.
///
/// # Panics
/// In debug builds, when the checker in `validate` finds a fault in the plan.
#[must_use]
pub fn plan(problem: &Problem, rules: Rules) -> Outcome {
    let began = Instant::now();
    let deadline = began.checked_add(rules.time_limit);
    let floor = problem.live_peak().0.div_ceil(problem.page().0);
    let mut strategies: Vec<Box<dyn Strategy>> = vec![Box::new(BestFit::new(Order::Size))];
    if rules.aliasing {
        strategies.push(Box::new(Aliasing {
            both_ends: rules.both_ends,
        }));
    }
    if rules.more_orders {
        strategies.extend(
            [Order::Area, Order::Lifespan]
                .map(|order| Box::new(BestFit::new(order)) as Box<dyn Strategy>),
        );
    }
    if rules.search {
        strategies.push(Box::new(Perturb));
    }
    let mut best: Option<Plan> = None;
    for strategy in strategies {
        let deadline = if best.is_some() { deadline } else { None };
        let limits = Limits {
            deadline,
            best: best.as_ref(),
        };
        if best
            .as_ref()
            .is_some_and(|plan| plan.rank() == (floor, floor))
            || limits.is_over()
        {
            break;
        }
        if let Some(found) = strategy.plan(problem, &limits)
            && best.as_ref().is_none_or(|plan| found.rank() < plan.rank())
        {
            best = Some(found);
        }
    }
    let time = began.elapsed();
    let plan = best.expect("the first strategy always finds a plan");
    if cfg!(debug_assertions) {
        check(problem, &plan)
            .unwrap_or_else(|fault| panic!("{} gave a wrong plan: {fault}", plan.strategy));
    }
    let cut_off = time >= rules.time_limit && plan.rank() != (floor, floor);
    Outcome {
        plan,
        cut_off,
        time,
    }
}

/// Checks a plan with the independent checker.
///
/// # Errors
/// The first fault it finds.
pub fn check(problem: &Problem, plan: &Plan) -> Result<(), PlanFault> {
    check_places(problem, &plan.starts, |page| plan.frame_at(page))
}

/// Checks places from elsewhere: the first unit of each item, and the frame under each virtual page.
///
/// # Errors
/// The first fault it finds.
///
/// # Panics
/// When `starts` has fewer entries than `problem` has items, or one above 2⁶³.
pub fn check_places(
    problem: &Problem,
    starts: &[u64],
    frame_at: impl Fn(u64) -> Option<u32>,
) -> Result<(), PlanFault> {
    assert_eq!(starts.len(), problem.len(), "one place for every item");
    let items = problem.items().zip(starts);
    let items: Vec<_> = items
        .map(|(item, &start)| Placed {
            start,
            len: u64::from(item.size),
            lifespans: item.lifespans,
        })
        .collect();
    validate::plan(&items, u64::from(problem.page_units()), frame_at)
}

#[cfg(test)]
mod tests;
