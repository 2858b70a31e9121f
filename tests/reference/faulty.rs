//! Programs of events on a device that fails: once or from a call on, until a step, with any error.
//! Made from bytes, so that a property test, a fuzz target and the soak share them.

use memory_compiler::device::adaptor::Repeat;
use memory_compiler::device::{Call, DeviceError, MemoryInfo};
use memory_compiler::{Bytes, Error, Stats};

use super::devices::counting_host;
use super::pair::Pair;
use super::program::Program;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faulty {
    pub program: Program,
    pub faults: Vec<Fault>,
}

/// From a step on the device fails; the next fault replaces this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub from_step: usize,
    /// Any memory call, or this one.
    pub call: Option<Call>,
    pub n: u64,
    pub error: DeviceError,
    pub repeat: Repeat,
}

#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub stats: Stats,
    /// Calls that the device refused, and those that an event returned.
    pub failures: u64,
    pub errors: u64,
}

const CALLS: [Option<Call>; 10] = [
    None,
    None,
    Some(Call::Create),
    Some(Call::Map),
    Some(Call::Allow),
    Some(Call::Unmap),
    Some(Call::Release),
    Some(Call::Synchronise),
    Some(Call::Memory),
    Some(Call::Reserve),
];

impl Fault {
    fn from_record([when, call, n, error]: [u8; 4], steps: usize) -> Self {
        let call = CALLS[usize::from(call) % CALLS.len()];
        let driver = DeviceError::Driver {
            call: call.unwrap_or(Call::Map),
            code: 999,
        };
        let error_of = [
            driver,
            DeviceError::NotReady,
            DeviceError::OutOfMemory {
                info: MemoryInfo {
                    free: Bytes(0),
                    total: Bytes::mib(1),
                },
            },
        ];
        Self {
            from_step: usize::from(when) * steps / 256,
            call,
            n: u64::from(n % 64),
            error: error_of[usize::from(error) % 3].clone(),
            repeat: if error < 128 {
                Repeat::Once
            } else {
                Repeat::Always
            },
        }
    }
}

impl Faulty {
    /// Any bytes are one: a count, so many faults of four bytes, a program.
    pub fn decode(bytes: &[u8]) -> Self {
        let (count, rest) = bytes.split_first().unwrap_or((&0, &[]));
        let count = usize::from(count % 4 + 1) * 4;
        let (faults, program) = rest.split_at(count.min(rest.len()));
        let program = Program::decode(program);
        let steps = program.steps.len();
        let records = faults.chunks_exact(4);
        let mut faults: Vec<_> = records
            .map(|r| Fault::from_record([r[0], r[1], r[2], r[3]], steps))
            .collect();
        faults.sort_by_key(|fault| fault.from_step);
        Self { program, faults }
    }

    /// Runs it against an engine and the model. A refused event is to the model one that never was; a
    /// fault that stays goes before the compiler does, and nothing may be left.
    pub fn run(&self) -> Outcome {
        let device = counting_host(Bytes(self.program.granule));
        let failing = device.upstream();
        let failures = std::cell::Cell::new(0);
        let arm = |step: usize| {
            let due = |fault: &&Fault| fault.from_step == step;
            if let Some(fault) = self.faults.iter().rfind(due) {
                failures.set(failures.get() + failing.failures());
                let error = fault.error.clone();
                match fault.call {
                    Some(call) => failing.fail_call_at(call, fault.n, error, fault.repeat),
                    None => failing.fail_at(fault.n, error, fault.repeat),
                }
            }
        };
        let stays = |fault: &Fault| fault.repeat == Repeat::Always;
        let is_reserve = |fault: &Fault| fault.from_step == 0 && fault.call == Some(Call::Reserve);
        if self.faults.iter().any(is_reserve) {
            arm(0);
        }
        let options = self.program.options();
        let pair = match Pair::try_over(device.clone(), device.clone(), options) {
            Ok(pair) => pair,
            Err(error) => {
                assert!(is_of_device(&error), "{error}");
                assert!(device.is_empty(), "left behind: {:?}", device.books());
                return Outcome {
                    failures: failing.failures(),
                    errors: 1,
                    ..Outcome::default()
                };
            }
        };
        let (stats, errors) = self.program.run_on(pair, |step| {
            arm(step);
            if step == self.program.steps.len() && self.faults.last().is_some_and(stays) {
                failures.set(failures.get() + failing.failures());
                failing.disarm();
            }
        });
        let failures = failures.get() + failing.failures();
        for error in &errors {
            assert!(is_of_device(error), "not an error of the device: {error}");
        }
        assert!(
            failures > 0 || errors.is_empty(),
            "nothing failed, yet {errors:?}"
        );
        Outcome {
            stats,
            failures,
            errors: errors.len() as u64,
        }
    }
}

fn is_of_device(error: &Error) -> bool {
    matches!(
        error,
        Error::Device { .. } | Error::OutOfMemory { .. } | Error::Reservation { .. }
    )
}
