//! Which pages of weights that do not fit have memory of their own, and which share frames.
//!
//! ```text
//!   groups in order of use    | a a a a | b b b | c c c c c |
//!   kept                        a a       b       c c          the same share of each group
//!   streamed                        0 1     2 3       0 1 2    frame of the ring, in turn
//! ```
//!
//! Every group keeps the same share of its pages, so that copying is spread evenly over the work and the
//! ring needs room only for what two groups in a row stream: one is used while the next one comes in. A page
//! counts for the group that uses it first; those that several groups use (with the end of one and the begin of
//! another) are the first to be kept. What a group streams has a frame each.
//!
//! Pure: knows nothing of devices. May import: nothing.

use std::collections::{BTreeMap, BTreeSet};

/// Steps in which the share that is kept is tried.
const STEPS: usize = 1000;

/// The pages that share each frame, for groups in order of use, each with its pages in ascending order, and
/// `frames` frames for all. No ring where all of it fits; `None` where a group does not.
pub(super) fn plan(groups: &[Vec<u32>], frames: usize) -> Option<Vec<Vec<u32>>> {
    let mut users: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (number, group) in groups.iter().enumerate() {
        for &page in group {
            users.entry(page).or_default().push(number);
        }
    }
    if users.len() <= frames {
        return Some(Vec::new());
    }
    // Pages by the group that uses them first, those that are best kept first.
    let own: Vec<Vec<u32>> = groups
        .iter()
        .enumerate()
        .map(|(number, group)| {
            let is_own = |page: &&u32| users[page][0] == number;
            let mut own: Vec<u32> = group.iter().filter(is_own).copied().collect();
            own.sort_by_key(|page| std::cmp::Reverse(users[page].len()));
            own
        })
        .collect();
    let streamed = |share: usize| -> BTreeSet<u32> {
        let of_group = |group: &Vec<u32>| group[group.len() * share / STEPS..].to_vec();
        own.iter().flat_map(of_group).collect()
    };
    // The most of these that a group and the one after it use; the first one comes after the last.
    let window = |pages: &BTreeSet<u32>| {
        let next = groups.iter().cycle().skip(1);
        let pairs = groups.iter().zip(next).map(|(one, next)| {
            let both: BTreeSet<&u32> = one.iter().chain(next).collect();
            both.into_iter().filter(|page| pages.contains(page)).count()
        });
        pairs.max().unwrap_or(0)
    };
    // More kept pages leave less room for the ring: the largest share is found by halving.
    let fits = |share: usize| {
        let pages = streamed(share);
        users.len() - pages.len() + window(&pages) <= frames
    };
    let (mut share, mut above) = (0, STEPS);
    while above - share > 1 {
        let middle = share.midpoint(above);
        if fits(middle) {
            share = middle;
        } else {
            above = middle;
        }
    }
    let pages = streamed(share);
    // Without room for two groups the next one comes in as far as there is room.
    let ring = frames.checked_sub(users.len() - pages.len())?;
    share_frames(groups, &users, &own, &pages, ring)
}

/// Gives each of `pages` one of `ring` frames, in turn, so that no two of a group have the same.
fn share_frames(
    groups: &[Vec<u32>],
    users: &BTreeMap<u32, Vec<usize>>,
    own: &[Vec<u32>],
    pages: &BTreeSet<u32>,
    ring: usize,
) -> Option<Vec<Vec<u32>>> {
    let mut rings: Vec<Vec<u32>> = vec![Vec::new(); ring.min(pages.len())];
    let mut taken: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); groups.len()];
    let mut turn = 0;
    for own in own {
        let mut own: Vec<u32> = own
            .iter()
            .copied()
            .filter(|page| pages.contains(page))
            .collect();
        own.sort_unstable();
        for page in own {
            let is_free = |frame: &usize| {
                let mut users = users[&page].iter();
                users.all(|&user| !taken[user].contains(frame))
            };
            let in_turn = (turn..rings.len()).chain(0..turn);
            let frame = in_turn.into_iter().find(is_free)?;
            turn = (frame + 1) % rings.len();
            rings[frame].push(page);
            users[&page].iter().for_each(|&user| {
                taken[user].insert(frame);
            });
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
        assert!(
            all.len() - streamed + rings.len() <= frames,
            "within the frames"
        );
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
    fn a_page_of_several_groups_is_the_first_to_be_kept() {
        let groups = vec![
            vec![0, 1, 2, 3, 20],
            vec![3, 4, 5, 6],
            vec![6, 7, 8, 9],
            vec![9, 10, 11, 20],
        ];
        for frames in [5, 6, 8, 11] {
            check(&groups, frames, &plan(&groups, frames).unwrap());
        }
        let rings = plan(&groups, 11).unwrap();
        assert!(
            rings
                .iter()
                .flatten()
                .all(|page| ![3, 6, 9, 20].contains(page))
        );
    }

    #[test]
    fn groups_that_lie_in_another_order_than_they_are_used_stream() {
        // Each group shares a page with the one before it in memory, which is used three groups earlier.
        let group = |number: u32| (4 * number..=4 * number + 4).collect::<Vec<u32>>();
        let groups: Vec<Vec<u32>> = (0..30).map(|turn| group(turn * 7 % 30)).collect();
        for frames in [60, 20, 10] {
            check(&groups, frames, &plan(&groups, frames).unwrap());
        }
    }

    #[test]
    fn groups_that_begin_within_pages_stream_in_little_memory() {
        // Forty layers of two pages and a bit.
        let groups: Vec<Vec<u32>> = (0..40)
            .map(|layer| (2 * layer..2 * layer + 3).collect())
            .collect();
        for frames in [24, 8, 6, 5] {
            check(&groups, frames, &plan(&groups, frames).unwrap());
        }
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
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
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
