//! Contiguous: each item in turn goes into the tightest gap that is free in all of its lifespans.
//!
//! ```text
//!   offset  |####|....|#######|..|####|          # items placed before that are live with this one
//!                 gap          gap     and above: the lowest place
//! ```

use super::overlaps::Overlaps;
use super::problem::Problem;
use super::{Limits, Plan, Strategy};

/// Which item goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Size,
    Area,
    Lifespan,
}

impl Order {
    /// The items, first to place first; equal ones as they are numbered.
    pub fn of(self, problem: &Problem) -> Vec<u32> {
        let mut items: Vec<u32> = (0..problem.len() as u32).collect();
        items.sort_by_cached_key(|&item| {
            let (size, lifespan) = (u64::from(problem.size(item)), problem.lifespan_len(item));
            std::cmp::Reverse(match self {
                Self::Size => (size, lifespan),
                Self::Area => (size * lifespan, size),
                Self::Lifespan => (lifespan, size),
            })
        });
        items
    }
}

#[derive(Debug)]
pub(super) struct BestFit {
    order: Order,
}

impl BestFit {
    pub fn new(order: Order) -> Self {
        Self { order }
    }
}

impl Strategy for BestFit {
    fn plan(&self, problem: &Problem, limits: &Limits<'_>) -> Option<Plan> {
        let name = match self.order {
            Order::Size => "best fit by size",
            Order::Area => "best fit by size × lifespan",
            Order::Lifespan => "best fit by lifespan",
        };
        let limit = limits.height_limit(problem);
        let mut overlaps = Overlaps::new(problem);
        let mut starts = vec![0; problem.len()];
        let mut around = Vec::new();
        let mut height = 0;
        for (count, &item) in self.order.of(problem).iter().enumerate() {
            if count % 64 == 0 && limits.is_over() {
                return None;
            }
            around.clear();
            overlaps.query(problem, item, |other| {
                let start = starts[other as usize];
                around.push((start, start + u64::from(problem.size(other))));
            });
            let start = tightest(&mut around, problem.size(item).into());
            starts[item as usize] = start;
            height = height.max(start + u64::from(problem.size(item)));
            if height > limit {
                return None;
            }
            overlaps.insert(problem, item);
        }
        Some(Plan::contiguous(name, starts, height, problem))
    }
}

/// Start of the smallest gap between `around` that takes `size`, the lowest of those; else their top.
/// Leaves `around` sorted.
pub(super) fn tightest(around: &mut [(u64, u64)], size: u64) -> u64 {
    around.sort_unstable();
    let (mut top, mut best) = (0, None);
    for &mut (start, end) in around {
        if let Some(gap) = start.checked_sub(top)
            && gap >= size
            && best.is_none_or(|(tightest, _)| gap < tightest)
        {
            best = Some((gap, top));
        }
        top = top.max(end);
    }
    best.map_or(top, |(_, start)| start)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_tightest_gap_wins_and_else_the_top() {
        let around = || vec![(20, 30), (0, 10), (34, 40), (5, 12)];
        assert_eq!(super::tightest(&mut around(), 3), 30);
        assert_eq!(super::tightest(&mut around(), 5), 12);
        assert_eq!(super::tightest(&mut around(), 9), 40);
        assert_eq!(super::tightest(&mut [], 9), 0);
    }
}
