//! An engine and the reference model side by side: every event goes to both, and after each of them
//! they must agree on the outcome, the numbers, the live buffers and the frames under them.

use std::collections::BTreeMap;
use std::sync::Arc;

use memory_compiler::device::{Call, Device, StreamId};
use memory_compiler::{
    Address, Allocation, BadFree, Bytes, Compiler, Error, Expected, Options, Pause, Scope,
    Snapshot, Stats, Step, StepReport,
};

use super::devices::{CountingHost, Pattern, counting_host};
use super::{Expect, Model};

/// A stream that no step of these tests is bound to: on a GPU the handle of a default stream.
pub const OTHER_STREAM: StreamId = StreamId(2);

/// A compiler with its model.
pub struct Pair {
    /// `None` once it was dropped.
    pub compiler: Option<Compiler>,
    pub book: Book,
}

/// The model, the device and the contents of the live buffers.
pub struct Book {
    pub device: Arc<dyn Device>,
    pub counting: CountingHost,
    pub model: Model,
    /// Compare everything after each event (or only outcomes, for programs of a million events).
    pub thorough: bool,
    patterns: BTreeMap<u64, Pattern>,
    seeds: u64,
    /// Calls of the device before this compiler.
    calls_before: u64,
    /// Memory was given back since: the next replays have to fetch it again.
    pub trimmed: bool,
    /// Frees are on their way from elsewhere: the engine sees them at its next event.
    queued: bool,
}

impl Pair {
    pub fn new(granule: Bytes, options: Options) -> Self {
        let counting = counting_host(granule);
        Self::over(counting.clone(), counting, options)
    }

    /// `device` stands on top of `counting`.
    pub fn over(device: Arc<dyn Device>, counting: CountingHost, options: Options) -> Self {
        Self::try_over(device, counting, options).expect("a compiler")
    }

    pub fn try_over(
        device: Arc<dyn Device>,
        counting: CountingHost,
        options: Options,
    ) -> Result<Self, Error> {
        let model = Model::new(device.granule().0, options.strict);
        let calls_before = counting.memory_calls();
        let compiler = Compiler::new(device.clone(), options)?;
        let patterns = BTreeMap::new();
        let (seeds, trimmed, queued) = (0, false, false);
        let book = Book {
            device,
            counting,
            model,
            thorough: true,
            patterns,
            seeds,
            calls_before,
            trimmed,
            queued,
        };
        Ok(Self {
            compiler: Some(compiler),
            book,
        })
    }

    pub fn compiler(&mut self) -> &mut Compiler {
        self.compiler.as_mut().expect("not dropped yet")
    }

    pub fn begin(&mut self, name: &str) -> Run<'_> {
        self.try_begin(name).expect("a step begins")
    }

    pub fn try_begin(&mut self, name: &str) -> Result<Run<'_>, Error> {
        let step = self
            .compiler
            .as_mut()
            .expect("not dropped yet")
            .begin(name)?;
        self.book.model.begin(name);
        self.book.queued = false;
        // What was taken back between two steps is of neither.
        let calls_before = self.book.counting.memory_calls();
        let run = Run {
            scopes: Vec::new(),
            pauses: Vec::new(),
            step,
            book: &mut self.book,
            calls_before,
        };
        run.compare();
        let (stats, model) = (run.step.stats(), &run.book.model.stats);
        let survivors = (model.survivors, model.survivor_bytes);
        assert_eq!(
            (stats.survivors, stats.survivor_bytes),
            survivors,
            "survivors at the step's begin"
        );
        Ok(run)
    }

    /// Frees a buffer while no step is active: the compiler hears of it when the next one begins.
    pub fn free(&mut self, address: u64) {
        self.book
            .free_from_elsewhere(address, || memory_compiler::free(Address(address)));
    }

    pub fn free_on_thread(&mut self, address: u64) {
        self.book.free_from_elsewhere(address, || {
            on_thread(move || memory_compiler::free(Address(address)))
        });
    }

    /// Gives idle memory back, which must be what the device loses.
    pub fn trim(&mut self) -> Bytes {
        self.try_trim().expect("trimming works")
    }

    pub fn try_trim(&mut self) -> Result<Bytes, Error> {
        let before = self.book.held();
        let result = self.compiler().trim();
        if let Ok(freed) = result {
            assert_eq!(
                before - freed.0,
                self.book.held(),
                "trim tells how much it gave back"
            );
        }
        self.book.trimmed = true;
        self.book.check_contents();
        result
    }

    /// Drops the compiler; what is live stays readable, and the device's books empty with the last free.
    pub fn drop_compiler(&mut self) {
        self.compiler = None;
        self.book.queued = true;
        self.book.check_contents();
        if self.book.model.live.is_empty() {
            assert!(
                self.book.counting.is_empty(),
                "left behind: {:?}",
                self.book.counting.books()
            );
        }
    }

    /// Ends everything, and proves that nothing is left on the device.
    pub fn end(mut self) {
        self.drop_compiler();
        for address in self.book.addresses() {
            self.free(address);
        }
        assert!(
            self.book.counting.is_empty(),
            "left behind: {:?}",
            self.book.counting.books()
        );
    }
}

impl Book {
    pub fn addresses(&self) -> Vec<u64> {
        self.model.live.keys().copied().collect()
    }

    /// Physical bytes, as the device counts them.
    pub fn held(&self) -> u64 {
        self.counting.books().held.0
    }

    pub fn check_contents(&self) {
        for (&address, pattern) in &self.patterns {
            pattern.check(&*self.device, address);
        }
    }

    fn fill(&mut self, address: u64, size: u64) {
        self.seeds += 1;
        // A million events with two copies from and to a GPU each would take minutes.
        let is_slow = !self.thorough && !self.device.is_host_memory();
        if is_slow && !self.seeds.is_multiple_of(61) {
            return;
        }
        let pattern = Pattern {
            seed: self.seeds,
            size,
        };
        pattern.write(&*self.device, address);
        self.patterns.insert(address, pattern);
    }

    fn before_free(&mut self, address: u64) {
        if let Some(pattern) = self.patterns.remove(&address) {
            pattern.check(&*self.device, address);
        }
    }

    fn free_from_elsewhere(&mut self, address: u64, free: impl FnOnce() -> Result<(), Error>) {
        self.before_free(address);
        free().expect("a free from elsewhere is taken, good or bad");
        self.model.freed(address);
        self.queued = true;
    }

    fn compare(&self, stats: &Stats, snapshot: &Snapshot) {
        let model = &self.model.stats;
        let shown = Stats {
            live: stats.live,
            peak: stats.peak,
            edges: stats.edges,
            steps: stats.steps,
            breaks_step: stats.breaks_step,
            breaks_total: stats.breaks_total,
            recorded_step: stats.recorded_step,
            recorded_total: stats.recorded_total,
            replayed_step: stats.replayed_step,
            replayed_total: stats.replayed_total,
            // Compared when a step begins, and in a test of their own.
            survivors: model.survivors,
            survivor_bytes: model.survivor_bytes,
            survivor_positions: stats.survivor_positions,
            obstructed: stats.obstructed,
            bad_frees: stats.bad_frees,
            aborts: stats.aborts,
            ..Stats::default()
        };
        assert_eq!(
            &shown, model,
            "numbers of the engine (left) and of the model (right)"
        );
        assert_eq!(
            stats.held.0,
            self.held(),
            "bytes held, by the engine and by the device"
        );
        assert_eq!(
            stats.device_calls_total,
            self.counting.memory_calls() - self.calls_before,
            "calls, by the engine and by the device"
        );
        assert!(stats.held >= stats.live, "a live buffer has memory");
        let live = self
            .model
            .live
            .iter()
            .map(|(&address, buffer)| (Address(address), Bytes(buffer.class)));
        assert_eq!(snapshot.live, live.collect::<Vec<_>>(), "live buffers");
        // The library's own validator must agree; it is quadratic in pages.
        let pages = |size: Bytes| size.0 / snapshot.granule.0 + 2;
        if snapshot
            .live
            .iter()
            .map(|&(_, size)| pages(size))
            .sum::<u64>()
            < 200
        {
            assert_eq!(snapshot.validate(), Ok(()));
        }
    }
}

/// A step of both.
pub struct Run<'a> {
    // Guards go before their step.
    scopes: Vec<Scope>,
    pauses: Vec<Pause>,
    pub step: Step<'a>,
    pub book: &'a mut Book,
    calls_before: u64,
}

impl Run<'_> {
    /// Allocates, and checks the answer against the model's.
    pub fn alloc(&mut self, size: u64) -> (Expect, Option<u64>) {
        self.try_alloc(size)
            .unwrap_or_else(|error| panic!("{size} bytes were not served: {error}"))
    }

    /// The same; an error of the device or of the budget is handed on, and must have changed nothing.
    pub fn try_alloc(&mut self, size: u64) -> Result<(Expect, Option<u64>), Error> {
        let expect = self.book.model.predict(size);
        let books = self.book.counting.books();
        let (calls, releases) = (books.memory_calls(), books.calls(Call::Release));
        let result = self.step.alloc(Bytes(size));
        self.book.queued = false;
        if !matches!(expect, Expect::Replayed(_)) {
            // A device that was full for a moment was given idle memory back.
            self.book.trimmed |= self.book.counting.calls(Call::Release) > releases;
        }
        let address = match (expect, result) {
            (Expect::Elsewhere, Ok(Allocation::Elsewhere)) => None,
            (Expect::Refused, Err(error)) => {
                self.check_refusal(size, &error);
                None
            }
            (
                Expect::Replayed(_) | Expect::Recorded | Expect::Survivor,
                Ok(Allocation::Here(address)),
            ) => {
                assert!(address.0.is_multiple_of(512), "{address} is not aligned");
                Some(address.0)
            }
            (
                Expect::Replayed(_) | Expect::Recorded | Expect::Survivor,
                Err(
                    error @ (Error::Device { .. }
                    | Error::OutOfMemory { .. }
                    | Error::OverBudget { .. }),
                ),
            ) => {
                // Whatever was idle may have been given back on the way.
                self.book.trimmed = true;
                self.compare();
                self.book.check_contents();
                return Err(error);
            }
            (_, result) => panic!("{expect:?} was expected of {size} bytes, not {result:?}"),
        };
        if matches!(expect, Expect::Replayed(_)) && !self.book.trimmed {
            assert_eq!(
                calls,
                self.book.counting.memory_calls(),
                "a replayed allocation calls no driver"
            );
        }
        if let Some(address) = address {
            let look = self.book.thorough || !matches!(expect, Expect::Replayed(_));
            let snapshot = look.then(|| self.step.snapshot());
            self.book
                .model
                .allocated(expect, size, address, snapshot.as_ref());
            self.book.fill(address, size);
        }
        self.compare();
        Ok((expect, address))
    }

    /// Allocates what both must serve.
    pub fn here(&mut self, size: u64) -> u64 {
        self.alloc(size).1.expect("served")
    }

    fn check_refusal(&self, size: u64, error: &Error) {
        let Error::Strict {
            scope,
            event,
            asked,
            expected,
        } = error
        else {
            panic!("a strict break was expected, not {error}");
        };
        let model = &self.book.model;
        assert_eq!((scope.clone(), asked.0), (model.path(), Model::class(size)));
        assert_eq!(*event, model.events, "number of the event that broke");
        match expected {
            Expected::Size(size) => {
                let survives = model.predict(size.0) == Expect::Survivor;
                assert!(
                    survives || model.answered().contains(&size.0),
                    "{size} is not recorded here"
                );
            }
            Expected::Nothing => assert!(model.answered().is_empty(), "something is recorded here"),
            Expected::End => {}
        }
    }

    /// An allocation that the step does not serve: on another stream.
    pub fn alloc_on_other_stream(&mut self, size: u64) {
        let answer = self.step.alloc_on(OTHER_STREAM, Bytes(size));
        assert_eq!(answer, Ok(Allocation::Elsewhere));
        self.compare_unless_queued();
    }

    /// Frees through the step, or through the function that needs none.
    pub fn free(&mut self, address: u64, through_step: bool) {
        self.free_here(address, |step, address| {
            if through_step {
                step.free(address)
            } else {
                memory_compiler::free(address)
            }
        });
    }

    /// On the step's own thread, while work of another stream may still use it.
    pub fn free_on_other_stream(&mut self, address: u64) {
        self.free_here(address, |step, address| step.free_on(OTHER_STREAM, address));
    }

    fn free_here(
        &mut self,
        address: u64,
        free: impl FnOnce(&Step<'_>, Address) -> Result<(), Error>,
    ) {
        self.book.before_free(address);
        let result = free(&self.step, Address(address));
        self.book.queued = false;
        if self.book.model.freed(address) {
            assert_eq!(result, Ok(()), "free of the live buffer at {address:#x}");
        } else {
            let reason = BadFree::NotLive;
            assert_eq!(
                result,
                Err(Error::BadFree {
                    address: Address(address),
                    reason
                })
            );
        }
        self.compare();
    }

    /// Frees on a thread that runs no step, before the next event.
    pub fn free_on_thread(&mut self, address: u64) {
        self.book.free_from_elsewhere(address, || {
            on_thread(move || memory_compiler::free(Address(address)))
        });
    }

    pub fn open(&mut self, name: &str) {
        self.scopes.push(memory_compiler::scope(name));
        self.book.model.open(name, false);
        self.compare_unless_queued();
    }

    pub fn open_strict(&mut self, name: &str) {
        self.scopes.push(memory_compiler::strict_scope(name));
        self.book.model.open(name, true);
        self.compare_unless_queued();
    }

    pub fn close(&mut self) {
        if self.scopes.pop().is_some() {
            self.book.model.scopes.pop();
            self.compare_unless_queued();
        }
    }

    pub fn pause(&mut self) {
        self.pauses.push(memory_compiler::pause());
        self.book.model.paused += 1;
    }

    pub fn resume(&mut self) {
        if self.pauses.pop().is_some() {
            self.book.model.paused -= 1;
        }
    }

    fn compare_unless_queued(&self) {
        if !self.book.queued {
            self.compare();
        }
    }

    pub fn compare(&self) {
        if self.book.thorough || self.book.model.events.is_multiple_of(9973) {
            self.book.compare(&self.step.stats(), &self.step.snapshot());
        }
    }

    pub fn finish(mut self) -> StepReport {
        while !self.scopes.is_empty() {
            self.close();
        }
        self.pauses.clear();
        let Run {
            step,
            book,
            calls_before,
            ..
        } = self;
        let report = step.finish().expect("the step ends well");
        book.model.end(true);
        let model = &book.model;
        let expected = StepReport {
            events: model.events,
            replayed: model.stats.replayed_step,
            recorded: model.stats.recorded_step,
            survivors: model.step_survivors,
            breaks: model.stats.breaks_step,
            device_calls: book.counting.memory_calls() - calls_before,
            peak: Bytes(model.step_peak),
        };
        assert_eq!(
            report, expected,
            "reports of the engine (left) and of the model (right)"
        );
        report
    }

    /// Ends the step early, with scopes and pauses open or after closing them.
    pub fn abort(mut self, close_first: bool) {
        if close_first {
            while self.scopes.pop().is_some() {}
            self.pauses.clear();
        }
        let Run {
            step,
            book,
            scopes,
            pauses,
            ..
        } = self;
        step.abort();
        scopes.into_iter().rev().for_each(drop);
        drop(pauses);
        book.model.end(false);
        book.check_contents();
    }
}

/// Runs `f` on a thread of its own and waits for it.
pub fn on_thread<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    std::thread::spawn(f).join().expect("the thread ends well")
}
