//! Forked children of a test: each runs a closure, never gets back into the test harness, and says how it went by its
//! exit status.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use memory_compiler::{Address, Allocation, Bytes, Step, free};

use super::devices::{CountingHost, Pattern};

/// The longest that a child may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a child ends with when its closure panics.
const PANICKED: i32 = 101;

/// A child that runs.
pub struct Child(libc::pid_t);

/// What a child's closure is given.
pub struct InChild(());

impl InChild {
    /// The child's own of a value of its parent, to be used up.
    pub fn own<T>(&self, value: *const T) -> T {
        // SAFETY: the caller passes a live value. In this process nobody comes back to it: a child ends in `end`,
        // without the destructors of its parent's variables.
        unsafe { value.read() }
    }
}

fn say(text: &str) {
    let text = format!("forked child: {text}\n");
    // SAFETY: the bytes are readable. Past the harness, which keeps what its threads print.
    let _ = unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

/// Forks; the child runs `f` and ends.
pub fn fork(f: impl FnOnce(&InChild)) -> Child {
    // SAFETY: the child uses nothing that another thread of a test holds, and does not return.
    match unsafe { libc::fork() } {
        0 => end(f),
        child => {
            assert!(child > 0, "fork(2) works");
            Child(child)
        }
    }
}

/// Runs `f` and ends the process, without destructors.
pub fn end(f: impl FnOnce(&InChild)) -> ! {
    let done = catch_unwind(AssertUnwindSafe(|| f(&InChild(()))));
    let status = match done {
        Ok(()) => 0,
        Err(payload) => {
            let text = payload
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| payload.downcast_ref::<&str>().copied());
            say(text.unwrap_or("a panic"));
            PANICKED
        }
    };
    // SAFETY: ends this process, which is a child.
    unsafe { libc::_exit(status) }
}

impl Child {
    /// One that was made in another way.
    pub fn from_pid(pid: libc::pid_t) -> Self {
        assert!(pid > 0, "a child was made");
        Self(pid)
    }

    /// The child's exit status; waits for its end.
    ///
    /// # Panics
    /// When a signal ended it, and when it does not end.
    #[track_caller]
    pub fn status(self) -> i32 {
        let began = Instant::now();
        let mut status = 0;
        loop {
            // SAFETY: `status` is writable, and the child is this process's.
            let ended = unsafe { libc::waitpid(self.0, &raw mut status, libc::WNOHANG) };
            if ended == self.0 {
                break;
            }
            assert_eq!(ended, 0, "waitpid(2) works");
            if began.elapsed() > PATIENCE {
                // SAFETY: the child is this process's and was not waited for.
                let _ = unsafe { libc::kill(self.0, libc::SIGKILL) };
                panic!("the child hangs");
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        assert!(
            libc::WIFEXITED(status),
            "signal {} ended the child",
            libc::WTERMSIG(status)
        );
        libc::WEXITSTATUS(status)
    }

    /// Waits for the child's end, which is a good one.
    #[track_caller]
    pub fn succeeds(self) {
        assert_eq!(self.status(), 0, "the child's exit status");
    }
}

/// Forks a child that runs `f` and ends well.
#[track_caller]
pub fn in_child(f: impl FnOnce(&InChild)) {
    fork(f).succeeds();
}

/// A live buffer, which is checked and freed when it goes.
pub struct Buffer {
    device: CountingHost,
    pub at: Address,
    pub pattern: Pattern,
}

impl Buffer {
    pub fn check(&self) {
        self.pattern.check(&*self.device, self.at.0);
    }

    /// Writes something else.
    pub fn spoil(&self) {
        let Pattern { seed, size } = self.pattern;
        let other = Pattern { seed: !seed, size };
        other.write(&*self.device, self.at.0);
        other.check(&*self.device, self.at.0);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(free(self.at), Ok(()), "a live buffer is freed");
        }
    }
}

/// Has a step place a buffer, and fills it.
///
/// # Panics
/// When the step does not serve it.
pub fn alloc(device: &CountingHost, step: &Step<'_>, size: u64, seed: u64) -> Buffer {
    let Ok(Allocation::Here(at)) = step.alloc(Bytes(size)) else {
        panic!("a step serves its stream")
    };
    let pattern = Pattern { seed, size };
    pattern.write(&**device, at.0);
    Buffer {
        device: device.clone(),
        at,
        pattern,
    }
}
