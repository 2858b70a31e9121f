//! Storms over small ranges: whatever a program does, no two live buffers share a byte, and none is lost.

mod reference;

use reference::many;
use reference::storm::{self, Elsewhere};

#[test]
fn no_two_live_buffers_of_any_storm_share_a_byte() {
    let count = std::env::var("STORMS").map_or(400, |count| count.parse().expect("a number"));
    let sums = many::sums(count, |seed| {
        let elsewhere = Elsewhere::new();
        let outcome = storm::run(seed, 200 << (seed % 7), &elsewhere);
        outcome.numbers().map(|(_, number)| number)
    });
    for ((name, _), sum) in storm::Outcome::default().numbers().into_iter().zip(sums) {
        println!("{sum:>12} {name}");
        assert!(sum > 0, "{name}");
    }
}
