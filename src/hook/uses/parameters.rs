//! The words of a kernel's parameters, as the driver describes them at each launch.
//!
//! **Nothing is remembered of a function.** Its handle means another one after its module was unloaded and another
//! loaded, after a library's, after its context went: what was known of the old one would have words read that the
//! new one's caller never gave. Not all of that can be seen from here (the runtime unloads too, and not through
//! symbols that a program could define), and neither a module's handle nor a function's says which of them it is.
//! So the driver is asked at every launch, while anything is watched: a call of some tens of nanoseconds for each
//! parameter, and one that finds the end, beside the microseconds of the launch. What is asked is the function that
//! is about to be launched, so it lives.
//!
//! May import: the module above.

use std::ffi::c_void;

use super::{Upstream, Words};

const INVALID_VALUE: u32 = 1;
const NOT_INITIALIZED: u32 = 3;
const INVALID_HANDLE: u32 = 400;

/// A launch passes 32,764 bytes of parameters at most (CUDA's programming guide, "function parameters"), and each
/// has one: after so many the driver's answers are not about parameters.
pub(super) const MOST_PARAMETERS: usize = 32_764;

type ParamInfo = unsafe extern "C" fn(*mut c_void, usize, *mut usize, *mut usize) -> u32;

fn info(upstream: &'static Upstream) -> Result<ParamInfo, u32> {
    let found = upstream.get().ok_or(NOT_INITIALIZED)?;
    // SAFETY: both calls that are asked for here have this signature in cuda.h (12.4 and later).
    Ok(unsafe { std::mem::transmute::<*const c_void, ParamInfo>(found) })
}

/// How many bytes a parameter has; `None` past the last one.
fn size_of_parameter(
    info: ParamInfo,
    function: *mut c_void,
    index: usize,
) -> Result<Option<usize>, u32> {
    let (mut offset, mut size) = (0, 0);
    // SAFETY: the function is the one that is about to be launched; the others are writable. An index past the last
    // parameter is refused.
    match unsafe { info(function, index, &raw mut offset, &raw mut size) } {
        0 => Ok(Some(size)),
        INVALID_VALUE => Ok(None),
        code => Err(code),
    }
}

/// Adds the words of a kernel's parameters.
///
/// # Errors
/// The driver's code, where it does not tell the parameters: the launch cannot be let through then, since weights
/// that it uses may be away.
///
/// # Safety
/// As of the launch: `params`, if not null, has an address of each parameter of `function`.
pub(super) unsafe fn add_parameters(
    words: &mut Words,
    function: *mut c_void,
    params: *mut *mut c_void,
) -> Result<(), u32> {
    static OF_FUNCTION: Upstream = Upstream::new(c"cuFuncGetParamInfo");
    static OF_KERNEL: Upstream = Upstream::new(c"cuKernelGetParamInfo");
    let mut info_of = info(&OF_FUNCTION)?;
    let mut first = size_of_parameter(info_of, function, 0);
    if first == Err(INVALID_HANDLE) {
        // A launch takes a kernel of a library too, in the place of a function.
        info_of = info(&OF_KERNEL)?;
        first = size_of_parameter(info_of, function, 0);
    }
    let mut next = first?;
    let mut index = 0;
    while let Some(size) = next {
        // SAFETY: the driver knows that many parameters of this very function, and the caller gives each.
        let param = unsafe { params.add(index).read() };
        for word in 0..size / 8 {
            // SAFETY: the parameter has `size` bytes; alignment is not asked for.
            words.add(unsafe { param.cast::<u64>().add(word).read_unaligned() });
        }
        index += 1;
        if index == MOST_PARAMETERS {
            return Err(INVALID_VALUE);
        }
        next = size_of_parameter(info_of, function, index)?;
    }
    Ok(())
}

/// Adds the words of parameters that are passed as one buffer.
///
/// # Safety
/// As of the launch: `extra` is null or a list of names and values that ends with null.
pub(super) unsafe fn add_extra(words: &mut Words, mut extra: *mut *mut c_void) {
    const POINTER: usize = 1;
    const SIZE: usize = 2;
    let (mut buffer, mut size) = (std::ptr::null_mut::<c_void>(), 0);
    while !extra.is_null() {
        // SAFETY: the list has not ended.
        let name = unsafe { extra.read() }.addr();
        if name != POINTER && name != SIZE {
            break;
        }
        // SAFETY: each name has a value.
        let value = unsafe { extra.add(1).read() };
        if name == POINTER {
            buffer = value;
        } else {
            // SAFETY: the value is the address of a size.
            size = unsafe { value.cast::<usize>().read() };
        }
        // SAFETY: another name, or the end, follows.
        extra = unsafe { extra.add(2) };
    }
    if buffer.is_null() {
        return;
    }
    for word in 0..size / 8 {
        // SAFETY: the buffer has `size` bytes.
        words.add(unsafe { buffer.cast::<u64>().add(word).read_unaligned() });
    }
}
