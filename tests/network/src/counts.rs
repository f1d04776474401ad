//! Counts of what a PE sent and received, by kind.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counts of what a PE sent and received, by kind.
        #[derive(Debug, Default)]
        pub struct Counts {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        impl Counts {
            /// Names and values.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
                let all = [$((stringify!($name), self.$name.load(Ordering::Relaxed)),)*];
                all.into_iter()
            }
        }
    };
}

counts! {
    /// Puts that were asked for.
    puts,
    /// Bytes of these.
    put_bytes,
    /// Puts of a value.
    words,
    /// Signals, those of put-with-signal among them.
    signals,
    /// Other atomic operations that return nothing.
    atomics,
    /// Atomic operations that return the old value.
    fetches,
    /// Gets.
    gets,
    /// Fences.
    fences,
    /// Quiets.
    quiets,
    /// Requests that the host made, not the proxy.
    by_host,
    /// Puts and signals that were only counted.
    only_counted,
    /// Requests that waited because a peer had not acknowledged enough.
    stalls,
    /// Peers that were lost.
    lost,
    /// Puts of others that took effect.
    puts_in,
    /// Bytes of these.
    bytes_in,
    /// Values, signals and atomic operations of others that took effect.
    words_in,
    /// Gets of others that were answered.
    gets_in,
    /// Pieces of puts that were cut.
    pieces,
    /// Requests and pieces that took effect while something waited that was asked for before.
    overtakings,
}

impl Counts {
    pub(crate) fn add(count: &AtomicU64, more: u64) {
        count.fetch_add(more, Ordering::Relaxed);
    }

    /// The counts as a line of JSON.
    pub fn json(&self) -> String {
        let mut text = String::from("{");
        for (index, (name, count)) in self.all().enumerate() {
            let gap = if index == 0 { "" } else { "," };
            // Writing to a string does not fail.
            let _ = write!(text, "{gap}\"{name}\":{count}");
        }
        text + "}"
    }

    /// Replaces the file of this PE in a folder.
    pub(crate) fn write(&self, folder: &Path, pe: usize) -> io::Result<()> {
        let (part, whole) = (folder.join(format!("{pe}.part")), file(folder, pe));
        fs::write(&part, self.json() + "\n")?;
        fs::rename(part, whole)
    }
}

/// The file of a PE's counts, a line of JSON.
pub fn file(folder: &Path, pe: usize) -> PathBuf {
    folder.join(format!("{pe}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_json_in_their_order() {
        let counts = Counts::default();
        Counts::add(&counts.puts, 2);
        Counts::add(&counts.overtakings, u64::MAX);
        let text = counts.json();
        assert!(text.starts_with("{\"puts\":2,\"put_bytes\":0,"), "{text}");
        assert!(
            text.ends_with(",\"overtakings\":18446744073709551615}"),
            "{text}"
        );
    }
}
