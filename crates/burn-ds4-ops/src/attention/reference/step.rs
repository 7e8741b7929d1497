//! What a step stores, by the operator for each part.

use burn::backend::TensorMetadata;
use burn::tensor::Shape;

use crate::attention::backend::{
    AttentionOps, OptionalCompression, OptionalState, StepRows, StoredStep,
};
use crate::optional::OptionalFloat;

pub(in crate::attention) fn store_step<B: AttentionOps>(step: StepRows<B>) -> StoredStep<B> {
    let [batch, count, rank] = step.queries.shape().dims();
    let queries = B::float_reshape(step.queries, Shape::new([batch * count, rank]));
    let queries = B::rms_norm(queries, OptionalFloat::Some(step.norm), step.epsilon);
    StoredStep {
        queries: B::float_reshape(queries, Shape::new([batch, count, rank])),
        ring: B::append_rows(step.new, step.ring),
        compressed: compress::<B>(step.compressed),
        indexed: compress::<B>(step.indexed),
    }
}

fn compress<B: AttentionOps>(compression: OptionalCompression<B>) -> OptionalState<B> {
    match compression {
        OptionalCompression::None => OptionalState::None,
        OptionalCompression::Some { inputs, raw, rows } => {
            let (raw, rows) = B::compress_rows(inputs, raw, rows);
            OptionalState::Some { raw, rows }
        }
    }
}
