//! Tests of the oracle.

mod formats;
mod properties;
