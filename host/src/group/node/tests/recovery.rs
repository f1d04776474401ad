//! Recovery of the remaining processes after one was lost, in the steps that [`Group`] documents.

use super::*;
use crate::plan::config::Config;
use ferry_layout::FaultKind;

/// Experts for three ranks and for two; a short deadline.
pub fn config() -> Config {
    Config {
        deadline: Duration::from_secs(2),
        ..Config::new(6, 1, HIDDEN, 1)
    }
}

#[test]
fn processes_that_are_left_recover_as_the_documentation_of_a_group_says() {
    let (node, rest) = (Node::new(3), Node::new(2));
    let outcomes = node.each(|process| {
        let group = process.join(Failure::none())?;
        let mut rank = begin_with(&group, config())?;
        round(&mut rank)?;
        if process.rank == 1 {
            // As if the process were killed: its connections end.
            return Ok(());
        }
        // 1. Learn of it.
        let Err(Error::Fault(fault)) = round(&mut rank) else {
            panic!("rank 1 was not missed");
        };
        assert_eq!(
            (fault.kind, fault.culprit),
            (FaultKind::PeerTimeout, Rank(1))
        );
        // 2. Close the communicators. This one gave up, and waits for nobody.
        Communicator::close_all([rank])?;
        // 3. Close the group.
        let left = group.close();
        assert_eq!(lost_rank(&left), Some(1), "{left:?}");
        drop(group);
        // 4. and 5. Ranks 0 and 2 are 0 and 1, and meet somewhere else.
        let group = rest.process(process.rank / 2).join(Failure::none())?;
        // 6. Plan anew.
        let mut rank = begin_with(&group, config())?;
        assert_eq!(rank.plan().local_experts(), 3);
        // 7. Repeat.
        round(&mut rank)?;
        Communicator::close_all([rank])?;
        group.close()
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    assert!(rest.ledger().is_clean());
    // The remaining ranks have unmapped each other's windows, and kept their own.
    let ledger = node.ledger();
    let maps: Vec<u32> = ledger.maps.iter().map(|map| map.0).collect();
    assert_eq!((ledger.windows.len(), &maps[..]), (3, &[1, 1][..]));
}
