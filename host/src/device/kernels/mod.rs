//! The kernels that a group's devices load: those that this library was built with, or others of the same
//! names.

#[cfg(any(feature = "cuda", test))]
pub(crate) mod specialize;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use ferry_layout::{
    CombineArgs, DispatchArgs, DispatchCountsArgs, FINGERPRINT_VARIABLE, GiveUpArgs, Kernel,
    LAYOUT_FINGERPRINT, LinksArgs, MAX_EPILOGUE_BYTES, MAX_REGISTERS, SiluArgs, Steps,
};
use ferry_ptx::Module;

use crate::error::kernels::KernelsError;

mod target;

pub(crate) use target::Target;

/// The kernels that devices load. Cheap to clone.
///
/// By default these are the kernels that this library was built with, for every GPU generation that it knows.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Kernels {
    plain: Option<Arc<Ptx>>,
    with_options: Option<Arc<OptionKernels>>,
    with_rows: Option<Arc<Ptx>>,
}

/// The user's kernels with options.
#[derive(PartialEq, Eq)]
struct OptionKernels {
    ptx: Ptx,
    /// Bytes of the user's epilogue, rounded up to 8; `None` if they have Ferry's steps.
    epilogue_bytes: Option<usize>,
}

impl Kernels {
    /// Kernels in a PTX text: that of a crate with entries of the same names and arguments as Ferry's,
    /// linked with the `ferry-gpu` of this version, whose fingerprint of the memory layout
    /// is compared. More entries are allowed; those that reach ranks of other nodes are needed only by
    /// `Group::nvshmem`, and then all of them. The text is for one architecture, which each
    /// device compares with its own when a group is made. Kernels for a shape are made from it, too.
    ///
    /// # Errors
    /// All of [`KernelsError`]. The devices compile the text later.
    ///
    /// # Safety
    /// The kernels touch no other memory than Ferry's kernels of the same names and arguments would, and end
    /// as those do.
    pub unsafe fn from_ptx(text: impl Into<String>) -> Result<Self, KernelsError> {
        let ptx = checked(text.into())?;
        Ok(Self {
            plain: Some(Arc::new(ptx)),
            ..Self::default()
        })
    }

    /// Adds kernels with options from a PTX text: that of a crate which declares them
    /// with an epilogue of its own (`ferry_gpu::kernels_with_epilogue!`, `cargo xtask build-ptx
    /// --manifest-path`). Combines with an [`OwnEpilogue`](crate::OwnEpilogue) run on them,
    /// and all other calls with options; combines with an option must have one.
    ///
    /// # Errors
    /// All of [`KernelsError`]: every kernel with options must be present and take the same arguments as
    /// Ferry's, except for the epilogue, which all combines have. The devices compile the text later.
    ///
    /// # Safety
    /// As [`from_ptx`](Self::from_ptx). The epilogue reads no other memory than its value refers to.
    pub unsafe fn with_epilogue(mut self, text: impl Into<String>) -> Result<Self, KernelsError> {
        let (ptx, bytes) = checked_with_options(text.into(), KernelSet::WithOptions, None)?;
        self.with_options = Some(Arc::new(OptionKernels {
            ptx,
            epilogue_bytes: Some(bytes),
        }));
        Ok(self)
    }

    /// Adds kernels with options from a PTX text, as [`from_ptx`](Self::from_ptx) does with
    /// those without: Ferry's own with the steps of [`CombineSteps`](crate::CombineSteps), built by another
    /// compiler.
    ///
    /// # Errors
    /// Those of [`with_epilogue`](Self::with_epilogue); combines whose epilogue does not have the size of
    /// Ferry's steps.
    ///
    /// # Safety
    /// As [`from_ptx`](Self::from_ptx). The epilogue is Ferry's: only its size is compared.
    pub unsafe fn with_options(mut self, text: impl Into<String>) -> Result<Self, KernelsError> {
        let steps = Some(size_of::<Steps>());
        let (ptx, _) = checked_with_options(text.into(), KernelSet::WithOptions, steps)?;
        self.with_options = Some(Arc::new(OptionKernels {
            ptx,
            epilogue_bytes: None,
        }));
        Ok(self)
    }

    /// Adds kernels for rows that stay as they came from a PTX text, as [`from_ptx`](Self::from_ptx) does
    /// with those that put rows in expert order: Ferry's own with the steps of
    /// [`CombineSteps`](crate::CombineSteps), built by another compiler. All calls of a communicator whose
    /// [`receive`](crate::Config::receive) keeps rows run on them.
    ///
    /// # Errors
    /// Those of [`with_options`](Self::with_options).
    ///
    /// # Safety
    /// As [`with_options`](Self::with_options).
    pub unsafe fn with_rows(mut self, text: impl Into<String>) -> Result<Self, KernelsError> {
        let steps = Some(size_of::<Steps>());
        let (ptx, _) = checked_with_options(text.into(), KernelSet::Rows, steps)?;
        self.with_rows = Some(Arc::new(ptx));
        Ok(self)
    }

    /// Checks PTX with other kernels, which the tests load beside these: each is present and takes one
    /// parameter of the given size, and all were built from this library's memory layout.
    ///
    /// # Errors
    /// Those of [`from_ptx`](Self::from_ptx).
    #[doc(hidden)]
    pub fn check_others(text: &str, wanted: &[(&str, usize)]) -> Result<(), KernelsError> {
        let module = read(text)?;
        target_of(&module)?;
        for &(kernel, bytes) in wanted {
            require(&module, kernel, &[bytes as u64])?;
        }
        require_layout(&module)
    }

    /// Bytes of the user's epilogue, rounded up to 8; `None` if combines take Ferry's steps.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn epilogue_bytes(&self) -> Option<usize> {
        self.with_options.as_deref()?.epilogue_bytes
    }

    /// The user's kernels of a set; `None` for the default.
    #[cfg(feature = "cuda")]
    pub(crate) fn given(&self, set: KernelSet) -> Option<&Ptx> {
        match set {
            KernelSet::Plain => self.plain.as_deref(),
            KernelSet::WithOptions => self.with_options.as_deref().map(|given| &given.ptx),
            KernelSet::Rows => self.with_rows.as_deref(),
        }
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.plain {
            None => f.write_str("Kernels::default()")?,
            Some(ptx) => write!(f, "Kernels for {}", ptx.target)?,
        }
        if let Some(given) = &self.with_options {
            let what = match given.epilogue_bytes {
                Some(_) => "an epilogue",
                None => "options",
            };
            write!(f, " with {what} for {}", given.ptx.target)?;
        }
        match &self.with_rows {
            None => Ok(()),
            Some(ptx) => write!(f, " with rows for {}", ptx.target),
        }
    }
}

/// A PTX text and its target.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Ptx {
    pub(crate) target: Target,
    /// The text, with a zero byte at its end.
    text: Cow<'static, str>,
}

impl Ptx {
    /// Wraps a text with a zero byte at its end.
    #[cfg(feature = "cuda")]
    pub(crate) const fn embedded(target: Target, text: &'static str) -> Self {
        Self {
            target,
            text: Cow::Borrowed(text),
        }
    }

    /// The text, with a zero byte at its end.
    #[cfg(feature = "cuda")]
    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

/// Reads PTX that a device may load.
pub(crate) fn read(text: &str) -> Result<Module, KernelsError> {
    let not_ptx = |reason| KernelsError::NotPtx { reason };
    if let Some(at) = text.find('\0') {
        return Err(not_ptx(format!("byte {at} is zero")));
    }
    let module = Module::parse(text).map_err(|error| not_ptx(error.to_string()))?;
    match module.address_bits {
        64 => Ok(module),
        bits => Err(not_ptx(format!("its addresses have {bits} bits, not 64"))),
    }
}

/// Target of PTX.
pub(crate) fn target_of(module: &Module) -> Result<Target, KernelsError> {
    let found = module.target.as_str();
    Target::parse(found).ok_or_else(|| KernelsError::Target {
        found: found.to_owned(),
    })
}

/// Checks that a text's kernels fit this library.
fn checked(mut text: String) -> Result<Ptx, KernelsError> {
    let module = read(&text)?;
    let target = target_of(&module)?;
    for kernel in Kernel::without_options() {
        for shmem in reaches(&module) {
            require(&module, kernel.entry(*shmem), &[argument_bytes(kernel)])?;
        }
    }
    require_layout(&module)?;
    limit_registers(&mut text, &module);
    text.push('\0');
    let text = text.into();
    Ok(Ptx { target, text })
}

/// Whether a PTX was built with NVSHMEM: it has a kernel that reaches ranks of other nodes.
pub(crate) fn has_shmem(module: &Module) -> bool {
    let of_other_nodes = |kernel: Kernel| {
        let entry = kernel.entry(true);
        entry != kernel.entry(false) && module.kernel(entry).is_some()
    };
    Kernel::ALL.into_iter().any(of_other_nodes)
}

/// The entries that a PTX has of each kernel: false, and with NVSHMEM true, for ranks of other nodes.
pub(crate) fn reaches(module: &Module) -> &'static [bool] {
    if has_shmem(module) {
        &[false, true]
    } else {
        &[false]
    }
}

/// Checks that kernels were built from this library's memory layout.
fn require_layout(module: &Module) -> Result<(), KernelsError> {
    let found = module
        .variable(FINGERPRINT_VARIABLE)
        .map(u64::from_le_bytes);
    let wanted = LAYOUT_FINGERPRINT;
    if found == Some(wanted) {
        return Ok(());
    }
    Err(KernelsError::Layout { wanted, found })
}

/// Checks that a text's kernels of a set that takes options fit this library, and returns the bytes of their
/// epilogue, too: `wanted`, or those in the parameter of the fused combine.
fn checked_with_options(
    mut text: String,
    set: KernelSet,
    wanted: Option<usize>,
) -> Result<(Ptx, usize), KernelsError> {
    let module = read(&text)?;
    let target = target_of(&module)?;
    let least = option_bytes(Kernel::Combine);
    let entry = Kernel::Combine.entry(false);
    let parameters = module.kernel(entry).map(|kernel| &kernel.parameters[..]);
    let epilogue_bytes = match (wanted, parameters) {
        (Some(wanted), _) => wanted as u64,
        (None, Some([parameter])) => parameter.bytes.saturating_sub(least),
        _ => 0,
    };
    if epilogue_bytes as usize > MAX_EPILOGUE_BYTES {
        require(&module, entry, &[least + MAX_EPILOGUE_BYTES as u64])?;
    }
    for kernel in set.kernels() {
        let epilogue = if kernel.combines() { epilogue_bytes } else { 0 };
        for shmem in reaches(&module) {
            let wanted = option_bytes(kernel) + epilogue;
            require(&module, kernel.entry(*shmem), &[wanted])?;
        }
    }
    require_layout(&module)?;
    text.push('\0');
    let text = text.into();
    Ok((Ptx { target, text }, epilogue_bytes as usize))
}

/// Limits the registers of kernels whose blocks are larger than the others', unless they have a limit:
/// otherwise the driver's compiler may use so many that no block fits.
fn limit_registers(text: &mut String, module: &Module) {
    let larger = Kernel::ALL
        .into_iter()
        .filter(|kernel| kernel.max_registers() < MAX_REGISTERS);
    let limits = larger.filter_map(|kernel| {
        let found = module.kernel(kernel.entry(false))?;
        let place = found.body.start - 1;
        let header = &module.text()[found.place.start..place];
        let says = [".maxnreg", ".maxntid", ".reqntid"].map(|limit| header.contains(limit));
        (!says.contains(&true)).then_some((place, kernel.max_registers()))
    });
    let mut limits: Vec<_> = limits.collect();
    // From the last to the first, so that earlier places stay valid.
    limits.sort_unstable();
    for (place, registers) in limits.into_iter().rev() {
        text.insert_str(place, &format!(".maxnreg {registers}\n"));
    }
}

/// Checks that a kernel is present and takes parameters of these sizes.
pub(crate) fn require(module: &Module, kernel: &str, wanted: &[u64]) -> Result<(), KernelsError> {
    let Some(found) = module.kernel(kernel) else {
        return Err(KernelsError::Missing {
            kernel: kernel.to_owned(),
            target: module.target.clone(),
        });
    };
    let found: Vec<u64> = found.parameters.iter().map(|p| p.bytes).collect();
    if found == wanted {
        return Ok(());
    }
    Err(KernelsError::Parameters {
        kernel: kernel.to_owned(),
        wanted: wanted.to_vec(),
        found,
    })
}

/// A set of Ferry's kernels in one PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelSet {
    /// Kernels without options.
    Plain,
    /// Kernels with options, with the same names.
    #[cfg_attr(
        not(any(test, feature = "cuda")),
        expect(dead_code, reason = "only devices load them")
    )]
    WithOptions,
    /// Kernels with options for rows that stay as they came, with the same names.
    #[cfg_attr(
        not(any(test, feature = "cuda")),
        expect(dead_code, reason = "only devices load them")
    )]
    Rows,
}

impl KernelSet {
    /// The kernels in the set.
    pub(crate) fn kernels(self) -> impl Iterator<Item = Kernel> {
        let has = move |kernel: &Kernel| match self {
            Self::Plain => !kernel.needs_options(),
            Self::WithOptions => {
                !kernel.has_no_options()
                    && !matches!(kernel, Kernel::GiveUp | Kernel::DispatchCounts)
            }
            Self::Rows => !kernel.has_no_options() && !kernel.needs_options(),
        };
        Kernel::ALL.into_iter().filter(has)
    }
}

/// Bytes of the struct that a kernel of a set with options takes, for a combine without its epilogue.
pub(crate) const fn option_bytes(kernel: Kernel) -> u64 {
    let bytes = match kernel {
        Kernel::DispatchAsync | Kernel::DispatchWait | Kernel::Dispatch | Kernel::LocalDispatch => {
            size_of::<ferry_layout::DispatchWith>()
        }
        Kernel::CombineAsync | Kernel::CombineWait | Kernel::Combine | Kernel::LocalCombine => {
            size_of::<ferry_layout::CombineWith<()>>()
        }
        Kernel::GiveUp => size_of::<GiveUpArgs>(),
        Kernel::DispatchCounts => size_of::<DispatchCountsArgs>(),
        Kernel::FusedSilu | Kernel::Links => 0,
    };
    bytes as u64
}

/// Bytes of the struct that a kernel takes.
const fn argument_bytes(kernel: Kernel) -> u64 {
    let bytes = match kernel {
        Kernel::DispatchAsync | Kernel::DispatchWait | Kernel::Dispatch => {
            size_of::<DispatchArgs>()
        }
        Kernel::CombineAsync | Kernel::CombineWait | Kernel::Combine => size_of::<CombineArgs>(),
        Kernel::GiveUp => size_of::<GiveUpArgs>(),
        Kernel::DispatchCounts => size_of::<DispatchCountsArgs>(),
        Kernel::FusedSilu => size_of::<SiluArgs>(),
        Kernel::Links => size_of::<LinksArgs>(),
        // Only with options.
        Kernel::LocalDispatch | Kernel::LocalCombine => 0,
    };
    bytes as u64
}

#[cfg(test)]
mod tests;
