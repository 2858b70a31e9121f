//! Weights that are used group by group on a stream whose work runs when a test says so, and what that work
//! must see.

use std::sync::Arc;

use memory_compiler::device::adaptor::{Counting, Streams, Work};
use memory_compiler::device::{Call, Device, DeviceError, HostMemory, MemoryInfo, StreamId};
use memory_compiler::pager::{Ahead, Group, OnStream, Pager};
use memory_compiler::{Address, Bytes};

use super::devices::{CountingHost, limited_host};

pub const PAGE: u64 = 4096;
/// Where work is enqueued.
pub const WORK: StreamId = StreamId(1);

/// Streams over a host that can fail.
pub type StreamedHost = Arc<Counting<Streams<CountingHost>>>;

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % end
    }

    /// What a call of a device with `total` bytes may fail with.
    pub fn device_error(&mut self, total: Bytes) -> DeviceError {
        match self.below(3) {
            0 => DeviceError::NotReady,
            1 => DeviceError::OutOfMemory {
                info: MemoryInfo {
                    free: Bytes::ZERO,
                    total,
                },
            },
            _ => DeviceError::Driver {
                call: Call::Map,
                code: 1,
            },
        }
    }
}

pub fn pages(count: u64) -> Bytes {
    Bytes(count * PAGE)
}

pub fn device() -> StreamedHost {
    let host = limited_host(Bytes(PAGE), Bytes(u64::MAX));
    Arc::new(Counting::new(Streams::new(host)))
}

/// A model: groups of weights, one after the other, in an image of the host.
pub struct Model {
    pub ahead: Ahead,
    pub groups: Vec<(Group, Bytes, Bytes)>,
    pub image: Arc<HostMemory>,
    pub base: Address,
}

/// Work that reads, and what it must see.
pub struct Read {
    pub work: Work,
    pub truth: Vec<u8>,
}

impl Model {
    /// Groups of these sizes in bytes.
    pub fn new(device: &StreamedHost, pager: &Pager, sizes: &[u64], seed: u64) -> Self {
        let size = Bytes(sizes.iter().sum());
        let range = pager.range(size).unwrap();
        let base = range.base();
        let mut image = device.host_memory(size).unwrap();
        let mut random = Random(seed);
        for word in image.bytes_mut().chunks_mut(8) {
            let bytes = random.below(u64::MAX).to_le_bytes();
            word.copy_from_slice(&bytes[..word.len()]);
        }
        let image = Arc::new(image);
        let shared: Arc<dyn Device> = Arc::clone(device) as _;
        let carrier = OnStream::new(shared, WORK, Arc::clone(&image)).unwrap();
        let mut ahead = Ahead::new(range, Box::new(carrier));
        let mut offset = 0;
        let groups = sizes.iter().map(|&size| {
            let part = (Bytes(offset), Bytes(size));
            offset += size;
            (ahead.group([part]).unwrap(), part.0, part.1)
        });
        let groups = groups.collect();
        Self {
            ahead,
            groups,
            image,
            base,
        }
    }

    pub fn read(&self, device: &StreamedHost, group: usize) -> Read {
        self.read_part(device, group, self.groups[group].2)
    }

    /// Reads the first `size` bytes of a group.
    pub fn read_part(&self, device: &StreamedHost, group: usize, size: Bytes) -> Read {
        let (_, offset, _) = self.groups[group];
        let at = Address(self.base.0 + offset.0);
        Read {
            work: device.upstream().enqueue_read(WORK, at, size),
            truth: self.image.bytes()[offset.0 as usize..(offset.0 + size.0) as usize].to_vec(),
        }
    }

    /// Enters a group, enqueues work that reads it twice, leaves it.
    pub fn run(&mut self, device: &StreamedHost, group: usize, reads: &mut Vec<Read>) {
        self.ahead.enter(self.groups[group].0).unwrap();
        reads.push(self.read(device, group));
        reads.push(self.read(device, group));
        self.ahead.leave(self.groups[group].0);
    }

    pub fn step(&mut self, device: &StreamedHost, reads: &mut Vec<Read>) {
        (0..self.groups.len()).for_each(|group| self.run(device, group, reads));
    }
}

pub fn check(device: &StreamedHost, reads: &mut Vec<Read>) {
    for read in reads.drain(..) {
        match device.upstream().saw(read.work) {
            Some(Ok(seen)) => assert!(seen == read.truth, "work read other bytes than the weights"),
            other => panic!("work that did not read: {other:?}"),
        }
    }
}
