//! Groups that do not come about.

use super::*;

/// A bootstrap whose other ranks always say the same.
struct Recorded(Vec<Vec<u8>>);

// SAFETY: no memory is shared by what it gathers.
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
    let options = NvshmemOptions {
        library: Some(PathBuf::from("no/such/libnvshmem_host.so.3")),
        ..NvshmemOptions::default()
    };
    let bootstrap = Box::new(Recorded(vec![vec![1]]));
    let Err(error) = NvshmemFabric::new(bootstrap, options, &Kernels::default()) else {
        panic!("there is no such library");
    };
    assert!(matches!(error, Error::LibraryMissing { .. }), "{error}");
    assert!(error.to_string().contains("no/such/libnvshmem_host.so.3"));
}

/// What a rank announces.
fn announced(gpu: u8, id: usize) -> Vec<u8> {
    let gpu = Gpu {
        uuid: [gpu; 16],
        machine: "here".into(),
    };
    [gpu.to_bytes(), vec![1; id]].concat()
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
