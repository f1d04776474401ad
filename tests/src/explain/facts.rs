//! Facts that speak for a choice, or against.

use std::fmt;

/// Something that is so, or is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    holds: bool,
    text: String,
}

/// A comparison of two numbers as a [`Fact`]: each with what it counts, or with the constant's name.
macro_rules! fact {
    (@ $left:expr, $l:expr, $op:tt, $no:tt, $right:expr, $r:expr) => {{
        let (left, l, right, r) = (u64::from($left), $l, u64::from($right), $r);
        let text = |op: &str| format!("{left} {l} {op} {right} {r}");
        Fact::new(left $op right, text(stringify!($op)), text(stringify!($no)))
    }};
    ($left:expr, $l:expr; at most $right:expr, $r:expr) => { fact!(@ $left, $l, <=, >, $right, $r) };
    ($left:expr, $l:expr; at least $right:expr, $r:expr) => { fact!(@ $left, $l, >=, <, $right, $r) };
    ($left:expr, $l:expr; more than $right:expr, $r:expr) => { fact!(@ $left, $l, >, <=, $right, $r) };
}
pub(super) use fact;

impl Fact {
    /// Tells `yes` if it holds, else `no`.
    pub fn new(holds: bool, yes: impl Into<String>, no: impl Into<String>) -> Self {
        let text = if holds { yes.into() } else { no.into() };
        Self { holds, text }
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A choice, whether it was made, and the facts that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The choice.
    pub choice: &'static str,
    /// Whether the tactics have made it.
    pub answer: bool,
    /// It is made if all facts of one of these hold.
    grounds: Vec<Vec<Fact>>,
}

impl Question {
    /// Whether the tactics have made `choice`, for which all `facts` must hold.
    pub fn new(choice: &'static str, answer: bool, facts: impl Into<Vec<Fact>>) -> Self {
        Self {
            choice,
            answer,
            grounds: vec![facts.into()],
        }
    }

    /// The same, for which all of these `facts` are enough as well.
    #[must_use]
    pub fn or(mut self, facts: impl Into<Vec<Fact>>) -> Self {
        self.grounds.push(facts.into());
        self
    }

    /// Whether the facts say what the tactics have decided.
    pub fn agrees(&self) -> bool {
        self.answer
            == self
                .grounds
                .iter()
                .any(|facts| facts.iter().all(|fact| fact.holds))
    }

    /// First facts that suffice for a yes; of a no one fact of each that do not.
    fn told(&self) -> Vec<String> {
        let mut told: Vec<String> = Vec::new();
        for facts in &self.grounds {
            let failed = facts.iter().find(|fact| !fact.holds);
            match (self.answer, failed) {
                (true, None) => return facts.iter().map(Fact::to_string).collect(),
                (false, Some(fact)) if !told.contains(&fact.text) => told.push(fact.to_string()),
                _ => {}
            }
        }
        told
    }
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let answer = if self.answer { "yes" } else { "no" };
        write!(f, "{}? {answer}: {}", self.choice, self.told().join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_tells_what_suffices_or_what_is_missing() {
        let facts = || {
            let at_most = fact!(2_u32, "tokens"; at most 3_u32, "MOST");
            [at_most, fact!(2_u32, "tokens"; more than 3_u32, "MOST")]
        };
        let asked = |answer| {
            let enough = fact!(3_u32, "MOST"; at least 2_u32, "tokens");
            Question::new("few", answer, facts()).or([enough])
        };
        assert!(asked(true).agrees());
        assert!(!asked(false).agrees());
        assert_eq!(asked(true).to_string(), "few? yes: 3 MOST >= 2 tokens");
        let asked = Question::new("few", false, facts());
        assert!(asked.agrees());
        assert_eq!(asked.to_string(), "few? no: 2 tokens <= 3 MOST");
    }
}
