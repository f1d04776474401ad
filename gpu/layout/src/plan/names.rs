//! Names of formats and modes, which people write on command lines and in files.

use core::fmt;
use core::str::FromStr;

use crate::formats::format::{ScaleLayout, TokenFormat};
use crate::plan::receive::ReceiveLayout;
use crate::plan::shape::CombineMode;

/// Error for a word that names nothing. Its text lists the valid names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownName {
    what: &'static str,
    names: &'static str,
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no such {}: there are {}", self.what, self.names)
    }
}

impl core::error::Error for UnknownName {}

/// Writes `bf16`, `fp8`, or the format's name and the layout of its scales: `mxfp8:tiled`.
impl fmt::Display for TokenFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Bf16 | Self::BlockwiseFp8 => self.name(),
            Self::Mxfp8(ScaleLayout::Tiled) => "mxfp8:tiled",
            Self::Mxfp8(ScaleLayout::RowMajor) => "mxfp8:row-major",
            Self::Mxfp4(ScaleLayout::Tiled) => "mxfp4:tiled",
            Self::Mxfp4(ScaleLayout::RowMajor) => "mxfp4:row-major",
            Self::Nvfp4(ScaleLayout::Tiled) => "nvfp4:tiled",
            Self::Nvfp4(ScaleLayout::RowMajor) => "nvfp4:row-major",
            Self::Nvfp4RowScaled(ScaleLayout::Tiled) => "nvfp4-row:tiled",
            Self::Nvfp4RowScaled(ScaleLayout::RowMajor) => "nvfp4-row:row-major",
        })
    }
}

/// Reads the text that [`Display`](fmt::Display) writes. Without a layout, scales are tiled.
impl FromStr for TokenFormat {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let unknown = UnknownName {
            what: "token format",
            names: "bf16, fp8, mxfp8, mxfp4, nvfp4 and nvfp4-row, from mxfp8 on with :tiled (as without) or \
                    :row-major behind",
        };
        let (name, layout) = match text.split_once(':') {
            None => (text, None),
            Some((name, layout)) => (name, Some(layout.parse().map_err(|_| unknown)?)),
        };
        let mut all = Self::ALL.into_iter();
        let found = all.find(|format| {
            let wanted = match layout {
                None => format.scale_layout().map(|_| ScaleLayout::Tiled),
                given => given,
            };
            format.name() == name && format.scale_layout() == wanted
        });
        found.ok_or(unknown)
    }
}

impl ScaleLayout {
    /// Its name in options: `tiled` or `row-major`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tiled => "tiled",
            Self::RowMajor => "row-major",
        }
    }
}

impl fmt::Display for ScaleLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ScaleLayout {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let mut all = [Self::Tiled, Self::RowMajor].into_iter();
        all.find(|layout| layout.name() == text).ok_or(UnknownName {
            what: "layout of scales",
            names: "tiled and row-major",
        })
    }
}

impl CombineMode {
    /// Its name in options: `reduced` or `exact`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reduced => "reduced",
            Self::Exact => "exact",
        }
    }
}

impl fmt::Display for CombineMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for CombineMode {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let mut all = [Self::Reduced, Self::Exact].into_iter();
        all.find(|mode| mode.name() == text).ok_or(UnknownName {
            what: "mode of combine",
            names: "reduced and exact",
        })
    }
}

impl fmt::Display for ReceiveLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ReceiveLayout {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let mut all = Self::ALL.into_iter();
        all.find(|layout| layout.name() == text).ok_or(UnknownName {
            what: "receive layout",
            names: "by-expert, view, strided, compact and padded",
        })
    }
}

/// Serializes types as the words above.
#[cfg(feature = "serde")]
macro_rules! as_a_word {
    ($($of:ty),+) => {
        $(
            impl serde::Serialize for $of {
                fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                    to.collect_str(self)
                }
            }

            impl<'a> serde::Deserialize<'a> for $of {
                fn deserialize<D: serde::Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
                    from.deserialize_str(Word(core::marker::PhantomData))
                }
            }
        )+
    };
}

#[cfg(feature = "serde")]
as_a_word!(TokenFormat, ScaleLayout, CombineMode, ReceiveLayout);

/// Reads a word as a `T`.
#[cfg(feature = "serde")]
struct Word<T>(core::marker::PhantomData<T>);

#[cfg(feature = "serde")]
impl<T: FromStr<Err = UnknownName>> serde::de::Visitor<'_> for Word<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a word")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        text.parse()
            .map_err(|unknown| E::custom(format_args!("{text:?} is not one: {unknown}")))
    }
}
