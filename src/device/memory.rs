//! Memory of the host from which copies to a device are enqueued.
//!
//! May import: `units`, `device`, `device/cuda`.

use std::fmt;

#[cfg(feature = "cuda")]
use super::cuda::Locked;
use super::heap_allows;
use crate::units::Bytes;

/// Bytes of the host, of unspecified contents at first. A GPU copies from them beside its other work where they are
/// page-locked, which [`Device::host_memory`](super::Device::host_memory) of a GPU asks for.
///
/// Once copies were enqueued from it, writing to it again and dropping it wait for the device that may still read it.
pub struct HostMemory(Backing);

enum Backing {
    Ordinary(Vec<u8>),
    #[cfg(feature = "cuda")]
    Locked(Locked),
}

impl HostMemory {
    /// Ordinary memory; `None` when there is not so much: on Linux also where the machine, or a control group of
    /// this process, has not so much left, which would end the process and not the call.
    #[must_use]
    pub fn ordinary(size: Bytes) -> Option<Self> {
        let mut bytes = Vec::new();
        let len = usize::try_from(size.0).ok()?;
        if !heap_allows(size) {
            return None;
        }
        bytes.try_reserve_exact(len).ok()?;
        bytes.resize(len, 0);
        Some(Self(Backing::Ordinary(bytes)))
    }

    #[cfg(feature = "cuda")]
    pub(super) fn locked(locked: Locked) -> Self {
        Self(Backing::Locked(locked))
    }

    /// How many bytes it has.
    #[must_use]
    pub fn size(&self) -> Bytes {
        Bytes(self.bytes().len() as u64)
    }

    /// Whether a GPU reads it without the CPU's help.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        match &self.0 {
            Backing::Ordinary(_) => false,
            #[cfg(feature = "cuda")]
            Backing::Locked(_) => true,
        }
    }

    /// All of it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            Backing::Ordinary(bytes) => bytes,
            #[cfg(feature = "cuda")]
            Backing::Locked(locked) => locked.bytes(),
        }
    }

    /// All of it, to be written.
    ///
    /// # Panics
    /// When copies were enqueued from it and the device that they go to has failed.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Backing::Ordinary(bytes) => bytes,
            #[cfg(feature = "cuda")]
            Backing::Locked(locked) => locked.bytes_mut(),
        }
    }

    /// A copy from it is about to be enqueued.
    #[cfg(feature = "cuda")]
    pub(super) fn note_copy(&self) {
        match &self.0 {
            Backing::Ordinary(_) => {}
            Backing::Locked(locked) => locked.note_copy(),
        }
    }

    /// `size` bytes from `offset` on, where there are so many.
    pub(super) fn part(&self, offset: Bytes, size: Bytes) -> Option<&[u8]> {
        let end = offset.checked_add(size)?;
        self.bytes().get(offset.0 as usize..end.0 as usize)
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("size", &self.size())
            .field("is_locked", &self.is_locked())
            .finish()
    }
}
