//! Seeded problems of many shapes and skews.
//!
//! The same [`WorkloadSpec`] always makes the same [`Problem`]. One rank's input
//! depends on the seed and the rank, not on the other ranks' tokens.

use std::iter;

use half::bf16;
use rand::Rng;
use rand::seq::{SliceRandom, index};
use rand_chacha::ChaCha8Rng;

use crate::problem::{Problem, ProblemError, RankInput, check_sizes};
use crate::random::{Purpose, stream};
use crate::threads;

/// Choice of experts by tokens.
///
/// Except for [`Routing::Duplicates`], no token lists an expert twice; if
/// `top_k` exceeds the number of experts, the slots left over are -1.
#[derive(Clone, Debug, PartialEq)]
pub enum Routing {
    /// Every expert is equally likely.
    Uniform,
    /// The expert of popularity rank `p` (1, 2, 3, ...) has probability
    /// proportional to `p^-exponent`; a token draws without replacement. Which
    /// experts are popular depends on the seed and is the same on every rank.
    Zipf {
        /// Finite, not negative; 0 is uniform, natural language has about 1.
        exponent: f64,
    },
    /// The first slot of every token is this expert, the other slots are -1.
    AllToOne {
        /// A global expert.
        expert: usize,
    },
    /// The first slot of every token is this expert, and the other slots are drawn uniformly from all others.
    Hot {
        /// A global expert.
        expert: usize,
    },
    /// The experts, in order, make groups of one size. Each token draws some of the groups, and its experts
    /// uniformly from theirs; slots beyond those are -1.
    Grouped {
        /// Number of groups, a divisor of that of the experts.
        groups: usize,
        /// Groups of a token, at least 1.
        chosen: usize,
    },
    /// Same as [`Routing::Uniform`], but each slot becomes -1 with this
    /// probability; tokens may be left without any expert.
    Holes {
        /// Probability of -1, 0 to 1.
        probability: f64,
    },
    /// Every token with two slots or more lists at least one expert twice.
    Duplicates,
}

/// Specification of a workload.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkloadSpec {
    /// Number of ranks, at least 1.
    pub ranks: usize,
    /// Number of experts over all ranks, a multiple of `ranks`.
    pub experts: usize,
    /// Top-k slots of a token, at least 1.
    pub top_k: usize,
    /// Elements of a token row, at least 1.
    pub hidden: usize,
    /// Number of tokens of every rank, `[ranks]`.
    pub tokens: Vec<usize>,
    /// Choice of experts by tokens.
    pub routing: Routing,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Generates the problem of a specification.
///
/// Rows are bf16 of either sign with magnitudes from 2^-8 up to 2^8, and about
/// one in 64 is 0 or -0; there is no infinity, NaN or subnormal. Weights are
/// positive, and those of a token sum to 1, including slots of -1: a result
/// that uses one of these is wrong.
///
/// # Panics
///
/// If the specification is invalid: see the fields.
pub fn generate(spec: WorkloadSpec) -> Problem {
    if let Err(error) = check(&spec) {
        panic!("not a valid workload: {error}");
    }
    let router = Router::new(&spec);
    let elements = spec.tokens.iter().sum::<usize>() * spec.hidden;
    let inputs = threads::each(0..spec.ranks, elements, |rank| {
        generate_rank(&spec, &router, rank)
    });
    Problem {
        ranks: spec.ranks,
        experts: spec.experts,
        top_k: spec.top_k,
        hidden: spec.hidden,
        inputs,
    }
}

fn check(spec: &WorkloadSpec) -> Result<(), ProblemError> {
    check_sizes(spec.ranks, spec.experts, spec.top_k, spec.hidden)?;
    if spec.tokens.len() != spec.ranks {
        return Err(ProblemError::Inputs {
            inputs: spec.tokens.len(),
            ranks: spec.ranks,
        });
    }
    match spec.routing {
        Routing::Zipf { exponent } => assert!(
            exponent.is_finite() && exponent >= 0.0,
            "Zipf exponent {exponent} is negative or not finite"
        ),
        Routing::AllToOne { expert } | Routing::Hot { expert } => assert!(
            expert < spec.experts,
            "all to expert {expert} of {}",
            spec.experts
        ),
        Routing::Grouped { groups, chosen } => assert!(
            (1..=groups).contains(&chosen) && spec.experts.is_multiple_of(groups),
            "{chosen} of {groups} groups of {} experts",
            spec.experts
        ),
        Routing::Holes { probability } => assert!(
            (0.0..=1.0).contains(&probability),
            "probability {probability} of a hole"
        ),
        Routing::Uniform | Routing::Duplicates => {}
    }
    Ok(())
}

fn generate_rank(spec: &WorkloadSpec, router: &Router, rank: usize) -> RankInput {
    let tokens = spec.tokens[rank];
    let mut routing = stream(spec.seed, Purpose::Routing, rank as u64);
    let mut payload = stream(spec.seed, Purpose::Payload, rank as u64);
    let mut weights = stream(spec.seed, Purpose::Weights, rank as u64);

    let mut topk_ids = Vec::with_capacity(tokens * spec.top_k);
    let mut topk_weights = Vec::with_capacity(tokens * spec.top_k);
    for _ in 0..tokens {
        topk_ids.extend(router.route(&mut routing));
        topk_weights.extend(random_weights(&mut weights, spec.top_k));
    }
    RankInput {
        tokens,
        x: (0..tokens * spec.hidden)
            .map(|_| random_value(&mut payload))
            .collect(),
        topk_ids,
        topk_weights,
    }
}

/// A bf16 of either sign, its exponent uniform in 2^-8..2^8, or sometimes ±0.
fn random_value(rng: &mut ChaCha8Rng) -> bf16 {
    let random: u32 = rng.random();
    let sign = (random & 1) << 15;
    let mantissa = (random >> 1) & 0x7F;
    let exponent = 127 - 8 + ((random >> 8) & 0xF);
    let is_zero = (random >> 12) & 0x3F == 0;
    let magnitude = if is_zero { 0 } else { exponent << 7 | mantissa };
    bf16::from_bits((sign | magnitude) as u16)
}

/// Positive weights that sum to 1, up to rounding.
fn random_weights(rng: &mut ChaCha8Rng, top_k: usize) -> Vec<f32> {
    let raw: Vec<f32> = (0..top_k)
        .map(|_| rng.random::<f32>() + 1.0 / 64.0)
        .collect();
    let sum: f32 = raw.iter().sum();
    raw.into_iter().map(|weight| weight / sum).collect()
}

/// Draws the experts of tokens.
struct Router {
    routing: Routing,
    experts: usize,
    top_k: usize,
    /// Experts for Zipf, most popular first. Otherwise empty.
    by_popularity: Vec<usize>,
    /// Mass of the `p` most popular experts for Zipf, by `p`, `[experts + 1]`.
    /// Otherwise empty.
    mass_before: Vec<f64>,
}

impl Router {
    fn new(spec: &WorkloadSpec) -> Self {
        let mut router = Self {
            routing: spec.routing.clone(),
            experts: spec.experts,
            top_k: spec.top_k,
            by_popularity: Vec::new(),
            mass_before: Vec::new(),
        };
        if let Routing::Zipf { exponent } = spec.routing {
            router.by_popularity = (0..spec.experts).collect();
            router
                .by_popularity
                .shuffle(&mut stream(spec.seed, Purpose::Popularity, 0));
            let mut mass = 0.0;
            router.mass_before.push(mass);
            for popularity in 1..=spec.experts {
                mass += (popularity as f64).powf(-exponent);
                router.mass_before.push(mass);
            }
        }
        router
    }

    /// Draws the ids of one token, `[top_k]`.
    fn route(&self, rng: &mut ChaCha8Rng) -> Vec<i32> {
        let distinct = self.top_k.min(self.experts);
        let experts: Vec<usize> = match self.routing {
            Routing::Uniform | Routing::Holes { .. } => {
                index::sample(rng, self.experts, distinct).into_vec()
            }
            Routing::Zipf { .. } => self
                .draw_by_popularity(rng, distinct)
                .into_iter()
                .map(|popularity| self.by_popularity[popularity])
                .collect(),
            Routing::AllToOne { expert } => vec![expert],
            Routing::Hot { expert } => {
                let others = index::sample(rng, self.experts - 1, distinct - 1).into_iter();
                let others = others.map(|other| other + usize::from(other >= expert));
                iter::once(expert).chain(others).collect()
            }
            Routing::Grouped { groups, chosen } => {
                let size = self.experts / groups;
                let groups = index::sample(rng, groups, chosen).into_vec();
                let drawn = index::sample(rng, chosen * size, self.top_k.min(chosen * size));
                let experts = drawn.into_iter();
                experts
                    .map(|at| groups[at / size] * size + at % size)
                    .collect()
            }
            Routing::Duplicates => self.draw_with_duplicates(rng),
        };
        let mut ids: Vec<i32> = experts
            .into_iter()
            .map(|expert| i32::try_from(expert).expect("an expert fits an i32"))
            .collect();
        ids.resize(self.top_k, -1);
        if let Routing::Holes { probability } = self.routing {
            for id in &mut ids {
                if rng.random_bool(probability) {
                    *id = -1;
                }
            }
        }
        ids
    }

    /// Draws `count` popularity indices without replacement.
    fn draw_by_popularity(&self, rng: &mut ChaCha8Rng, count: usize) -> Vec<usize> {
        let mut drawn: Vec<usize> = Vec::new();
        let mut ascending: Vec<usize> = Vec::new();
        let mass_of = |p: usize| self.mass_before[p + 1] - self.mass_before[p];
        while drawn.len() < count {
            // A point in the remaining mass, then moved past the drawn experts.
            let taken: f64 = ascending.iter().map(|&p| mass_of(p)).sum();
            let mut point = rng.random::<f64>() * (self.mass_before[self.experts] - taken);
            for &p in &ascending {
                if point >= self.mass_before[p] {
                    point += mass_of(p);
                }
            }
            let mut landed = self.mass_before.partition_point(|&mass| mass <= point);
            landed = landed.saturating_sub(1).min(self.experts - 1);
            // If rounding moved the point onto a drawn expert, take the most
            // popular one left.
            if ascending.binary_search(&landed).is_ok() {
                landed = (0..self.experts)
                    .find(|p| ascending.binary_search(p).is_err())
                    .expect("fewer are drawn than there are");
            }
            drawn.push(landed);
            ascending.push(landed);
            ascending.sort_unstable();
        }
        drawn
    }

    /// Draws the experts of a token: each slot after the first repeats an earlier
    /// one half of the time, and the last one does if no other did.
    fn draw_with_duplicates(&self, rng: &mut ChaCha8Rng) -> Vec<usize> {
        let mut experts: Vec<usize> = Vec::new();
        let mut repeated = false;
        for slot in 0..self.top_k {
            let must = slot + 1 == self.top_k && !repeated;
            if slot > 0 && (must || rng.random_bool(0.5)) {
                repeated = true;
                experts.push(experts[rng.random_range(0..slot)]);
            } else {
                experts.push(rng.random_range(0..self.experts));
            }
        }
        experts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeSet, HashSet};

    fn spec(experts: usize, top_k: usize, routing: Routing) -> WorkloadSpec {
        WorkloadSpec {
            ranks: 1,
            experts,
            top_k,
            hidden: 1,
            tokens: vec![2_000],
            routing,
            seed: 7,
        }
    }

    fn rows_of_experts(problem: &Problem) -> Vec<usize> {
        let mut rows = vec![0; problem.experts];
        for id in &problem.inputs[0].topk_ids {
            if *id >= 0 {
                rows[*id as usize] += 1;
            }
        }
        rows
    }

    #[test]
    fn values_are_finite_and_varied() {
        let mut spec = spec(4, 1, Routing::Uniform);
        spec.hidden = 64;
        let x = generate(spec).inputs.remove(0).x;
        let magnitudes = 2f32.powi(-8)..2f32.powi(8);
        for value in &x {
            let value = value.to_f32().abs();
            assert!(value == 0.0 || magnitudes.contains(&value));
        }
        let zeros = x.iter().filter(|value| value.to_bits() == 0).count();
        let minus_zeros = x.iter().filter(|value| value.to_bits() == 0x8000).count();
        assert!((500..1_500).contains(&zeros) && (500..1_500).contains(&minus_zeros));
        // 2 signs, 16 exponents, 128 mantissas, two zeros.
        let distinct: HashSet<u16> = x.iter().map(|value| value.to_bits()).collect();
        assert_eq!(distinct.len(), 2 * 16 * 128 + 2);
    }

    #[test]
    fn uniform_is_even() {
        let rows = rows_of_experts(&generate(spec(16, 4, Routing::Uniform)));
        // 8,000 entries over 16 experts.
        assert!(
            rows.iter().all(|rows| (400..600).contains(rows)),
            "{rows:?}"
        );
    }

    #[test]
    fn zipf_follows_its_exponent() {
        let spec = spec(16, 1, Routing::Zipf { exponent: 1.0 });
        let rows = rows_of_experts(&generate(spec.clone()));
        let router = Router::new(&spec);
        // The harmonic number of 16 is 3.381.
        for (popularity, &expert) in router.by_popularity.iter().enumerate() {
            let expected = 2_000.0 / (3.381 * (popularity + 1) as f64);
            let deviation = (rows[expert] as f64 - expected).abs();
            assert!(deviation < 5.0 * expected.sqrt(), "{expert}: {rows:?}");
        }
        assert_ne!(router.by_popularity, (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn zipf_draws_all_experts_whatever_the_exponent() {
        for exponent in [0.0, 1.2, 5.0, 300.0] {
            let problem = generate(spec(32, 32, Routing::Zipf { exponent }));
            for ids in problem.inputs[0].topk_ids.chunks(32) {
                assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 32);
            }
        }
    }

    #[test]
    fn all_to_one_uses_one_slot() {
        let problem = generate(spec(4, 3, Routing::AllToOne { expert: 2 }));
        for ids in problem.inputs[0].topk_ids.chunks(3) {
            assert_eq!(ids, [2, -1, -1]);
        }
    }

    #[test]
    fn a_hot_expert_is_in_every_token_and_the_others_are_even() {
        let problem = generate(spec(17, 5, Routing::Hot { expert: 3 }));
        let mut rows = rows_of_experts(&problem);
        assert_eq!(rows.remove(3), 2_000);
        // 8,000 entries over 16 experts.
        let is_even = rows.iter().all(|rows| (400..600).contains(rows));
        assert!(is_even, "{rows:?}");
        for ids in problem.inputs[0].topk_ids.chunks(5) {
            assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 5);
        }
    }

    #[test]
    fn tokens_keep_to_the_groups_that_they_drew() {
        let routing = Routing::Grouped {
            groups: 8,
            chosen: 2,
        };
        let problem = generate(spec(32, 6, routing.clone()));
        let mut pairs = HashSet::new();
        for ids in problem.inputs[0].topk_ids.chunks(6) {
            assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 6);
            let groups: BTreeSet<i32> = ids.iter().map(|id| id / 4).collect();
            assert_eq!(groups.len(), 2, "{ids:?}");
            pairs.insert(groups);
        }
        // Of 8 groups every two.
        assert_eq!(pairs.len(), 28);
        let rows = rows_of_experts(&problem);
        // 12,000 entries over 32 experts.
        let is_even = rows.iter().all(|rows| (275..475).contains(rows));
        assert!(is_even, "{rows:?}");
        // Two groups have 8 experts.
        let problem = generate(spec(32, 10, routing));
        for ids in problem.inputs[0].topk_ids.chunks(10) {
            assert!(ids[..8].iter().all(|&id| id >= 0));
            assert_eq!(ids[8..], [-1, -1]);
        }
    }

    #[test]
    fn holes_come_as_often_as_asked() {
        for (probability, range) in [(0.0, 0..1), (0.25, 1_800..2_200), (1.0, 8_000..8_001)] {
            let problem = generate(spec(16, 4, Routing::Holes { probability }));
            let ids = &problem.inputs[0].topk_ids;
            let holes = ids.iter().filter(|&&id| id == -1).count();
            assert!(range.contains(&holes), "{probability}: {holes}");
        }
    }

    #[test]
    fn duplicates_are_in_every_token() {
        for top_k in [2, 5, 32] {
            let problem = generate(spec(256, top_k, Routing::Duplicates));
            for ids in problem.inputs[0].topk_ids.chunks(top_k) {
                assert!(ids.iter().collect::<HashSet<_>>().len() < top_k);
            }
        }
    }

    #[test]
    fn few_experts_leave_slots_empty() {
        for routing in [Routing::Uniform, Routing::Zipf { exponent: 1.0 }] {
            let problem = generate(spec(2, 3, routing));
            for ids in problem.inputs[0].topk_ids.chunks(3) {
                assert_eq!((ids[0] + ids[1], ids[2]), (1, -1));
            }
        }
    }

    #[test]
    fn a_rank_does_not_depend_on_the_others() {
        let mut spec = spec(8, 2, Routing::Uniform);
        spec.ranks = 2;
        spec.tokens = vec![3, 5];
        let one = generate(spec.clone());
        spec.tokens = vec![0, 5];
        let other = generate(spec);
        assert_eq!(one.inputs[1], other.inputs[1]);
        assert_ne!(one.inputs[0].x, one.inputs[1].x[..3]);
    }

    #[test]
    #[should_panic(expected = "3 experts cannot be split evenly over 2 ranks")]
    fn a_senseless_specification_is_refused() {
        let mut spec = spec(3, 1, Routing::Uniform);
        spec.ranks = 2;
        generate(spec);
    }
}
