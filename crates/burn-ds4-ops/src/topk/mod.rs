//! Selection of the largest entries of long rows, for sparse attention.

mod reference;

use burn::tensor::{Bool, Int, Tensor};

/// Marks the `k` largest entries of each row; among equals at the k-th value the lower column wins.
///
/// # Shapes and dtypes
///
/// - `scores`: `[rows, columns]`, f32
/// - output: `[rows, columns]`, exactly `min(k, columns)` entries set per row, whatever the row holds
///
/// # Special values
///
/// `-inf` and NaN rank with the lowest finite value, `+inf` with the largest; zeros of either sign are equal.
///
/// # Panics
///
/// If `k` is 0.
pub fn top_k_mask(scores: Tensor<2>, k: usize) -> Tensor<2, Bool> {
    assert!(k > 0, "top_k_mask: k must be at least 1");
    reference::top_k_mask(scores, k)
}

/// The columns that [`top_k_mask`] marks, ascending.
///
/// # Shapes and dtypes
///
/// - `scores`: `[rows, columns]`, f32, special values as in [`top_k_mask`]
/// - output: `[rows, k]`, distinct and in `0..columns`, whatever the row holds
///
/// # Panics
///
/// If `k` is 0 or larger than the number of columns.
pub fn top_k_columns(scores: Tensor<2>, k: usize) -> Tensor<2, Int> {
    let [_, columns] = scores.dims();
    assert!(
        (1..=columns).contains(&k),
        "top_k_columns: k must be in 1..={columns} (the number of columns), got {k}"
    );
    reference::top_k_columns(scores, k)
}
