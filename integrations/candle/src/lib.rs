//! memory-compiler for Candle.
