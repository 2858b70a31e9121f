//! How much memory this process can still commit, and who says so.
//!
//! ```text
//!   MemAvailable          of the machine                       ─┐
//!   limit less use        of each control group up to the root ─┼─ the least of them, less a margin = room
//!                                                               ─┘
//!   room ──take, give──> left      looked up anew when an eighth of it was taken, or after a while
//! ```
//!
//! Whoever commits more than there is is not refused by the kernel but ended, or the machine with it: so it is asked
//! here first. Others take memory too; the nearer the end, the oftener the system is asked again, at the end each
//! time.
//!
//! May import: `bookkeeping`, `device_error`, `units`, `host/cgroup`, `host/os`.

use std::path::Path;
use std::time::{Duration, Instant};

use super::cgroup::{Groups, read};
use super::os;
use crate::bookkeeping::Bookkeeping;
use crate::device_error::{DeviceError, MemoryInfo};
use crate::units::Bytes;

/// How long a look is good for.
const AGE: Duration = Duration::from_millis(50);
/// The part of what was free at the last look that may be taken before the next one.
const PART: u64 = 8;
/// Allocations of the heap below this are not looked at: they cost less than looking.
const LARGE: Bytes = Bytes::mib(16);

/// Left to page tables, stacks, the kernel and everybody else.
fn margin(limit: Bytes) -> Bytes {
    Bytes((limit.0 / 32).clamp(Bytes::mib(4).0, Bytes::mib(256).0))
}

/// See the module's page.
#[derive(Debug)]
pub(super) struct Limits {
    meminfo: Box<Path>,
    groups: Groups,
    looked: Option<Look>,
}

#[derive(Clone, Copy, Debug)]
struct Look {
    at: Instant,
    /// What may be committed. Where the machine does not say what is available, all that it has: what is free
    /// without the page cache is too little.
    room: Bytes,
    taken: u64,
}

impl Limits {
    pub(super) fn new() -> Self {
        Self::under(Path::new("/"))
    }

    /// Limits by the files below `root`.
    fn under(root: &Path) -> Self {
        Self {
            meminfo: root.join("proc/meminfo").into(),
            groups: Groups::find(root),
            looked: None,
        }
    }

    /// What is free now and what there is at most, both by the tightest limit.
    pub(super) fn look(&mut self) -> Result<MemoryInfo, os::Errno> {
        // A device is locked here: it may not be asked for the memory of what is read.
        let _bookkeeping = Bookkeeping::begin();
        let (of_machine, available) = match meminfo(&self.meminfo) {
            Some(info) => (info, info.free),
            None => {
                let (free, total) = os::free_and_total()?;
                (MemoryInfo { free, total }, total)
            }
        };
        let MemoryInfo { free, total } = of_machine;
        let beside = |free: Bytes, limit: Bytes| free.saturating_sub(margin(limit));
        let (mut free, mut room) = (beside(free, total), beside(available, total));
        let mut least = total;
        for group in self.groups.limits() {
            let left = beside(group.limit.saturating_sub(group.used), group.limit);
            (free, room) = (free.min(left), room.min(left));
            least = least.min(group.limit);
        }
        self.looked = Some(Look {
            at: Instant::now(),
            room,
            taken: 0,
        });
        Ok(MemoryInfo { free, total: least })
    }

    /// Whether `size` more bytes can be committed; else what there is.
    pub(super) fn check(&mut self, size: Bytes) -> Result<(), MemoryInfo> {
        let is_good = |look: &Look| {
            let taken = look.taken.saturating_add(size.0);
            taken <= look.room.0 / PART && look.at.elapsed() < AGE
        };
        if self.looked.as_ref().is_some_and(is_good) {
            return Ok(());
        }
        // Where nobody says what there is, the kernel has to refuse.
        match (self.look(), self.looked) {
            (Ok(info), Some(look)) if size > look.room => Err(info),
            _ => Ok(()),
        }
    }

    /// `size` bytes were committed.
    pub(super) fn take(&mut self, size: Bytes) {
        if let Some(look) = &mut self.looked {
            look.taken = look.taken.saturating_add(size.0);
        }
    }

    /// `size` bytes were given back.
    pub(super) fn give(&mut self, size: Bytes) {
        if let Some(look) = &mut self.looked {
            look.taken = look.taken.saturating_sub(size.0);
        }
    }
}

/// Whether the heap of this process may grow by `size` bytes that will all be written.
pub(crate) fn allows(size: Bytes) -> bool {
    size < LARGE || Limits::new().check(size).is_ok() && check_addresses(size).is_ok()
}

/// Checks that the process may have `size` bytes of addresses more, and some beside them: without any it cannot
/// start a thread, and a deeper stack ends it.
pub(super) fn check_addresses(size: Bytes) -> Result<(), DeviceError> {
    let limit = os::address_limit();
    if limit.0 == u64::MAX {
        return Ok(());
    }
    let used = os::addresses_in_use();
    let beside = Bytes((limit.0 / 16).min(Bytes::mib(64).0));
    let sum = size.checked_add(used);
    match sum.and_then(|sum| sum.checked_add(beside)) {
        Some(sum) if sum <= limit => Ok(()),
        _ => Err(DeviceError::NoAddresses {
            asked: size,
            used,
            limit,
        }),
    }
}

/// `MemAvailable` and `MemTotal` of proc_meminfo(5), without a heap allocation; `None` where they cannot be read.
fn meminfo(path: &Path) -> Option<MemoryInfo> {
    let mut text = [0; 4096];
    let text = std::str::from_utf8(read(path, &mut text)?).ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
        Some(Bytes(kib.checked_mul(1024)?))
    };
    Some(MemoryInfo {
        free: field("MemAvailable:")?,
        total: field("MemTotal:")?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::cgroup::tests::Files;
    use super::*;

    fn machine(name: &str, available: Bytes) -> (Files, Limits) {
        let files = Files::new(
            name,
            &[
                (
                    "proc/self/mountinfo",
                    "1 1 0:1 / /cg rw - cgroup2 cgroup2 rw\n",
                ),
                ("proc/self/cgroup", "0::/a\n"),
            ],
        );
        set_available(&files, available);
        let limits = Limits::under(&files.0);
        (files, limits)
    }

    fn set_available(files: &Files, available: Bytes) {
        let text = format!(
            "MemTotal:       {:>8} kB\nMemFree: 1 kB\nMemAvailable:   {:>8} kB\n",
            Bytes::gib(32).0 / 1024,
            available.0 / 1024
        );
        files.write(&[("proc/meminfo", &text)]);
    }

    #[test]
    fn the_tightest_limit_counts_less_a_margin() {
        let (files, mut limits) = machine("tightest", Bytes::gib(3));
        let machine = MemoryInfo {
            free: Bytes::mib(3072 - 256),
            total: Bytes::gib(32),
        };
        assert_eq!(limits.look(), Ok(machine));
        assert_eq!(limits.check(machine.free), Ok(()));
        assert_eq!(limits.check(Bytes(machine.free.0 + 1)), Err(machine));
        assert_eq!(limits.check(Bytes(u64::MAX)), Err(machine));
        files.write(&[
            ("cg/a/memory.max", &Bytes::mib(640).0.to_string()),
            ("cg/a/memory.current", &Bytes::mib(100).0.to_string()),
        ]);
        let group = MemoryInfo {
            free: Bytes::mib(640 - 100 - 20),
            total: Bytes::mib(640),
        };
        assert_eq!(limits.look(), Ok(group));
        files.write(&[("cg/a/memory.current", &Bytes::mib(700).0.to_string())]);
        assert_eq!(limits.look().map(|info| info.free), Ok(Bytes::ZERO));
    }

    #[test]
    fn a_machine_that_does_not_say_what_is_available_refuses_what_it_has_not_at_all() {
        let mut limits = Limits::under(Path::new("/nowhere"));
        let info = limits.look().expect("sysinfo(2)");
        assert_eq!(limits.check(Bytes(info.free.0.max(1 << 20))), Ok(()));
        assert!(limits.check(Bytes(info.total.0 + 1)).is_err());
    }

    #[test]
    fn others_may_take_seven_eighths_before_it_is_looked_again() {
        let (files, mut limits) = machine("eighths", Bytes::mib(1024 + 256));
        let page = Bytes::mib(1);
        let mut taken = 0;
        limits.look().expect("files");
        // As long as the test is not slower than a look is good for, 128 are taken unseen.
        set_available(&files, Bytes::ZERO);
        while limits.check(page).is_ok() {
            limits.take(page);
            taken += 1;
            assert!(taken <= 128);
        }
        set_available(&files, Bytes::mib(256 + 2));
        for _ in 0..2 {
            assert_eq!(limits.check(page), Ok(()));
            limits.take(page);
        }
        limits.give(page);
        set_available(&files, Bytes::mib(256));
        assert!(limits.check(page).is_err());
    }

    #[test]
    fn the_limits_of_this_machine_are_found_in_under_a_millisecond() {
        let mut limits = Limits::new();
        let fastest = (0..20).map(|_| {
            let began = Instant::now();
            let refused = limits
                .check(Bytes(u64::MAX))
                .expect_err("more than any machine has");
            assert!(refused.free <= refused.total && refused.free > Bytes::ZERO);
            began.elapsed()
        });
        let fastest = fastest.min().expect("twenty");
        eprintln!("looked in {fastest:?}");
        assert!(fastest < Duration::from_millis(1), "{fastest:?}");
        assert!(!allows(Bytes::gib(1 << 20)));
        assert!(allows(Bytes::mib(1)));
    }
}
