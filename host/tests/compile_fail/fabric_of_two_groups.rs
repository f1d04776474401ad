//! A fabric has one group: two would close it under each other's communicators.

use std::sync::Arc;

use ferry::{Error, Fabric, Group};

fn twice(fabric: Arc<dyn Fabric>) -> Result<[Group; 2], Error> {
    let first = Group::with_fabric(fabric.clone())?;
    Ok([first, Group::with_fabric(fabric)?])
}

fn main() {}
