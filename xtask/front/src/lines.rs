//! Lines of a program that runs.

use std::io::{self, BufRead as _, BufReader, Read};
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// Time without a line, after a program's end, in which what it started may still hold its output.
const AFTER_END: Duration = Duration::from_millis(300);

/// A line of standard output, or of standard error.
pub(crate) enum Line {
    Out(String),
    Error(String),
}

/// Hands each line to `take` until the program has ended and nothing more comes. A process that the program
/// left behind may hold its output for ever: it is not waited for.
pub(crate) fn each(mut child: Child, mut take: impl FnMut(Line)) -> io::Result<ExitStatus> {
    let (send, lines) = channel();
    if let Some(out) = child.stdout.take() {
        read(out, send.clone(), Line::Out);
    }
    if let Some(error) = child.stderr.take() {
        read(error, send.clone(), Line::Error);
    }
    drop(send);
    loop {
        match lines.recv_timeout(AFTER_END) {
            Ok(line) => take(line),
            Err(RecvTimeoutError::Disconnected) => return child.wait(),
            Err(RecvTimeoutError::Timeout) => {
                if let Some(status) = child.try_wait()? {
                    rest(&lines).for_each(take);
                    return Ok(status);
                }
            }
        }
    }
}

/// Lines that are there.
fn rest(lines: &Receiver<Line>) -> impl Iterator<Item = Line> {
    lines.try_iter()
}

/// Reads a pipe to its end in a thread of its own. Bytes that are no text are replaced.
fn read(pipe: impl Read + Send + 'static, lines: Sender<Line>, kind: fn(String) -> Line) {
    thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut bytes = Vec::new();
        while pipe
            .read_until(b'\n', &mut bytes)
            .is_ok_and(|count| count > 0)
        {
            let line = String::from_utf8_lossy(&bytes);
            if lines
                .send(kind(line.trim_end_matches(['\n', '\r']).to_owned()))
                .is_err()
            {
                return;
            }
            bytes.clear();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::Instant;

    #[test]
    fn lines_come_as_text_and_what_a_program_leaves_behind_is_not_waited_for() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "printf 'a\\377b\\n'; echo c >&2; sleep 20 & exit 3"]);
        let begin = Instant::now();
        let child = shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut all = Vec::new();
        let status = each(child.unwrap(), |line| {
            all.push(match line {
                Line::Out(text) => format!("out {text}"),
                Line::Error(text) => format!("error {text}"),
            });
        });
        all.sort();
        assert_eq!(all, ["error c", "out a\u{fffd}b"]);
        assert_eq!(status.unwrap().code(), Some(3));
        assert!(begin.elapsed() < Duration::from_secs(15));
    }
}
