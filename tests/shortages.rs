//! Errors of memory that is not there: the numbers are the device's, and the one remedy works.

mod reference;

use std::fmt;
use std::sync::{Arc, Mutex};

use memory_compiler::device::{
    Call, Device, DeviceError, Fence, Host, MemoryInfo, PageId, StreamId,
};
use memory_compiler::pager::{Ahead, AtOnce, Pager, Pinned, Stamp, WeightRange};
use memory_compiler::{
    Address, Allocation, Bytes, Compiler, Error, Options, Remedy, Shortage, Step, WeightShortage,
};

use reference::devices::{CountingHost, counting_host, limited_host};

const PAGE: u64 = 4096;

fn pages(count: u64) -> Bytes {
    Bytes(count * PAGE)
}

fn options(budget: Option<Bytes>) -> Options {
    Options {
        budget,
        address_space: Bytes::mib(4),
        ..Options::default()
    }
}

fn compiler(device: &CountingHost, budget: Option<Bytes>) -> Compiler {
    Compiler::new(device.clone(), options(budget)).expect("a compiler")
}

fn alloc(step: &Step<'_>, size: Bytes) -> Result<Address, Error> {
    match step.alloc(size)? {
        Allocation::Here(address) => Ok(address),
        Allocation::Elsewhere => panic!("the step serves its stream"),
    }
}

fn here(step: &Step<'_>, count: u64) -> Address {
    alloc(step, pages(count)).expect("there is room")
}

/// What is told of a budget, which never reads as if the device were at fault.
fn over_budget<T: fmt::Debug>(refused: Result<T, Error>) -> Shortage {
    let Err(Error::OverBudget(short)) = refused else {
        panic!("the budget is exceeded: {refused:?}");
    };
    let text = Error::OverBudget(short.clone()).to_string();
    assert!(text.starts_with("over the budget of"), "{text}");
    assert!(!text.contains("device out of memory"), "{text}");
    is_complete(&text, &short);
    let parts = short.held.0 + short.other_compilers.0 + short.weights.0 + short.free.0;
    assert_eq!(parts, short.limit.0, "the parts are the whole");
    *short
}

fn out_of_memory<T: fmt::Debug>(refused: Result<T, Error>) -> Shortage {
    let Err(Error::OutOfMemory(short)) = refused else {
        panic!("the device is full: {refused:?}");
    };
    let text = Error::OutOfMemory(short.clone()).to_string();
    assert!(text.starts_with("device out of memory in "), "{text}");
    assert!(
        text.contains(&format!("others {:#}", short.elsewhere)),
        "{text}"
    );
    is_complete(&text, &short);
    let ours = short.held.0 + short.other_compilers.0 + short.weights.0;
    assert_eq!(
        ours + short.elsewhere.0 + short.free.0,
        short.limit.0,
        "the parts are the whole"
    );
    *short
}

/// Each number is in the text, and the remedy is.
fn is_complete(text: &str, short: &Shortage) {
    for bytes in [
        short.asked,
        short.needed,
        short.limit,
        short.free,
        short.held,
        short.live,
        short.other_compilers,
        short.weights,
    ] {
        let is_there = [format!("{bytes}"), format!("{bytes:#}")];
        assert!(
            is_there.iter().any(|one| text.contains(one)),
            "{bytes}: {text}"
        );
    }
    assert!(text.ends_with(&format!("({})", short.remedy)), "{text}");
}

/// A step that holds 3 pages and then needs `count` more at once.
fn demanding(compiler: &mut Compiler, count: u64) -> Result<(), Error> {
    let step = compiler.begin("step")?;
    let live = alloc(&step, pages(3))?;
    let more = alloc(&step, pages(count));
    step.free(live)?;
    step.free(more?)?;
    step.finish().map(drop)
}

#[test]
fn a_budget_that_is_too_small_says_the_smallest_one_that_suffices() {
    let device = counting_host(pages(1));
    let mut tight = compiler(&device, Some(pages(8)));
    let short = over_budget(demanding(&mut tight, 9));
    assert_eq!((short.asked, short.needed), (pages(9), pages(9)));
    assert_eq!((short.held, short.live), (device.books().held, pages(3)));
    assert_eq!(short.remedy, Remedy::Budget(pages(12)));
    let Remedy::Budget(enough) = short.remedy else {
        unreachable!()
    };
    demanding(&mut compiler(&device, Some(enough)), 9).expect("it suffices");
    let less = Bytes(enough.0 - PAGE);
    over_budget(demanding(&mut compiler(&device, Some(less)), 9));
}

#[test]
fn a_budget_counts_what_other_compilers_and_weights_have_of_it() {
    let run = |budget: Bytes| {
        let device = counting_host(pages(1));
        let pager = Pager::new(device.clone(), Some(budget)).expect("a pager");
        let [mut a, mut b] =
            [(); 2].map(|()| Compiler::with_pager(&pager, options(None)).expect("a compiler"));
        let range = pager.range(pages(8)).expect("addresses");
        // Two pages that may leave, and three that may not.
        drop(pin(&range, 4, 2));
        let pinned = pin(&range, 0, 3);
        let outer = a.begin("step").expect("a step");
        here(&outer, 4);
        let refused = demanding(&mut b, 6);
        if let Err(Error::OverBudget(short)) = &refused {
            assert_eq!((short.other_compilers, short.weights), (pages(4), pages(3)));
            let ours = short.held.0 + short.other_compilers.0 + short.weights.0;
            assert_eq!(Bytes(ours), device.books().held);
        }
        drop(outer);
        drop(pinned);
        refused
    };
    let short = over_budget(run(pages(15)));
    let Remedy::Budget(enough) = short.remedy else {
        panic!("{short:?}");
    };
    assert_eq!(enough, pages(16));
    run(enough).expect("it suffices");
}

#[test]
fn a_budget_that_the_device_cannot_meet_is_not_what_to_raise() {
    let device = limited_host(pages(1), pages(10));
    let mut compiler = compiler(&device, Some(pages(8)));
    let short = over_budget(demanding(&mut compiler, 9));
    let Remedy::Smaller(less) = short.remedy else {
        panic!("the device has ten pages: {short:?}");
    };
    assert_eq!(less, pages(5));
    demanding(&mut compiler, less.0 / PAGE).expect("it fits");
}

#[test]
fn a_device_that_others_use_says_how_much_they_have_to_free() {
    let device = limited_host(pages(1), pages(16));
    let mut others: Vec<PageId> = (0..8).map(|_| device.create().expect("a page")).collect();
    let mut compiler = compiler(&device, None);
    let short = out_of_memory(demanding(&mut compiler, 9));
    assert_eq!(short.elsewhere, pages(8));
    assert_eq!(Bytes(short.held.0 + short.elsewhere.0), device.books().held);
    assert_eq!(short.remedy, Remedy::FreeElsewhere(pages(4)));
    let mut free = |count: usize| {
        others
            .drain(..count)
            .for_each(|page| device.release(page).expect("it is not mapped"))
    };
    free(3);
    let again = out_of_memory(demanding(&mut compiler, 9));
    assert_eq!(again.remedy, Remedy::FreeElsewhere(pages(1)));
    free(1);
    demanding(&mut compiler, 9).expect("enough is free");
    free(4);
}

#[test]
fn a_device_that_other_compilers_need_says_how_much_they_have_to_give_up() {
    let device = limited_host(pages(1), pages(16));
    let (mut a, mut b) = (compiler(&device, None), compiler(&device, None));
    let outer = a.begin("outer").expect("a step");
    let (most, rest) = (here(&outer, 6), here(&outer, 2));
    let short = out_of_memory(demanding(&mut b, 11));
    assert_eq!(
        (short.other_compilers, short.elsewhere),
        (pages(8), Bytes::ZERO)
    );
    assert_eq!(short.remedy, Remedy::FreeOthers(pages(6)));
    outer.free(most).expect("live");
    outer.finish().expect("the step ends well");
    demanding(&mut b, 11).expect("a idles with what it gave up");
    memory_compiler::free(rest).expect("live");
}

#[test]
fn a_device_that_is_too_small_says_what_would_fit() {
    let device = limited_host(pages(1), pages(16));
    let mut compiler = compiler(&device, None);
    let short = out_of_memory(demanding(&mut compiler, 20));
    assert_eq!((short.held, short.free), (pages(3), pages(13)));
    assert_eq!(short.remedy, Remedy::Smaller(pages(13)));
    demanding(&mut compiler, 13).expect("it fits");
    out_of_memory(demanding(&mut compiler, 14));
}

#[test]
fn a_small_buffer_for_which_nothing_is_left_says_how_much_to_free() {
    let device = limited_host(pages(1), pages(4));
    let mut compiler = compiler(&device, None);
    let step = compiler.begin("step").expect("a step");
    let live: Vec<Address> = (0..4).map(|_| here(&step, 1)).collect();
    let short = out_of_memory(alloc(&step, Bytes(512)));
    assert_eq!(
        (short.asked, short.needed, short.live),
        (Bytes(512), pages(1), pages(4))
    );
    assert_eq!(short.remedy, Remedy::FreeLive(pages(1)));
    step.free(live[2]).expect("live");
    alloc(&step, Bytes(512)).expect("a page is free");
}

fn pin(range: &WeightRange, page: u64, count: u64) -> Pinned {
    try_pin(range, page, count).expect("there is room")
}

fn try_pin(range: &WeightRange, page: u64, count: u64) -> Result<Pinned, Error> {
    range.pin_beyond(pages(page), pages(count), Stamp::NEVER)
}

fn weight_budget<T: fmt::Debug>(refused: Result<T, Error>) -> WeightShortage {
    let Err(Error::WeightBudget(short)) = refused else {
        panic!("the weights do not fit: {refused:?}");
    };
    let text = Error::WeightBudget(short.clone()).to_string();
    for bytes in [
        short.needed,
        short.limit,
        short.whole,
        short.free,
        short.held,
        short.compilers,
        short.elsewhere,
    ] {
        assert!(text.contains(&format!("{bytes:#}")), "{bytes:#}: {text}");
    }
    assert!(text.ends_with(&format!("({})", short.remedy)), "{text}");
    *short
}

#[test]
fn weights_over_the_budget_say_the_smallest_one_that_suffices() {
    let run = |budget: Bytes| {
        let device = counting_host(pages(1));
        let pager = Pager::new(device.clone(), Some(budget)).expect("a pager");
        let mut compiler = Compiler::with_pager(&pager, options(None)).expect("a compiler");
        let range = pager.range(pages(16)).expect("addresses");
        let outer = compiler.begin("step").expect("a step");
        here(&outer, 3);
        let pinned = pin(&range, 0, 2);
        let refused = try_pin(&range, 4, 7).map(drop);
        if let Err(Error::WeightBudget(short)) = &refused {
            assert_eq!(short.compilers, pages(3));
            assert_eq!(Bytes(short.compilers.0 + short.held.0), device.books().held);
        }
        drop(pinned);
        refused
    };
    let short = weight_budget(run(pages(8)));
    assert_eq!((short.needed, short.limit), (pages(9), pages(5)));
    assert_eq!(short.remedy, Remedy::Budget(pages(12)));
    run(pages(12)).expect("it suffices");
    weight_budget(run(pages(11)));
}

#[test]
fn weights_on_a_device_that_is_full_say_who_has_to_give_up_what() {
    let device = limited_host(pages(1), pages(10));
    let pager = Pager::new(device.clone(), None).expect("a pager");
    let range = pager.range(pages(16)).expect("addresses");
    let mut others: Vec<PageId> = (0..4).map(|_| device.create().expect("a page")).collect();
    let mut free = |count: usize| {
        others
            .drain(..count)
            .for_each(|page| device.release(page).expect("it is not mapped"))
    };
    let short = weight_budget(try_pin(&range, 0, 8));
    assert_eq!((short.whole, short.elsewhere), (pages(10), pages(4)));
    assert_eq!(short.remedy, Remedy::FreeElsewhere(pages(2)));
    free(1);
    weight_budget(try_pin(&range, 0, 8));
    free(1);
    drop(pin(&range, 0, 8));
    free(2);
    let mut compiler = Compiler::with_pager(&pager, options(None)).expect("a compiler");
    let outer = compiler.begin("step").expect("a step");
    let live = here(&outer, 5);
    let short = weight_budget(try_pin(&range, 0, 8));
    assert_eq!((short.compilers, short.elsewhere), (pages(5), Bytes::ZERO));
    assert_eq!(short.remedy, Remedy::FreeOthers(pages(3)));
    outer.free(live).expect("live");
    outer.finish().expect("the step ends well");
    drop(pin(&range, 0, 8));
    let short = weight_budget(try_pin(&range, 0, 12));
    assert_eq!(short.remedy, Remedy::SmallerGroups(pages(10)));
    drop(pin(&range, 0, 10));
}

#[test]
fn weights_over_their_own_limit_say_which_one_suffices() {
    let enter = |limit: u64| {
        let device = counting_host(pages(1));
        let pager = Pager::with_limit(device, Some(pages(20)), Some(pages(limit))).expect("one");
        let range = pager.range(pages(12)).expect("addresses");
        let mut ahead = Ahead::new(range, Box::new(AtOnce::new(|_| Ok(()))));
        let group = ahead.group([(Bytes::ZERO, pages(9))]).expect("inside");
        ahead.enter(group)
    };
    let short = weight_budget(enter(7));
    assert_eq!(short.remedy, Remedy::WeightLimit(pages(9)));
    enter(9).expect("it suffices");
    weight_budget(enter(8));
}

/// `Host`, where something else happens when the first page is created after it was said.
struct Meddled {
    host: Host,
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl fmt::Debug for Meddled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meddled")
    }
}

macro_rules! forward {
    ($($method:ident($($name:ident: $kind:ty),*) -> $result:ty;)+) => {
        $(fn $method(&self, $($name: $kind),*) -> $result { self.host.$method($($name),*) })+
    };
}

// SAFETY: every call that hands memory out is `Host`'s, which keeps the contract.
unsafe impl Device for Meddled {
    fn create(&self) -> Result<PageId, DeviceError> {
        let meanwhile = self.meanwhile.lock().expect("no panic").take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        self.host.create()
    }

    forward! {
        granule() -> Bytes;
        is_host_memory() -> bool;
        reserve(size: Bytes) -> Result<Address, DeviceError>;
        unreserve(base: Address, size: Bytes) -> Result<(), DeviceError>;
        release(page: PageId) -> Result<(), DeviceError>;
        map(at: Address, page: PageId) -> Result<(), DeviceError>;
        allow(at: Address, size: Bytes) -> Result<(), DeviceError>;
        unmap(at: Address, size: Bytes) -> Result<(), DeviceError>;
        synchronise() -> Result<(), DeviceError>;
        fence(stream: StreamId) -> Result<Fence, DeviceError>;
        wait(stream: StreamId, fence: Fence) -> Result<(), DeviceError>;
        memory() -> Result<MemoryInfo, DeviceError>;
        write(at: Address, bytes: &[u8]) -> Result<(), DeviceError>;
        read(at: Address, bytes: &mut [u8]) -> Result<(), DeviceError>;
        fill(at: Address, size: Bytes, value: u8) -> Result<(), DeviceError>;
    }
}

#[test]
fn a_budget_that_others_use_up_first_is_no_device_out_of_memory() {
    let device = Arc::new(Meddled {
        host: Host::new(pages(1)).expect("a device"),
        meanwhile: Mutex::default(),
    });
    let pager = Pager::new(device.clone(), Some(pages(8))).expect("a pager");
    let range = Arc::new(pager.range(pages(8)).expect("addresses"));
    let mut compiler = Compiler::with_pager(&pager, options(None)).expect("a compiler");
    let pinned = Arc::new(Mutex::new(None));
    let step = compiler.begin("step").expect("a step");
    // Both look: there are eight pages for six. Then the weights take three.
    let (weights, kept) = (Arc::clone(&range), Arc::clone(&pinned));
    *device.meanwhile.lock().expect("no panic") = Some(Box::new(move || {
        *kept.lock().expect("no panic") = Some(pin(&weights, 0, 3));
    }));
    let short = over_budget(alloc(&step, pages(6)));
    assert_eq!(
        (short.needed, short.free, short.weights),
        (pages(6), pages(5), pages(3))
    );
    assert_eq!(short.remedy, Remedy::Budget(pages(9)));
    assert_eq!(
        pager.stats().used,
        pages(3),
        "what was taken for it was given back"
    );
    drop(pinned.lock().expect("no panic").take());
    here(&step, 6);
}

#[test]
fn no_message_has_an_error_number_without_its_name() {
    let refused = Host::new(pages(1))
        .expect("a device")
        .reserve(Bytes(1 << 60));
    let source = refused.expect_err("there are not so many addresses");
    assert_eq!(
        source.to_string(),
        "Reserve failed with ENOMEM (12): Cannot allocate memory"
    );
    let call = Call::Reserve;
    assert_eq!(
        Error::Device { call, source }.to_string(),
        "device call failed: Reserve failed with ENOMEM (12): Cannot allocate memory"
    );
    let told = |code| {
        DeviceError::Driver {
            call: Call::Map,
            code,
        }
        .to_string()
    };
    assert_eq!(told(1), "Map failed with CUDA_ERROR_INVALID_VALUE (1)");
    assert_eq!(
        told(700),
        "Map failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    );
    assert_eq!(told(12), "Map failed with unknown CUresult 12");
    let source = DeviceError::NotReady;
    let error = Error::Device { call, source };
    assert_eq!(error.to_string(), "device call failed: Reserve: not ready");
}
