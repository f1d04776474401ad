//! Wheels with NVIDIA's tools, which assemble PTX, generate bindings and replace a CUDA installation.

use ferry_build::Wheel;

/// `ptxas`.
pub const NVCC: Wheel = Wheel {
    name: "nvidia-cuda-nvcc",
    version: "13.0.88",
    sha256: [
        "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
        "c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f",
    ],
};
/// `cuda.h`, `cuda_runtime.h`.
pub const RUNTIME: Wheel = Wheel {
    name: "nvidia-cuda-runtime",
    version: "13.0.96",
    sha256: [
        "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
        "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
    ],
};
/// Headers that the runtime's headers include.
pub const CRT: Wheel = Wheel {
    name: "nvidia-cuda-crt",
    version: "13.0.88",
    sha256: [
        "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
        "ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003",
    ],
};
/// `cuda/std`, which NVSHMEM's headers include.
pub const CCCL: Wheel = Wheel {
    name: "nvidia-cuda-cccl",
    version: "13.0.85",
    sha256: [
        "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
        "6f0203e29fed809ee2b7fe9b1344df66ecab990c37d6a2e0e189b26d6c97ed7c",
    ],
};

/// libNVVM, its header and libdevice.
pub const NVVM: Wheel = Wheel {
    name: "nvidia-nvvm",
    version: "13.0.88",
    sha256: [
        "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
        "c4376a291d72d22a315d9d2f69bdae8f8cd83a627f75bad395cee49a0fe65dc1",
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_has_the_sums_of_two_files() {
        for wheel in [NVCC, RUNTIME, CRT, CCCL, NVVM] {
            let [x86_64, aarch64] = wheel.sha256;
            assert_ne!(x86_64, aarch64, "{}", wheel.name);
            for sum in wheel.sha256 {
                let is_hex = sum.bytes().all(|byte| byte.is_ascii_hexdigit());
                assert!(sum.len() == 64 && is_hex, "{}: {sum}", wheel.name);
            }
        }
    }
}
