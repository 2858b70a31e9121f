//! Layer 1: buffers with their lifespans as data, and the CSV format of planner problems.
//!
//! ```text
//! id,lower,upper,size          one buffer a line: live in lower..upper, size in bytes
//! 0,3,9,4096
//! ```
//!
//! The format of MiniMalloc's problems. Columns may come in any order. A plan is the same file with
//! two more columns: `offset` in bytes, and `frames`, the frame under each page that the buffer
//! touches, where it is not the page's own number: `4-7 9`.
//!
//! May import: `units`, `trace`.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};
use std::ops::Range;

use crate::trace::{Event, SIZE_LIMIT, Trace, TraceError};
use crate::units::Bytes;

/// A buffer and when it is live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Its name in the file.
    pub id: String,
    /// When it is live: times for a CSV, events for a trace.
    pub lifespan: Range<u64>,
    /// Its size as asked for.
    pub size: Bytes,
}

/// Where a plan puts a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spot {
    /// First byte in the virtual pages.
    pub offset: Bytes,
    /// The frame under each page that the buffer touches; empty where the page's own number is its
    /// frame's.
    pub frames: Vec<u32>,
}

/// A buffer, and its place when the file has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The buffer.
    pub buffer: Buffer,
    /// Its place.
    pub spot: Option<Spot>,
}

const COLUMNS: [&str; 6] = ["id", "lower", "upper", "size", "offset", "frames"];

/// Reads a CSV.
///
/// # Errors
/// [`TraceError`] with the first line that is wrong.
pub fn read_csv(source: impl BufRead) -> Result<Vec<Row>, TraceError> {
    let mut lines = source.lines().enumerate();
    let wrong = |line: usize, reason: String| TraceError::Line {
        line: line + 1,
        reason,
    };
    let (_, header) = lines
        .next()
        .ok_or_else(|| wrong(0, "the file is empty".into()))?;
    let header = header.map_err(|error| TraceError::reading(1, error))?;
    let mut column_at = [None; 6];
    let mut count = 0;
    for (at, name) in header.trim().split(',').enumerate() {
        count += 1;
        let known = COLUMNS.iter().position(|&known| known == name.trim());
        let known = known.ok_or_else(|| {
            wrong(
                0,
                format!("unknown column {name:?} (known: {})", COLUMNS.join(", ")),
            )
        })?;
        if column_at[known].replace(at).is_some() {
            return Err(wrong(0, format!("column {name:?} comes twice")));
        }
    }
    if let Some(missing) = (0..4).find(|&column| column_at[column].is_none()) {
        return Err(wrong(
            0,
            format!("column {:?} is missing", COLUMNS[missing]),
        ));
    }
    let mut rows = Vec::new();
    let mut seen = HashMap::new();
    let mut frames_left = FRAMES_LIMIT;
    for (line, text) in lines {
        let text = text.map_err(|error| TraceError::reading(line + 1, error))?;
        if text.trim().is_empty() {
            continue;
        }
        let fields: Vec<&str> = text
            .trim_end_matches('\r')
            .split(',')
            .map(str::trim)
            .collect();
        if fields.len() != count {
            return Err(wrong(
                line,
                format!("{} fields, the header has {count}", fields.len()),
            ));
        }
        let field = |column: usize| column_at[column].map(|at| fields[at]);
        let number = |column: usize| {
            let text = field(column).unwrap_or_default();
            text.parse::<u64>().map_err(|_| {
                wrong(
                    line,
                    format!("{} is not a number: {text:?}", COLUMNS[column]),
                )
            })
        };
        let id = field(0).unwrap_or_default().to_owned();
        let (lower, upper, size) = (number(1)?, number(2)?, Bytes(number(3)?));
        if size > SIZE_LIMIT {
            return Err(wrong(line, format!("{size:#} is more than {SIZE_LIMIT:#}")));
        }
        if lower >= upper {
            return Err(wrong(
                line,
                format!("lower {lower} is not below upper {upper}"),
            ));
        }
        if let Some(first) = seen.insert(id.clone(), line + 1) {
            return Err(wrong(line, format!("id {id:?} is on line {first} too")));
        }
        let spot = match field(4) {
            None => None,
            Some(_) => {
                let frames = field(5).unwrap_or_default();
                let frames = read_frames(frames, &mut frames_left).ok_or_else(|| {
                    let reason =
                        format!("frames are not numbers or ranges, or too many: {frames:?}");
                    wrong(line, reason)
                })?;
                Some(Spot {
                    offset: Bytes(number(4)?),
                    frames,
                })
            }
        };
        rows.push(Row {
            buffer: Buffer {
                id,
                lifespan: lower..upper,
                size,
            },
            spot,
        });
    }
    Ok(rows)
}

/// Most frames that a file may name: damaged ranges must not fill the memory.
const FRAMES_LIMIT: u64 = 1 << 24;

/// The frames of a field, of which there may be `left` more.
fn read_frames(text: &str, left: &mut u64) -> Option<Vec<u32>> {
    let mut frames = Vec::new();
    for part in text.split_whitespace() {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        *left = left.checked_sub(u64::from(last.checked_sub(first)?) + 1)?;
        frames.extend(first..=last);
    }
    Some(frames)
}

fn write_frames(frames: &[u32]) -> String {
    let mut text = String::new();
    let mut rest = frames;
    while let Some(&first) = rest.first() {
        let run = rest
            .iter()
            .zip(first..)
            .take_while(|(a, b)| *a == b)
            .count();
        let gap = if text.is_empty() { "" } else { " " };
        text += &match run {
            1 => format!("{gap}{first}"),
            _ => format!("{gap}{first}-{}", rest[run - 1]),
        };
        rest = &rest[run..];
    }
    text
}

/// Writes a CSV; with places, if the first row has one.
///
/// # Errors
/// What the writer returns.
pub fn write_csv(rows: &[Row], mut target: impl Write) -> io::Result<()> {
    let placed = rows.iter().any(|row| row.spot.is_some());
    let aliased = rows
        .iter()
        .filter_map(|row| row.spot.as_ref())
        .any(|spot| !spot.frames.is_empty());
    let extra = match (placed, aliased) {
        (false, _) => "",
        (true, false) => ",offset",
        (true, true) => ",offset,frames",
    };
    writeln!(target, "id,lower,upper,size{extra}")?;
    for Row { buffer, spot } in rows {
        let Range { start, end } = buffer.lifespan;
        write!(target, "{},{start},{end},{}", buffer.id, buffer.size.0)?;
        if placed {
            let spot = spot.as_ref();
            write!(target, ",{}", spot.map_or(0, |spot| spot.offset.0))?;
            if aliased {
                write!(
                    target,
                    ",{}",
                    spot.map_or_else(String::new, |spot| write_frames(&spot.frames))
                )?;
            }
        }
        writeln!(target)?;
    }
    Ok(())
}

/// The buffers of a trace; those of no bytes are left out, survivors end after the last event.
#[must_use]
pub fn of_trace(trace: &Trace) -> Vec<Buffer> {
    let mut buffers: Vec<Buffer> = Vec::new();
    let mut live: HashMap<u64, usize> = HashMap::new();
    let end = trace.events.len() as u64;
    let mut runs: HashMap<u64, u64> = HashMap::new();
    for (at, event) in (0..).zip(&trace.events) {
        match event {
            Event::Alloc { buffer, size } if size.0 > 0 => {
                let run = runs.entry(*buffer).or_default();
                let id = if *run == 0 {
                    buffer.to_string()
                } else {
                    format!("{buffer}.{run}")
                };
                *run += 1;
                live.insert(*buffer, buffers.len());
                buffers.push(Buffer {
                    id,
                    lifespan: at..end,
                    size: *size,
                });
            }
            Event::Free { buffer } => {
                if let Some(number) = live.remove(buffer) {
                    buffers[number].lifespan.end = at;
                }
            }
            Event::Alloc { .. } | Event::Enter(_) | Event::Leave => {}
        }
    }
    buffers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_that_is_written_reads_back_the_same() {
        let text = "id,lower,upper,size,offset,frames\nb1,0,3,4,0,4-7 9\nb2,3,9,4,512,\n";
        let rows = read_csv(text.as_bytes()).unwrap();
        assert_eq!(
            rows[0].spot,
            Some(Spot {
                offset: Bytes(0),
                frames: vec![4, 5, 6, 7, 9]
            })
        );
        let mut written = Vec::new();
        write_csv(&rows, &mut written).unwrap();
        assert_eq!(String::from_utf8(written).unwrap(), text);
    }

    #[test]
    fn columns_come_in_any_order() {
        let rows = read_csv("size,id,upper,lower\r\n7,x,5,2\r\n\r\n".as_bytes()).unwrap();
        let buffer = Buffer {
            id: "x".into(),
            lifespan: 2..5,
            size: Bytes(7),
        };
        assert_eq!(rows, [Row { buffer, spot: None }]);
    }

    #[test]
    fn damage_is_named_with_line_and_reason() {
        for (text, line, reason) in [
            ("", 1, "the file is empty"),
            ("id,lower,size\n", 1, "column \"upper\" is missing"),
            (
                "id,lower,upper,size,colour\n",
                1,
                "unknown column \"colour\" (known: id, lower, upper, size, offset, frames)",
            ),
            ("id,id,upper,size\n", 1, "column \"id\" comes twice"),
            (
                "id,lower,upper,size\n0,1,2\n",
                2,
                "3 fields, the header has 4",
            ),
            (
                "id,lower,upper,size\n\n0,1,x,8\n",
                3,
                "upper is not a number: \"x\"",
            ),
            (
                "id,lower,upper,size\n0,1,2,-8\n",
                2,
                "size is not a number: \"-8\"",
            ),
            (
                "id,lower,upper,size\n0,1,2,9999999999999\n",
                2,
                "9999999999999 B is more than 2047.00 GiB",
            ),
            (
                "id,lower,upper,size\n0,2,2,8\n",
                2,
                "lower 2 is not below upper 2",
            ),
            (
                "id,lower,upper,size\n0,1,2,8\n0,1,2,8\n",
                3,
                "id \"0\" is on line 2 too",
            ),
            (
                "id,lower,upper,size,offset,frames\n0,1,2,8,0,7-6\n",
                2,
                "frames are not numbers or ranges, or too many: \"7-6\"",
            ),
        ] {
            match read_csv(text.as_bytes()) {
                Err(TraceError::Line {
                    line: at,
                    reason: why,
                }) => assert_eq!((at, &*why), (line, reason)),
                other => panic!("{text:?} gave {other:?}"),
            }
        }
    }

    #[test]
    fn lifespans_of_a_trace_count_events_and_survivors_last_to_the_end() {
        let trace = Trace::read("a 7 100\ns x\na 8 0\nf 7\na 7 5\nf 8\ne\n".as_bytes()).unwrap();
        let buffers = of_trace(&trace);
        let named: Vec<_> = buffers
            .iter()
            .map(|b| (b.id.as_str(), b.lifespan.clone(), b.size.0))
            .collect();
        assert_eq!(named, [("7", 0..3, 100), ("7.1", 4..7, 5)]);
    }
}
