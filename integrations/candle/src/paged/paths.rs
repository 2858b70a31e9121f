//! Which weights a path of scopes means.

use std::collections::HashMap;
use std::sync::Arc;

/// Names that are remembered at most, over all paths: a program whose scopes never repeat keeps no more.
const NAMES: usize = 1 << 14;

/// What paths were found to mean. To be [forgotten](Paths::forget) when weights are added.
#[derive(Debug, Default)]
pub(super) struct Paths {
    known: HashMap<Vec<String>, Arc<[usize]>>,
    /// Names of all paths in `known`.
    names: usize,
    /// The scope outside of which no other means these weights.
    root: Option<String>,
}

impl Paths {
    pub fn only_in(&mut self, scope: &str) {
        self.root = Some(scope.to_owned());
        self.forget();
    }

    pub fn forget(&mut self) {
        self.known.clear();
        self.names = 0;
    }

    /// The weights that an open path of scopes means, of those with `names`, by their numbers.
    pub fn weights<'a>(
        &mut self,
        path: &[String],
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Arc<[usize]> {
        if let Some(found) = self.known.get(path) {
            return Arc::clone(found);
        }
        let under = |prefix: &str| -> Vec<usize> {
            let is_named = |name: &str| {
                name.strip_prefix(prefix)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            let numbered = names.clone().enumerate();
            numbered
                .filter_map(|(at, name)| is_named(name).then_some(at))
                .collect()
        };
        let inside = match &self.root {
            None => path,
            Some(root) => match path.iter().position(|name| name == root) {
                Some(at) => &path[at + 1..],
                None => &[],
            },
        };
        let (mut prefix, mut found) = (String::new(), Vec::new());
        for name in inside {
            let nested = format!("{prefix}.{name}");
            for candidate in [nested.as_str(), name.as_str()] {
                found = under(candidate);
                if !found.is_empty() {
                    prefix = candidate.to_owned();
                    break;
                }
            }
        }
        let found: Arc<[usize]> = found.into();
        if path.len() <= NAMES {
            if self.names + path.len() > NAMES {
                self.forget();
            }
            self.names += path.len();
            self.known.insert(path.to_vec(), Arc::clone(&found));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEIGHTS: [&str; 5] = ["a.in", "a.out", "ab", "b.a.in", "b"];
    const NONE: [usize; 0] = [];

    fn meant(paths: &mut Paths, path: &str) -> Vec<usize> {
        let path: Vec<String> = path.split('/').map(str::to_owned).collect();
        paths.weights(&path, WEIGHTS.into_iter()).to_vec()
    }

    #[test]
    fn a_scope_means_what_its_path_names_else_what_its_name_does() {
        let mut paths = Paths::default();
        // Told from memory the second time.
        for _ in 0..2 {
            assert_eq!(meant(&mut paths, "a"), [0, 1]);
            assert_eq!(meant(&mut paths, "a/out"), [1]);
            assert_eq!(meant(&mut paths, "b"), [3, 4]);
            assert_eq!(meant(&mut paths, "b/a"), [3]);
            assert_eq!(meant(&mut paths, "step/a"), [0, 1]);
            assert_eq!(meant(&mut paths, "step"), NONE);
        }
        paths.only_in("model");
        assert_eq!(meant(&mut paths, "a"), NONE);
        assert_eq!(meant(&mut paths, "model/a"), [0, 1]);
    }

    #[test]
    fn paths_that_never_repeat_are_not_kept_for_ever() {
        let mut paths = Paths::default();
        for step in 0..20_000 {
            assert_eq!(meant(&mut paths, &format!("t{step}")), NONE);
            assert_eq!(meant(&mut paths, &format!("t{step}/a")), [0, 1]);
            assert_eq!(meant(&mut paths, "a"), [0, 1]);
            let kept: usize = paths.known.keys().map(Vec::len).sum();
            assert!(kept == paths.names && kept <= NAMES, "{kept} names");
        }
        let deep = vec!["a"; NAMES + 1].join("/");
        assert_eq!(meant(&mut paths, &deep), [0, 1]);
        assert!(paths.known.len() > 2 && paths.names <= NAMES);
    }
}
