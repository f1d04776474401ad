//! The output tensors of a dispatch by name: the one list of them on this side.

use ferry::{DevicePtr, DispatchTensors};

/// Sets the value of the output `name`; false if a dispatch has none of that name.
pub(crate) fn set<T>(outputs: &mut DispatchTensors<Option<T>>, name: &str, value: T) -> bool {
    let place = match name {
        "tokens" => &mut outputs.tokens,
        "scales" => outputs.scales.get_or_insert(None),
        "scale_offsets" => outputs.scale_offsets.get_or_insert(None),
        "row_scales" => outputs.row_scales.get_or_insert(None),
        "row_offsets" => &mut outputs.row_offsets,
        "expert_ids" => &mut outputs.expert_ids,
        "src_info" => &mut outputs.src_info,
        _ => return false,
    };
    *place = Some(value);
    true
}

/// The addresses of outputs, null for those that are missing and needed: the library refuses these by name.
pub(crate) fn addresses(outputs: DispatchTensors<Option<DevicePtr>>) -> DispatchTensors<DevicePtr> {
    let place = |at: Option<DevicePtr>| at.unwrap_or(DevicePtr::NULL);
    DispatchTensors {
        tokens: place(outputs.tokens),
        scales: outputs.scales.map(place),
        scale_offsets: outputs.scale_offsets.map(place),
        row_scales: outputs.row_scales.map(place),
        row_offsets: place(outputs.row_offsets),
        expert_ids: place(outputs.expert_ids),
        src_info: place(outputs.src_info),
    }
}
