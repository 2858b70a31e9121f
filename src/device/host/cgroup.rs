//! Control groups that limit the memory of this process (cgroups(7)), of both versions.
//!
//! ```text
//!   /proc/self/mountinfo   where the hierarchies are mounted, and which part of each
//!   /proc/self/cgroup      the group of this process in each
//!        └─> levels: /sys/fs/cgroup/a/b, /sys/fs/cgroup/a, /sys/fs/cgroup     each may be the tightest
//! ```
//!
//! May import: `units`.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::units::Bytes;

/// Longer paths of groups are not looked at.
const LONGEST: usize = 2048;
/// Limits from here on are none: version 1 shows one of about 2^63 where there is none.
const NO_LIMIT: u64 = 1 << 62;

/// The groups of this process, from its own up to the root of what it sees.
#[derive(Debug)]
pub(super) struct Groups {
    /// Where the file system begins: `/`, or a folder in tests.
    root: PathBuf,
    mounts: Vec<Mount>,
    /// The groups' names when `levels` was made: a process can be moved.
    membership: Vec<u8>,
    levels: Vec<Level>,
}

/// A hierarchy in which memory is limited, or may be.
#[derive(Debug)]
struct Mount {
    version: Version,
    /// The group that is seen at `point`.
    top: String,
    point: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// One group, by its files.
#[derive(Debug)]
struct Level {
    limit: PathBuf,
    used: PathBuf,
    parts: PathBuf,
    /// Name of the line of `parts` with the page cache that goes first.
    cache: &'static str,
}

/// What a group says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    pub limit: Bytes,
    /// Bytes of it that would not go if memory were needed.
    pub used: Bytes,
}

impl Groups {
    /// The groups in the file system that begins at `root`.
    pub(super) fn find(root: &Path) -> Self {
        let mountinfo = std::fs::read_to_string(root.join("proc/self/mountinfo"));
        let mounts = mountinfo.unwrap_or_default();
        Self {
            root: root.to_owned(),
            mounts: mounts.lines().filter_map(Mount::parse).collect(),
            membership: Vec::new(),
            levels: Vec::new(),
        }
    }

    /// The limit of each group that has one.
    pub(super) fn limits(&mut self) -> impl Iterator<Item = Limit> {
        self.follow();
        self.levels.iter().filter_map(Level::read)
    }

    /// Finds the levels anew where the process was moved to another group.
    fn follow(&mut self) {
        let mut text = [0; 2 * LONGEST];
        let membership = read(&self.root.join("proc/self/cgroup"), &mut text).unwrap_or_default();
        if membership == self.membership {
            return;
        }
        self.membership = membership.to_vec();
        let text = String::from_utf8_lossy(membership);
        self.levels.clear();
        for mount in &self.mounts {
            let group = text.lines().find_map(|line| mount.version.group(line));
            let group = group.filter(|group| group.len() <= LONGEST);
            self.levels
                .extend(mount.levels(&self.root, group.unwrap_or("/")));
        }
    }
}

impl Version {
    /// The group that a line of `/proc/self/cgroup` names, if it is one for memory: `4:memory:/a` or `0::/a`.
    fn group(self, line: &str) -> Option<&str> {
        let (number, rest) = line.split_once(':')?;
        let (controllers, group) = rest.split_once(':')?;
        let is_ours = match self {
            Self::One => controllers.split(',').any(|name| name == "memory"),
            Self::Two => number == "0" && controllers.is_empty(),
        };
        is_ours.then_some(group)
    }
}

impl Mount {
    /// A line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)), if it is one of a hierarchy for memory.
    fn parse(line: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let version = match kind.next()? {
            "cgroup2" => Version::Two,
            "cgroup" if kind.nth(1)?.split(',').any(|name| name == "memory") => Version::One,
            _ => return None,
        };
        let mut place = place.split(' ').skip(3);
        Some(Self {
            version,
            top: unescaped(place.next()?),
            point: PathBuf::from(unescaped(place.next()?)),
        })
    }

    /// The groups from `group` up to the one at the mount point, which alone is left of a group that is not
    /// under it.
    fn levels(&self, root: &Path, group: &str) -> Vec<Level> {
        let point = root.join(self.point.strip_prefix("/").unwrap_or(&self.point));
        let below = Path::new(group).strip_prefix(&self.top).ok();
        let below = below.filter(|below| !below.starts_with(".."));
        let below = below.unwrap_or(Path::new(""));
        let folders = below.ancestors().map(|folder| point.join(folder));
        folders.map(|folder| self.version.level(&folder)).collect()
    }
}

impl Version {
    fn level(self, folder: &Path) -> Level {
        let [limit, used, cache] = match self {
            Self::One => [
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ],
            Self::Two => ["memory.max", "memory.current", "inactive_file"],
        };
        Level {
            limit: folder.join(limit),
            used: folder.join(used),
            parts: folder.join("memory.stat"),
            cache,
        }
    }
}

impl Level {
    /// `None` where the group has no limit, or does not say.
    fn read(&self) -> Option<Limit> {
        let mut text = [0; 64];
        // Version 2 says `max` for none, and its root has no such file.
        let limit = number(read(&self.limit, &mut text)?)?;
        if limit >= NO_LIMIT {
            return None;
        }
        let used = number(read(&self.used, &mut text)?)?;
        let mut parts = [0; 8192];
        let parts = read(&self.parts, &mut parts).unwrap_or_default();
        let cache = parts.split(|&byte| byte == b'\n').find_map(|line| {
            number(
                line.strip_prefix(self.cache.as_bytes())?
                    .strip_prefix(b" ")?,
            )
        });
        Some(Limit {
            limit: Bytes(limit),
            used: Bytes(used.saturating_sub(cache.unwrap_or(0))),
        })
    }
}

/// The file's first bytes, as many as `text` has room for, without a heap allocation.
pub(super) fn read<'t>(path: &Path, text: &'t mut [u8]) -> Option<&'t [u8]> {
    let mut file = File::open(path).ok()?;
    let mut length = 0;
    while length < text.len() {
        match file.read(&mut text[length..]).ok()? {
            0 => break,
            read => length += read,
        }
    }
    Some(&text[..length])
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

/// A field of mountinfo, in which blanks are `\040`.
fn unescaped(field: &str) -> String {
    let mut parts = field.split('\\');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part
            .get(..3)
            .and_then(|code| u8::from_str_radix(code, 8).ok());
        match code {
            Some(code) => {
                text.push(char::from(code));
                text.push_str(&part[3..]);
            }
            None => {
                text.push('\\');
                text.push_str(part);
            }
        }
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A file system with these files, in a folder that goes with this value.
    pub(in super::super) struct Files(pub PathBuf);

    impl Files {
        pub fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let name = format!("memory-compiler-{name}-{}", std::process::id());
            let files_at = Self(std::env::temp_dir().join(name));
            files_at.write(files);
            files_at
        }

        pub fn write(&self, files: &[(&str, &str)]) {
            for (path, text) in files {
                let path = self.0.join(path);
                std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
                std::fs::write(path, text).expect("a file");
            }
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            drop(std::fs::remove_dir_all(&self.0));
        }
    }

    fn limits(groups: &mut Groups) -> Vec<(u64, u64)> {
        let limits = groups.limits();
        limits.map(|limit| (limit.limit.0, limit.used.0)).collect()
    }

    #[test]
    fn every_level_of_version_2_is_read_and_cache_counts_as_free() {
        let files = Files::new(
            "v2",
            &[
                (
                    "proc/self/mountinfo",
                    "22 1 0:20 / /proc rw - proc proc rw\n\
                     30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
                ),
                ("proc/self/cgroup", "0::/a/b\n"),
                ("sys/fs/cgroup/a/b/memory.max", "1000\n"),
                ("sys/fs/cgroup/a/b/memory.current", "900\n"),
                (
                    "sys/fs/cgroup/a/b/memory.stat",
                    "anon 5\nfile 7\ninactive_file 300\nactive_file 1\n",
                ),
                ("sys/fs/cgroup/a/memory.max", "700\n"),
                ("sys/fs/cgroup/a/memory.current", "650\n"),
                ("sys/fs/cgroup/c/memory.max", "max\n"),
                ("sys/fs/cgroup/c/memory.current", "9\n"),
            ],
        );
        let mut groups = Groups::find(&files.0);
        assert_eq!(limits(&mut groups), [(1000, 600), (700, 650)]);
        files.write(&[("sys/fs/cgroup/a/b/memory.current", "200")]);
        assert_eq!(limits(&mut groups), [(1000, 0), (700, 650)]);
        // The process is moved to where nothing is limited, then beyond what is mounted.
        files.write(&[("proc/self/cgroup", "0::/c\n")]);
        assert_eq!(limits(&mut groups), []);
        files.write(&[("proc/self/cgroup", "0::/../d\n")]);
        assert_eq!(limits(&mut groups), []);
    }

    #[test]
    fn a_container_sees_its_group_of_version_1_at_the_mount_point() {
        let files = Files::new(
            "v1",
            &[
                (
                    "proc/self/mountinfo",
                    "40 32 0:34 /docker/x /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n\
                     41 32 0:35 /docker/x /sys/fs/my\\040cgroup ro - cgroup cgroup rw,hugetlb,memory\n",
                ),
                (
                    "proc/self/cgroup",
                    "5:cpu:/docker/x/y\n4:hugetlb,memory:/docker/x/y\n0::/z\n",
                ),
                ("sys/fs/my cgroup/memory.limit_in_bytes", "5000\n"),
                ("sys/fs/my cgroup/memory.usage_in_bytes", "1000\n"),
                (
                    "sys/fs/my cgroup/memory.stat",
                    "inactive_file 1\ntotal_inactive_file 400\n",
                ),
                (
                    "sys/fs/my cgroup/y/memory.limit_in_bytes",
                    "9223372036854771712\n",
                ),
                ("sys/fs/my cgroup/y/memory.usage_in_bytes", "10\n"),
            ],
        );
        assert_eq!(limits(&mut Groups::find(&files.0)), [(5000, 600)]);
    }

    #[test]
    fn a_machine_without_control_groups_has_no_such_limits() {
        let files = Files::new(
            "none",
            &[("proc/self/mountinfo", "nonsense\n - \n1 2 3 - cgroup")],
        );
        assert_eq!(limits(&mut Groups::find(&files.0)), []);
        assert_eq!(limits(&mut Groups::find(Path::new("/nowhere"))), []);
    }
}
