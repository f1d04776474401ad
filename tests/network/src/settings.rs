//! The settings of the network, as one line of text: the order, then `name=value` each, between commas.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

/// The variable from which the transport reads its settings.
pub const VARIABLE: &str = "FERRY_NETWORK";

/// Longest delay, in microseconds.
const LONGEST_US: u64 = 60_000_000;

/// The order in which what a PE asks of another takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The order of the requests.
    Fifo,
    /// Any order of what is between two fences.
    Fence,
    /// A signal after all puts that were asked before it, and a word of at most 8 bytes that is put behind a
    /// fence after all before the fence; all else in any order. A caller may ask more of a fence: this is for
    /// programs that order data by put-with-signal, by words behind fences, and by quiet alone.
    Relaxed,
    /// Words and signals before their data, words in pieces of 2 bytes. NVSHMEM forbids it: tests that see
    /// data must fail.
    Broken,
}

/// Ways to lose a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// It falls silent; its connections stay.
    Hang,
    /// Its connections close.
    Close,
    /// Its process ends.
    Exit,
}

/// Answers to NVSHMEM about a lost peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// An error, as of a NIC that has sent in vain: NVSHMEM's proxy then ends the process.
    Error,
    /// Nothing: what goes to that peer is dropped.
    Ignore,
}

/// A peer that is lost on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    /// Its number.
    pub pe: usize,
    /// Operations of others that take effect in its memory before.
    pub after: u64,
    /// The way.
    pub how: Loss,
}

/// The settings of the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The order of operations.
    pub order: Order,
    /// Seed of all that is drawn.
    pub seed: u64,
    /// Longest delay of puts and gets, each drawn, in microseconds.
    pub delay_us: u64,
    /// Longest delay of signals and other words, in microseconds.
    pub signal_delay_us: u64,
    /// Longest time after a put at which its source is read, in microseconds.
    pub late_read_us: u64,
    /// Longest piece of a put, in bytes, a multiple of 8: each piece takes effect for itself. 0: whole puts.
    pub pieces: usize,
    /// Rate of each PE's link inwards in Gb/s, 0 for no limit.
    pub gbit: u64,
    /// Latency of that link, in microseconds.
    pub latency_us: u64,
    /// Most operations of a PE that a peer has not acknowledged, 0 for no limit. The next one waits.
    pub window: u64,
    /// Number of a PE's puts and signals from which on they are only counted. 0: never.
    pub count_after: u64,
    /// A peer that is lost.
    pub lose: Option<Victim>,
    /// The answer to NVSHMEM about a lost peer.
    pub lost: Lost,
    /// Longest that a quiet or a full window waits for a peer that does not answer, in seconds.
    pub patience_s: u64,
    /// Address at which this PE is reached.
    pub listen: Ipv4Addr,
    /// Port of PE 0; others have those behind it. 0: any.
    pub port: u16,
    /// Folder for a file of counts of each PE.
    pub counts: Option<PathBuf>,
    /// Whether all memory is the process's own, and no driver is loaded.
    pub without_gpu: bool,
    /// Whether to say what happens.
    pub log: bool,
}

/// A setting that is none.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SettingsError {
    /// No such order.
    #[error("order {0:?}: must be fifo, fence, relaxed or broken")]
    Order(String),
    /// No such name.
    #[error(
        "{0:?}: no setting has that name; there are seed, delay-us, signal-delay-us, late-read-us, pieces, \
         gbit, latency-us, window, count-after, lose, lost, patience-s, listen, port, counts, memory, log"
    )]
    Name(String),
    /// Not a value of this setting.
    #[error("{name}={value}: must be {expected}")]
    Value {
        /// Name of the setting.
        name: &'static str,
        /// The value that was given.
        value: String,
        /// The values that there are.
        expected: &'static str,
    },
}

impl Settings {
    /// An order without delays, and nothing else.
    pub const fn new(order: Order) -> Self {
        Self {
            order,
            seed: 1,
            delay_us: 0,
            signal_delay_us: 0,
            late_read_us: 0,
            pieces: 0,
            gbit: 0,
            latency_us: 0,
            window: 0,
            count_after: 0,
            lose: None,
            lost: Lost::Error,
            patience_s: 120,
            listen: Ipv4Addr::LOCALHOST,
            port: 0,
            counts: None,
            without_gpu: false,
            log: false,
        }
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), SettingsError> {
        const US: &str = "a number of microseconds up to 60,000,000";
        const NUMBER: &str = "a number";
        match name {
            "seed" => self.seed = read("seed", value, NUMBER, |_| true)?,
            "delay-us" => self.delay_us = read("delay-us", value, US, is_delay)?,
            "signal-delay-us" => {
                self.signal_delay_us = read("signal-delay-us", value, US, is_delay)?;
            }
            "late-read-us" => self.late_read_us = read("late-read-us", value, US, is_delay)?,
            "latency-us" => self.latency_us = read("latency-us", value, US, is_delay)?,
            "pieces" => {
                let expected = "a number of bytes, a multiple of 8";
                self.pieces = read("pieces", value, expected, |bytes| bytes % 8 == 0)?;
            }
            "gbit" => self.gbit = read("gbit", value, "Gb/s up to 1,000,000", |&g| g <= 1_000_000)?,
            "window" => self.window = read("window", value, NUMBER, |_| true)?,
            "count-after" => self.count_after = read("count-after", value, NUMBER, |_| true)?,
            "patience-s" => {
                let expected = "a number of seconds up to 86,400";
                self.patience_s = read("patience-s", value, expected, |&s| s <= 86_400)?;
            }
            "lose" => {
                let victim = victim(value).ok_or_else(|| {
                    let expected = "PE:AFTER:HOW, HOW being hang, close or exit";
                    refused("lose", value, expected)
                })?;
                self.lose = Some(victim);
            }
            "lost" => {
                self.lost = one_of("lost", value, "error or ignore", |value| match value {
                    "error" => Some(Lost::Error),
                    "ignore" => Some(Lost::Ignore),
                    _ => None,
                })?;
            }
            "listen" => self.listen = read("listen", value, "an IPv4 address", |_| true)?,
            "port" => self.port = read("port", value, "a number up to 65,535", |_| true)?,
            "counts" => self.counts = Some(PathBuf::from(value)),
            "memory" => {
                self.without_gpu = one_of("memory", value, "gpu or host", |value| match value {
                    "gpu" => Some(false),
                    "host" => Some(true),
                    _ => None,
                })?;
            }
            "log" => self.log = read("log", value, "true or false", |_| true)?,
            _ => return Err(SettingsError::Name(name.into())),
        }
        Ok(())
    }
}

impl FromStr for Settings {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let mut words = text.split(',');
        let order = match words.next().unwrap_or_default() {
            "fifo" => Order::Fifo,
            "fence" => Order::Fence,
            "relaxed" => Order::Relaxed,
            "broken" => Order::Broken,
            other => return Err(SettingsError::Order(other.into())),
        };
        let mut settings = Self::new(order);
        for word in words {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            settings.set(name, value)?;
        }
        Ok(settings)
    }
}

const fn is_delay(us: &u64) -> bool {
    *us <= LONGEST_US
}

fn refused(name: &'static str, value: &str, expected: &'static str) -> SettingsError {
    SettingsError::Value {
        name,
        value: value.into(),
        expected,
    }
}

fn read<T: FromStr>(
    name: &'static str,
    value: &str,
    expected: &'static str,
    is_fine: impl Fn(&T) -> bool,
) -> Result<T, SettingsError> {
    let read = value.parse().ok().filter(is_fine);
    read.ok_or_else(|| refused(name, value, expected))
}

fn one_of<T>(
    name: &'static str,
    value: &str,
    expected: &'static str,
    find: impl Fn(&str) -> Option<T>,
) -> Result<T, SettingsError> {
    find(value).ok_or_else(|| refused(name, value, expected))
}

fn victim(text: &str) -> Option<Victim> {
    let mut words = text.split(':');
    let (pe, after) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let how = match words.next()? {
        "hang" => Loss::Hang,
        "close" => Loss::Close,
        "exit" => Loss::Exit,
        _ => return None,
    };
    words.next().is_none().then_some(Victim { pe, after, how })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read() {
        assert_eq!("fence".parse(), Ok(Settings::new(Order::Fence)));
        let line = "relaxed,delay-us=150,pieces=8,lose=1:300:close,lost=ignore,listen=10.0.0.1,memory=host";
        let expected = Settings {
            delay_us: 150,
            pieces: 8,
            lose: Some(Victim {
                pe: 1,
                after: 300,
                how: Loss::Close,
            }),
            lost: Lost::Ignore,
            listen: Ipv4Addr::new(10, 0, 0, 1),
            without_gpu: true,
            ..Settings::new(Order::Relaxed)
        };
        assert_eq!(line.parse(), Ok(expected));
    }

    #[test]
    fn it_listens_on_loopback_unless_told_otherwise() {
        assert!(Settings::new(Order::Fifo).listen.is_loopback());
    }

    #[test]
    fn what_is_none_is_named() {
        for (line, part) in [
            ("", "order \"\""),
            ("strict", "order \"strict\""),
            ("fifo,delay=1", "\"delay\": no setting"),
            ("fifo,", "\"\": no setting"),
            ("fifo,delay-us=-1", "delay-us=-1"),
            ("fifo,delay-us=60000001", "delay-us=60000001"),
            (
                "fifo,pieces=12",
                "pieces=12: must be a number of bytes, a multiple of 8",
            ),
            ("fifo,lose=1:2", "lose=1:2"),
            ("fifo,lose=1:2:hang:3", "lose=1:2:hang:3"),
            ("fifo,lost=", "lost="),
            ("fifo,port=65536", "port=65536"),
            ("fifo,listen=::1", "listen=::1"),
        ] {
            let error = line.parse::<Settings>().unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
