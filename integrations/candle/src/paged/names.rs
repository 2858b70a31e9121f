//! Weights that are used together, by their names.
//!
//! ```text
//!   whole model ─too large─> double_blocks ─too large─> double_blocks.0, double_blocks.1, …
//! ```
//!
//! Names are paths, and a part of a model has its weights under one prefix. Each largest prefix that is no
//! larger than a limit is a group; what a model reads in which order inside of one does not matter.

/// Groups of the weights with these names and sizes, each by numbers in ascending order. Every weight is in one.
pub(super) fn groups(weights: &[(&str, u64)], limit: u64) -> Vec<Vec<usize>> {
    let mut groups = Vec::new();
    split(weights, (0..weights.len()).collect(), 0, limit, &mut groups);
    groups
}

fn split(
    weights: &[(&str, u64)],
    members: Vec<usize>,
    depth: usize,
    limit: u64,
    groups: &mut Vec<Vec<usize>>,
) {
    let size: u64 = members.iter().map(|&member| weights[member].1).sum();
    let is_whole = |&member: &usize| weights[member].0.split('.').count() <= depth;
    if size <= limit || members.len() < 2 || members.iter().all(is_whole) {
        groups.push(members);
        return;
    }
    let part = |member: usize| weights[member].0.split('.').nth(depth);
    let mut parts: Vec<(Option<&str>, Vec<usize>)> = Vec::new();
    for member in members {
        let name = part(member);
        match parts.iter_mut().find(|(other, _)| *other == name) {
            Some((_, members)) => members.push(member),
            None => parts.push((name, vec![member])),
        }
    }
    for (_, members) in parts {
        split(weights, members, depth + 1, limit, groups);
    }
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
}
