//! Balanced spherical k-means: clusters of one size, whose rows point in similar directions.
//!
//! The device computes similarities, in parts of a bounded size. The host decides which row goes to
//! which cluster.

use burn::tensor::{DType, Tensor};

use super::head::{ClusterLayout, integers, read, rows_at_once, unit_rows};
use super::matching::{Preferences, match_rows};
use super::options::{BuildOptions, FlashHeadOptions};
use super::{FlashHead, seeding, validation};
use crate::OpError;
use crate::matmul::matmul;
use crate::topk::{MAX_K, Order, Windows, top_k};

/// The most preferences of rejected rows that the host holds.
const MAX_PREFERENCES: usize = 1 << 24;

/// The changes of one assignment of the rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BuildProgress {
    /// The number of the assignment, from 1.
    pub iteration: usize,
    /// Rows that were in another cluster before. In the first iteration, all rows.
    pub moved: usize,
    /// The mean over the rows of the cosine between a row and the centroid that it was assigned to.
    pub similarity: f64,
}

impl FlashHead {
    /// Divides the rows of a dense head into clusters, by balanced spherical k-means.
    ///
    /// The first centroids are rows that are far from each other. Then two steps alternate: rows
    /// are assigned to clusters by the cosine, and each centroid becomes the direction of the mean
    /// of its rows' directions. This ends when no row moves or after the given number of
    /// iterations. In an assignment, all rows ask the clusters that they are most similar to, and a
    /// cluster keeps the rows that are most similar to it, up to its capacity; of equally similar
    /// rows, the smaller id. If the number of rows is not a multiple of the number of clusters, the
    /// first clusters have one row more. At the end, the centroid of each cluster is set to the
    /// direction of the mean of its rows, in which long rows weigh more.
    ///
    /// The same head, options and device give the same clusters. The memory of each step is
    /// bounded; in addition, a copy of the head in f32 is held during the build.
    ///
    /// # Shapes and dtypes
    ///
    /// - `lm_head`: `[vocabulary, width]`, f32 / f16 / bf16
    /// - `clusters`: 1 to the size of the vocabulary. With V / 16 of them, a cluster has 16 rows.
    ///
    /// # Errors
    ///
    /// [`OpError`] for a dtype that does not fit, no rows or columns at all, a number of clusters,
    /// iterations or proposals out of range, a special token that is not in the vocabulary, and
    /// rows that hold NaN or infinity.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_ds4_ops::flash_head::{BuildOptions, FlashHead, flash_head_argmax};
    ///
    /// let device = Device::flex();
    /// let lm_head = Tensor::<2>::random([256, 32], Distribution::Default, &device);
    /// let head = FlashHead::build(lm_head, 16, &BuildOptions::default(), |progress| {
    ///     eprintln!("{}: {} rows moved", progress.iteration, progress.moved);
    /// })?;
    /// let h = Tensor::<2>::random([1, 32], Distribution::Default, &device);
    /// let token = flash_head_argmax(h, &head, 4)?;
    /// assert_eq!(token.dims(), [1]);
    /// # }
    /// # Ok::<(), burn_ds4_ops::OpError>(())
    /// ```
    pub fn build(
        lm_head: Tensor<2>,
        clusters: usize,
        options: &BuildOptions,
        mut progress: impl FnMut(BuildProgress),
    ) -> Result<Self, OpError> {
        validation::check_head(&lm_head, clusters, &options.special_tokens)?;
        validation::check_build(options)?;
        let (rows, lengths) = directions(&lm_head)?;
        let seeds = seeding::seeds(&rows, &lengths, clusters, options.seed)?;
        let mut centroids = rows.clone().select(0, integers(seeds, &rows.device()));
        let mut assignments = Vec::new();
        for iteration in 1..=options.iterations {
            let (assigned, similarity) = assign(&rows, &centroids, options.proposals)?;
            let moved = match assignments.is_empty() {
                true => assigned.len(),
                false => differing(&assigned, &assignments),
            };
            assignments = assigned;
            progress(BuildProgress {
                iteration,
                moved,
                similarity,
            });
            if moved == 0 {
                break;
            }
            if iteration < options.iterations {
                centroids = unit_rows(means(&rows, &assignments, clusters)).0;
            }
        }
        drop(rows);
        let means = means(&lm_head, &assignments, clusters);
        let options = FlashHeadOptions {
            special_tokens: options.special_tokens.clone(),
            norms: None,
        };
        Self::new(lm_head, &assignments, means, options)
    }
}

fn differing(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a != b).count()
}

/// The directions of the rows of a head in f32, and the lengths of the rows.
fn directions(lm_head: &Tensor<2>) -> Result<(Tensor<2>, Vec<f32>), OpError> {
    let [vocabulary, width] = lm_head.dims();
    let mut parts = Vec::new();
    let mut lengths = Vec::new();
    for start in (0..vocabulary).step_by(rows_at_once(width)) {
        let end = vocabulary.min(start + rows_at_once(width));
        let rows = lm_head.clone().slice_dim(0, start..end);
        let (directions, of_rows) = unit_rows(rows.cast(DType::F32));
        parts.push(directions);
        lengths.extend(read(of_rows));
    }
    validation::check_lengths("lm_head", &lengths)?;
    Ok((Tensor::cat(parts, 0), lengths))
}

/// The mean of the rows of each cluster, in f32. No cluster is empty.
fn means(rows: &Tensor<2>, assignments: &[u32], clusters: usize) -> Tensor<2> {
    let device = rows.device();
    let width = rows.dims()[1];
    let ClusterLayout { capacity, ids, .. } = ClusterLayout::new(assignments, clusters);
    let parts = ids
        .chunks(rows_at_once(width * capacity) * capacity)
        .map(|ids| {
            let count = ids.len() / capacity;
            let rows_of_ids = ids.iter().map(|&id| id.max(0)).collect();
            let some = rows.clone().select(0, integers(rows_of_ids, &device));
            let padding = integers(ids.to_vec(), &device).lower_elem(0);
            let padding = padding.unsqueeze_dim::<2>(1).expand([ids.len(), width]);
            let some = some.cast(DType::F32).mask_fill(padding, 0.0);
            let sums = some.reshape([count, capacity, width]).sum_dim(1);
            let sizes = ids.chunks(capacity);
            let sizes = sizes.map(|ids| ids.iter().filter(|&&id| id >= 0).count() as i32);
            let sizes = integers(sizes.collect(), &device).float().cast(DType::F32);
            let sizes = sizes.reshape([count, 1]).expand([count, width]);
            sums.reshape([count, width]) / sizes
        });
    Tensor::cat(parts.collect(), 0)
}

/// Returns the cluster of each row, with no cluster above its capacity, and the mean of the rows'
/// similarities.
fn assign(
    rows: &Tensor<2>,
    centroids: &Tensor<2>,
    proposals: usize,
) -> Result<(Vec<u32>, f64), OpError> {
    let [vocabulary, _] = rows.dims();
    let [clusters, _] = centroids.dims();
    let (capacity, remainder) = (vocabulary / clusters, vocabulary % clusters);
    let mut free: Vec<usize> = (0..clusters)
        .map(|cluster| capacity + usize::from(cluster < remainder))
        .collect();
    let mut assignments = vec![0; vocabulary];
    let mut similarity = 0.0;
    let mut unmatched: Vec<u32> = (0..vocabulary as u32).collect();
    let mut each = proposals;
    while !unmatched.is_empty() {
        let open = (0..clusters as u32).filter(|&cluster| free[cluster as usize] > 0);
        let preferences = preferences(rows, unmatched, centroids, open.collect(), each)?;
        let (matches, rejected) = match_rows(&preferences, &free);
        for found in matches {
            free[found.cluster as usize] -= 1;
            assignments[found.row as usize] = found.cluster;
            similarity += f64::from(found.similarity);
        }
        unmatched = rejected;
        // Without growing numbers of preferences, rows that are all alike would fill only a few
        // clusters in each round.
        let most = (MAX_PREFERENCES / unmatched.len().max(1)).max(proposals);
        each = (2 * each).min(most);
    }
    Ok((assignments, similarity / vocabulary as f64))
}

/// The preferences of `unmatched` rows among the `open` clusters.
fn preferences(
    rows: &Tensor<2>,
    unmatched: Vec<u32>,
    centroids: &Tensor<2>,
    open: Vec<u32>,
    each: usize,
) -> Result<Preferences, OpError> {
    let device = rows.device();
    let indices = |values: &[u32]| integers(values.iter().map(|&v| v as i32).collect(), &device);
    let centroids = centroids.clone().select(0, indices(&open)).transpose();
    let each = each.min(open.len()).min(MAX_K);
    let (mut clusters, mut similarities) = (Vec::new(), Vec::new());
    let elements = open.len().max(rows.dims()[1]);
    for part in unmatched.chunks(rows_at_once(elements)) {
        let part = rows.clone().select(0, indices(part));
        let all = matmul(part, centroids.clone())?;
        let (best, columns) = top_k(all, Windows::All, each, Order::Column)?;
        // Adding zero makes zeros of either sign equal.
        let best = read(best).into_iter().map(|similarity| similarity + 0.0);
        let columns = columns.into_data();
        let clusters_of = columns.iter::<i32>().map(|column| open[column as usize]);
        let mut found: Vec<(f32, u32)> = best.zip(clusters_of).collect();
        // The host sorts the few preferences of a row faster than some devices.
        for choices in found.chunks_mut(each) {
            choices.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        }
        similarities.extend(found.iter().map(|choice| choice.0));
        clusters.extend(found.iter().map(|choice| choice.1));
    }
    Ok(Preferences {
        rows: unmatched,
        clusters,
        similarities,
        per_row: each,
    })
}
