//! Which pages of weights that do not fit have memory of their own, and which share frames.
//!
//! ```text
//!   groups in order of use    | a a a a | b b b | c c c c c |
//!   kept                        a a       b       c c          some pages of each group
//!   streamed                        0 1     2 3       0 1 2    frame of the ring, in turn
//! ```
//!
//! A page that is streamed comes in once its frame's last page was used. Where nothing is known of times, every
//! group keeps the same share of its pages, and the ring has room for what two groups in a row stream: one is used
//! while the next one comes in. Where it is known how long each group's work and a copy take, rings of several sizes
//! are tried: each time pages of the group that waits longest are kept, and the plan in which a simulated round
//! is shortest, and little is copied, wins.
//!
//! A page counts for the group that uses it first; those that several groups use (with the end of one and the begin
//! of another) are the first to be kept. What a group streams has a frame each.
//!
//! Pure: knows nothing of devices. May import: nothing.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Steps in which the share that is kept is tried.
const STEPS: usize = 1000;

/// Turns in which pages are chosen that are kept, where times are known.
const TURNS: usize = 32;

/// Sizes of the ring that are tried then.
const SIZES: usize = 16;

/// How much time of copies is worth one of a round: who copies needs the bus and the memory that others need too.
const WORTH: u64 = 64;

/// How long things take, in any one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Times {
    /// The work of each group.
    pub work: Vec<u64>,
    /// A copy of a page.
    pub page: u64,
}

/// The pages that share each frame, for groups in order of use, each with its pages in ascending order, and
/// `frames` frames for all. No ring where all of it fits; `None` where a group does not.
pub(super) fn plan(
    groups: &[Vec<u32>],
    frames: usize,
    times: Option<&Times>,
) -> Option<Vec<Vec<u32>>> {
    let pages = Pages::new(groups);
    if pages.users.len() <= frames {
        return Some(Vec::new());
    }
    let even = pages.even(frames);
    let Some(times) = times else {
        return pages.share_frames(&even);
    };
    let mut choices: Vec<(u64, Choice)> = std::iter::once(even)
        .chain(pages.timed(frames, times))
        .map(|choice| {
            let copies = choice.total() as u64 * times.page;
            (choice.round(times).0 + copies / WORTH, choice)
        })
        .collect();
    choices.sort_by_key(|&(cost, _)| cost);
    choices
        .iter()
        .find_map(|(_, choice)| pages.share_frames(choice))
}

/// How many pages each group streams, and over how many frames.
#[derive(Clone, Debug)]
struct Choice {
    streamed: Vec<usize>,
    ring: usize,
}

impl Choice {
    fn total(&self) -> usize {
        self.streamed.iter().sum()
    }

    /// Of each group, how many of its copies can come after whose work: a group's, of the round before or of this
    /// one.
    fn gates(&self) -> Vec<Vec<(Gate, u64)>> {
        let mut owners = Vec::with_capacity(self.total());
        for (group, &count) in self.streamed.iter().enumerate() {
            owners.extend(std::iter::repeat_n(group, count));
        }
        let last = owners.len().saturating_sub(1);
        let mut gates: Vec<Vec<(Gate, u64)>> = vec![Vec::new(); self.streamed.len()];
        for (page, &group) in owners.iter().enumerate() {
            let gate = match page.checked_sub(self.ring) {
                Some(before) => Gate::Now(owners[before]),
                None => Gate::Before(owners[page + (last - page) / self.ring * self.ring]),
            };
            match gates[group].last_mut() {
                Some((other, count)) if *other == gate => *count += 1,
                _ => gates[group].push((gate, 1)),
            }
        }
        gates
    }

    /// How long a round takes when others came before, and how long each group waits in it.
    fn round(&self, times: &Times) -> (u64, Vec<u64>) {
        let gates = self.gates();
        let mut waits = vec![0; self.streamed.len()];
        let (mut before, mut done) = (vec![0; self.streamed.len()], vec![0; self.streamed.len()]);
        let (mut now, mut copied, mut began) = (0, 0, 0);
        for _ in 0..3 {
            began = now;
            for (group, gates) in gates.iter().enumerate() {
                for &(gate, count) in gates {
                    let free = match gate {
                        Gate::Before(group) => before[group],
                        Gate::Now(group) => done[group],
                    };
                    copied = free.max(copied) + count * times.page;
                }
                if !gates.is_empty() {
                    waits[group] = copied.saturating_sub(now);
                    now = now.max(copied);
                }
                now += times.work[group];
                done[group] = now;
            }
            std::mem::swap(&mut before, &mut done);
        }
        (now - began, waits)
    }
}

/// The work after which a frame is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    /// Of a group in the round before.
    Before(usize),
    /// Of a group in this round.
    Now(usize),
}

/// Pages by who uses them.
struct Pages<'g> {
    groups: &'g [Vec<u32>],
    /// The groups that use each page.
    users: BTreeMap<u32, Vec<usize>>,
    /// Of each group, those that it uses first, the best kept ones in front.
    own: Vec<Vec<u32>>,
}

impl<'g> Pages<'g> {
    fn new(groups: &'g [Vec<u32>]) -> Self {
        let mut users: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (number, group) in groups.iter().enumerate() {
            for &page in group {
                users.entry(page).or_default().push(number);
            }
        }
        let own = groups.iter().enumerate().map(|(number, group)| {
            let is_own = |page: &&u32| users[page][0] == number;
            let mut own: Vec<u32> = group.iter().filter(is_own).copied().collect();
            own.sort_by_key(|page| Reverse(users[page].len()));
            own
        });
        let own = own.collect();
        Self { groups, users, own }
    }

    fn streamed(&self, counts: &[usize]) -> BTreeSet<u32> {
        let of_group = |(own, &count): (&Vec<u32>, &usize)| own[own.len() - count..].to_vec();
        self.own.iter().zip(counts).flat_map(of_group).collect()
    }

    /// Every group keeps the same share, and the ring has room for two groups in a row, if there is any.
    fn even(&self, frames: usize) -> Choice {
        let counts = |share: usize| -> Vec<usize> {
            let count = |own: &Vec<u32>| own.len() - own.len() * share / STEPS;
            self.own.iter().map(count).collect()
        };
        // The most of these that a group and the one after it use; the first one comes after the last.
        let window = |pages: &BTreeSet<u32>| {
            let next = self.groups.iter().cycle().skip(1);
            let pairs = self.groups.iter().zip(next).map(|(one, next)| {
                let both: BTreeSet<&u32> = one.iter().chain(next).collect();
                both.into_iter().filter(|page| pages.contains(page)).count()
            });
            pairs.max().unwrap_or(0)
        };
        // More kept pages leave less room for the ring: the largest share is found by halving.
        let fits = |share: usize| {
            let pages = self.streamed(&counts(share));
            self.users.len() - pages.len() + window(&pages) <= frames
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
        let streamed = counts(share);
        let kept = self.users.len() - streamed.iter().sum::<usize>();
        // Without room for two groups nothing is kept, and the next one comes in as far as there is room.
        let ring = frames - kept;
        Choice { streamed, ring }
    }

    /// Choices for rings of several sizes. With a ring of `n` frames `excess + n` pages have to stream, and frames
    /// are free in the order of use from one round to the next where that is a multiple of `n`.
    fn timed(&self, frames: usize, times: &Times) -> Vec<Choice> {
        let excess = self.users.len() - frames;
        let sizes = (1..).map(|parts| excess.div_ceil(parts));
        let mut sizes: Vec<usize> = sizes
            .take(2 * SIZES)
            .filter(|&ring| ring <= frames)
            .take(SIZES)
            .collect();
        sizes.push(frames);
        sizes.dedup();
        sizes
            .into_iter()
            .filter(|&ring| ring > 0)
            .filter_map(|ring| {
                let multiple = (excess + ring).next_multiple_of(ring);
                let total = multiple.min(self.users.len()).max(excess + ring);
                // A page of several groups may have to come in for each of them.
                let once = |page: &&u32| self.users[page].len() == 1;
                let once = |own: &Vec<u32>| own.iter().filter(once).count();
                let all = |own: &Vec<u32>| own.len();
                let choice = self.timed_over(ring, total, times, once);
                choice.or_else(|| self.timed_over(ring, total, times, all))
            })
            .collect()
    }

    /// Keeps pages of those that wait longest until only `total` stream, of each group at most `most`.
    fn timed_over(
        &self,
        ring: usize,
        total: usize,
        times: &Times,
        most: impl Fn(&Vec<u32>) -> usize,
    ) -> Option<Choice> {
        let streamed: Vec<usize> = self.own.iter().map(|own| most(own).min(ring)).collect();
        let mut choice = Choice { streamed, ring };
        let mut left = choice.total().checked_sub(total)?;
        let turn = left.div_ceil(TURNS).max(1);
        while left > 0 {
            let (_, waits) = choice.round(times);
            let mut streams: Vec<usize> = (0..waits.len())
                .filter(|&group| choice.streamed[group] > 0)
                .collect();
            streams.sort_by_key(|&group| Reverse((waits[group], choice.streamed[group])));
            // Of several, where the first one has too few: a turn is a simulation.
            let mut kept = turn.min(left);
            left -= kept;
            for group in streams {
                let of_group = kept.min(choice.streamed[group]);
                choice.streamed[group] -= of_group;
                kept -= of_group;
            }
        }
        Some(choice)
    }

    /// Gives each page that streams a frame of the ring, in turn, so that no two of a group have the same.
    fn share_frames(&self, choice: &Choice) -> Option<Vec<Vec<u32>>> {
        let pages = self.streamed(&choice.streamed);
        let mut rings: Vec<Vec<u32>> = vec![Vec::new(); choice.ring.min(pages.len())];
        let mut taken: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); self.groups.len()];
        let mut turn = 0;
        for own in &self.own {
            let mut own: Vec<u32> = own
                .iter()
                .copied()
                .filter(|page| pages.contains(page))
                .collect();
            own.sort_unstable();
            for page in own {
                let is_free = |frame: &usize| {
                    let mut users = self.users[&page].iter();
                    users.all(|&user| !taken[user].contains(frame))
                };
                let in_turn = (turn..rings.len()).chain(0..turn);
                let frame = in_turn.into_iter().find(is_free)?;
                turn = (frame + 1) % rings.len();
                rings[frame].push(page);
                self.users[&page].iter().for_each(|&user| {
                    taken[user].insert(frame);
                });
            }
        }
        Some(rings)
    }
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
        assert_eq!(plan(&groups(&[3, 4, 5]), 12, None), Some(vec![]));
    }

    #[test]
    fn every_group_keeps_its_share_and_two_in_a_row_fit() {
        let groups = groups(&[10; 6]);
        let rings = plan(&groups, 40, None).unwrap();
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
            check(&groups, frames, &plan(&groups, frames, None).unwrap());
        }
        let rings = plan(&groups, 11, None).unwrap();
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
            check(&groups, frames, &plan(&groups, frames, None).unwrap());
        }
    }

    #[test]
    fn groups_that_begin_within_pages_stream_in_little_memory() {
        // Forty layers of two pages and a bit.
        let groups: Vec<Vec<u32>> = (0..40)
            .map(|layer| (2 * layer..2 * layer + 3).collect())
            .collect();
        for frames in [24, 8, 6, 5] {
            check(&groups, frames, &plan(&groups, frames, None).unwrap());
        }
    }

    #[test]
    fn a_group_that_does_not_fit_is_no_plan() {
        assert_eq!(plan(&groups(&[4, 9, 2]), 8, None), None);
        let groups = groups(&[4, 9, 2]);
        check(&groups, 9, &plan(&groups, 9, None).unwrap());
    }

    #[test]
    fn a_plan_for_times_waits_less_than_one_that_keeps_the_same_share_of_all() {
        let groups = groups(&[20; 6]);
        let times = Times {
            work: vec![300, 300, 300, 1, 1, 1],
            page: 10,
        };
        let pages = Pages::new(&groups);
        let (even, _) = pages.even(90).round(&times);
        let timed = pages.timed(90, &times);
        let timed = timed.iter().map(|choice| choice.round(&times).0).min();
        let timed = timed.unwrap();
        // What is used in the three units of the last three groups can stay.
        assert!((903..even).contains(&timed), "{timed}, {even}");
        check(&groups, 90, &plan(&groups, 90, Some(&times)).unwrap());
    }

    #[test]
    fn a_pause_between_rounds_makes_no_bad_plan_good() {
        let groups = groups(&[50; 60]);
        for frames in [2000, 2400] {
            for work in [500, 1000] {
                let truth = Times {
                    work: vec![work; 60],
                    page: 40,
                };
                let mut paused = truth.clone();
                *paused.work.last_mut().unwrap() = 30_000_000;
                let pages = Pages::new(&groups);
                let even = pages.even(frames).round(&truth).0;
                // What was chosen, judged by the true times.
                let rings = plan(&groups, frames, Some(&paused)).unwrap();
                check(&groups, frames, &rings);
                let streamed = |group: &Vec<u32>| {
                    let streams = |page: &&u32| rings.iter().any(|ring| ring.contains(page));
                    group.iter().filter(streams).count()
                };
                let chosen = Choice {
                    streamed: groups.iter().map(streamed).collect(),
                    ring: rings.len(),
                };
                let (chosen, _) = chosen.round(&truth);
                assert!(chosen <= even + even / 25, "{chosen}, {even}");
            }
        }
    }

    #[test]
    fn a_page_of_several_groups_does_not_stream_if_others_can() {
        let groups: Vec<Vec<u32>> = (0..12)
            .map(|turn| (4 * turn..=4 * turn + 4).collect())
            .collect();
        let times = Times {
            work: (0..12).map(|turn| 20 + 30 * (turn % 3)).collect(),
            page: 10,
        };
        let rings = plan(&groups, 30, Some(&times)).unwrap();
        check(&groups, 30, &rings);
        let shared = |page: &&u32| page.is_multiple_of(4) && **page > 0 && **page < 48;
        assert_eq!(rings.iter().flatten().filter(shared).count(), 0);
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
            let times = Times {
                work: all.iter().map(|_| below(1000)).collect(),
                page: below(50),
            };
            let (even, timed) = (plan(&all, frames, None), plan(&all, frames, Some(&times)));
            assert!(even.is_none() || timed.is_some());
            for rings in even.into_iter().chain(timed) {
                check(&all, frames, &rings);
            }
        }
    }
}
