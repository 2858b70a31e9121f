//! The devices that tests run on: `Host` under a `Counting`, and what may stand on top of that.
//!
//! `MEMORY_COMPILER_DEVICE=cuda` puts the first GPU in the place of `Host`, where a test asks for pages
//! of the GPU's size (feature `cuda`).

use std::sync::Arc;

use memory_compiler::device::adaptor::{Counting, Failing, Limiting};
use memory_compiler::device::{Device, Host};
use memory_compiler::{Address, Bytes};

/// Counts what is asked of it, refused and failed calls included.
pub type CountingHost = Arc<Counting<Failing<Limiting<Arc<dyn Device>>>>>;

pub fn counting_host(granule: Bytes) -> CountingHost {
    limited_host(granule, Bytes(u64::MAX))
}

pub fn limited_host(granule: Bytes, limit: Bytes) -> CountingHost {
    let host = gpu(granule)
        .unwrap_or_else(|| Arc::new(Host::new(granule).expect("this machine has memory")));
    Arc::new(Counting::new(Failing::new(Limiting::new(host, limit))))
}

#[cfg(feature = "cuda")]
fn gpu(granule: Bytes) -> Option<Arc<dyn Device>> {
    if std::env::var("MEMORY_COMPILER_DEVICE").ok()? != "cuda" {
        return None;
    }
    let gpu = memory_compiler::device::Cuda::new(0).expect("a GPU was asked for");
    (gpu.granule() == granule).then(|| Arc::new(gpu) as Arc<dyn Device>)
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: Bytes) -> Option<Arc<dyn Device>> {
    None
}

/// The contents of a live buffer, enough of them to notice another owner: a small buffer in full; of a
/// large one both ends of it and of every page under it.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    pub seed: u64,
    pub size: u64,
}

const END: u64 = 64;
const SMALL: u64 = 4096;

impl Pattern {
    pub fn write(self, device: &dyn Device, address: u64) {
        for (from, to) in self.spots(address, device.granule().0) {
            let wrote = device.write(Address(address + from), &self.bytes(from, to));
            wrote.unwrap_or_else(|error| {
                panic!("writing to the live buffer at {address:#x}: {error}")
            });
        }
    }

    pub fn check(self, device: &dyn Device, address: u64) {
        for (from, to) in self.spots(address, device.granule().0) {
            let expected = self.bytes(from, to);
            let mut seen = vec![0; expected.len()];
            let read = device.read(Address(address + from), &mut seen);
            read.unwrap_or_else(|error| panic!("reading the live buffer at {address:#x}: {error}"));
            assert!(
                seen == expected,
                "bytes {from}..{to} of the live buffer at {address:#x} were overwritten"
            );
        }
    }

    fn spots(self, address: u64, granule: u64) -> Vec<(u64, u64)> {
        if self.size <= SMALL {
            return vec![(0, self.size)];
        }
        let mut borders = vec![0];
        let first = address.next_multiple_of(granule).max(address + 1);
        borders.extend(
            (first..address + self.size)
                .step_by(granule as usize)
                .map(|border| border - address),
        );
        borders.push(self.size);
        let pages = borders.windows(2).filter(|page| page[0] < page[1]);
        pages
            .flat_map(|page| {
                [
                    (page[0], page[1].min(page[0] + END)),
                    (page[0].max(page[1] - page[1].min(END)), page[1]),
                ]
            })
            .collect()
    }

    /// A byte for each offset, other ones for each seed.
    fn bytes(self, from: u64, to: u64) -> Vec<u8> {
        let word = |offset: u64| {
            (self.seed << 20 ^ offset >> 3)
                .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .to_be_bytes()
        };
        (from..to)
            .map(|offset| word(offset)[offset as usize % 8])
            .collect()
    }
}
