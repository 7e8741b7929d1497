//! Attention with a sink, over rows that masks select.

use burn::backend::Dispatch;
use burn::tensor::{DType, FloatDType, Int, Tensor};

use super::args::{CompressedRows, SinkInputs};
use super::backend::AttentionOps;
use super::validation::expect_scale;
use crate::OpError;
use crate::validation::{Accepted, F32, expect_float, expect_placed, expect_tensor, expect_value};

/// Keys of the sliding window of [`sink_attention`].
#[derive(Clone, Debug)]
pub struct WindowKeys {
    /// The rows, used as keys and as values: `[batch, columns, width]`. The last ones are those of
    /// the queries, in their order.
    pub rows: Tensor<3>,
    /// Bias of each row, for all queries that have it in their span: f32 `[batch, columns]`.
    pub bias: Tensor<2>,
    /// Rows that a query attends to: its own, and those right before it.
    pub span: usize,
}

/// Keys of the compressed part of [`sink_attention`].
#[derive(Clone, Debug)]
pub struct CompressedKeys {
    /// The rows, used as keys and as values: `[batch, rows, width]`.
    pub rows: Tensor<3>,
    /// Bias of each row, for each query: f32 `[batch, queries, rows]`.
    pub bias: Tensor<3>,
    /// The rows that each query attends to, if not all: any integer, `[batch, queries, picks]`. A
    /// pick that is out of range is ignored.
    pub picks: Option<Tensor<3, Int>>,
}

impl CompressedKeys {
    /// Rows that a query attends to or picks.
    fn selected(&self) -> usize {
        match &self.picks {
            None => self.rows.dims()[1],
            Some(picks) => picks.dims()[2],
        }
    }
}

/// Attention of all heads over one shared key/value row per position, with a learned sink.
///
/// One softmax runs over the rows of the window, the compressed rows and the sink. The sink takes
/// weight from the rows, but has no value.
///
/// # Shapes and dtypes
///
/// - `queries`: `[batch, queries, heads, width]`, f32 / f16 / bf16
/// - `window`: query `i` of a sequence attends to `span` rows, which end `queries - 1 - i` rows
///   before the last
/// - `compressed`: as [`CompressedKeys`] says; rows of both parts have the dtype of `queries`
/// - `sinks`: `[heads]`, f32, in logit units
/// - output: like `queries`
///
/// Logits, softmax and its sum are f32 whatever the dtype of the inputs.
///
/// # Special values
///
/// A sink of `-inf` takes no weight; the effect of one that is NaN or `inf` depends on the device.
/// A query to which nothing is visible gives zeros. A NaN or an infinity in a query reaches its own
/// head only; one in a row reaches the queries that attend to the row. Hidden rows must be finite.
///
/// # Kernels
///
/// On CubeCL devices there is a kernel for up to [`DECODE_TOKENS`](super::DECODE_TOKENS) queries in
/// all sequences together, of up to 1024 channels. For more queries of f16 or bf16 there is one for
/// tensor cores, of 64 to 512 channels in steps of 64, in which weights are rounded to the dtype of
/// the inputs. Others take matrix products, in which logits are, too.
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, the span is none or longer than the
/// rows before the first query allow, or `scale` is not finite.
///
/// # Source
///
/// DeepSeek-V4 `inference/kernel.py`, `sparse_attn_kernel`.
///
/// # Example
///
/// Two rows and the sink have the same logit, so that each has a third of the weight.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::attention::{WindowKeys, sink_attention};
///
/// let device = Device::flex();
/// let queries = Tensor::<4>::zeros([1, 1, 1, 2], &device);
/// let window = WindowKeys {
///     rows: Tensor::from_data([[[3.0, 0.0], [0.0, 6.0]]], &device),
///     bias: Tensor::zeros([1, 2], &device),
///     span: 2,
/// };
/// let sinks = Tensor::<1>::zeros([1], &device);
/// let output = sink_attention(queries, window, None, sinks, 1.0)?;
/// let expected = TensorData::from([[[[1.0_f32, 2.0]]]]);
/// output.into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "sparse_attn")]
pub fn sink_attention(
    queries: Tensor<4>,
    window: WindowKeys,
    compressed: Option<CompressedKeys>,
    sinks: Tensor<1>,
    scale: f64,
) -> Result<Tensor<4>, OpError> {
    let compressed = check(&queries, &window, compressed, &sinks, scale)?;
    if queries.dims().contains(&0) {
        return Ok(queries);
    }
    Ok(Tensor::from_dispatch(Dispatch::sink_attention(
        SinkInputs {
            queries: queries.into_dispatch(),
            window: window.rows.into_dispatch(),
            window_bias: window.bias.into_dispatch(),
            compressed: compressed.into(),
            sinks: sinks.into_dispatch(),
            span: window.span,
            scale,
        },
    )))
}

/// The weights that [`sink_attention`] gives to rows, for inspection: computed in f32, in plain
/// tensor operations on every device.
///
/// Takes the same arguments. Columns of the output are all rows of the window, then the compressed
/// rows or picks: f32 `[batch, queries, heads, columns]`.
///
/// # Errors
///
/// As [`sink_attention`].
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::attention::{WindowKeys, sink_probabilities};
///
/// let device = Device::flex();
/// let window = WindowKeys {
///     rows: Tensor::from_data([[[2.0_f32.ln(), 0.0], [0.0, 0.0]]], &device),
///     bias: Tensor::zeros([1, 2], &device),
///     span: 2,
/// };
/// let queries = Tensor::<4>::from_data([[[[1.0, 0.0]]]], &device);
/// let weights = sink_probabilities(queries, window, None, Tensor::zeros([1], &device), 1.0)?;
/// // Exponentials of 2 and 1 for the rows, and 1 for the sink.
/// let expected = TensorData::from([[[[0.5_f32, 0.25]]]]);
/// weights.into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn sink_probabilities(
    queries: Tensor<4>,
    window: WindowKeys,
    compressed: Option<CompressedKeys>,
    sinks: Tensor<1>,
    scale: f64,
) -> Result<Tensor<4>, OpError> {
    let compressed = check(&queries, &window, compressed, &sinks, scale)?;
    let [batch, count, heads, width] = queries.dims();
    let [_, columns, _] = window.rows.dims();
    let columns = columns + compressed.as_ref().map_or(0, CompressedKeys::selected);
    let shape = [batch, count, heads, columns];
    if width == 0 || shape.contains(&0) {
        return Ok(Tensor::zeros(shape, (&queries.device(), DType::F32)));
    }
    let compressed = compressed.map(|keys| CompressedKeys {
        rows: keys.rows.cast(FloatDType::F32),
        ..keys
    });
    let inputs = SinkInputs {
        queries: (queries.cast(FloatDType::F32) * scale).into_dispatch(),
        window: window.rows.cast(FloatDType::F32).into_dispatch(),
        window_bias: window.bias.into_dispatch(),
        compressed: compressed.into(),
        sinks: sinks.into_dispatch(),
        span: window.span,
        scale: 1.0,
    };
    let shares = Dispatch::sink_probabilities(inputs, columns);
    Ok(Tensor::from_dispatch(shares))
}

/// Checks all keys, and returns the compressed ones, if there are any.
fn check(
    queries: &Tensor<4>,
    window: &WindowKeys,
    compressed: Option<CompressedKeys>,
    sinks: &Tensor<1>,
    scale: f64,
) -> Result<Option<CompressedKeys>, OpError> {
    expect_float("queries", queries)?;
    let dtype: Accepted = ("that of `queries`", &[queries.dtype()]);
    let like = ("queries", &queries.device());
    let [batch, count, heads, width] = queries.dims();

    let [_, columns, _] = window.rows.dims();
    let shape = [batch, columns, width];
    expect_tensor(("window.rows", &window.rows), dtype, shape, like)?;
    expect_tensor(("window.bias", &window.bias), F32, [batch, columns], like)?;
    let longest = (columns + 1).saturating_sub(count);
    let fits = (1..=longest).contains(&window.span);
    let expected = format_args!("1 to {longest}, with {columns} rows and {count} queries");
    expect_value(fits, "window.span", window.span, expected)?;

    expect_tensor(("sinks", sinks), F32, [heads], like)?;
    expect_scale(scale)?;

    let Some(keys) = compressed else {
        return Ok(None);
    };
    let [_, rows, _] = keys.rows.dims();
    let shape = [batch, rows, width];
    expect_tensor(("compressed.rows", &keys.rows), dtype, shape, like)?;
    let shape = [batch, count, rows];
    expect_tensor(("compressed.bias", &keys.bias), F32, shape, like)?;
    if let Some(picks) = &keys.picks {
        let [_, _, number] = picks.dims();
        expect_placed(("compressed.picks", picks), [batch, count, number], like)?;
    }
    // CubeCL devices panic on some operations on empty tensors.
    Ok((rows > 0 && keys.selected() > 0).then_some(keys))
}

impl From<Option<CompressedKeys>> for CompressedRows<Dispatch> {
    fn from(keys: Option<CompressedKeys>) -> Self {
        let Some(CompressedKeys { rows, bias, picks }) = keys else {
            return Self::None;
        };
        let (rows, bias) = (rows.into_dispatch(), bias.into_dispatch());
        match picks {
            None => Self::Shared { rows, bias },
            Some(picks) => Self::Picked {
                rows,
                bias,
                picks: picks.into_dispatch(),
            },
        }
    }
}
