//! Files: what they are, and what is wrong with them.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use memory_compiler::lifespans::{self, Row};
use memory_compiler::trace::{Trace, TraceError};

/// What is wrong with a file, on one line.
#[derive(Debug)]
pub struct Wrong(String);

impl Wrong {
    pub fn whole(file: &Path, reason: &impl fmt::Display) -> Self {
        Self(format!("{}: {reason}", file.display()))
    }

    pub fn command(reason: &str) -> Self {
        Self(reason.to_owned())
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A file that is open for reading, plain or gzip.
pub struct Input {
    file: PathBuf,
    source: Box<dyn BufRead>,
    is_csv: bool,
}

impl Input {
    pub fn open(file: &Path) -> Result<Self, Wrong> {
        let wrong = |error: std::io::Error| Wrong::whole(file, &error);
        let mut raw = BufReader::new(File::open(file).map_err(wrong)?);
        let mut source: Box<dyn BufRead> =
            if raw.fill_buf().map_err(wrong)?.starts_with(&[0x1f, 0x8b]) {
                Box::new(BufReader::new(MultiGzDecoder::new(raw)))
            } else {
                Box::new(raw)
            };
        let named = file.to_string_lossy();
        let is_csv = named.ends_with(".csv")
            || named.ends_with(".csv.gz")
            // A damaged beginning is reported by whoever reads on.
            || source.fill_buf().is_ok_and(|start| {
                let line = start.split(|&byte| byte == b'\n').next().unwrap_or_default();
                line.split(|&byte| byte == b',').any(|name| name.trim_ascii() == b"lower")
            });
        Ok(Self {
            file: file.to_owned(),
            source,
            is_csv,
        })
    }

    fn damaged(file: &Path, error: TraceError) -> Wrong {
        Wrong::whole(file, &error)
    }

    /// The buffers of a trace or a CSV.
    pub fn rows(self) -> Result<Vec<Row>, Wrong> {
        if self.is_csv {
            return lifespans::read_csv(self.source)
                .map_err(|error| Self::damaged(&self.file, error));
        }
        let rows = lifespans::of_trace(&self.trace()?).into_iter();
        Ok(rows.map(|buffer| Row { buffer, spot: None }).collect())
    }

    /// The trace.
    pub fn trace(self) -> Result<Trace, Wrong> {
        if self.is_csv {
            let reason = "a trace is needed, and this is a CSV (it has no events to replay)";
            return Err(Wrong::whole(&self.file, &reason));
        }
        Trace::read(self.source).map_err(|error| Self::damaged(&self.file, error))
    }
}
