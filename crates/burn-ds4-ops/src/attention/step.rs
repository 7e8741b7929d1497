//! What a decoding step does to rows before its queries attend.

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use super::args::{self, Compression, OptionalCompression, OptionalState};
use super::backend::AttentionOps;
use super::cached::{NewRows, check_append};
use super::compress::{CompressionInputs, CompressionOptions, CompressorState, check_compress};
use super::pages::PagedRows;
use super::rows::Positions;
use crate::OpError;
use crate::validation::{F32, FLOATS, expect_not_negative, expect_positive, expect_tensor};

/// Low-rank queries of new tokens for [`store_step`].
#[derive(Clone, Debug)]
pub struct LowRankQueries {
    /// The queries as they were projected: `[batch, count, rank]`, f32 / f16 / bf16.
    pub x: Tensor<3>,
    /// Weight of their norm: `[rank]`, f32 / f16 / bf16.
    pub norm: Tensor<1>,
    /// Epsilon of the norm.
    pub epsilon: f64,
}

/// What a compressor does in a step: the arguments of [`compress_rows`](super::compress_rows),
/// without positions.
#[derive(Clone, Debug)]
pub struct StepCompression {
    /// Its inputs at the new positions.
    pub inputs: CompressionInputs,
    /// How it makes rows.
    pub options: CompressionOptions,
    /// The tensors that it updates.
    pub state: CompressorState,
}

/// The inputs of [`store_step`].
#[derive(Clone, Debug)]
pub struct StepRows {
    /// Queries, which are normalised.
    pub queries: LowRankQueries,
    /// Key/value rows of the tokens.
    pub new: NewRows,
    /// The ring in which they are stored, as [`append_rows`](super::append_rows) takes it.
    pub ring: Tensor<3>,
    /// The compressor of key/value rows, if the layer has one.
    pub compressed: Option<StepCompression>,
    /// The compressor of the layer's indexer, if it has one.
    pub indexed: Option<StepCompression>,
    /// The pages in which the rows of both compressors are, as of
    /// [`PagedRows::pages`](super::PagedRows::pages).
    pub pages: Option<Tensor<2, Int>>,
}

/// The results of [`store_step`].
#[derive(Clone, Debug)]
pub struct StoredStep {
    /// The normalised queries, in the shape and dtype of those given.
    pub queries: Tensor<3>,
    /// The ring, updated.
    pub ring: Tensor<3>,
    /// The updated state of the compressor of key/value rows, if one was given.
    pub compressed: Option<CompressorState>,
    /// The updated state of the indexer's compressor, if one was given.
    pub indexed: Option<CompressorState>,
}

/// Normalises and stores everything that a step has to before its queries attend.
///
/// Low-rank queries are normalised ([`rms_norm`](crate::norm::rms_norm)), key/value rows are stored
/// ([`append_rows`](super::append_rows)), and compressors store their rows
/// ([`compress_rows`](super::compress_rows)). See these operators for shapes, special values and
/// sources; the results have the same bits.
///
/// The parts are independent of each other. Where there is a kernel, they are one launch if all
/// stored rows (`ring`, and the rows of compressors) have one dtype, low-rank queries and new rows
/// another, and all weights of norms a third.
///
/// # Errors
///
/// [`OpError`] where one of these operators has one, low-rank queries have no columns, or queries
/// and rows differ in batch, count or device.
///
/// # Example
///
/// A layer without compressors.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::attention::{
///     LowRankQueries, NewRows, Positions, RowRounding, StepRows, store_step,
/// };
///
/// let device = Device::flex();
/// let (norm, epsilon) = (Tensor::ones([2], &device), 0.0);
/// let x = Tensor::from_data([[[5.0, -5.0]]], &device);
/// let queries = LowRankQueries { x, norm: norm.clone(), epsilon };
/// let x = Tensor::from_data([[[3.0, 3.0]]], &device);
/// let new = NewRows { x, norm, epsilon, rounding: RowRounding::None };
/// let ring = Tensor::zeros([1, 2, 2], &device);
/// let step = StepRows { queries, new, ring, compressed: None, indexed: None,
///     pages: None };
/// // Position 1 turns by 90 degrees.
/// let angles = Tensor::from_data([[1.0, 0.0], [0.0, 1.0]], &device);
/// let stored = store_step(step, Positions { angles, start: Tensor::from_data([1], &device) })?;
/// stored.queries.into_data().assert_eq(&TensorData::from([[[1.0_f32, -1.0]]]), true);
/// let expected = TensorData::from([[[0.0_f32, 0.0], [-1.0, 1.0]]]);
/// stored.ring.into_data().assert_eq(&expected, true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn store_step(step: StepRows, positions: Positions) -> Result<StoredStep, OpError> {
    check(&step, &positions)?;
    let StepRows {
        queries,
        new,
        ring,
        compressed,
        indexed,
        pages,
    } = step;
    if new.x.dims()[..2].contains(&0) {
        return Ok(StoredStep {
            queries: queries.x,
            ring,
            compressed: compressed.map(|part| part.state),
            indexed: indexed.map(|part| part.state),
        });
    }
    let part = |part| OptionalCompression::new(part, &positions, &pages);
    let stored = Dispatch::store_step(args::StepRows {
        queries: queries.x.into_dispatch(),
        norm: queries.norm.into_dispatch(),
        epsilon: queries.epsilon,
        compressed: part(compressed),
        indexed: part(indexed),
        new: args::NewRows::new(new, positions),
        ring: ring.into_dispatch(),
    });
    Ok(StoredStep {
        queries: Tensor::from_dispatch(stored.queries),
        ring: Tensor::from_dispatch(stored.ring),
        compressed: stored.compressed.into(),
        indexed: stored.indexed.into(),
    })
}

fn check(step: &StepRows, positions: &Positions) -> Result<(), OpError> {
    check_append(&step.new, positions, &step.ring)?;
    let [batch, count, _] = step.new.x.dims();
    let device = step.new.x.device();

    let queries = &step.queries;
    let [_, _, rank] = queries.x.dims();
    expect_positive([("columns of queries.x", rank)])?;
    let like = ("x", &device);
    let shape = [batch, count, rank];
    expect_tensor(("queries.x", &queries.x), FLOATS, shape, like)?;
    expect_tensor(("queries.norm", &queries.norm), FLOATS, [rank], like)?;
    expect_not_negative("queries.epsilon", queries.epsilon)?;

    for part in [&step.compressed, &step.indexed].into_iter().flatten() {
        let projections = &part.inputs.projections;
        let [_, _, raw_width] = projections.dims();
        let shape = [batch, count, raw_width];
        expect_tensor(("projections", projections), F32, shape, like)?;
        let rows = PagedRows {
            rows: part.state.rows.clone(),
            pages: step.pages.clone(),
        };
        check_compress(
            &part.inputs,
            positions,
            part.options,
            &part.state.raw,
            &rows,
        )?;
    }
    Ok(())
}

impl OptionalCompression<Dispatch> {
    fn new(
        part: Option<StepCompression>,
        positions: &Positions,
        pages: &Option<Tensor<2, Int>>,
    ) -> Self {
        let Some(part) = part else { return Self::None };
        let inputs = Compression::new(part.inputs, positions.clone(), part.options, pages.clone());
        Self::Some {
            inputs,
            raw: part.state.raw.into_dispatch(),
            rows: part.state.rows.into_dispatch(),
        }
    }
}

impl From<OptionalState<Dispatch>> for Option<CompressorState> {
    fn from(state: OptionalState<Dispatch>) -> Self {
        match state {
            OptionalState::None => None,
            OptionalState::Some { raw, rows } => Some(CompressorState {
                raw: Tensor::from_dispatch(raw),
                rows: Tensor::from_dispatch(rows),
            }),
        }
    }
}
