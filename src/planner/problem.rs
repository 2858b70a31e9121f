//! What is to be placed: items, each with a size and the lifespans in which it is live.

use std::ops::Range;

use crate::units::{ALIGNMENT, Bytes};

/// A number of 512 B units.
pub type Units = u32;

/// One thing to place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item<'p> {
    pub size: Units,
    /// Ascending, disjoint, not empty.
    pub lifespans: &'p [(u32, u32)],
}

/// Why a problem cannot be stated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// A page is at least 512 B and a multiple of it, and at most 2 TiB.
    #[error("a page of {page} is not a multiple of {ALIGNMENT} below 2 TiB")]
    Page {
        /// The page.
        page: Bytes,
    },
    /// An item is larger than 2 TiB.
    #[error("item {item}: {size:#} is more than 2 TiB")]
    Size {
        /// Its number.
        item: usize,
        /// Its size.
        size: Bytes,
    },
    /// A lifespan ends before it begins.
    #[error("item {item}: the lifespan {begin}..{end} is empty")]
    Lifespan {
        /// Its number.
        item: usize,
        /// Where the lifespan begins.
        begin: u64,
        /// Where it ends.
        end: u64,
    },
    /// More than 2³² items, lifespans or bytes beyond 64 bits.
    #[error("too many items")]
    TooLarge,
}

/// Items with their lifespans on one time line, and the page size. An item may be live in several
/// intervals: the branches of a step graph are laid end to end, and a placement that two of them share
/// is one item.
#[derive(Clone, Debug, Default)]
pub struct Problem {
    page_units: Units,
    sizes: Vec<Units>,
    /// The lifespans of item n are `spans[first[n]..first[n + 1]]`.
    first: Vec<u32>,
    /// Times are numbered by the distinct times at which a lifespan begins: only there does a set of
    /// live items grow, so two lifespans meet exactly if they do in these numbers.
    spans: Vec<(u32, u32)>,
    time_count: u32,
    live_peak_units: u64,
}

impl Problem {
    /// Items are numbered from 0 in the order given; sizes are rounded up to 512 B, an empty one counts
    /// as 512 B. Lifespans are half open, in any order; those that meet or touch are joined.
    ///
    /// # Errors
    /// [`ProblemError`].
    pub fn new<L>(
        page: Bytes,
        items: impl IntoIterator<Item = (Bytes, L)>,
    ) -> Result<Self, ProblemError>
    where
        L: IntoIterator<Item = Range<u64>>,
    {
        let wrong_page = ProblemError::Page { page };
        if page.0 == 0 || !page.0.is_multiple_of(ALIGNMENT.0) {
            return Err(wrong_page);
        }
        let page_units = Units::try_from(page.0 / ALIGNMENT.0).map_err(|_| wrong_page)?;
        let mut problem = Self {
            page_units,
            first: vec![0],
            ..Self::default()
        };
        let mut raw: Vec<Range<u64>> = Vec::new();
        let mut total = 0_u64;
        for (item, (size, lifespans)) in items.into_iter().enumerate() {
            let units = Units::try_from(size.0.div_ceil(ALIGNMENT.0).max(1))
                .map_err(|_| ProblemError::Size { item, size })?;
            // Every offset that a strategy computes is below twice the sum of all sizes and pages.
            total = total
                .checked_add(u64::from(units) + 2 * u64::from(page_units))
                .filter(|&total| total < u64::MAX >> 12)
                .ok_or(ProblemError::TooLarge)?;
            problem.sizes.push(units);
            let from = raw.len();
            for lifespan in lifespans {
                if lifespan.is_empty() {
                    return Err(ProblemError::Lifespan {
                        item,
                        begin: lifespan.start,
                        end: lifespan.end,
                    });
                }
                raw.push(lifespan);
            }
            raw[from..].sort_unstable_by_key(|lifespan| lifespan.start);
            let mut kept = from;
            for at in from..raw.len() {
                let next = raw[at].clone();
                if kept > from && raw[kept - 1].end >= next.start {
                    raw[kept - 1].end = raw[kept - 1].end.max(next.end);
                } else {
                    raw[kept] = next;
                    kept += 1;
                }
            }
            raw.truncate(kept);
            if kept == from {
                return Err(ProblemError::Lifespan {
                    item,
                    begin: 0,
                    end: 0,
                });
            }
            problem
                .first
                .push(u32::try_from(raw.len()).map_err(|_| ProblemError::TooLarge)?);
        }
        let mut times: Vec<u64> = raw.iter().map(|lifespan| lifespan.start).collect();
        times.sort_unstable();
        times.dedup();
        let number = |time: u64| times.partition_point(|&at| at < time) as u32;
        problem.spans = raw
            .iter()
            .map(|lifespan| (number(lifespan.start), number(lifespan.end)))
            .collect();
        problem.time_count = times.len() as u32;
        problem.live_peak_units = problem.find_live_peak();
        Ok(problem)
    }

    fn find_live_peak(&self) -> u64 {
        let mut change = vec![0_i64; self.time_count as usize + 1];
        for item in self.items() {
            for &(begin, end) in item.lifespans {
                change[begin as usize] += i64::from(item.size);
                change[end as usize] -= i64::from(item.size);
            }
        }
        let mut live = 0;
        change
            .iter()
            .map(|change| {
                live += change;
                live
            })
            .max()
            .unwrap_or(0)
            .unsigned_abs()
    }

    /// Items.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Whether there is nothing to place.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// The page size.
    #[must_use]
    pub fn page(&self) -> Bytes {
        Bytes(u64::from(self.page_units) * ALIGNMENT.0)
    }

    /// L: the most bytes live at once, each size rounded up to 512 B.
    #[must_use]
    pub fn live_peak(&self) -> Bytes {
        Bytes(self.live_peak_units * ALIGNMENT.0)
    }

    /// L rounded up to a page: no plan holds less.
    #[must_use]
    pub fn floor(&self) -> Bytes {
        Bytes(self.live_peak().0.div_ceil(self.page().0) * self.page().0)
    }

    pub(crate) fn page_units(&self) -> Units {
        self.page_units
    }

    pub(crate) fn live_peak_units(&self) -> u64 {
        self.live_peak_units
    }

    /// Times are below this number.
    pub(crate) fn time_count(&self) -> u32 {
        self.time_count
    }

    pub(crate) fn size(&self, item: u32) -> Units {
        self.sizes[item as usize]
    }

    pub(crate) fn lifespans(&self, item: u32) -> &[(u32, u32)] {
        let item = item as usize;
        &self.spans[self.first[item] as usize..self.first[item + 1] as usize]
    }

    /// For how many time numbers an item is live.
    pub(crate) fn lifespan_len(&self, item: u32) -> u64 {
        self.lifespans(item)
            .iter()
            .map(|&(begin, end)| u64::from(end - begin))
            .sum()
    }

    pub(crate) fn items(&self) -> impl Iterator<Item = Item<'_>> {
        (0..self.len() as u32).map(|item| Item {
            size: self.size(item),
            lifespans: self.lifespans(item),
        })
    }
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "an item with one lifespan")]
mod tests {
    use super::*;

    fn problem(items: &[(u64, &[Range<u64>])]) -> Result<Problem, ProblemError> {
        Problem::new(
            Bytes(1024),
            items
                .iter()
                .map(|(size, spans)| (Bytes(*size), spans.iter().cloned())),
        )
    }

    #[test]
    fn lifespans_that_touch_are_joined_and_times_numbered_by_beginnings() {
        let made = problem(&[(512, &[70..90, 10..20, 20..30]), (1, &[30..75])]).unwrap();
        assert_eq!(made.lifespans(0), [(0, 1), (2, 3)]);
        assert_eq!(made.lifespans(1), [(1, 3)]);
        assert_eq!((made.live_peak(), made.floor()), (Bytes(1024), Bytes(1024)));
    }

    #[test]
    fn an_end_and_a_beginning_at_one_time_do_not_meet() {
        let made = problem(&[(512, &[0..5]), (512, &[5..9])]).unwrap();
        assert_eq!(made.live_peak(), Bytes(512));
    }

    #[test]
    fn what_cannot_be_placed_is_refused() {
        #[expect(clippy::reversed_empty_ranges, reason = "the point of the test")]
        let backwards = 5..4;
        let empty = problem(&[(512, &[backwards])]);
        assert_eq!(
            empty.unwrap_err(),
            ProblemError::Lifespan {
                item: 0,
                begin: 5,
                end: 4
            }
        );
        let size = Bytes::gib(2049);
        assert_eq!(
            problem(&[(size.0, &[0..1])]).unwrap_err(),
            ProblemError::Size { item: 0, size }
        );
        for page in [0, 511, 1 << 50] {
            let none = std::iter::empty::<(Bytes, Vec<Range<u64>>)>();
            assert_eq!(
                Problem::new(Bytes(page), none).unwrap_err(),
                ProblemError::Page { page: Bytes(page) }
            );
        }
    }
}
