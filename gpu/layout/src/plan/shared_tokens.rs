//! Shares of the shared expert's tokens.

/// Tokens of the shared expert that one rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedTokens {
    /// The first token.
    pub start: u32,
    /// Number of tokens. Theirs are the first rows of dispatch's outputs, and of the experts' outputs.
    pub count: u32,
}

impl SharedTokens {
    /// Tokens of rank `index` of the `of` ranks that share `tokens` tokens; none if `of` is 0. If the tokens
    /// cannot be divided evenly, the first ranks have one more each.
    #[inline(always)]
    pub const fn of(tokens: u32, of: u32, index: u32) -> Self {
        match of {
            0 => Self { start: 0, count: 0 },
            1 => Self {
                start: 0,
                count: tokens,
            },
            _ => {
                let (each, more) = (tokens / of, tokens % of);
                let before = if index < more { index } else { more };
                Self {
                    start: index * each + before,
                    count: each + (index < more) as u32,
                }
            }
        }
    }
}
