//! Plans and capacities.

use std::time::Duration;

use ferry::{
    Capacity, CombineMode, Config, Rank, ReceiveLayout, ReceivedRows, TensorLayout, TokenFormat,
};
use half::bf16;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;
use crate::group::Group;

/// Proof that a :class:`ferry_ep.Config` fits a group, and the sizes that follow from it.
///
/// Raises :class:`ferry_ep.PlanError` with every problem at once. Not collective.
#[pyclass(frozen, eq, module = "ferry_ep")]
#[derive(PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) plan: ferry::Plan,
    /// The configuration that was checked.
    #[pyo3(get)]
    config: Kept,
}

/// A Python object that does not count in comparisons.
struct Kept(Py<PyAny>);

impl PartialEq for Kept {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Kept {}

impl<'py> IntoPyObject<'py> for &Kept {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.0.bind(py).clone())
    }
}

#[pymethods]
impl Plan {
    #[new]
    fn new(group: &Group, config: &Bound<'_, PyAny>) -> PyResult<Self> {
        let checked = read(config)?;
        let plan = ferry::Plan::new(&group.open()?, checked).map_err(errors::from)?;
        let config = Kept(config.clone().unbind());
        Ok(Self { plan, config })
    }

    /// Ranks of the group.
    #[getter]
    fn ranks(&self) -> u32 {
        self.plan.ranks()
    }

    /// Most multiprocessors that a kernel of this process occupies; ``None`` for all.
    #[getter]
    fn max_sms(&self) -> Option<u32> {
        self.plan.max_sms()
    }

    /// Experts on each rank.
    #[getter]
    fn local_experts(&self) -> usize {
        self.plan.local_experts()
    }

    /// Returns the first expert on ``rank``; the others follow it.
    fn first_expert(&self, rank: u32) -> usize {
        self.plan.first_expert(Rank(rank))
    }

    /// Groups of rows in a dispatch's outputs: local experts, and a shared expert before these.
    #[getter]
    fn groups(&self) -> usize {
        self.plan.groups()
    }

    /// Most rows that a dispatch can bring to a rank.
    #[getter]
    fn max_rows(&self) -> usize {
        self.plan.max_rows()
    }

    /// Most rows if the experts of each token differ.
    #[getter]
    fn max_rows_distinct(&self) -> usize {
        self.plan.max_rows_distinct()
    }

    /// Bytes from one row of a :class:`ferry_ep.View` to the next, a multiple of 128.
    #[getter]
    fn view_row_stride(&self) -> u64 {
        self.plan.view_row_stride()
    }

    /// Bytes of each rank's receive window, in device memory of the library.
    #[getter]
    fn window_bytes(&self) -> u64 {
        self.plan.window_bytes()
    }

    /// Bytes of each rank's workspace, in device memory of the library.
    #[getter]
    fn workspace_bytes(&self) -> u64 {
        self.plan.workspace_bytes()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let config = self.config.0.bind(py).repr()?;
        Ok(format!(
            "<ferry_ep.Plan of {} ranks: {config}>",
            self.plan.ranks()
        ))
    }

    /// Returns the range ``(start, end)``, ``end`` excluded, of the ``tokens`` tokens that the shared expert
    /// gets on ``rank``; it is empty without a shared expert.
    fn shared_tokens(&self, rank: u32, tokens: usize) -> (usize, usize) {
        let range = self.plan.shared_tokens(Rank(rank), tokens);
        (range.start, range.end)
    }

    /// `(rows, scale_blocks)` of the capacity "max", "distinct", or of so many rows.
    fn _capacity(&self, capacity: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
        let capacity = self.capacity(capacity)?;
        Ok((capacity.rows, capacity.scale_blocks))
    }

    /// Returns the outputs of a dispatch, in order, to allocate them yourself; not those that the plan's
    /// format and ``receive`` layout do not have. ``capacity`` (``None`` is ``"max"``) and ``id_type`` are
    /// those of :meth:`ferry_ep.Communicator.outputs`, and so are the errors. Not collective.
    #[pyo3(signature = (capacity=None, *, id_type="i32"))]
    fn output_layout<'py>(
        &self,
        py: Python<'py>,
        capacity: Option<&Bound<'py, PyAny>>,
        id_type: &str,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let capacity = match capacity {
            Some(given) => self.capacity(given)?,
            None => Capacity::max(&self.plan),
        };
        let wide_ids = match id_type {
            "i32" => false,
            "i64" => true,
            _ => {
                let text = format!("id_type is {id_type:?}, but it is \"i32\" or \"i64\"");
                return Err(errors::raise("ArgumentError", text));
            }
        };
        self._output_layout(py, capacity.rows, capacity.scale_blocks, wide_ids)
    }

    /// Layouts of a dispatch's outputs, in order.
    #[pyo3(signature = (rows, scale_blocks, wide_ids=false))]
    fn _output_layout<'py>(
        &self,
        py: Python<'py>,
        rows: usize,
        scale_blocks: usize,
        wide_ids: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let capacity = Capacity {
            rows,
            scale_blocks,
            wide_ids,
        };
        let layout = self.plan.output_layout(capacity).map_err(errors::from)?;
        let class = py.import("ferry_ep.outputs")?.getattr("TensorLayout")?;
        let one = |of: &TensorLayout| {
            let of = (
                of.name,
                of.data_type.name(),
                of.dims.clone(),
                of.bytes,
                of.align,
            );
            class.call1(of)
        };
        layout.iter().map(one).collect()
    }
}

impl Plan {
    fn capacity(&self, given: &Bound<'_, PyAny>) -> PyResult<Capacity> {
        if let Ok(rows) = given.extract::<usize>() {
            return Ok(Capacity::of_rows(&self.plan, rows));
        }
        match given.extract::<&str>() {
            Ok("max") => Ok(Capacity::max(&self.plan)),
            Ok("distinct") => Ok(Capacity::max_distinct(&self.plan)),
            _ => Err(errors::raise(
                "ArgumentError",
                format!(
                    "capacity is {given:?}, but it is a number of rows, \"max\" or \"distinct\""
                ),
            )),
        }
    }
}

/// Reads the attributes of a `Config`.
fn read(given: &Bound<'_, PyAny>) -> PyResult<Config> {
    fn word<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> PyResult<T> {
        text.parse()
            .map_err(|unknown: T::Err| errors::raise("ArgumentError", unknown.to_string()))
    }
    let get = |name: &str| given.getattr(name);
    let seconds: f64 = get("deadline")?.extract()?;
    let deadline = Duration::try_from_secs_f64(seconds).map_err(|_| {
        let text = format!("deadline is {seconds}, but it is a number of seconds above 0");
        errors::raise("ArgumentError", text)
    })?;
    let size = |name: &str| -> PyResult<usize> {
        let value = get(name)?;
        value.extract().map_err(|_| {
            let text = format!("{name} is {value}, but it is a number of at least 0");
            errors::raise("ArgumentError", text)
        })
    };
    Ok(Config {
        p2p_world_size: get("p2p_world_size")?.extract()?,
        format: word::<TokenFormat>(get("format")?.extract()?)?,
        combine: word::<CombineMode>(get("combine")?.extract()?)?,
        receive: word::<ReceiveLayout>(get("receive")?.extract()?)?,
        transposed_scales: get("transposed_scales")?.extract()?,
        clear_absent: get("clear_absent")?.extract()?,
        combine_weights: get("combine_weights")?.extract()?,
        shared_expert: get("shared_expert")?.extract()?,
        deadline,
        debug_checks: get("debug_checks")?.extract()?,
        max_sms: get("max_sms")?.extract()?,
        skip_a2a: get("skip_a2a")?.extract()?,
        specialise: get("specialise")?.extract()?,
        options: get("options")?.extract()?,
        ..Config::new(
            size("experts")?,
            size("top_k")?,
            size("hidden")?,
            size("max_tokens_per_rank")?,
        )
    })
}

/// Bits of an element of a format, elements that share a scale (0: none), and the layout of scales.
#[pyfunction]
pub(crate) fn format_sizes(format: &str) -> PyResult<(u32, u32, Option<&'static str>)> {
    let format: TokenFormat = format
        .parse()
        .map_err(|unknown: ferry::layout::UnknownName| {
            errors::raise("ArgumentError", unknown.to_string())
        })?;
    let sizes = format.sizes();
    let layout = format.scale_layout().map(|layout| layout.name());
    Ok((sizes.element_bits, sizes.group, layout))
}

/// Decodes host copies of a dispatch's outputs to f32, `[rows, hidden]`, as bytes. `rows` counts if the plan
/// keeps rows as they came. `scales` are scales and row scales, `offsets` those of rows and of scales.
#[pyfunction]
#[pyo3(signature = (plan, rows, tokens, scales, offsets, input_scale=None))]
pub(crate) fn decode_rows<'py>(
    py: Python<'py>,
    plan: &Plan,
    rows: usize,
    tokens: Vec<u8>,
    scales: (Vec<u8>, Vec<u16>),
    offsets: (Vec<u32>, Vec<u32>),
    input_scale: Option<f32>,
) -> PyResult<Bound<'py, PyBytes>> {
    let ((scales, row_scales), (row_offsets, scale_offsets)) = (scales, offsets);
    let rows = ReceivedRows {
        tokens,
        scales,
        scale_offsets,
        row_scales: row_scales.into_iter().map(bf16::from_bits).collect(),
        row_offsets,
        src_info: vec![[-1; 2]; rows],
        ..ReceivedRows::default()
    };
    let values = ferry::decode_rows(&plan.plan, &rows, input_scale).map_err(errors::from)?;
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    Ok(PyBytes::new(py, &bytes))
}
