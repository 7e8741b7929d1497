//! Where weights come from.

use burn::module::Param;
use burn::tensor::{Int, Tensor};

use super::stack::WeightStack;
use super::table::EngramTable;

/// What a parameter is where nothing has been learned.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Initial {
    Zeros,
    Ones,
    /// Normal, its variance being one over the last dimension.
    Random,
}

/// Hands out weights by their names in a released checkpoint.
///
/// A method returns `None` if there is no such weight; the source knows why. Whoever builds a
/// module asks for all weights before giving up, so that a source can tell everything that is
/// wrong.
pub(crate) trait WeightSource {
    /// An f32 parameter of this shape, which `arrange` makes of the tensor that is stored.
    fn arranged<const D: usize>(
        &mut self,
        name: &str,
        stored: [usize; D],
        shape: [usize; D],
        initial: Initial,
        arrange: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Option<Param<Tensor<D>>>;

    /// An f32 parameter.
    fn float<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        initial: Initial,
    ) -> Option<Param<Tensor<D>>> {
        self.arranged(name, shape, shape, initial, |tensor| tensor)
    }

    /// A matrix in the dtype of the activations.
    fn embedding(&mut self, name: &str, shape: [usize; 2]) -> Option<Param<Tensor<2>>>;

    /// Matrices of this shape on top of each other, which the released model reads in f32, in the
    /// dtype of their file: products with them are as exact, and read less.
    fn stored(&mut self, names: &[String], shape: [usize; 2]) -> Option<Param<Tensor<2>>>;

    /// Linear weights `{prefix}{part}` of shape `[out, in]`, the parts on top of each other:
    /// `[1, parts · out, in]`. With a number of experts, the `{prefix}.{expert}{part}` of each:
    /// `[experts, parts · out, in]`.
    fn stack(
        &mut self,
        prefix: &str,
        experts: Option<usize>,
        parts: &[&str],
        shape: [usize; 2],
    ) -> Option<WeightStack>;

    /// The linear maps of equal groups of channels, which are stored as one:
    /// `[groups, rank, width]`.
    fn groups(&mut self, prefix: &str, shape: [usize; 3]) -> Option<WeightStack>;

    /// The table `{prefix}` of rows that stay on the host: `[rows, width]`.
    fn lookup(&mut self, prefix: &str, shape: [usize; 2]) -> Option<EngramTable>;

    /// Expert ids below `experts`: `[vocabulary, experts_per_token]`.
    fn table(
        &mut self,
        name: &str,
        shape: [usize; 2],
        experts: usize,
    ) -> Option<Param<Tensor<2, Int>>>;
}

/// An optional part: absent, complete, or (`None`) wanted and not there.
pub(crate) fn all_or_nothing<T>(part: Option<Option<T>>) -> Option<Option<T>> {
    match part {
        None => Some(None),
        Some(part) => part.map(Some),
    }
}

/// All items, or `None` if one is missing. Unlike `collect`, it takes every item before it returns.
///
/// # Example
///
/// ```
/// use ds4_model::checkpoint::load_all;
///
/// let mut asked = 0;
/// let mut ask = |found| {
///     asked += 1;
///     found
/// };
/// let items = load_all([None, Some(2), Some(3)].into_iter().map(&mut ask));
/// assert_eq!(items, None);
/// assert_eq!(asked, 3);
/// ```
pub fn load_all<T>(items: impl IntoIterator<Item = Option<T>>) -> Option<Vec<T>> {
    let items: Vec<Option<T>> = items.into_iter().collect();
    items.into_iter().collect()
}
