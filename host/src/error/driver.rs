//! Errors of drivers, devices and kernels that do not fit together.

/// Reason why kernels cannot run on a device of this machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// A CUDA driver without a required function.
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
        /// Its compute capability: "8.0".
        capability: String,
        /// Targets of the embedded kernels: "sm_80, sm_90a".
        available: String,
    },
}
