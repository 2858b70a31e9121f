//! Rows that are a list of steps and the numbers of each.

use crate::reference::Expect;
use crate::row::{Held, MIB, Row, steps, times};

/// Nothing outside a step can reach a compiler except through a hook, so the 8 between steps is memory
/// of its own here.
#[test]
fn case_01_a_replayed_step_holds_its_peak_and_calls_no_driver() {
    let logs = Row {
        steps: times(4, "a=8 b=16 -b -a c=24 -c"),
        held: Held::Mib(24),
        ..Row::default()
    }
    .check();
    assert_eq!((logs[0].recorded, logs[1].recorded), (3, 0));
}

#[test]
fn case_02_a_repeated_scope_replays_within_the_step_that_records_it() {
    let step = "first=8 second=16 -second inner*3{ a=8 b=8 -a c=16 -b -c } last=8 -last -first";
    let logs = Row {
        steps: times(3, step),
        held: Held::Mib(32),
        ..Row::default()
    }
    .check();
    let inner: Vec<_> = logs[0]
        .buffers
        .iter()
        .filter(|served| served.scope == "step/inner")
        .collect();
    assert_eq!(inner.len(), 9);
    for served in &inner[3..] {
        assert!(matches!(served.expect, Expect::Replayed(_)), "{served:?}");
    }
}

#[test]
fn case_03_a_buffer_of_a_repeated_scope_has_one_address() {
    let logs = Row {
        steps: times(3, "block*3{ a=1 -a }"),
        held: Held::Mib(2),
        ..Row::default()
    }
    .check();
    let first = logs[0].address("a");
    assert!(
        logs.iter()
            .flat_map(|log| &log.buffers)
            .all(|served| served.address == Some(first))
    );
}

#[test]
fn case_04_a_changed_size_breaks_once() {
    Row {
        steps: steps(&[
            "block{ a=1 -a }",
            "block{ a=2 -a }",
            "block{ a=1 -a }",
            "block{ a=2 -a }",
        ]),
        breaks: vec![0, 1, 0, 0],
        no_calls_from: 3,
        held: Held::Mib(2),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_05_one_more_turn_of_an_inner_scope_is_no_break() {
    let two = "outer*2{ o=8 inner*2{ i=8 -i } -o }";
    let three = "outer*2{ o=8 inner*3{ i=8 -i } -o }";
    Row {
        steps: steps(&[two, three, two, three]),
        breaks: vec![0; 4],
        held: Held::Mib(16),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_10_a_byte_too_many_costs_a_page_and_no_more() {
    Row {
        steps: times(3, "a=8+1B -a b=24+1B -b"),
        held: Held::Mib(26),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_11_a_small_buffer_takes_the_place_of_a_freed_one() {
    let logs = Row {
        steps: times(3, "one=1 two=2 -one half=0.5 -half -two"),
        held: Held::Mib(4),
        ..Row::default()
    }
    .check();
    assert_eq!(logs[0].address("one"), logs[0].address("half"));
}

#[test]
fn case_12_two_sizes_become_two_branches() {
    Row {
        steps: steps(&["a=8 -a", "a=16 -a", "a=8 -a", "a=16 -a"]),
        breaks: vec![0, 1, 0, 0],
        no_calls_from: 3,
        held: Held::Mib(16),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_13_one_more_buffer_at_once_leaves_the_first_where_it_was() {
    let logs = Row {
        steps: steps(&["a=8 -a", "a=8 b=8 -b -a", "a=8 -a"]),
        breaks: vec![0, 1, 0],
        no_calls_from: 3,
        held: Held::Mib(16),
        ..Row::default()
    }
    .check();
    assert!(
        logs.iter()
            .all(|log| log.address("a") == logs[0].address("a"))
    );
}

#[test]
fn case_14_a_missing_allocation_is_no_break() {
    let (both, one) = ("a=8 -a b=8 -b", "a=8 -a");
    Row {
        steps: steps(&[both, one, both, one]),
        breaks: vec![0; 4],
        held: Held::Mib(8),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_15_a_free_is_never_a_break() {
    let (in_order, reversed) = ("a=8 b=16 -a -b", "a=8 b=16 -b -a");
    let logs = Row {
        steps: steps(&[in_order, reversed, in_order]),
        breaks: vec![0; 3],
        held: Held::Mib(24),
        ..Row::default()
    }
    .check();
    assert_eq!(logs[0].address("b"), logs[1].address("b"));
}

#[test]
fn case_16_a_new_path_joins_the_old_state_and_the_tail_keeps_its_address() {
    let (eight, sixteen) = (
        "h=8 inner{ x=8 -x } tail=8 -tail -h",
        "h=8 inner{ x=16 -x } tail=8 -tail -h",
    );
    let logs = Row {
        steps: steps(&[eight, sixteen, eight]),
        breaks: vec![0, 1, 0],
        no_calls_from: 3,
        held: Held::Mib(24),
        ..Row::default()
    }
    .check();
    assert!(
        logs.iter()
            .all(|log| log.address("tail") == logs[0].address("tail"))
    );
    assert_eq!(logs[1].recorded, 1);
}

#[test]
fn case_19_a_buffer_may_be_freed_in_another_scope_than_it_was_made_in() {
    Row {
        steps: times(3, "outer{ a=8 inner{ -a b=16 } -b }"),
        held: Held::Mib(16),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_20_a_chain_of_blocks_replays_from_its_fourth_block_on() {
    let step = "h=24 *40{ block{ x=96 y=48 n=24 -y -x } -h n>h } -h";
    let logs = Row {
        steps: times(2, step),
        held: Held::Mib(24 + 96 + 48 + 24),
        ..Row::default()
    }
    .check();
    for (index, served) in logs[0].buffers.iter().enumerate().skip(1 + 3 * 3) {
        assert!(
            matches!(served.expect, Expect::Replayed(_)),
            "buffer {index}: {served:?}"
        );
    }
    assert_eq!(logs[0].peak, (24 + 96 + 48 + 24) * MIB);
}

#[test]
fn case_21_an_output_that_lives_until_the_next_one_settles_in_three_steps() {
    Row {
        steps: times(8, "n=8 -o? n>o"),
        no_breaks_from: 3,
        no_calls_from: 4,
        held: Held::AtMostMib(24),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_22_forty_small_survivors_cost_their_bytes() {
    // 8 MiB, 3 × 40 × 20 KiB = 2.34 MiB, rounded up, and a granule.
    Row {
        steps: times(8, "*40{ block{ x=8 k$=20K -o$? k$>o$ -x } }"),
        no_breaks_from: 3,
        no_calls_from: 4,
        same_addresses_from: 3,
        held: Held::AtMostMib(12 + 2),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_23_what_every_step_keeps_for_ever_is_rounded_in_total() {
    let step = |number: u64| format!("x=8 kept{number}=64K -x");
    let logs = Row {
        steps: (1..=100).map(step).collect(),
        no_breaks_from: 4,
        no_calls_from: usize::MAX,
        held: Held::AtMostMib(8 + 2 + 8),
        ..Row::default()
    }
    .check();
    for (number, log) in (1..).zip(&logs) {
        // The step's own 8 and the first of the kept, then what the survivors add up to.
        let survivors = ((number - 1) * (64 << 10) as u64).next_multiple_of(2 * MIB);
        assert!(
            log.held <= 10 * MIB + survivors,
            "step {number} holds {}",
            log.held
        );
    }
}

#[test]
fn case_24_a_history_of_three_outputs_settles_in_seven_steps() {
    // Four outputs are live at once; the place of the first is mentioned by an edge.
    Row {
        steps: times(20, "n=8 -o3? o2>o3? o1>o2? n>o1"),
        no_breaks_from: 7,
        no_calls_from: 7,
        held: Held::AtMostMib(4 * 8 + 8),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_25_pages_of_freed_buffers_make_one_large_piece() {
    let step = "a=8 b=16 -b c=24 -c -a d=48 -d";
    Row {
        steps: times(3, step),
        held: Held::Mib(48),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_26_no_buffer_has_the_same_physical_page_twice() {
    let logs = Row {
        steps: times(3, "a=16 b=8 -a c=24 -c -b *4{ d=32 -d }"),
        held: Held::Mib(32),
        ..Row::default()
    }
    .check();
    assert_eq!(
        logs[0]
            .buffers
            .iter()
            .filter(|served| served.name == "d")
            .count(),
        4
    );
}

#[test]
fn case_27_a_hole_in_the_middle_is_no_loss() {
    let logs = Row {
        steps: times(3, "a=8 b=16 c=8 -b d=24 -d -c -a"),
        held: Held::Mib(40),
        ..Row::default()
    }
    .check();
    assert_eq!(logs[0].peak, 40 * MIB);
}

#[test]
fn case_33_two_resolutions_share_their_pages() {
    let (small, large) = ("a=512 b=256 -b -a", "a=832 b=416 -b -a");
    Row {
        steps: steps(&[small, large, small, large]),
        breaks: vec![0, 1, 0, 0],
        no_calls_from: 3,
        held: Held::Mib(1248),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_34_guidance_in_two_calls_or_one_breaks_at_most_once_a_shape() {
    const COND: &str = "a=48 b=48 c=96 -c -b -a";
    const UNCOND: &str = "a=32 b=32 c=64 -c -b -a";
    const BATCHED: &str = "a=80 b=80 c=160 -c -b -a";
    let orders: [&[&str]; 2] = [
        &[
            COND, UNCOND, COND, UNCOND, BATCHED, COND, COND, UNCOND, BATCHED,
        ],
        &[BATCHED, UNCOND, COND, UNCOND, COND, BATCHED, COND, UNCOND],
    ];
    for order in orders {
        let breaks =
            (0..order.len()).map(|at| u64::from(at > 0 && !order[..at].contains(&order[at])));
        Row {
            steps: steps(order),
            breaks: breaks.collect(),
            no_calls_from: 6,
            held: Held::Mib(320),
            ..Row::default()
        }
        .check();
    }
    // With a name for each call, the first run of a name breaks nothing.
    let (cond, uncond) = (format!("cond: {COND}"), format!("uncond: {UNCOND}"));
    Row {
        steps: steps(&[&cond, &uncond, &cond, &uncond, BATCHED, &cond, &cond]),
        breaks: vec![0; 7],
        no_calls_from: 6,
        held: Held::Mib(320),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_37_a_feature_cached_for_two_short_steps_keeps_its_contents() {
    let full = "*9{ block{ x=48 y=16 -y -x } } block{ x=48 n=32 y=16 -y -x } -o? n>o *6{ block{ x=48 y=16 -y -x } }";
    let short = "block{ z=48 y=16 -z -y }";
    let order = (0..20).map(|at| if at % 3 == 0 { full } else { short }.to_owned());
    Row {
        steps: order.collect(),
        no_breaks_from: 8,
        no_calls_from: 8,
        same_addresses_from: 7,
        // 48 + 32 + 16 in the first step; then survivors two at a time beside 48 + 16.
        held: Held::AtMostMib(48 + 32 + 16 + 2 * 32),
        ..Row::default()
    }
    .check();
}

#[test]
fn case_38_steps_with_and_without_a_control_net_both_settle() {
    let with = "ctrl{ w=128 r=16 s=16 -w } unet{ u=192 -u } -s -r";
    let without = "unet{ u=192 -u }";
    Row {
        steps: steps(&[with, with, without, without, with, without]),
        breaks: vec![0, 0, 1, 0, 0, 0],
        no_calls_from: 4,
        held: Held::Mib(192 + 32),
        ..Row::default()
    }
    .check();
}
