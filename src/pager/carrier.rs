//! Who copies the bytes of weights to where they lie, in order with the work that uses them.
//!
//! ```text
//!   work    | a | mark 1 | b | wait for batch 2 | c | …          a stream, or this thread
//!   copies          after 1 | bytes of c | batch 2 |             another stream, or another thread
//! ```
//!
//! Copies run in the order in which they are asked for. A copy that is asked for after [`Carrier::after`]
//! overwrites memory only when the work before that mark is done; work that is enqueued after
//! [`Carrier::arrive`] finds the bytes of that batch.
//!
//! May import: layers 0 and 3; `bookkeeping`.

use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Part;
use crate::bookkeeping::Bookkeeping;
use crate::device::fork::Process;
use crate::device::{Call, Device, DeviceError, Fence, HostMemory, Moment, StreamId};
use crate::units::Bytes;

/// See the module's page. Marks and batches are numbered by the caller, ascending.
pub trait Carrier: fmt::Debug + Send {
    /// Whether copies run beside the work: only then is it worth asking for them early.
    fn is_beside(&self) -> bool;

    /// Work is enqueued on `stream` from now on, behind all work and all copies so far: marks and arrivals are of
    /// that stream. Nothing to do where work runs on no stream.
    ///
    /// # Errors
    /// What the device says; then no work may be enqueued there.
    fn work_on(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let _ = stream;
        Ok(())
    }

    /// Marks what is enqueued of the work so far.
    ///
    /// # Errors
    /// What the device says.
    fn mark(&mut self, mark: u64) -> Result<(), DeviceError>;

    /// Copies that are asked for from now on come after the work before `mark`, and after all that is enqueued
    /// now if that mark was not made.
    ///
    /// # Errors
    /// What the device says; then the copies may not be asked for.
    fn after(&mut self, mark: u64) -> Result<(), DeviceError>;

    /// Asks for the bytes of a part.
    ///
    /// # Errors
    /// What the device says; then the part has any bytes.
    fn copy(&mut self, part: Part) -> Result<(), DeviceError>;

    /// What was asked for so far is `batch`.
    ///
    /// # Errors
    /// What the device says.
    fn close(&mut self, batch: u64) -> Result<(), DeviceError>;

    /// Work from now on comes after the copies of `batch` and of those before.
    ///
    /// # Errors
    /// What the device says, or what a copy met.
    fn arrive(&mut self, batch: u64) -> Result<(), DeviceError>;

    /// Waits until no copy runs.
    ///
    /// # Errors
    /// What the device says.
    fn settle(&mut self) -> Result<(), DeviceError>;

    /// Whether who waits for the device has waited for the copies too: then pages into which they run may be
    /// taken away, which nobody does without waiting.
    fn is_work_of_the_device(&self) -> bool {
        false
    }

    /// How long work has waited for copies so far, where it is known.
    fn waited(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Begins, or ends, to take the times of copies, forgetting those of before.
    fn take_times(&mut self, takes: bool) {
        let _ = takes;
    }

    /// Bytes copied since, and how long that took; `None` where it is not known.
    fn copying(&mut self) -> Option<(Bytes, Duration)> {
        None
    }

    /// Takes the time when the work gets here; `None` where it cannot.
    fn moment(&mut self) -> Option<Moment> {
        None
    }

    /// The time between two moments of the work, which it waits for and forgets.
    fn elapsed(&mut self, from: Moment, to: Moment) -> Option<Duration> {
        let _ = (from, to);
        None
    }
}

/// The most marks that are kept for copies which may never come.
const MARKS: usize = 64;

/// The most waits whose time is still to be asked for: old ones are over long ago.
const WAITS: usize = 1 << 13;

/// Copies on a stream of a device, out of an image of the range in the host's memory: byte `n` of it is byte
/// `n` of the range.
#[derive(Debug)]
pub struct OnStream {
    device: Arc<dyn Device>,
    work: StreamId,
    copies: StreamId,
    image: Arc<HostMemory>,
    marks: VecDeque<(u64, Fence)>,
    /// The last mark that copies wait for.
    passed: u64,
    batches: VecDeque<(u64, Fence)>,
    /// Waits of the work, of which the time was not asked for yet.
    waits: VecDeque<(Moment, Moment)>,
    waited: Duration,
    times: Option<Box<CopyTimes>>,
    process: Process,
}

/// Times of copies that are being taken.
#[derive(Debug, Default)]
struct CopyTimes {
    /// When the batch that is asked for began.
    began: Option<Moment>,
    batches: Vec<(Moment, Moment)>,
    copied: Bytes,
}

impl OnStream {
    /// Copies from `image`, beside what the thread that asks for them enqueues on `work`.
    ///
    /// # Errors
    /// What the device says when it is asked for its stream for copies.
    pub fn new(
        device: Arc<dyn Device>,
        work: StreamId,
        image: Arc<HostMemory>,
    ) -> Result<Self, DeviceError> {
        let copies = device.copy_stream()?;
        Ok(Self {
            device,
            work,
            copies,
            image,
            marks: VecDeque::new(),
            passed: 0,
            batches: VecDeque::new(),
            waits: VecDeque::new(),
            waited: Duration::ZERO,
            times: None,
            process: Process::this(),
        })
    }

    /// Adds the times of the oldest waits up, until `count` are left.
    fn add_waits(&mut self, count: usize) {
        while self.waits.len() > count {
            if let Some((from, to)) = self.waits.pop_front() {
                self.waited += self.device.elapsed(from, to).unwrap_or_default();
            }
        }
    }

    /// Has `stream` wait for the fences up to a number.
    fn pass(
        device: &dyn Device,
        stream: StreamId,
        fences: &mut VecDeque<(u64, Fence)>,
        last: u64,
    ) -> Result<(), DeviceError> {
        while let Some(&(number, fence)) = fences.front() {
            if number > last {
                break;
            }
            device.wait(stream, fence)?;
            fences.pop_front();
        }
        Ok(())
    }
}

impl Carrier for OnStream {
    fn is_beside(&self) -> bool {
        true
    }

    /// Waits for the device. The stream that is left is asked for no fence: it may be destroyed by now, or its handle
    /// have come back for another one.
    fn work_on(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.device.synchronise()?;
        self.work = stream;
        Ok(())
    }

    fn mark(&mut self, mark: u64) -> Result<(), DeviceError> {
        if let (true, Some(&(oldest, _))) = (self.marks.len() >= MARKS, self.marks.front()) {
            Self::pass(&*self.device, self.copies, &mut self.marks, oldest)?;
            self.passed = self.passed.max(oldest);
        }
        self.marks.push_back((mark, self.device.fence(self.work)?));
        Ok(())
    }

    fn after(&mut self, mark: u64) -> Result<(), DeviceError> {
        if mark <= self.passed {
            return Ok(());
        }
        if self.marks.back().is_none_or(|&(newest, _)| newest < mark) {
            self.mark(mark)?;
        }
        Self::pass(&*self.device, self.copies, &mut self.marks, mark)?;
        self.passed = mark;
        Ok(())
    }

    fn copy(&mut self, part: Part) -> Result<(), DeviceError> {
        let Part {
            offset,
            address,
            size,
        } = part;
        // The last page of a range may reach beyond its image.
        let size = size.min(self.image.size().saturating_sub(offset));
        if let Some(times) = &mut self.times {
            times.copied.0 += size.0;
            if times.began.is_none() {
                times.began = self.device.moment(self.copies).ok();
            }
        }
        self.device
            .enqueue_copy(self.copies, address, &self.image, offset, size)
    }

    fn close(&mut self, batch: u64) -> Result<(), DeviceError> {
        if let Some(times) = &mut self.times
            && let Some(began) = times.began.take()
            && let Ok(over) = self.device.moment(self.copies)
        {
            times.batches.push((began, over));
        }
        self.batches
            .push_back((batch, self.device.fence(self.copies)?));
        Ok(())
    }

    fn arrive(&mut self, batch: u64) -> Result<(), DeviceError> {
        let from = self.device.moment(self.work);
        let passed = Self::pass(&*self.device, self.work, &mut self.batches, batch);
        if let (Ok(from), Ok(to)) = (from, self.device.moment(self.work)) {
            self.waits.push_back((from, to));
            self.add_waits(WAITS);
        }
        passed
    }

    fn waited(&mut self) -> Duration {
        self.add_waits(0);
        self.waited
    }

    fn take_times(&mut self, takes: bool) {
        self.times = takes.then(Box::default);
    }

    fn copying(&mut self) -> Option<(Bytes, Duration)> {
        let times = self.times.as_mut()?;
        // A batch that was refused half-way.
        if let Some(began) = times.began.take()
            && let Ok(over) = self.device.moment(self.copies)
        {
            times.batches.push((began, over));
        }
        let mut took = Some(Duration::ZERO);
        for (from, to) in times.batches.drain(..) {
            let batch = self.device.elapsed(from, to).ok();
            took = took.zip(batch).map(|(sum, batch)| sum + batch);
        }
        let copied = std::mem::take(&mut times.copied);
        took.filter(|_| copied > Bytes::ZERO)
            .map(|took| (copied, took))
    }

    fn moment(&mut self) -> Option<Moment> {
        self.device.moment(self.work).ok()
    }

    fn elapsed(&mut self, from: Moment, to: Moment) -> Option<Duration> {
        self.device.elapsed(from, to).ok()
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        self.device.synchronise()
    }

    fn is_work_of_the_device(&self) -> bool {
        true
    }
}

impl Drop for OnStream {
    fn drop(&mut self) {
        if self.process.is_ancestor() {
            return;
        }
        // A device keeps the moments that were not asked for.
        self.add_waits(0);
        let _ = self.copying();
        // It keeps the fences too that were not waited for.
        let fences = self.marks.drain(..).chain(self.batches.drain(..));
        for (_, fence) in fences {
            if let Err(error) = self.device.wait(self.copies, fence) {
                tracing::warn!(%error, "the device keeps a fence of weights");
            }
        }
    }
}

/// Fills a part of a range.
pub type Fill = Box<dyn FnMut(Part) -> Result<(), DeviceError> + Send>;

/// Copies at once, on the thread that asks: for work that is done when its call returns.
pub struct AtOnce(Fill);

impl AtOnce {
    /// Calls `fill` for each part.
    pub fn new(fill: impl FnMut(Part) -> Result<(), DeviceError> + Send + 'static) -> Self {
        Self(Box::new(fill))
    }
}

impl fmt::Debug for AtOnce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AtOnce(..)")
    }
}

impl Carrier for AtOnce {
    fn is_beside(&self) -> bool {
        false
    }

    fn mark(&mut self, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn after(&mut self, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn copy(&mut self, part: Part) -> Result<(), DeviceError> {
        (self.0)(part)
    }

    fn close(&mut self, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn arrive(&mut self, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// What a thread that copies is told.
enum Job {
    Copy(Part),
    Close(u64),
}

#[derive(Debug, Default)]
struct Progress {
    /// Jobs taken care of.
    done: u64,
    /// The last batch of which every copy is done.
    batch: u64,
    error: Option<DeviceError>,
}

/// Copies on a thread of its own: for work that is done when its call returns, on a machine with a
/// processor to spare.
pub struct OnThread {
    jobs: Option<Sender<Job>>,
    progress: Arc<(Mutex<Progress>, Condvar)>,
    asked: u64,
    waited: Duration,
    thread: Option<JoinHandle<()>>,
    process: Process,
}

impl OnThread {
    /// Calls `fill` for each part, on a new thread that ends with this.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn new(
        mut fill: impl FnMut(Part) -> Result<(), DeviceError> + Send + 'static,
    ) -> std::io::Result<Self> {
        let (jobs, inbox): (Sender<Job>, Receiver<Job>) = channel();
        let progress: Arc<(Mutex<Progress>, Condvar)> = Arc::default();
        let told = Arc::clone(&progress);
        let work = move || {
            for job in inbox {
                let (mut batch, mut error) = (None, None);
                match job {
                    Job::Copy(part) => error = fill(part).err(),
                    Job::Close(number) => batch = Some(number),
                }
                let mut progress = told.0.lock().unwrap_or_else(PoisonError::into_inner);
                progress.done += 1;
                progress.batch = batch.unwrap_or(progress.batch);
                progress.error = progress.error.take().or(error);
                told.1.notify_all();
            }
        };
        let thread = std::thread::Builder::new()
            .name("weights".to_owned())
            .spawn(work)?;
        Ok(Self {
            jobs: Some(jobs),
            progress,
            asked: 0,
            waited: Duration::ZERO,
            thread: Some(thread),
            process: Process::this(),
        })
    }

    /// A forked child has no thread that copies.
    fn check_process(&self) -> Result<(), DeviceError> {
        if self.process.is_ancestor() {
            return Err(DeviceError::Forked { call: Call::Write });
        }
        Ok(())
    }

    fn ask(&mut self, job: Job) -> Result<(), DeviceError> {
        self.check_process()?;
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job).is_ok());
        if sent == Some(true) {
            self.asked += 1;
            return Ok(());
        }
        // It ended: a copy panicked.
        Err(DeviceError::Invalid {
            call: Call::Write,
            reason: "the thread that copies weights has ended",
        })
    }

    fn wait(&mut self, is_over: impl Fn(&Progress) -> bool) -> Result<(), DeviceError> {
        self.check_process()?;
        let began = Instant::now();
        let _bookkeeping = Bookkeeping::begin();
        let (lock, changed) = &*self.progress;
        let mut progress = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let is_running = || {
            self.thread
                .as_ref()
                .is_some_and(|thread| !thread.is_finished())
        };
        while !is_over(&progress) && is_running() {
            let (guard, _) = changed
                .wait_timeout(progress, Duration::from_millis(100))
                .unwrap_or_else(PoisonError::into_inner);
            progress = guard;
        }
        let error = progress.error.take();
        let is_over = is_over(&progress);
        drop(progress);
        self.waited += began.elapsed();
        match error {
            Some(error) => Err(error),
            None if is_over => Ok(()),
            None => self.ask(Job::Close(0)),
        }
    }
}

impl fmt::Debug for OnThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnThread")
            .field("asked", &self.asked)
            .finish_non_exhaustive()
    }
}

impl Carrier for OnThread {
    fn is_beside(&self) -> bool {
        true
    }

    fn mark(&mut self, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn after(&mut self, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn copy(&mut self, part: Part) -> Result<(), DeviceError> {
        self.ask(Job::Copy(part))
    }

    fn close(&mut self, batch: u64) -> Result<(), DeviceError> {
        self.ask(Job::Close(batch))
    }

    fn arrive(&mut self, batch: u64) -> Result<(), DeviceError> {
        self.wait(|progress| progress.batch >= batch)
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        let asked = self.asked;
        self.wait(|progress| progress.done >= asked)
    }

    fn waited(&mut self) -> Duration {
        self.waited
    }
}

impl Drop for OnThread {
    fn drop(&mut self) {
        if self.process.is_ancestor() {
            // A forked child has no such thread: it would wait for ever.
            std::mem::forget((self.jobs.take(), self.thread.take()));
            return;
        }
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of it was told as an error already.
            drop(thread.join());
        }
    }
}
