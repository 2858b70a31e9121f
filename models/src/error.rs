//! What can go wrong outside the tensors, in one line each.

use std::path::{Path, PathBuf};

/// A failure that a person running one of the programs can do something about.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The weights cannot be read or do not fit the model.
    #[error("weights {origin} do not fit the model {model}: {why}")]
    Weights {
        /// The file, or "embedded".
        origin: String,
        /// The model that was asked for.
        model: &'static str,
        /// The first thing that was wrong.
        why: String,
    },
    /// A file could not be read.
    #[error("cannot read {}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system or the parser said.
        why: String,
    },
    /// A file could not be written.
    #[error("cannot write {}: {why}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// What a program says could not be printed.
    #[error("cannot print: {0}")]
    Print(std::io::Error),
    /// A setting that makes no sense.
    #[error("{0}")]
    Setting(String),
    /// The memory of a network in Burn failed.
    #[cfg(feature = "burn")]
    #[error(transparent)]
    Memory(#[from] memory_compiler_burn::Error),
    /// A tensor operation failed.
    #[error("{}", first_line(.0))]
    Tensor(#[from] candle_core::Error),
}

impl Error {
    /// A file could not be read.
    pub fn read(path: &Path, why: impl ToString) -> Self {
        Self::Read {
            path: path.to_path_buf(),
            why: why.to_string(),
        }
    }

    /// A file could not be written.
    pub fn write(path: &Path, why: impl ToString) -> Self {
        Self::Write {
            path: path.to_path_buf(),
            why: why.to_string(),
        }
    }
}

/// [`Error`]'s result.
pub type Result<T> = std::result::Result<T, Error>;

/// Candle appends a backtrace when it has one; people get the first line.
pub(crate) fn first_line(error: &candle_core::Error) -> String {
    error
        .to_string()
        .lines()
        .next()
        .unwrap_or_default()
        .to_string()
}
