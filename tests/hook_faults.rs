//! A device that fails under the CPU hook, which may neither fail nor unwind: the system serves what the
//! device cannot, the step returns the error at its end, and nothing is lost.

use std::collections::VecDeque;
use std::sync::Arc;

use memory_compiler::device::adaptor::{Counting, Failing, Repeat};
use memory_compiler::device::{Call, Device, DeviceError, Host, MemoryInfo};
use memory_compiler::hook::host::ScopedAllocator;
use memory_compiler::{Bytes, Compiler, Error, Options, scope};

#[global_allocator]
static MEMORY: ScopedAllocator = ScopedAllocator::new();

const KIB: usize = 1 << 10;

type Stacked = Arc<Counting<Failing<Host>>>;

fn compiler(device: &Stacked) -> Result<Compiler, Error> {
    let options = Options {
        address_space: Bytes::gib(1),
        ..Options::default()
    };
    Compiler::new(Arc::clone(device) as Arc<dyn Device>, options)
}

fn check(buffer: &[u8], value: u8) {
    assert!(
        buffer.iter().all(|&byte| byte == value),
        "{value} was overwritten"
    );
}

/// Six steps of vectors that are made, zeroed, grown and kept. Returns what the steps returned.
fn program(compiler: &mut Compiler, kept: &mut VecDeque<(Vec<u8>, u8)>) -> Vec<Error> {
    let mut errors = Vec::new();
    for n in 0..6_u8 {
        if n == 3 {
            errors.extend(compiler.trim().err());
        }
        let done = compiler.step(|| {
            let _scope = scope("body");
            let first = vec![n + 1; 40 * KIB];
            let zeroed = vec![0_u8; 32 * KIB];
            check(&zeroed, 0);
            drop(zeroed);
            let mut grows = vec![n + 2; 20 * KIB];
            grows.resize((60 + usize::from(n % 2) * 20) * KIB, n + 2);
            kept.push_back((vec![n + 3; 24 * KIB], n + 3));
            check(&grows, n + 2);
            check(&first, n + 1);
            Ok::<_, Error>(())
        });
        errors.extend(done.err());
        kept.iter()
            .for_each(|(buffer, value)| check(buffer, *value));
        if kept.len() > 2 {
            kept.pop_front();
        }
    }
    errors
}

#[test]
fn any_device_call_may_fail_under_the_hook() {
    let driver = DeviceError::Driver {
        call: Call::Map,
        code: 999,
    };
    let full = DeviceError::OutOfMemory {
        info: MemoryInfo {
            free: Bytes(0),
            total: Bytes::mib(1),
        },
    };
    for (error, repeat) in [
        (&driver, Repeat::Once),
        (&driver, Repeat::Always),
        (&full, Repeat::Once),
        (&full, Repeat::Always),
        (&DeviceError::NotReady, Repeat::Once),
    ] {
        for n in 0.. {
            let host = Host::new(Bytes::kib(16)).unwrap();
            let device = Arc::new(Counting::new(Failing::new(host)));
            let failing = device.upstream();
            failing.fail_at(n, error.clone(), repeat);
            let Ok(mut compiler) = compiler(&device) else {
                assert!(device.is_empty());
                continue;
            };
            let mut kept = VecDeque::new();
            let errors = program(&mut compiler, &mut kept);
            let failures = failing.failures();
            failing.disarm();
            for error in &errors {
                let typed = matches!(error, Error::Device { .. } | Error::OutOfMemory { .. });
                assert!(typed, "{error}");
            }
            assert!(failures > 0 || errors.is_empty(), "{errors:?}");
            assert!(
                *error != DeviceError::NotReady || errors.is_empty(),
                "it was ready when asked again: {errors:?}"
            );
            assert_eq!(program(&mut compiler, &mut kept), [], "after call {n}");
            let stats = compiler.stats();
            assert_eq!(stats.bad_frees, 0, "{stats}");
            drop(compiler);
            kept.iter()
                .for_each(|(buffer, value)| check(buffer, *value));
            drop(kept);
            assert!(device.is_empty(), "after call {n}: {:?}", device.books());
            if failures == 0 {
                println!("{n} calls failed in turn: {repeat:?} {error}");
                assert!(n > 30, "{n} calls are few");
                break;
            }
        }
    }
}
