//! Storms over small ranges: whatever a program does, no two live buffers share a byte.

mod reference;

use reference::{many, storm};

#[test]
fn no_two_live_buffers_of_any_storm_share_a_byte() {
    let count = std::env::var("STORMS").map_or(64, |count| count.parse().expect("a number"));
    let sums = many::sums(count, |seed| {
        let outcome = storm::run(seed, 200 << (seed % 7));
        [
            outcome.events,
            outcome.recorded,
            outcome.replayed,
            outcome.refused,
            outcome.compiles,
            outcome.forgotten,
            outcome.obstructed,
        ]
    });
    println!("events, recorded, replayed, refused, compiles, forgotten, obstructed: {sums:?}");
}
