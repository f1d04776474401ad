//! Who names memory, a stream or what to free promises something.

use ferry::{Device, DevicePtr, Stream};

fn free(device: &dyn Device, at: DevicePtr) {
    let _ = device.free(at);
}

fn main() {
    let _ = DevicePtr::new(0x1000, 64);
    let _ = Stream::new(0x1000);
}
