//! Samples digits.
fn main() {}
