//! Received rows where they lie in the window.

use ferry_layout::{Rank, ReceiveLayout};
use half::bf16;

use super::Communicator;
use super::open::Open;
use crate::call::DispatchOutput;
use crate::call::buffers::copies::ReceivedRows;
use crate::error::Error;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;
use crate::tensor::handles::DevicePtr;

/// Rows that a rank received in a dispatch and that stay in its window ([`ReceiveLayout::View`]): row
/// `source * max_tokens_per_rank + token` for each source rank and token. The rows of a tensor are
/// [`row_stride`](Self::row_stride) bytes apart; only [`DispatchInput::x`](crate::DispatchInput::x) and your
/// own kernels take such tensors.
///
/// The memory is read-only, and changes in each round. It may be read by work that the streams order after
/// the dispatch (or its wait) and before the combine (or `combine_async`, or `give_up`): every row arrived
/// before the dispatch ended, so kernels need no fence. A later read may find another round's rows, or a part
/// of them; with [`debug_checks`](crate::Config::debug_checks) it finds bytes of `0xff`.
///
/// Rows without a token hold old bits, NaNs among them. [`DispatchOutput::ids`] is -1 there. A product with 0
/// does not hide them, as 0 times NaN is NaN: leave such rows out, or select instead of multiplying.
///
/// Between a row's tensors lie words of Ferry's. Addresses and strides are those of every round until
/// the communicator is closed, so that a captured graph can have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// `[ranks * max_tokens_per_rank, hidden]` in the plan's format, 128-byte aligned.
    pub tokens: Tensor<2>,
    /// `[ranks * max_tokens_per_rank, hidden / group]`, 4-byte aligned: the scales of each row, f32 in
    /// blockwise FP8. `None` for BF16, and with [`transposed_scales`](crate::KeptRows::transposed_scales),
    /// which are an output of the dispatch.
    pub scales: Option<Tensor<2>>,
    /// BF16 `[ranks * max_tokens_per_rank]`, `Nvfp4RowScaled` only: the inverse of each row's own global
    /// scale.
    pub row_scales: Option<Tensor<1>>,
    /// Bytes from one row to the next: [`Plan::view_row_stride`](crate::Plan::view_row_stride).
    pub row_stride: u64,
}

impl Communicator {
    /// Returns the received rows of the dispatch that was enqueued last. Reads no device memory. Not
    /// collective; does not synchronize.
    ///
    /// ```
    /// use ferry::*;
    ///
    /// # fn main() -> Result<(), Error> {
    /// let group = Group::simulated(2, 7)?;
    /// let config = Config { receive: Receive::of(ReceiveLayout::View), ..Config::new(4, 2, 8, 3) };
    /// let plan = Plan::new(&group, config)?;
    /// let mut rank = Communicator::new(&group, &plan)?.remove(0);
    /// // SAFETY: nothing is returned.
    /// let refused = unsafe { rank.view() }.unwrap_err().to_string();
    /// assert_eq!(
    ///     refused,
    ///     "view is out of order: no round is open; dispatch or dispatch_async comes next"
    /// );
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoView`] unless the plan's receive layout is a view; [`Error::WrongOrder`] unless `dispatch`
    /// or `dispatch_wait` was called last; [`Error::Poisoned`].
    ///
    /// # Safety
    /// The tensors are only read, in stream order between this round's dispatch and its combine or
    /// [`give_up`](Self::give_up), and no copy of them is used once the communicator is closed or dropped.
    pub unsafe fn view(&self) -> Result<View, Error> {
        self.current_view()
    }

    /// [`view`](Self::view), for uses that end here.
    fn current_view(&self) -> Result<View, Error> {
        let receive = self.plan.receive().layout;
        if receive != ReceiveLayout::View {
            return Err(Error::NoView { receive });
        }
        self.require_alive()?;
        if !matches!(self.open, Open::Received(_)) {
            return Err(self.wrong_order("view"));
        }
        Ok(self.window_view())
    }

    fn window_view(&self) -> View {
        let (plan, row_stride) = (&self.plan, self.plan.view_row_stride());
        let (shape, config, rows) = (plan.shape(), plan.config(), plan.max_rows());
        let first = self.common.window.dispatch_row(Rank(0), 0).bytes();
        let start = self.common.own_window + first;
        // SAFETY: these are bytes of the rank's window, which the fabric allocated in the plan's size and
        // which stay until the communicator is closed; no copy is used after that: documented on `view`.
        let all = unsafe { DevicePtr::new(start, rows as u64 * row_stride) };
        let at = |offset: u32| all.plus(offset.into());
        let strided = |at, data_type: DataType, columns: usize| Tensor {
            at,
            data_type,
            dims: [rows, columns],
            strides: [(8 * row_stride / u64::from(data_type.bits())) as usize, 1],
        };
        let tokens = DataType::of_tokens(config.format);
        let scales =
            DataType::of_scales(config.format).filter(|_| !plan.receive().transposed_scales);
        let groups = shape.hidden.checked_div(shape.sizes().group).unwrap_or(0);
        View {
            tokens: strided(at(0), tokens, config.hidden),
            scales: scales
                .map(|element| strided(at(shape.payload_bytes()), element, groups as usize)),
            row_scales: shape.sizes().has_row_scale.then(|| Tensor {
                at: at(shape.row_scale_start()),
                data_type: DataType::Bf16,
                dims: [rows],
                strides: [row_stride as usize / 2],
            }),
            row_stride,
        }
    }

    /// Copies the outputs of the last dispatch from this rank's device, as
    /// [`DispatchOutput::download`] does, and the rows of a view, too. Call
    /// [`synchronize`](Self::synchronize) with the dispatch's stream first, and this before combine. Not
    /// collective; synchronizes only with the device's own stream.
    ///
    /// # Errors
    /// Those of [`DispatchOutput::download`], and for a view those of [`view`](Self::view).
    pub fn download(&self, output: &DispatchOutput) -> Result<ReceivedRows, Error> {
        let mut rows = output.download(&self.plan, &**self.device())?;
        if self.plan.receive().layout != ReceiveLayout::View {
            return Ok(rows);
        }
        let view = self.current_view()?;
        rows.tokens = self.packed(&view.tokens)?;
        if let Some(scales) = &view.scales {
            rows.scales = self.packed(scales)?;
        }
        if let Some(scales) = view.row_scales {
            let columns = Tensor {
                at: scales.at,
                data_type: scales.data_type,
                dims: [scales.dims[0], 1],
                strides: [scales.strides[0], 1],
            };
            let bytes = self.packed(&columns)?;
            let inverse = |bytes: &[u8; 2]| bf16::from_le_bytes(*bytes);
            rows.row_scales = bytes.as_chunks().0.iter().map(inverse).collect();
        }
        Ok(rows)
    }

    /// Copies the rows of a strided tensor, without the bytes between them.
    fn packed(&self, tensor: &Tensor<2>) -> Result<Vec<u8>, Error> {
        let mut all = vec![0; tensor.at.bytes() as usize];
        self.device().download(tensor.at, &mut all)?;
        let bits = tensor.data_type.bits() as usize;
        let [stride, row] = [tensor.strides[0], tensor.dims[1]].map(|elements| elements * bits / 8);
        let rows = all.chunks(stride).flat_map(|bytes| &bytes[..row]);
        Ok(rows.copied().collect())
    }
}
