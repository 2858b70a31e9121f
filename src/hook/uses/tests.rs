//! The hook over a driver that writes down what it is asked, on the thread that asks.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::parameters::MOST_PARAMETERS;
use super::{
    Gemm, UseWatch, copy_on_device, copy_to_host, forget_dropped, gemm, gemm_f64, launch_kernel,
    take_error, watch_uses,
};
use crate::device::StreamId;
use crate::error::Error;
use crate::units::{Address, Bytes};

const SIZE: Bytes = Bytes(1 << 20);
const INVALID_VALUE: u32 = 1;
const INVALID_HANDLE: u32 = 400;

/// Functions of the driver by their handles, and what was asked.
#[derive(Default)]
struct Driver {
    functions: HashMap<usize, Vec<usize>>,
    kernels: HashMap<usize, Vec<usize>>,
    /// What it says of every function.
    broken: Option<u32>,
    streams: HashMap<usize, u64>,
    asked: u32,
    calls: Vec<String>,
}

thread_local! {
    static DRIVER: RefCell<Driver> = RefCell::default();
}

fn said(what: impl Into<String>) {
    DRIVER.with_borrow_mut(|driver| driver.calls.push(what.into()));
}

fn calls() -> Vec<String> {
    DRIVER.with_borrow_mut(|driver| std::mem::take(&mut driver.calls))
}

fn function(handle: usize, sizes: &[usize]) {
    DRIVER.with_borrow_mut(|driver| driver.functions.insert(handle, sizes.to_vec()));
}

fn answer(sizes: Option<&Vec<usize>>, index: usize, size: *mut usize) -> u32 {
    let Some(sizes) = sizes else {
        return INVALID_HANDLE;
    };
    // No sizes stand for a list without an end.
    let endless = sizes.is_empty().then_some(&8);
    let Some(&found) = sizes.get(index).or(endless) else {
        return INVALID_VALUE;
    };
    // SAFETY: the hook gives a place for the size.
    unsafe { size.write(found) };
    0
}

unsafe extern "C" fn func_info(f: *mut c_void, index: usize, _: *mut usize, to: *mut usize) -> u32 {
    DRIVER.with_borrow_mut(|driver| {
        driver.asked += 1;
        let functions = &driver.functions;
        driver
            .broken
            .unwrap_or_else(|| answer(functions.get(&f.addr()), index, to))
    })
}

unsafe extern "C" fn kernel_info(
    f: *mut c_void,
    index: usize,
    _: *mut usize,
    to: *mut usize,
) -> u32 {
    DRIVER.with_borrow(|driver| answer(driver.kernels.get(&f.addr()), index, to))
}

unsafe extern "C" fn launch(
    _: *mut c_void,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: *mut c_void,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> u32 {
    said("launch");
    0
}

unsafe extern "C" fn copy_d2d(_: u64, _: u64, _: usize, _: *mut c_void) -> u32 {
    said("copy");
    0
}

unsafe extern "C" fn copy_d2h(_: *mut c_void, _: u64, _: usize, _: *mut c_void) -> u32 {
    said("read");
    0
}

unsafe extern "C" fn stream_of(handle: *mut c_void, to: *mut *mut c_void) -> u32 {
    let stream = DRIVER.with_borrow(|driver| driver.streams.get(&handle.addr()).copied());
    let Some(stream) = stream else {
        return 1;
    };
    // SAFETY: the hook gives a place for the stream.
    unsafe { to.write(pointer(stream)) };
    0
}

unsafe extern "C" fn product(
    _: *mut c_void,
    _: u32,
    _: u32,
    _: i32,
    _: i32,
    _: i32,
    _: *const c_void,
    _: *const c_void,
    _: u32,
    _: i32,
    _: i64,
    _: *const c_void,
    _: u32,
    _: i32,
    _: i64,
    _: *const c_void,
    _: *mut c_void,
    _: u32,
    _: i32,
    _: i64,
    _: i32,
    _: u32,
    _: i32,
) -> u32 {
    said("product");
    0
}

unsafe extern "C" fn product_f64(
    _: *mut c_void,
    _: u32,
    _: u32,
    _: i32,
    _: i32,
    _: i32,
    _: *const c_void,
    _: *const c_void,
    _: i32,
    _: i64,
    _: *const c_void,
    _: i32,
    _: i64,
    _: *const c_void,
    _: *mut c_void,
    _: i32,
    _: i64,
    _: i32,
) -> u32 {
    said("product");
    0
}

/// The symbols behind the program's.
pub(super) fn next(name: &CStr) -> Option<*mut c_void> {
    let found = match name.to_bytes() {
        b"cuFuncGetParamInfo" => func_info as *const (),
        b"cuKernelGetParamInfo" => kernel_info as *const (),
        b"cuLaunchKernel" => launch as *const (),
        b"cuMemcpyDtoDAsync_v2" => copy_d2d as *const (),
        b"cuMemcpyDtoHAsync_v2" => copy_d2h as *const (),
        b"cublasGetStream_v2" => stream_of as *const (),
        b"cublasGemmStridedBatchedEx" => product as *const (),
        b"cublasDgemmStridedBatched" => product_f64 as *const (),
        _ => return None,
    };
    Some(found.cast_mut().cast())
}

fn pointer(number: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(number as usize)
}

/// Does something when it is told, and writes down what of.
struct Watch {
    told: Mutex<Vec<(Vec<Address>, StreamId)>>,
    on_use: Box<dyn Fn() -> Result<(), Error> + Send + Sync>,
}

impl Watch {
    fn new(on_use: impl Fn() -> Result<(), Error> + Send + Sync + 'static) -> Arc<Self> {
        let (told, on_use) = (Mutex::default(), Box::new(on_use));
        Arc::new(Self { told, on_use })
    }

    fn told(&self) -> Vec<(Vec<Address>, StreamId)> {
        std::mem::take(&mut *self.told.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn watch(self: &Arc<Self>, base: Address) {
        let watch: Weak<Self> = Arc::downgrade(self);
        watch_uses(base, SIZE, watch);
    }
}

impl UseWatch for Watch {
    fn used(&self, addresses: &[Address], stream: StreamId) -> Result<(), Error> {
        said("used");
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.push((addresses.to_vec(), stream));
        drop(told);
        (self.on_use)()
    }

    fn enqueued(&self) {
        said("enqueued");
    }
}

/// The list of watches is the process's: tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    forget_dropped();
    alone
}

/// Addresses that no memory is at.
const BASE: Address = Address(0x7e57_0000_0000);

fn launch_with(handle: usize, stream: u64, words: &mut [u64]) -> u32 {
    let mut params: Vec<*mut c_void> = words
        .iter_mut()
        .map(|word| (&raw mut *word).cast())
        .collect();
    let function = pointer(handle as u64);
    // SAFETY: there is no driver; each parameter that the test's tells of has a word.
    unsafe {
        launch_kernel(
            function,
            [1; 3],
            [1; 3],
            0,
            pointer(stream),
            params.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    }
}

fn product_of(handle: u64, a: u64) -> Gemm {
    Gemm {
        handle: pointer(handle),
        transposes: [0; 2],
        sizes: [1; 3],
        alpha: std::ptr::null(),
        a: pointer(a),
        a_type: 0,
        lda: 1,
        stride_a: 0,
        b: pointer(8),
        b_type: 0,
        ldb: 1,
        stride_b: 0,
        beta: std::ptr::null(),
        c: pointer(16),
        c_type: 0,
        ldc: 1,
        stride_c: 0,
        batch_count: 1,
        compute_type: 0,
        algorithm: 0,
    }
}

#[test]
fn a_function_whose_handle_came_back_has_its_own_parameters_read() {
    let _alone = alone();
    let watch = Watch::new(|| Ok(()));
    watch.watch(BASE);
    function(0x10, &[8, 4, 8]);
    let inside = BASE.0 + 512;
    assert_eq!(launch_with(0x10, 1, &mut [7, 7, inside]), 0);
    assert_eq!(watch.told(), [(vec![Address(inside)], StreamId(1))]);
    // Its module is unloaded, and another one's function gets the handle: it has one parameter, and what lies
    // behind the list is none.
    function(0x10, &[8]);
    assert_eq!(launch_with(0x10, 1, &mut [7, 7, inside]), 0);
    assert_eq!(watch.told(), [], "a word behind the list was read");
    // It has more than the first one had, and they are seen.
    function(0x10, &[8, 4, 4, 16]);
    assert_eq!(launch_with(0x10, 1, &mut [7, 7, 7, inside, 0]), 0);
    assert_eq!(watch.told().len(), 1);
}

#[test]
fn a_kernel_that_the_driver_tells_nothing_of_is_not_launched() {
    let _alone = alone();
    let watch = Watch::new(|| Ok(()));
    watch.watch(BASE);
    DRIVER.with_borrow_mut(|driver| {
        driver.kernels.insert(0x20, vec![8]);
        driver.functions.insert(0x30, Vec::new());
    });
    assert_eq!(launch_with(0x20, 1, &mut [BASE.0]), 0, "one of a library");
    assert_eq!(watch.told().len(), 1);
    assert_eq!(launch_with(0x40, 1, &mut [BASE.0]), INVALID_HANDLE);
    calls();
    // A driver that never comes to an end is asked so often and no more.
    let mut words = vec![0; MOST_PARAMETERS];
    assert_eq!(launch_with(0x30, 1, &mut words), INVALID_VALUE);
    function(0x50, &[8]);
    DRIVER.with_borrow_mut(|driver| driver.broken = Some(700));
    assert_eq!(launch_with(0x50, 1, &mut [BASE.0]), 700);
    assert_eq!((calls(), watch.told()), (Vec::<String>::new(), vec![]));
}

#[test]
fn a_watch_is_told_the_stream_of_each_kind_of_work() {
    let _alone = alone();
    let watch = Watch::new(|| Ok(()));
    watch.watch(BASE);
    function(0x10, &[8]);
    DRIVER.with_borrow_mut(|driver| driver.streams.insert(0xb1a5, 0x77));
    let (at, null) = (BASE.0, std::ptr::null_mut());
    assert_eq!(launch_with(0x10, 2, &mut [at]), 0);
    // SAFETY: there is no driver.
    assert_eq!(unsafe { copy_on_device(64, at, 8, pointer(0x33)) }, 0);
    // SAFETY: there is no driver.
    assert_eq!(unsafe { copy_on_device(at, 64, 8, pointer(0x44)) }, 0);
    // SAFETY: there is no driver.
    assert_eq!(unsafe { copy_to_host(null, at, 8, pointer(0x55)) }, 0);
    // SAFETY: there is no cuBLAS.
    assert_eq!(unsafe { gemm(product_of(0xb1a5, at)) }, 0);
    // SAFETY: there is no cuBLAS.
    assert_eq!(unsafe { gemm_f64(product_of(0xb1a5, at)) }, 0);
    let streams: Vec<u64> = watch.told().iter().map(|(_, stream)| stream.0).collect();
    assert_eq!(streams, [2, 0x33, 0x44, 0x55, 0x77, 0x77]);
    // SAFETY: there is no cuBLAS.
    let code = unsafe { gemm(product_of(0xbad, at)) };
    assert_eq!(code, 1, "a handle without a stream is refused");
    assert_eq!(watch.told(), []);
}

#[test]
fn a_watch_hears_when_the_work_is_enqueued_or_refused() {
    let _alone = alone();
    let watch = Watch::new(|| Ok(()));
    watch.watch(BASE);
    // SAFETY: there is no driver.
    let copy = || unsafe { copy_on_device(64, BASE.0, 8, pointer(1)) };
    assert_eq!(copy(), 0);
    assert_eq!(calls(), ["used", "copy", "enqueued"]);
    let refusing = Watch::new(|| Err(Error::NoStep));
    refusing.watch(BASE);
    assert_eq!(copy(), 2, "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(calls(), ["used", "used", "enqueued"]);
    assert_eq!(take_error(), Some(Error::NoStep));
    drop(refusing);
    assert_eq!(copy(), 0);
}

#[test]
fn a_watch_that_panicked_is_told_again() {
    let _alone = alone();
    let first = Mutex::new(true);
    let watch = Watch::new(move || {
        let is_first = std::mem::replace(&mut *first.lock().expect("no panic inside"), false);
        assert!(!is_first, "the test's own");
        Ok(())
    });
    watch.watch(BASE);
    function(0x10, &[8]);
    let panicked = catch_unwind(AssertUnwindSafe(|| launch_with(0x10, 1, &mut [BASE.0])));
    assert!(panicked.is_err());
    assert_eq!(launch_with(0x10, 1, &mut [BASE.0]), 0);
    assert_eq!(watch.told().len(), 2);
}

#[test]
fn without_a_watch_the_driver_is_not_asked_for_parameters() {
    let _alone = alone();
    function(0x10, &[8]);
    let asked = || DRIVER.with_borrow(|driver| driver.asked);
    assert_eq!(launch_with(0x10, 1, &mut [BASE.0]), 0);
    assert_eq!(asked(), 0);
    let watch = Watch::new(|| Ok(()));
    watch.watch(BASE);
    assert_eq!(launch_with(0x10, 1, &mut [BASE.0]), 0);
    assert_eq!(asked(), 2, "the parameter, and that there is no other");
    drop(watch);
    forget_dropped();
    assert_eq!(launch_with(0x10, 1, &mut [BASE.0]), 0);
    assert_eq!(asked(), 2);
}

/// Runs `f` on a thread of its own; a lock that is never let go shows as a failure.
fn ends(f: impl FnOnce() + Send + 'static) {
    let (done, over): (_, Receiver<()>) = channel();
    std::thread::spawn(move || {
        f();
        done.send(()).expect("somebody waits");
    });
    let over = over.recv_timeout(Duration::from_secs(20));
    over.expect("no thread waits for itself, or for one that waits for it");
}

#[test]
fn a_watch_may_watch_more_and_end_watches_while_it_is_told() {
    let _alone = alone();
    ends(|| {
        let other = Mutex::new(Some(Watch::new(|| Ok(()))));
        other
            .lock()
            .expect("no panic")
            .as_ref()
            .expect("made")
            .watch(Address(BASE.0 + SIZE.0));
        let made: Arc<Mutex<Vec<Arc<Watch>>>> = Arc::default();
        let kept = Arc::clone(&made);
        let watch = Watch::new(move || {
            let new = Watch::new(|| Ok(()));
            new.watch(Address(BASE.0 + 2 * SIZE.0));
            kept.lock().expect("no panic").push(new);
            drop(other.lock().expect("no panic").take());
            forget_dropped();
            Ok(())
        });
        watch.watch(BASE);
        function(0x10, &[8, 8, 8]);
        let mut words = [BASE.0, BASE.0 + SIZE.0, BASE.0 + 2 * SIZE.0];
        assert_eq!(launch_with(0x10, 1, &mut words), 0);
        assert_eq!(made.lock().expect("no panic").len(), 1);
        assert_eq!(
            made.lock().expect("no panic")[0].told(),
            [],
            "from now on, not before"
        );
        assert_eq!(launch_with(0x10, 1, &mut words), 0);
        assert_eq!(made.lock().expect("no panic")[0].told().len(), 1);
    });
}

#[test]
fn a_watch_may_wait_for_a_thread_that_watches_more() {
    let _alone = alone();
    ends(|| {
        let watch = Watch::new(|| {
            let other = std::thread::spawn(|| {
                let new = Watch::new(|| Ok(()));
                new.watch(Address(BASE.0 + SIZE.0));
            });
            other.join().expect("no panic");
            Ok(())
        });
        watch.watch(BASE);
        function(0x10, &[8]);
        assert_eq!(launch_with(0x10, 1, &mut [BASE.0]), 0);
    });
}
