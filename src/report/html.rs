//! A report as one page of HTML: no scripts, nothing to fetch, tooltips by the browser.
//!
//! ```text
//!   held, floor, breaks, calls │ what is worth knowing
//!   each branch   live bytes over its allocations
//!                 the scopes over the same axis
//!                 where every buffer lies, over the same axis
//!                 scopes and largest buffers at the peak
//!   all scopes
//! ```
//!
//! May import: what `report` may.

use std::cmp::Reverse;
use std::fmt::Write;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{Branch, Buffer, Report};
use crate::stats::{BranchStats, Stats};
use crate::units::Bytes;

const STYLE: &str = include_str!("style.css");

/// Width of all pictures, in their own units.
const WIDTH: f64 = 1000.0;
/// Height of the curve and of the map.
const CURVE: f64 = 140.0;
const MAP: f64 = 300.0;
/// Height of a row of scopes, and the most of them.
const ROW: f64 = 16.0;
const ROWS: usize = 8;
/// The narrowest scope that is drawn, and that has its name in it, for each letter.
const NARROWEST: f64 = 0.4;
const LETTER: f64 = 7.0;

/// Pieces of buffers that are drawn in a map, the largest ones, and the lowest of them.
const PIECES: usize = 5000;
const LOWEST: f64 = 0.1;
/// Lines of a table before the rest is one line.
const LINES: usize = 12;

pub(super) fn page(report: &Report) -> String {
    let stats = &report.stats;
    let names = report.branches.iter().map(|branch| branch.name.as_str());
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    names.dedup();
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Memory of " (names.join(", ")) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "Where the memory goes" }
                (tiles(stats))
                (notes(stats))
                @for (nth, branch) in report.branches.iter().enumerate() {
                    (of_branch(report, branch, stats.branches.get(nth)))
                }
                @if report.branches.is_empty() { p { "No step has finished yet." } }
                (all_scopes(stats))
                p.small {
                    "Sizes are rounded up to 512 B for each buffer, time is counted in allocations. "
                    "Point at something to see what it is."
                }
            }
        }
    }
    .into_string()
}

fn tiles(stats: &Stats) -> Markup {
    let tiles = [
        ("held", stats.held.to_string(), "device memory now"),
        (
            "floor",
            stats.floor.to_string(),
            "the least for what was live at once",
        ),
        (
            "survivors",
            stats.survivor_bytes.to_string(),
            "buffers that outlived their step",
        ),
        (
            "breaks",
            stats.breaks_step.to_string(),
            "of the last step's form",
        ),
        (
            "driver calls",
            stats.device_calls_step.to_string(),
            "in the last step",
        ),
        (
            "branches",
            stats.branches.len().to_string(),
            "ways of steps",
        ),
    ];
    html! {
        div.tiles {
            @for (name, value, what) in tiles {
                div { span.name { (name) } span.value { (value) } span.what { (what) } }
            }
        }
    }
}

/// What a person would want to know, or to do.
fn notes(stats: &Stats) -> Markup {
    let mut notes = Vec::new();
    let above = stats.held.saturating_sub(stats.floor);
    if above.0 > stats.granule.0 && stats.steps > 0 {
        notes.push(format!(
            "{above} are held beyond the floor. {}",
            match &stats.compiled {
                None => "Compiler::compile plans all buffers anew, once the steps have settled.",
                Some(compiled) if compiled.is_installed =>
                    "The plan is installed; the rest are buffers that outlive their step, or what was recorded since.",
                Some(_) =>
                    "The last compile found nothing smaller; the rest are buffers that outlive their step, or were \
                     recorded since.",
            }
        ));
    }
    if stats.breaks_step > 0 {
        notes.push(format!(
            "The last step left its recorded path {} times, and recorded {} allocations. Steps with different work \
             get names of their own (step_named).",
            stats.breaks_step, stats.recorded_step
        ));
    }
    let troubles = stats.troubles();
    notes.extend(troubles.map(|(count, what, why)| format!("{count} {what}: {why}.")));
    html! {
        @if !notes.is_empty() { ul { @for note in notes { li { (note) } } } }
    }
}

fn of_branch(report: &Report, branch: &Branch, stats: Option<&BranchStats>) -> Markup {
    html! {
        section {
            h2 { (branch.name) }
            @if let Some(stats) = stats {
                p.small {
                    (stats.allocs) " allocations, " (stats.runs) " runs, " (stats.replays) " of them replayed as a \
                    whole, " (stats.breaks) " breaks, " (stats.device_calls) " driver calls in all"
                }
            }
            @match branch.peak() {
                None => p { "It is not known how long its buffers lived." },
                Some((at, peak)) => {
                    @let at_peak: Vec<&Buffer> = branch.at_peak().collect();
                    p {
                        "Most is live after allocation " (at) " of " (branch.buffers.len()) ", in "
                        code { (report.scopes[branch.buffers[at as usize].scope]) } ": "
                        b { (peak) } ", buffers: " (at_peak.len()) "."
                    }
                    (curve(branch, at, peak))
                    (lanes(report, branch))
                    (map(report, branch))
                    (of_peak(report, branch, at_peak, peak))
                }
            }
        }
    }
}

fn x(branch: &Branch, at: u64) -> f64 {
    at as f64 * WIDTH / branch.buffers.len().max(1) as f64
}

fn curve(branch: &Branch, at: u64, peak: Bytes) -> Markup {
    let y = |live: Bytes| CURVE - live.0 as f64 / peak.0.max(1) as f64 * (CURVE - 12.0);
    let mut path = format!("M0 {CURVE:.1}");
    for (at, live) in (0..).zip(branch.live()) {
        // A String takes all that is written to it.
        _ = write!(path, "V{:.1}H{:.1}", y(live), x(branch, at + 1));
    }
    _ = write!(path, "V{CURVE:.1}Z");
    let middle = x(branch, at) + x(branch, 1) / 2.0;
    html! {
        h3 { "Live bytes" }
        svg viewBox={ "0 0 " (WIDTH) " " (CURVE) } role="img" aria-label="live bytes over allocations" {
            path.live d=(path) {}
            line.peak x1=(middle) x2=(middle) y1="0" y2=(CURVE) { title { "the peak: " (peak) } }
        }
    }
}

/// Bands of allocations in a row that have a scope in common, one row for each depth.
fn lanes(report: &Report, branch: &Branch) -> Markup {
    let paths: Vec<Vec<&str>> = report
        .scopes
        .iter()
        .map(|path| path.split('/').collect())
        .collect();
    let depths = branch
        .buffers
        .iter()
        .map(|buffer| paths[buffer.scope].len());
    let depth = depths.max();
    // The first name is the step's, which all have.
    let rows = 1..depth.unwrap_or(1).min(ROWS + 1);
    let mut bands = Vec::new();
    for row in rows.clone() {
        let part = |buffer: &Buffer| paths[buffer.scope].get(..=row);
        let mut begin = 0;
        for band in branch.buffers.chunk_by(|a, b| part(a) == part(b)) {
            let end = begin + band.len();
            let (from, to) = (x(branch, begin as u64), x(branch, end as u64));
            if let Some(part) = part(&band[0]).filter(|_| to - from >= NARROWEST) {
                bands.push((row - 1, from, to - from, part, begin..end));
            }
            begin = end;
        }
    }
    if bands.is_empty() {
        return html! {};
    }
    let height = ROW * rows.len() as f64;
    html! {
        h3 { "Scopes" }
        svg viewBox={ "0 0 " (WIDTH) " " (height) } role="img" aria-label="scopes over allocations" {
            @for (row, from, width, part, range) in &bands {
                @let name = part.last().copied().unwrap_or_default();
                g {
                    title { (part.join("/")) ": allocations " (range.start) " to " (range.end) }
                    rect x=(tenths(*from)) y=(*row as f64 * ROW) width=(tenths(*width)) height=(ROW - 1.0)
                        fill=(colour(&part.join("/"))) {}
                    @if name.len() as f64 * LETTER < *width {
                        text x=(tenths(from + 3.0)) y=(*row as f64 * ROW + 11.5) { (name) }
                    }
                }
            }
        }
    }
}

/// Where buffers lie in the pages that are shared, each as long as it lives.
fn map(report: &Report, branch: &Branch) -> Markup {
    let all = branch.buffers.iter();
    let mut pieces: Vec<_> = all
        .flat_map(|buffer| buffer.pieces.iter().map(move |piece| (buffer, piece)))
        .collect();
    let top = pieces.iter().map(|(_, piece)| piece.end.0).max();
    let Some(top) = top else {
        return html! {};
    };
    let count = pieces.len();
    pieces.sort_by_key(|(_, piece)| Reverse(piece.end.0 - piece.start.0));
    pieces.truncate(PIECES);
    pieces.retain(|(_, piece)| (piece.end.0 - piece.start.0) as f64 * MAP >= LOWEST * top as f64);
    let left_out = count - pieces.len();
    let apart = branch.buffers.iter().filter(|buffer| buffer.outlives);
    let apart = (apart.clone().count(), apart.map(|buffer| buffer.size.0));
    let apart = (apart.0, Bytes(apart.1.sum()));
    let y = |bytes: Bytes| MAP - bytes.0 as f64 / top as f64 * MAP;
    html! {
        h3 { "Where each buffer lies, in " (Bytes(top)) " of pages" }
        svg viewBox={ "0 0 " (WIDTH) " " (MAP) } role="img" aria-label="places over allocations" {
            @for (buffer, piece) in &pieces {
                @let Buffer { lifespan, .. } = buffer;
                rect x=(tenths(x(branch, lifespan.start))) y=(tenths(y(piece.end)))
                    width=(tenths(x(branch, lifespan.end - lifespan.start)))
                    height=(tenths(y(piece.start) - y(piece.end)))
                    fill=(colour(&report.scopes[buffer.scope])) opacity=(shade(buffer)) {
                    title {
                        (report.scopes[buffer.scope]) ": " (buffer.size) ", allocations " (lifespan.start) " to "
                        (lifespan.end) ", at " (piece.start)
                    }
                }
            }
        }
        @if left_out > 0 { p.small { (left_out) " smaller pieces are left out." } }
        @if apart.0 > 0 {
            p.small { "Buffers that outlive the step lie apart: " (apart.0) " of " (apart.1) "." }
        }
    }
}

fn of_peak(report: &Report, branch: &Branch, mut largest: Vec<&Buffer>, peak: Bytes) -> Markup {
    let share = |bytes: Bytes| bytes.0 as f64 * 100.0 / peak.0.max(1) as f64;
    let scopes = report.scopes_at_peak(branch);
    let rest = scopes.get(LINES..).unwrap_or_default();
    let rest = (rest.len(), Bytes(rest.iter().map(|(_, b, _)| b.0).sum()));
    largest.sort_by_key(|buffer| Reverse(buffer.size));
    largest.truncate(LINES);
    html! {
        h3 { "At the peak, by scope" }
        table {
            tr { th { "scope" } th.number { "bytes" } th.number { "share" } th.number { "buffers" } th {} }
            @for &(scope, bytes, count) in scopes.iter().take(LINES) {
                tr {
                    td { code { (report.scopes[scope]) } }
                    td.number { (bytes) }
                    td.number { (format!("{:.1} %", share(bytes))) }
                    td.number { (count) }
                    td.bar { span style=(format!(
                        "width:{:.1}%;background:{}", share(bytes), colour(&report.scopes[scope])
                    )) {} }
                }
            }
            @if rest.0 > 0 {
                tr {
                    td { "others: " (rest.0) } td.number { (rest.1) }
                    td.number { (format!("{:.1} %", share(rest.1))) } td {} td {}
                }
            }
        }
        h3 { "At the peak, the largest buffers" }
        table {
            tr {
                th { "scope" } th.number { "bytes" } th.number { "of its size" } th.number { "allocated" }
                th.number { "freed before" }
            }
            @for buffer in largest {
                tr {
                    td { code { (report.scopes[buffer.scope]) } }
                    td.number { (buffer.size) }
                    td.number { "no. " (buffer.nth + 1) }
                    td.number { (buffer.lifespan.start) }
                    td.number {
                        @if buffer.outlives { "outlives the step" } @else { (buffer.lifespan.end) }
                    }
                }
            }
        }
    }
}

fn all_scopes(stats: &Stats) -> Markup {
    if stats.scopes.is_empty() {
        return html! {};
    }
    html! {
        details {
            summary { "All scopes: " (stats.scopes.len()) }
            table {
                tr {
                    th { "scope" } th.number { "runs" } th.number { "most live in it" } th.number { "breaks" }
                    th.number { "surviving positions" }
                }
                @for scope in &stats.scopes {
                    tr {
                        td { code { (scope.path) } }
                        td.number { (scope.runs) }
                        td.number { (scope.peak) }
                        td.number { (scope.breaks) }
                        td.number { (scope.survivor_positions) }
                    }
                }
            }
        }
    }
}

/// The same scope has the same colour in all pictures, whatever the step's name.
fn colour(path: &str) -> String {
    let inner = path.split_once('/').map_or(path, |(_, inner)| inner);
    let hash = inner.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    format!("hsl({},{}%,60%)", hash % 360, 45 + hash / 360 % 30)
}

/// Tells buffers of one scope apart.
fn shade(buffer: &Buffer) -> String {
    let number = buffer.size.0 / 512 * 7 + u64::from(buffer.nth) * 3;
    tenths(0.6 + (number % 5) as f64 / 10.0)
}

fn tenths(number: f64) -> String {
    format!("{number:.1}")
}
