//! The modules that this process has loaded.

use std::sync::Arc;

use ferry_layout::Shape;

use super::context::PrimaryContext;
use super::module::Module;
use crate::device::kernels::KernelSet;
use crate::device::kernels::Kernels;
use crate::device::loaded_kernels::Kept;
use crate::error::Error;

/// The modules of each device, by its number and its kernels. Kept as long as the process, see
/// [`Module`]: a device that is opened again finds them.
static MODULES: Kept<(usize, Kernels), Modules> = Kept::new();

/// The modules of one device and one source of kernels: of each set for one shape each, or for all.
pub(super) struct Modules(Kept<(KernelSet, Option<Shape>), Module>);

impl Modules {
    /// The modules of device number `ordinal`. Loads none.
    pub(super) fn of(ordinal: usize, kernels: &Kernels) -> Result<Arc<Self>, Error> {
        MODULES.get((ordinal, kernels.clone()), || Ok(Self(Kept::new())))
    }

    /// The kernels of `set` for all shapes, loaded unless they are already. The context is current.
    /// Synchronizes.
    pub(super) fn general(
        &self,
        context: &PrimaryContext,
        kernels: &Kernels,
        set: KernelSet,
    ) -> Result<Arc<Module>, Error> {
        self.0
            .get((set, None), || Module::load(context, kernels, set))
    }

    /// The kernels of `set` for `shape` alone, made from the `general` ones. The context is current.
    /// Synchronizes.
    pub(super) fn special(
        &self,
        general: &Module,
        set: KernelSet,
        shape: &Shape,
    ) -> Result<Arc<Module>, Error> {
        self.0.get((set, Some(*shape)), || general.load_for(shape))
    }
}
