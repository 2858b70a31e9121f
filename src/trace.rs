//! Layer 1: the events of one recorded step as data, and their text format.
//!
//! ```text
//! # a comment
//! s down.0        enter scope
//! a 0 4096        allocate buffer 0, 4096 bytes
//! f 0             free it
//! e               leave scope
//! ```
//!
//! One event a line. Buffer numbers are arbitrary and may be used again after their free. Buffers that
//! are never freed are survivors.
//!
//! May import: `units`.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, BufRead, Write};

use crate::units::{ALIGNMENT, Bytes};

/// One event of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A buffer begins.
    Alloc {
        /// Its number.
        buffer: u64,
        /// Its size as asked for.
        size: Bytes,
    },
    /// A buffer ends.
    Free {
        /// Its number.
        buffer: u64,
    },
    /// A scope of this name begins.
    Enter(String),
    /// The innermost scope ends.
    Leave,
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A line is not an event, or not one that can happen here.
    #[error("line {line}: {reason}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The source could not be read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Largest buffer that a file may name: 2 TiB, less a page of any device.
pub(crate) const SIZE_LIMIT: Bytes = Bytes::gib(2047);

impl TraceError {
    /// A line that could not be read: damage of the file, where the reader says so.
    pub(crate) fn reading(line: usize, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::UnexpectedEof => Self::Line {
                line,
                reason: error.to_string(),
            },
            _ => Self::Io(error),
        }
    }
}

/// The events of one step, in order. Every trace that [`Trace::read`] returns is sound: a buffer is
/// freed only while it is live, a scope left only while one is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The events.
    pub events: Vec<Event>,
}

impl Trace {
    /// Reads the text format.
    ///
    /// # Errors
    /// [`TraceError`] with the first line that is wrong.
    pub fn read(source: impl BufRead) -> Result<Self, TraceError> {
        let mut events = Vec::new();
        let mut live = HashSet::new();
        let mut depth = 0_usize;
        for (index, line) in source.lines().enumerate() {
            let text = line.map_err(|error| TraceError::reading(index + 1, error))?;
            let wrong = |reason: String| TraceError::Line {
                line: index + 1,
                reason,
            };
            let text = text.trim();
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let (kind, rest) = text.split_once(' ').unwrap_or((text, ""));
            let rest = rest.trim();
            let number = |what: &str, text: &str| {
                text.parse::<u64>()
                    .map_err(|_| wrong(format!("{what} is not a number: {text:?}")))
            };
            match kind {
                "a" => {
                    let (buffer, size) = rest
                        .split_once(' ')
                        .ok_or_else(|| wrong("expected `a <id> <bytes>`".into()))?;
                    let (buffer, size) = (number("id", buffer)?, number("bytes", size.trim())?);
                    if size > SIZE_LIMIT.0 {
                        return Err(wrong(format!(
                            "{:#} is more than {SIZE_LIMIT:#}",
                            Bytes(size)
                        )));
                    }
                    if !live.insert(buffer) {
                        return Err(wrong(format!(
                            "buffer {buffer} is allocated while it is live"
                        )));
                    }
                    events.push(Event::Alloc {
                        buffer,
                        size: Bytes(size),
                    });
                }
                "f" => {
                    let buffer = number("id", rest)?;
                    if !live.remove(&buffer) {
                        return Err(wrong(format!(
                            "buffer {buffer} is freed while it is not live"
                        )));
                    }
                    events.push(Event::Free { buffer });
                }
                "s" => {
                    if rest.is_empty() {
                        return Err(wrong("expected `s <name>`".into()));
                    }
                    depth += 1;
                    events.push(Event::Enter(rest.to_owned()));
                }
                "e" => {
                    depth = depth
                        .checked_sub(1)
                        .ok_or_else(|| wrong("no scope is open".into()))?;
                    events.push(Event::Leave);
                }
                other => {
                    return Err(wrong(format!(
                        "unknown event {other:?} (known: a, f, s, e, #)"
                    )));
                }
            }
        }
        Ok(Self { events })
    }

    /// Writes the text format.
    ///
    /// # Errors
    /// What the writer returns.
    pub fn write(&self, mut target: impl Write) -> io::Result<()> {
        for event in &self.events {
            writeln!(target, "{event}")?;
        }
        Ok(())
    }

    /// Allocations in it.
    #[must_use]
    pub fn buffer_count(&self) -> usize {
        self.events
            .iter()
            .filter(|event| matches!(event, Event::Alloc { .. }))
            .count()
    }

    /// L: the most bytes live at once, each size rounded up to 512 B; the largest multiple of 512 B
    /// below 2^64 where there are more.
    #[must_use]
    pub fn live_peak(&self) -> Bytes {
        const MOST: Bytes = Bytes(u64::MAX - (ALIGNMENT.0 - 1));
        let mut sizes = std::collections::HashMap::new();
        let (mut live, mut peak) = (0_u64, 0);
        for event in &self.events {
            match event {
                Event::Alloc { buffer, size } => {
                    let size = size.checked_round_up(ALIGNMENT).unwrap_or(MOST).0;
                    sizes.insert(*buffer, size);
                    live = u64::saturating_add(live, size);
                    peak = peak.max(live).min(MOST.0);
                }
                Event::Free { buffer } => {
                    live = u64::saturating_sub(live, sizes.remove(buffer).unwrap_or(0));
                }
                Event::Enter(_) | Event::Leave => {}
            }
        }
        Bytes(peak)
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alloc { buffer, size } => write!(f, "a {buffer} {}", size.0),
            Self::Free { buffer } => write!(f, "f {buffer}"),
            Self::Enter(name) => write!(f, "s {name}"),
            Self::Leave => f.write_str("e"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back_the_same() {
        let text = "s down.0\na 7 100\na 8 513\nf 7\ne\nf 8\n";
        let trace = Trace::read(text.as_bytes()).unwrap();
        let mut written = Vec::new();
        trace.write(&mut written).unwrap();
        assert_eq!(written, text.as_bytes());
        assert_eq!(
            (trace.buffer_count(), trace.live_peak()),
            (2, Bytes(512 + 1024))
        );
    }

    #[test]
    fn a_peak_beyond_64_bits_is_the_largest_number_of_whole_units() {
        // No file may name such sizes; a program that makes its own events may.
        let events = [(0, u64::MAX), (1, u64::MAX)].map(|(buffer, size)| Event::Alloc {
            buffer,
            size: Bytes(size),
        });
        let trace = Trace {
            events: events.to_vec(),
        };
        assert_eq!(trace.live_peak(), Bytes(u64::MAX - 511));
    }

    #[test]
    fn damaged_lines_are_named_with_number_and_reason() {
        for (text, line, reason) in [
            ("a 0 8\nf 1\n", 2, "buffer 1 is freed while it is not live"),
            (
                "a 0 8\na 0 8\n",
                2,
                "buffer 0 is allocated while it is live",
            ),
            (
                "# fine\n\nx 1\n",
                3,
                "unknown event \"x\" (known: a, f, s, e, #)",
            ),
            ("a 0\n", 1, "expected `a <id> <bytes>`"),
            ("a 0 -1\n", 1, "bytes is not a number: \"-1\""),
            ("e\n", 1, "no scope is open"),
            ("s\n", 1, "expected `s <name>`"),
            (
                "a 0 9999999999999\n",
                1,
                "9999999999999 B is more than 2047.00 GiB",
            ),
        ] {
            match Trace::read(text.as_bytes()) {
                Err(TraceError::Line {
                    line: at,
                    reason: why,
                }) => assert_eq!((at, &*why), (line, reason)),
                other => panic!("{text:?} gave {other:?}"),
            }
        }
    }
}
