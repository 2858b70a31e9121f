//! Layer 0: asking the processor for memory before it is needed.
//!
//! Between two events of a step a framework launches a kernel, which takes microseconds and empties the
//! first caches; what the next event will touch is known from the tape.
//!
//! May import: nothing of this crate.

/// Brings an element nearer to the processor; out of range, nothing.
#[inline]
pub(crate) fn prefetch<T>(slice: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(element) = slice.get(at) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of x86-64; a prefetch reads nothing that the program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>((&raw const *element).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, at);
}
