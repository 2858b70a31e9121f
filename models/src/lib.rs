//! A small UNet and a small DiT that draw handwritten digits.
//!
//! Both are written the way Candle models are usually written, so that what the memory compiler
//! does to them is what it does to yours: tensors come and go, every block is a scope, and nothing
//! here knows where a buffer lies.
//!
//! ```text
//!   digits ──► training ──► weights ──► UNet | DiT ──► run (guidance, samplers) ──► sheet
//! ```
//!
//! - [`unet`], [`dit`]: the two networks behind the [`Denoiser`] trait; [`layers`], [`conv`],
//!   [`embedding`] and [`attention`] are the parts that they share.
//! - [`weights`]: loading (embedded or from a file) and saving.
//! - [`schedule`], [`sampler`]: the noise schedule and the three ways down it.
//! - [`run`]: one sampling run with classifier-free guidance; memory plugs in as a [`run::Stepper`],
//!   and [`compiled`] is the one with a memory compiler behind it.
//! - [`burn`]: both networks once more, in Burn.
//! - [`digits`], [`training`]: the data and the loop that made the weights.
//! - [`sheet`]: images as one PNG.

pub mod attention;
#[cfg(feature = "burn")]
pub mod burn;
pub mod compiled;
pub mod conv;
pub mod digits;
pub mod dit;
pub mod embedding;
pub mod error;
pub mod layers;
pub mod rng;
pub mod run;
pub mod sampler;
pub mod schedule;
pub mod sheet;
pub mod training;
pub mod unet;
pub mod weights;

pub use error::{Error, Result};

use candle_core::{Device, Tensor};

/// Height and width of every image, in pixels.
pub const IMAGE_SIDE: usize = 28;

/// The label that means "any digit": what the unconditional half of guidance asks for.
pub const NO_CLASS: u32 = 10;

/// A network that looks at noisy images and predicts `v`, from which both the noise and the clean
/// image follow (see [`schedule`]).
pub trait Denoiser: std::fmt::Debug + Send + Sync {
    /// Where the parameters are, and what it is given must be.
    fn device(&self) -> &Device;

    /// Predicts `v` for a batch.
    ///
    /// - `latents`: `(batch, 1, 28, 28)`, noisy images around −1..1;
    /// - `timestep`: `(batch)`, `f32`, 0 for clean to 1 for pure noise;
    /// - `class`: `(batch)`, `u32`, a digit or [`NO_CLASS`].
    fn forward(
        &self,
        latents: &Tensor,
        timestep: &Tensor,
        class: &Tensor,
    ) -> candle_core::Result<Tensor>;
}

/// Which of the two networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ModelKind {
    /// Convolutions with skip connections, attention at the lower resolutions.
    Unet,
    /// A transformer over patches.
    Dit,
}

impl ModelKind {
    /// The name that the command line and the weight files use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unet => "unet",
            Self::Dit => "dit",
        }
    }

    /// Builds the network over the parameters of `vb`.
    pub fn build(self, vb: candle_nn::VarBuilder) -> candle_core::Result<Box<dyn Denoiser>> {
        Ok(match self {
            Self::Unet => Box::new(unet::UNet::new(vb)?),
            Self::Dit => Box::new(dit::Dit::new(vb)?),
        })
    }
}

/// A number of bytes, with an optional `K`, `KiB`, `M`, `MiB`, `G` or `GiB` behind it.
pub fn parse_bytes(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match text[digits.len()..].trim() {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        _ => 0u64,
    };
    match digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit)) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err("sizes look like 65536, 64KiB or 2MiB".into()),
    }
}
