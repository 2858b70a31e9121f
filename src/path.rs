//! Layer 0: paths of scopes as text, for statistics and errors.
//!
//! ```text
//!   step/down.0/attention                  as it is
//!   step/a/a/a/…99969 more…/a/a/b          of more names than that, both ends
//!   step/averyverylon…endofaname           and of a long name too
//! ```
//!
//! A program may nest any number of scopes, and every one of them has a path: in full they would take memory by the
//! square of the depth. Two deep paths that differ in the middle alone have the same text.
//!
//! May import: nothing of this crate.

use std::borrow::Cow;

/// Names that are shown at each end of a path of more than twice as many.
pub(crate) const ENDS: usize = 16;
/// Bytes that are shown, at most, of each end of a name of more than twice as many.
const NAME_ENDS: usize = 64;

/// The text of a path of `depth` names: of all of them, the outermost first, or of the first and the last [`ENDS`].
pub(crate) fn text<'a>(
    depth: usize,
    outermost: impl Iterator<Item = &'a str>,
    innermost: impl Iterator<Item = &'a str>,
) -> String {
    let is_whole = depth <= 2 * ENDS;
    let split = if is_whole { depth.min(ENDS) } else { ENDS };
    let mut parts: Vec<Cow<'_, str>> = outermost.take(split).map(of_name).collect();
    if !is_whole {
        parts.push(format!("…{} more…", depth - 2 * ENDS).into());
    }
    parts.extend(innermost.map(of_name));
    parts.join("/")
}

/// The same for names in a row.
pub(crate) fn text_of(names: &[String]) -> String {
    let rest = names.len().saturating_sub(ENDS).max(names.len().min(ENDS));
    text(
        names.len(),
        names.iter().map(String::as_str),
        names[rest..].iter().map(String::as_str),
    )
}

/// A name, or both ends of a long one.
pub(crate) fn of_name(name: &str) -> Cow<'_, str> {
    if name.len() <= 2 * NAME_ENDS {
        return name.into();
    }
    let first = name.floor_char_boundary(NAME_ENDS);
    let last = name.ceil_char_boundary(name.len() - NAME_ENDS);
    format!("{}…{}", &name[..first], &name[last..]).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(count: usize) -> Vec<String> {
        (0..count).map(|number| number.to_string()).collect()
    }

    #[test]
    fn paths_of_up_to_32_names_are_whole() {
        for count in 0..=2 * ENDS {
            assert_eq!(text_of(&numbered(count)), numbered(count).join("/"));
        }
        let names = numbered(2 * ENDS + 1);
        let cut = [
            &names[..ENDS].join("/"),
            "…1 more…",
            &names[ENDS + 1..].join("/"),
        ];
        assert_eq!(text_of(&names), cut.join("/"));
    }

    #[test]
    fn long_names_are_shown_by_their_ends() {
        let long = format!("{}{}", "a".repeat(65), "é".repeat(70));
        let shown = text_of(std::slice::from_ref(&long));
        assert_eq!(shown, format!("{}…{}", "a".repeat(64), "é".repeat(32)));
        let whole = "a".repeat(2 * NAME_ENDS);
        assert_eq!(text_of(std::slice::from_ref(&whole)), whole);
        assert_eq!(text_of(&[]), "");
    }
}
