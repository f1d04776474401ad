//! The output tensors of a dispatch by name: the one list of them on this side.

use ferry::{DevicePtr, DispatchTensors};

/// Sets the address of the output `name`; false if a dispatch has none of that name. The library refuses
/// those that are missing, or too many, by name.
pub(crate) fn set(outputs: &mut DispatchTensors<DevicePtr>, name: &str, at: DevicePtr) -> bool {
    let place = match name {
        "tokens" => &mut outputs.tokens,
        "scales" => &mut outputs.scales,
        "scale_offsets" => &mut outputs.scale_offsets,
        "row_scales" => &mut outputs.row_scales,
        "row_offsets" => &mut outputs.row_offsets,
        "expert_ids" => &mut outputs.expert_ids,
        "src_info" => {
            outputs.src_info = at;
            return true;
        }
        "ids" => &mut outputs.ids,
        "weights" => &mut outputs.weights,
        "source_rows" => &mut outputs.source_rows,
        "expert_rows" => &mut outputs.expert_rows,
        _ => return false,
    };
    *place = Some(at);
    true
}
