//! Layer 2: an independent check that live buffers are disjoint.
//!
//! Quadratic, and shares no code with what it checks: it knows addresses, sizes and the frame under
//! each page, nothing of states, gaps or windows.
//!
//! May import: `units`.

use std::collections::HashMap;
use std::fmt;

use crate::units::{Address, Bytes};

/// What is wrong with a set of live buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Two buffers share bytes of a frame, or one buffer stands over a frame twice.
    Shared {
        /// The first buffer.
        first: Address,
        /// The second one; the same when one buffer meets itself.
        second: Address,
        /// The frame.
        frame: u32,
    },
    /// A buffer reaches over a page without a frame.
    Unmapped {
        /// The buffer.
        buffer: Address,
        /// The page without a frame.
        page: Address,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shared {
                first,
                second,
                frame,
            } => write!(f, "{first} and {second} share bytes of frame {frame}"),
            Self::Unmapped { buffer, page } => {
                write!(f, "{buffer} reaches over {page}, which has no frame")
            }
        }
    }
}

/// Checks that no byte of a frame belongs to two of `live`, given the frame under each page.
///
/// # Errors
/// The first [`Fault`] found.
pub fn disjoint(
    live: &[(Address, Bytes)],
    granule: Bytes,
    frame_at: impl Fn(Address) -> Option<u32>,
) -> Result<(), Fault> {
    // (frame, first byte in it, end, buffer)
    let mut pieces: Vec<(u32, u64, u64, Address)> = Vec::new();
    for &(buffer, size) in live {
        let (mut at, end) = (buffer.0, buffer.0 + size.0);
        while at < end {
            let page = at - at % granule.0;
            let piece_end = end.min(page + granule.0);
            let frame = frame_at(Address(page)).ok_or(Fault::Unmapped {
                buffer,
                page: Address(page),
            })?;
            pieces.push((frame, at - page, piece_end - page, buffer));
            at = piece_end;
        }
    }
    for (i, a) in pieces.iter().enumerate() {
        for b in &pieces[i + 1..] {
            let overlap = a.0 == b.0 && a.1 < b.2 && b.1 < a.2;
            if overlap || (a.0 == b.0 && a.3 == b.3) {
                return Err(Fault::Shared {
                    first: a.3,
                    second: b.3,
                    frame: a.0,
                });
            }
        }
    }
    Ok(())
}

/// An item of a plan: where it lies in virtual units, and when it is live (half-open).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed<'a> {
    /// First unit.
    pub start: u64,
    /// Units.
    pub len: u64,
    /// When it is live.
    pub lifespans: &'a [(u32, u32)],
}

/// What is wrong with a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanFault {
    /// Two items that are live at once share a unit of a frame; the same item twice when it stands over
    /// a frame twice.
    #[error("items {first} and {second} are live together and share unit {unit} of frame {frame}")]
    Shared {
        /// The item placed first in the check.
        first: usize,
        /// The other one.
        second: usize,
        /// The frame.
        frame: u32,
        /// The unit in it.
        unit: u64,
    },
    /// An item reaches over a page without a frame.
    #[error("item {item} reaches over page {page}, which has no frame")]
    Unmapped {
        /// The item.
        item: usize,
        /// The page.
        page: u64,
    },
}

/// Checks that items which are live at once share no unit of a frame.
///
/// Goes through time, and at each beginning compares the item with every live piece in the frames that
/// it touches: quadratic in the pieces of a frame that are live at once.
///
/// # Errors
/// The first [`PlanFault`] found.
pub(crate) fn plan(
    items: &[Placed<'_>],
    page_units: u64,
    frame_at: impl Fn(u64) -> Option<u32>,
) -> Result<(), PlanFault> {
    // Ends come before the beginnings of the same time.
    let mut events: Vec<(u32, bool, usize)> = Vec::new();
    for (item, placed) in items.iter().enumerate() {
        for &(begin, end) in placed.lifespans {
            events.push((begin, true, item));
            events.push((end, false, item));
        }
    }
    events.sort_unstable();
    let mut live: HashMap<u32, Vec<(u64, u64, usize)>> = HashMap::new();
    for (_, begins, item) in events {
        let Placed { start, len, .. } = items[item];
        let mut at = start;
        while at < start + len {
            let page = at / page_units;
            let end = (start + len).min((page + 1) * page_units);
            let frame = frame_at(page).ok_or(PlanFault::Unmapped { item, page })?;
            let pieces = live.entry(frame).or_default();
            if begins {
                let (from, to) = (at % page_units, at % page_units + (end - at));
                for &(other_from, other_to, other) in &*pieces {
                    if other == item || (from < other_to && other_from < to) {
                        let unit = from.max(other_from);
                        return Err(PlanFault::Shared {
                            first: other,
                            second: item,
                            frame,
                            unit,
                        });
                    }
                }
                pieces.push((from, to, item));
            } else {
                pieces.retain(|&(_, _, other)| other != item);
            }
            at = end;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: Bytes = Bytes(1024);

    fn check(live: &[(u64, u64)], frames: &[u32]) -> Result<(), Fault> {
        let live: Vec<_> = live
            .iter()
            .map(|&(at, size)| (Address(at), Bytes(size)))
            .collect();
        disjoint(&live, GRANULE, |page| {
            frames.get((page.0 / GRANULE.0) as usize).copied()
        })
    }

    #[test]
    fn aliased_pages_with_different_bytes_are_disjoint() {
        assert_eq!(check(&[(0, 512), (1536, 512)], &[4, 4]), Ok(()));
    }

    #[test]
    fn one_byte_of_a_frame_in_two_buffers_is_found() {
        let fault = Fault::Shared {
            first: Address(0),
            second: Address(1024),
            frame: 4,
        };
        assert_eq!(check(&[(0, 513), (1024, 1024)], &[4, 4]), Err(fault));
    }

    #[test]
    fn a_buffer_that_stands_over_a_frame_twice_is_found() {
        let fault = Fault::Shared {
            first: Address(0),
            second: Address(0),
            frame: 4,
        };
        assert_eq!(check(&[(0, 1536)], &[4, 4]), Err(fault));
    }

    #[test]
    fn a_page_without_a_frame_is_found() {
        let fault = Fault::Unmapped {
            buffer: Address(512),
            page: Address(1024),
        };
        assert_eq!(check(&[(512, 1024)], &[4]), Err(fault));
    }

    type Item<'a> = (u64, u64, &'a [(u32, u32)]);

    fn check_plan(items: &[Item<'_>], frames: &[u32]) -> Result<(), PlanFault> {
        let items: Vec<_> = items
            .iter()
            .map(|&(start, len, lifespans)| Placed {
                start,
                len,
                lifespans,
            })
            .collect();
        plan(&items, 4, |page| frames.get(page as usize).copied())
    }

    #[test]
    fn items_may_share_a_place_while_their_lifespans_only_touch() {
        assert_eq!(
            check_plan(&[(0, 4, &[(0, 2), (5, 6)]), (0, 3, &[(2, 5)])], &[0]),
            Ok(())
        );
    }

    #[test]
    fn items_that_meet_in_a_later_lifespan_are_found() {
        let fault = PlanFault::Shared {
            first: 1,
            second: 0,
            frame: 0,
            unit: 2,
        };
        assert_eq!(
            check_plan(&[(0, 3, &[(0, 1), (5, 9)]), (2, 2, &[(2, 6)])], &[0]),
            Err(fault)
        );
    }

    #[test]
    fn items_that_meet_through_an_alias_are_found() {
        let fault = PlanFault::Shared {
            first: 0,
            second: 1,
            frame: 7,
            unit: 1,
        };
        assert_eq!(
            check_plan(&[(0, 2, &[(0, 3)]), (5, 2, &[(1, 2)])], &[7, 7]),
            Err(fault)
        );
        assert_eq!(
            check_plan(&[(0, 2, &[(0, 3)]), (6, 2, &[(1, 2)])], &[7, 7]),
            Ok(())
        );
    }

    #[test]
    fn an_item_that_stands_over_a_frame_twice_or_over_none_is_found() {
        let fault = PlanFault::Shared {
            first: 0,
            second: 0,
            frame: 7,
            unit: 3,
        };
        assert_eq!(check_plan(&[(3, 2, &[(0, 1)])], &[7, 7]), Err(fault));
        assert_eq!(
            check_plan(&[(3, 2, &[(0, 1)])], &[7]),
            Err(PlanFault::Unmapped { item: 0, page: 1 })
        );
    }
}
