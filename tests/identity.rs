//! What a state is known by: identities that nobody can aim at, and that name the pages under a place.

mod reference;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use memory_compiler::{Address, Allocation, Bytes, Compiler, Options, Step};

use reference::devices::{CountingHost, Pattern, counting_host};

const PAGE: u64 = 4096;

fn here(step: &Step<'_>, size: u64) -> Address {
    match step.alloc(Bytes(size)) {
        Ok(Allocation::Here(at)) => at,
        other => panic!("{size} bytes: {other:?}"),
    }
}

/// Buffers with their patterns, by the order in which they were made.
struct Buffers {
    device: CountingHost,
    live: Vec<Option<(Address, Pattern)>>,
}

impl Buffers {
    fn new(device: &CountingHost) -> Self {
        let device = Arc::clone(device);
        Self {
            device,
            live: Vec::new(),
        }
    }

    fn alloc(&mut self, step: &Step<'_>, size: u64) -> usize {
        let at = here(step, size);
        let seed = self.live.len() as u64 + 1;
        let pattern = Pattern { seed, size };
        pattern.write(&*self.device, at.0);
        self.live.push(Some((at, pattern)));
        self.live.len() - 1
    }

    fn at(&self, index: usize) -> Address {
        self.live[index].expect("it is live").0
    }

    fn free(&mut self, index: usize) {
        if let Some((at, pattern)) = self.live[index].take() {
            pattern.check(&*self.device, at.0);
            memory_compiler::free(at).expect("it is live");
        }
    }

    fn check(&self) {
        for (at, pattern) in self.live.iter().flatten() {
            pattern.check(&*self.device, at.0);
        }
    }

    fn free_all(&mut self) {
        (0..self.live.len()).for_each(|index| self.free(index));
    }
}

/// What a place was to a state's hash before hashes had a key: of the n-th place that was made, and its length.
fn old_mix(number: u32, len: u32) -> u128 {
    let finalise = |mut key: u64| {
        key ^= key >> 33;
        key = key.wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        key ^= key >> 33;
        key = key.wrapping_mul(0xC4CE_B9FE_1A85_EC53);
        key ^ key >> 33
    };
    let key = u64::from(number) << 32 | u64::from(len);
    let low = finalise(key ^ 0x9E37_79B9_7F4A_7C15);
    let high = finalise(finalise(key.rotate_left(32) ^ 0xD1B5_4A32_D192_ED03).wrapping_add(key));
    u128::from(high) << 64 | u128::from(low)
}

/// Numbers below 200, 1 among them, whose hashes cancel out: a set of places that hashes as no place at all
/// does. By elimination over GF(2): of 129 vectors of 128 bits some always cancel out.
fn numbers_that_cancel_out(mix: impl Fn(u32) -> u128) -> BTreeSet<u32> {
    // By its leading bit: a hash, and the numbers whose sum it is.
    let mut rows: BTreeMap<u32, (u128, BTreeSet<u32>)> = BTreeMap::new();
    for number in (1..200).rev() {
        let (mut hash, mut sum) = (mix(number), BTreeSet::from([number]));
        while let Some((row, of)) = rows.get(&hash.leading_zeros()) {
            hash ^= row;
            sum = &sum ^ of;
        }
        if hash != 0 {
            rows.insert(hash.leading_zeros(), (hash, sum));
        } else if number == 1 {
            return sum;
        }
    }
    unreachable!("1 is tried last, after more than 128 others")
}

/// Keeps those buffers of a first step that cancelled out under the hash that had no key, so that the state
/// looked empty, and asks for what the empty state answers with the first of them.
#[test]
fn a_state_that_was_made_to_look_empty_does_not() {
    let cancelling = numbers_that_cancel_out(|number| old_mix(number, 1));
    let hash = cancelling
        .iter()
        .fold(0, |hash, &number| hash ^ old_mix(number, 1));
    assert!(
        hash == 0 && cancelling.contains(&1),
        "the two states had one hash"
    );

    let device = counting_host(Bytes(PAGE));
    let mut compiler = Compiler::new(device.clone(), Options::default()).unwrap();
    let mut buffers = Buffers::new(&device);
    let step = compiler.begin("step").unwrap();
    for _ in 1..200 {
        buffers.alloc(&step, 512);
    }
    for number in 1..200 {
        if !cancelling.contains(&number) {
            buffers.free(number as usize - 1);
        }
    }
    buffers.alloc(&step, 512);
    buffers.check();
    step.snapshot().validate().unwrap();
    buffers.free_all();
    step.finish().unwrap();
    drop(compiler);
    assert!(device.is_empty());
}

/// A buffer's window is taken away and its addresses are mapped anew, over the frame of another one that an edge
/// leads to from the state in which the first was live. The place is as before; the state must not be.
#[test]
fn a_place_over_other_pages_is_another_one() {
    let device = counting_host(Bytes(PAGE));
    let options = Options {
        // 64 pages for steps, and as many for what outlives them.
        address_space: Bytes(128 * PAGE),
        ..Options::default()
    };
    let mut compiler = Compiler::new(device.clone(), options).unwrap();
    let mut buffers = Buffers::new(&device);

    // {} -> first, {first} -> second: and all three outlive the step.
    let step = compiler.begin("keep").unwrap();
    let first = buffers.alloc(&step, 2 * PAGE);
    let second = buffers.alloc(&step, PAGE);
    let guard = buffers.alloc(&step, PAGE);
    step.finish().unwrap();
    let first_at = buffers.at(first);

    // {} -> first is in the way of a live buffer: another place is recorded, and no edge leads to `first`.
    let step = compiler.begin("other").unwrap();
    let other = buffers.alloc(&step, 2 * PAGE);
    assert_ne!(buffers.at(other), first_at);
    buffers.free(other);
    step.finish().unwrap();
    assert_eq!(compiler.stats().obstructed, 1);
    buffers.free(first);

    // Survivors take the pages that no edge leads to: the window of `first` is gone.
    let step = compiler.begin("keep").unwrap();
    for size in [2 * PAGE, PAGE, PAGE] {
        buffers.alloc(&step, size);
    }
    step.finish().unwrap();
    assert_eq!(compiler.snapshot().frame_at(first_at), None);

    // All addresses are used up, but those of `first`: the next window stands there, over free frames.
    let step = compiler.begin("fill").unwrap();
    let filling: Vec<usize> = (0..30).map(|_| buffers.alloc(&step, 2 * PAGE)).collect();
    let second_at = buffers.at(second);
    buffers.free(second);
    let again = buffers.alloc(&step, 2 * PAGE);
    assert_eq!(buffers.at(again), first_at);
    let is_shared = |step: &Step<'_>, second: Address| {
        let snapshot = step.snapshot();
        (0..2).any(|page| {
            snapshot.frame_at(Address(first_at.0 + page * PAGE)) == snapshot.frame_at(second)
        })
    };
    assert!(is_shared(&step, second_at), "over the frame of `second`");
    filling.into_iter().for_each(|index| buffers.free(index));
    buffers.free(guard);
    // The state is of one buffer, at the place of `first`.
    let last = buffers.alloc(&step, PAGE);
    assert!(!is_shared(&step, buffers.at(last)));
    buffers.check();
    step.snapshot().validate().unwrap();
    buffers.free(last);
    buffers.free(again);
    step.finish().unwrap();
    buffers.free_all();
    drop(compiler);
    assert!(device.is_empty());
}
