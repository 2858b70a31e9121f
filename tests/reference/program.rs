//! Programs of events: made from bytes, so that a property test and a fuzz target share them.
//!
//! The bytes are records of four. A record adds an event to the present body, mutates it, turns to the
//! body of another step name, or runs the body: so the runs of a program are a base and its mutations,
//! as the steps of a sampler are. Leaving out any record leaves a program, which is what shrinks well.

use memory_compiler::{Address, Bytes, Error, Options, Stats};

use super::Expect;
use super::pair::{Pair, Run};

/// Places to keep a buffer in. Allocating into a full one frees the old buffer after the new one is made.
pub const SLOTS: usize = 12;
/// Events that a program may have before it is cut off.
pub const MOST_EVENTS: usize = 600;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub granule: u64,
    pub strict: bool,
    pub steps: Vec<StepRun>,
    /// Buffers that are freed before the compiler goes, a bit for each slot.
    pub freed_before_drop: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepRun {
    /// What happens before it begins.
    pub before: Vec<Between>,
    pub name: &'static str,
    pub events: Vec<Event>,
    /// Slots whose buffers outlive the step, a bit each; the others are freed at its end.
    pub keep: u16,
    pub end: End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The last frees run from the first slot to the last.
    Finish,
    /// … or from the last to the first.
    FinishReversed,
    Abort {
        close_first: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    Free { slot: usize, thread: bool },
    FreeAgain,
    Trim,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Alloc {
        slot: usize,
        size: u64,
    },
    AllocElsewhere {
        size: u64,
    },
    Free {
        slot: usize,
        by: By,
    },
    /// Of an address inside a live buffer.
    FreeInside {
        slot: usize,
        by: By,
    },
    /// Of the address freed last, if no buffer is live there again.
    FreeAgain {
        by: By,
    },
    Open {
        name: &'static str,
        strict: bool,
    },
    Close,
    Pause,
    Resume,
}

/// Who frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Step,
    Anyone,
    Thread,
    Stream,
}

const STEPS: [&str; 3] = ["step", "cond", "uncond"];
const SCOPES: [&str; 4] = ["block", "attention", "down", "up"];

impl By {
    fn from_byte(byte: u8) -> Self {
        match byte % 16 {
            0 | 1 => Self::Thread,
            2 => Self::Stream,
            3 | 4 => Self::Anyone,
            _ => Self::Step,
        }
    }
}

impl Program {
    /// Any bytes are a program.
    pub fn decode(bytes: &[u8]) -> Self {
        let mut records = bytes.chunks_exact(4);
        let [head, freed, keep_low, keep_high] =
            records.next().map_or([0; 4], |r| [r[0], r[1], r[2], r[3]]);
        let mut maker = Maker {
            granule: if head % 3 == 0 { 64 << 10 } else { 4 << 10 },
            bodies: Default::default(),
            present: 0,
            before: Vec::new(),
            steps: Vec::new(),
            events: 0,
        };
        for record in records {
            maker.record(record[0], [record[1], record[2], record[3]]);
        }
        for body in 0..STEPS.len() {
            maker.present = body;
            for keep in [0, u16::from_le_bytes([keep_low, keep_high])] {
                maker.run(keep, End::Finish);
            }
        }
        let freed_before_drop = u16::from(freed) << 4 | u16::from(freed);
        Self {
            granule: maker.granule,
            strict: head % 7 == 3,
            steps: maker.steps,
            freed_before_drop,
        }
    }

    /// Runs it against an engine and the model, on a device of its own whose books must end empty.
    /// Returns the model's numbers.
    pub fn run(&self) -> Stats {
        let pair = Pair::new(Bytes(self.granule), self.options());
        let (stats, errors) = self.run_on(pair, |_| {});
        assert_eq!(errors, [], "nothing failed");
        stats
    }

    pub fn options(&self) -> Options {
        Options {
            strict: self.strict,
            address_space: Bytes(self.granule << 16),
            ..Options::default()
        }
    }

    /// Runs it on a pair; calls `before` with the number of each step, and of the one after the last.
    /// Returns the model's numbers and what the device refused.
    pub fn run_on(&self, mut pair: Pair, mut before: impl FnMut(usize)) -> (Stats, Vec<Error>) {
        let mut runner = Slots::default();
        for (number, step) in self.steps.iter().enumerate() {
            before(number);
            for between in &step.before {
                runner.between(&mut pair, *between);
            }
            runner.step(&mut pair, step);
        }
        before(self.steps.len());
        for (slot, buffer) in runner.slots.into_iter().enumerate() {
            if let Some(address) = buffer
                && self.freed_before_drop >> slot & 1 == 1
            {
                pair.free(address);
            }
        }
        let stats = pair.book.model.stats.clone();
        pair.end();
        (stats, runner.errors)
    }
}

/// Makes a program, record by record.
struct Maker {
    granule: u64,
    bodies: [Vec<Event>; 3],
    present: usize,
    before: Vec<Between>,
    steps: Vec<StepRun>,
    events: usize,
}

impl Maker {
    fn record(&mut self, code: u8, [a, b, c]: [u8; 3]) {
        let slot = usize::from(a) % SLOTS;
        let size = self.size(b, c);
        let name = SCOPES[usize::from(a) % SCOPES.len()];
        let body = &mut self.bodies[self.present];
        let at = usize::from(a) * body.len() / 256;
        match code {
            0..80 => body.push(Event::Alloc { slot, size }),
            80..115 => body.push(Event::Free {
                slot,
                by: By::from_byte(b),
            }),
            115..135 => {
                let next = (slot + 1) % SLOTS;
                for _ in 0..1 + c % 4 {
                    body.push(Event::Open {
                        name,
                        strict: false,
                    });
                    body.push(Event::Alloc { slot, size });
                    body.push(Event::Alloc {
                        slot: next,
                        size: size / 2 + 512,
                    });
                    body.push(Event::Free { slot, by: By::Step });
                    body.push(Event::Close);
                }
            }
            135..142 => body.push(Event::Open {
                name,
                strict: b > 230,
            }),
            142..148 => body.push(Event::Close),
            148..151 => body.push(Event::Pause),
            151..156 => body.push(Event::Resume),
            156..160 => body.push(Event::FreeInside {
                slot,
                by: By::from_byte(b),
            }),
            160..164 => body.push(Event::FreeAgain {
                by: By::from_byte(b),
            }),
            164..167 => body.push(Event::AllocElsewhere { size }),
            167..176 if !body.is_empty() => drop(body.remove(at)),
            176..184 => {
                let mut allocs = body.iter_mut().skip(at).filter_map(|event| match event {
                    Event::Alloc { size, .. } => Some(size),
                    _ => None,
                });
                if let Some(old) = allocs.next() {
                    *old = size;
                }
            }
            184..190 if !body.is_empty() => {
                let other = usize::from(b) * body.len() / 256;
                body.swap(at, other);
            }
            190..195 => {
                let block = body[at..body.len().min(at + usize::from(b % 12))].to_vec();
                for _ in 0..1 + c % 3 {
                    body.splice(at..at, block.iter().copied());
                }
            }
            195..200 => body.insert(
                at,
                Event::Alloc {
                    slot: usize::from(c) % SLOTS,
                    size,
                },
            ),
            200..206 => self.present = slot % STEPS.len(),
            206..212 => self.before.push(Between::Free {
                slot,
                thread: b % 2 == 0,
            }),
            212..214 => self.before.push(Between::FreeAgain),
            214..218 => self.before.push(Between::Trim),
            218..=255 => {
                let keep = if b < 130 {
                    0
                } else {
                    u16::from(b).wrapping_mul(0x9E35) >> 3
                };
                let end = match c {
                    0..8 => End::Abort { close_first: false },
                    8..16 => End::Abort { close_first: true },
                    16..60 => End::FinishReversed,
                    _ => End::Finish,
                };
                for _ in 0..1 + a % 3 {
                    self.run(keep, end);
                }
            }
            _ => {}
        }
    }

    fn run(&mut self, keep: u16, end: End) {
        let events = self.bodies[self.present].clone();
        self.events += events.len();
        if self.events <= MOST_EVENTS {
            let before = std::mem::take(&mut self.before);
            self.steps.push(StepRun {
                before,
                name: STEPS[self.present],
                events,
                keep,
                end,
            });
        }
    }

    /// Few classes, so that they meet again, around everything that matters: 512 B, the granule.
    fn size(&self, b: u8, c: u8) -> u64 {
        let (granule, c) = (self.granule, u64::from(c));
        match b % 16 {
            0 => c % 2,
            1..4 => 512 * (1 + c % 6),
            4 => 1 + c * 13,
            5 => granule / 2,
            6 => granule - 512 + c % 3 * 512,
            7..10 => granule * (1 + c % 4),
            10 => granule * (c % 3) + c * 7 + 1,
            11 => granule * 2 + 512 * (c % 4),
            12 => granule * 6,
            13 => granule / 4 * (1 + c % 7),
            _ => [512, 2048, granule, granule * 2][c as usize % 4],
        }
    }
}

/// The buffers of a running program.
#[derive(Default)]
struct Slots {
    slots: [Option<u64>; SLOTS],
    freed_last: Option<u64>,
    /// What the device refused.
    errors: Vec<Error>,
}

impl Slots {
    fn take(&mut self, slot: usize) -> Option<u64> {
        let address = self.slots[slot].take();
        self.freed_last = address.or(self.freed_last);
        address
    }

    /// The address freed last, unless a buffer is live there again.
    fn dead(&self, live: &[u64]) -> Option<u64> {
        self.freed_last.filter(|address| !live.contains(address))
    }

    fn between(&mut self, pair: &mut Pair, between: Between) {
        match between {
            Between::Free { slot, thread } => match (self.take(slot), thread) {
                (Some(address), true) => pair.free_on_thread(address),
                (Some(address), false) => pair.free(address),
                (None, _) => {}
            },
            Between::FreeAgain => {
                if let Some(address) = self.dead(&pair.book.addresses()) {
                    pair.free(address);
                }
            }
            Between::Trim => self.errors.extend(pair.try_trim().err()),
        }
    }

    fn step(&mut self, pair: &mut Pair, plan: &StepRun) {
        let mut run = pair.begin(plan.name);
        for event in &plan.events {
            self.event(&mut run, *event);
        }
        let rest = (0..SLOTS).filter(|slot| plan.keep >> slot & 1 == 0);
        match plan.end {
            End::Finish => rest.for_each(|slot| self.free(&mut run, slot, By::Step)),
            End::FinishReversed => rest
                .rev()
                .for_each(|slot| self.free(&mut run, slot, By::Step)),
            End::Abort { close_first } => return run.abort(close_first),
        }
        run.finish();
    }

    fn free(&mut self, run: &mut Run<'_>, slot: usize, by: By) {
        if let Some(address) = self.take(slot) {
            free(run, address, by);
        }
    }

    fn event(&mut self, run: &mut Run<'_>, event: Event) {
        match event {
            Event::Alloc { slot, size } => match run.try_alloc(size) {
                Ok((Expect::Replayed(_) | Expect::Recorded | Expect::Survivor, address)) => {
                    self.free(run, slot, By::Step);
                    self.slots[slot] = address;
                }
                Ok((Expect::Elsewhere | Expect::Refused, _)) => {}
                Err(error) => self.errors.push(error),
            },
            Event::AllocElsewhere { size } => run.alloc_on_other_stream(size),
            Event::Free { slot, by } => self.free(run, slot, by),
            Event::FreeInside { slot, by } => {
                let live = &run.book.model.live;
                let inside = self.slots[slot].filter(|address| live[address].class > 512);
                if let Some(address) = inside {
                    free(
                        run,
                        Address(address)
                            .checked_add(Bytes(512))
                            .expect("an address")
                            .0,
                        by,
                    );
                }
            }
            Event::FreeAgain { by } => {
                if let Some(address) = self.dead(&run.book.addresses()) {
                    free(run, address, by);
                }
            }
            Event::Open {
                name,
                strict: false,
            } => run.open(name),
            Event::Open { name, strict: true } => run.open_strict(name),
            Event::Close => run.close(),
            Event::Pause => run.pause(),
            Event::Resume => run.resume(),
        }
    }
}

fn free(run: &mut Run<'_>, address: u64, by: By) {
    match by {
        By::Step => run.free(address, true),
        By::Anyone => run.free(address, false),
        By::Thread => run.free_on_thread(address),
        By::Stream => run.free_on_other_stream(address),
    }
}
