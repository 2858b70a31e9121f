//! The report: what it says of buffers is so, and the page holds all of it and nothing from elsewhere.

use std::sync::Arc;

use memory_compiler::device::Host;
use memory_compiler::report::{Branch, Report};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Options, Step, scope};

const GRANULE: Bytes = Bytes::kib(64);

fn compiler() -> Compiler {
    let device = Arc::new(Host::new(GRANULE).unwrap());
    let options = Options {
        address_space: Bytes::gib(1),
        ..Options::default()
    };
    Compiler::new(device, options).unwrap()
}

fn alloc(step: &Step<'_>, size: Bytes) -> Address {
    match step.alloc(size).unwrap() {
        Allocation::Here(address) => address,
        Allocation::Elsewhere => panic!("served elsewhere"),
    }
}

/// Two scopes, and what each has: 300 KiB from before, then 500 KiB beside it, then 100 KiB.
fn run(compiler: &mut Compiler, kept: &mut Vec<Address>) {
    let step = compiler.begin("cond").unwrap();
    for address in kept.drain(..) {
        step.free(address).unwrap();
    }
    let first = {
        let _scope = scope("down & <up>");
        alloc(&step, Bytes::kib(300))
    };
    let _scope = scope("mid");
    let second = alloc(&step, Bytes::kib(500));
    step.free(first).unwrap();
    let third = alloc(&step, Bytes::kib(100));
    step.free(third).unwrap();
    step.free(second).unwrap();
    kept.push(alloc(&step, Bytes::kib(8)));
    step.finish().unwrap();
}

/// A compiler after four such steps.
fn settled() -> Compiler {
    let mut compiler = compiler();
    let mut kept = Vec::new();
    for _ in 0..4 {
        run(&mut compiler, &mut kept);
    }
    compiler
}

#[test]
fn buffers_have_their_scopes_lifespans_and_places() {
    let mut compiler = settled();
    let report = compiler.report();
    assert_eq!(report.stats, compiler.stats());
    let branch = &report.branches[0];
    assert_eq!(branch.name, "cond");
    let scope_of = |number: usize| report.scopes[branch.buffers[number].scope].as_str();
    assert_eq!((scope_of(0), scope_of(1)), ("cond/down & <up>", "cond/mid"));
    let buffers: Vec<_> = branch
        .buffers
        .iter()
        .map(|buffer| (buffer.size, buffer.lifespan.clone(), buffer.outlives))
        .collect();
    assert_eq!(
        buffers,
        [
            (Bytes::kib(300), 0..2, false),
            (Bytes::kib(500), 1..3, false),
            (Bytes::kib(100), 2..3, false),
            (Bytes::kib(8), 3..4, true),
        ]
    );
    assert_eq!(branch.live(), [300, 800, 600, 8].map(Bytes::kib));
    assert_eq!(branch.peak(), Some((1, Bytes::kib(800))));
    let at_peak: Vec<_> = report
        .scopes_at_peak(branch)
        .into_iter()
        .map(|(scope, bytes, count)| (report.scopes[scope].as_str(), bytes, count))
        .collect();
    assert_eq!(
        at_peak,
        [
            ("cond/mid", Bytes::kib(500), 1),
            ("cond/down & <up>", Bytes::kib(300), 1),
        ]
    );
    check_places(&report);
}

/// Buffers of a branch that are live at once share no byte, and have all of theirs.
fn check_places(report: &Report) {
    for Branch { buffers, .. } in &report.branches {
        for (number, buffer) in buffers.iter().enumerate() {
            if buffer.outlives {
                assert_eq!(buffer.pieces, []);
                continue;
            }
            let sum: u64 = buffer.pieces.iter().map(|p| p.end.0 - p.start.0).sum();
            assert_eq!(sum, buffer.size.0, "{buffer:?}");
            let later = buffers[number + 1..].iter();
            for other in later.filter(|other| other.lifespan.start < buffer.lifespan.end) {
                for (one, two) in buffer
                    .pieces
                    .iter()
                    .flat_map(|one| other.pieces.iter().map(move |two| (one, two)))
                {
                    assert!(
                        one.end <= two.start || two.end <= one.start,
                        "{buffer:?} and {other:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn places_are_disjoint_in_random_steps_before_and_after_a_compile() {
    let mut random = 7_u64;
    let mut below = move |end: u64| {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (random >> 33) % end
    };
    let mut compiler = compiler();
    for program in 0..20 {
        // Sizes, and after how many more allocations each goes.
        let count = 20 + below(60);
        let events: Vec<(Bytes, u64)> = (0..count)
            .map(|_| (Bytes(512 * (1 + below(900))), below(12)))
            .collect();
        for _ in 0..2 {
            let step = compiler.begin(&format!("program {program}")).unwrap();
            let mut live: Vec<(u64, Address)> = Vec::new();
            for (now, &(size, span)) in (0..).zip(&events) {
                live.retain(|&(end, address)| {
                    let stays = end > now;
                    if !stays {
                        step.free(address).unwrap();
                    }
                    stays
                });
                live.push((now + 1 + span, alloc(&step, size)));
            }
            live.into_iter()
                .for_each(|(_, address)| step.free(address).unwrap());
            step.finish().unwrap();
        }
    }
    for _ in 0..2 {
        let report = compiler.report();
        assert_eq!(report.branches.len(), 20);
        for (branch, stats) in report.branches.iter().zip(&report.stats.branches) {
            assert_eq!(branch.name, stats.name);
            assert_eq!(branch.buffers.len() as u64, stats.allocs);
            assert_eq!(branch.peak().map(|(_, peak)| peak), Some(stats.peak));
        }
        check_places(&report);
        compiler.compile().unwrap();
    }
}

#[test]
fn the_page_has_all_of_it_and_fetches_nothing() {
    let mut compiler = settled();
    let page = compiler.report().html();
    for text in [
        "<!DOCTYPE html>",
        "cond/down &amp; &lt;up&gt;",
        "Most is live after allocation 1 of 4",
        "<b>800.00 KiB</b>, buffers: 2.",
        "Buffers that outlive the step lie apart: 1 of 8.00 KiB.",
        "500.00 KiB, allocations 1 to 3",
        "viewBox=\"0 0 1000 140\"",
        "All scopes: 3",
    ] {
        assert!(page.contains(text), "{text} is missing in {page}");
    }
    for text in ["<script", "http", "<up>", "src=", "@import"] {
        assert!(!page.contains(text), "{text}");
    }
}

#[test]
fn without_a_finished_step_the_page_says_so() {
    let page = compiler().report().html();
    assert!(page.contains("No step has finished yet."), "{page}");
}
