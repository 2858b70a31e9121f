//! Sampling on compiled memory: every call of the model is a recorded and replayed step.

use candle_core::Device;
use memory_compiler::Stats;
use memory_compiler::pager::Pager;
use memory_compiler::report::Report;
use memory_compiler_candle::{Memory, Options, Paged};

use crate::{Result, run::Stepper};

/// A [`Stepper`] whose calls are steps of a memory compiler.
#[derive(Debug)]
pub struct Compiled {
    memory: Memory,
}

impl Compiled {
    /// A compiler for the CPU's memory.
    ///
    /// # Errors
    /// When the program's global allocator is not the hook, or an option cannot work.
    pub fn new(options: &Options) -> Result<Self> {
        Self::on(&Device::Cpu, options)
    }

    /// A compiler for a device's memory.
    ///
    /// # Errors
    /// When the hook for that device is not part of the program, or an option cannot work.
    pub fn on(device: &Device, options: &Options) -> Result<Self> {
        let memory = memory_compiler_candle::compiler_with(device, options)?;
        Ok(Self { memory })
    }

    /// The same, sharing a budget with weights.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn sharing(device: &Device, options: &Options, pager: &Pager) -> Result<Self> {
        let memory = memory_compiler_candle::compiler_sharing(device, options, pager)?;
        Ok(Self { memory })
    }

    /// Numbers of all calls so far.
    pub fn stats(&mut self) -> Stats {
        self.memory.stats()
    }

    /// Where the memory goes.
    pub fn report(&mut self) -> Report {
        self.memory.report()
    }
}

impl Stepper for Compiled {
    fn step<T>(
        &mut self,
        name: &str,
        f: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        self.memory.step_named(name, f)
    }
}

/// Just calls, with weights that come and go.
impl Stepper for &Paged {
    fn step<T>(
        &mut self,
        _name: &str,
        f: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        self.run(f)
    }
}
