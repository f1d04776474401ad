//! Every argument is the one of its row.

use ferry_layout::ScaleLayout;

use super::*;
use crate::call::DispatchOutput;
use crate::plan::config::Config;
use crate::tensor::handles::DevicePtr;

/// Tensors of these numbers of dimensions, each at an address of its own.
fn tensors<const N: usize>(ndims: [usize; N]) -> [Option<AnyTensor>; N] {
    let mut address = 0;
    ndims.map(|ndim| {
        address += 16;
        // SAFETY: `DevicePtr::new` is about accesses of a device, and none is made here.
        let at = unsafe { DevicePtr::new(address, 16) };
        AnyTensor::new(at, DataType::F32, &[1; 5][..ndim], None)
    })
}

/// Checks that each argument is in its place, and that its errors have its name.
fn each_is_itself<const N: usize>(
    table: &[Argument; N],
    ndims: [usize; N],
    read: impl Fn([Option<AnyTensor>; N]) -> Result<[Option<AnyTensor>; N], TensorError>,
) {
    let all = tensors(ndims);
    assert_eq!(read(all), Ok(all));
    for (at, argument) in table.iter().enumerate() {
        let mut other = all;
        other[at] = AnyTensor::new(DevicePtr::NULL, DataType::F32, &[1; 4], None);
        assert_eq!(read(other).unwrap_err().tensor, argument.name);
        other[at] = None;
        match read(other) {
            Ok(read) => assert!(!argument.is_required && read == other),
            // Tiled scales have both tensors or none.
            Err(error) if argument.name.starts_with("scale") => {
                assert_eq!(error.tensor, "scale_offsets");
            }
            Err(error) => assert!(argument.is_required && error.tensor == argument.name),
        }
    }
}

#[test]
fn each_argument_is_the_one_of_its_row() {
    each_is_itself(DispatchInput::ARGUMENTS, [2, 2, 2, 1, 1, 2, 2], |given| {
        Ok(DispatchInput::of(given)?.tensors())
    });
    let of_combine = [2, 2, 1, 1, 1, 1, 2, 2, 2, 2];
    each_is_itself(CombineInput::ARGUMENTS, of_combine, |given| {
        Ok(CombineInput::of(given)?.tensors())
    });
    each_is_itself(CombineOutput::ARGUMENTS, [2, 2], |given| {
        Ok(CombineOutput::of(given)?.tensors())
    });
    let tiled = Config {
        format: TokenFormat::Mxfp8(ScaleLayout::Tiled),
        ..Config::new(2, 1, 256, 4)
    };
    let plan = Plan::check(2, true, tiled).unwrap();
    let of_output = [2, 5, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 2];
    each_is_itself(DispatchOutput::ARGUMENTS, of_output, |given| {
        Ok(DispatchOutput::of(&plan, given)?.tensors())
    });
    let [apart, _] = tensors([3, 1]);
    assert!(matches!(
        CombineOutput::of([apart, None]),
        Ok(CombineOutput::Apart(_))
    ));
}
