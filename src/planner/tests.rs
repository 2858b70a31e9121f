#![expect(clippy::single_range_in_vec_init, reason = "an item with one lifespan")]

use std::io::BufReader;
use std::ops::Range;

use super::search::Random;
use super::*;
use crate::lifespans;
use crate::trace::Trace;

/// Time enough that the count of moves ends every search.
const LONG: Duration = Duration::from_secs(600);
const NOTHING: Rules = Rules {
    time_limit: LONG,
    more_orders: false,
    aliasing: false,
    both_ends: false,
    search: false,
};

/// Interleaved lifespans; sizes from one unit to three pages of eight.
fn random_problem(seed: u64, items: u64, most_lifespans: u64) -> Problem {
    let mut random = Random(seed * 2 + 1);
    random.below(9);
    let items: Vec<_> = (0..items)
        .map(|_| {
            let spans: Vec<Range<u64>> = (0..=random.below(most_lifespans))
                .map(|_| {
                    let begin = random.below(200);
                    begin..begin + 1 + random.below(40)
                })
                .collect();
            (Bytes(512 * (1 + random.below(24))), spans)
        })
        .collect();
    Problem::new(Bytes(8 * 512), items).unwrap()
}

fn held_by(rules: Rules, most_lifespans: u64) -> u64 {
    (0..40)
        .map(|seed| {
            plan(&random_problem(seed, 60, most_lifespans), rules)
                .plan
                .frame_count
        })
        .sum()
}

#[test]
fn every_strategy_gives_plans_that_the_checker_accepts() {
    for seed in 0..60 {
        let problem = random_problem(seed, 80, 1 + seed % 3);
        let strategies: [Box<dyn Strategy>; 6] = [
            Box::new(BestFit::new(Order::Size)),
            Box::new(BestFit::new(Order::Area)),
            Box::new(BestFit::new(Order::Lifespan)),
            Box::new(Aliasing { both_ends: false }),
            Box::new(Aliasing { both_ends: true }),
            Box::new(Perturb),
        ];
        for strategy in strategies {
            let plan = strategy
                .plan(
                    &problem,
                    &Limits {
                        deadline: None,
                        best: None,
                    },
                )
                .unwrap();
            assert_eq!(
                check(&problem, &plan),
                Ok(()),
                "{} on {seed}",
                plan.strategy
            );
            assert!(plan.held(&problem) >= problem.floor());
            assert!(plan.height(&problem) <= plan.virtual_bytes(&problem));
        }
    }
}

#[test]
fn the_same_problem_gets_the_same_plan() {
    let rules = Rules {
        time_limit: LONG,
        ..Rules::default()
    };
    for seed in 0..5 {
        let problem = random_problem(seed, 100, 2);
        assert_eq!(plan(&problem, rules).plan, plan(&problem, rules).plan);
    }
}

#[test]
fn more_orders_pay() {
    let with = held_by(
        Rules {
            more_orders: true,
            ..NOTHING
        },
        1,
    );
    let without = held_by(NOTHING, 1);
    assert!(with < without, "{with} {without}");
}

#[test]
fn aliasing_pays_where_lifespans_interleave() {
    // Whole pages: aliasing reaches the floor, whatever the lifespans.
    let whole = |seed: u64| {
        let mut random = Random(seed + 1);
        let items: Vec<_> = (0..80)
            .map(|_| {
                let begin = random.below(100);
                (
                    Bytes(512 * (1 + random.below(9))),
                    [begin..begin + 1 + random.below(30)],
                )
            })
            .collect();
        Problem::new(Bytes(512), items).unwrap()
    };
    let (mut with_frames, mut without_frames) = (0, 0);
    for seed in 0..20 {
        let problem = whole(seed);
        let with = plan(
            &problem,
            Rules {
                aliasing: true,
                ..NOTHING
            },
        )
        .plan;
        let without = plan(&problem, NOTHING).plan;
        assert_eq!(with.held(&problem), problem.floor());
        with_frames += with.frame_count;
        without_frames += without.frame_count;
    }
    assert!(
        with_frames * 21 < without_frames * 20,
        "{with_frames} {without_frames}"
    );
}

#[test]
fn sharing_pages_at_both_ends_pays() {
    let with = held_by(
        Rules {
            aliasing: true,
            both_ends: true,
            ..NOTHING
        },
        1,
    );
    let without = held_by(
        Rules {
            aliasing: true,
            ..NOTHING
        },
        1,
    );
    assert!(with < without, "{with} {without}");
}

#[test]
fn the_search_pays() {
    let with = held_by(
        Rules {
            search: true,
            ..NOTHING
        },
        1,
    );
    let without = held_by(
        Rules {
            more_orders: true,
            ..NOTHING
        },
        1,
    );
    assert!(with < without, "{with} {without}");
}

#[test]
fn a_plan_comes_even_when_the_time_is_up_at_once() {
    let problem = random_problem(3, 80, 1);
    let outcome = plan(
        &problem,
        Rules {
            time_limit: Duration::ZERO,
            ..Rules::default()
        },
    );
    assert_eq!(check(&problem, &outcome.plan), Ok(()));
    assert!(outcome.cut_off);
}

#[test]
fn nothing_to_place_is_a_plan_of_nothing() {
    let problem = Problem::new(Bytes(512), std::iter::empty::<(Bytes, [Range<u64>; 1])>()).unwrap();
    let outcome = plan(&problem, Rules::default());
    assert_eq!(
        (
            outcome.plan.frame_count,
            outcome.plan.page_count,
            outcome.cut_off
        ),
        (0, 0, false)
    );
}

fn trace(name: &str) -> Vec<lifespans::Buffer> {
    let path = format!("{}/tests/data/{name}.trace.gz", env!("CARGO_MANIFEST_DIR"));
    let file = std::fs::File::open(path).expect("the traces are in the repository");
    let trace =
        Trace::read(BufReader::new(flate2::read::GzDecoder::new(file))).expect("a sound trace");
    lifespans::of_trace(&trace)
}

#[test]
fn recorded_traces_reach_the_floor() {
    for (name, live_peak) in [("sd15", 2168.32), ("sdxl", 2860.01), ("flux", 2459.27)] {
        let items = trace(name)
            .into_iter()
            .map(|buffer| (buffer.size, [buffer.lifespan]));
        let problem = Problem::new(Bytes::mib(2), items).unwrap();
        let outcome = plan(&problem, Rules::default());
        assert!(
            (problem.live_peak().as_mib() - live_peak).abs() < 0.01,
            "{name}"
        );
        assert_eq!(outcome.plan.held(&problem), problem.floor(), "{name}");
    }
}

#[test]
fn two_resolutions_laid_end_to_end_take_the_larger_floor() {
    let second: Vec<_> = trace("sd15");
    let end = second
        .iter()
        .map(|buffer| buffer.lifespan.end)
        .max()
        .unwrap();
    let small = second
        .iter()
        .map(|buffer| (buffer.size, [buffer.lifespan.clone()]));
    // The same step at a larger resolution, behind it on the time line.
    let large = second.iter().map(|buffer| {
        let size = Bytes(buffer.size.0 * 9 / 4);
        (
            size,
            [buffer.lifespan.start + end..buffer.lifespan.end + end],
        )
    });
    let problem = Problem::new(Bytes::mib(2), small.chain(large)).unwrap();
    let outcome = plan(
        &problem,
        Rules {
            time_limit: LONG,
            ..Rules::default()
        },
    );
    let held = outcome.plan.held(&problem);
    assert!(
        held <= Bytes(problem.floor().0 + (2 << 20)),
        "{held}, floor {}",
        problem.floor()
    );
}
