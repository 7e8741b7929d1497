//! Attention over the rows of a cache, read where the cache stores them.

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use super::args;
use super::backend::AttentionOps;
use super::options::{RowRounding, WindowLayout};
use super::pages::PagedRows;
use super::rows::Positions;
use super::validation::{expect_rounding, expect_scale};
use crate::OpError;
use crate::validation::{
    Accepted, F32, FLOATS, INTEGERS, expect_float, expect_not_negative, expect_positive,
    expect_tensor, expect_value,
};

/// Rows of new tokens for [`append_rows`].
#[derive(Clone, Debug)]
pub struct NewRows {
    /// The rows as they were projected: `[batch, count, width]`, f32 / f16 / bf16.
    pub x: Tensor<3>,
    /// Weight of the norm: `[width]`, f32 / f16 / bf16.
    pub norm: Tensor<1>,
    /// Epsilon of the norm.
    pub epsilon: f64,
    /// How a row is rounded before it is stored.
    pub rounding: RowRounding,
}

/// Key/value rows of a sequence's newest positions, and how many of them a query attends to.
#[derive(Clone, Debug)]
pub struct CachedWindow {
    /// The rows, used as keys and as values: `[batch, slots, width]`.
    pub rows: Tensor<3>,
    /// In which order they are.
    pub layout: WindowLayout,
    /// Positions that a query attends to: its own, and those right before it.
    pub span: usize,
    /// Whether a query attends up to its own position. Otherwise all queries of a sequence attend
    /// to the same positions: those of the first query's span, and those of all queries. So do the
    /// tokens of a block that a drafter proposes at once.
    pub causal: bool,
}

/// Compressed key/value rows, one for each block of positions.
#[derive(Clone, Debug)]
pub struct CachedRows {
    /// The rows, used as keys and as values. Row `r` stands for the `ratio` positions from
    /// `ratio · r` on, and is visible from the last of them on.
    pub rows: PagedRows,
    /// Positions of a block.
    pub ratio: usize,
    /// Whether queries pick among the rows as soon as there are enough of them. A query then gets
    /// the same bits whether it attends to all rows or picks all of them in order.
    pub picking: bool,
    /// The rows that each query attends to, if not all: i32, i64 or u32, `[batch, queries, picks]`.
    /// A pick that is out of range, or not visible yet, is ignored. With picks, `picking` makes no
    /// difference.
    pub picks: Option<Tensor<3, Int>>,
}

/// The new queries for [`cached_attention`].
#[derive(Clone, Debug)]
pub struct CachedQueries {
    /// The queries as they were projected: `[batch, queries, heads, width]`, f32 / f16 / bf16.
    pub x: Tensor<4>,
    /// Epsilon of their norm, which has no weight. Without, they are attended with as they are.
    pub epsilon: Option<f64>,
    /// Sink of each head, in logit units: f32 `[heads]`.
    pub sinks: Tensor<1>,
    /// The factor of the logits.
    pub scale: f64,
}

/// Normalises and rotates the key/value rows of new tokens, and stores each in the slot of its
/// position.
///
/// A row is normalised ([`rms_norm`](crate::norm::rms_norm)), rotated by the angles of its position
/// ([`rotate_at`](super::rotate_at)) and rounded as `new.rounding` says, in f32 where there is a
/// kernel. It is stored in slot `position % slots` of `ring`, in the dtype of the ring. If there
/// are more new rows than slots, only the newest are stored.
///
/// A sequence with a negative start is vacant: its rows do not change. A position beyond the angles
/// is an error where the device's memory is the host's; elsewhere, a sequence that starts there
/// counts as vacant.
///
/// `ring` (`[batch, slots, width]`, f32 / f16 / bf16) is taken by value. It is updated in place if
/// there is no other reference to it, and copied otherwise.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, a ring without slots, an odd number
/// of rotated channels or more than there are, a width that is no power of two with
/// [`RowRounding::Index`], an `epsilon` that is negative or NaN and, where the device's memory is
/// the host's, positions beyond the angles.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, the window part of `Attention.forward`.
///
/// # Example
///
/// Position 3 has the second of two slots.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::attention::{NewRows, Positions, RowRounding, append_rows};
///
/// let device = Device::flex();
/// let new = NewRows {
///     x: Tensor::from_data([[[3.0, -3.0, 3.0, 3.0]]], &device),
///     norm: Tensor::ones([4], &device),
///     epsilon: 0.0,
///     rounding: RowRounding::None,
/// };
/// // Cosine and sine of four positions. The last one turns the last two channels by 90 degrees.
/// let angles = Tensor::from_data([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], &device);
/// let positions = Positions { angles, start: Tensor::from_data([3], &device) };
/// let ring = append_rows(new, positions, Tensor::zeros([1, 2, 4], &device))?;
/// let expected = TensorData::from([[[0.0_f32, 0.0, 0.0, 0.0], [1.0, -1.0, -1.0, 1.0]]]);
/// ring.into_data().assert_eq(&expected, true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "reshape_and_cache")]
pub fn append_rows(
    new: NewRows,
    positions: Positions,
    ring: Tensor<3>,
) -> Result<Tensor<3>, OpError> {
    check_append(&new, &positions, &ring)?;
    if new.x.dims()[..2].contains(&0) {
        return Ok(ring);
    }
    Ok(Tensor::from_dispatch(Dispatch::append_rows(
        args::NewRows::new(new, positions),
        ring.into_dispatch(),
    )))
}

pub(super) fn check_append(
    new: &NewRows,
    positions: &Positions,
    ring: &Tensor<3>,
) -> Result<(), OpError> {
    let [batch, count, width] = new.x.dims();
    let [_, slots, _] = ring.dims();
    let device = new.x.device();
    let like = ("x", &device);
    expect_float("x", &new.x)?;
    expect_positive([("slots of ring", slots), ("columns of x", width)])?;
    expect_tensor(("norm", &new.norm), FLOATS, [width], like)?;
    expect_tensor(("ring", ring), FLOATS, [batch, slots, width], like)?;
    expect_not_negative("epsilon", new.epsilon)?;
    expect_rounding("columns of x", new.rounding, width)?;
    positions.check(batch, count, width, like)
}

impl args::NewRows<Dispatch> {
    pub(super) fn new(new: NewRows, positions: Positions) -> Self {
        Self {
            x: new.x.into_dispatch(),
            norm: new.norm.into_dispatch(),
            angles: positions.angles.into_dispatch(),
            start: positions.start.into_dispatch(),
            epsilon: new.epsilon,
            rounding: new.rounding,
        }
    }
}

/// Computes attention between its projections, over rows where a cache stores them.
///
/// Queries are normalised ([`rms_norm`](crate::norm::rms_norm), without a weight), rotated by the
/// angles of their positions, and attend as in [`sink_attention`](super::sink_attention). The
/// results are rotated back.
///
/// Visibility is computed on the device, from the positions. Of the window, a query attends to the
/// `span` positions up to its own, or to what [`CachedWindow::causal`] says. The rows of the new
/// positions must be among those of the window. Of the compressed rows, a query attends to
/// those whose blocks are complete at its position.
///
/// # Shapes and dtypes
///
/// - `queries`: as [`CachedQueries`] says
/// - `window`, `compressed`: rows of both parts have the dtype of the queries
/// - output: like the queries
///
/// A sequence with a negative start is vacant: its queries give zeros. A position beyond the angles
/// is an error where the device's memory is the host's; elsewhere, a sequence that starts there
/// counts as vacant.
///
/// # Special values
///
/// As [`sink_attention`](super::sink_attention): hidden rows must be finite. The compressed rows
/// after the visible ones are not read where there is a kernel, nor where the device's memory is
/// the host's.
///
/// # Kernels
///
/// On CubeCL devices there is one kernel for up to [`DECODE_TOKENS`](super::DECODE_TOKENS) queries
/// of each sequence, of up to 1024 channels. It keeps queries in f32 once they are normalised. Rows
/// of f16 or bf16 that queries pick among, with a multiple of 64 channels up to 512, go through
/// tensor cores if the device has them: queries and the weights of rows are rounded to the dtype of
/// the rows for that, as in the released kernel.
///
/// For more queries over rows of f16 or bf16, tensor cores have another one, for a multiple of 64
/// channels up to 512. Hopper GPUs have one of their own for 32 heads or more and 128, 256, 384 or
/// 512 channels. Both round in the same places. Otherwise, as for queries without an epsilon, the
/// operators named above run one after the other, and round to the dtype of the queries in between.
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, the span is none or such that the
/// queries' windows do not fit the slots, blocks are of no positions, there are compressed rows
/// though the window is not causal, `rotated` is odd or larger than `width`, `epsilon` is negative
/// or NaN, `scale` is not finite and, where the device's memory is the host's, for positions beyond
/// the angles.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Attention.forward`, and `inference/kernel.py`,
/// `sparse_attn_kernel`.
///
/// # Example
///
/// Two rows and the sink have the same logit, so that each has a third of the weight.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::attention::{
///     CachedQueries, CachedWindow, Positions, WindowLayout, cached_attention,
/// };
///
/// let device = Device::flex();
/// let queries = CachedQueries {
///     x: Tensor::zeros([1, 1, 1, 2], &device),
///     epsilon: Some(1e-6),
///     sinks: Tensor::zeros([1], &device),
///     scale: 1.0,
/// };
/// // The query is at position 1, whose angle is 90 degrees. The third slot waits for position 2.
/// let angles = Tensor::from_data([[1.0, 0.0], [0.0, 1.0]], &device);
/// let positions = Positions { angles, start: Tensor::from_data([1], &device) };
/// let rows = Tensor::from_data([[[3.0, 0.0], [0.0, 6.0], [9.0, 9.0]]], &device);
/// let window = CachedWindow { rows, layout: WindowLayout::Ring, span: 2, causal: true };
/// let output = cached_attention(queries, positions, window, None)?;
/// // A third of each visible row is [1, 2], rotated back.
/// let expected = TensorData::from([[[[2.0_f32, -1.0]]]]);
/// output.into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "flash_attn_with_kvcache")]
#[doc(alias = "flash_decoding")]
#[doc(alias = "paged_attention")]
pub fn cached_attention(
    queries: CachedQueries,
    positions: Positions,
    window: CachedWindow,
    compressed: Option<CachedRows>,
) -> Result<Tensor<4>, OpError> {
    check(&queries, &window, compressed.as_ref())?;
    let [batch, count, _, width] = queries.x.dims();
    positions.check(batch, count, width, ("x", &queries.x.device()))?;
    if queries.x.dims().contains(&0) {
        return Ok(queries.x);
    }
    let given = args::Queries {
        x: queries.x.into_dispatch(),
        angles: positions.angles.into_dispatch(),
        start: positions.start.into_dispatch(),
        sinks: queries.sinks.into_dispatch(),
        epsilon: queries.epsilon,
        span: window.span,
        layout: window.layout,
        causal: window.causal,
        scale: queries.scale,
    };
    Ok(Tensor::from_dispatch(Dispatch::cached_attention(
        given,
        window.rows.into_dispatch(),
        compressed.into(),
    )))
}

fn check(
    queries: &CachedQueries,
    window: &CachedWindow,
    compressed: Option<&CachedRows>,
) -> Result<(), OpError> {
    expect_float("queries.x", &queries.x)?;
    let dtype: Accepted = ("that of `queries.x`", &[queries.x.dtype()]);
    let like = ("queries.x", &queries.x.device());
    let [batch, count, heads, width] = queries.x.dims();
    expect_tensor(("queries.sinks", &queries.sinks), F32, [heads], like)?;
    expect_not_negative("epsilon", queries.epsilon.unwrap_or(0.0))?;
    expect_scale(queries.scale)?;

    let [_, slots, _] = window.rows.dims();
    let shape = [batch, slots, width];
    expect_tensor(("window.rows", &window.rows), dtype, shape, like)?;
    let longest = (slots + 1).saturating_sub(count);
    let fits = (1..=longest).contains(&window.span);
    let expected = format_args!("1 to {longest}, with {slots} slots and {count} queries");
    expect_value(fits, "window.span", window.span, expected)?;

    let Some(compressed) = compressed else {
        return Ok(());
    };
    let rows = &compressed.rows;
    let expected = "none where the window is not causal";
    expect_value(window.causal, "compressed.rows", rows.count(), expected)?;
    rows.check("compressed.rows", dtype, [batch, width], like)?;
    expect_positive([("compressed.ratio", compressed.ratio)])?;
    if let Some(picks) = &compressed.picks {
        let [_, _, number] = picks.dims();
        let shape = [batch, count, number];
        expect_tensor(("compressed.picks", picks), INTEGERS, shape, like)?;
    }
    Ok(())
}

impl From<Option<CachedRows>> for args::CachedBlocks<Dispatch> {
    fn from(compressed: Option<CachedRows>) -> Self {
        let Some(compressed) = compressed else {
            return Self::None;
        };
        let CachedRows {
            rows,
            ratio,
            picking,
            picks,
        } = compressed;
        // CubeCL devices panic on some operations on empty tensors.
        let selected = picks.as_ref().map_or(rows.count(), |picks| picks.dims()[2]);
        if selected.min(rows.count()) == 0 {
            return Self::None;
        }
        let rows = rows.into();
        match picks {
            None => Self::All {
                rows,
                ratio,
                picking,
            },
            Some(picks) => Self::Picked {
                rows,
                picks: picks.into_dispatch(),
                ratio,
            },
        }
    }
}
