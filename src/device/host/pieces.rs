//! Which pieces of the page file are free, as runs.
//!
//! ```text
//!   file     | 0 | 1 | . | . | 4 | . | 6 |       end = 7; free runs: 2..4 and 5..6
//!   one page:  the lowest free piece, 2          a row of 3: behind the end, 7..10
//! ```
//!
//! Neighbouring places over neighbouring pieces are one mapping of the kernel. So a row of pages that will
//! be mapped together takes the shortest run that holds it, and else the end of the file: a file is as long
//! as it likes, and holds memory only where pages are.
//!
//! Invariants: runs are not empty and not adjacent, end below `end`, and are all in `by_len`; `end - 1` is
//! not free.
//!
//! May import: nothing.

use std::collections::{BTreeMap, BTreeSet};

/// Pieces that belong to no page.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    /// One past the last piece in use.
    end: u64,
    /// Length of each free run, by its first piece.
    runs: BTreeMap<u64, u64>,
    /// `(length, first piece)` of each.
    by_len: BTreeSet<(u64, u64)>,
    /// Pieces in all runs together.
    free: u64,
    /// The next piece of the row that is being created, and how many are left of it.
    row: Option<(u64, u64)>,
}

impl Pieces {
    /// One past the last piece in use.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Free pieces before that one.
    pub(super) fn free_count(&self) -> u64 {
        self.free
    }

    /// From now on `count` pages are created that will stand in a row.
    pub(super) fn begin_row(&mut self, count: u64) {
        let fitting = self.by_len.range((count, 0)..).next();
        let first = fitting.map_or(self.end, |&(_, first)| first);
        self.row = (count > 1).then_some((first, count));
    }

    /// The row goes on nowhere.
    pub(super) fn end_row(&mut self) {
        self.row = None;
    }

    /// Whether a row is being created.
    pub(super) fn is_in_row(&self) -> bool {
        self.row.is_some()
    }

    /// The piece of the next page.
    pub(super) fn next(&self) -> u64 {
        let lowest = || self.runs.first_key_value().map(|(&first, _)| first);
        let in_row = self.row.map(|(piece, _)| piece);
        in_row
            .filter(|&piece| self.is_free(piece))
            .or_else(lowest)
            .unwrap_or(self.end)
    }

    fn is_free(&self, piece: u64) -> bool {
        let below = self.runs.range(..=piece).next_back();
        piece >= self.end || below.is_some_and(|(first, len)| piece < first + len)
    }

    /// Takes a free piece.
    pub(super) fn take(&mut self, piece: u64) {
        if let Some((next, left)) = self.row {
            self.row = (next == piece && left > 1).then_some((next + 1, left - 1));
        }
        if piece >= self.end {
            let end = std::mem::replace(&mut self.end, piece + 1);
            self.insert(end, piece - end);
            return;
        }
        let below = self.runs.range(..=piece).next_back();
        let (&first, &len) = below.expect("a free piece is in a run");
        self.remove(first, len);
        self.insert(first, piece - first);
        self.insert(piece + 1, first + len - piece - 1);
    }

    /// Gives a piece back.
    pub(super) fn give(&mut self, piece: u64) {
        let (mut first, mut len) = (piece, 1);
        if let Some((&below, &below_len)) = self.runs.range(..piece).next_back()
            && below + below_len == piece
        {
            self.remove(below, below_len);
            (first, len) = (below, below_len + 1);
        }
        if let Some(&above_len) = self.runs.get(&(piece + 1)) {
            self.remove(piece + 1, above_len);
            len += above_len;
        }
        if first + len == self.end {
            self.end = first;
        } else {
            self.insert(first, len);
        }
    }

    fn insert(&mut self, first: u64, len: u64) {
        if len > 0 {
            self.free += len;
            self.runs.insert(first, len);
            self.by_len.insert((len, first));
        }
    }

    fn remove(&mut self, first: u64, len: u64) {
        self.free -= len;
        self.runs.remove(&first);
        self.by_len.remove(&(len, first));
    }
}

#[cfg(test)]
mod tests {
    use super::Pieces;
    use std::collections::BTreeSet;

    #[test]
    fn runs_agree_with_a_set_of_pieces_and_rows_are_consecutive() {
        let (mut pieces, mut used) = (Pieces::default(), BTreeSet::new());
        let mut random = 1_u64;
        for round in 0..20_000_u64 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let number = random >> 40;
            if number.is_multiple_of(8) {
                let count = 1 + number / 8 % 9;
                pieces.begin_row(count);
                let first = pieces.next();
                for piece in (first..).take(count as usize) {
                    assert_eq!(pieces.next(), piece, "round {round}");
                    pieces.take(piece);
                    assert!(used.insert(piece));
                }
                assert!(!pieces.is_in_row());
            } else if number.is_multiple_of(2) {
                let lowest = (0..).find(|piece| !used.contains(piece)).expect("one");
                assert_eq!(pieces.next(), lowest, "round {round}");
                pieces.take(lowest);
                used.insert(lowest);
            } else if let Some(&piece) = used.iter().nth(number as usize % used.len().max(1)) {
                used.remove(&piece);
                pieces.give(piece);
            }
            assert_eq!(pieces.end, used.last().map_or(0, |last| last + 1));
            let free = pieces
                .runs
                .iter()
                .flat_map(|(first, len)| *first..first + len);
            assert_eq!(free.clone().count() as u64, pieces.free_count());
            assert!(free.eq((0..pieces.end()).filter(|piece| !used.contains(piece))));
            assert_eq!(pieces.runs.len(), pieces.by_len.len());
        }
    }

    #[test]
    fn a_row_that_cannot_go_on_goes_on_at_the_lowest_free_piece() {
        let mut pieces = Pieces::default();
        (0..4).for_each(|piece| pieces.take(piece));
        pieces.give(1);
        pieces.begin_row(3);
        assert_eq!(pieces.next(), 4);
        pieces.end_row();
        assert_eq!(pieces.next(), 1);
    }
}
