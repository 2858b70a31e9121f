//! The model's view of physical memory: which buffer owns which bytes of which frame.

use std::collections::{BTreeMap, BTreeSet};

use memory_compiler::Snapshot;

#[derive(Clone, Debug, Default)]
pub struct Memory {
    granule: u64,
    base: u64,
    /// Frame of each virtual page.
    frames: BTreeMap<u64, u32>,
    /// Frame of each virtual page that an edge mentions: must never change.
    pinned: BTreeMap<u64, u32>,
    /// Owner of each physical byte: (frame, first byte in it) to (end, buffer).
    owners: BTreeMap<(u32, u64), (u64, u64)>,
}

impl Memory {
    pub fn new(granule: u64) -> Self {
        Self {
            granule,
            ..Self::default()
        }
    }

    /// The frame bytes under a placement, page by page.
    fn pieces(&self, address: u64, class: u64) -> Vec<(u32, u64, u64)> {
        let (start, end) = (address - self.base, address - self.base + class);
        let pages = start / self.granule..end.div_ceil(self.granule);
        let piece = |page: u64| {
            let frame = *self
                .frames
                .get(&page)
                .unwrap_or_else(|| panic!("page {page} of {address:#x} has no frame"));
            let first = page * self.granule;
            (
                frame,
                start.max(first) - first,
                end.min(first + self.granule) - first,
            )
        };
        pages.map(piece).collect()
    }

    /// Takes over which frames the engine has mapped where.
    pub fn look(&mut self, snapshot: &Snapshot) {
        self.base = snapshot.base.0;
        self.frames = snapshot
            .frames
            .iter()
            .map(|&(page, frame)| (page.into(), frame))
            .collect();
        for (page, frame) in &self.pinned {
            assert_eq!(
                self.frames.get(page),
                Some(frame),
                "the frame of page {page} changed although an edge mentions it"
            );
        }
    }

    /// The pages of all recorded placements keep their frames from now on.
    pub fn pin(&mut self, placements: impl Iterator<Item = (u64, u64)>) {
        let pages = placements.flat_map(|(address, class)| {
            ((address - self.base) / self.granule..).zip(self.pieces(address, class))
        });
        self.pinned = pages.map(|(page, piece)| (page, piece.0)).collect();
    }

    /// The buffers that own a byte of this placement.
    pub fn owners_in(&self, address: u64, class: u64) -> BTreeSet<u64> {
        let owners = |(frame, from, to)| {
            let below = self.owners.range((frame, 0)..(frame, to));
            below
                .filter(move |(_, owner)| owner.0 > from)
                .map(|(_, owner)| owner.1)
        };
        self.pieces(address, class)
            .into_iter()
            .flat_map(owners)
            .collect()
    }

    /// No byte of a frame may belong to two buffers, and no frame may stand twice under one.
    pub fn own(&mut self, address: u64, class: u64) {
        let pieces = self.pieces(address, class);
        let frames: BTreeSet<u32> = pieces.iter().map(|piece| piece.0).collect();
        assert_eq!(
            frames.len(),
            pieces.len(),
            "a frame stands twice under the buffer at {address:#x}"
        );
        let others = self.owners_in(address, class);
        assert!(
            others.is_empty(),
            "bytes of the buffer at {address:#x} belong to {others:x?}"
        );
        for (frame, from, to) in pieces {
            self.owners.insert((frame, from), (to, address));
        }
    }

    pub fn disown(&mut self, address: u64) {
        self.owners.retain(|_, owner| owner.1 != address);
    }

    /// No edge mentions a frame under this buffer.
    pub fn is_apart(&self, address: u64, class: u64) {
        for (frame, ..) in self.pieces(address, class) {
            let mentioned = self.pinned.values().any(|&pinned| pinned == frame);
            assert!(
                !mentioned,
                "an edge mentions frame {frame} of the survivor at {address:#x}"
            );
        }
    }
}
