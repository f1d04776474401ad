//! Facts that speak for a choice, or against.

use std::fmt;

/// Something that is so, or is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    holds: bool,
    text: String,
}

/// A number and what is counted.
#[derive(Clone, Copy, Debug)]
pub struct Count<'a> {
    value: u64,
    of: &'a str,
}

/// A number, for a [`Fact`]; `of` says what it counts, or the constant's name.
pub fn count(value: impl Into<u64>, of: &str) -> Count<'_> {
    let value = value.into();
    Count { value, of }
}

impl fmt::Display for Count<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.value, self.of)
    }
}

impl Fact {
    /// `yes` if it holds, else `no`.
    pub fn new(holds: bool, yes: impl Into<String>, no: impl Into<String>) -> Self {
        let text = if holds { yes.into() } else { no.into() };
        Self { holds, text }
    }

    /// That `left` is at most `right`.
    pub fn at_most(left: Count<'_>, right: Count<'_>) -> Self {
        let no = format!("{left} > {right}");
        Self::new(left.value <= right.value, format!("{left} <= {right}"), no)
    }

    /// That `left` is at least `right`.
    pub fn at_least(left: Count<'_>, right: Count<'_>) -> Self {
        let no = format!("{left} < {right}");
        Self::new(left.value >= right.value, format!("{left} >= {right}"), no)
    }

    /// That `left` is more than `right`.
    pub fn more(left: Count<'_>, right: Count<'_>) -> Self {
        let no = format!("{left} <= {right}");
        Self::new(left.value > right.value, format!("{left} > {right}"), no)
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Whether a choice was made, and the facts that made it.
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

    /// Of a yes the first facts that suffice; of a no one fact of each that do not.
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
        let (yes, no) = (count(2u32, "tokens"), count(3u32, "MOST"));
        let asked = |answer| {
            let facts = [Fact::at_most(yes, no), Fact::more(yes, no)];
            Question::new("few", answer, facts).or([Fact::at_least(no, yes)])
        };
        assert!(asked(true).agrees());
        assert!(!asked(false).agrees());
        assert_eq!(asked(true).to_string(), "few? yes: 3 MOST >= 2 tokens");
        let asked = Question::new("few", false, [Fact::at_most(yes, no), Fact::more(yes, no)]);
        assert!(asked.agrees());
        assert_eq!(asked.to_string(), "few? no: 2 tokens <= 3 MOST");
    }
}
