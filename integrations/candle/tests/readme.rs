//! The README's example of this crate is the one that runs in its documentation.

/// The lines of the first block that contains `needle`, without comment marks.
fn block<'t>(text: &'t str, needle: &str, mark: &str) -> Vec<&'t str> {
    let lines: Vec<&str> = text
        .lines()
        .map(|line| line.strip_prefix(mark).unwrap_or(line))
        .map(|line| {
            line.strip_prefix(' ')
                .filter(|_| !mark.is_empty())
                .unwrap_or(line)
        })
        .collect();
    let at = lines
        .iter()
        .position(|line| line.contains(needle))
        .expect("the example is there");
    let is_fence = |line: &&str| line.starts_with("```");
    let first = lines[..at]
        .iter()
        .rposition(is_fence)
        .expect("a block begins")
        + 1;
    let end = at + lines[at..].iter().position(is_fence).expect("a block ends");
    lines[first..end].to_vec()
}

#[test]
fn the_readmes_example_is_the_one_that_runs() {
    let needle = "memory_compiler_candle::compiler(&device)?";
    let readme = block(include_str!("../../../README.md"), needle, "");
    let documentation = block(include_str!("../src/lib.rs"), needle, "//!");
    assert_eq!(readme, documentation);
}
