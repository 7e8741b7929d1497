//! Fingerprints that tell matrices apart.

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_ds4_ops::flash_head::FlashHead;

/// Most rows that are sampled: enough to tell checkpoints apart, few enough to read back.
const ROWS: usize = 256;

/// The ids whose rows are sampled, from all over the vocabulary.
fn sampled(vocabulary: usize) -> impl Iterator<Item = usize> {
    (0..vocabulary).step_by(vocabulary.div_ceil(ROWS).max(1))
}

pub(super) fn of_matrix(lm_head: &Tensor<2>) -> String {
    let [vocabulary, width] = lm_head.dims();
    fingerprint(
        lm_head,
        sampled(vocabulary).map(|id| id as i32).collect(),
        [vocabulary, width],
    )
}

/// The fingerprint of the matrix that a clustered head was made of.
pub(super) fn of_head(head: &FlashHead) -> String {
    let mut row_of = vec![0; head.vocabulary()];
    for (id, row) in head.ids().into_data().iter::<i64>().zip(0..) {
        if let Ok(id) = usize::try_from(id) {
            row_of[id] = row;
        }
    }
    let rows = sampled(row_of.len()).map(|id| row_of[id]);
    fingerprint(
        &head.weight(),
        rows.collect(),
        [head.vocabulary(), head.width()],
    )
}

/// Shape and hash (FNV-1a, 64 bits) of some rows in f32: a matrix has one fingerprint in every
/// dtype that holds its values.
fn fingerprint(matrix: &Tensor<2>, rows: Vec<i32>, shape: [usize; 2]) -> String {
    let [vocabulary, width] = shape;
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    if vocabulary > 0 && width > 0 {
        let rows = Tensor::<1, Int>::from_data(
            TensorData::from(rows.as_slice()),
            (&matrix.device(), DType::I32),
        );
        let sample = matrix.clone().select(0, rows).cast(DType::F32).into_data();
        for value in sample.iter::<f32>() {
            for byte in value.to_bits().to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
    }
    format!("{vocabulary}x{width}:{hash:016x}")
}
