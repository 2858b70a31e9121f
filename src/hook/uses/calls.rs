//! The calls that are taken over, each told to the watches and then passed on, and the macro that defines
//! them.
//!
//! May import: the module above.

use std::ffi::c_void;

use super::parameters::{add_extra, add_parameters};
use super::{Upstream, Words, is_idle, is_probe};

const NOT_INITIALIZED: u32 = 3;
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const CUBLAS_NOT_INITIALIZED: u32 = 1;
const CUBLAS_ALLOC_FAILED: u32 = 3;

/// Calls the upstream of this name and type with these arguments, after the watches were told of work on a stream,
/// which is asked for only then.
macro_rules! pass {
    (
        $name:literal: $kind:ty, $words:expr, $stream:expr, $missing:expr, $refused:expr,
        ($($argument:expr),+ $(,)?)
    ) => {{
        static UPSTREAM: Upstream = Upstream::new($name);
        let Some(call) = UPSTREAM.get() else {
            return $missing;
        };
        // Lives until the call has returned: the watches hear then that the work is enqueued.
        let _told = match $words.tell($stream, $refused) {
            Ok(told) => told,
            Err(code) => return code,
        };
        // SAFETY: it is the function of this signature in the library's header.
        let call = unsafe { std::mem::transmute::<*const c_void, $kind>(call) };
        // SAFETY: the caller keeps the contract of the library's call.
        unsafe { call($($argument),+) }
    }};
}

fn words_of(addresses: impl IntoIterator<Item = u64>) -> Words {
    let mut words = Words::default();
    addresses.into_iter().for_each(|word| words.add(word));
    words
}

/// The stream on which a handle of cuBLAS enqueues its work; its code where it does not say.
fn stream_of(handle: *mut c_void) -> Result<*mut c_void, u32> {
    static UPSTREAM: Upstream = Upstream::new(c"cublasGetStream_v2");
    type GetStream = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> u32;
    let call = UPSTREAM.get().ok_or(CUBLAS_NOT_INITIALIZED)?;
    // SAFETY: it is the function of this signature in the library's header.
    let call = unsafe { std::mem::transmute::<*const c_void, GetStream>(call) };
    let mut stream = std::ptr::null_mut();
    // SAFETY: the handle is that of the product that is about to be enqueued; `stream` is writable.
    match unsafe { call(handle, &raw mut stream) } {
        0 => Ok(stream),
        code => Err(code),
    }
}

/// What `cuLaunchKernel` is in a program with [`page_cuda_weights!`](crate::page_cuda_weights).
///
/// # Safety
/// As the driver's call.
#[allow(clippy::too_many_arguments, reason = "the driver's own")]
pub unsafe fn launch_kernel(
    function: *mut c_void,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: *mut c_void,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> u32 {
    if function.is_null() && is_probe() {
        return INVALID_VALUE;
    }
    let mut words = Words::default();
    if !is_idle() {
        if !params.is_null() {
            // SAFETY: the caller keeps the contract of the driver's call.
            if let Err(code) = unsafe { add_parameters(&mut words, function, params) } {
                return code;
            }
        }
        // SAFETY: the caller keeps the contract of the driver's call.
        unsafe { add_extra(&mut words, extra) };
    }
    type Launch = unsafe extern "C" fn(
        *mut c_void,
        u32,
        u32,
        u32,
        u32,
        u32,
        u32,
        u32,
        *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> u32;
    let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
    pass!(
        c"cuLaunchKernel": Launch, words, || Ok(stream), NOT_INITIALIZED, OUT_OF_MEMORY,
        (function, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
    )
}

/// What `cuMemcpyDtoDAsync_v2` is in a program with [`page_cuda_weights!`](crate::page_cuda_weights).
///
/// # Safety
/// As the driver's call.
pub unsafe fn copy_on_device(to: u64, from: u64, size: usize, stream: *mut c_void) -> u32 {
    if size == 0 && is_probe() {
        return INVALID_VALUE;
    }
    type Copy = unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> u32;
    pass!(
        c"cuMemcpyDtoDAsync_v2": Copy, words_of([to, from]), || Ok(stream), NOT_INITIALIZED, OUT_OF_MEMORY,
        (to, from, size, stream)
    )
}

/// What `cuMemcpyDtoHAsync_v2` is in a program with [`page_cuda_weights!`](crate::page_cuda_weights).
///
/// # Safety
/// As the driver's call.
pub unsafe fn copy_to_host(to: *mut c_void, from: u64, size: usize, stream: *mut c_void) -> u32 {
    if size == 0 && is_probe() {
        return INVALID_VALUE;
    }
    type Copy = unsafe extern "C" fn(*mut c_void, u64, usize, *mut c_void) -> u32;
    pass!(
        c"cuMemcpyDtoHAsync_v2": Copy, words_of([from]), || Ok(stream), NOT_INITIALIZED, OUT_OF_MEMORY,
        (to, from, size, stream)
    )
}

/// The arguments of `cublasGemmStridedBatchedEx`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "named as in cuBLAS's manual")]
pub struct Gemm {
    pub handle: *mut c_void,
    pub transposes: [u32; 2],
    pub sizes: [i32; 3],
    pub alpha: *const c_void,
    pub a: *const c_void,
    pub a_type: u32,
    pub lda: i32,
    pub stride_a: i64,
    pub b: *const c_void,
    pub b_type: u32,
    pub ldb: i32,
    pub stride_b: i64,
    pub beta: *const c_void,
    pub c: *mut c_void,
    pub c_type: u32,
    pub ldc: i32,
    pub stride_c: i64,
    pub batch_count: i32,
    pub compute_type: u32,
    pub algorithm: i32,
}

/// What `cublasGemmStridedBatchedEx` is in a program with
/// [`page_cuda_weights!`](crate::page_cuda_weights).
///
/// # Safety
/// As cuBLAS's call.
pub unsafe fn gemm(g: Gemm) -> u32 {
    if g.handle.is_null() && is_probe() {
        return CUBLAS_NOT_INITIALIZED;
    }
    type Call = unsafe extern "C" fn(
        *mut c_void,
        u32,
        u32,
        i32,
        i32,
        i32,
        *const c_void,
        *const c_void,
        u32,
        i32,
        i64,
        *const c_void,
        u32,
        i32,
        i64,
        *const c_void,
        *mut c_void,
        u32,
        i32,
        i64,
        i32,
        u32,
        i32,
    ) -> u32;
    let ([ta, tb], [m, n, k]) = (g.transposes, g.sizes);
    let words = words_of([g.a.addr(), g.b.addr(), g.c.addr()].map(|address| address as u64));
    pass!(
        c"cublasGemmStridedBatchedEx": Call, words, || stream_of(g.handle), CUBLAS_NOT_INITIALIZED,
        CUBLAS_ALLOC_FAILED,
        (
            g.handle, ta, tb, m, n, k, g.alpha, g.a, g.a_type, g.lda, g.stride_a, g.b, g.b_type, g.ldb,
            g.stride_b, g.beta, g.c, g.c_type, g.ldc, g.stride_c, g.batch_count, g.compute_type,
            g.algorithm
        )
    )
}

/// What `cublasDgemmStridedBatched` is in a program with
/// [`page_cuda_weights!`](crate::page_cuda_weights); the types are those of the call.
///
/// # Safety
/// As cuBLAS's call.
pub unsafe fn gemm_f64(g: Gemm) -> u32 {
    if g.handle.is_null() && is_probe() {
        return CUBLAS_NOT_INITIALIZED;
    }
    type Call = unsafe extern "C" fn(
        *mut c_void,
        u32,
        u32,
        i32,
        i32,
        i32,
        *const c_void,
        *const c_void,
        i32,
        i64,
        *const c_void,
        i32,
        i64,
        *const c_void,
        *mut c_void,
        i32,
        i64,
        i32,
    ) -> u32;
    let ([ta, tb], [m, n, k]) = (g.transposes, g.sizes);
    let words = words_of([g.a.addr(), g.b.addr(), g.c.addr()].map(|address| address as u64));
    pass!(
        c"cublasDgemmStridedBatched": Call, words, || stream_of(g.handle), CUBLAS_NOT_INITIALIZED,
        CUBLAS_ALLOC_FAILED,
        (
            g.handle, ta, tb, m, n, k, g.alpha, g.a, g.lda, g.stride_a, g.b, g.ldb, g.stride_b, g.beta, g.c,
            g.ldc, g.stride_c, g.batch_count
        )
    )
}

/// Puts the memory compiler between this program and the calls that enqueue work on a GPU, so that paged
/// weights are in memory when work uses them. Goes into `main.rs`, or into the root of a test, a bench or an
/// example, once, beside [`interpose_cuda!`](crate::interpose_cuda).
///
/// It defines `cuLaunchKernel`, `cuMemcpyDtoDAsync_v2`, `cuMemcpyDtoHAsync_v2`, `cublasGemmStridedBatchedEx`
/// and `cublasDgemmStridedBatched`: what Candle calls. See [`hook::uses`](crate::hook::uses).
#[macro_export]
macro_rules! page_cuda_weights {
    () => {
        #[allow(
            unsafe_code,
            non_snake_case,
            clippy::too_many_arguments,
            reason = "defines symbols that the linker finds before the driver's and cuBLAS's"
        )]
        const _: () = {
            use ::core::ffi::c_void;

            use $crate::hook::uses;

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuLaunchKernel(
                function: *mut c_void,
                gx: u32,
                gy: u32,
                gz: u32,
                bx: u32,
                by: u32,
                bz: u32,
                shared: u32,
                stream: *mut c_void,
                params: *mut *mut c_void,
                extra: *mut *mut c_void,
            ) -> u32 {
                let (grid, block) = ([gx, gy, gz], [bx, by, bz]);
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { uses::launch_kernel(function, grid, block, shared, stream, params, extra) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
                to: u64,
                from: u64,
                size: usize,
                stream: *mut c_void,
            ) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { uses::copy_on_device(to, from, size, stream) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
                to: *mut c_void,
                from: u64,
                size: usize,
                stream: *mut c_void,
            ) -> u32 {
                // SAFETY: the caller keeps the contract of the driver's call, which is the same.
                unsafe { uses::copy_to_host(to, from, size, stream) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cublasGemmStridedBatchedEx(
                handle: *mut c_void,
                transa: u32,
                transb: u32,
                m: i32,
                n: i32,
                k: i32,
                alpha: *const c_void,
                a: *const c_void,
                a_type: u32,
                lda: i32,
                stride_a: i64,
                b: *const c_void,
                b_type: u32,
                ldb: i32,
                stride_b: i64,
                beta: *const c_void,
                c: *mut c_void,
                c_type: u32,
                ldc: i32,
                stride_c: i64,
                batch_count: i32,
                compute_type: u32,
                algorithm: i32,
            ) -> u32 {
                let (transposes, sizes) = ([transa, transb], [m, n, k]);
                // SAFETY: the caller keeps the contract of cuBLAS's call, which is the same.
                unsafe {
                    uses::gemm(uses::Gemm {
                        handle,
                        transposes,
                        sizes,
                        alpha,
                        a,
                        a_type,
                        lda,
                        stride_a,
                        b,
                        b_type,
                        ldb,
                        stride_b,
                        beta,
                        c,
                        c_type,
                        ldc,
                        stride_c,
                        batch_count,
                        compute_type,
                        algorithm,
                    })
                }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn cublasDgemmStridedBatched(
                handle: *mut c_void,
                transa: u32,
                transb: u32,
                m: i32,
                n: i32,
                k: i32,
                alpha: *const c_void,
                a: *const c_void,
                lda: i32,
                stride_a: i64,
                b: *const c_void,
                ldb: i32,
                stride_b: i64,
                beta: *const c_void,
                c: *mut c_void,
                ldc: i32,
                stride_c: i64,
                batch_count: i32,
            ) -> u32 {
                let (transposes, sizes) = ([transa, transb], [m, n, k]);
                // SAFETY: the caller keeps the contract of cuBLAS's call, which is the same.
                unsafe {
                    uses::gemm_f64(uses::Gemm {
                        handle,
                        transposes,
                        sizes,
                        alpha,
                        a,
                        a_type: 0,
                        lda,
                        stride_a,
                        b,
                        b_type: 0,
                        ldb,
                        stride_b,
                        beta,
                        c,
                        c_type: 0,
                        ldc,
                        stride_c,
                        batch_count,
                        compute_type: 0,
                        algorithm: 0,
                    })
                }
            }
        };
    };
}
