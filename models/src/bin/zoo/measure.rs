//! One model under several allocators: first what each of them takes, one after the other, then how long
//! steps last, in turn, so that what changes with time changes them all.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor};
use clap::ValueEnum;
use memory_compiler::device::{Cuda, Device as _};
use memory_compiler::{Bytes, hook};
use memory_compiler_candle::Memory;

use crate::fixed;
use crate::networks::Network;

/// Who serves the step's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Allocator {
    /// The driver's stream-ordered allocator.
    Default,
    /// The memory compiler.
    Compiled,
    /// The floor: planned addresses in one block, without any check.
    Fixed,
}

/// How steps follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// The device is waited for after each step.
    Sync,
    /// All steps are enqueued at once.
    Free,
}

/// What is the same for every step under an allocator.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The first step, until the device is done: what recording costs.
    pub first: Duration,
    /// Planning again with all lifespans known, between two steps.
    pub compile: Option<Duration>,
    pub buffers: u64,
    /// Driver memory calls in one step, by the hook and by the compiler.
    pub calls: u64,
    pub breaks: u64,
    pub held: Option<Bytes>,
    pub floor: Option<Bytes>,
    pub live: Option<Bytes>,
    /// Device memory in use above the weights, at the end of a step that was enqueued alone, and of
    /// several that were enqueued at once.
    pub device: [Bytes; 2],
    /// Nanoseconds in one call of the allocator, on average in the fastest of a few steps that were
    /// enqueued one by one.
    pub call: f64,
    /// Outputs of the first step and of a later one, as bits.
    pub outputs: Vec<Vec<u32>>,
}

/// Samples of one pace.
#[derive(Clone, Debug, Default)]
pub struct Times {
    /// Enqueuing and waiting; without synchronisation, of a round of steps, divided by their number.
    pub latency: Vec<Duration>,
    /// Enqueuing alone.
    pub enqueue: Vec<Duration>,
}

/// Median and least of samples.
pub fn summary(samples: &[Duration]) -> (Duration, Duration) {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
    (at(sorted.len() / 2), at(0))
}

/// An allocator at work on a model.
pub struct Subject<'n> {
    pub allocator: Allocator,
    pub facts: Facts,
    /// By pace.
    pub times: [Times; 2],
    network: &'n Network,
    memory: Option<Box<Memory>>,
}

impl Subject<'_> {
    fn step(&mut self) -> Result<Tensor> {
        match (self.allocator, &mut self.memory) {
            (Allocator::Compiled, Some(memory)) => memory.step(self.network),
            (Allocator::Fixed, _) => {
                fixed::replay();
                let output = (self.network)();
                fixed::pause();
                output
            }
            _ => (self.network)(),
        }
    }
}

/// A device with what is needed to measure on it.
pub struct Bench {
    pub device: Device,
    pub gpu: Cuda,
}

fn bits(output: &Tensor) -> Result<Vec<u32>> {
    let values = output
        .flatten_all()?
        .to_dtype(DType::F32)?
        .to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

impl Bench {
    /// Waits for the device, empties the driver's pool and returns what is in use then.
    fn settle(&self) -> Result<u64> {
        self.device.synchronize()?;
        self.gpu.trim_pool().map_err(candle_core::Error::wrap)?;
        self.in_use()
    }

    fn in_use(&self) -> Result<u64> {
        let info = self.gpu.memory().map_err(candle_core::Error::wrap)?;
        Ok(info.total.0 - info.free.0)
    }

    /// Loads kernels and makes the libraries take their workspaces, so that nothing of that is counted.
    pub fn warm(&self, network: &Network) -> Result<()> {
        drop(network()?);
        drop(network()?);
        self.settle().map(drop)
    }

    /// Puts an allocator to work and finds out what it takes; `count` steps are enqueued at once.
    pub fn prepare<'n>(
        &self,
        network: &'n Network,
        allocator: Allocator,
        count: usize,
    ) -> Result<Subject<'n>> {
        let base = self.settle()?;
        let mut facts = Facts::default();
        let mut memory = None;
        match allocator {
            Allocator::Default => {}
            Allocator::Compiled => {
                memory = Some(Box::new(memory_compiler_candle::compiler(&self.device)?));
            }
            Allocator::Fixed => {
                fixed::record();
                drop(network()?);
                let (buffers, live) = fixed::plan()?;
                (facts.buffers, facts.live) = (buffers, Some(Bytes(live)));
                self.settle()?;
            }
        }
        let mut subject = Subject {
            allocator,
            facts,
            times: Default::default(),
            network,
            memory,
        };
        let began = Instant::now();
        let output = subject.step()?;
        self.device.synchronize()?;
        subject.facts.first = began.elapsed();
        subject.facts.outputs.push(bits(&output)?);
        drop(output);
        for turn in 0..4 {
            drop(subject.step()?);
            self.device.synchronize()?;
            if let (1, Some(memory)) = (turn, &mut subject.memory) {
                // As a program would whose steps have settled.
                subject.facts.compile = Some(memory.compile()?.time);
            }
        }
        self.settle()?;
        let before = hook::cuda::counts();
        let output = subject.step()?;
        // Before the device is waited for: then the driver's pool shrinks.
        let alone = self.in_use()?;
        let after = hook::cuda::counts();
        self.device.synchronize()?;
        subject.facts.outputs.push(bits(&output)?);
        drop(output);
        self.settle()?;
        for _ in 0..count {
            drop(subject.step()?);
        }
        let together = self.in_use()?;
        self.settle()?;
        let mut call = f64::INFINITY;
        for _ in 0..count.min(4) {
            let (output, _, nanoseconds) = fixed::timed(|| subject.step());
            drop(output?);
            self.device.synchronize()?;
            call = call.min(nanoseconds);
        }
        subject.facts.call = call;
        let facts = &mut subject.facts;
        facts.device = [alone, together].map(|used| Bytes(used.saturating_sub(base)));
        facts.calls = after.allocs + after.frees - before.allocs - before.frees;
        facts.buffers = facts.buffers.max(after.allocs - before.allocs);
        if let Some(memory) = &mut subject.memory {
            let stats = memory.stats();
            facts.calls += stats.device_calls_step;
            facts.buffers = stats.branches.first().map_or(0, |branch| branch.allocs);
            facts.breaks = stats.breaks_total;
            (facts.held, facts.floor, facts.live) =
                (Some(stats.held), Some(stats.floor), Some(stats.peak));
        }
        Ok(subject)
    }

    /// Times steps that are waited for, one of each subject in turn, so that what disturbs the machine
    /// for a while disturbs them all.
    pub fn time_in_turn(&self, subjects: &mut [Subject], count: usize) -> Result<()> {
        for _ in 0..count {
            self.time_all(subjects, Pace::Sync, 1)?;
        }
        Ok(())
    }

    /// Times a round of `count` steps of each subject; the first becomes the last, so that nobody comes
    /// always behind the same one.
    pub fn time_all(&self, subjects: &mut [Subject], pace: Pace, count: usize) -> Result<()> {
        for subject in &mut *subjects {
            self.time(subject, pace, count)?;
        }
        subjects.rotate_left(1);
        Ok(())
    }

    /// Times a round of `count` steps.
    pub fn time(&self, subject: &mut Subject, pace: Pace, count: usize) -> Result<()> {
        let mut times = Times::default();
        self.device.synchronize()?;
        let round = Instant::now();
        for _ in 0..count {
            let step = Instant::now();
            let output = subject.step()?;
            times.enqueue.push(step.elapsed());
            if pace == Pace::Sync {
                self.device.synchronize()?;
                times.latency.push(step.elapsed());
            }
            drop(output);
        }
        if pace == Pace::Free {
            self.device.synchronize()?;
            let count = u32::try_from(count.max(1)).unwrap_or(u32::MAX);
            times.latency.push(round.elapsed() / count);
        }
        let all = &mut subject.times[pace as usize];
        all.latency.append(&mut times.latency);
        all.enqueue.append(&mut times.enqueue);
        Ok(())
    }

    /// Ends the allocators.
    pub fn end(&self, subjects: Vec<Subject>) -> Result<()> {
        self.device.synchronize()?;
        drop(subjects);
        fixed::end();
        self.settle().map(drop)
    }
}
