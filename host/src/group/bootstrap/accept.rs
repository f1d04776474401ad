//! Incoming connections of rank 0.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};

use super::peer::PAUSE;

/// Accepts connections and survives errors: they come from the network (accept(2) returns those of a pending
/// connection), or from a lack that may pass, as of file descriptors.
pub struct Entrance<'a> {
    listener: &'a TcpListener,
    /// Error of the last try, if it failed.
    pub failing: Option<io::Error>,
}

impl<'a> Entrance<'a> {
    pub fn new(listener: &'a TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let failing = None;
        Ok(Self { listener, failing })
    }

    /// Returns a connection; `None` after a pause if there is none.
    pub fn accept(&mut self) -> Option<(TcpStream, SocketAddr)> {
        self.taken(self.listener.accept())
    }

    fn taken<T>(&mut self, accepted: io::Result<T>) -> Option<T> {
        let failed = match accepted {
            Ok(come) => {
                self.failing = None;
                return Some(come);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => Some(error),
        };
        // Only once for a series of errors.
        if let (Some(error), None) = (&failed, &self.failing) {
            tracing::warn!(%error, "a connection to the rendezvous was not accepted; trying again");
        }
        self.failing = failed;
        std::thread::sleep(PAUSE);
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn errors_of_the_network_and_lacks_are_passed_over_with_a_pause() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut entrance = Entrance::new(&listener).unwrap();
        // Linux: EINTR, EPERM, ENFILE, EMFILE, EPROTO, ENETDOWN, ENETUNREACH, ECONNABORTED, ENOBUFS,
        // EHOSTUNREACH.
        for number in [4, 1, 23, 24, 71, 100, 101, 103, 105, 113] {
            let start = Instant::now();
            let failed = entrance.taken::<()>(Err(io::Error::from_raw_os_error(number)));
            assert_eq!(failed, None);
            let failing = entrance.failing.as_ref();
            assert_eq!(failing.and_then(io::Error::raw_os_error), Some(number));
            assert!(start.elapsed() >= PAUSE);
        }
        assert_eq!(entrance.taken(Ok(7)), Some(7));
        assert!(entrance.failing.is_none());
        assert!(entrance.accept().is_none() && entrance.failing.is_none());
    }
}
