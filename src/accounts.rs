//! Layer 4: who holds memory of which device, and who lends what lies idle.
//!
//! ```text
//!   a compiler in a step, short of memory ──ask──────> compilers in no step: their idle pages go back to
//!                                                      the device and its budget, where the asker takes them
//!   an error that says who has the memory ──holdings─> accounts: compilers, weights; the rest is others'
//! ```
//!
//! Every reserved range with pages keeps an account: one for an arena, one for a range of weights. Those of
//! one memory ([`Device::memory_source`]) compete for its pages, those of one budget for its bytes.
//!
//! Invariants:
//! - an account says what its range owns, at every moment: claimed, created and not yet released;
//! - the lock of the list is a leaf: nothing is called under it;
//! - nobody waits for long here: a lender that is busy is asked for at most [`PATIENCE`], and so is a turn.
//!   So whatever a lender, a device or a logger does, two threads cannot wait for each other for ever.
//!
//! May import: `units`, `bookkeeping`, `device`, `device/fork`, `budget`.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use crate::bookkeeping::Bookkeeping;
use crate::budget::Budget;
use crate::device::Device;
use crate::device::fork::{Process, Section};
use crate::units::Bytes;

/// How long who is short of memory tries to get hold of a lender that is busy: longer than a compile between
/// two steps, which is what takes longest there.
pub(crate) const PATIENCE: Duration = Duration::from_millis(300);

/// All accounts of the process. Never dropped.
static ACCOUNTS: Mutex<Vec<Weak<Account>>> = Mutex::new(Vec::new());

/// Held by whoever takes pages for the second time, because others were after the same ones.
static TURN: Mutex<()> = Mutex::new(());
/// How many have a turn or wait for one.
static WANTED: AtomicUsize = AtomicUsize::new(0);

/// What the pages of an account are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Steps,
    Weights,
}

/// Somebody who may have pages that nobody needs at the moment.
pub(crate) trait Lender: Debug + Send + Sync {
    /// Gives up to `wanted` bytes of idle pages back to the device, if it is in no step.
    fn lend(&self, wanted: Bytes);
}

/// See the module's page.
#[derive(Debug)]
pub(crate) struct Account {
    /// The memory that its pages come from.
    source: u64,
    budget: Budget,
    owner: Owner,
    held: AtomicU64,
    lender: OnceLock<Weak<dyn Lender>>,
    /// Who opened it: what a forked child inherited is not its own.
    process: Process,
}

impl Account {
    /// An account without pages that others see.
    pub fn open(device: &dyn Device, budget: &Budget, owner: Owner) -> Arc<Self> {
        let _bookkeeping = Bookkeeping::begin();
        let account = Arc::new(Self {
            source: device.memory_source(),
            budget: budget.clone(),
            owner,
            held: AtomicU64::new(0),
            lender: OnceLock::new(),
            process: Process::this(),
        });
        let _section = Section::begin();
        let mut all = ACCOUNTS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&account));
        account
    }

    /// Has `lender` asked when others are short of memory.
    pub fn set_lender(&self, lender: Weak<dyn Lender>) {
        // Set once, where the compiler is made.
        drop(self.lender.set(lender));
    }

    pub fn held(&self) -> Bytes {
        Bytes(self.held.load(Ordering::Acquire))
    }

    pub fn add(&self, bytes: Bytes) {
        self.held.fetch_add(bytes.0, Ordering::AcqRel);
    }

    pub fn take(&self, bytes: Bytes) {
        self.held.fetch_sub(bytes.0, Ordering::AcqRel);
    }

    /// Those who compete for `of`, this one included.
    fn rivals(&self, of: Of) -> Vec<Arc<Self>> {
        rivals(|other| match of {
            Of::Memory => other.source == self.source,
            Of::Budget => other.budget.is_part_with(&self.budget),
        })
    }

    /// Has idle pages of others given back until `wanted` bytes were; returns how many.
    pub fn ask(&self, of: Of, wanted: Bytes) -> Bytes {
        let _bookkeeping = Bookkeeping::begin();
        lend(self.rivals(of), wanted)
    }

    /// Whether nobody else has an account there.
    pub fn is_alone(&self, of: Of) -> bool {
        let _bookkeeping = Bookkeeping::begin();
        self.rivals(of).len() <= 1
    }

    /// What the accounts hold, this one included.
    pub fn holdings(&self, of: Of) -> Holdings {
        let _bookkeeping = Bookkeeping::begin();
        Holdings::of(&self.rivals(of))
    }
}

/// What is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    /// Pages of the device.
    Memory,
    /// Bytes of the budget.
    Budget,
}

/// What accounts hold together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holdings {
    pub compilers: Bytes,
    pub weights: Bytes,
}

impl Holdings {
    fn of(accounts: &[Arc<Account>]) -> Self {
        let mut sum = Self::default();
        for account in accounts {
            let of = match account.owner {
                Owner::Steps => &mut sum.compilers,
                Owner::Weights => &mut sum.weights,
            };
            of.0 += account.held().0;
        }
        sum
    }
}

fn rivals(is_one: impl Fn(&Account) -> bool) -> Vec<Arc<Account>> {
    let section = Section::begin();
    let all = ACCOUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut rivals: Vec<Arc<Account>> = all.iter().filter_map(Weak::upgrade).collect();
    // What is dropped here is dropped after this.
    drop(all);
    drop(section);
    rivals.retain(|account| !account.process.is_ancestor() && is_one(account));
    rivals
}

fn lend(accounts: Vec<Arc<Account>>, wanted: Bytes) -> Bytes {
    let mut given = Bytes::ZERO;
    for account in accounts {
        let Some(lender) = account.lender.get().and_then(Weak::upgrade) else {
            continue;
        };
        if given >= wanted {
            break;
        }
        let before = account.held();
        lender.lend(wanted.saturating_sub(given));
        given.0 += before.saturating_sub(account.held()).0;
    }
    given
}

/// Locks what its holder needs for a short time; `None` when that is not so.
pub(crate) fn lock_soon<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    let began = Instant::now();
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if began.elapsed() > PATIENCE => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

/// While it lives, others who want pages wait, as long as that does not take long.
pub(crate) struct Turn(#[expect(dead_code, reason = "it is held")] MutexGuard<'static, ()>);

impl Drop for Turn {
    fn drop(&mut self) {
        WANTED.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Waits for a turn.
pub(crate) fn turn() -> Option<Turn> {
    WANTED.fetch_add(1, Ordering::AcqRel);
    let turn = lock_soon(&TURN).map(Turn);
    if turn.is_none() {
        WANTED.fetch_sub(1, Ordering::AcqRel);
    }
    turn
}

/// The same where somebody has one or waits for it.
pub(crate) fn turn_if_wanted() -> Option<Turn> {
    if WANTED.load(Ordering::Acquire) == 0 {
        return None;
    }
    turn()
}
