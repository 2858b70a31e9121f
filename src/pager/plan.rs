//! Which pages of weights that do not fit have memory of their own, and which share frames.
//!
//! ```text
//!   groups in order of use    | a a a a | b b b | c c c c c |
//!   kept                        a a       b       c c          the same share of each group
//!   streamed                        0 1     2 3       0 1 2    frame of the ring, in turn
//! ```
//!
//! Every group keeps the same share of its pages, so that copying is spread evenly over the work and the
//! ring needs room only for what two groups in a row stream: one is used while the next one comes in. What
//! two groups use (a page with the end of one and the begin of the next) is kept.
//!
//! Pure: knows nothing of devices. May import: nothing.

use std::collections::BTreeMap;

/// Steps in which the share that is kept is tried.
const STEPS: usize = 1000;

/// The pages that share each frame, for groups in order of use, each with its pages in ascending order, and
/// `frames` frames for all. No ring where all of it fits; `None` where a group does not.
pub(super) fn plan(groups: &[Vec<u32>], frames: usize) -> Option<Vec<Vec<u32>>> {
    let mut uses: BTreeMap<u32, u32> = BTreeMap::new();
    for &page in groups.iter().flatten() {
        *uses.entry(page).or_default() += 1;
    }
    if uses.len() <= frames {
        return Some(Vec::new());
    }
    let own: Vec<Vec<u32>> = groups
        .iter()
        .map(|group| group.iter().copied().filter(|page| uses[page] == 1).collect())
        .collect();
    let shared = uses.values().filter(|&&count| count > 1).count();
    let left = frames.checked_sub(shared)?;
    let kept_of = |group: &Vec<u32>, share: usize| group.len() * share / STEPS;
    let kept = |share| own.iter().map(|group| kept_of(group, share)).sum::<usize>();
    // What a group and the one after it stream; the first one comes after the last.
    let window = |share| {
        let streamed: Vec<usize> = own
            .iter()
            .map(|group| group.len() - kept_of(group, share))
            .collect();
        let next = streamed.iter().cycle().skip(1);
        let pairs = streamed.iter().zip(next).map(|(one, next)| one + next);
        pairs.max().unwrap_or(0)
    };
    let fits = |&share: &usize| kept(share) + window(share) <= left;
    let share = (0..STEPS).rev().find(fits).unwrap_or(0);
    // Without room for two groups the next one comes in as far as there is room.
    let ring = left - kept(share).min(left);
    if own.iter().any(|group| group.len() - kept_of(group, share) > ring) {
        return None;
    }
    let streamed = own.iter().flat_map(|group| &group[kept_of(group, share)..]);
    let mut rings: Vec<Vec<u32>> = Vec::new();
    for (turn, &page) in streamed.enumerate() {
        match rings.get_mut(turn % ring) {
            Some(members) => members.push(page),
            None => rings.push(vec![page]),
        }
    }
    Some(rings)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Groups of these sizes one after the other.
    fn groups(sizes: &[u32]) -> Vec<Vec<u32>> {
        let mut next = 0;
        let group = |&size: &u32| {
            next += size;
            (next - size..next).collect()
        };
        sizes.iter().map(group).collect()
    }

    fn check(groups: &[Vec<u32>], frames: usize, rings: &[Vec<u32>]) {
        let streamed: usize = rings.iter().map(Vec::len).sum();
        let mut all: Vec<u32> = groups.iter().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        assert!(all.len() - streamed + rings.len() <= frames, "within the frames");
        for group in groups {
            let mut frames_of: Vec<usize> = Vec::new();
            for page in group {
                frames_of.extend(rings.iter().position(|ring| ring.contains(page)));
            }
            let count = frames_of.len();
            frames_of.sort_unstable();
            frames_of.dedup();
            assert_eq!(frames_of.len(), count, "a group is in memory at once");
        }
    }

    #[test]
    fn what_fits_has_memory_of_its_own() {
        assert_eq!(plan(&groups(&[3, 4, 5]), 12), Some(vec![]));
    }

    #[test]
    fn every_group_keeps_its_share_and_two_in_a_row_fit() {
        let groups = groups(&[10; 6]);
        let rings = plan(&groups, 40).unwrap();
        check(&groups, 40, &rings);
        // Five of ten pages of each group are kept: 30 frames, and 10 for two times 5 that stream.
        assert_eq!(rings.len(), 10);
        let streamed: usize = rings.iter().map(Vec::len).sum();
        assert_eq!(streamed, 30);
        for pair in groups.windows(2) {
            let ring_of = |page: &u32| rings.iter().position(|ring| ring.contains(page));
            let mut used: Vec<usize> = pair.iter().flatten().filter_map(ring_of).collect();
            let count = used.len();
            used.sort_unstable();
            used.dedup();
            assert_eq!(used.len(), count, "the next group comes in beside this one");
        }
    }

    #[test]
    fn pages_of_two_groups_are_kept() {
        let groups = vec![vec![0, 1, 2, 3], vec![3, 4, 5, 6], vec![6, 7, 8, 9]];
        let rings = plan(&groups, 7).unwrap();
        check(&groups, 7, &rings);
        assert!(rings.iter().flatten().all(|&page| page != 3 && page != 6));
    }

    #[test]
    fn a_group_that_does_not_fit_is_no_plan() {
        assert_eq!(plan(&groups(&[4, 9, 2]), 8), None);
        let groups = groups(&[4, 9, 2]);
        check(&groups, 9, &plan(&groups, 9).unwrap());
    }

    #[test]
    fn plans_of_any_sizes_hold() {
        let mut random = 1_u64;
        let mut below = move |end: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % end
        };
        for _ in 0..2000 {
            let count = 1 + below(12);
            let mut all = Vec::new();
            let mut next = 0_u32;
            for _ in 0..count {
                let size = 1 + below(20) as u32;
                // Now and then a group begins on the last page of the one before.
                next -= u32::from(next > 0 && below(3) == 0);
                all.push((next..next + size).collect::<Vec<u32>>());
                next += size;
            }
            let frames = 1 + below(u64::from(next) + 4) as usize;
            if let Some(rings) = plan(&all, frames) {
                check(&all, frames, &rings);
            }
        }
    }
}
