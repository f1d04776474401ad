//! The socket of a machine whose ranks are processes, as a file that rank 0 makes and removes.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io::{Error, ErrorKind};
use std::ops::ControlFlow;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{process, thread};

use crate::lane::send;
use crate::options::Options;
use crate::remote::{PAUSE, VERSION, hello, operation};

/// Longest wait for other ranks 0 that look at the path, which takes them moments.
const LOCKED: Duration = Duration::from_secs(2);
/// Most names that a folder is tried under.
const FOLDERS: u32 = 16;

/// The file of a socket, which is removed at the end unless another one is there by then.
pub(crate) struct Socket {
    path: PathBuf,
    is: (u64, u64),
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Without the lock only another rank 0 that comes between the look and the removal loses its file.
        let _lock = Lock::of(&self.path);
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|found| identity(&found) == self.is) {
            // Fails only if somebody else removed it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Device and inode.
fn identity(of: &Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
}

/// Lock of a path, among all ranks 0: a file beside it, which is removed at the end.
struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    fn of(path: &Path) -> Result<Self, String> {
        let path = beside(path, "lock");
        let refused = |reason: String| format!("its lock {}: {reason}", path.display());
        let until = Instant::now() + LOCKED;
        loop {
            let opened = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path);
            let file = opened.map_err(|error| match error.kind() {
                ErrorKind::NotFound => String::from("its folder does not exist"),
                _ => refused(error.to_string()),
            })?;
            let bytes = file.metadata().map_or(0, |found| found.len());
            if bytes > 0 {
                return Err(refused(format!("it has {bytes} bytes, and is no lock")));
            }
            match file.try_lock() {
                Ok(()) => {
                    let (ours, there) = (file.metadata(), fs::symlink_metadata(&path));
                    // Else the last holder has removed it meanwhile.
                    if let (Ok(ours), Ok(there)) = (ours, there)
                        && identity(&ours) == identity(&there)
                    {
                        return Ok(Self { path, _file: file });
                    }
                }
                Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
                Err(TryLockError::Error(error)) => return Err(refused(error.to_string())),
            }
            if Instant::now() >= until {
                return Err(refused(String::from("another process holds it")));
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before it is unlocked: others find that theirs is not the file any more.
        let _ = fs::remove_file(&self.path);
    }
}

/// The path with a suffix.
fn beside(path: &Path, suffix: impl std::fmt::Display) -> PathBuf {
    let mut beside: OsString = path.into();
    beside.push(format!(".{suffix}"));
    beside.into()
}

/// Listens at `path`, for this user alone from the first moment on. Only a socket at which nobody listens is
/// replaced. An error is its reason.
pub(crate) fn listen(path: &Path, options: &Options) -> Result<(UnixListener, Socket), String> {
    let _lock = Lock::of(path)?;
    make_room(path, options)?;
    let folder = make_folder(path)?;
    let inside = folder.join("s");
    let made = UnixListener::bind(&inside).and_then(|listener| {
        fs::set_permissions(&inside, Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        let is = identity(&fs::symlink_metadata(&inside)?);
        // Unlike a rename, this replaces nothing.
        fs::hard_link(&inside, path)?;
        let path = path.into();
        Ok((listener, Socket { path, is }))
    });
    // What cannot be removed is in nobody's way.
    let _ = fs::remove_dir_all(folder);
    made.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => in_use(),
        _ => error.to_string(),
    })
}

/// Removes a socket at `path` at which nobody listens; who listens there hears of this rank 0.
fn make_room(path: &Path, options: &Options) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            Err("there is a file, which is no socket".into())
        }
        Ok(_) => match UnixStream::connect(path) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(text)
            }
            Ok(other) => {
                // Without an answer it has ended, or goes on without this job's ranks.
                let _ = send(&other, &[operation::HELLO, VERSION], &hello(0, options, 0));
                Err(in_use())
            }
            Err(_) => Err(in_use()),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// Makes a folder for this user alone beside `path`, whose lock is held: of the process's number, or a later
/// one if a process that was killed has left its own.
fn make_folder(path: &Path) -> Result<PathBuf, String> {
    let mut names = (0..FOLDERS).map(|at| beside(path, process::id() + at));
    let made = names.try_fold(None, |_, folder| {
        match DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => ControlFlow::Break(Ok(folder)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                ControlFlow::Continue(Some(format!("{}: {error}", folder.display())))
            }
            Err(error) => ControlFlow::Break(Err(format!("{}: {error}", folder.display()))),
        }
    });
    match made {
        ControlFlow::Break(made) => made,
        ControlFlow::Continue(last) => Err(last.unwrap_or_default()),
    }
}

fn in_use() -> String {
    "it is in use by another job; give each a path of its own".into()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    fn listed(path: &Path) -> usize {
        fs::read_dir(path.parent().unwrap()).unwrap().count()
    }

    #[test]
    fn one_of_many_ranks_0_has_the_path_and_none_removes_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for _ in 0..50 {
            // At which nobody listens.
            drop(UnixListener::bind(&path).unwrap());
            let (begin, options) = (Barrier::new(8), Options::new(2, 1));
            let listen_at_once = || {
                begin.wait();
                listen(&path, &options)
            };
            let made: Vec<_> = thread::scope(|scope| {
                let each = [(); 8].map(|()| scope.spawn(listen_at_once));
                each.into_iter()
                    .filter_map(|each| each.join().unwrap().ok())
                    .collect()
            });
            assert_eq!(made.len(), 1);
            assert!(UnixStream::connect(&path).is_ok());
            drop(made);
            assert_eq!(listed(&path), 0);
        }
    }

    #[test]
    fn the_socket_of_another_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let (_listener, socket) = listen(&path, &Options::new(2, 1)).unwrap();
        // Made first, so that it has another inode.
        let other = beside(&path, "other");
        let _other = UnixListener::bind(&other).unwrap();
        fs::rename(&other, &path).unwrap();
        drop(socket);
        assert_eq!(listed(&path), 1);
    }

    #[test]
    fn folders_that_were_left_are_in_nobodys_way_but_files_named_like_locks_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for at in 0..2 {
            fs::create_dir(beside(&path, process::id() + at)).unwrap();
        }
        drop(listen(&path, &Options::new(2, 1)).unwrap());
        assert_eq!(listed(&path), 2);
        fs::write(beside(&path, "lock"), "data").unwrap();
        let refused = listen(&path, &Options::new(2, 1)).err().unwrap();
        assert!(
            refused.ends_with("s.lock: it has 4 bytes, and is no lock"),
            "{refused}"
        );
        assert_eq!(listed(&path), 3);
    }
}
