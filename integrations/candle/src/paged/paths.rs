//! Which weights a path of scopes means.

use std::collections::HashMap;
use std::sync::Arc;

/// Names that are remembered at most, over all paths: a program whose scopes never repeat keeps no more.
const NAMES: usize = 1 << 14;

/// Names of a path that are looked at: half of them the outermost, half the innermost. No model's weights have names of
/// so many parts, and a program may have any number of scopes open.
const LOOKED_AT: usize = 64;

/// What paths were found to mean. To be [forgotten](Paths::forget) when weights are added.
#[derive(Debug, Default)]
pub(super) struct Paths {
    known: HashMap<Vec<String>, Arc<[usize]>>,
    /// Names of all paths in `known`.
    names: usize,
    /// The scope outside of which no other means these weights.
    root: Option<String>,
    /// Numbers of all weights, by their names.
    by_name: Vec<usize>,
}

impl Paths {
    pub fn only_in(&mut self, scope: &str) {
        self.root = Some(scope.to_owned());
        self.forget();
    }

    pub fn forget(&mut self) {
        self.known.clear();
        self.names = 0;
        self.by_name.clear();
    }

    /// The weights that an open path of scopes means, by their numbers, of `count` with the names that `name` says.
    pub fn weights<'a>(
        &mut self,
        path: &[String],
        count: usize,
        name: impl Fn(usize) -> &'a str,
    ) -> Arc<[usize]> {
        let short: Vec<String>;
        let path = match path.len() <= LOOKED_AT {
            true => path,
            false => {
                let (half, rest) = (LOOKED_AT / 2, path.len() - LOOKED_AT / 2);
                short = [&path[..half], &path[rest..]].concat();
                &short[..]
            }
        };
        if let Some(found) = self.known.get(path) {
            return Arc::clone(found);
        }
        if self.by_name.len() != count {
            self.by_name = (0..count).collect();
            self.by_name.sort_by_key(|&weight| name(weight));
        }
        // Those of that name and those below it: there is no character between `.` and `/`.
        let under = |prefix: &str| -> Vec<usize> {
            let before = |end: &[u8]| {
                let is_before = |&weight: &usize| {
                    let bound = prefix.bytes().chain(end.iter().copied());
                    name(weight).bytes().lt(bound)
                };
                self.by_name.partition_point(is_before)
            };
            let is_own = |&&weight: &&usize| name(weight) == prefix;
            let own = self.by_name[before(b"")..].iter().take_while(is_own);
            let below = &self.by_name[before(b".")..before(b"/")];
            let mut found: Vec<usize> = own.chain(below).copied().collect();
            found.sort_unstable();
            found
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
            if !prefix.is_empty() {
                let nested = format!("{prefix}.{name}");
                found = under(&nested);
                if !found.is_empty() {
                    prefix = nested;
                    continue;
                }
            }
            found = under(name);
            if !found.is_empty() {
                prefix.clone_from(name);
            }
        }
        let found: Arc<[usize]> = found.into();
        if self.names + path.len() > NAMES {
            (self.known, self.names) = (HashMap::new(), 0);
        }
        self.names += path.len();
        self.known.insert(path.to_vec(), Arc::clone(&found));
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
        paths
            .weights(&path, WEIGHTS.len(), |weight| WEIGHTS[weight])
            .to_vec()
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

    #[test]
    fn a_path_of_any_depth_means_its_ends_and_costs_no_more_than_a_short_one() {
        let mut paths = Paths::default();
        let began = std::time::Instant::now();
        let mut path: Vec<String> = Vec::new();
        for depth in 0..20_000 {
            path.push(format!("level{depth}"));
            let found = paths.weights(&path, WEIGHTS.len(), |weight| WEIGHTS[weight]);
            assert_eq!(*found, NONE);
        }
        path.extend(["a".to_owned(), "out".to_owned()]);
        let found = paths.weights(&path, WEIGHTS.len(), |weight| WEIGHTS[weight]);
        assert_eq!(*found, [1]);
        assert!(paths.names <= NAMES);
        assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
    }
}
