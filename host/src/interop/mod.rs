//! Streams and memory of other crates.

#[cfg(feature = "candle")]
pub mod candle;
#[cfg(feature = "cudarc")]
pub mod cudarc;
#[cfg(feature = "cust")]
pub mod cust;
pub(crate) mod lease;

#[cfg(any(feature = "cudarc", feature = "cust"))]
use crate::cuda::CudaDevice;
#[cfg(any(feature = "cudarc", feature = "cust"))]
use crate::device::Device;
#[cfg(any(feature = "cudarc", feature = "cust", test))]
use crate::error::{Error, TensorError};
#[cfg(any(feature = "cudarc", feature = "cust", test))]
use crate::tensor::{Tensor, data_type::DataType, handles::DevicePtr};

/// Returns the CUDA device that `what` is used for.
#[cfg(any(feature = "cudarc", feature = "cust"))]
fn cuda<'d>(what: &'static str, device: &'d dyn Device) -> Result<&'d CudaDevice, Error> {
    let cuda = device.as_any().and_then(|device| device.downcast_ref());
    cuda.ok_or_else(|| Error::OtherDevice {
        what,
        owner: "a CUDA device".to_owned(),
        device: device.name(),
    })
}

/// Refuses memory of fewer elements than a tensor without gaps has.
#[cfg(any(feature = "cudarc", feature = "cust", test))]
fn require_elements<const N: usize>(
    memory: &'static str,
    given: usize,
    dims: [usize; N],
) -> Result<(), Error> {
    let wanted = Tensor::contiguous(DevicePtr::NULL, DataType::U8, dims).elements();
    if wanted <= given {
        return Ok(());
    }
    Err(Error::from(TensorError {
        tensor: memory,
        wanted: format!("{wanted} elements (shape {dims:?})"),
        given: given.to_string(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_as_long_as_its_shape_at_least() {
        assert!(require_elements("slice", 12, [3, 4]).is_ok());
        assert!(require_elements("slice", 0, [0, 4]).is_ok());
        let error = require_elements("slice", 11, [3, 4]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tensor slice: wanted 12 elements (shape [3, 4]), given 11"
        );
        assert!(require_elements("slice", usize::MAX - 1, [usize::MAX, 2]).is_err());
    }
}
