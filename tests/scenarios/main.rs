//! The table of scenarios, one test a row, on a counting host with the reference model alongside.
//!
//! Rows whose whole story is a list of steps are in `table`, the others in `stories`. What arrives
//! through a hook (allocations outside a step, of another device, buffers of another owner) is tested
//! with the hooks; here is the part that the direct API can say.

#[path = "../reference/mod.rs"]
mod reference;
mod row;
mod stories;
mod table;
