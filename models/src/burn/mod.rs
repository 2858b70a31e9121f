//! Both networks in Burn, over the same weights and below the same sampler.
//!
//! ```text
//!   run (Candle, CPU) ──Predictor──> Session: images to the device ─► a step: Network::forward ─► images back
//! ```
//!
//! Noise, guidance and samplers are the program's, whatever framework the network is written in: a
//! [`Session`] carries the latents over and brings the prediction back, both outside of the step.
//!
//! - [`unet`], [`dit`]: the networks, in any size; [`parts`] is what they share.
//! - [`Session`]: a network with its device and, unless it runs on plain memory, its compiler.

pub mod dit;
pub mod parts;
pub mod unet;

use std::fmt::Debug;

use burn::module::{Module, ModuleVisitor, Param};
use burn::store::{
    FloatCastAdapter, ModuleAdapter, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore,
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use candle_core::Tensor as Candle;
use memory_compiler::Stats;
use memory_compiler::report::Report;
use memory_compiler_burn::{Memory, Options};

use crate::run::Predictor;
use crate::weights::{self, Source};
use crate::{Error, ModelKind, Result};

/// One of the two networks.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a program has one, and never moves it"
)]
pub enum Network {
    /// The UNet.
    Unet(unet::UNet),
    /// The DiT.
    Dit(dit::Dit),
}

impl Network {
    /// The network of the digits over weights from `source`.
    ///
    /// # Errors
    /// When the weights cannot be read or do not fit.
    pub fn load(kind: ModelKind, source: Source<'_>, device: &Device) -> Result<Self> {
        let bytes = weights::bytes(kind, source)?;
        // The same checks, and the same words, as for Candle.
        weights::tensors(kind, source, &bytes)?;
        let bytes = bytes.into_owned();
        let result = match kind {
            ModelKind::Unet => {
                let mut network = unet::UNet::new(&unet::UNetSize::digits(), device);
                fill(&mut network, bytes).map(|()| Self::Unet(network))
            }
            ModelKind::Dit => {
                let mut network = dit::Dit::new(&dit::DitSize::digits(), device);
                fill(&mut network, bytes).map(|()| Self::Dit(network))
            }
        };
        result.map_err(|why| weights::unfit(kind, source, why))
    }

    /// Makes the parameters of a new network, which Burn else makes when they are first used.
    pub fn make(&self) {
        match self {
            Self::Unet(network) => network.visit(&mut Make),
            Self::Dit(network) => network.visit(&mut Make),
        }
    }

    /// Predicts `v` for a batch, as [`Denoiser::forward`](crate::Denoiser::forward).
    pub fn forward(
        &self,
        latents: Tensor<4>,
        timestep: Tensor<1>,
        class: Tensor<1, Int>,
    ) -> Tensor<4> {
        match self {
            Self::Unet(network) => network.forward(latents, timestep, class),
            Self::Dit(network) => network.forward(latents, timestep, class),
        }
    }
}

/// Asks for every parameter.
struct Make;

impl ModuleVisitor for Make {
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        parameter.val();
    }
}

/// Fills a network's parameters from the bytes of a safetensors file: half precision becomes single, and
/// what Burn stores otherwise than others is turned around.
fn fill(network: &mut impl ModuleSnapshot, bytes: Vec<u8>) -> std::result::Result<(), String> {
    let adapter = PyTorchToBurnAdapter.chain(FloatCastAdapter::to(DType::F32));
    let mut store = SafetensorsStore::from_bytes(Some(bytes)).with_from_adapter(adapter);
    let filled = network.load_from(&mut store);
    filled.map(drop).map_err(|error| {
        let text = error.to_string();
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.take(3).collect::<Vec<_>>().join(" ")
    })
}

/// A network with its device and its memory.
#[derive(Debug)]
pub struct Session {
    network: Network,
    device: Device,
    memory: Option<Memory>,
}

impl Session {
    /// The network of the digits over weights from `source`, on compiled memory, or on plain memory without
    /// options. The compiler comes first: on a GPU nothing may be there before it.
    ///
    /// # Errors
    /// When the program's allocations do not reach the compiler, an option cannot work, or the weights cannot
    /// be read or do not fit.
    pub fn load(
        kind: ModelKind,
        source: Source<'_>,
        device: &Device,
        options: Option<&Options>,
    ) -> Result<Self> {
        let mut memory = match options {
            Some(options) => Some(memory_compiler_burn::compiler_with(device, options)?),
            None => None,
        };
        let load = || Network::load(kind, source, device);
        let network = match &mut memory {
            Some(memory) => memory.outside(load)??,
            None => load()?,
        };
        Ok(Self {
            network,
            device: device.clone(),
            memory,
        })
    }

    /// Numbers of all calls so far; none on plain memory.
    pub fn stats(&mut self) -> Option<Stats> {
        self.memory.as_mut().map(Memory::stats)
    }

    /// Where the memory goes; nothing on plain memory.
    pub fn report(&mut self) -> Option<Report> {
        self.memory.as_mut().map(Memory::report)
    }

    /// A tensor of Candle's, on the device.
    fn carry<const D: usize>(&self, values: &Candle) -> Result<Tensor<D>> {
        let data = TensorData::new(
            values.flatten_all()?.to_vec1::<f32>()?,
            values.dims().to_vec(),
        );
        Ok(Tensor::from_data(data, &self.device))
    }
}

impl Predictor for Session {
    fn device(&self) -> &candle_core::Device {
        &candle_core::Device::Cpu
    }

    fn predict(
        &mut self,
        step: &str,
        latents: &Candle,
        timestep: &Candle,
        class: &Candle,
    ) -> Result<Candle> {
        let (images, times) = (self.carry::<4>(latents)?, self.carry::<1>(timestep)?);
        let classes: Vec<i32> = class
            .to_vec1::<u32>()?
            .into_iter()
            .map(|class| class as i32)
            .collect();
        let classes = Tensor::<1, Int>::from_ints(classes.as_slice(), &self.device);
        let network = &self.network;
        let forward = || network.forward(images, times, classes);
        let prediction = match &mut self.memory {
            Some(memory) => memory.step_named(step, forward)?,
            None => forward(),
        };
        let data = prediction.try_into_data().map_err(refused)?;
        let values = data.try_into_vec::<f32>().map_err(refused)?;
        Ok(Candle::from_vec(values, latents.dims(), latents.device())?)
    }
}

fn refused(error: impl Debug) -> Error {
    Error::Setting(format!("Burn could not read the prediction: {error:?}"))
}

/// The CPU, or, in a build with the feature `burn-cuda`, the GPU of a number.
///
/// # Errors
/// For a GPU in another build.
pub fn device(gpu: Option<usize>) -> Result<Device> {
    match gpu {
        None => Ok(Device::flex()),
        #[cfg(feature = "burn-cuda")]
        Some(number) => Ok(Device::cuda(number)),
        #[cfg(not(feature = "burn-cuda"))]
        Some(_) => Err(Error::Setting(
            "this build runs Burn on the CPU; `--features burn-cuda` adds GPUs".into(),
        )),
    }
}
