//! Report of a survivor, and what must hold of it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Longest time that leaving takes.
const CLOSE: Duration = Duration::from_secs(5);
/// Longest time from the error until the survivors have passed a round in a new group, and from then until a
/// process has ended.
pub(super) const RECOVERY: Duration = Duration::from_secs(5);

/// A call, how long it took, and what came of it.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Call {
    pub(super) ms: u64,
    /// Empty: it succeeded.
    pub(super) error: String,
}

impl Call {
    fn is_late(&self) -> bool {
        Duration::from_millis(self.ms) > CLOSE
    }

    fn outcome(&self) -> &str {
        if self.error.is_empty() {
            "ok"
        } else {
            &self.error
        }
    }
}

/// Events that a survivor met.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Report {
    pub(super) rank: u32,
    /// Whether the first error was one that says that a peer is lost, by its type.
    pub(super) is_typed: bool,
    /// The rank that it says was lost, by its fields.
    pub(super) named: Option<u32>,
    /// The first error.
    pub(super) error: String,
    /// Times of the last round's launch, and of the error: nanoseconds since 1970.
    pub(super) launched_ns: u64,
    pub(super) told_ns: u64,
    /// Shape of the communicator.
    pub(super) close: Call,
    pub(super) leave_group: Call,
    /// A further exchange with the group.
    pub(super) exchange: Call,
    /// A further communicator on the group, where one was tried.
    pub(super) communicator: Option<Call>,
    /// The survivors, somewhere else.
    pub(super) meet: Call,
    /// A group of them, and a round in it, where processes can be in another group.
    pub(super) again: Option<Call>,
    /// All of these calls.
    pub(super) recovery_ms: u64,
}

/// Kill of a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kill {
    pub(super) victim: u32,
    /// Time of the kill: nanoseconds since 1970.
    pub(super) ns: u64,
    pub(super) deadline: Duration,
    /// Whether all survivors meet again: not if NVSHMEM has ended some.
    pub(super) meets: bool,
    /// Whether survivors form a new group and end in order. In processes that have been in an
    /// NVSHMEM job, that is NVSHMEM's business.
    pub(super) recovers: bool,
}

impl Kill {
    /// Time from the later of the kill and the rank's last launch until it was told.
    fn wait_of(&self, report: &Report) -> Duration {
        let since = self.ns.max(report.launched_ns);
        Duration::from_nanos(report.told_ns.saturating_sub(since))
    }

    fn is_named(&self, report: &Report) -> bool {
        report.named == Some(self.victim)
    }

    /// Tells what a survivor names that is neither the victim nor another survivor that gave up. One of
    /// those may be named: where deadlines end at the same moment, a rank may miss one that has not
    /// yet told on whom it gave up.
    fn wrong_name(&self, report: &Report, reports: &[Report]) -> Option<String> {
        let gave_up = |rank| reports.iter().any(|r| r.rank == rank && r.named.is_some());
        let is_right = |rank| rank == self.victim || (rank != report.rank && gave_up(rank));
        if report.named.is_some_and(is_right) {
            return None;
        }
        let whom = match report.named {
            Some(rank) => format!("rank {rank}"),
            None => String::from("nobody"),
        };
        let (rank, victim) = (report.rank, self.victim);
        let error = &report.error;
        Some(format!(
            "rank {rank}: names {whom}, not rank {victim} or one that gave up: {error}"
        ))
    }

    /// Lists what is wrong with the reports.
    pub(super) fn problems(&self, reports: &[Report]) -> Vec<String> {
        let mut problems: Vec<String> = reports
            .iter()
            .flat_map(|report| self.problems_of(report))
            .collect();
        problems.extend(reports.iter().filter_map(|r| self.wrong_name(r, reports)));
        if !reports.is_empty() && !reports.iter().any(|report| self.is_named(report)) {
            let told: Vec<_> = reports.iter().map(|report| report.error.as_str()).collect();
            let (victim, told) = (self.victim, told.join(" / "));
            problems.push(format!("nobody names rank {victim}: {told}"));
        }
        problems
    }

    fn problems_of(&self, report: &Report) -> Vec<String> {
        let mut problems = Vec::new();
        let mut say = |problem: String| problems.push(format!("rank {}: {problem}", report.rank));
        if !report.is_typed {
            say(format!("not an error of a lost peer: {}", report.error));
        }
        let (waited, most) = (self.wait_of(report), self.deadline.mul_f64(1.1));
        if waited > most {
            say(format!(
                "was told after {waited:?}, at most {most:?}: {}",
                report.error
            ));
        }
        let calls = [
            ("closing the communicator", Some(&report.close)),
            ("leaving the group", Some(&report.leave_group)),
            ("an exchange after the loss", Some(&report.exchange)),
            (
                "a communicator after the loss",
                report.communicator.as_ref(),
            ),
            (
                "meeting the other survivors",
                self.meets.then_some(&report.meet),
            ),
        ];
        for (name, call) in calls {
            if let Some(call) = call.filter(|call| call.is_late()) {
                say(format!("{name} took {} ms: {}", call.ms, call.outcome()));
            }
        }
        if self.meets && !report.meet.error.is_empty() {
            say(format!("the survivors did not meet: {}", report.meet.error));
        }
        if self.recovers {
            problems.extend(self.problem_of_recovery(report));
        }
        problems
    }

    /// Lists what is wrong with the group that the survivors formed.
    fn problem_of_recovery(&self, report: &Report) -> Option<String> {
        let (rank, ms) = (report.rank, report.recovery_ms);
        let problem = match &report.again {
            None => String::from("no new group was formed"),
            Some(call) if !call.error.is_empty() => format!("a new group: {}", call.error),
            Some(_) if Duration::from_millis(ms) > RECOVERY => {
                format!("a round in a new group came {ms} ms after the error")
            }
            Some(_) => return None,
        };
        Some(format!("rank {rank}: {problem}"))
    }

    /// Figures in a line.
    pub(super) fn figures(&self, reports: &[Report]) -> String {
        let slowest = |of: fn(&Report) -> u64| reports.iter().map(of).max().unwrap_or(0);
        let waits = reports
            .iter()
            .map(|report| self.wait_of(report).as_millis());
        let names = reports.iter().filter(|report| self.is_named(report));
        let mut text = format!(
            "{} survivors told within {} ms, {} of them by its name; close {} ms, leaving the group {} ms, \
             meeting again {} ms",
            reports.len(),
            waits.max().unwrap_or(0),
            names.count(),
            slowest(|report| report.close.ms),
            slowest(|report| report.leave_group.ms),
            slowest(|report| report.meet.ms),
        );
        if let Some(report) = reports.first() {
            let calls = [
                ("close", Some(&report.close)),
                ("leaving the group", Some(&report.leave_group)),
                ("a further exchange", Some(&report.exchange)),
                ("a further communicator", report.communicator.as_ref()),
            ];
            for (name, call) in calls {
                if let Some(call) = call {
                    text += &format!("; rank {}, {name}: {}", report.rank, call.outcome());
                }
            }
        }
        if self.recovers {
            text += &format!(
                "; a round in a new group after {} ms",
                slowest(|report| report.recovery_ms)
            );
        } else {
            text += "; no new NVSHMEM group was made in a process that had one";
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn kill() -> Kill {
        Kill {
            victim: 2,
            ns: 5000 * MS,
            deadline: Duration::from_millis(1000),
            recovers: true,
            meets: true,
        }
    }

    /// Launched before the kill, told at the last moment.
    fn good() -> Report {
        Report {
            rank: 1,
            is_typed: true,
            named: Some(2),
            error: "rank 1 gave up: rank 2 did not answer".into(),
            launched_ns: 4900 * MS,
            told_ns: 6100 * MS,
            again: Some(Call::default()),
            ..Report::default()
        }
    }

    fn problems(report: Report) -> String {
        kill().problems(&[report]).join("; ")
    }

    #[test]
    fn a_survivor_that_is_told_in_time_is_fine() {
        assert_eq!(problems(good()), "");
        let launched_later = Report {
            launched_ns: 5200 * MS,
            told_ns: 6300 * MS,
            ..good()
        };
        assert_eq!(problems(launched_later), "");
    }

    #[test]
    fn a_millisecond_more_is_late() {
        let late = Report {
            told_ns: 6101 * MS,
            ..good()
        };
        let text = problems(late);
        assert!(text.contains("rank 1: was told after 1.101s"), "{text}");
    }

    /// Text of what is wrong with two survivors, ranks 1 and 3, that name these. Their texts have the
    /// victim's number.
    fn problems_of_naming(first: Option<u32>, second: Option<u32>) -> String {
        let reports = [(1, first), (3, second)].map(|(rank, named)| Report {
            rank,
            named,
            ..good()
        });
        kill().problems(&reports).join("; ")
    }

    #[test]
    fn each_survivor_names_the_victim_or_one_that_gave_up() {
        assert_eq!(problems_of_naming(Some(2), Some(2)), "");
        assert_eq!(problems_of_naming(Some(2), Some(1)), "");
        let cases = [
            (Some(2), Some(0), "rank 3: names rank 0"),
            (Some(2), Some(3), "rank 3: names rank 3"),
            (Some(2), None, "rank 3: names nobody"),
            (None, Some(1), "rank 3: names rank 1"),
            (Some(3), Some(1), "nobody names rank 2"),
        ];
        for (first, second, wanted) in cases {
            let text = problems_of_naming(first, second);
            assert!(text.contains(wanted), "{text}; wanted: {wanted}");
        }
    }

    #[test]
    fn what_else_is_wrong_is_named() {
        let late = Call {
            ms: 5001,
            error: "it hung".into(),
        };
        let cases = [
            (
                Report {
                    is_typed: false,
                    ..good()
                },
                "not an error of a lost peer",
            ),
            (
                Report {
                    named: Some(22),
                    ..good()
                },
                "nobody names rank 2",
            ),
            (
                Report {
                    close: late.clone(),
                    ..good()
                },
                "closing the communicator took 5001 ms: it hung",
            ),
            (
                Report {
                    leave_group: late.clone(),
                    ..good()
                },
                "leaving the group took 5001 ms",
            ),
            (
                Report {
                    communicator: Some(late),
                    ..good()
                },
                "a communicator after the loss took 5001 ms",
            ),
            (
                Report {
                    meet: Call {
                        ms: 1,
                        error: "nobody came".into(),
                    },
                    ..good()
                },
                "the survivors did not meet: nobody came",
            ),
        ];
        for (report, wanted) in cases {
            let text = problems(report);
            assert!(text.contains(wanted), "{text}; wanted: {wanted}");
        }
    }

    #[test]
    fn a_new_group_of_the_survivors_is_judged() {
        let cases = [
            (
                Report {
                    again: None,
                    ..good()
                },
                "rank 1: no new group was formed",
            ),
            (
                Report {
                    again: Some(Call {
                        ms: 1,
                        error: "no peer access".into(),
                    }),
                    ..good()
                },
                "rank 1: a new group: no peer access",
            ),
            (
                Report {
                    recovery_ms: 5001,
                    ..good()
                },
                "a round in a new group came 5001 ms after the error",
            ),
        ];
        for (report, wanted) in cases {
            let text = problems(report);
            assert!(text.contains(wanted), "{text}; wanted: {wanted}");
        }
        let alone = Kill {
            recovers: false,
            meets: false,
            ..kill()
        };
        let met_nobody = Report {
            meet: Call {
                ms: 20_000,
                error: "nobody came".into(),
            },
            ..good()
        };
        assert_eq!(alone.problems(&[met_nobody]).join("; "), "");
        let told_only = Kill {
            recovers: false,
            ..kill()
        };
        let none = Report {
            again: None,
            ..good()
        };
        assert_eq!(told_only.problems(&[none]).join("; "), "");
    }
}
