//! Groups that cannot be made.

use super::*;

/// A bootstrap whose other ranks always send the same.
struct Recorded(Vec<Vec<u8>>);

// SAFETY: the tests share no memory by what it gathers.
unsafe impl Bootstrap for Recorded {
    fn rank(&self) -> u32 {
        0
    }

    fn ranks(&self) -> u32 {
        self.0.len() as u32 + 1
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        Ok([vec![bytes.to_vec()], self.0.clone()].concat())
    }
}

#[test]
fn a_missing_library_is_named_on_its_own_rank() {
    let options = GroupOptions {
        nvshmem_library: Some(PathBuf::from("no/such/libnvshmem_host.so.3")),
        ..GroupOptions::default()
    };
    let bootstrap = Box::new(Recorded(vec![vec![1]]));
    let Err(error) = NvshmemFabric::new(bootstrap, 0, &options) else {
        panic!("there is no such library");
    };
    assert!(matches!(error, Error::LibraryMissing { .. }), "{error}");
    assert!(error.to_string().contains("no/such/libnvshmem_host.so.3"));
}

/// Announcement of a rank with a GPU of its own.
fn announced(gpu: u8, id: usize) -> Vec<u8> {
    let terms = Terms {
        multiprocessors: 132,
        shares: false,
        runs_beside_others: false,
    };
    announced_with(gpu, terms, id)
}

fn announced_with(gpu: u8, terms: Terms, id: usize) -> Vec<u8> {
    let gpu = Gpu {
        uuid: [gpu; 16],
        machine: "here".into(),
    };
    [&gpu.to_bytes()[..], &terms.to_bytes(), &vec![1; id]].concat()
}

#[test]
fn a_short_unique_id_is_refused() {
    let short = [announced(1, 4), announced(2, 0)];
    assert!(matches!(heard(&short), Err(Error::Bootstrap(_))));
    let whole = [announced(1, UniqueId::BYTES), announced(2, 0)];
    assert!(heard(&whole).is_ok());
    assert!(matches!(heard(&[vec![1; 9]]), Err(Error::Bootstrap(_))));
}

#[test]
fn two_ranks_on_one_gpu_are_refused_before_nvshmem_is_joined() {
    let same = [announced(1, UniqueId::BYTES), announced(1, 0)];
    assert!(matches!(heard(&same), Err(Error::GpuShared { .. })));
}

#[test]
fn ranks_share_a_gpu_under_mps_alone() {
    let all = |clients: [bool; 2]| {
        let ids = [UniqueId::BYTES, 0];
        let each = clients
            .into_iter()
            .zip(ids)
            .map(|(runs_beside_others, id)| {
                let terms = Terms {
                    multiprocessors: 132,
                    shares: true,
                    runs_beside_others,
                };
                announced_with(1, terms, id)
            });
        heard(&each.collect::<Vec<_>>())
    };
    let (_, gpus) = all([true; 2]).unwrap();
    assert_eq!(gpus[0].limit(Rank(1), None), Some(66));
    let Err(refused) = all([true, false]) else {
        panic!("rank 1 takes turns");
    };
    let text = refused.to_string();
    assert!(
        text.starts_with("rank 1 shares GPU-0101") && text.contains("MPS"),
        "{text}"
    );
}
