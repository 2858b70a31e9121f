//! Who watches scopes: what they keep is dropped with the scope, and where they refuse, the step returns why.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Weak};

use memory_compiler::device::{Device, Host};
use memory_compiler::{
    Bytes, Compiler, Error, Options, Refusal, ScopeWatch, catch_scopes, scope, strict_scope,
    watch_scopes,
};

/// Writes down what it is told, for scopes of its test alone, and refuses those named `missing`.
struct Notes {
    root: &'static str,
    notes: Arc<Mutex<Vec<String>>>,
}

/// Tells when a scope has closed.
struct Kept(String, Arc<Mutex<Vec<String>>>);

impl Drop for Kept {
    fn drop(&mut self) {
        let note = format!("-{}", self.0);
        self.1.lock().unwrap().push(note);
    }
}

impl ScopeWatch for Notes {
    fn opened(&self, path: &[String]) -> Result<Option<Box<dyn Any>>, Refusal> {
        if path[0] != self.root {
            return Ok(None);
        }
        let path = path.join("/");
        self.notes.lock().unwrap().push(format!("+{path}"));
        if path.ends_with("missing") {
            return Err("no weights".into());
        }
        Ok(Some(Box::new(Kept(path, Arc::clone(&self.notes)))))
    }
}

fn notes(root: &'static str) -> Arc<Notes> {
    let notes = Arc::new(Notes {
        root,
        notes: Arc::default(),
    });
    let watch: Weak<Notes> = Arc::downgrade(&notes);
    watch_scopes(watch);
    notes
}

impl Notes {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.notes.lock().unwrap())
    }
}

fn compiler() -> Compiler {
    let device: Arc<dyn Device> = Arc::new(Host::new(Bytes::kib(4)).unwrap());
    Compiler::new(device, Options::default()).unwrap()
}

fn refused(path: &str) -> Error {
    Error::Scope {
        path: path.to_owned(),
        reason: "no weights".to_owned(),
    }
}

#[test]
fn what_a_watch_keeps_is_dropped_when_its_scope_closes() {
    let notes = notes("keeps");
    let outer = scope("keeps");
    let inner = strict_scope("inner");
    drop(outer);
    assert_eq!(notes.take(), ["+keeps", "+keeps/inner", "-keeps"]);
    drop(inner);
    assert_eq!(notes.take(), ["-keeps/inner"]);
}

#[test]
fn the_step_returns_why_a_scope_could_not_open_and_the_next_one_runs() {
    let notes = notes("returns");
    let mut compiler = compiler();
    let forward = |name: &str| {
        let _outer = scope("returns");
        let _inner = scope(name);
    };
    for round in 0..3 {
        let told = compiler.step(|| {
            forward("missing");
            Ok::<_, Error>(())
        });
        assert_eq!(told, Err(refused("returns/missing")));
        assert_eq!(
            notes.take(),
            ["+returns", "+returns/missing", "-returns"],
            "round {round}"
        );
        let told = compiler.step(|| {
            forward("there");
            Ok::<_, Error>(())
        });
        assert_eq!(told, Ok(()));
        assert_eq!(notes.take().len(), 4);
    }
    let stats = compiler.stats();
    assert_eq!((stats.steps, stats.aborts), (6, 3));
    assert_eq!(refused("a/b").to_string(), "scope a/b: no weights");
}

#[test]
fn the_innermost_step_returns_it() {
    let _notes = notes("nested");
    let (mut outer, mut inner) = (compiler(), compiler());
    let told = outer.step(|| {
        let told = inner.step(|| {
            let _scope = scope("nested");
            let _missing = scope("missing");
            Ok::<_, Error>(())
        });
        assert_eq!(told, Err(refused("nested/missing")));
        Ok::<_, Error>(())
    });
    assert_eq!(told, Ok(()));
}

#[test]
fn other_panics_pass_and_outside_of_a_step_it_is_one() {
    let notes = notes("outside");
    let mut compiler = compiler();
    let panic = catch_unwind(AssertUnwindSafe(|| {
        compiler.step(|| -> Result<(), Error> { panic!("of the model") })
    }));
    let panic = panic.expect_err("the model's panic");
    assert_eq!(panic.downcast_ref(), Some(&"of the model"));
    let told = catch_scopes(|| {
        let _outer = scope("outside");
        let _missing = scope("missing");
    });
    assert_eq!(told, Err(refused("outside/missing")));
    let panic = catch_unwind(|| {
        let _outer = scope("outside");
        let _missing = scope("missing");
    });
    let panic = panic.expect_err("no step to return it");
    let text: &String = panic.downcast_ref().expect("a text");
    assert_eq!(text, "scope outside/missing: no weights");
    assert_eq!(notes.take().last().unwrap(), "-outside");
}
