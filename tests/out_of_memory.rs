//! What happens before a device is called full, in this order: weights leave, idle memory of the compiler
//! goes, the device is waited for, the driver gives back what its pool keeps. Shown on a device that keeps
//! such a pool, as a GPU's driver does for its own allocation calls.

use std::sync::{Arc, Mutex, MutexGuard};

use memory_compiler::device::{
    Device, DeviceError, Fence, GpuIdentity, Host, MemoryInfo, PageId, StreamId,
};
use memory_compiler::pager::{Pager, Pin, Stamp, WeightRange};
use memory_compiler::{Address, Allocation, Bytes, Compiler, Error, Options, Step};

const PAGE: u64 = 4096;

/// What is asked of a full device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Created,
    Full,
    Released(PageId),
    Waited,
    PoolTrimmed,
}

#[derive(Debug)]
struct Books {
    /// Most pages, those of the pool included.
    limit: u64,
    alive: u64,
    /// Pages that the driver's pool keeps, and whether work may still use them.
    pool: u64,
    is_busy: bool,
    log: Vec<Asked>,
}

/// `Host` with a driver that keeps freed memory in a pool.
#[derive(Debug)]
struct Pooled {
    host: Host,
    books: Mutex<Books>,
}

impl Pooled {
    fn new() -> Arc<Self> {
        let books = Books {
            limit: 1 << 20,
            alive: 0,
            pool: 0,
            is_busy: false,
            log: Vec::new(),
        };
        let host = Host::new(Bytes(PAGE)).expect("memory");
        let books = Mutex::new(books);
        Arc::new(Self { host, books })
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no test panics here")
    }

    /// From now on there are so many pages beyond those that are alive and in the pool.
    fn leave(&self, pool: u64, free: u64) {
        let mut books = self.books();
        books.limit = books.alive + pool + free;
        (books.pool, books.is_busy) = (pool, true);
        books.log.clear();
    }
}

macro_rules! forward {
    ($($method:ident($($name:ident: $kind:ty),*) -> $result:ty;)+) => {
        $(fn $method(&self, $($name: $kind),*) -> $result { self.host.$method($($name),*) })+
    };
}

// SAFETY: every call that hands memory out is `Host`'s, which keeps the contract.
unsafe impl Device for Pooled {
    fn create(&self) -> Result<PageId, DeviceError> {
        let mut books = self.books();
        if books.alive + books.pool == books.limit {
            books.log.push(Asked::Full);
            let info = MemoryInfo {
                free: Bytes::ZERO,
                total: Bytes(books.limit * PAGE),
            };
            return Err(DeviceError::OutOfMemory { info });
        }
        books.alive += 1;
        books.log.push(Asked::Created);
        self.host.create()
    }

    fn release(&self, page: PageId) -> Result<(), DeviceError> {
        self.host.release(page)?;
        let mut books = self.books();
        books.alive -= 1;
        books.log.push(Asked::Released(page));
        Ok(())
    }

    fn synchronise(&self) -> Result<(), DeviceError> {
        let mut books = self.books();
        books.is_busy = false;
        books.log.push(Asked::Waited);
        self.host.synchronise()
    }

    fn trim_pool(&self) -> Result<(), DeviceError> {
        let mut books = self.books();
        if !books.is_busy {
            books.pool = 0;
        }
        books.log.push(Asked::PoolTrimmed);
        Ok(())
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        let books = self.books();
        Ok(MemoryInfo {
            free: Bytes((books.limit - books.alive - books.pool) * PAGE),
            total: Bytes(books.limit * PAGE),
        })
    }

    forward! {
        granule() -> Bytes;
        is_host_memory() -> bool;
        gpu() -> Option<GpuIdentity>;
        reserve(size: Bytes) -> Result<Address, DeviceError>;
        unreserve(base: Address, size: Bytes) -> Result<(), DeviceError>;
        map(at: Address, page: PageId) -> Result<(), DeviceError>;
        allow(at: Address, size: Bytes) -> Result<(), DeviceError>;
        unmap(at: Address, size: Bytes) -> Result<(), DeviceError>;
        fence(stream: StreamId) -> Result<Fence, DeviceError>;
        wait(stream: StreamId, fence: Fence) -> Result<(), DeviceError>;
        write(at: Address, bytes: &[u8]) -> Result<(), DeviceError>;
        read(at: Address, bytes: &mut [u8]) -> Result<(), DeviceError>;
        fill(at: Address, size: Bytes, value: u8) -> Result<(), DeviceError>;
    }
}

fn here(step: &Step<'_>, pages: u64) -> Address {
    match step.alloc(Bytes(pages * PAGE)) {
        Ok(Allocation::Here(address)) => address,
        other => panic!("{pages} pages were not served: {other:?}"),
    }
}

/// Four pages of weights in memory, and a compiler beside them whose 6 pages are idle.
struct World {
    device: Arc<Pooled>,
    weights: WeightRange,
    weight_pages: Vec<PageId>,
    pager: Pager,
    compiler: Compiler,
}

impl World {
    fn new() -> Self {
        let device = Pooled::new();
        let pager = Pager::new(device.clone(), None).expect("a pager");
        let weights = pager.range(Bytes(4 * PAGE)).expect("a range");
        match weights.pin(Bytes::ZERO, Bytes(4 * PAGE), Stamp::NEVER) {
            Ok(Pin::Resident(pinned)) => drop(pinned),
            other => panic!("{other:?}"),
        }
        let options = Options {
            address_space: Bytes::mib(64),
            ..Options::default()
        };
        let mut compiler = Compiler::with_pager(&pager, options).expect("a compiler");
        let step = compiler.begin("idle").expect("a step");
        let idle = here(&step, 6);
        step.free(idle).expect("live");
        step.finish().expect("the step ends well");
        // Teaches that an output survives, so that the next ones come from a space of their own.
        for _ in 0..2 {
            let step = compiler.begin("step").expect("a step");
            let output = here(&step, 12);
            step.finish().expect("the step ends well");
            compiler.begin("other").expect("a step").abort();
            memory_compiler::free(output).expect("live");
            compiler.trim().expect("trimming works");
        }
        // The idle pages again.
        let step = compiler.begin("idle").expect("a step");
        assert_eq!(here(&step, 6), idle);
        step.free(idle).expect("live");
        step.finish().expect("the step ends well");
        // Pages are numbered as they are made.
        let weight_pages = (0..4).map(PageId).collect();
        Self {
            device,
            weights,
            weight_pages,
            pager,
            compiler,
        }
    }

    /// An output of 12 pages where `free` and what can be given up is all there is; what the device was
    /// asked for it.
    fn output(&mut self, pool: u64, free: u64) -> (Result<Address, Error>, Vec<Asked>) {
        let step = self.compiler.begin("step").expect("a step");
        self.device.leave(pool, free);
        let output = step.alloc(Bytes(12 * PAGE));
        let log = self.device.books().log.clone();
        if let Ok(Allocation::Here(at)) = output {
            let filled = Device::fill(&*self.device, at, Bytes(12 * PAGE), 7);
            filled.expect("memory under every page");
            step.free(at).expect("live");
        }
        step.finish().expect("the step ends well");
        let output = output.map(|allocation| match allocation {
            Allocation::Here(at) => at,
            Allocation::Elsewhere => panic!("a step is active"),
        });
        (output, log)
    }

    fn count(&self, log: &[Asked], of_weights: bool) -> usize {
        let released = log.iter().filter(|asked| match asked {
            Asked::Released(page) => self.weight_pages.contains(page) == of_weights,
            _ => false,
        });
        released.count()
    }

    fn end(self) {
        let Self {
            device,
            weights,
            pager,
            compiler,
            ..
        } = self;
        drop(compiler);
        drop((weights, pager));
        assert_eq!(device.books().alive, 0);
    }
}

fn first(log: &[Asked], wanted: impl Fn(&Asked) -> bool) -> Option<usize> {
    log.iter().position(wanted)
}

#[test]
fn a_device_that_has_the_memory_is_asked_for_nothing_else() {
    let mut world = World::new();
    let (output, log) = world.output(3, 12);
    assert!(output.is_ok(), "{output:?}");
    assert_eq!(log, [Asked::Created; 12]);
    world.end();
}

#[test]
fn weights_leave_before_idle_memory_goes() {
    let mut world = World::new();
    let (output, log) = world.output(3, 8);
    assert!(output.is_ok(), "{output:?}");
    assert_eq!((world.count(&log, true), world.count(&log, false)), (4, 0));
    assert!(!log.contains(&Asked::PoolTrimmed), "{log:?}");
    assert_eq!(world.pager.stats().evictions, 4);
    world.end();
}

#[test]
fn idle_memory_goes_before_the_drivers_pool_is_asked() {
    let mut world = World::new();
    let (output, log) = world.output(3, 4);
    assert!(output.is_ok(), "{output:?}");
    assert_eq!((world.count(&log, true), world.count(&log, false)), (4, 4));
    assert!(!log.contains(&Asked::PoolTrimmed), "{log:?}");
    world.end();
}

#[test]
fn the_drivers_pool_is_asked_last_and_after_the_device_was_waited_for() {
    let mut world = World::new();
    let (output, log) = world.output(3, 0);
    assert!(output.is_ok(), "{output:?}");
    assert_eq!((world.count(&log, true), world.count(&log, false)), (4, 6));
    let is_weight = |asked: &Asked| matches!(asked, Asked::Released(page) if page.0 < 4);
    let is_idle = |asked: &Asked| matches!(asked, Asked::Released(page) if page.0 >= 4);
    let order = [
        first(&log, |asked| *asked == Asked::Full),
        first(&log, is_weight),
        first(&log, is_idle),
        first(&log, |asked| *asked == Asked::PoolTrimmed),
    ];
    assert!(order.is_sorted() && order[0].is_some(), "{log:?}");
    let at = order[3].expect("the pool was asked");
    assert_eq!(log[at - 2..at], [Asked::Full, Asked::Waited], "{log:?}");
    assert_eq!(log[at + 1..], [Asked::Created; 2], "{log:?}");
    world.end();
}

#[test]
fn with_nothing_left_anywhere_the_error_has_true_numbers_and_the_next_step_works() {
    let mut world = World::new();
    let (output, log) = world.output(1, 0);
    let Err(Error::OutOfMemory(short)) = output else {
        panic!("12 pages were to be had: {output:?}");
    };
    let free = short.free;
    assert_eq!(
        (short.asked, short.held, short.live),
        (Bytes(12 * PAGE), Bytes::ZERO, Bytes::ZERO)
    );
    // Weights, idle memory and the pool are free now, and not enough.
    assert_eq!(free, Bytes((4 + 6 + 1) * PAGE), "{log:?}");
    let pools = log.iter().filter(|asked| **asked == Asked::PoolTrimmed);
    assert_eq!(pools.count(), 1, "{log:?}");
    let step = world.compiler.begin("idle").expect("a step");
    let again = here(&step, 6);
    step.free(again).expect("live");
    assert_eq!(step.finish().expect("the step ends well").breaks, 0);
    world.end();
}
