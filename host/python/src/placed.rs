//! Outputs of dispatches in tensors, of which callers see some, and one has all others.

use std::convert::Infallible;

use ferry::{AnyTensor, Capacity, DataType};
use pyo3::prelude::*;

use crate::errors;
use crate::plan::Plan;
use crate::tensor::Wanted;

/// Name of the ids that a dispatch keeps, which are no output.
const KEPT_IDS: &str = "kept_ids";

/// Number of a tensor, offset in bytes, data type and shape of an output.
#[derive(Clone)]
struct Place {
    tensor: usize,
    offset: u64,
    data_type: DataType,
    shape: Vec<usize>,
}

/// Places of a dispatch's outputs in a list of tensors.
#[pyclass(frozen, module = "ferry_ep.core._ferry")]
pub(crate) struct Places {
    /// One for each output of the plan, in order, if it has a place.
    outputs: Vec<Option<Place>>,
    kept_ids: Option<Place>,
    /// Words of 8 bytes of the last tensor.
    #[pyo3(get)]
    words: u64,
}

#[pymethods]
impl Places {
    /// Places in tensors of which each of the first has an output of `seen`, and the last those of
    /// `packed`, one behind the other, in words of int64. `kept_ids` among these are `topk_ids` as the
    /// dispatch of `tokens` tokens keeps them. `is_wide`: whether ids of the outputs are i64.
    #[new]
    #[pyo3(signature = (plan, seen, packed, rows, tokens, is_wide, /))]
    fn new(
        plan: &Plan,
        seen: Vec<String>,
        packed: Vec<String>,
        rows: usize,
        tokens: usize,
        is_wide: bool,
    ) -> PyResult<Self> {
        let checked = &plan.plan;
        let capacity = Capacity {
            rows,
            wide_ids: is_wide,
            ..Capacity::max(checked)
        };
        let layouts = checked.output_layout(capacity).map_err(errors::from)?;
        let find = |name: &str| layouts.iter().find(|of| of.name == name);
        let kept_ids = [tokens, checked.config().top_k];
        let mut words = 0_u64;
        let mut named = Vec::new();
        for (tensor, name) in seen.iter().enumerate() {
            let of = find(name).ok_or_else(|| misplaced(name))?;
            named.push((name.as_str(), Place::of(tensor, 0, of.data_type, &of.dims)));
        }
        for name in &packed {
            let (data_type, dims, align) = match find(name) {
                Some(of) => (of.data_type, &of.dims[..], of.align),
                None if name == KEPT_IDS => (DataType::I32, &kept_ids[..], 4),
                None => return Err(misplaced(name)),
            };
            let place = Place::of(seen.len(), words.next_multiple_of(align), data_type, dims);
            words = place.offset.saturating_add(place.bytes());
            named.push((name.as_str(), place));
        }
        let place = |name: &str| named.iter().find(|(of, _)| *of == name);
        let place = |name: &str| place(name).map(|(_, place)| place.clone());
        Ok(Self {
            outputs: layouts.iter().map(|of| place(of.name)).collect(),
            kept_ids: place(KEPT_IDS),
            words: words.div_ceil(8),
        })
    }

    /// Offset of the ids that a dispatch keeps in the last tensor, in int32; 0 if it keeps none.
    #[getter]
    fn kept_ids(&self) -> u64 {
        self.kept_ids.as_ref().map_or(0, |place| place.offset / 4)
    }
}

impl Place {
    fn of(tensor: usize, offset: u64, data_type: DataType, shape: &[usize]) -> Self {
        let shape = shape.to_vec();
        Self {
            tensor,
            offset,
            data_type,
            shape,
        }
    }

    fn bytes(&self) -> u64 {
        let sizes = self.shape.iter().map(|&size| size as u64);
        let elements = sizes.fold(1, u64::saturating_mul);
        elements.saturating_mul(u64::from(self.data_type.bits())) / 8
    }
}

/// Tensors as they were given, and what reads one of them.
pub(crate) struct Given<'a, T> {
    pub(crate) tensors: &'a [Option<T>],
    pub(crate) read: &'a dyn Fn(Wanted, &T) -> PyResult<AnyTensor>,
}

impl<T> Given<'_, T> {
    /// The outputs of a plan: at their places, or each output in a tensor, in order.
    pub(crate) fn outputs(
        &self,
        plan: &ferry::Plan,
        places: Option<&Places>,
    ) -> PyResult<[Option<AnyTensor>; 14]> {
        if let Some(places) = places {
            let mut places = places.outputs.iter();
            return plan.each_output(|of| {
                let place = places.next().and_then(Option::as_ref);
                self.part(of.name, place.ok_or_else(|| misplaced(of.name))?)
            });
        }
        let (mut count, format) = (0, plan.config().format);
        let mut tensors = self.tensors.iter().flatten();
        let outputs: PyResult<_> = plan.each_output(|of| {
            count += 1;
            let wanted = (of.name, of.data_type(format, false));
            let tensor = tensors.next();
            tensor.map(|tensor| (self.read)(wanted, tensor)).transpose()
        });
        let given = self.tensors.len();
        if outputs.is_err() {
            // With another number of them, one may have been read as another.
            count = 0;
            let Ok(_) = plan.each_output(|_| {
                count += 1;
                Ok::<_, Infallible>(())
            });
        }
        if given != count {
            let text = format!("{given} outputs were given, and there are {count}");
            return Err(errors::raise("ArgumentError", text));
        }
        Ok(outputs?.map(Option::flatten))
    }

    /// Memory for the ids that a dispatch keeps.
    pub(crate) fn kept_ids(&self, places: &Places) -> PyResult<Option<AnyTensor>> {
        let place = places.kept_ids.as_ref();
        place.map(|place| self.part(KEPT_IDS, place)).transpose()
    }

    /// The part of a tensor at a place, which has elements of that type, or i64, which hold any.
    fn part(&self, name: &'static str, place: &Place) -> PyResult<AnyTensor> {
        let whole = self.tensors.get(place.tensor).and_then(Option::as_ref);
        let whole = (self.read)(
            (name, place.data_type),
            whole.ok_or_else(|| misplaced(name))?,
        )?;
        let is_type = [place.data_type, DataType::I64].contains(&whole.data_type());
        let end = place.offset.checked_add(place.bytes());
        if !is_type || end.is_none_or(|end| end > whole.at().bytes()) {
            return Err(misplaced(name));
        }
        let at = whole.at().plus(place.offset);
        AnyTensor::new(at, place.data_type, &place.shape, None).ok_or_else(|| misplaced(name))
    }
}

/// The error of an output whose place is not there.
fn misplaced(name: &str) -> PyErr {
    errors::raise("ArgumentError", format!("output {name} has no place"))
}
