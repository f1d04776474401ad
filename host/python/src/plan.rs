//! Plans and capacities.

use std::time::Duration;

use ferry::{
    Capacity, CombineMode, Config, Error, Rank, ReceiveFields, ReceiveLayout, ReceivedRows,
    TensorLayout, TokenFormat,
};
use half::bf16;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;
use crate::group::Group;
use crate::scalars::{self, Scalar, shown};

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
    fn new(group: &Bound<'_, PyAny>, config: &Bound<'_, PyAny>) -> PyResult<Self> {
        let group = scalars::handle::<Group>("group", group)?;
        let class = config
            .py()
            .import("ferry_ep.core.config")?
            .getattr("Config")?;
        if !config.is_instance(&class)? {
            let text = format!("config is {}, but it is a ferry_ep.Config", shown(config));
            return Err(errors::raise("ArgumentError", text));
        }
        let plan = checked(group.get(), config)?;
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
    fn first_expert(&self, #[pyo3(from_py_with = scalars::rank)] rank: u32) -> PyResult<usize> {
        Ok(self.plan.first_expert(self.rank(rank)?))
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

    /// Number of which the rows of outputs, and the first row of each group, are a multiple.
    #[getter]
    fn row_alignment(&self) -> u32 {
        self.plan.row_alignment()
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

    /// Returns the range ``(start, end)``, ``end`` excluded, of those of ``tokens`` tokens that the
    /// shared expert gets on ``rank``; it is empty without a shared expert.
    fn shared_tokens(
        &self,
        #[pyo3(from_py_with = scalars::rank)] rank: u32,
        #[pyo3(from_py_with = scalars::tokens)] tokens: usize,
    ) -> PyResult<(usize, usize)> {
        let range = self.plan.shared_tokens(self.rank(rank)?, tokens);
        Ok((range.start, range.end))
    }

    /// Returns the outputs of a dispatch, in order, to allocate them yourself; not those that the plan's
    /// format and ``receive`` layout do not have. ``capacity`` (``None`` is ``"max"``) and ``id_type`` are
    /// those of :meth:`ferry_ep.Communicator.outputs`, and so are the errors. Not collective.
    #[pyo3(
        signature = (capacity=None, *, id_type=String::from("i32")),
        text_signature = "($self, capacity=None, *, id_type='i32')"
    )]
    fn output_layout<'py>(
        &self,
        py: Python<'py>,
        capacity: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = scalars::id_type)] id_type: String,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let capacity = match capacity {
            Some(given) => self.capacity(given)?,
            None => Capacity::max(&self.plan),
        };
        let wide_ids = match &id_type[..] {
            "i32" => false,
            "i64" => true,
            _ => {
                let text = format!("id_type is {id_type:?}, but it is \"i32\" or \"i64\"");
                return Err(errors::raise("ArgumentError", text));
            }
        };
        let capacity = Capacity {
            wide_ids,
            ..capacity
        };
        self.layouts(py, capacity)
    }
}

/// `(rows, scale_blocks)` of the capacity "max", "distinct", or of so many rows.
#[pyfunction]
pub(crate) fn capacity_of(plan: &Plan, capacity: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    let capacity = plan.capacity(capacity)?;
    Ok((capacity.rows, capacity.scale_blocks))
}

/// Layouts of a dispatch's outputs of these sizes, in order.
#[pyfunction]
pub(crate) fn layout_of<'py>(
    py: Python<'py>,
    plan: &Plan,
    rows: usize,
    scale_blocks: usize,
    wide_ids: bool,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let capacity = Capacity {
        rows,
        scale_blocks,
        wide_ids,
    };
    plan.layouts(py, capacity)
}

impl Plan {
    fn layouts<'py>(
        &self,
        py: Python<'py>,
        capacity: Capacity,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let layout = self.plan.output_layout(capacity).map_err(errors::from)?;
        let class = py.import("ferry_ep.core.config")?.getattr("TensorLayout")?;
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

    fn capacity(&self, given: &Bound<'_, PyAny>) -> PyResult<Capacity> {
        match given.extract::<&str>() {
            Ok("max") => return Ok(Capacity::max(&self.plan)),
            Ok("distinct") => return Ok(Capacity::max_distinct(&self.plan)),
            Ok(_) | Err(_) => {}
        }
        let rows = scalars::capacity::<usize>(given).map_err(|_| {
            let given = shown(given);
            let text =
                format!("capacity is {given}, but it is a number of rows, \"max\" or \"distinct\"");
            errors::raise("ArgumentError", text)
        })?;
        Ok(Capacity::of_rows(&self.plan, rows))
    }

    /// A rank of the plan's group.
    fn rank(&self, rank: u32) -> PyResult<Rank> {
        let ranks = self.plan.ranks();
        if rank < ranks {
            return Ok(Rank(rank));
        }
        let text = format!("rank is {rank}, but there are {ranks} ranks, from 0 on");
        Err(errors::raise("ArgumentError", text))
    }
}

/// Reader of the attributes of a `Config`, which notes those that it cannot read.
struct Reader<'a, 'py> {
    given: &'a Bound<'py, PyAny>,
    broken: Vec<errors::Broken>,
}

impl Reader<'_, '_> {
    /// Reads `field`. `None` if it breaks `rule`.
    fn field<T: for<'a> FromPyObjectOwned<'a>>(
        &mut self,
        field: &'static str,
        rule: &str,
    ) -> PyResult<Option<T>> {
        let value = self.given.getattr(field)?;
        let read = value.extract().ok();
        if read.is_none() {
            self.note(field, rule)?;
        }
        Ok(read)
    }

    /// Reads a number, which True and False are not.
    fn number<T: Scalar>(&mut self, field: &'static str, rule: &str) -> PyResult<Option<T>> {
        let read = T::read(field, &self.given.getattr(field)?).ok();
        if read.is_none() {
            self.note(field, rule)?;
        }
        Ok(read)
    }

    fn size(&mut self, field: &'static str) -> PyResult<usize> {
        let read = self.number(field, "it must be a whole number of at least 0")?;
        Ok(read.unwrap_or_default())
    }

    fn flag(&mut self, field: &'static str) -> PyResult<bool> {
        Ok(self
            .field(field, "it must be True or False")?
            .unwrap_or(false))
    }

    fn most(&mut self, field: &'static str) -> PyResult<Option<usize>> {
        let read: Option<Option<usize>> =
            self.number(field, "it must be a whole number above 0, or None")?;
        Ok(read.flatten())
    }

    /// Reads a name; `default` stands for one that there is not.
    fn word<T: std::str::FromStr<Err: std::fmt::Display>>(
        &mut self,
        field: &'static str,
        default: T,
    ) -> PyResult<T> {
        let Some(text) = self.field::<String>(field, "it must be a text")? else {
            return Ok(default);
        };
        match text.parse() {
            Ok(read) => Ok(read),
            Err(unknown) => {
                let text = unknown.to_string();
                let (_, names) = text.split_once(": ").unwrap_or(("", &text));
                self.note(field, names)?;
                Ok(default)
            }
        }
    }

    fn seconds(&mut self, field: &'static str) -> PyResult<Duration> {
        let rule = "it must be a number of seconds, above 0 and at most a day";
        let Some(read) = self.number::<f64>(field, rule)? else {
            return Ok(Duration::from_secs(1));
        };
        let seconds = Duration::try_from_secs_f64(read);
        if seconds.is_err() {
            self.note(field, rule)?;
        }
        Ok(seconds.unwrap_or(Duration::from_secs(1)))
    }

    /// The layout of received rows, and the fields of all layouts.
    fn receive(&mut self) -> PyResult<ReceiveFields> {
        Ok(ReceiveFields {
            layout: self.word("receive", ReceiveLayout::ByExpert)?,
            transposed_scales: self.flag("transposed_scales")?,
            clear_absent: self.flag("clear_absent")?,
            combine_weights: self.flag("combine_weights")?,
            expert_alignment: self
                .number("expert_alignment", "it must be a power of two, 1 to 256")?
                .unwrap_or(1),
            clear_padding: self.flag("clear_padding")?,
            row_sources: self.flag("row_sources")?,
            m_indices: self.flag("m_indices")?,
        })
    }

    fn note(&mut self, field: &'static str, rule: &str) -> PyResult<()> {
        let value = shown(&self.given.getattr(field)?);
        self.broken.push((field, value, rule.to_owned()));
        Ok(())
    }
}

/// Reads a `Config` and makes its plan. A `PlanError` has every problem; without all sizes, only those of
/// fields that cannot be read.
fn checked(group: &Group, given: &Bound<'_, PyAny>) -> PyResult<ferry::Plan> {
    let broken = Vec::new();
    let mut reader = Reader { given, broken };
    let sizes = Config::new(
        reader.size("experts")?,
        reader.size("top_k")?,
        reader.size("hidden")?,
        reader.size("max_tokens_per_rank")?,
    );
    let has_sizes = reader.broken.is_empty();
    let receive = reader.receive()?;
    let config = Config {
        p2p_world_size: reader.most("p2p_world_size")?,
        format: reader.word("format", TokenFormat::Bf16)?,
        combine: reader.word("combine", CombineMode::Reduced)?,
        shared_expert: reader.flag("shared_expert")?,
        deadline: reader.seconds("deadline")?,
        debug_checks: reader.flag("debug_checks")?,
        max_sms: reader
            .most("max_sms")?
            .map(|most| u32::try_from(most).unwrap_or(u32::MAX)),
        skip_a2a: reader.flag("skip_a2a")?,
        specialise: reader.flag("specialise")?,
        options: reader.flag("options")?,
        ..sizes
    };
    let mut broken = reader.broken;
    if broken.is_empty() {
        return ferry::Plan::with_fields(&group.open()?, config, receive).map_err(errors::from);
    }
    if has_sizes
        && let Err(Error::Plan(error)) = ferry::Plan::with_fields(&group.open()?, config, receive)
    {
        broken.extend(error.problems.iter().map(errors::problem));
    }
    Err(errors::plan(broken))
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
