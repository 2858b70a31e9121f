//! A row of the table of scenarios, as data.
//!
//! A step is a text of words; sizes are MiB unless they carry a unit:
//!
//! | word | |
//! |---|---|
//! | `a=8` `a=8+1B` `a=20K` | allocate, and call the buffer `a` |
//! | `-a` `-a?` | free `a`; only if it is live |
//! | `a>b` `a>b?` | call `a` from now on `b` |
//! | `inner{ … }` `inner*3{ … }` `*3{ … }` | in a scope; three runs of it; three times without a scope |
//! | `$` in a name | the number of the innermost turn, from 1 |
//!
//! `uncond: a=8 -a` is a step named `uncond`. Buffers keep their names from step to step.

use std::collections::BTreeMap;

use memory_compiler::{Bytes, Options};

use crate::reference::Expect;
use crate::reference::pair::{Pair, Run};

pub const MIB: u64 = 1 << 20;
pub const GRANULE: Bytes = Bytes::mib(2);

#[derive(Clone, Debug)]
enum Word {
    Alloc(String, u64),
    Free {
        name: String,
        only_if_live: bool,
    },
    Rename {
        from: String,
        to: String,
        only_if_live: bool,
    },
    Open(String),
    Close,
}

/// Steps and what the table says of them. Steps count from 1, as in the table.
pub struct Row {
    pub steps: Vec<String>,
    /// Graph breaks step by step; not compared when empty.
    pub breaks: Vec<u64>,
    pub no_breaks_from: usize,
    pub no_calls_from: usize,
    /// From this step on, buffers freed in their own step have the same addresses whenever it repeats.
    pub same_addresses_from: usize,
    pub held: Held,
}

/// Bytes held after the last step.
pub enum Held {
    /// The most bytes live at once, rounded up to a granule.
    Peak,
    /// The same, and it is this number.
    Mib(u64),
    AtMostMib(u64),
}

impl Default for Row {
    fn default() -> Self {
        Self {
            steps: Vec::new(),
            breaks: Vec::new(),
            no_breaks_from: 2,
            no_calls_from: 2,
            same_addresses_from: 1,
            held: Held::Peak,
        }
    }
}

/// What a step did.
#[derive(Clone, Debug, Default)]
pub struct Log {
    pub text: String,
    pub breaks: u64,
    pub calls: u64,
    pub recorded: u64,
    pub peak: u64,
    /// After the step.
    pub held: u64,
    pub buffers: Vec<Served>,
}

#[derive(Clone, Debug)]
pub struct Served {
    pub name: String,
    pub scope: String,
    pub expect: Expect,
    pub address: Option<u64>,
    pub freed_in_step: bool,
}

impl Log {
    /// Where the first buffer of that name was.
    pub fn address(&self, name: &str) -> u64 {
        let served = self.buffers.iter().find(|served| served.name == name);
        served
            .and_then(|served| served.address)
            .unwrap_or_else(|| panic!("no buffer {name} was served"))
    }

    /// The buffers that outlived nothing.
    fn transient(&self) -> Vec<(&str, Option<u64>)> {
        let transient = self.buffers.iter().filter(|served| served.freed_in_step);
        transient
            .map(|served| (served.name.as_str(), served.address))
            .collect()
    }
}

impl Row {
    /// Runs the row on a counting host with the model alongside, and checks what the table says.
    pub fn check(self) -> Vec<Log> {
        let mut player = Player::new();
        let logs: Vec<Log> = self.steps.iter().map(|text| player.step(text)).collect();
        for (step, log) in (1..).zip(&logs) {
            let from = |number: usize| step >= number;
            if !self.breaks.is_empty() {
                assert_eq!(log.breaks, self.breaks[step - 1], "breaks of step {step}");
            } else if from(self.no_breaks_from) {
                assert_eq!(log.breaks, 0, "breaks of step {step}");
            }
            if from(self.no_calls_from) {
                assert_eq!(log.calls, 0, "calls of step {step}");
            }
            let served_by_edges = log
                .buffers
                .iter()
                .all(|served| matches!(served.expect, Expect::Replayed(_)));
            assert!(
                !served_by_edges || log.calls == 0,
                "step {step} only replayed, and made {} calls",
                log.calls
            );
            let earlier = (1..step).zip(&logs).find(|(number, earlier)| {
                *number >= self.same_addresses_from && earlier.text == log.text
            });
            if let Some((number, earlier)) = earlier {
                assert_eq!(
                    earlier.transient(),
                    log.transient(),
                    "addresses of steps {number} and {step}"
                );
            }
        }
        player.check_held(&self.held);
        player.pair.end();
        logs
    }
}

/// Plays steps; for rows that need more than a list of them.
pub struct Player {
    pub pair: Pair,
    pub names: BTreeMap<String, u64>,
}

impl Player {
    pub fn new() -> Self {
        Self::with(Options::default())
    }

    pub fn with(options: Options) -> Self {
        Self {
            pair: Pair::new(GRANULE, options),
            names: BTreeMap::new(),
        }
    }

    pub fn step(&mut self, text: &str) -> Log {
        let (name, words) = text.split_once(':').unwrap_or(("step", text));
        let mut run = self.pair.begin(name);
        let mut log = Log {
            text: text.to_owned(),
            ..Log::default()
        };
        play(&mut run, &mut self.names, words, &mut log.buffers);
        let report = run.finish();
        self.pair.book.check_contents();
        log.breaks = report.breaks;
        log.calls = report.device_calls;
        log.recorded = report.recorded;
        log.peak = report.peak.0;
        log.held = self.pair.book.held();
        log
    }

    /// The library and the device agree, and so does the table.
    pub fn check_held(&mut self, held: &Held) {
        let stats = self.pair.compiler().stats();
        let device = self.pair.book.held();
        assert_eq!(
            stats.held.0, device,
            "held by the library's statistics and by the counting device"
        );
        match *held {
            Held::Peak | Held::Mib(_) => {
                let peak = stats.peak.checked_round_up(GRANULE).expect("a size");
                assert_eq!(
                    Bytes(device),
                    peak,
                    "held is the most live bytes, rounded up"
                );
                assert_eq!(stats.floor, peak, "and so is the floor");
                if let Held::Mib(mib) = *held {
                    assert_eq!(peak, Bytes::mib(mib), "the table's number");
                }
            }
            Held::AtMostMib(mib) => {
                assert!(
                    device <= mib * MIB,
                    "held {} of at most {mib} MiB",
                    Bytes(device)
                );
            }
        }
    }
}

/// Plays words inside a step.
pub fn play(
    run: &mut Run<'_>,
    names: &mut BTreeMap<String, u64>,
    words: &str,
    served: &mut Vec<Served>,
) {
    for word in parse(words) {
        match word {
            Word::Alloc(name, size) => {
                let scope = run.book.model.path();
                let (expect, address) = run.alloc(size);
                served.push(Served {
                    name: name.clone(),
                    scope,
                    expect,
                    address,
                    freed_in_step: false,
                });
                if let Some(address) = address {
                    let old = names.insert(name.clone(), address);
                    assert_eq!(old, None, "{name} is live already");
                }
            }
            Word::Free { name, only_if_live } => {
                let address = names.remove(&name);
                assert!(address.is_some() || only_if_live, "{name} is not live");
                if let Some(address) = address {
                    run.free(address, true);
                    if let Some(own) = served
                        .iter_mut()
                        .rev()
                        .find(|served| served.address == Some(address))
                    {
                        own.freed_in_step = true;
                    }
                }
            }
            Word::Rename {
                from,
                to,
                only_if_live,
            } => {
                let address = names.remove(&from);
                assert!(address.is_some() || only_if_live, "{from} is not live");
                if let Some(address) = address {
                    assert_eq!(
                        names.insert(to.clone(), address),
                        None,
                        "{to} is live already"
                    );
                }
            }
            Word::Open(name) => run.open(&name),
            Word::Close => run.close(),
        }
    }
}

/// The words of a step, with its turns written out.
fn parse(text: &str) -> Vec<Word> {
    let mut open: Vec<(String, u64, Vec<Word>)> = Vec::new();
    let mut words = Vec::new();
    for token in text.split_whitespace() {
        if let Some(head) = token.strip_suffix('{') {
            let (name, count) = head.split_once('*').unwrap_or((head, "1"));
            open.push((
                name.to_owned(),
                count.parse().expect("a count"),
                std::mem::take(&mut words),
            ));
        } else if token == "}" {
            let (name, count, outer) = open.pop().expect("an open brace");
            let body = std::mem::replace(&mut words, outer);
            for turn in 1..=count {
                words.extend((!name.is_empty()).then(|| Word::Open(name.clone())));
                words.extend(body.iter().map(|word| word.in_turn(turn)));
                words.extend((!name.is_empty()).then_some(Word::Close));
            }
        } else {
            words.push(Word::parse(token));
        }
    }
    assert!(open.is_empty(), "a brace is open in {text}");
    words
}

impl Word {
    fn parse(token: &str) -> Self {
        let (token, only_if_live) = token
            .strip_suffix('?')
            .map_or((token, false), |token| (token, true));
        if let Some(name) = token.strip_prefix('-') {
            Self::Free {
                name: name.to_owned(),
                only_if_live,
            }
        } else if let Some((from, to)) = token.split_once('>') {
            Self::Rename {
                from: from.to_owned(),
                to: to.to_owned(),
                only_if_live,
            }
        } else {
            let (name, size) = token
                .split_once('=')
                .unwrap_or_else(|| panic!("what does {token} mean?"));
            Self::Alloc(name.to_owned(), size.split('+').map(size_of).sum())
        }
    }

    fn in_turn(&self, turn: u64) -> Self {
        let numbered = |name: &String| name.replace('$', &turn.to_string());
        match self {
            Self::Alloc(name, size) => Self::Alloc(numbered(name), *size),
            Self::Free { name, only_if_live } => Self::Free {
                name: numbered(name),
                only_if_live: *only_if_live,
            },
            Self::Rename {
                from,
                to,
                only_if_live,
            } => Self::Rename {
                from: numbered(from),
                to: numbered(to),
                only_if_live: *only_if_live,
            },
            Self::Open(name) => Self::Open(name.clone()),
            Self::Close => Self::Close,
        }
    }
}

fn size_of(text: &str) -> u64 {
    let (number, unit) = match text.as_bytes().last() {
        Some(b'B') => (&text[..text.len() - 1], 1),
        Some(b'K') => (&text[..text.len() - 1], 1 << 10),
        _ => (text, MIB),
    };
    match number.split_once('.') {
        Some(("0", "5")) => unit / 2,
        _ => {
            number
                .parse::<u64>()
                .unwrap_or_else(|_| panic!("{text} is no size"))
                * unit
        }
    }
}

/// The same step `count` times.
pub fn times(count: usize, step: &str) -> Vec<String> {
    vec![step.to_owned(); count]
}

/// Steps, one after the other.
pub fn steps(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}
