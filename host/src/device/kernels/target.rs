//! GPU generations and their names in PTX.

use std::fmt;

/// Target of PTX: "sm_90a".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// The compute capability without its dot.
    number: u32,
    reach: Reach,
}

/// Devices that run PTX for a target (PTX ISA, ".target").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// Devices of the same or a later capability.
    Later,
    /// Devices of the same family.
    Family,
    /// Devices of that very capability.
    Own,
}

impl Target {
    /// "sm_80".
    pub(crate) const SM_80: Self = Self {
        number: 80,
        reach: Reach::Later,
    };
    /// "sm_90a".
    #[cfg(any(feature = "cuda", test))]
    pub(crate) const SM_90A: Self = Self {
        number: 90,
        reach: Reach::Own,
    };
    /// "sm_100a".
    #[cfg(any(feature = "cuda", test))]
    pub(crate) const SM_100A: Self = Self {
        number: 100,
        reach: Reach::Own,
    };

    /// Reads a name; `None` if it is not one, or older than Ferry's kernels need.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let name = name.strip_prefix("sm_")?;
        let (digits, reach) = if let Some(digits) = name.strip_suffix('a') {
            (digits, Reach::Own)
        } else if let Some(digits) = name.strip_suffix('f') {
            (digits, Reach::Family)
        } else {
            (name, Reach::Later)
        };
        if !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        let number = digits.parse().ok()?;
        (number >= Self::SM_80.number).then_some(Self { number, reach })
    }

    /// Whether a device of compute capability `major`.`minor` runs PTX for this target.
    pub(crate) const fn runs_on(self, major: u32, minor: u32) -> bool {
        let device = 10 * major + minor;
        match self.reach {
            Reach::Later => device >= self.number,
            Reach::Family => device >= self.number && major == self.number / 10,
            Reach::Own => device == self.number,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self.reach {
            Reach::Later => "",
            Reach::Family => "f",
            Reach::Own => "a",
        };
        write!(f, "sm_{}{suffix}", self.number)
    }
}
