//! Layer 5: where in a step we are: scope paths, their numbers, and positions.
//!
//! A *position* is a scope path and "the n-th allocation of this size in this run of the scope". It
//! is how a buffer that outlives its step is recognised before it is made. Every tape entry knows its own
//! position, so following a tape only has to leave the counters as recording would have, before the scope
//! changes or something is recorded. Whether a tape entry is at the same position is one compare of
//! `context`, a hash of the scope path and of the sizes asked for so far in this run of the scope.
//!
//! Scopes carry no correctness: the worst that a collision of contexts or a wrong position can do is
//! to put a buffer into the other space.
//!
//! Nested as deep as one likes, a scope costs what it costs outermost: nothing walks up a whole path.
//!
//! May import: layer 0, `placer` for units, `stats`.

use std::collections::{HashMap, HashSet};

use crate::bits::BitSet;
use crate::mix::{self, MixBuild};
use crate::path;
use crate::placer::Units;
use crate::stats::ScopeStats;
use crate::units::{ALIGNMENT, Bytes};

/// A place in the program: number of (scope path, size), and which allocation of it.
pub(crate) type Position = (u32, u32);

#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    run: u64,
    count: u32,
}

#[derive(Debug, Default)]
struct Node {
    name: Box<str>,
    parent: Option<u32>,
    /// Names on the path, this one included.
    depth: u32,
    /// Where the path had [`path::ENDS`] names, or this one while it has no more.
    head: u32,
    children: HashMap<Box<str>, u32>,
    runs: u64,
    /// Most units live at once in any run.
    peak: u64,
    breaks: u64,
    survivor_positions: u64,
}

/// An open scope.
#[derive(Clone, Copy, Debug)]
struct Open {
    path: u32,
    run: u64,
    context: u32,
    peak: u64,
    strict: bool,
}

/// See the module's page.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Scopes {
    /// Hash of where we are; see the module's page.
    pub context: u32,
    run: u64,
    nodes: Vec<Node>,
    roots: HashMap<Box<str>, u32>,
    stack: Vec<Open>,
    last_run: u64,
    counters: Vec<Counter>,
    counter_of: HashMap<(u32, Units), u32, MixBuild>,
    /// Path of each counter.
    path_of: Vec<u32>,
    strict: u32,
    /// Numbers of forgotten paths, to be given out again; whether there ever was one.
    unused: Vec<u32>,
    has_forgotten: bool,
}

impl Scopes {
    /// How many scopes are open, the step included.
    pub fn depth(&self) -> usize {
        self.stack.len()
    }

    /// Whether a strict scope is open.
    pub fn is_strict(&self) -> bool {
        self.strict > 0
    }

    /// Number of a step's name.
    pub fn root(&mut self, name: &str) -> u32 {
        if let Some(&root) = self.roots.get(name) {
            return root;
        }
        let root = self.new_node(name, None);
        self.roots.insert(name.into(), root);
        root
    }

    fn new_node(&mut self, name: &str, parent: Option<u32>) -> u32 {
        let number = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(Node::default());
            u32::try_from(self.nodes.len() - 1).expect("scope paths are numbered by u32")
        });
        let outer = parent.map(|parent| &self.nodes[parent as usize]);
        let depth = outer.map_or(0, |outer| outer.depth) + 1;
        let head = outer.map(|outer| outer.head);
        self.nodes[number as usize] = Node {
            name: name.into(),
            parent,
            depth,
            head: head
                .filter(|_| depth as usize > path::ENDS)
                .unwrap_or(number),
            ..Node::default()
        };
        number
    }

    /// Opens the step's own scope.
    pub fn enter_root(&mut self, root: u32, live: u64) {
        debug_assert!(self.stack.is_empty());
        self.open(root, live, false);
    }

    /// Opens a scope in the innermost one; returns the number of its run.
    pub fn enter(&mut self, name: &str, live: u64, strict: bool) -> u64 {
        let parent = self.stack.last().expect("a step is open").path;
        let path = match self.nodes[parent as usize].children.get(name) {
            Some(&path) => path,
            None => {
                let path = self.new_node(name, Some(parent));
                self.nodes[parent as usize]
                    .children
                    .insert(name.into(), path);
                path
            }
        };
        self.open(path, live, strict);
        self.run
    }

    /// How many scopes were opened inside a run of a scope that is open, and are. Runs are numbered as they begin.
    pub fn opened_since(&self, run: u64) -> Option<usize> {
        let at = self.stack.binary_search_by_key(&run, |open| open.run);
        Some(self.stack.len() - 1 - at.ok()?)
    }

    fn open(&mut self, path: u32, live: u64, strict: bool) {
        if let Some(outer) = self.stack.last_mut() {
            outer.context = self.context;
        }
        self.last_run += 1;
        self.run = self.last_run;
        self.context = mix::chain(0x51_7C_C1_B7, path);
        self.strict += u32::from(strict);
        self.nodes[path as usize].runs += 1;
        self.stack.push(Open {
            path,
            run: self.run,
            context: self.context,
            peak: live,
            strict,
        });
    }

    /// Closes the innermost scope. [`fold_peak`](Self::fold_peak) comes first.
    pub fn leave(&mut self) {
        let closed = self.stack.pop().expect("a scope is open");
        self.strict -= u32::from(closed.strict);
        let node = &mut self.nodes[closed.path as usize];
        node.peak = node.peak.max(closed.peak);
        if let Some(outer) = self.stack.last_mut() {
            outer.peak = outer.peak.max(closed.peak);
            (self.run, self.context) = (outer.run, outer.context);
        }
    }

    /// Tells the innermost scope how much was live at most since the last call.
    pub fn fold_peak(&mut self, peak: u64) {
        if let Some(open) = self.stack.last_mut() {
            open.peak = open.peak.max(peak);
        }
    }

    /// Most units live at once in the step so far; of its closed scopes and folded peaks.
    pub fn step_peak(&self) -> u64 {
        self.stack.iter().map(|open| open.peak).max().unwrap_or(0)
    }

    /// The position of the next allocation of `len`.
    pub fn position(&mut self, len: Units) -> Position {
        let path = self.stack.last().expect("a step is open").path;
        let next = self.counters.len() as u32;
        let counter = *self.counter_of.entry((path, len)).or_insert(next);
        if counter == next {
            self.counters.push(Counter::default());
            self.path_of.push(path);
        }
        let Counter { run, count } = self.counters[counter as usize];
        (counter, if run == self.run { count } else { 0 })
    }

    /// An allocation of `len` was served at a position.
    pub fn count(&mut self, position: Position, len: Units) {
        self.count_only(position);
        self.go_on(len);
    }

    /// An allocation of `len` was served; its position is counted before the scope ends or records.
    #[inline]
    pub fn go_on(&mut self, len: Units) {
        self.context = mix::chain(self.context, len);
    }

    /// The innermost scope has had the allocation at a position.
    pub fn count_only(&mut self, (counter, nth): Position) {
        self.counters[counter as usize] = Counter {
            run: self.run,
            count: nth + 1,
        };
    }

    /// Keeps the counters of which `keep` holds, and returns the new number of each. No scope is open.
    pub fn retain_counters(&mut self, keep: impl Fn(u32) -> bool) -> HashMap<u32, u32, MixBuild> {
        let mut new = HashMap::default();
        let mut path_of = Vec::new();
        self.counter_of.retain(|_, counter| keep(*counter));
        for counter in self.counter_of.values_mut() {
            path_of.push(self.path_of[*counter as usize]);
            let number = path_of.len() as u32 - 1;
            new.insert(std::mem::replace(counter, number), number);
        }
        self.counter_of.shrink_to_fit();
        self.counters = vec![Counter::default(); path_of.len()];
        self.path_of = path_of;
        new
    }

    /// Paths and positions that are remembered.
    pub fn remembered(&self) -> usize {
        self.nodes.len() - self.unused.len() + self.counters.len()
    }

    /// Forgets the paths that neither a counter nor one of `names` is on. No scope is open.
    pub fn retain_paths(&mut self, names: impl Iterator<Item = u32>) {
        let mut kept = BitSet::default();
        for path in self.path_of.iter().copied().chain(names) {
            let mut next = Some(path);
            while let Some(path) = next.filter(|&path| !kept.contains(path)) {
                kept.insert(path);
                next = self.nodes[path as usize].parent;
            }
        }
        self.unused = (0..self.nodes.len() as u32)
            .filter(|&path| !kept.contains(path))
            .collect();
        for &path in &self.unused {
            self.nodes[path as usize] = Node::default();
        }
        self.roots.retain(|_, path| kept.contains(*path));
        self.roots.shrink_to_fit();
        for node in &mut self.nodes {
            node.children.retain(|_, path| kept.contains(*path));
            node.children.shrink_to_fit();
        }
        self.has_forgotten |= !self.unused.is_empty();
    }

    /// Counts the positions that survive in each path anew.
    pub fn count_survivors(&mut self, positions: impl Iterator<Item = Position>) {
        for node in &mut self.nodes {
            node.survivor_positions = 0;
        }
        for (counter, _) in positions {
            let path = self.path_of[counter as usize];
            self.nodes[path as usize].survivor_positions += 1;
        }
    }

    /// A graph break began in the innermost scope.
    pub fn add_break(&mut self) {
        let path = self.stack.last().expect("a step is open").path;
        self.nodes[path as usize].breaks += 1;
    }

    /// A position was found to survive; returns the number of its step's name.
    pub fn add_survivor(&mut self, position: Position) -> u32 {
        let path = self.path_of[position.0 as usize];
        self.nodes[path as usize].survivor_positions += 1;
        let head = self.nodes[path as usize].head;
        self.up_from(head).last().unwrap_or(head)
    }

    /// Path of the innermost open scope: `step/down.0/attention`.
    pub fn path(&self) -> String {
        self.stack
            .last()
            .map_or_else(String::new, |open| self.path_text(open.path))
    }

    /// A path, and those around it, the innermost first.
    fn up_from(&self, path: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(path), |&path| self.nodes[path as usize].parent)
    }

    /// Path of a counter of a position.
    pub fn path_of(&self, counter: u32) -> u32 {
        self.path_of[counter as usize]
    }

    /// A path by its names: `step/down.0/attention`.
    pub fn path_text(&self, path: u32) -> String {
        let Node { depth, head, .. } = self.nodes[path as usize];
        let names = |path: u32, count: usize| {
            let paths = self.up_from(path).take(count);
            let mut names: Vec<&str> = paths.map(|path| self.name(path)).collect();
            names.reverse();
            names
        };
        let (depth, ends) = (depth as usize, path::ENDS);
        let innermost = names(path, depth.saturating_sub(ends).min(ends));
        path::text(depth, names(head, ends).into_iter(), innermost.into_iter())
    }

    /// Name of a path's last part.
    pub fn name(&self, path: u32) -> &str {
        &self.nodes[path as usize].name
    }

    /// Every scope that was entered, each after its parent.
    pub fn stats(&self) -> Vec<ScopeStats> {
        let mut open_peaks: HashMap<u32, u64, MixBuild> = HashMap::default();
        for open in &self.stack {
            let peak = open_peaks.entry(open.path).or_default();
            *peak = open.peak.max(*peak);
        }
        let unused: HashSet<u32> = self.unused.iter().copied().collect();
        let mut paths: Vec<u32> = (0..self.nodes.len() as u32)
            .filter(|path| !unused.contains(path))
            .collect();
        if self.has_forgotten {
            // Numbers that were given out again are in no order.
            paths.sort_by_key(|&path| self.nodes[path as usize].depth);
        }
        paths
            .into_iter()
            .map(|path| {
                let node = &self.nodes[path as usize];
                ScopeStats {
                    path: self.path_text(path),
                    runs: node.runs,
                    peak: Bytes(
                        node.peak.max(open_peaks.get(&path).copied().unwrap_or(0)) * ALIGNMENT.0,
                    ),
                    breaks: node.breaks,
                    survivor_positions: node.survivor_positions,
                }
            })
            .collect()
    }
}
