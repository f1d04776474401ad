//! Calls of a round with tensors, in the order of the library's tables of arguments.

use ferry::{
    AnyTensor, Argument, CombineInput, CombineOutput, DispatchInput, DispatchOutput, TokenFormat,
};
use pyo3::prelude::*;

use crate::communicator::Communicator;
use crate::errors;
use crate::placed::{Given, Places};
use crate::tensor::{Tensor, Wanted};

/// A call of a round with checked arguments, which it keeps.
#[pyclass(frozen, module = "ferry_ep.core._ferry")]
pub(crate) struct Call {
    pub(crate) call: ferry::Call,
    _kept: [List<Py<Tensor>>; 2],
}

/// Tensors of a call, or none, in the order of its arguments.
type List<T> = Vec<Option<T>>;

#[pymethods]
impl Call {
    /// `name`: of the function that makes it. `inputs` and `outputs` are in the order of `arguments_of`;
    /// outputs of a dispatch in that of `layout_of`.
    #[new]
    #[pyo3(signature = (communicator, name, inputs=Vec::new(), outputs=Vec::new()))]
    fn new(
        communicator: &Communicator,
        name: &str,
        inputs: List<Py<Tensor>>,
        outputs: List<Py<Tensor>>,
    ) -> PyResult<Self> {
        let read = |(name, _): Wanted, tensor: &Py<Tensor>| tensor.get().any(name);
        let given = Tensors::of(&inputs, &outputs, None, &read);
        let call = given.call(communicator, name)?;
        if let ferry::Call::Dispatch(_, output) | ferry::Call::DispatchWait(output) = &call {
            let plan = &communicator.plan.get().plan;
            output.fits(plan).map_err(errors::from)?;
        }
        Ok(Self {
            call,
            _kept: [inputs, outputs],
        })
    }
}

/// Name and type of each input of a call, and whether it has to be there.
#[pyfunction]
pub(crate) fn arguments_of(
    name: &str,
    format: &str,
    is_encoded: bool,
) -> PyResult<Vec<(&'static str, &'static str, bool)>> {
    let format: TokenFormat = format
        .parse()
        .map_err(|unknown: ferry::layout::UnknownName| {
            errors::raise("ArgumentError", unknown.to_string())
        })?;
    let table: &'static [Argument] = match name {
        "dispatch" | "dispatch_async" => DispatchInput::ARGUMENTS,
        "combine" | "combine_async" => CombineInput::ARGUMENTS,
        _ => &[],
    };
    let row = |argument: &Argument| {
        let data_type = argument.data_type(format, is_encoded).name();
        // Python has an argument for each bias.
        let name = match argument.name {
            "biases[0]" => "bias",
            "biases[1]" => "bias2",
            name => name,
        };
        (name, data_type, argument.is_required)
    };
    Ok(table.iter().map(row).collect())
}

/// Tensors of a call.
pub(crate) struct Tensors<'a, T> {
    inputs: Given<'a, T>,
    outputs: Given<'a, T>,
    /// Places of the outputs of a dispatch in `outputs`, unless each is one.
    places: Option<&'a Places>,
}

impl<'a, T> Tensors<'a, T> {
    /// Tensors in the order of the call's arguments, and what reads one of them.
    pub(crate) fn of(
        inputs: &'a [Option<T>],
        outputs: &'a [Option<T>],
        places: Option<&'a Places>,
        read: &'a dyn Fn(Wanted, &T) -> PyResult<AnyTensor>,
    ) -> Self {
        let of = |tensors| Given { tensors, read };
        Self {
            inputs: of(inputs),
            outputs: of(outputs),
            places,
        }
    }

    /// The call of this name.
    pub(crate) fn call(&self, communicator: &Communicator, name: &str) -> PyResult<ferry::Call> {
        use ferry::Call as Of;
        let sent = || self.sent(communicator);
        let rows = || self.rows(communicator);
        let answers = || self.answers(communicator);
        let [sends, fills] =
            [&self.inputs, &self.outputs].map(|given| given.tensors.iter().any(Option::is_some));
        Ok(match name {
            "dispatch" => Of::Dispatch(sent()?, rows()?),
            "dispatch_async" if !fills || self.places.is_some() => Of::DispatchAsync(sent()?),
            "dispatch_counts" if !sends && !fills => Of::DispatchCounts,
            "dispatch_wait" if !sends => Of::DispatchWait(rows()?),
            "combine" => answers().map(|(input, output)| Of::Combine(input, output))?,
            "combine_async" => answers().map(|(input, output)| Of::CombineAsync(input, output))?,
            "combine_wait" if !sends && !fills => Of::CombineWait,
            "give_up" if !sends && !fills => Of::GiveUp,
            _ => {
                let text = format!("no call {name} takes these arguments");
                return Err(errors::raise("ArgumentError", text));
            }
        })
    }

    fn sent(&self, communicator: &Communicator) -> PyResult<DispatchInput> {
        let mut given = table(DispatchInput::ARGUMENTS, &self.inputs, communicator)?;
        if let (Some(places), Some(kept_ids)) = (self.places, given.last_mut()) {
            *kept_ids = self.outputs.kept_ids(places)?;
        }
        DispatchInput::of(given).map_err(errors::from_any)
    }

    fn rows(&self, communicator: &Communicator) -> PyResult<DispatchOutput> {
        let plan = &communicator.plan.get().plan;
        let given = self.outputs.outputs(plan, self.places)?;
        DispatchOutput::of(plan, given).map_err(errors::from_any)
    }

    fn answers(&self, communicator: &Communicator) -> PyResult<(CombineInput, CombineOutput)> {
        let given = table(CombineInput::ARGUMENTS, &self.inputs, communicator)?;
        let sums = table(CombineOutput::ARGUMENTS, &self.outputs, communicator)?;
        let input = CombineInput::of(given).map_err(errors::from_any)?;
        Ok((input, CombineOutput::of(sums).map_err(errors::from_any)?))
    }
}

/// The tensors of a table's arguments. Those that a shorter list does not have are missing.
fn table<T, const N: usize>(
    table: &[Argument; N],
    given: &Given<'_, T>,
    communicator: &Communicator,
) -> PyResult<[Option<AnyTensor>; N]> {
    if given.tensors.len() > N {
        let count = given.tensors.len();
        let text = format!("{count} tensors were given, and there are {N} arguments");
        return Err(errors::raise("ArgumentError", text));
    }
    let format = communicator.plan.get().plan.config().format;
    let pairs = || table.iter().zip(given.tensors);
    let is_encoded = pairs().any(|(of, tensor)| of.is_scales() && tensor.is_some());
    let mut tensors = [None; N];
    for (place, (of, tensor)) in tensors.iter_mut().zip(pairs()) {
        let wanted = (of.name, of.data_type(format, is_encoded));
        *place = (tensor.as_ref())
            .map(|tensor| (given.read)(wanted, tensor))
            .transpose()?;
    }
    Ok(tensors)
}

/// Blocks of rows that follow one another without gaps, as rows.
pub(crate) fn flat(tensor: AnyTensor) -> AnyTensor {
    let (&[blocks, rows, columns], &[block, row, column]) = (tensor.dims(), tensor.strides())
    else {
        return tensor;
    };
    // A stride of a dimension of one element says nothing.
    let stride = if rows == 1 { block } else { row };
    if blocks != 1 && block != rows.saturating_mul(stride) {
        return tensor;
    }
    let dims = [blocks.saturating_mul(rows), columns];
    let strides = [stride, column];
    AnyTensor::new(tensor.at(), tensor.data_type(), &dims, Some(&strides)).unwrap_or(tensor)
}
