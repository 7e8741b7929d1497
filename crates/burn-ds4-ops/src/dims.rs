//! Dimensions of tensors and shapes whose rank is not in their type.
//!
//! [`Shape::dims`] gives the first dimensions of a shape of any higher rank, which hides that a
//! tensor is not of the rank that its reader expects.

use burn::backend::TensorMetadata;
use burn::tensor::Shape;

/// A tensor whose reader knows its rank.
pub(crate) trait Dims {
    /// All dimensions.
    ///
    /// # Panics
    ///
    /// If there are more or fewer than `D`.
    fn dims<const D: usize>(&self) -> [usize; D];
}

impl<T: TensorMetadata> Dims for T {
    #[track_caller]
    fn dims<const D: usize>(&self) -> [usize; D] {
        dims_of(&self.shape())
    }
}

/// All dimensions of a shape.
///
/// # Panics
///
/// If there are more or fewer than `D`.
#[track_caller]
pub(crate) fn dims_of<const D: usize>(shape: &Shape) -> [usize; D] {
    let dims = shape.as_slice().try_into();
    dims.unwrap_or_else(|_| panic!("a shape of {D} dimensions: {shape:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_of_the_expected_rank_is_an_array() {
        assert_eq!(dims_of(&Shape::new([2, 3])), [2, 3]);
    }

    #[test]
    #[should_panic(expected = "a shape of 2 dimensions")]
    fn dimensions_are_never_left_out() {
        let [_, _] = dims_of(&Shape::new([1, 2, 3]));
    }

    #[test]
    #[should_panic(expected = "a shape of 2 dimensions")]
    fn dimensions_are_never_made_up() {
        let [_, _] = dims_of(&Shape::new([3]));
    }
}
