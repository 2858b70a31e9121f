//! Contiguous: improve a best fit by moving the items that stick out to the front.
//!
//! One round places all items in an order (best fit, or lowest fit in every second round), then
//! moves each item that reaches above the target forward in the order, by a distance drawn from a
//! generator with a fixed seed, and goes on from the new order. A complaint that is met makes others
//! complain; over many rounds the items that are hard to place gather at the front. The lowest plan of
//! all rounds is kept.
//!
//! Bounded by work, not by the clock: rounds × (items + pairs that are live together).

use super::best_fit::{Order, tightest};
use super::overlaps::Overlaps;
use super::problem::Problem;
use super::{Limits, Plan, Strategy};

/// Items and pairs that all rounds together may look at.
const WORK_LIMIT: u64 = 8_000_000;
/// Rounds without a lower plan after which the search begins again from the best one.
const PATIENCE: u32 = 200;

#[derive(Debug)]
pub(super) struct Perturb;

impl Strategy for Perturb {
    fn plan(&self, problem: &Problem, limits: &Limits<'_>) -> Option<Plan> {
        let together = Together::new(problem, limits)?;
        let work = (problem.len() + together.others.len()) as u64;
        let rounds = WORK_LIMIT / work.max(1);
        let page = u64::from(problem.page_units());
        let target = problem.live_peak_units().next_multiple_of(page);
        let mut random = Random(0x2545_F491_4F6C_DD1D);
        let mut order = Order::Area.of(problem);
        let mut best: Option<(u64, Vec<u64>, Vec<u32>)> = None;
        let (mut starts, mut around) = (vec![u64::MAX; problem.len()], Vec::new());
        let mut idle = 0;
        for round in 0..rounds {
            if round % 8 == 0 && limits.is_over() {
                break;
            }
            let height = together.place(problem, &order, round % 2 == 0, &mut starts, &mut around);
            if best.as_ref().is_none_or(|(lowest, ..)| height < *lowest) {
                best = Some((height, starts.clone(), order.clone()));
                idle = 0;
                if height <= target {
                    break;
                }
            } else {
                idle += 1;
                if idle == PATIENCE {
                    idle = 0;
                    order.clone_from(&best.as_ref().expect("a round has ended").2);
                }
            }
            // Complain: above the target, or above what a little less than the best would be.
            let lowest = best.as_ref().map_or(height, |(lowest, ..)| *lowest);
            let limit = target.max(lowest - (lowest - target).div_ceil(4));
            for at in 1..order.len() {
                let item = order[at];
                if starts[item as usize] + u64::from(problem.size(item)) > limit {
                    let to = at - 1 - random.below(at.min(1 + order.len() / 4) as u64) as usize;
                    order[to..=at].rotate_right(1);
                }
            }
        }
        let (height, starts, _) = best?;
        (height <= limits.height_limit(problem))
            .then(|| Plan::contiguous("squeaky wheel", starts, height, problem))
    }
}

/// For each item, the others that are live with it.
#[derive(Debug)]
pub(super) struct Together {
    first: Vec<usize>,
    others: Vec<u32>,
}

impl Together {
    /// `None` when they are too many for a second look, or time is up.
    pub fn new(problem: &Problem, limits: &Limits<'_>) -> Option<Self> {
        let mut overlaps = Overlaps::new(problem);
        let mut pairs = Vec::new();
        for item in 0..problem.len() as u32 {
            overlaps.query(problem, item, |other| pairs.push((item, other)));
            overlaps.insert(problem, item);
            if pairs.len() as u64 > WORK_LIMIT / 4 || (item % 64 == 0 && limits.is_over()) {
                return None;
            }
        }
        let mut first = vec![0; problem.len() + 1];
        for &(a, b) in &pairs {
            first[a as usize + 1] += 1;
            first[b as usize + 1] += 1;
        }
        for i in 0..problem.len() {
            first[i + 1] += first[i];
        }
        let mut next = first.clone();
        let mut others = vec![0; 2 * pairs.len()];
        for (a, b) in pairs {
            for (item, other) in [(a, b), (b, a)] {
                others[next[item as usize]] = other;
                next[item as usize] += 1;
            }
        }
        Some(Self { first, others })
    }

    pub fn with(&self, item: u32) -> &[u32] {
        &self.others[self.first[item as usize]..self.first[item as usize + 1]]
    }

    /// Places all items in `order`; returns the height.
    fn place(
        &self,
        problem: &Problem,
        order: &[u32],
        lowest: bool,
        starts: &mut [u64],
        around: &mut Vec<(u64, u64)>,
    ) -> u64 {
        starts.fill(u64::MAX);
        let mut height = 0;
        for &item in order {
            around.clear();
            for &other in self.with(item) {
                let start = starts[other as usize];
                if start != u64::MAX {
                    around.push((start, start + u64::from(problem.size(other))));
                }
            }
            let size = u64::from(problem.size(item));
            let start = if lowest {
                lowest_gap(around, size)
            } else {
                tightest(around, size)
            };
            starts[item as usize] = start;
            height = height.max(start + size);
        }
        height
    }
}

fn lowest_gap(around: &mut [(u64, u64)], size: u64) -> u64 {
    around.sort_unstable();
    let mut top = 0;
    for &mut (start, end) in around {
        if start >= top + size {
            break;
        }
        top = top.max(end);
    }
    top
}

/// Xorshift64* (Vigna): the same numbers on every machine.
#[derive(Debug)]
pub(super) struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % limit
    }
}
