//! Seeds that the quick tests draw, and one that repeats a failure.

use ferry_rig::choose;

#[test]
fn a_part_is_neighbours_that_the_text_decides() {
    let choose = |text: &str| choose(2_000..2_100, None, Some(&format!("some:{text}")));
    let firsts: Vec<u64> = ["a", "b", "c", "d"].map(|text| choose(text).start).into();
    assert!(firsts.iter().any(|&first| first != firsts[0]), "{firsts:?}");
    for text in ["a", "b", "c"] {
        let part = choose(text);
        assert_eq!(part.end - part.start, 13);
        assert!(part.start >= 2_000 && part.end <= 2_100, "{part:?}");
        assert_eq!(part, choose(text));
    }
}

#[test]
fn short_ranges_stay_whole_and_one_seed_is_taken_alone() {
    let some = Some("some:x");
    assert_eq!(choose(5..8, None, some), 5..8);
    assert_eq!(choose(8..8, None, some), 8..8);
    assert_eq!(choose(5..800, Some("7"), some), 7..8);
    assert_eq!(choose(10..12, Some("7"), None), 10..12);
    assert_eq!(choose(5..800, None, Some("all")), 5..800);
}

#[test]
#[should_panic(expected = "FERRY_SEEDS is `few`")]
fn another_word_is_refused() {
    choose(0..9, None, Some("few"));
}
