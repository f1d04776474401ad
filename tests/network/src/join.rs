//! The meeting of PEs: each listens, tells the others where by NVSHMEM's bootstrap, and connects to all.
//!
//! A connection begins with a greeting that has the token of the PE that it is for. Who does not know it is
//! turned away, and the PE goes on waiting.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::NetworkError;
use crate::frame::VERSION;
use crate::link::Link;
use crate::settings::Settings;

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(20);
/// Longest wait for all PEs.
const MEET: Duration = Duration::from_secs(60);
/// Bytes that each PE tells all others.
const PLACE: usize = 28;
/// Bytes of a greeting.
const GREETING: usize = 24;
/// Most connections at once that have not sent their greeting.
const MOST_STRANGERS: usize = 1_024;

type Token = [u8; 16];

/// Address and token of a PE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    version: u32,
    address: Ipv4Addr,
    /// 0: it could not listen.
    port: u16,
    token: Token,
}

impl Place {
    fn write(&self) -> [u8; PLACE] {
        let mut bytes = [0; PLACE];
        bytes[..4].copy_from_slice(&self.version.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.address.octets());
        bytes[8..10].copy_from_slice(&self.port.to_le_bytes());
        bytes[12..].copy_from_slice(&self.token);
        bytes
    }

    fn read(bytes: &[u8; PLACE]) -> Self {
        let (version, rest) = bytes.split_first_chunk().unwrap_or((&[0; 4], &[]));
        let (address, rest) = rest.split_first_chunk::<4>().unwrap_or((&[0; 4], &[]));
        let (port, rest) = rest.split_first_chunk().unwrap_or((&[0; 2], &[]));
        Self {
            version: u32::from_le_bytes(*version),
            address: Ipv4Addr::from(*address),
            port: u16::from_le_bytes(*port),
            token: rest.last_chunk().copied().unwrap_or_default(),
        }
    }
}

/// The connections of a PE: to all PEs, and from all, by number.
pub(crate) struct Links {
    pub(crate) outgoing: Vec<Link>,
    pub(crate) incoming: Vec<Link>,
}

/// Meets all PEs; `gather` sends bytes to all and returns all, by number. Collective.
pub(crate) fn meet(
    settings: &Settings,
    [pe, pes]: [usize; 2],
    gather: impl FnOnce(&[u8], usize) -> Result<Vec<u8>, NetworkError>,
) -> Result<Links, NetworkError> {
    let listener = listen(settings, pe);
    let mut token = Token::default();
    getrandom::fill(&mut token).map_err(io::Error::other)?;
    let port = match &listener {
        Ok(listener) => listener.local_addr()?.port(),
        // The others are told.
        Err(_) => 0,
    };
    let own = Place {
        version: VERSION,
        address: settings.listen,
        port,
        token,
    };
    let all = gather(&own.write(), pes)?;
    let listener = listener?;
    let (places, _) = all.as_chunks::<PLACE>();
    let places: Vec<Place> = places.iter().map(Place::read).collect();
    for (other, place) in places.iter().enumerate() {
        if place.version != VERSION {
            return Err(NetworkError::Version(other, place.version, VERSION));
        }
        if place.port == 0 {
            return Err(NetworkError::DoesNotListen(other));
        }
    }
    let connect = |(other, place): (usize, &Place)| connect(pe, other, place);
    let outgoing = places.iter().enumerate().map(connect);
    let outgoing = outgoing.collect::<Result<Vec<_>, _>>()?;
    let incoming = accept(&listener, token, pes, MEET)?;
    Ok(Links { outgoing, incoming })
}

fn listen(settings: &Settings, pe: usize) -> Result<TcpListener, NetworkError> {
    let port = match settings.port {
        0 => Some(0),
        first => u16::try_from(pe).ok().and_then(|pe| first.checked_add(pe)),
    };
    let address = SocketAddrV4::new(settings.listen, port.unwrap_or(settings.port));
    let none = || io::Error::other(format!("PE {pe} would need a port above 65,535"));
    let bound = port
        .ok_or_else(none)
        .and_then(|_| TcpListener::bind(address));
    bound.map_err(|error| NetworkError::Listen(address, error))
}

fn connect(pe: usize, other: usize, place: &Place) -> Result<Link, NetworkError> {
    let address = SocketAddrV4::new(place.address, place.port);
    let connected = || {
        let mut stream = TcpStream::connect_timeout(&address.into(), CONNECT)?;
        stream.set_write_timeout(Some(CONNECT))?;
        stream.write_all(&greeting(pe, place.token))?;
        Link::new(stream)
    };
    connected().map_err(|error| NetworkError::Connect(other, address, error))
}

fn greeting(pe: usize, token: Token) -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
    bytes[4..8].copy_from_slice(&(pe as u32).to_le_bytes());
    bytes[8..].copy_from_slice(&token);
    bytes
}

/// A connection whose greeting has not come.
struct Stranger {
    stream: TcpStream,
    bytes: [u8; GREETING],
    filled: usize,
}

/// Outcome of a look at a stranger.
enum Met {
    Waits(Stranger),
    Pe(usize, TcpStream),
    Nobody,
}

impl Stranger {
    fn look(mut self, token: Token) -> Met {
        while self.filled < GREETING {
            match self.stream.read(&mut self.bytes[self.filled..]) {
                Ok(0) => return Met::Nobody,
                Ok(bytes) => self.filled += bytes,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return Met::Waits(self),
                    ErrorKind::Interrupted => {}
                    _ => return Met::Nobody,
                },
            }
        }
        let pe = self.bytes[4..8].iter().rev();
        let pe = pe.fold(0, |pe, byte| pe << 8 | usize::from(*byte));
        if self.bytes == greeting(pe, token) {
            Met::Pe(pe, self.stream)
        } else {
            Met::Nobody
        }
    }
}

/// Waits for a connection from each PE.
fn accept(
    listener: &TcpListener,
    token: Token,
    pes: usize,
    within: Duration,
) -> Result<Vec<Link>, NetworkError> {
    listener.set_nonblocking(true)?;
    let limit = Instant::now() + within;
    let mut found: Vec<Option<Link>> = (0..pes).map(|_| None).collect();
    let mut strangers: Vec<Stranger> = Vec::new();
    loop {
        while strangers.len() < MOST_STRANGERS {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // It went away, or was interrupted.
                Err(error) if is_of_one(&error) => continue,
                Err(error) => return Err(error.into()),
            };
            stream.set_nonblocking(true)?;
            strangers.push(Stranger {
                stream,
                bytes: [0; GREETING],
                filled: 0,
            });
        }
        for stranger in std::mem::take(&mut strangers) {
            match stranger.look(token) {
                Met::Waits(stranger) => strangers.push(stranger),
                Met::Pe(pe, stream) => {
                    if let Some(place @ None) = found.get_mut(pe) {
                        *place = Some(Link::new(stream)?);
                    }
                }
                Met::Nobody => {}
            }
        }
        if found.iter().all(Option::is_some) {
            return Ok(found.into_iter().flatten().collect());
        }
        if Instant::now() > limit {
            let missing = found.iter().enumerate().filter(|(_, link)| link.is_none());
            return Err(NetworkError::Missing(missing.map(|(pe, _)| pe).collect()));
        }
        thread::sleep(Duration::from_micros(200));
    }
}

/// Does PE 1's part of the meeting of two: returns what both PEs told, and a thread that returns the
/// connections to and from PE 0.
#[cfg(test)]
pub(crate) fn meet_by_hand(first: &[u8]) -> (Vec<u8>, thread::JoinHandle<(TcpStream, TcpStream)>) {
    let place = Place::read(first.try_into().expect("the bytes of a place"));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let own = Place { port, ..place };
    let met = thread::spawn(move || {
        let mut to = TcpStream::connect((place.address, place.port)).expect("PE 0 listens");
        to.write_all(&greeting(1, place.token)).expect("PE 0 reads");
        let (mut from, _) = listener.accept().expect("PE 0 connects");
        from.read_exact(&mut [0; GREETING]).expect("PE 0 greets");
        (to, from)
    });
    ([first, &own.write()].concat(), met)
}

/// Whether an error is of one connection, not of the listener.
fn is_of_one(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Interrupted | ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Order;

    fn listener() -> (TcpListener, SocketAddrV4) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))
    }

    #[test]
    fn a_place_is_read_as_it_was_written() {
        let place = Place {
            version: 7,
            address: Ipv4Addr::new(1, 2, 3, 4),
            port: 0x5678,
            token: std::array::from_fn(|i| i as u8),
        };
        assert_eq!(Place::read(&place.write()), place);
    }

    #[test]
    fn a_port_that_is_in_use_is_named_and_the_others_are_told() {
        let (_listener, address) = listener();
        let settings = Settings {
            port: address.port(),
            ..Settings::new(Order::Fifo)
        };
        let mut told = Vec::new();
        let refused = meet(&settings, [0, 1], |own, _| {
            told = own.to_vec();
            Ok(own.to_vec())
        });
        let text = refused.err().unwrap().to_string();
        assert!(
            text.starts_with(&format!("cannot listen at {address}: ")),
            "{text}"
        );
        assert_eq!(Place::read(&told.try_into().unwrap()).port, 0);
        let above = Settings {
            port: u16::MAX,
            ..Settings::new(Order::Fifo)
        };
        let text = listen(&above, 1).unwrap_err().to_string();
        assert!(text.contains("above 65,535"), "{text}");
    }

    #[test]
    fn a_pe_that_cannot_listen_or_has_another_version_is_named() {
        let settings = Settings::new(Order::Fifo);
        let with = |change: fn(&mut Place)| {
            let refused = meet(&settings, [0, 2], |own, _| {
                let mut other = Place::read(own.try_into().unwrap());
                change(&mut other);
                Ok([own, &other.write()].concat())
            });
            refused.err().unwrap().to_string()
        };
        assert!(with(|other| other.port = 0).starts_with("PE 1 does not listen"));
        assert_eq!(
            with(|other| other.version = 9),
            "PE 1 has version 9 of the network, this PE has 1"
        );
    }

    #[test]
    fn strangers_are_turned_away_and_do_not_hold_up_a_pe() {
        let (listener, address) = listener();
        let token = [5; 16];
        let send = |bytes: &[u8]| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(bytes).unwrap();
            stream
        };
        let mut wrong = token;
        wrong[15] += 1;
        // One says nothing, one half, and others know the wrong token, version or number.
        let strangers = [
            send(&[]),
            send(&greeting(0, token)[..GREETING - 1]),
            send(&greeting(0, wrong)),
            send(&{
                let mut other = greeting(0, token);
                other[0] += 1;
                other
            }),
            send(&greeting(usize::from(u16::MAX), token)),
        ];
        drop(send(&greeting(0, token)[..3]));
        let (first, mut second) = (send(&greeting(1, token)), send(&greeting(0, token)));
        // A second connection of one PE does not take the place of the first.
        let again = send(&greeting(0, token));
        let mut links = accept(&listener, token, 2, Duration::from_secs(5)).unwrap();
        assert_eq!(links.len(), 2);
        second.write_all(&[1]).unwrap();
        let limit = Instant::now() + Duration::from_secs(5);
        while !links[0].fill() {
            assert!(Instant::now() < limit, "PE 0's place is a stranger's");
        }
        drop((strangers, first, second, again));
        let missing = accept(&listener, token, 1, Duration::ZERO);
        let text = missing.err().unwrap().to_string();
        assert_eq!(text, "PEs [0] have not connected");
    }
}
