//! The README's example of this crate is the one that runs in its documentation.

#[test]
fn the_readmes_example_is_the_one_that_runs() {
    let documentation = include_str!("../src/lib.rs").lines();
    let lines: Vec<&str> = documentation
        .map_while(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .skip_while(|line| *line != "```")
        .skip(1)
        .take_while(|line| *line != "```")
        .collect();
    assert!(lines.len() > 10, "there is an example: {lines:?}");
    let readme = include_str!("../../../README.md");
    assert!(readme.contains(&lines.join("\n")), "{}", lines.join("\n"));
}
