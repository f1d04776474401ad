//! Whether driver, device and kernels fit.

/// Why kernels cannot run on a device of this machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// A CUDA driver without a function that is needed.
    #[error("the CUDA driver (CUDA {driver}) has no {function}; install a newer driver")]
    TooOld {
        /// The function: "cuLaunchKernelEx".
        function: &'static str,
        /// The driver's CUDA version.
        driver: String,
    },
    /// The embedded PTX is newer than the driver.
    #[error(
        "the kernels' PTX ({ptx}) is too new for the driver, which supports CUDA {driver}; \
         install a newer driver"
    )]
    PtxTooNew {
        /// The PTX version and target.
        ptx: String,
        /// The driver's CUDA version.
        driver: String,
    },
    /// No embedded PTX that the device can run.
    #[error(
        "no embedded kernels run on {device} (compute capability {capability}); there are {available}"
    )]
    NoKernelFor {
        /// The device's name.
        device: String,
        /// "8.0".
        capability: String,
        /// "sm_80, sm_90a".
        available: String,
    },
}
