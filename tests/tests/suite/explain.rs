//! Text of `ferry-tests explain`, and the table of tactics, compared with `tests/golden/tactics.txt`.
//! `FERRY_BLESS=1 cargo test -p ferry-tests --test suite explain` writes it.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;

use ferry::{CombineMode, Config, Group, Plan, ScaleLayout, TokenFormat};
use ferry_tests::explain::{self, Case, CaseError};

const TOKENS: [u32; 9] = [1, 8, 32, 128, 256, 512, 1024, 2048, 4096];
const FORMATS: [TokenFormat; 3] = [
    TokenFormat::Bf16,
    TokenFormat::BlockwiseFp8,
    TokenFormat::Mxfp4(ScaleLayout::Tiled),
];
const MULTIPROCESSORS: u32 = 132;

/// Parameters that differ from line to line.
#[derive(Clone, Copy)]
struct Line {
    tokens: u32,
    most: u32,
    format: TokenFormat,
    mode: CombineMode,
    ranks: u32,
    nodes: u32,
    max_sms: Option<u32>,
}

impl Line {
    /// BF16, reduced, 4 ranks of a node, a plan for as many tokens as there are, all multiprocessors.
    fn of(tokens: u32) -> Self {
        Self {
            tokens,
            most: tokens,
            format: TokenFormat::Bf16,
            mode: CombineMode::Reduced,
            ranks: 4,
            nodes: 1,
            max_sms: None,
        }
    }

    fn plan(self) -> Plan {
        let config = Config {
            format: self.format,
            combine: self.mode,
            p2p_world_size: Some((self.ranks / self.nodes) as usize),
            max_sms: self.max_sms,
            ..Config::new(256, 8, 7168, self.most as usize)
        };
        Plan::new(&Group::simulated(self.ranks, 0).unwrap(), config).unwrap()
    }

    fn case(self) -> Case {
        Case::new(&self.plan(), self.tokens, MULTIPROCESSORS).unwrap()
    }
}

/// The table's parts, each with a title.
fn tables() -> Vec<(&'static str, Vec<Line>)> {
    let mut plans_as_large = Vec::new();
    for max_sms in [None, Some(16)] {
        for ranks in [2, 4, 8] {
            for format in FORMATS {
                plans_as_large.extend(TOKENS.map(|tokens| Line {
                    format,
                    ranks,
                    max_sms,
                    ..Line::of(tokens)
                }));
            }
        }
    }
    let all = |change: fn(&mut Line)| {
        TOKENS
            .map(|tokens| {
                let mut line = Line::of(tokens);
                change(&mut line);
                line
            })
            .to_vec()
    };
    vec![
        ("plans for as many tokens as there are", plans_as_large),
        ("a plan for 4,096 tokens", all(|line| line.most = 4096)),
        ("exact mode", all(|line| line.mode = CombineMode::Exact)),
        ("two nodes", all(|line| line.nodes = 2)),
    ]
}

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden/tactics.txt")
}

#[test]
fn the_tactics_are_those_of_the_table() {
    let mut found = String::from(
        "What launches do: 256 experts, top-8, 7168 elements, 132 multiprocessors. Written by\n\
         `FERRY_BLESS=1 cargo test -p ferry-tests --test suite explain`.\n\
         `ferry-tests explain --kernels` says why.\n",
    );
    for (title, lines) in tables() {
        writeln!(found, "\n{title}\n{}", explain::HEAD).unwrap();
        for line in lines {
            writeln!(found, "{}", explain::line(&line.case())).unwrap();
        }
    }
    if std::env::var_os("FERRY_BLESS").is_some_and(|bless| bless == "1") {
        std::fs::create_dir_all(golden().parent().unwrap()).unwrap();
        return std::fs::write(golden(), found).unwrap();
    }
    let wanted = std::fs::read_to_string(golden()).expect("tests/golden/tactics.txt");
    let lines = wanted.lines().zip(found.lines());
    let differ: Vec<_> = lines.filter(|(wanted, found)| wanted != found).collect();
    let first: String = differ
        .iter()
        .take(8)
        .map(|(wanted, found)| format!("- {wanted}\n+ {found}\n"))
        .collect();
    assert!(
        wanted == found,
        "{} lines of {} lines differ:\n{first}If this is meant: \
         FERRY_BLESS=1 cargo test -p ferry-tests --test suite explain",
        differ.len(),
        wanted.lines().count(),
    );
}

#[test]
fn reasons_say_what_the_tactics_decide() {
    let mut lines: Vec<_> = tables().into_iter().flat_map(|(_, lines)| lines).collect();
    for max_sms in [1, 2, 66, 131] {
        for tokens in [1, 16, 17, 511, 513, 1025, 4096] {
            for format in TokenFormat::ALL {
                lines.push(Line {
                    format,
                    max_sms: Some(max_sms),
                    ..Line::of(tokens)
                });
            }
        }
    }
    lines.push(Line {
        most: 8,
        ..Line::of(0)
    });
    for line in lines {
        let case = line.case();
        for question in explain::reasons::all(&case) {
            let told = explain::line(&case);
            assert!(question.agrees(), "{told}\n{question}\n{question:?}");
        }
    }
}

/// Runs `ferry-tests explain --kernels` with `options`.
fn explain(options: &str) -> Result<String, String> {
    explain_plan(&format!("--kernels {options}"))
}

/// Runs `ferry-tests explain` with `options`. Returns its output, or the text of its error if it fails.
fn explain_plan(options: &str) -> Result<String, String> {
    let mut program = Command::new(env!("CARGO_BIN_EXE_ferry-tests"));
    let output = program
        .arg("explain")
        .args(options.split_whitespace())
        .output()
        .unwrap();
    if output.status.success() {
        Ok(String::from_utf8(output.stdout).unwrap())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

/// Asserts that all of `wanted` are in `text`, in this order, however its lines are broken.
fn assert_tells(text: &str, wanted: &[&str]) {
    let words: Vec<_> = text.split_whitespace().collect();
    let words = words.join(" ");
    let mut rest = &words[..];
    for wanted in wanted {
        match rest.split_once(wanted) {
            Some((_, after)) => rest = after,
            None => panic!("{text}wanted, in this order: {wanted}"),
        }
    }
}

#[test]
fn few_tokens_have_inline_flags() {
    let text = explain("--tokens 128").unwrap();
    let wanted = [
        "4 a row",
        "1024 assignments <= 2048 SMALL_BATCH_ASSIGNMENTS",
        "dispatch wire inline flags",
        "4 parts a row > 1 part",
        "split sender half",
        "3584 bytes of an inline part >= 3584 SENDER_HALF_FROM_BYTES",
        "send 2100 warps for 512 items, so that 512 have one, on SMs 0 to 65",
        "published not at all",
        "re-armed",
        "dispatch_async wire",
        "combine wire",
        "re-armed",
    ];
    assert_tells(&text, &wanted);
}

#[test]
fn many_tokens_are_flagged_by_senders_of_their_own() {
    let text = explain("--tokens 4096 --format fp8").unwrap();
    let wanted = [
        "1 a row",
        "32768 assignments > 2048 SMALL_BATCH_ASSIGNMENTS",
        "wire flagged -",
        "split specialised by SM",
        "send 528 warps for 4096 items, on SMs",
        "a warp of a multiprocessor that does not send",
        "dispatch_async wire",
        "combine wire",
        "in batches? no: 512 items over 32 (BATCH_FROM_ITEMS_PER_WARP) < 1320 senders",
    ];
    assert_tells(&text, &wanted);
}

#[test]
fn few_multiprocessors_send_back_in_batches() {
    let text = explain("--tokens 4096 --max-sms 16").unwrap();
    let wanted = ["16 SMs", "combine wire flagged", "4 items together"];
    assert_tells(&text, &wanted);
}

#[test]
fn rows_for_other_nodes_are_put() {
    let text = explain("--tokens 128 --nodes 2").unwrap();
    let wanted = ["wire remote", "staging area", "combine wire remote"];
    assert_tells(&text, &wanted);
}

#[test]
fn ranks_that_share_a_gpu_have_a_part_of_its_multiprocessors() {
    let text = explain("--tokens 128 --ranks-per-gpu 4").unwrap();
    let wanted = ["4 ranks share its 132 SMs: 33 SMs each", "grid 33 SMs"];
    assert_tells(&text, &wanted);
    let text = explain("--tokens 128 --ranks-per-gpu 4 --max-sms 8").unwrap();
    assert_tells(&text, &["grid 8 SMs"]);
}

#[test]
fn bad_shapes_are_refused_by_name() {
    for (options, wanted) in [
        (
            "--tokens 9 --max-tokens 8",
            "tokens is 9, but the plan has at most 8",
        ),
        (
            "--tokens 8 --ranks 3",
            "experts is 256, but it must be divisible by the 3 ranks",
        ),
        ("--tokens 8 --top-k 0", "top_k is 0"),
        ("--tokens 8 --hidden 7", "hidden is 7"),
        (
            "--tokens 8 --nodes 3",
            "nodes is 3, but it must divide the 4 ranks",
        ),
        ("--tokens 8 --max-sms 0", "max_sms is 0"),
        (
            "--tokens 8 --ranks-per-gpu 5",
            "ranks-per-gpu is 5, but there are 4 ranks",
        ),
        ("--tokens 0 --max-tokens 0", "max_tokens_per_rank is 0"),
        ("--tokens 8 --ranks 65", "--ranks"),
        ("--tokens 8 --format fp7", "nvfp4-row"),
        ("--tokens -1", "-1"),
    ] {
        match explain(options) {
            Ok(text) => panic!("{options}: {text}"),
            Err(told) => assert!(told.contains(wanted), "{options}: {told}wanted: {wanted}"),
        }
    }
    let refused = Case::new(&Line::of(8).plan(), 9, MULTIPROCESSORS).err();
    assert_eq!(
        refused,
        Some(CaseError::TooManyTokens { tokens: 9, most: 8 })
    );
}

#[test]
fn a_user_is_told_what_a_plan_takes() {
    let plan = |ranks: u32, config| {
        let plan = Plan::new(&Group::simulated(ranks, 0).unwrap(), config).unwrap();
        (plan.window_bytes(), plan.workspace_bytes())
    };
    for (ranks, format) in [(4, TokenFormat::Bf16), (8, TokenFormat::BlockwiseFp8)] {
        let text = explain_plan(&format!(
            "--ranks {ranks} --tokens 4096 --format {}",
            format.name()
        ));
        let text = text.unwrap();
        let (window, workspace) = plan(
            ranks,
            Config {
                format,
                ..Config::new(256, 8, 7168, 4096)
            },
        );
        let digits: String = text.chars().filter(|&letter| letter != ',').collect();
        let wanted = [
            &format!("window {window} bytes") as &str,
            &format!("workspace {workspace} bytes"),
            "outputs",
            "settings for 4096 tokens",
            "Capacity::max_distinct",
        ];
        assert_tells(&digits, &wanted);
        assert!(!text.contains("ASSIGNMENTS"), "{text}");
    }
}

#[test]
fn without_options_few_tokens_are_explained() {
    let text = explain_plan("").unwrap();
    assert_tells(
        &text,
        &[
            "at most 128 tokens a rank",
            "settings for 128 tokens",
            "specialise: true",
        ],
    );
    let kernels = explain_plan("--kernels").unwrap();
    assert_tells(
        &kernels,
        &[
            "128 tokens a rank of at most 128",
            "SMALL_BATCH_ASSIGNMENTS",
        ],
    );
}
