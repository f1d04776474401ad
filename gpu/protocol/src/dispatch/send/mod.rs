//! The sending half of dispatch: routes of tokens, notifications to their ranks, and the rows.

pub mod header;
pub mod ids;
pub mod items;
pub mod notify;
pub mod numbering;
pub mod route;
