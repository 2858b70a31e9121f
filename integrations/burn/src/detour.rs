//! Puts the memory compiler between this process and the NVIDIA driver's allocation calls, at run time.
//!
//! ```text
//!   cubecl ──dlsym──> cuMemAllocAsync, patched ──jump──> hook::cuda::alloc_async ──a step──> its compiler
//!                        ▲ behind the patch                        └──no step──> trampoline ─┐
//!                        └───────────────────────────────────────────────────────────────────┘
//! ```
//!
//! cubecl loads the driver when it needs it, so nothing that the linker knows stands in between. The four
//! functions that the driver's library exports are patched instead (crate `retour`), while somebody needs it;
//! the trampolines stay, so that the hook reaches the driver at any time.
//!
//! Rules:
//! - patching is done under one lock, and only when no other thread can be in one of the four functions: for
//!   the first time before cubecl has made a client, later on the runner thread of a device (see `cuda`);
//! - calls that make a context or destroy a stream are not patched: cubecl works in the GPU's primary context, and its
//!   streams live as long as its client;
//! - the patches stay for good when a buffer outlives its compiler: its free must find the way.
//!
//! Together with `cuda` this is where the crate's unsafe code is.

use std::ffi::c_void;
use std::sync::{Mutex, OnceLock, PoisonError};

use memory_compiler::hook::cuda::{self as hook, Code, Driver};
use retour::RawDetour;

use crate::Error;

unsafe extern "C" fn alloc_async(at: *mut u64, size: usize, stream: *mut c_void) -> Code {
    // SAFETY: the caller keeps the contract of the driver's call, which is the same.
    unsafe { hook::alloc_async(at, size, stream) }
}

unsafe extern "C" fn free_async(at: u64, stream: *mut c_void) -> Code {
    // SAFETY: the caller keeps the contract of the driver's call, which is the same.
    unsafe { hook::free_async(at, stream) }
}

unsafe extern "C" fn alloc(at: *mut u64, size: usize) -> Code {
    // SAFETY: the caller keeps the contract of the driver's call, which is the same.
    unsafe { hook::alloc(at, size) }
}

unsafe extern "C" fn free(at: u64) -> Code {
    // SAFETY: the caller keeps the contract of the driver's call, which is the same.
    unsafe { hook::free(at) }
}

/// The four patches, made once, and where the hook goes on to.
struct Patches([RawDetour; 4]);

/// Who needs the patches; they are there while it is not 0.
static USERS: Mutex<usize> = Mutex::new(0);
static PATCHES: OnceLock<Patches> = OnceLock::new();

fn refused(why: impl std::fmt::Display) -> Error {
    Error::Detour {
        why: why.to_string(),
    }
}

impl Patches {
    fn prepare() -> Result<Self, Error> {
        let Driver {
            alloc_async: Some(driver_alloc_async),
            free_async: Some(driver_free_async),
            alloc: Some(driver_alloc),
            free: Some(driver_free),
        } = Driver::exported()
        else {
            return Err(refused("the NVIDIA driver (libcuda.so.1) is not installed"));
        };
        let patch = |target: *const (), ours: *const ()| {
            // SAFETY: both are functions of one signature; nothing is changed before it is enabled.
            unsafe { RawDetour::new(target, ours) }.map_err(refused)
        };
        let patches = [
            patch(driver_alloc_async as *const (), alloc_async as *const ())?,
            patch(driver_free_async as *const (), free_async as *const ())?,
            patch(driver_alloc as *const (), alloc as *const ())?,
            patch(driver_free as *const (), free as *const ())?,
        ];
        let [to_alloc_async, to_free_async, to_alloc, to_free] = patches
            .each_ref()
            .map(|patch| std::ptr::from_ref(patch.trampoline()));
        let upstream = Driver {
            // SAFETY: the trampoline of a function has the function's signature.
            alloc_async: Some(unsafe {
                std::mem::transmute::<*const (), hook::AllocAsync>(to_alloc_async)
            }),
            // SAFETY: as above.
            free_async: Some(unsafe {
                std::mem::transmute::<*const (), hook::FreeAsync>(to_free_async)
            }),
            // SAFETY: as above.
            alloc: Some(unsafe { std::mem::transmute::<*const (), hook::Alloc>(to_alloc) }),
            // SAFETY: as above.
            free: Some(unsafe { std::mem::transmute::<*const (), hook::Free>(to_free) }),
        };
        // SAFETY: trampolines do what the driver's functions do, patched or not, and live in `PATCHES` for ever.
        unsafe { hook::pass_on_to(upstream) }
            .map_err(|_| refused("the GPU hook has passed calls on to the driver before"))?;
        Ok(Self(patches))
    }
}

/// Says that the driver's allocation calls are to arrive at the hook. Dropping it changes nothing.
#[derive(Debug)]
pub(crate) struct Installed(());

impl Installed {
    /// Patches the driver's calls, or joins whoever did.
    ///
    /// # Safety
    /// When nobody else holds one: no other thread is in one of the four functions.
    pub unsafe fn new() -> Result<Self, Error> {
        let mut users = USERS.lock().unwrap_or_else(PoisonError::into_inner);
        let patches = match PATCHES.get() {
            Some(patches) => patches,
            None => {
                let prepared = Patches::prepare()?;
                PATCHES.get_or_init(|| prepared)
            }
        };
        if *users == 0 {
            for patch in &patches.0 {
                // SAFETY: the caller promises that no other thread is there.
                unsafe { patch.enable() }.map_err(refused)?;
            }
        }
        *users += 1;
        Ok(Self(()))
    }

    /// Takes the patches away if nobody else needs them.
    ///
    /// # Safety
    /// - No buffer of the compiler that this was made for is live.
    /// - No other thread is in one of the four functions.
    pub unsafe fn end(self) -> Result<(), Error> {
        let mut users = USERS.lock().unwrap_or_else(PoisonError::into_inner);
        *users -= 1;
        if *users == 0 {
            for patch in PATCHES.get().iter().flat_map(|patches| &patches.0) {
                // SAFETY: the caller promises that no other thread is there.
                unsafe { patch.disable() }.map_err(refused)?;
            }
        }
        Ok(())
    }
}
