//! A problem made from a real text, with the skew of natural language.
//!
//! A seeded embedding turns a word into a row, and a seeded linear router
//! chooses its experts; both are the same for every occurrence of the word.

use std::collections::HashMap;

use half::bf16;
use rand::Rng;

use crate::problem::{Problem, ProblemError, RankInput, check_sizes};
use crate::random::{Purpose, stream};

/// Consecutive words dealt to a rank at a time.
const RUN: usize = 16;

/// Dimensions in which the router compares words and experts.
const KEY_DIMENSIONS: usize = 16;

/// Shape of a problem made from text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextSpec {
    /// Number of ranks, at least 1.
    pub ranks: usize,
    /// Number of experts over all ranks, a multiple of `ranks`.
    pub experts: usize,
    /// Top-k slots of a token, at least 1.
    pub top_k: usize,
    /// Elements of a token row, at least 1.
    pub hidden: usize,
    /// Number of tokens on every rank.
    pub tokens_per_rank: usize,
    /// The seed of the embedding and of the router.
    pub seed: u64,
}

/// Reason why no problem can be made from a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// There is no letter and no digit in the text.
    #[error("the text has no words")]
    NoWords,
    /// The specification is invalid.
    #[error(transparent)]
    Spec(#[from] ProblemError),
}

/// Makes a problem from a text, with one token for each word.
///
/// Words are runs of letters and digits, in lower case. They are dealt to the
/// ranks in turn, 16 at a time; a text that is too short is repeated. Rows are
/// uniform in -1..1, rounded to bf16. A token goes to the `top_k` experts with
/// the largest logits, largest first, with their softmax as weights; if
/// `top_k` exceeds the number of experts, the slots left over are -1 with
/// weight 0.
pub fn problem(text: &str, spec: TextSpec) -> Result<Problem, TextError> {
    check_sizes(spec.ranks, spec.experts, spec.top_k, spec.hidden)?;
    let words = words(text);
    if words.is_empty() {
        return Err(TextError::NoWords);
    }
    let router = Router::new(&spec);
    let mut embedded: HashMap<&str, Embedded> = HashMap::new();
    let mut inputs = Vec::new();
    for rank in 0..spec.ranks {
        let mut input = RankInput {
            tokens: spec.tokens_per_rank,
            x: Vec::with_capacity(spec.tokens_per_rank * spec.hidden),
            topk_ids: Vec::with_capacity(spec.tokens_per_rank * spec.top_k),
            topk_weights: Vec::with_capacity(spec.tokens_per_rank * spec.top_k),
        };
        for token in 0..spec.tokens_per_rank {
            let word = &words[word_index(&spec, rank, token) % words.len()];
            let embedded = embedded
                .entry(word)
                .or_insert_with(|| router.embed(word, &spec));
            input.x.extend_from_slice(&embedded.x);
            input.topk_ids.extend_from_slice(&embedded.ids);
            input.topk_weights.extend_from_slice(&embedded.weights);
        }
        inputs.push(input);
    }
    Ok(Problem {
        ranks: spec.ranks,
        experts: spec.experts,
        top_k: spec.top_k,
        hidden: spec.hidden,
        inputs,
    })
}

fn words(text: &str) -> Vec<String> {
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect()
}

/// Position of a token's word in the endless text. In each round every rank gets
/// one run; the runs of the last round may be short.
fn word_index(spec: &TextSpec, rank: usize, token: usize) -> usize {
    let before_round = token / RUN * RUN;
    let run = RUN.min(spec.tokens_per_rank - before_round);
    before_round * spec.ranks + rank * run + token % RUN
}

/// The row, ids and weights of one word: `[hidden]`, `[top_k]`, `[top_k]`.
struct Embedded {
    x: Vec<bf16>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

/// A linear router: `logits = keys * (projection * x)`.
struct Router {
    /// `[KEY_DIMENSIONS][hidden]`
    projection: Vec<Vec<f32>>,
    /// `[experts][KEY_DIMENSIONS]`
    keys: Vec<Vec<f32>>,
}

impl Router {
    fn new(spec: &TextSpec) -> Self {
        let rows = |count: usize, length: usize, purpose| {
            let mut rng = stream(spec.seed, purpose, 0);
            (0..count)
                .map(|_| (0..length).map(|_| rng.random_range(-1.0..1.0)).collect())
                .collect()
        };
        Self {
            projection: rows(KEY_DIMENSIONS, spec.hidden, Purpose::Projection),
            keys: rows(spec.experts, KEY_DIMENSIONS, Purpose::ExpertKey),
        }
    }

    fn embed(&self, word: &str, spec: &TextSpec) -> Embedded {
        let mut rng = stream(spec.seed, Purpose::Word, fnv1a(word));
        let x: Vec<bf16> = (0..spec.hidden)
            .map(|_| bf16::from_f32(rng.random_range(-1.0..1.0)))
            .collect();

        // Each entry of x, the projection and the keys has variance 1/3; this
        // brings the logits to a variance of 1.
        let variance = spec.hidden as f32 * KEY_DIMENSIONS as f32 / 27.0;
        let query: Vec<f32> = self
            .projection
            .iter()
            .map(|row| row.iter().zip(&x).map(|(p, x)| p * x.to_f32()).sum())
            .collect();
        let mut logits: Vec<(usize, f32)> = self
            .keys
            .iter()
            .map(|key| key.iter().zip(&query).map(|(k, q)| k * q).sum::<f32>() / variance.sqrt())
            .enumerate()
            .collect();

        // The largest logits first; of equal ones the smaller expert first.
        logits.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        logits.truncate(spec.top_k);
        let largest = logits[0].1;
        let exponentials: Vec<f32> = logits.iter().map(|(_, l)| (l - largest).exp()).collect();
        let sum: f32 = exponentials.iter().sum();

        let mut ids: Vec<i32> = logits
            .iter()
            .map(|&(expert, _)| i32::try_from(expert).expect("an expert fits an i32"))
            .collect();
        let mut weights: Vec<f32> = exponentials.into_iter().map(|e| e / sum).collect();
        ids.resize(spec.top_k, -1);
        weights.resize(spec.top_k, 0.0);
        Embedded { x, ids, weights }
    }
}

/// The 64-bit FNV-1a hash: the same on every machine and in every release.
fn fnv1a(word: &str) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325;
    for byte in word.bytes() {
        hash ^= u64::from(byte);
        hash = hash.wrapping_mul(0x100_0000_01B3);
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> TextSpec {
        TextSpec {
            ranks: 2,
            experts: 8,
            top_k: 2,
            hidden: 32,
            tokens_per_rank: 20,
            seed: 3,
        }
    }

    #[test]
    fn words_are_letters_and_digits() {
        assert_eq!(words("Ein Maß, it's 2!"), ["ein", "maß", "it", "s", "2"]);
    }

    #[test]
    fn fnv1a_is_the_published_one() {
        assert_eq!(fnv1a(""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv1a("a"), 0xAF63_DC4C_8601_EC8C);
        assert_eq!(fnv1a("foobar"), 0x8594_4171_F739_67E8);
    }

    #[test]
    fn words_are_dealt_in_runs() {
        let of_rank = |rank| -> Vec<usize> {
            (0..20)
                .map(|token| word_index(&spec(), rank, token))
                .collect()
        };
        // 16 and 16, then the last 4 and 4.
        assert_eq!(of_rank(0), (0..16).chain(32..36).collect::<Vec<_>>());
        assert_eq!(of_rank(1), (16..32).chain(36..40).collect::<Vec<_>>());
    }

    #[test]
    fn the_same_word_is_the_same_token() {
        let problem = problem("one two Two", spec()).unwrap();
        assert_eq!(problem.check(), Ok(()));
        // Word i of the endless text is one, two or Two by i % 3.
        let token = |rank: usize, token: usize| {
            let input: &RankInput = &problem.inputs[rank];
            (
                &input.x[token * 32..(token + 1) * 32],
                &input.topk_ids[token * 2..(token + 1) * 2],
                &input.topk_weights[token * 2..(token + 1) * 2],
            )
        };
        assert_eq!(token(0, 1), token(0, 2));
        assert_eq!(token(0, 0), token(0, 3));
        assert_ne!(token(0, 0).0, token(0, 1).0);
        // Rank 1 starts at word 16, which is "two".
        assert_eq!(token(1, 0), token(0, 1));
    }

    #[test]
    fn experts_are_distinct_and_weights_fall() {
        let text: String = (0..40).map(|word| format!("word{word} ")).collect();
        let problem = problem(&text, spec()).unwrap();
        for input in &problem.inputs {
            for ids in input.topk_ids.chunks(2) {
                assert_ne!(ids[0], ids[1]);
            }
            for weights in input.topk_weights.chunks(2) {
                assert!(weights[0] >= weights[1] && weights[1] > 0.0);
                assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
            }
        }
        let all = problem.inputs.iter().flat_map(|input| &input.topk_ids);
        let distinct: std::collections::HashSet<_> = all.collect();
        assert!(distinct.len() > 4, "{distinct:?}");
    }

    #[test]
    fn the_seed_changes_everything() {
        let one = problem("one", spec()).unwrap();
        let other = problem("one", TextSpec { seed: 4, ..spec() }).unwrap();
        assert_eq!(one, problem("one", spec()).unwrap());
        assert_ne!(one.inputs[0].x, other.inputs[0].x);
    }

    #[test]
    fn more_slots_than_experts() {
        let spec = TextSpec {
            experts: 2,
            top_k: 3,
            ..spec()
        };
        let problem = problem("one", spec).unwrap();
        let input = &problem.inputs[0];
        assert_eq!((input.topk_ids[2], input.topk_weights[2]), (-1, 0.0));
    }

    #[test]
    fn faults_are_typed() {
        for text in ["", " \n", "-- * --"] {
            assert_eq!(problem(text, spec()), Err(TextError::NoWords));
        }
        let odd = TextSpec { ranks: 3, ..spec() };
        assert_eq!(
            problem("one", odd).unwrap_err().to_string(),
            "8 experts cannot be split evenly over 3 ranks"
        );
    }
}
