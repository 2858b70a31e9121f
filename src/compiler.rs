//! Layer 5: what a program holds: a compiler, a step, a scope.
//!
//! [`Compiler`] owns the memory of one device. [`Compiler::step`] runs a closure as a step: inside,
//! the hooks serve this thread's large buffers from it. [`Compiler::begin`] is the same without a
//! closure, for programs that place buffers themselves.
//!
//! May import: `engine`, `current`, `lending`, `watch`, and below.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::arena::Arena;
use crate::bookkeeping::Bookkeeping;
use crate::budget::Budget;
use crate::current;
use crate::device::fork::Process;
use crate::device::{Device, StreamId};
use crate::engine::{Allocation, COMPILE_TIME, Engine, OnError, Shared};
use crate::error::Error;
use crate::lending::{self, Idle};
use crate::options::{Options, SMALLEST_THRESHOLD, check_granule};
use crate::pager::Pager;
use crate::report::Report;
use crate::stats::{Compiled, Stats, StepReport};
use crate::units::{ALIGNMENT, Address, Bytes};
use crate::validate::{self, Fault};
use crate::watch;

/// Records steps and replays them; see the [crate documentation](crate).
///
/// Dropping it leaves the buffers that are still live valid; the memory goes back to the device with
/// the last of them.
///
/// Between steps its idle pages serve steps of other compilers on the same device, or within the same pager's
/// budget, before those are told that there is no memory: its next step then maps pages under its addresses
/// again, and counts the calls. A pinned layout lends nothing.
///
/// In a forked child of the process that made it, everything but its drop is refused ([`Error::Forked`]), numbers
/// are zero, and buffers that were live at the fork may be read, written to as copies, and dropped; nothing of
/// that reaches the parent. A child may make a device and a compiler of its own.
#[derive(Debug)]
pub struct Compiler {
    /// Has the engine, but while a step is active.
    shared: Arc<Shared>,
    serial: u64,
    /// Who made it: in a forked child it refuses everything.
    process: Process,
}

// Between steps it may move to another thread, which then steps it.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Compiler>();
};

impl Compiler {
    /// Reserves addresses on `device`; memory comes as steps need it.
    ///
    /// # Errors
    /// [`Error::Option`] for an option that cannot work; [`Error::Reservation`] when not even 1 GiB of addresses is
    /// to be had, where [`Options::address_space`] is so large; [`Error::Device`] when the device refuses them for
    /// another reason.
    pub fn new(device: Arc<dyn Device>, options: Options) -> Result<Self, Error> {
        let budget = Budget::new(options.budget);
        Self::sharing(device, options, budget)
    }

    /// A compiler on the device of `pager` and within its budget: steps and weights share it. A step
    /// that needs pages has weights evicted, lowest priority first; what [`trim`](Self::trim) and the
    /// end of the compiler give back, weights may have again.
    ///
    /// # Errors
    /// As [`new`](Self::new); `Options::budget` is `None` here, the pager's is the one that counts.
    pub fn with_pager(pager: &Pager, options: Options) -> Result<Self, Error> {
        if options.budget.is_some() {
            return Err(Error::Option {
                option: "budget",
                reason: "the pager's budget is the one that counts".to_owned(),
            });
        }
        Self::sharing(Arc::clone(pager.device()), options, pager.budget().clone())
    }

    fn sharing(device: Arc<dyn Device>, options: Options, budget: Budget) -> Result<Self, Error> {
        let _bookkeeping = Bookkeeping::begin();
        let process = Process::this();
        let granule = device.granule();
        let wrong = |option, reason: String| Err(Error::Option { option, reason });
        if options.address_space.0 / granule.0 < 2 {
            let reason = format!(
                "{:#} is less than two pages of {granule}",
                options.address_space
            );
            return wrong("address_space", reason);
        }
        if let Some(budget) = options.budget
            && budget < granule
        {
            return wrong(
                "budget",
                format!("{budget:#} is less than one page of {granule}"),
            );
        }
        check_granule(granule, ALIGNMENT)?;
        if options.edge_limit == 0 {
            return wrong("edge_limit", "nothing could be recorded".into());
        }
        if options.threshold < SMALLEST_THRESHOLD {
            let reason = format!("{:#} is below {SMALLEST_THRESHOLD}", options.threshold);
            return wrong("threshold", reason);
        }
        let host_threshold = if device.is_host_memory() {
            options.threshold
        } else {
            Bytes(u64::MAX)
        };
        let asked = options.address_space;
        let arena = Arena::new(Arc::clone(&device), asked, budget)
            .map_err(|refused| refused.error(asked))?;
        let shared = Arc::new(Shared::new(arena.base(), arena.reserved(), device));
        current::register(&shared);
        let engine = Engine::new(Arc::clone(&shared), arena, &options, host_threshold);
        lending::offer(&shared, Box::new(engine));
        Ok(Self {
            shared,
            serial: 0,
            process,
        })
    }

    /// The engine, which lends nothing while this has it.
    fn engine(&mut self) -> Result<Idle<'_>, Error> {
        self.check_process()?;
        let mut idle = Idle::lock(&self.shared);
        // After `mem::forget` of a step the engine is still on the thread that began it.
        if idle.is_none()
            && let Some(mut engine) = current::uninstall(self.serial)
        {
            engine.abort();
            idle.put(engine);
        }
        if idle.is_none() {
            return Err(Error::StepActive);
        }
        Ok(idle)
    }

    fn check_process(&self) -> Result<(), Error> {
        if self.process.is_ancestor() {
            return Err(Error::Forked);
        }
        Ok(())
    }

    /// Begins a step on this thread. Until it ends, this thread's large buffers are served from it.
    /// A step that is dropped without [`Step::finish`] aborts.
    ///
    /// # Errors
    /// [`Error::StepActive`] when a step of this compiler was leaked on another thread; [`Error::Device`] when the
    /// last step ran on another thread and its work on a GPU cannot be waited for.
    pub fn begin(&mut self, name: &str) -> Result<Step<'_>, Error> {
        let _bookkeeping = Bookkeeping::begin();
        let mut idle = self.engine()?;
        idle.begin(name)?;
        let engine = idle.take();
        drop(idle);
        let serial = engine.serial;
        self.serial = serial;
        current::install(engine);
        Ok(Step {
            compiler: self,
            serial,
            thread: PhantomData,
        })
    }

    /// Runs `f` as the step named `step`. An error of `f` and a panic abort the step: its live buffers
    /// stay valid, nothing is learnt from it, and the next step just runs.
    ///
    /// # Errors
    /// What `f` returns; else what the step met inside a hook, where no call could return it:
    /// [`Error::Strict`], [`Error::OverBudget`], [`Error::OutOfMemory`], and so on; [`Error::Scope`] when a scope
    /// inside could not open, which leaves `f` there by unwinding.
    pub fn step<T, E: From<Error>>(&mut self, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.step_named("step", f)
    }

    /// The same under a name of its own: the first run of a name counts no break, and strict mode
    /// begins with its second.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_named<T, E: From<Error>>(
        &mut self,
        name: &str,
        f: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let step = self.begin(name)?;
        let result = watch::catch_scopes(f)??;
        step.finish()?;
        Ok(result)
    }

    /// Serves allocations of `stream` from the next step on; the first is stream 0. What steps did on the
    /// last stream comes before what they do on this one.
    ///
    /// # Errors
    /// [`Error::Device`] when the device refuses the fence, or the stream: on a GPU one of another context than the
    /// primary one; [`Error::StepActive`] while a step is leaked on another thread.
    pub fn use_stream(&mut self, stream: StreamId) -> Result<(), Error> {
        let _bookkeeping = Bookkeeping::begin();
        self.engine()?.use_stream(stream)
    }

    /// All numbers, between steps. All zero while a step is leaked on another thread.
    pub fn stats(&mut self) -> Stats {
        let _bookkeeping = Bookkeeping::begin();
        self.engine()
            .map(|mut engine| engine.stats())
            .unwrap_or_default()
    }

    /// Gives the memory of pages back that no live buffer uses. Addresses stay recorded: the next step
    /// maps new memory under them, which costs device calls once.
    ///
    /// # Errors
    /// [`Error::Pinned`] while the layout is pinned; [`Error::StepActive`] when a step of this compiler was leaked on
    /// another thread; [`Error::Device`] when the device refuses: what was given back until then stays given back.
    pub fn trim(&mut self) -> Result<Bytes, Error> {
        let _bookkeeping = Bookkeeping::begin();
        self.engine()?.trim()
    }

    /// Plans all buffers of all recorded branches again, now that their lifespans are known, and installs
    /// the plan if it holds fewer bytes. Recorded steps then run at other addresses, without a break.
    /// Buffers that are live stay where they are.
    ///
    /// Takes up to 200 ms, and device calls for the new windows; nothing is held beyond what was held
    /// before. Edges that only aborted steps took are dropped: they are recorded again when they come.
    ///
    /// # Errors
    /// [`Error::Pinned`] while the layout is pinned; [`Error::StepActive`] when a step of this compiler was leaked on
    /// another thread; [`Error::Device`] when the device refuses. Then the layout is as before.
    pub fn compile(&mut self) -> Result<Compiled, Error> {
        let _bookkeeping = Bookkeeping::begin();
        self.engine()?.compile(COMPILE_TIME)
    }

    /// Keeps every address, and the memory under it, for what is captured there until the guard is dropped: pin
    /// the layout, capture a step that was recorded before (into a CUDA graph, say), and launch it while the
    /// guard lives, which may be longer than the compiler does.
    ///
    /// Meanwhile nothing but what is captured lies in memory that a recorded step writes: a launch never
    /// overwrites a buffer of anybody else. A step that is captured is served at its recorded addresses, and
    /// asked for more than was recorded it is told [`Error::Captured`]. One that is not is served in memory
    /// of its own, more slowly (each of its allocations is counted as a survivor), and nothing is learnt from
    /// it; [`compile`](Self::compile) and [`trim`](Self::trim) are refused, and no idle page is given back
    /// under pressure.
    ///
    /// # Errors
    /// [`Error::StepActive`] when a step of this compiler was leaked on another thread.
    pub fn pin_layout(&mut self) -> Result<PinnedLayout, Error> {
        let _bookkeeping = Bookkeeping::begin();
        let mut engine = self.engine()?;
        // While nobody can be borrowing.
        engine.pin();
        let shared = Arc::clone(&engine.shared);
        drop(engine);
        Ok(PinnedLayout { shared })
    }

    /// Where the memory goes, buffer by buffer, between steps; [`Report::html`] is a page to look at. Empty while a
    /// step is leaked on another thread.
    pub fn report(&mut self) -> Report {
        let _bookkeeping = Bookkeeping::begin();
        self.engine()
            .map(|mut engine| engine.buffers())
            .unwrap_or_default()
    }

    /// What a checker needs to know at this moment.
    pub fn snapshot(&mut self) -> Snapshot {
        let _bookkeeping = Bookkeeping::begin();
        self.engine()
            .map(|mut engine| Snapshot::of(&mut engine))
            .unwrap_or_default()
    }
}

/// While this lives, the layout of its compiler stays as it is, also when the compiler was dropped.
#[derive(Debug)]
#[must_use = "the layout is pinned until this is dropped: bind it with `let _pinned = …`"]
pub struct PinnedLayout {
    shared: Arc<Shared>,
}

impl Drop for PinnedLayout {
    fn drop(&mut self) {
        current::unpin(&self.shared);
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        // A step leaked on another thread keeps its engine: its buffers must stay valid.
        // A forked child's copy of an engine has nothing to give back.
        if let Ok(mut idle) = self.engine() {
            // Whoever wants to borrow waits for what this gives back.
            current::orphan(idle.take());
        }
    }
}

/// A step that is active on this thread; dropped without [`finish`](Self::finish) it aborts.
///
/// What began on one thread cannot end on another, nor be seen there:
///
/// ```compile_fail,E0277
/// fn elsewhere(step: memory_compiler::Step<'_>) {
///     std::thread::scope(|scope| {
///         scope.spawn(move || step.finish());
///     });
/// }
/// ```
///
/// ```compile_fail,E0277
/// fn elsewhere(step: &memory_compiler::Step<'_>) {
///     std::thread::scope(|scope| {
///         scope.spawn(|| step.stats());
///     });
/// }
/// ```
///
/// The same function on its own thread compiles:
///
/// ```
/// fn here(step: memory_compiler::Step<'_>) -> Result<(), memory_compiler::Error> {
///     step.finish().map(drop)
/// }
/// ```
///
/// A step that is leaked (`std::mem::forget`) stays with its thread: there the compiler takes it back
/// as aborted, elsewhere its methods return [`Error::StepActive`].
#[derive(Debug)]
pub struct Step<'c> {
    compiler: &'c mut Compiler,
    serial: u64,
    thread: PhantomData<*const ()>,
}

impl Step<'_> {
    fn with<T>(&self, f: impl FnOnce(&mut Engine) -> T) -> Result<T, Error> {
        let _bookkeeping = Bookkeeping::begin();
        current::with_step(self.serial, f).ok_or_else(|| self.missing())
    }

    /// What it means that the step is not active on this thread.
    #[cold]
    fn missing(&self) -> Error {
        self.compiler.check_process().err().unwrap_or(Error::NoStep)
    }

    /// Places a buffer.
    ///
    /// # Errors
    /// [`Error::Strict`] for a break of a strict step, [`Error::OverBudget`], [`Error::OutOfMemory`],
    /// [`Error::AddressSpace`], [`Error::Device`]. The step is as before the call.
    pub fn alloc(&self, size: Bytes) -> Result<Allocation, Error> {
        self.with(|engine| engine.alloc(size, OnError::Fail))?
    }

    /// Places a buffer if `stream` is the one that the step serves.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_on(&self, stream: StreamId, size: Bytes) -> Result<Allocation, Error> {
        self.with(|engine| {
            if engine.stream == stream {
                return engine.alloc(size, OnError::Fail);
            }
            engine.count_passed_through();
            Ok(Allocation::Elsewhere)
        })?
    }

    /// Frees a buffer of any compiler; [`free`](crate::free).
    ///
    /// # Errors
    /// [`Error::BadFree`].
    pub fn free(&self, address: Address) -> Result<(), Error> {
        let _bookkeeping = Bookkeeping::begin();
        current::free(address)
    }

    /// Frees a buffer that work on `stream` may still use; [`free_on`](crate::free_on).
    ///
    /// # Errors
    /// [`Error::BadFree`], [`Error::Device`].
    pub fn free_on(&self, stream: StreamId, address: Address) -> Result<(), Error> {
        let _bookkeeping = Bookkeeping::begin();
        current::free_on(stream, address)
    }

    /// Serves allocations of `stream` from now on, in later steps too; the first is stream 0. Work
    /// that is enqueued there from now on waits for what the former stream still does in places that
    /// were freed.
    ///
    /// # Errors
    /// [`Error::Device`] when the device refuses the fence, or the stream as in [`Compiler::use_stream`]; the step then
    /// stays with its stream.
    pub fn use_stream(&self, stream: StreamId) -> Result<(), Error> {
        self.with(|engine| engine.use_stream(stream))?
    }

    /// All numbers so far.
    pub fn stats(&self) -> Stats {
        self.with(Engine::stats).unwrap_or_default()
    }

    /// What a checker needs to know at this moment.
    pub fn snapshot(&self) -> Snapshot {
        self.with(Snapshot::of).unwrap_or_default()
    }

    /// Ends the step and makes it the tape of its branch.
    ///
    /// # Errors
    /// The first error that the step met inside a hook.
    pub fn finish(self) -> Result<StepReport, Error> {
        let _bookkeeping = Bookkeeping::begin();
        self.compiler.check_process()?;
        let mut engine = current::uninstall(self.serial).ok_or(Error::NoStep)?;
        let report = engine.end();
        Idle::lock(&self.compiler.shared).put(engine);
        report
    }

    /// Ends the step without learning from it; the same as dropping it.
    pub fn abort(self) {}
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        let _bookkeeping = Bookkeeping::begin();
        if self.compiler.check_process().is_err() {
            return;
        }
        if let Some(mut engine) = current::uninstall(self.serial) {
            engine.abort();
            Idle::lock(&self.compiler.shared).put(engine);
        }
    }
}

/// A scope that is open until this is dropped, on the thread that opened it:
///
/// ```compile_fail,E0277
/// fn elsewhere(scope: memory_compiler::Scope) {
///     std::thread::spawn(move || drop(scope));
/// }
/// ```
#[derive(Debug)]
#[must_use = "the scope closes when this is dropped: bind it with `let _scope = …`"]
pub struct Scope {
    /// The step's serial, 0 for none, and the number of the scope's run.
    step: u64,
    run: u64,
    /// Number by which watches know it, 0 for none.
    watched: u64,
    thread: PhantomData<*const ()>,
}

/// Opens a named scope in the innermost step of this thread. It names where memory goes, in statistics
/// and errors; it changes nothing else, may be nested, repeated, skipped or left early, and costs a
/// few nanoseconds where no step is active.
///
/// ```
/// fn block() {
///     let _scope = memory_compiler::scope("down.0");
///     // … allocations are counted under step/down.0 …
/// }
/// # block();
/// ```
///
/// # Panics
/// When weights that it pins cannot come in, outside of [`Compiler::step`] and [`catch_scopes`](crate::catch_scopes),
/// which return that on their own thread, in a program that unwinds.
pub fn scope(name: &str) -> Scope {
    open_scope(name, false)
}

/// The same; inside, a graph break is an error whatever [`Options::strict`] says.
///
/// # Panics
/// As [`scope`].
pub fn strict_scope(name: &str) -> Scope {
    open_scope(name, true)
}

fn open_scope(name: &str, strict: bool) -> Scope {
    let opened = current::with_innermost(|engine| (engine.serial, engine.enter(name, strict)));
    let (step, run) = opened.unwrap_or_default();
    let mut scope = Scope {
        step,
        run,
        watched: 0,
        thread: PhantomData,
    };
    match watch::opened(name) {
        Ok(number) => scope.watched = number,
        Err(error) => {
            drop(scope);
            watch::unwind(error)
        }
    }
    scope
}

impl Drop for Scope {
    fn drop(&mut self) {
        if self.watched != 0 {
            watch::closed(self.watched);
        }
        if self.step != 0 {
            // When its step is over it was closed, and counted as left open, at the end.
            current::with_step(self.step, |engine| engine.leave(self.run));
        }
    }
}

/// Until this is dropped, allocations of this thread's innermost step pass through.
///
/// ```compile_fail,E0277
/// fn elsewhere(pause: memory_compiler::Pause) {
///     std::thread::spawn(move || drop(pause));
/// }
/// ```
#[derive(Debug)]
#[must_use = "the pause ends when this is dropped: bind it with `let _pause = …`"]
pub struct Pause {
    step: u64,
    thread: PhantomData<*const ()>,
}

/// Pauses the innermost step of this thread: allocations pass through to the framework's own allocator,
/// frees still find their owner. Pauses nest; the step goes on when the last guard is dropped.
pub fn pause() -> Pause {
    let step = current::with_innermost(|engine| {
        engine.pause();
        engine.serial
    });
    Pause {
        step: step.unwrap_or(0),
        thread: PhantomData,
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        if self.step != 0 {
            current::with_step(self.step, Engine::resume);
        }
    }
}

/// What a checker needs to know of a compiler at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// First address of the reserved range.
    pub base: Address,
    /// The smallest page of the device.
    pub granule: Bytes,
    /// Virtual pages, counted from `base`, and the frame under each; ascending, only those with one.
    pub frames: Vec<(u32, u32)>,
    /// Live buffers by address; sizes rounded up to 512 B.
    pub live: Vec<(Address, Bytes)>,
}

impl Snapshot {
    fn of(engine: &mut Engine) -> Self {
        engine.drain();
        let base = engine.shared.base;
        Self {
            base,
            granule: engine.shared.device.granule(),
            frames: engine.frames(),
            live: engine.live(),
        }
    }

    /// Checks that no two live buffers share a byte of a frame; quadratic.
    ///
    /// # Errors
    /// The first [`Fault`] found, which is a bug of the compiler.
    pub fn validate(&self) -> Result<(), Fault> {
        validate::disjoint(&self.live, self.granule, |page| self.frame_at(page))
    }

    /// The frame under an address.
    #[must_use]
    pub fn frame_at(&self, address: Address) -> Option<u32> {
        let page =
            u32::try_from(address.checked_offset_from(self.base)?.0 / self.granule.0).ok()?;
        let at = self
            .frames
            .binary_search_by_key(&page, |&(page, _)| page)
            .ok()?;
        Some(self.frames[at].1)
    }
}
