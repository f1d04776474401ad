//! Rows that are summed together. Integer overflow panics in tests, and so do shifts by 32.

use ferry_layout::RowGroup;

/// Every number of rows that a token can have, from none to one for each of 32 top-k slots.
#[test]
fn every_row_is_summed_once_and_no_other_is_touched() {
    for count in 0..=32u32 {
        let rows = ((1u64 << count) - 1) as u32;
        let (mut summed, mut groups) = (Vec::new(), 0);
        let mut group = RowGroup::first_of(rows);
        while group.is_some() {
            for index in 0..RowGroup::SIZE {
                assert!(group.row(index) < count, "{count} rows, index {index}");
                if group.has(index) {
                    summed.push(group.row(index));
                }
            }
            group = group.next();
            groups += 1;
            assert!(groups <= 8, "{count} rows: the loop does not end");
        }
        assert_eq!(summed, (0..count).collect::<Vec<_>>());
    }
}
