//! The driver's calls that a device needs, each with its return code checked; all unsafe code of the
//! device is here.
//!
//! Contexts: a call that needs one is made under [`Current`], which makes the device's primary context
//! current for its own life and puts back what was there.
//!
//! May import: `device`, `units`.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cudarc::driver::sys::{self, CUresult};

use super::super::fork::Process;
use super::super::{Call, DeviceError, MemoryInfo, StreamId};
use crate::units::{Address, Bytes};

/// The driver's name of a physical page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle(u64);

/// A recorded event. A plain number, so that it may cross threads, as the driver allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event(usize);

/// The driver's name of a device and of its primary context, retained while this lives.
#[derive(Debug)]
pub(super) struct Gpu {
    device: sys::CUdevice,
    context: usize,
    /// Who retained it: the driver serves no forked child.
    process: Process,
}

/// Memory of the host that stays where it is, so that the GPU reads it without the CPU's help.
pub(in crate::device) struct Locked {
    gpu: Gpu,
    at: ptr::NonNull<u8>,
    len: usize,
    /// Whether the GPU may be reading it.
    is_read: AtomicBool,
}

// SAFETY: the memory is this value's alone, and the driver's calls may be made on any thread.
unsafe impl Send for Locked {}
// SAFETY: shared, it is only read.
unsafe impl Sync for Locked {}

impl Locked {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the driver allocated `len` bytes here, which live as long as `self`; writing needs
        // `&mut self`, and the GPU only reads.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    /// Copies from it are enqueued from now on.
    pub fn note_copy(&self) {
        self.is_read.store(true, Ordering::Relaxed);
    }

    /// Waits for copies that were enqueued from it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if std::mem::take(self.is_read.get_mut()) {
            let waited = self
                .gpu
                .enter(Call::Write)
                .and_then(|_current| self.gpu.synchronise());
            waited.expect("the device finishes copies from host memory that is written again");
        }
        // SAFETY: as above; `&mut self` keeps every other reader out, and the GPU reads it no more.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.enter(Call::Write) else {
            // Without a context no copy can be waited for: the memory stays.
            return;
        };
        if self.gpu.synchronise().is_ok() {
            // SAFETY: allocated by `lock_host_memory`, and no copy from it runs any more.
            let _ = unsafe { sys::cuMemFreeHost(self.at.as_ptr().cast()) };
        }
    }
}

/// What a return code means. That no page is left gets its numbers from the caller; other calls have none to say.
fn check(call: Call, code: CUresult) -> Result<(), DeviceError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_NOT_READY => Err(DeviceError::NotReady),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY if call == Call::Create => {
            let none = Bytes::ZERO;
            Err(DeviceError::OutOfMemory {
                info: MemoryInfo {
                    free: none,
                    total: none,
                },
            })
        }
        code => Err(DeviceError::Driver {
            call,
            code: code as i32,
        }),
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> u32;

/// The driver's call for the time between events: headers of CUDA name it differently, the driver has both.
fn elapsed_time() -> Option<ElapsedTime> {
    static FOUND: OnceLock<Option<ElapsedTime>> = OnceLock::new();
    #[cfg(unix)]
    fn find() -> Option<ElapsedTime> {
        // SAFETY: the name is a C string; the library is the driver's, which is loaded already.
        let library =
            unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return None;
        }
        // SAFETY: the library is open and stays so; the name is a C string.
        let found = unsafe { libc::dlsym(library, c"cuEventElapsedTime".as_ptr()) };
        // SAFETY: null becomes `None`; else it is the function of this signature in cuda.h.
        unsafe { std::mem::transmute::<*mut c_void, Option<ElapsedTime>>(found) }
    }
    #[cfg(not(unix))]
    fn find() -> Option<ElapsedTime> {
        None
    }
    *FOUND.get_or_init(find)
}

/// Whether the driver's library can be loaded. cudarc panics without it.
#[cfg(unix)]
pub(super) fn is_present() -> bool {
    // SAFETY: the name is a C string; the driver's library has no initialiser that could be unsound.
    // It stays loaded, as it does for whoever uses it.
    let library =
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    !library.is_null()
}

/// Elsewhere cudarc is asked directly; without a driver it panics.
#[cfg(not(unix))]
pub(super) fn is_present() -> bool {
    true
}

/// How many devices the driver shows; 0 when it cannot be initialised.
pub(super) fn device_count() -> usize {
    // SAFETY: no arguments; may be called at any time.
    if unsafe { sys::cuInit(0) } != CUresult::CUDA_SUCCESS {
        return 0;
    }
    let mut count = 0;
    // SAFETY: `count` is writable.
    let code = unsafe { sys::cuDeviceGetCount(&raw mut count) };
    if code == CUresult::CUDA_SUCCESS {
        usize::try_from(count).unwrap_or(0)
    } else {
        0
    }
}

/// While it lives, the device's primary context is the calling thread's current one.
#[derive(Debug)]
pub(super) struct Current {
    pushed: bool,
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: `popped` is writable. It pops what `Gpu::enter` pushed: the guard stays on the
            // stack of one function, so that whatever was pushed since is gone again.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}

impl Gpu {
    pub fn new(ordinal: usize) -> Result<Self, DeviceError> {
        let call = Call::Reserve;
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // SAFETY: no arguments; may be called at any time.
        check(call, unsafe { sys::cuInit(0) })?;
        let mut device = 0;
        // SAFETY: `device` is writable.
        check(call, unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        let mut context = ptr::null_mut();
        // SAFETY: `context` is writable; `device` is one of the driver's.
        check(call, unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, device)
        })?;
        Ok(Self {
            device,
            context: context.expose_provenance(),
            process: Process::this(),
        })
    }

    /// Whether this process is a forked child of the one whose driver it is.
    pub fn is_inherited(&self) -> bool {
        self.process.is_ancestor()
    }

    /// The primary context, as a number to compare.
    pub fn context(&self) -> u64 {
        self.context as u64
    }

    /// Makes the primary context current.
    pub fn enter(&self, call: Call) -> Result<Current, DeviceError> {
        if self.is_inherited() {
            return Err(DeviceError::Forked { call });
        }
        let mut current = ptr::null_mut();
        // SAFETY: `current` is writable.
        check(call, unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
        if current.addr() == self.context {
            return Ok(Current { pushed: false });
        }
        let context = ptr::with_exposed_provenance_mut(self.context);
        // SAFETY: the context is retained while `self` lives.
        check(call, unsafe { sys::cuCtxPushCurrent_v2(context) })?;
        Ok(Current { pushed: true })
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, DeviceError> {
        let mut value = 0;
        // SAFETY: `value` is writable; `device` is one of the driver's.
        check(Call::Reserve, unsafe {
            sys::cuDeviceGetAttribute(&raw mut value, attribute, self.device)
        })?;
        Ok(value)
    }

    pub fn has_virtual_memory(&self) -> Result<bool, DeviceError> {
        let attribute =
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        Ok(self.attribute(attribute)? != 0)
    }

    pub fn has_pools(&self) -> Result<bool, DeviceError> {
        Ok(
            self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?
                != 0,
        )
    }

    /// Device memory of this device: type 1 (`CU_MEM_LOCATION_TYPE_DEVICE`) and its number. Newer
    /// drivers' headers put the number into a union, so it is built from its two words.
    fn location(&self) -> sys::CUmemLocation {
        const DEVICE: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
        let words = [DEVICE, self.device.cast_unsigned()];
        // SAFETY: both are two 32-bit words in C's layout (checked by size here), the first a valid
        // value of its enumeration, the second an integer.
        unsafe { std::mem::transmute::<[u32; 2], sys::CUmemLocation>(words) }
    }

    fn page_properties(&self) -> sys::CUmemAllocationProp {
        // SAFETY: zero is a valid value of every field: no type, no handle, no location, null, flags.
        let mut properties: sys::CUmemAllocationProp =
            unsafe { MaybeUninit::zeroed().assume_init() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = self.location();
        properties
    }

    pub fn granule(&self) -> Result<Bytes, DeviceError> {
        let properties = self.page_properties();
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut granule = 0;
        // SAFETY: `granule` is writable and `properties` readable.
        let code = unsafe {
            sys::cuMemGetAllocationGranularity(&raw mut granule, &raw const properties, least)
        };
        check(Call::Reserve, code)?;
        Ok(Bytes(granule as u64))
    }

    pub fn reserve(&self, size: Bytes, alignment: Bytes) -> Result<Address, DeviceError> {
        let mut base = 0;
        // SAFETY: `base` is writable; the driver chooses the addresses.
        let code = unsafe {
            sys::cuMemAddressReserve(&raw mut base, size.0 as usize, alignment.0 as usize, 0, 0)
        };
        check(Call::Reserve, code)?;
        Ok(Address(base))
    }

    pub fn unreserve(&self, base: Address, size: Bytes) -> Result<(), DeviceError> {
        // SAFETY: the books know the range, and that nothing is mapped in it.
        check(Call::Unreserve, unsafe {
            sys::cuMemAddressFree(base.0, size.0 as usize)
        })
    }

    pub fn create(&self, granule: Bytes) -> Result<Handle, DeviceError> {
        let properties = self.page_properties();
        let mut handle = 0;
        // SAFETY: `handle` is writable and `properties` readable.
        let code = unsafe {
            sys::cuMemCreate(
                &raw mut handle,
                granule.0 as usize,
                &raw const properties,
                0,
            )
        };
        check(Call::Create, code)?;
        Ok(Handle(handle))
    }

    /// Asks the driver's own pool to give back what it keeps and does not use.
    pub fn trim_pool(&self) -> Result<(), DeviceError> {
        let mut pool = ptr::null_mut();
        // SAFETY: `pool` is writable; `device` is one of the driver's.
        check(Call::Create, unsafe {
            sys::cuDeviceGetDefaultMemPool(&raw mut pool, self.device)
        })?;
        // SAFETY: the default pool lives as long as its device.
        check(Call::TrimPool, unsafe { sys::cuMemPoolTrimTo(pool, 0) })
    }

    pub fn release(&self, page: Handle) -> Result<(), DeviceError> {
        // SAFETY: the books know the page, and that it stands nowhere.
        check(Call::Release, unsafe { sys::cuMemRelease(page.0) })
    }

    pub fn map(&self, at: Address, granule: Bytes, page: Handle) -> Result<(), DeviceError> {
        // SAFETY: the books know that the place is reserved and free and that the page lives.
        check(Call::Map, unsafe {
            sys::cuMemMap(at.0, granule.0 as usize, 0, page.0, 0)
        })
    }

    pub fn allow(&self, at: Address, size: Bytes) -> Result<(), DeviceError> {
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc {
            location: self.location(),
            flags,
        };
        // SAFETY: the books know that every granule is mapped; `access` is readable.
        check(Call::Allow, unsafe {
            sys::cuMemSetAccess(at.0, size.0 as usize, &raw const access, 1)
        })
    }

    pub fn unmap(&self, at: Address, granule: Bytes) -> Result<(), DeviceError> {
        // SAFETY: the books know that exactly this granule is mapped; the caller has waited for work
        // that may use it.
        check(Call::Unmap, unsafe {
            sys::cuMemUnmap(at.0, granule.0 as usize)
        })
    }

    pub fn synchronise(&self) -> Result<(), DeviceError> {
        // SAFETY: no arguments; the caller has entered the context.
        check(Call::Synchronise, unsafe { sys::cuCtxSynchronize() })
    }

    pub fn record(&self, stream: StreamId) -> Result<Event, DeviceError> {
        self.record_with(stream, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event that takes the time.
    pub fn record_time(&self, stream: StreamId) -> Result<Event, DeviceError> {
        self.record_with(stream, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// The time between two events of [`record_time`](Self::record_time), which it waits for.
    pub fn elapsed(&self, from: Event, to: Event) -> Result<Duration, DeviceError> {
        let raw = |event: Event| ptr::with_exposed_provenance_mut(event.0);
        // SAFETY: the books know that the event lives.
        check(Call::Fence, unsafe { sys::cuEventSynchronize(raw(to)) })?;
        let mut milliseconds = 0_f32;
        let Some(elapsed_time) = elapsed_time() else {
            return Err(DeviceError::Invalid {
                call: Call::Fence,
                reason: "this driver takes no time",
            });
        };
        // SAFETY: both live and are done, the second by the call above and the first before it.
        let code = unsafe { elapsed_time(&raw mut milliseconds, raw(from), raw(to)) };
        if code != 0 {
            return Err(DeviceError::Driver {
                call: Call::Fence,
                code: code.cast_signed(),
            });
        }
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3))
    }

    fn record_with(
        &self,
        stream: StreamId,
        flags: sys::CUevent_flags,
    ) -> Result<Event, DeviceError> {
        let mut event = ptr::null_mut();
        // SAFETY: `event` is writable; the caller has entered the context.
        check(Call::Fence, unsafe {
            sys::cuEventCreate(&raw mut event, flags as u32)
        })?;
        // SAFETY: the event is new. The stream is the caller's: a handle of this context, or 0, 1, 2.
        let recorded = check(Call::Fence, unsafe {
            sys::cuEventRecord(event, raw(stream))
        });
        let event = Event(event.expose_provenance());
        if recorded.is_err() {
            self.destroy(event);
        }
        recorded.map(|()| event)
    }

    /// Whether a handle may name a stream of the primary context: 0, 1 and 2 do, where that is the current one.
    pub fn may_have(&self, stream: StreamId) -> bool {
        if stream.0 <= 2 {
            return true;
        }
        let mut context = ptr::null_mut();
        // SAFETY: `context` is writable; the stream lives, as the caller's contract says.
        let code = unsafe { sys::cuStreamGetCtx(raw(stream), &raw mut context) };
        code != CUresult::CUDA_SUCCESS || context.addr() == self.context
    }

    /// Whether a graph is being captured from a stream; a stream that does not say is not asked to wait.
    pub fn is_capturing(&self, stream: StreamId) -> bool {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: `status` is writable; the stream is as in `record`.
        let code = unsafe { sys::cuStreamIsCapturing(raw(stream), &raw mut status) };
        code != sys::CUresult::CUDA_SUCCESS
            || status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    }

    pub fn wait(&self, stream: StreamId, event: Event) -> Result<(), DeviceError> {
        let event = ptr::with_exposed_provenance_mut(event.0);
        // SAFETY: the books know that the event lives; the stream is as in `record`.
        check(Call::Wait, unsafe {
            sys::cuStreamWaitEvent(raw(stream), event, 0)
        })
    }

    pub fn destroy(&self, event: Event) {
        // SAFETY: the event lives and nobody else has it; the driver keeps it until waits for it end.
        let _ = unsafe { sys::cuEventDestroy_v2(ptr::with_exposed_provenance_mut(event.0)) };
    }

    /// A stream whose work runs beside that of all others.
    pub fn new_stream(&self) -> Result<StreamId, DeviceError> {
        let beside = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = ptr::null_mut();
        // SAFETY: `stream` is writable; the caller has entered the context.
        check(Call::Write, unsafe {
            sys::cuStreamCreate(&raw mut stream, beside)
        })?;
        Ok(StreamId(stream.expose_provenance() as u64))
    }

    pub fn destroy_stream(&self, stream: StreamId) {
        // SAFETY: made by `new_stream` and not destroyed since; what is enqueued there still runs.
        let _ = unsafe { sys::cuStreamDestroy_v2(raw(stream)) };
    }

    /// Page-locked memory of the host; `self` becomes its owner, with a context of its own retained.
    pub fn lock_host_memory(self, size: Bytes) -> Result<Locked, DeviceError> {
        const PORTABLE: u32 = 1;
        let mut at = ptr::null_mut();
        {
            let _current = self.enter(Call::Write)?;
            // SAFETY: `at` is writable; the context is entered.
            check(Call::Write, unsafe {
                sys::cuMemHostAlloc(&raw mut at, size.0 as usize, PORTABLE)
            })?;
        }
        let at = ptr::NonNull::new(at.cast()).ok_or(DeviceError::Invalid {
            call: Call::Write,
            reason: "no bytes are no host memory",
        })?;
        Ok(Locked {
            gpu: self,
            at,
            len: size.0 as usize,
            is_read: AtomicBool::new(false),
        })
    }

    /// Enqueues a copy. `from` stays as it is until it is done.
    pub fn enqueue_write(
        &self,
        stream: StreamId,
        at: Address,
        from: &[u8],
    ) -> Result<(), DeviceError> {
        let bytes: *const c_void = from.as_ptr().cast();
        // SAFETY: the books know that the place is mapped and allowed; the source is a `HostMemory` that has
        // noted the copy, and waits for the device before it is written to or dropped.
        check(Call::Write, unsafe {
            sys::cuMemcpyHtoDAsync_v2(at.0, bytes, from.len(), raw(stream))
        })
    }

    pub fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are writable; the caller has entered the context.
        check(Call::Memory, unsafe {
            sys::cuMemGetInfo_v2(&raw mut free, &raw mut total)
        })?;
        Ok(MemoryInfo {
            free: Bytes(free as u64),
            total: Bytes(total as u64),
        })
    }

    pub fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        let from: *const c_void = bytes.as_ptr().cast();
        // SAFETY: the books know that the place is mapped and allowed; `bytes` is readable and the
        // call returns when it is copied.
        check(Call::Write, unsafe {
            sys::cuMemcpyHtoD_v2(at.0, from, bytes.len())
        })
    }

    pub fn read(&self, at: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let to: *mut c_void = bytes.as_mut_ptr().cast();
        // SAFETY: the books know that the place is mapped and allowed; `bytes` is writable.
        check(Call::Read, unsafe {
            sys::cuMemcpyDtoH_v2(to, at.0, bytes.len())
        })
    }

    pub fn fill(&self, at: Address, size: Bytes, value: u8) -> Result<(), DeviceError> {
        // SAFETY: the books know that the place is mapped and allowed.
        check(Call::Fill, unsafe {
            sys::cuMemsetD8_v2(at.0, value, size.0 as usize)
        })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.is_inherited() {
            return;
        }
        // SAFETY: retained once in `new`. At the end of a process the driver may be gone and refuse.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

fn raw(stream: StreamId) -> sys::CUstream {
    ptr::with_exposed_provenance_mut(stream.0 as usize)
}
