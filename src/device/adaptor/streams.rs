//! Streams whose work runs when a test says so.
//!
//! ```text
//!   stream 1   read A | fence f                  nothing has run yet
//!   stream 2   wait f | write A                  the write cannot run before the read
//! ```
//!
//! Each stream is a queue that runs from its head; a wait at the head holds its stream until the work
//! before the fence is done. A fence names only work enqueued before it, so some head can always run.
//!
//! May import: `device`, `units`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{forward, lock};
use crate::device::{
    Call, Device, DeviceError, Fence, GpuIdentity, HostMemory, Mappings, MemoryInfo, Moment,
    NO_TIME, OUTSIDE, PageId, RowRefused, StreamId,
};
use crate::units::{Address, Bytes};

/// Simulated streams over a device: work is enqueued, and runs in an order that a seed decides.
///
/// A test that frees a buffer while work of another stream is still enqueued proves with it that the
/// buffer is not overwritten early: every seed is another legal order, and each read tells what it
/// saw. Only [`enqueue_read`](Streams::enqueue_read), [`enqueue_write`](Streams::enqueue_write) and
/// [`Device::enqueue_copy`] are queued; [`Device::read`], [`write`](Device::write) and [`fill`](Device::fill) act at once.
/// Work whose memory is gone by the time it runs has failed, which its result says.
///
/// Time is simulated too, whatever the order is: a byte takes a nanosecond, streams run beside each other, and one
/// that waits goes on when what it waits for was over.
#[derive(Debug)]
pub struct Streams<D> {
    upstream: D,
    queues: Mutex<Queues>,
}

/// A piece of work on a stream, to ask for what it saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Work(u64);

#[derive(Debug, Default)]
struct Queues {
    streams: BTreeMap<u64, Queue>,
    /// Fences issued and not yet waited for.
    fences: BTreeMap<u64, Point>,
    /// Finished work: what a read saw, nothing for a write.
    results: BTreeMap<Work, Result<Vec<u8>, DeviceError>>,
    next_fence: u64,
    next_work: u64,
    /// Streams that are captured.
    capturing: BTreeSet<u64>,
    /// Moments that were not asked for yet, in simulated nanoseconds once they are reached.
    moments: BTreeMap<u64, Option<u64>>,
    next_moment: u64,
}

/// One stream. Items ever enqueued = `done` + the ones in the queue.
#[derive(Debug, Default)]
struct Queue {
    items: VecDeque<Item>,
    done: u64,
    /// When each of them was over, in simulated nanoseconds.
    over: Vec<u64>,
}

impl Queue {
    /// When the first `count` items were over.
    fn over_at(&self, count: u64) -> u64 {
        let last = count.checked_sub(1);
        last.map_or(0, |last| self.over[last as usize])
    }
}

/// The first `count` items of a stream.
#[derive(Clone, Copy, Debug)]
struct Point {
    stream: u64,
    count: u64,
}

#[derive(Debug)]
enum Item {
    Read {
        work: Work,
        at: Address,
        size: Bytes,
    },
    Write {
        work: Work,
        at: Address,
        bytes: Vec<u8>,
    },
    Wait(Point),
    Moment(u64),
}

impl Queues {
    fn new_work(&mut self) -> Work {
        self.next_work += 1;
        Work(self.next_work - 1)
    }

    fn is_done(&self, point: Point) -> bool {
        self.streams
            .get(&point.stream)
            .map_or(0, |queue| queue.done)
            >= point.count
    }

    /// Streams whose head can run now.
    fn runnable(&self) -> Vec<u64> {
        let head_can_run = |queue: &Queue| match queue.items.front() {
            None => false,
            Some(Item::Wait(point)) => self.is_done(*point),
            Some(Item::Read { .. } | Item::Write { .. } | Item::Moment(_)) => true,
        };
        let able = self.streams.iter().filter(|(_, queue)| head_can_run(queue));
        able.map(|(&stream, _)| stream).collect()
    }
}

impl<D: Device> Streams<D> {
    /// Idle streams over `upstream`, whose own streams are never asked.
    #[must_use]
    pub fn new(upstream: D) -> Self {
        Self {
            upstream,
            queues: Mutex::default(),
        }
    }

    /// The device under the streams.
    #[must_use]
    pub fn upstream(&self) -> &D {
        &self.upstream
    }

    /// Enqueues a read of `size` bytes at `at`; [`saw`](Streams::saw) tells what it read.
    pub fn enqueue_read(&self, stream: StreamId, at: Address, size: Bytes) -> Work {
        let mut queues = lock(&self.queues);
        let work = queues.new_work();
        queues
            .streams
            .entry(stream.0)
            .or_default()
            .items
            .push_back(Item::Read { work, at, size });
        work
    }

    /// Enqueues a write of `bytes` to `at`.
    pub fn enqueue_write(&self, stream: StreamId, at: Address, bytes: &[u8]) -> Work {
        let bytes = bytes.to_vec();
        let mut queues = lock(&self.queues);
        let work = queues.new_work();
        queues
            .streams
            .entry(stream.0)
            .or_default()
            .items
            .push_back(Item::Write { work, at, bytes });
        work
    }

    /// Begins or ends the capture of a stream into a graph; from the one to the other it waits for no fence.
    pub fn set_capturing(&self, stream: StreamId, capturing: bool) {
        let streams = &mut lock(&self.queues).capturing;
        if capturing {
            streams.insert(stream.0);
        } else {
            streams.remove(&stream.0);
        }
    }

    /// Runs everything that is enqueued, in an order of the streams that `seed` decides: bursts of
    /// random length, so that one stream may run far ahead of another.
    pub fn run_all(&self, seed: u64) {
        let mut random = seed;
        loop {
            let runnable = lock(&self.queues).runnable();
            let Some(last) = runnable.len().checked_sub(1) else {
                break;
            };
            let choice = split_mix(&mut random);
            let stream = runnable[(choice % (last as u64 + 1)) as usize];
            let burst = 1 << (choice >> 60);
            for _ in 0..burst {
                if !self.run_next(StreamId(stream)) {
                    break;
                }
            }
        }
    }

    /// Runs what stands at the head of `stream`. Returns whether something ran: not when the stream is
    /// idle or waits for another one.
    pub fn run_next(&self, stream: StreamId) -> bool {
        let item = {
            let mut queues = lock(&self.queues);
            if !queues.runnable().contains(&stream.0) {
                return false;
            }
            queues
                .streams
                .get_mut(&stream.0)
                .and_then(|queue| queue.items.pop_front())
        };
        let Some(item) = item else { return false };
        let (mut takes, mut waits_for, mut moment) = (0, None, None);
        let result = match item {
            Item::Read { work, at, size } => {
                takes = size.0;
                let mut bytes = vec![0; size.0 as usize];
                Some((work, self.upstream.read(at, &mut bytes).map(|()| bytes)))
            }
            Item::Write { work, at, bytes } => {
                takes = bytes.len() as u64;
                Some((work, self.upstream.write(at, &bytes).map(|()| Vec::new())))
            }
            Item::Wait(point) => {
                waits_for = Some(point);
                None
            }
            Item::Moment(number) => {
                moment = Some(number);
                None
            }
        };
        let mut queues = lock(&self.queues);
        queues.results.extend(result);
        let other = waits_for.map(|point| (queues.streams.get(&point.stream), point.count));
        let other = other.map_or(0, |(queue, count)| {
            queue.map_or(0, |queue| queue.over_at(count))
        });
        let queue = queues.streams.entry(stream.0).or_default();
        let over = queue.over_at(queue.done).max(other) + takes;
        queue.done += 1;
        queue.over.push(over);
        queues
            .moments
            .extend(moment.map(|number| (number, Some(over))));
        true
    }

    /// What `work` came to: `None` before it ran; then the bytes that a read saw, no bytes for a write,
    /// or the error that the access was.
    #[must_use]
    pub fn saw(&self, work: Work) -> Option<Result<Vec<u8>, DeviceError>> {
        lock(&self.queues).results.get(&work).cloned()
    }

    /// Moments that were taken, and whose time was not asked for.
    #[must_use]
    pub fn moments(&self) -> usize {
        lock(&self.queues).moments.len()
    }

    /// Items enqueued and not yet run, waits included.
    #[must_use]
    pub fn pending(&self) -> usize {
        lock(&self.queues)
            .streams
            .values()
            .map(|queue| queue.items.len())
            .sum()
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014): enough randomness for an order.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

// SAFETY: every method that reserves, creates, maps or allows is upstream's, which keeps the contract; a
// call that is refused here has changed nothing there.
unsafe impl<D: Device> Device for Streams<D> {
    forward!(self => self.upstream;
        granule, is_host_memory, gpu, memory_source, reserve, unreserve, create, release, map, map_row, begin_row,
        mappings, allow, unmap, trim_pool, memory, check_room, write, read, fill, host_memory);

    fn is_capturing(&self, stream: StreamId) -> bool {
        lock(&self.queues).capturing.contains(&stream.0) || self.upstream.is_capturing(stream)
    }

    /// Runs everything that is enqueued.
    fn synchronise(&self) -> Result<(), DeviceError> {
        self.run_all(0);
        self.upstream.synchronise()
    }

    /// A fence behind what any thread has enqueued on `stream` so far.
    fn fence(&self, stream: StreamId) -> Result<Fence, DeviceError> {
        let mut queues = lock(&self.queues);
        let count = queues
            .streams
            .get(&stream.0)
            .map_or(0, |queue| queue.done + queue.items.len() as u64);
        let fence = queues.next_fence;
        queues.next_fence += 1;
        queues.fences.insert(
            fence,
            Point {
                stream: stream.0,
                count,
            },
        );
        Ok(Fence(fence))
    }

    fn wait(&self, stream: StreamId, fence: Fence) -> Result<(), DeviceError> {
        let mut queues = lock(&self.queues);
        if queues.capturing.contains(&stream.0) {
            return Err(DeviceError::Invalid {
                call: Call::Wait,
                reason: "a captured stream waits for no fence of another",
            });
        }
        let reason = "the fence was issued and not yet waited for";
        let point = queues.fences.remove(&fence.0).ok_or(DeviceError::Invalid {
            call: Call::Wait,
            reason,
        })?;
        queues
            .streams
            .entry(stream.0)
            .or_default()
            .items
            .push_back(Item::Wait(point));
        Ok(())
    }

    /// A moment of simulated time.
    fn moment(&self, stream: StreamId) -> Result<Moment, DeviceError> {
        let mut queues = lock(&self.queues);
        let number = queues.next_moment;
        queues.next_moment += 1;
        let queue = queues.streams.entry(stream.0).or_default();
        queue.items.push_back(Item::Moment(number));
        queues.moments.insert(number, None);
        Ok(Moment(number))
    }

    /// Runs what is enqueued, stream by stream, until both are reached.
    fn elapsed(&self, from: Moment, to: Moment) -> Result<Duration, DeviceError> {
        loop {
            let next = {
                let queues = lock(&self.queues);
                let is_ahead = |moment: &Moment| queues.moments.get(&moment.0) == Some(&None);
                let is_over = ![from, to].iter().any(is_ahead);
                if is_over {
                    None
                } else {
                    queues.runnable().first().copied()
                }
            };
            let Some(next) = next else { break };
            self.run_next(StreamId(next));
        }
        let moments = &mut lock(&self.queues).moments;
        match (moments.remove(&from.0), moments.remove(&to.0)) {
            (Some(Some(from)), Some(Some(to))) => Ok(Duration::from_nanos(to.saturating_sub(from))),
            _ => Err(NO_TIME),
        }
    }

    /// The copy runs when its turn on the stream comes.
    fn enqueue_copy(
        &self,
        stream: StreamId,
        at: Address,
        from: &Arc<HostMemory>,
        offset: Bytes,
        size: Bytes,
    ) -> Result<(), DeviceError> {
        let bytes = from.part(offset, size).ok_or(OUTSIDE)?;
        self.enqueue_write(stream, at, bytes);
        Ok(())
    }
}
