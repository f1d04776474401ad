//! The experts that tokens choose, as the command line says it.

use std::fmt;
use std::str::FromStr;

use ferry_reference::workload::Routing;

/// A routing, by its name on the command line and in records.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutingChoice(pub Routing);

/// The expert that all tokens choose with `hot`.
const HOT_EXPERT: usize = 0;

impl RoutingChoice {
    /// Fails if these experts cannot be routed to so.
    ///
    /// # Errors
    /// The experts make no such groups, or a token's groups have too few of them.
    pub fn check(&self, experts: usize, top_k: usize) -> anyhow::Result<()> {
        if let Routing::Grouped { groups, chosen } = self.0 {
            anyhow::ensure!(
                experts.is_multiple_of(groups),
                "--routing {self}: {experts} experts do not make {groups} groups of one size"
            );
            let most = chosen * (experts / groups);
            anyhow::ensure!(
                top_k <= most,
                "--routing {self}: a token's groups have {most} experts, and --top-k is {top_k}"
            );
        }
        Ok(())
    }
}

impl FromStr for RoutingChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once(':').unwrap_or((text, ""));
        let routing = match (name, value) {
            ("uniform", "") => Some(Routing::Uniform),
            ("hot", "") => Some(Routing::Hot { expert: HOT_EXPERT }),
            ("zipf", exponent) => exponent
                .parse()
                .ok()
                .filter(|exponent: &f64| exponent.is_finite() && *exponent >= 0.0)
                .map(|exponent| Routing::Zipf { exponent }),
            ("groups", numbers) => numbers.split_once('/').and_then(|(chosen, groups)| {
                let (chosen, groups) = (chosen.parse().ok()?, groups.parse().ok()?);
                (1..=groups)
                    .contains(&chosen)
                    .then_some(Routing::Grouped { groups, chosen })
            }),
            _ => None,
        };
        routing.map(Self).ok_or_else(|| {
            "none of uniform, zipf:EXPONENT (0 or more), hot, groups:CHOSEN/GROUPS (1 to all of them)"
                .to_owned()
        })
    }
}

impl fmt::Display for RoutingChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Routing::Zipf { exponent } => write!(formatter, "zipf:{exponent}"),
            Routing::Hot { .. } => formatter.write_str("hot"),
            Routing::Grouped { groups, chosen } => write!(formatter, "groups:{chosen}/{groups}"),
            _ => formatter.write_str("uniform"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for (name, routing) in [
            ("uniform", Routing::Uniform),
            ("zipf:0.5", Routing::Zipf { exponent: 0.5 }),
            ("zipf:1", Routing::Zipf { exponent: 1.0 }),
            ("hot", Routing::Hot { expert: 0 }),
            (
                "groups:4/8",
                Routing::Grouped {
                    groups: 8,
                    chosen: 4,
                },
            ),
        ] {
            let read: RoutingChoice = name.parse().unwrap();
            assert_eq!((&read.0, read.to_string()), (&routing, name.to_owned()));
        }
        for name in [
            "",
            "zipf",
            "zipf:-1",
            "zipf:inf",
            "hot:1",
            "groups:4",
            "groups:0/8",
            "groups:9/8",
        ] {
            assert!(name.parse::<RoutingChoice>().is_err(), "{name}");
        }
    }

    #[test]
    fn groups_fit_the_experts() {
        let refused = |name: &str, experts, top_k| {
            let routing: RoutingChoice = name.parse().unwrap();
            let checked = routing
                .check(experts, top_k)
                .map_err(|error| error.to_string());
            checked.err()
        };
        assert_eq!(refused("groups:4/8", 256, 8), None);
        assert_eq!(
            refused("groups:4/7", 256, 8).as_deref(),
            Some("--routing groups:4/7: 256 experts do not make 7 groups of one size")
        );
        assert_eq!(
            refused("groups:1/64", 256, 8).as_deref(),
            Some("--routing groups:1/64: a token's groups have 4 experts, and --top-k is 8")
        );
    }
}
