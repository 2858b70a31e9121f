//! The placed items whose lifespans meet a given item's, in time proportional to their number.
//!
//! ```text
//!   lifespan asked for        |-----------------|
//!   live at its begin     |-------|                    lists on the way up a tree over time
//!   begins inside it              |---|   |---------|  list of each time, empty ones skipped
//! ```

use super::problem::Problem;
use crate::bits::BitSet;

const NONE: u32 = u32::MAX;

/// See the module's page.
#[derive(Clone, Debug)]
pub(super) struct Overlaps {
    /// Leaves of the tree: a power of two.
    leaves: u32,
    /// First cell of the list of each tree node.
    nodes: Vec<u32>,
    /// First cell of the list of the lifespans that begin at a time.
    begins: Vec<u32>,
    beginning: BitSet,
    /// `(item, next cell)`.
    cells: Vec<(u32, u32)>,
    /// Last query that met an item.
    met: Vec<u32>,
    query: u32,
}

impl Overlaps {
    pub fn new(problem: &Problem) -> Self {
        let leaves = problem.time_count().max(1).next_power_of_two();
        Self {
            leaves,
            nodes: vec![NONE; 2 * leaves as usize],
            begins: vec![NONE; leaves as usize],
            beginning: BitSet::default(),
            cells: Vec::with_capacity(problem.len() * 8),
            met: vec![0; problem.len()],
            query: 0,
        }
    }

    pub fn insert(&mut self, problem: &Problem, item: u32) {
        for &(begin, end) in problem.lifespans(item) {
            push(&mut self.cells, &mut self.begins[begin as usize], item);
            self.beginning.insert(begin);
            let (mut left, mut right) = (begin + self.leaves, end + self.leaves);
            while left < right {
                if left & 1 == 1 {
                    push(&mut self.cells, &mut self.nodes[left as usize], item);
                    left += 1;
                }
                if right & 1 == 1 {
                    right -= 1;
                    push(&mut self.cells, &mut self.nodes[right as usize], item);
                }
                (left, right) = (left / 2, right / 2);
            }
        }
    }

    /// Calls `found` once for each inserted item that is live in a lifespan of `item`.
    pub fn query(&mut self, problem: &Problem, item: u32, mut found: impl FnMut(u32)) {
        self.query += 1;
        for &(begin, end) in problem.lifespans(item) {
            let mut node = begin + self.leaves;
            while node > 0 {
                visit(
                    &self.cells,
                    self.nodes[node as usize],
                    &mut self.met,
                    self.query,
                    &mut found,
                );
                node /= 2;
            }
            let mut at = begin + 1;
            while let Some(time) = self.beginning.next(at).filter(|&time| time < end) {
                visit(
                    &self.cells,
                    self.begins[time as usize],
                    &mut self.met,
                    self.query,
                    &mut found,
                );
                at = time + 1;
            }
        }
    }
}

fn push(cells: &mut Vec<(u32, u32)>, head: &mut u32, item: u32) {
    cells.push((item, *head));
    *head = (cells.len() - 1) as u32;
}

fn visit(
    cells: &[(u32, u32)],
    mut cell: u32,
    met: &mut [u32],
    query: u32,
    found: &mut impl FnMut(u32),
) {
    while cell != NONE {
        let (item, next) = cells[cell as usize];
        if met[item as usize] != query {
            met[item as usize] = query;
            found(item);
        }
        cell = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;
    use std::collections::BTreeSet;

    #[test]
    fn agrees_with_comparing_every_pair() {
        let mut random = 7_u64;
        let mut below = |limit: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % limit
        };
        let items: Vec<_> = (0..150)
            .map(|_| {
                let spans: Vec<_> = (0..1 + below(3))
                    .map(|_| {
                        let begin = below(300);
                        begin..begin + 1 + below(40)
                    })
                    .collect();
                (Bytes(512), spans)
            })
            .collect();
        let problem = Problem::new(Bytes(512), items.clone()).unwrap();
        let mut overlaps = Overlaps::new(&problem);
        for item in 0..150_u32 {
            let mut found = BTreeSet::new();
            overlaps.query(&problem, item, |other| {
                assert!(found.insert(other), "met once")
            });
            let meets = |other: &u32| {
                items[*other as usize].1.iter().any(|a| {
                    items[item as usize]
                        .1
                        .iter()
                        .any(|b| a.start < b.end && b.start < a.end)
                })
            };
            assert_eq!(found, (0..item).filter(meets).collect());
            overlaps.insert(&problem, item);
        }
    }
}
