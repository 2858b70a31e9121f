//! Layer 2: an independent check that live buffers are disjoint.
//!
//! Quadratic, and shares no code with what it checks: it knows addresses, sizes and the frame under
//! each page, nothing of states, gaps or windows.
//!
//! May import: `units`.

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
}
