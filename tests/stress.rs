//! Random steps under a small budget, a small edge limit, trims and failing calls: live buffers keep
//! their patterns.

use std::sync::Arc;

use memory_compiler::device::adaptor::{Counting, Failing, Limiting, Repeat};
use memory_compiler::device::{Device, DeviceError, Host};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options, pause, scope};

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

type Books = Counting<Failing<Limiting<Host>>>;

struct Buffer {
    at: Address,
    size: u64,
    pattern: u8,
}

fn check(device: &Books, buffer: &Buffer, what: &str) {
    let mut bytes = vec![0; buffer.size as usize];
    device
        .read(buffer.at, &mut bytes)
        .unwrap_or_else(|error| panic!("{what}: {} of {}: {error}", buffer.at, buffer.size));
    assert!(
        bytes.iter().all(|&byte| byte == buffer.pattern),
        "{what}: {} of {} was overwritten",
        buffer.at,
        buffer.size
    );
}

fn run(seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let granule = 4096;
    let device: Arc<Books> = Arc::new(Counting::new(Failing::new(Limiting::new(
        Host::new(Bytes(granule)).unwrap(),
        Bytes(granule * (40 + random.below(80))),
    ))));
    let options = Options {
        strict: random.below(8) == 0,
        budget: (random.below(2) == 0).then(|| Bytes(granule * (30 + random.below(60)))),
        edge_limit: 20 + random.below(200) as u32,
        address_space: Bytes::gib(1),
        ..Options::default()
    };
    let mut compiler = Compiler::new(device.clone(), options).unwrap();
    // A few programs: sizes to allocate (Some) or a live one to free (None), and how many to keep.
    let programs: Vec<Vec<(Option<u64>, u64)>> = (0..4)
        .map(|_| {
            (0..10 + random.below(30))
                .map(|_| {
                    let size = match random.below(3) {
                        0 => 512 * (1 + random.below(7)),
                        1 => granule * (1 + random.below(8)),
                        _ => 512 + random.below(granule * 6),
                    };
                    ((random.below(5) < 3).then_some(size), random.0)
                })
                .collect()
        })
        .collect();
    let mut kept: Vec<Buffer> = Vec::new();
    let mut pattern = 0_u8;
    for _ in 0..60 {
        let number = random.below(programs.len() as u64) as usize;
        let mutation = (random.below(3) == 0).then(|| random.below(programs[number].len() as u64));
        if random.below(6) == 0 {
            drop(compiler.trim());
        }
        if random.below(6) == 0 {
            let error = match random.below(2) {
                0 => DeviceError::NotReady,
                _ => DeviceError::Driver {
                    call: memory_compiler::device::Call::Map,
                    code: 5,
                },
            };
            let repeat = if random.below(4) == 0 {
                Repeat::Always
            } else {
                Repeat::Once
            };
            device.upstream().fail_at(random.below(30), error, repeat);
        }
        let name = ["a", "b", "a", "c"][number];
        let step = compiler.begin(name).unwrap();
        let mut live: Vec<Buffer> = Vec::new();
        let mut paused = None;
        let mut scopes = Vec::new();
        for (i, &(size, choice)) in programs[number].iter().enumerate() {
            let size = if mutation == Some(i as u64) {
                Some(512 + choice % (granule * 5))
            } else {
                size
            };
            if choice % 13 == 0 {
                scopes.push(scope(["x", "y"][choice as usize / 16 % 2]));
            } else if choice % 13 == 1 {
                scopes.pop();
            }
            if random.below(60) == 0 {
                paused = Some(pause());
            } else if random.below(4) == 0 {
                paused = None;
            }
            if let Some(size) = size {
                match step.alloc(Bytes(size)) {
                    Ok(Allocation::Here(at)) => {
                        pattern = pattern.wrapping_add(1);
                        device
                            .fill(at, Bytes(size), pattern)
                            .unwrap_or_else(|error| {
                                panic!("seed {seed}: {at} of {size} cannot be written: {error}")
                            });
                        live.push(Buffer { at, size, pattern });
                    }
                    Ok(Allocation::Elsewhere) => assert!(paused.is_some()),
                    Err(Error::BadFree { .. } | Error::NoStep) => panic!("seed {seed}"),
                    Err(_) => {}
                }
            } else if !live.is_empty() {
                let buffer = live.remove((choice % live.len() as u64) as usize);
                check(&device, &buffer, &format!("seed {seed}"));
                match random.below(3) {
                    0 => std::thread::scope(|threads| {
                        threads.spawn(|| memory_compiler::free(buffer.at).unwrap());
                    }),
                    _ => step.free(buffer.at).unwrap(),
                }
            }
            if random.below(20) == 0 && !kept.is_empty() {
                let buffer = kept.remove(random.below(kept.len() as u64) as usize);
                check(&device, &buffer, &format!("seed {seed}, kept"));
                step.free(buffer.at).unwrap();
            }
        }
        step.snapshot()
            .validate()
            .unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        drop(paused);
        drop(scopes);
        let keep = random.below(3).min(live.len() as u64) as usize;
        kept.extend(live.drain(..keep));
        let free_late = random.below(3) == 0;
        if !free_late {
            for buffer in live.drain(..) {
                check(&device, &buffer, &format!("seed {seed}"));
                step.free(buffer.at).unwrap();
            }
        }
        if random.below(5) == 0 {
            step.abort()
        } else {
            step.finish().map(drop).unwrap()
        }
        for buffer in live.drain(..) {
            check(&device, &buffer, &format!("seed {seed}, late"));
            memory_compiler::free(buffer.at).unwrap();
        }
        while kept.len() > 6 {
            let buffer = kept.remove(0);
            check(&device, &buffer, &format!("seed {seed}, kept"));
            memory_compiler::free(buffer.at).unwrap();
        }
        kept.iter()
            .for_each(|buffer| check(&device, buffer, &format!("seed {seed}, kept")));
    }
    let stats = compiler.stats();
    assert_eq!(stats.bad_frees, 0, "seed {seed}");
    device.upstream().disarm();
    drop(compiler);
    for buffer in kept {
        check(&device, &buffer, &format!("seed {seed}, orphan"));
        memory_compiler::free(buffer.at).unwrap();
    }
    assert!(device.is_empty(), "seed {seed}: {:?}", device.books());
}

#[test]
fn live_buffers_keep_their_patterns_whatever_is_forgotten_trimmed_or_refused() {
    let from: u64 = std::env::var("SEED").map_or(0, |seed| seed.parse().unwrap());
    let count: u64 = std::env::var("SEEDS").map_or(40, |seeds| seeds.parse().unwrap());
    for seed in from..from + count {
        run(seed);
    }
}
