//! Weights that are used together, by their names.
//!
//! ```text
//!   whole model ─too large─> double_blocks ─too large─> double_blocks.0, double_blocks.1, …
//! ```
//!
//! Names are paths, and a part of a model has its weights under one prefix. Each largest prefix that is no
//! larger than a limit is a group; what a model reads in which order inside of one does not matter.
//!
//! Names come from files, so they may be of any length and depth: nothing here recurses, and each part of a name is
//! looked at once.

use std::collections::HashMap;

/// Groups of the weights with these names and sizes, each by numbers in ascending order. Every weight is in one.
pub(super) fn groups(weights: &[(&str, u64)], limit: u64) -> Vec<Vec<usize>> {
    let mut groups = Vec::new();
    // What each name has behind the prefix that is its group's so far; `None` where that is the whole name.
    let mut rests: Vec<Option<&str>> = weights.iter().map(|&(name, _)| Some(name)).collect();
    // Groups that may be too large, the first one last.
    let mut open = vec![(0..weights.len()).collect::<Vec<usize>>()];
    while let Some(members) = open.pop() {
        let size: u64 = members.iter().map(|&member| weights[member].1).sum();
        let is_whole = |&member: &usize| rests[member].is_none();
        if size <= limit || members.len() < 2 || members.iter().all(is_whole) {
            groups.push(members);
            continue;
        }
        let mut parts: Vec<Vec<usize>> = Vec::new();
        let mut part_of: HashMap<Option<&str>, usize> = HashMap::new();
        for member in members {
            let (name, rest) = match rests[member] {
                Some(rest) => match rest.split_once('.') {
                    Some((name, rest)) => (Some(name), Some(rest)),
                    None => (Some(rest), None),
                },
                None => (None, None),
            };
            rests[member] = rest;
            let part = *part_of.entry(name).or_insert_with(|| {
                parts.push(Vec::new());
                parts.len() - 1
            });
            parts[part].push(member);
        }
        open.extend(parts.into_iter().rev());
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_the_largest_prefix_within_the_limit() {
        let weights = [
            ("embed.weight", 4),
            ("blocks.0.mlp.weight", 6),
            ("blocks.0.norm.weight", 1),
            ("blocks.1.mlp.weight", 6),
            ("blocks.1.norm.weight", 1),
            ("head.weight", 3),
            ("head.bias", 1),
        ];
        let by = |limit| groups(&weights, limit);
        assert_eq!(by(22), [vec![0, 1, 2, 3, 4, 5, 6]]);
        assert_eq!(by(14), [vec![0], vec![1, 2, 3, 4], vec![5, 6]]);
        assert_eq!(by(7), [vec![0], vec![1, 2], vec![3, 4], vec![5, 6]]);
        let each: Vec<Vec<usize>> = (0..7).map(|weight| vec![weight]).collect();
        assert_eq!(by(1), each);
        assert!(groups(&[], 1).iter().all(Vec::is_empty));
    }
    #[test]
    fn names_of_any_depth_and_breadth_are_grouped_in_linear_time_on_a_small_stack() {
        let work = || {
            let trunk = "block.".repeat(100_000);
            let names: Vec<String> = ["a", "b", "b.c"]
                .iter()
                .map(|end| format!("{trunk}{end}"))
                .collect();
            let deep: Vec<(&str, u64)> = names.iter().map(|name| (&**name, 1)).collect();
            assert_eq!(groups(&deep, 3), [vec![0, 1, 2]]);
            assert_eq!(groups(&deep, 2), [vec![0], vec![1, 2]]);
            assert_eq!(groups(&deep, 1), [vec![0], vec![1], vec![2]]);
            let names: Vec<String> = (0..100_000)
                .map(|name| format!("layer{name}.weight"))
                .collect();
            let broad: Vec<(&str, u64)> = names.iter().map(|name| (&**name, 1)).collect();
            assert_eq!(groups(&broad, 1).len(), broad.len());
        };
        let began = std::time::Instant::now();
        let small = std::thread::Builder::new().stack_size(256 << 10);
        small
            .spawn(work)
            .expect("a thread")
            .join()
            .expect("it ends well");
        assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
    }
}
