//! A device with less memory than it has, and with fewer mappings.
//!
//! May import: `device`, `units`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{forward, lock};
use crate::device::{
    Call, Device, DeviceError, Fence, GpuIdentity, HostMemory, Mappings, MemoryInfo, Moment,
    PageId, RowRefused, StreamId,
};
use crate::units::{Address, Bytes};

/// Lets at most so many bytes of physical pages be alive, and so many mappings
/// ([`mappings_at_most`](Self::mappings_at_most)). What is within the limit is memory of its own
/// ([`Device::memory_source`]): pages that somebody else gives back upstream do not help here.
#[derive(Debug)]
pub struct Limiting<D> {
    upstream: D,
    limit: Bytes,
    /// Mappings that the process may have, where that is less than upstream allows.
    mapping_limit: u64,
    /// At most `limit`. A `create` that is still upstream counts already.
    held: Mutex<Bytes>,
}

impl<D: Device> Limiting<D> {
    /// At most `limit` bytes of pages of `upstream`, of which none is created yet.
    #[must_use]
    pub fn new(upstream: D, limit: Bytes) -> Self {
        Self {
            upstream,
            limit,
            mapping_limit: u64::MAX,
            held: Mutex::default(),
        }
    }

    /// The same with at most `limit` mappings of the process, as upstream counts them: as on a system where
    /// the kernel allows no more. Where upstream does not count them there is no limit.
    #[must_use]
    pub fn mappings_at_most(self, limit: u64) -> Self {
        Self {
            mapping_limit: limit,
            ..self
        }
    }

    /// The device under the limit.
    #[must_use]
    pub fn upstream(&self) -> &D {
        &self.upstream
    }

    /// Bytes of living pages.
    #[must_use]
    pub fn held(&self) -> Bytes {
        *lock(&self.held)
    }

    fn check_mappings(&self) -> Result<(), DeviceError> {
        match self.mappings() {
            Some(mappings) if mappings.count >= mappings.limit => Err(DeviceError::Mappings {
                call: Call::Map,
                mappings,
            }),
            _ => Ok(()),
        }
    }
}

// SAFETY: every method that reserves, creates, maps or allows is upstream's, which keeps the contract; a
// call that is refused here has changed nothing there.
unsafe impl<D: Device> Device for Limiting<D> {
    forward!(self => self.upstream;
        granule, is_host_memory, gpu, check_stream, reserve, unreserve, begin_row, allow, unmap,
        synchronise, fence, wait, is_capturing, trim_pool, write, read, fill, host_memory, copy_stream,
        enqueue_copy, moment, elapsed);

    /// Beyond the limit [`OutOfMemory`](DeviceError::OutOfMemory), with the numbers of the limit.
    fn create(&self) -> Result<PageId, DeviceError> {
        let granule = self.granule();
        {
            let mut held = lock(&self.held);
            match held
                .checked_add(granule)
                .filter(|&after| after <= self.limit)
            {
                Some(after) => *held = after,
                None => {
                    let info = MemoryInfo {
                        free: self.limit.saturating_sub(*held),
                        total: self.limit,
                    };
                    return Err(DeviceError::OutOfMemory { info });
                }
            }
        }
        self.upstream
            .create()
            .inspect_err(|_| lock(&self.held).0 -= granule.0)
    }

    fn release(&self, page: PageId) -> Result<(), DeviceError> {
        self.upstream.release(page)?;
        lock(&self.held).0 -= self.granule().0;
        Ok(())
    }

    /// Not beyond the limit, nor beyond what upstream refuses.
    fn check_room(&self, size: Bytes) -> Result<(), DeviceError> {
        let free = self.limit.saturating_sub(self.held());
        if size > free {
            let total = self.limit;
            let info = MemoryInfo { free, total };
            return Err(DeviceError::OutOfMemory { info });
        }
        self.upstream.check_room(size)
    }

    /// At the limit of mappings [`Mappings`](DeviceError::Mappings).
    fn map(&self, at: Address, page: PageId) -> Result<(), DeviceError> {
        self.check_mappings()?;
        self.upstream.map(at, page)
    }

    fn map_row(&self, at: Address, pages: &[PageId]) -> Result<(), RowRefused> {
        self.check_mappings()
            .map_err(|source| RowRefused { mapped: 0, source })?;
        self.upstream.map_row(at, pages)
    }

    /// What upstream says, with the limit where that is less.
    fn mappings(&self) -> Option<Mappings> {
        let Mappings { count, limit } = self.upstream.mappings()?;
        let limit = limit.min(self.mapping_limit);
        Some(Mappings { count, limit })
    }

    /// What upstream says, or the limit where that is less.
    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        let MemoryInfo { free, total } = self.upstream.memory()?;
        let left = self.limit.saturating_sub(self.held());
        Ok(MemoryInfo {
            free: free.min(left),
            total: total.min(self.limit),
        })
    }
}
