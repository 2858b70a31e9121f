//! Texts for the parsers, made from bytes, and what must hold of each: shared by a property test and two fuzz
//! targets.
//!
//! Half of the texts are the bytes themselves; the others are lines that are mostly sound, so that a change of
//! a few bytes reaches what comes behind the parser.

use memory_compiler::Bytes;
use memory_compiler::lifespans::{self, Row, Spot};
use memory_compiler::planner::{self, Problem, Rules};
use memory_compiler::trace::{Event, Trace, TraceError};

const COLUMNS: [&str; 6] = ["id", "lower", "upper", "size", "offset", "frames"];
/// Largest buffer of a file.
const SIZE_LIMIT: u64 = 2047 << 30;
/// Most frames that all rows of a file may name.
const FRAMES_LIMIT: u64 = 1 << 24;

/// A CSV: the bytes behind the first, or lines made from them.
pub fn csv_text(bytes: &[u8]) -> Vec<u8> {
    let Some((&kind, rest)) = bytes.split_first() else {
        return Vec::new();
    };
    if kind < 128 {
        return rest.to_vec();
    }
    let mut columns: Vec<&str> = COLUMNS[..4 + usize::from(kind) % 3].to_vec();
    let len = columns.len();
    columns.rotate_left(usize::from(kind / 3) % len);
    let mut text = columns.join(",") + "\n";
    for (number, record) in rest.chunks_exact(6).enumerate() {
        let [form, lower, span, size, offset, frames] = record else {
            unreachable!("chunks of six")
        };
        let field = |column: &&str| match (*column, form) {
            // Now and then something else.
            (_, 0) => String::from_utf8_lossy(&record[1..]).into_owned(),
            ("id", 1) => "b0".to_owned(),
            ("id", _) => format!("b{number}"),
            ("lower", _) => lower.to_string(),
            ("upper", 2) => lower.to_string(),
            ("upper", _) => (u64::from(*lower) + u64::from(*span) % 32 + 1).to_string(),
            ("size", 3) => (u64::from(*size) << 36).to_string(),
            ("size", _) => (u64::from(*size) * 300).to_string(),
            ("offset", 4) => format!("-{offset}"),
            ("offset", _) => (u64::from(*offset) * 512).to_string(),
            ("frames", 5) => format!("{frames}-{offset}"),
            ("frames", 6) => format!("0-{}", u32::from(*frames) << 20),
            ("frames", _) => format!("{frames} {}-{}", offset, u16::from(*offset) + 2),
            (other, _) => unreachable!("{other} is no column"),
        };
        let fields: Vec<String> = columns.iter().map(field).collect();
        text += &fields.join(if form % 16 == 7 { " , " } else { "," });
        text += match form % 16 {
            8 => "\r\n",
            9 => "\n\n",
            10 => ",\n",
            _ => "\n",
        };
    }
    text.into_bytes()
}

/// A trace: the bytes behind the first, or lines made from them.
pub fn trace_text(bytes: &[u8]) -> Vec<u8> {
    let Some((&kind, rest)) = bytes.split_first() else {
        return Vec::new();
    };
    if kind < 128 {
        return rest.to_vec();
    }
    let mut text = String::new();
    let mut live: Vec<u8> = Vec::new();
    let mut depth = 0;
    for record in rest.chunks_exact(3) {
        let (form, a, b) = (record[0], record[1], record[2]);
        text += &match if form > 2 { 3 + form % 29 } else { form } {
            0 => format!("{} {a} {b}\n", char::from(form)),
            1 => format!("f {a}\n"),
            2 => format!("a {a} {}\n", u64::from(b) << 40),
            3 => "# said\n\n".to_owned(),
            4..8 => {
                depth += 1;
                format!("s block {a}\r\n")
            }
            8..12 if depth > 0 => {
                depth -= 1;
                "e\n".to_owned()
            }
            12..20 if !live.is_empty() => {
                let buffer = live.remove(usize::from(a) % live.len());
                format!("f {buffer}\n")
            }
            _ if !live.contains(&a) => {
                live.push(a);
                format!("a {a}   {}\n", u64::from(b) * 700)
            }
            _ => String::new(),
        };
    }
    text.into_bytes()
}

/// Reads a CSV and checks what came of it; the rows, if it was sound.
pub fn check_csv(text: &[u8]) -> Option<Vec<Row>> {
    let naive = std::str::from_utf8(text).ok().and_then(naive_csv);
    let rows = match lifespans::read_csv(text) {
        Ok(rows) => rows,
        Err(error) => {
            is_of_a_line(&error, text);
            assert_eq!(
                naive, None,
                "refused ({error}), and nothing is wrong with it"
            );
            return None;
        }
    };
    assert_eq!(naive.as_ref(), Some(&rows), "rows as they should be read");
    let mut written = Vec::new();
    lifespans::write_csv(&rows, &mut written).expect("a vector takes everything");
    let again = lifespans::read_csv(&*written).expect("what was written is sound");
    // A file without rows has no columns of places to write.
    assert_eq!(again, rows);
    plan(&rows);
    Some(rows)
}

/// What is small enough is planned; the plan is checked by the independent validator, and against the floor.
fn plan(rows: &[Row]) {
    let is_small = rows.iter().all(|row| row.buffer.size.0 <= 1 << 20);
    if rows.len() > 32 || !is_small {
        return;
    }
    let items = || {
        let buffers = rows.iter().map(|row| &row.buffer);
        buffers.map(|buffer| (buffer.size, [buffer.lifespan.clone()]))
    };
    for page in [512, 3 * 512, 64 << 10] {
        let problem = Problem::new(Bytes(page), items()).expect("it is small");
        let rules = Rules {
            search: false,
            ..Rules::default()
        };
        let plan = planner::plan(&problem, rules).plan;
        planner::check(&problem, &plan).unwrap_or_else(|fault| panic!("{fault}"));
        assert!(plan.held(&problem) >= problem.floor());
        let alone: u64 = items()
            .map(|(size, _)| size.0.next_multiple_of(512).max(512))
            .sum();
        assert!(problem.live_peak().0 <= alone);
        // The places of the file itself, whatever they are: a fault or none, never a panic.
        let starts = rows.iter().map(|row| row.spot.as_ref());
        let starts: Option<Vec<u64>> = starts.map(|spot| Some(spot?.offset.0 >> 9)).collect();
        if let Some(starts) = starts.filter(|starts| starts.iter().all(|&start| start < 1 << 40)) {
            let _ = planner::check_places(&problem, &starts, |page| u32::try_from(page).ok());
        }
    }
}

/// Reads a trace and checks what came of it; the trace, if it was sound.
pub fn check_trace(text: &[u8]) -> Option<Trace> {
    let trace = match Trace::read(text) {
        Ok(trace) => trace,
        Err(error) => {
            is_of_a_line(&error, text);
            return None;
        }
    };
    let mut written = Vec::new();
    trace
        .write(&mut written)
        .expect("a vector takes everything");
    let again = Trace::read(&*written).expect("what was written is sound");
    assert_eq!(again, trace);
    assert!(trace.live_peak().0.is_multiple_of(512));
    // Sound: what is freed is live, what is left is open.
    let mut live = std::collections::BTreeSet::new();
    let mut depth = 0_i64;
    for event in &trace.events {
        match event {
            Event::Alloc { buffer, .. } => assert!(live.insert(*buffer)),
            Event::Free { buffer } => assert!(live.remove(buffer)),
            Event::Enter(name) => {
                assert!(!name.is_empty());
                depth += 1;
            }
            Event::Leave => depth -= 1,
        }
        assert!(depth >= 0);
    }
    let buffers = lifespans::of_trace(&trace);
    let end = trace.events.len() as u64;
    for buffer in &buffers {
        assert!(!buffer.lifespan.is_empty() && buffer.lifespan.end <= end && buffer.size.0 > 0);
    }
    let rows: Vec<Row> = buffers
        .into_iter()
        .map(|buffer| Row { buffer, spot: None })
        .collect();
    let mut csv = Vec::new();
    lifespans::write_csv(&rows, &mut csv).expect("a vector takes everything");
    assert_eq!(
        check_csv(&csv),
        Some(rows),
        "the buffers of a trace are a problem"
    );
    Some(trace)
}

fn is_of_a_line(error: &TraceError, text: &[u8]) {
    let lines = text.split(|&byte| byte == b'\n').count();
    match error {
        TraceError::Line { line, reason } => {
            assert!((1..=lines).contains(line) && !reason.is_empty(), "{error}");
        }
        TraceError::Io(error) => panic!("memory can be read: {error}"),
    }
}

/// The reader again, as naively as it can be said; `None` where anything is wrong.
fn naive_csv(text: &str) -> Option<Vec<Row>> {
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next()?.trim().split(',').map(str::trim).collect();
    let of = |name: &str| header.iter().position(|&column| column == name);
    let is_once = |name: &&str| header.iter().filter(|column| *column == name).count() == 1;
    if !header
        .iter()
        .all(|name| COLUMNS.contains(name) && is_once(name))
    {
        return None;
    }
    let mut rows: Vec<Row> = Vec::new();
    let mut named = 0;
    for line in lines.filter(|line| !line.trim().is_empty()) {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        if fields.len() != header.len() {
            return None;
        }
        let number = |name: &str| fields[of(name)?].parse::<u64>().ok();
        let (id, size) = (fields[of("id")?].to_owned(), number("size")?);
        let lifespan = number("lower")?..number("upper")?;
        let is_known = rows.iter().any(|row| row.buffer.id == id);
        if lifespan.is_empty() || is_known || size > SIZE_LIMIT {
            return None;
        }
        let spot = match of("offset") {
            None => None,
            Some(_) => {
                let mut frames = Vec::new();
                let parts = of("frames").map_or("", |at| fields[at]).split_whitespace();
                for part in parts {
                    let (first, last) = part.split_once('-').unwrap_or((part, part));
                    let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
                    named += u64::from(last.checked_sub(first)?) + 1;
                    if named > FRAMES_LIMIT {
                        return None;
                    }
                    frames.extend(first..=last);
                }
                Some(Spot {
                    offset: Bytes(number("offset")?),
                    frames,
                })
            }
        };
        let size = Bytes(size);
        rows.push(Row {
            buffer: lifespans::Buffer { id, lifespan, size },
            spot,
        });
    }
    ["id", "lower", "upper", "size"]
        .iter()
        .all(|name| of(name).is_some())
        .then_some(rows)
}
