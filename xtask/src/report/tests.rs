//! Tests of the report, on lines that no machine ever wrote. What the committed page and charts show,
//! `cargo xtask tidy` compares byte by byte.

use super::*;

/// A line of the benchmark with made-up times.
fn round(ranks: usize, format: &str, tokens: usize, us: f64) -> String {
    let phase = |us: f64| {
        format!(
            r#"{{"copy_us":null,"floor_us":{},"gb_per_s":1.0,"gpu_us":{{"median":{us},"min":1.0,"p99":9.0}},
            "halves_us":null,"host_us":{{"median":3.0,"min":2.0,"p99":4.0}},"nccl_us":40.0,"payload_bytes":1,
            "wire_bytes":1}}"#,
            us / 4.0
        )
    };
    let text = format!(
        r#"{{"round":{{"combine":{},"dispatch":{},"experts":256,"format":"{format}","group":"local",
        "hidden":7168,"l2_flushed":false,"max_sms":null,"mode":"reduced","pair_us":{},"ranks":{ranks},
        "routing":"uniform","tokens":{tokens},"top_k":8,"verified":"all"}},"repeat":1}}"#,
        phase(2.0 * us),
        phase(us),
        3.0 * us
    );
    text.replace('\n', "") + "\n"
}

const LIMITS: &str = concat!(
    r#"{"limits":{"copies":[],"empty_call":{"cold_us":5.5,"warm_us":4.5},"hbm_gb_per_s":3700.0,"#,
    r#""launch_us":1.5,"round_trip_us":2.25,"wire_gb_per_s":349.0}}"#,
    "\n"
);

const NAME: &str = "2000-01-02-2xNONE-0123abc.jsonl";

fn results(files: &[(&str, String)]) -> Result<Results> {
    let files = files
        .iter()
        .map(|(name, text)| RecordFile::parse(name, text));
    Results::of(files.collect::<Result<_>>()?)
}

fn error(files: &[(&str, String)]) -> String {
    results(files)
        .err()
        .map_or_else(String::new, |error| format!("{error:#}"))
}

#[test]
fn tables_have_times_and_shares_and_mark_missing_ones() {
    let runs = [10.0, 30.0, 20.0].map(|us| round(2, "fp8", 1, us)).concat();
    let text = format!("{LIMITS}{runs}{}", round(2, "fp8", 4096, 1500.0));
    let page = measured(&results(&[(NAME, text)]).unwrap());
    for part in [
        "Commit 0123abc, 2000-01-02, L2 cache warm, without general kernels: ",
        ": `tests/benchmarks/2000-01-02-2xNONE-0123abc.jsonl`.",
        "wire 349 GB/s a GPU",
        "empty call 4.5 µs",
        "| 1 | 20.0 (25 %) | 40.0 (25 %) | missing | missing | missing | 60.0 | 40.0 | 40.0 |",
        "| 4,096 | 1,500.0 (25 %) | 3,000.0 (25 %) |",
        "| 8 | missing |",
    ] {
        assert!(page.contains(part), "{part} in\n{page}");
    }
    assert!(
        !page.contains("multiprocessors") && !page.contains("8 GPUs"),
        "{page}"
    );
}

#[test]
fn of_each_number_of_gpus_the_newest_record_is_shown() {
    let of = |name: &'static str, ranks: usize, us: f64| (name, round(ranks, "fp8", 1, us));
    let files = [
        of("2000-01-01-4xNONE-fedcba9.jsonl", 4, 9.0),
        of(NAME, 2, 10.0),
        of("2000-01-01-2xNONE-fedcba9.jsonl", 2, 11.0),
    ];
    let page = measured(&results(&files).unwrap());
    let (two, four) = page.split_once("### 4 GPUs\n").unwrap();
    assert!(
        two.contains("Commit 0123abc, 2000-01-02") && two.contains("| 1 | 10.0"),
        "{page}"
    );
    assert!(
        four.contains("Commit fedcba9, 2000-01-01") && four.contains("| 1 | 9.0"),
        "{page}"
    );
    assert!(!page.contains("11.0"), "{page}");
    let same_day = [
        files[1].clone(),
        of("2000-01-02-2xNONE-fedcba9.jsonl", 2, 9.0),
    ];
    assert!(error(&same_day).contains("are of one day: remove one"));
}

/// The lines as of ranks that share a GPU.
fn shared(line: &str, ranks_per_gpu: usize) -> String {
    let memory = "\"copy_us\":null,\"memory_us\":6.0";
    line.replace("\"copy_us\":null", memory).replace(
        "\"ranks\":",
        &format!("\"ranks_per_gpu\":{ranks_per_gpu},\"ranks\":"),
    )
}

#[test]
fn figures_of_ranks_that_share_a_gpu_stand_by_themselves_beside_its_memorys_limit() {
    let own = round(4, "fp8", 1, 10.0);
    let other = "2000-01-02-1xNONE-0123abc.jsonl";
    let files = [
        (other, shared(&round(4, "fp8", 1, 60.0), 4)),
        (NAME, own.clone()),
    ];
    let results = results(&files).unwrap();
    let page = measured(&results);
    let (before, behind) = page.split_once("### 4 ranks that share a GPU\n").unwrap();
    assert!(
        before.contains("### 4 GPUs\n") && before.contains("| 1 | 10.0 (25 %) |"),
        "{page}"
    );
    assert!(
        !before.contains("60.0") && behind.contains("| 1 | 60.0 (10 %) |"),
        "{page}"
    );
    assert_eq!(chart::draw(&results).matches("xNONE</text>").count(), 1);

    // The memory of several GPUs is no limit of one.
    let on_two = [(NAME, shared(&round(4, "fp8", 1, 60.0), 2))];
    let page = measured(&super::tests::results(&on_two).unwrap());
    let (_, behind) = page.split_once("### 4 ranks that share 2 GPUs\n").unwrap();
    assert!(!behind.contains("| 1 | 60.0 (10 %) |"), "{page}");

    let mixed = own.clone() + &shared(&own, 2);
    let complaint = ":2: 4 ranks that share 2 GPUs in a file of 4 GPUs";
    assert!(error(&[(NAME, mixed)]).contains(complaint));
}

/// Kernels for all shapes have rows of their own, and count nowhere else.
#[test]
fn general_kernels_stand_beside_those_of_the_shape() {
    let of = |us: f64, specialised: bool, flushed: bool| {
        let added = format!("\"round\":{{\"specialised\":{specialised},\"pair_p99_us\":50.0,");
        let line = round(2, "fp8", 1, us).replace("\"round\":{", &added);
        line.replace("\"l2_flushed\":false", &format!("\"l2_flushed\":{flushed}"))
    };
    let special = of(10.0, true, false) + &of(12.0, true, true);
    let page = measured(&results(&[(NAME, of(14.0, false, false) + &special)]).unwrap());
    for row in [
        "| 1 | 10.0 (25 %) | 20.0 (25 %) | missing | missing | missing | 30.0 | 40.0 | 40.0 |",
        "| 1 | general | 14.0 / 9.0 | - | 28.0 / 9.0 | - | - | - | 42.0 / 50.0 | - | 3.0, 3.0 |",
        "| 1 | specialised | 10.0 / 9.0 | 12.0 / 9.0 | 20.0 / 9.0 | 24.0 / 9.0 | - | - | 30.0 / 50.0 | - |",
    ] {
        assert!(page.contains(row), "{row} in\n{page}");
    }
    assert!(page.contains("L2 cache warm: "), "{page}");
    let page = measured(&results(&[(NAME, special)]).unwrap());
    assert!(
        page.contains("L2 cache warm, without general kernels: "),
        "{page}"
    );
    assert!(!page.contains("| general |"), "{page}");
}

/// Other routings, layouts, modes and late ranks have a table of their own, and count in no other.
#[test]
fn other_routings_layouts_and_modes_stand_by_themselves() {
    let line = round(2, "fp8", 128, 10.0);
    for (shown, other, name) in [
        (
            "\"tokens\":128,",
            "\"late_us\":50,\"tokens\":128,",
            "the last rank 50 µs late",
        ),
        (
            "\"tokens\":128,",
            "\"receive\":\"padded\",\"tokens\":128,",
            "padded",
        ),
        ("\"uniform\"", "\"zipf:1\"", "zipf:1"),
        ("\"reduced\"", "\"exact\"", "exact mode"),
    ] {
        let both = line.clone() + &round(2, "fp8", 128, 30.0).replace(shown, other);
        let page = measured(&results(&[(NAME, both)]).unwrap());
        for row in [
            "| 128 | 10.0 (25 %) | 20.0 (25 %) |",
            "| FP8, as above | 10.0 / 9.0 | 20.0 / 9.0 | 30.0 | 40.0, 40.0 | - |",
            &format!("| FP8, {name} | 30.0 / 9.0 | 60.0 / 9.0 | 90.0 | 40.0, 40.0 | - |"),
        ] {
            assert!(page.contains(row), "{row} in\n{page}");
        }
    }
    let page = measured(&results(&[(NAME, line)]).unwrap());
    assert!(!page.contains("as above"), "{page}");
}

/// A newer record without times of fused SiLU leaves those of an older one.
#[test]
fn the_newest_times_of_fused_silu_are_shown() {
    let of = |us: u32| {
        let time = r#"{"format":"bf16","interleaved":false,"clamped":false,"floor_us":1.0,"us":"#;
        format!("{{\"silu\":[{time}{us}}}]}}\n") + &round(2, "fp8", 1, 10.0)
    };
    let older = "2000-01-01-2xNONE-fedcba9.jsonl";
    let page = |newer: String| measured(&results(&[(older, of(7)), (NAME, newer)]).unwrap());
    let old = page(round(2, "fp8", 1, 10.0));
    assert!(
        old.contains("| bf16 | 7.0 | 1.0 |") && old.contains(older),
        "{old}"
    );
    let new = page(of(8));
    assert!(
        new.contains("| bf16 | 8.0 | 1.0 |") && !new.contains(older),
        "{new}"
    );
}

/// The page says which sizes it is about, and names no plan for more tokens, alignment or encoded inputs.
#[test]
fn rounds_of_other_sizes_are_not_shown() {
    let line = round(2, "fp8", 1, 10.0);
    for (shown, other) in [
        ("\"hidden\":7168", "\"hidden\":2048"),
        ("\"top_k\":8", "\"top_k\":4"),
        ("\"experts\":256", "\"experts\":64"),
        ("\"top_k\"", "\"plan_tokens\":4096,\"top_k\""),
        ("\"top_k\"", "\"alignment\":128,\"top_k\""),
        ("\"top_k\"", "\"pass_through\":true,\"top_k\""),
    ] {
        let both = line.clone() + &round(2, "fp8", 1, 30.0).replace(shown, other);
        let page = measured(&results(&[(NAME, both)]).unwrap());
        assert!(page.contains("| 1 | 10.0 (25 %) |"), "{other}: {page}");
    }
}

#[test]
fn records_that_do_not_fit_are_refused() {
    let line = round(2, "fp8", 1, 10.0);
    let of = |name: &'static str, text: &str| (name, text.to_owned());
    assert!(error(&[of("run.jsonl", &line)]).contains("<date>-<gpus>-<commit>"));
    let mixed = line.clone() + &round(4, "fp8", 1, 9.0);
    assert!(error(&[of(NAME, &mixed)]).contains(":2: 4 GPUs in a file of 2 GPUs"));
    let unverified = line.replace("\"verified\":\"all\"", "\"verified\":\"no\"");
    let complaint = "fp8 with 1 tokens on 2 GPUs: no run's results were verified";
    assert_eq!(error(&[of(NAME, &unverified)]), complaint);
    assert_eq!(error(&[of(NAME, &(unverified + &line))]), "");
    assert!(error(&[of(NAME, "{\"round\":1}")]).contains(":1: not a line"));
    assert!(error(&[of(NAME, LIMITS)]).contains("no round"));
}

#[test]
fn a_stage_of_a_layer_has_a_colour() {
    let stages = r#"[{"stage":"nap","us":1.0}]"#;
    let sizes = r#""ranks":2,"tokens":1,"hidden":8,"top_k":1,"experts":2"#;
    let line = format!(r#"{{"carried_by":"Ferry","format":"FP8",{sizes},"stages":{stages}}}"#);
    let drawn = layer::draw(&line);
    assert_eq!(
        drawn.unwrap_err().to_string(),
        "`nap`: a stage without a colour"
    );
}

#[test]
fn a_stale_page_is_found() {
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path();
    fs::create_dir_all(root.join(FOLDER)).unwrap();
    let write = |path: &str, text: &str| fs::write(root.join(path), text).unwrap();
    let record = format!("{FOLDER}/{NAME}");
    write(&record, &round(2, "fp8", 1, 10.0));
    assert_eq!(
        complaint(root).unwrap(),
        "BENCHMARKS.md is stale; renew it with `cargo xtask bench --report`"
    );
    run(root, false).unwrap();
    assert_eq!(complaint(root), None);
    let page = read(root, PAGE).unwrap();
    assert!(page.contains(NAME) && !page.contains("{{") && page.contains("\n## Method\n"));
    write(CHART, "<svg/>");
    assert!(complaint(root).unwrap().contains("chart.svg is stale"));
    run(root, false).unwrap();
    write(&record, &round(2, "fp8", 1, 9.0));
    assert!(
        run(root, true)
            .unwrap_err()
            .to_string()
            .contains("BENCHMARKS.md is stale")
    );
}
