//! Errors of a configuration.

use std::fmt;

/// One field of a [`Config`](crate::Config) that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The field's name.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// The rule that the value breaks.
    pub rule: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, value, rule } = self;
        write!(f, "{field} is {value}, but {rule}")
    }
}

/// Everything that is wrong with a [`Config`](crate::Config), one line each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// All problems, in the order of the fields; never empty.
    pub problems: Vec<Problem>,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the configuration does not work:")?;
        self.problems
            .iter()
            .try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

impl std::error::Error for PlanError {}
