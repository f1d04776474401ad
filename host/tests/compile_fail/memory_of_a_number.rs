//! A number is no memory and no stream.

use ferry::{DevicePtr, Stream};

fn main() {
    let _ = DevicePtr(0x1000);
    let _ = Stream(0x1000);
}
