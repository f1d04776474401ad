//! Options whose costs the benchmark compares.

/// Options of a timed round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub enum Options {
    /// Nothing: kernels without options.
    None,
    /// Nothing, and kernels with options are loaded.
    Loaded,
    /// The number of tokens, on the device.
    TokensOnDevice,
    /// A bias and a residual.
    Steps,
    /// Rows of a shared expert.
    SharedExpert,
}

impl Options {
    /// Every one, in the order of the table.
    pub const ALL: [Self; 5] = [
        Self::None,
        Self::Loaded,
        Self::TokensOnDevice,
        Self::Steps,
        Self::SharedExpert,
    ];
}
