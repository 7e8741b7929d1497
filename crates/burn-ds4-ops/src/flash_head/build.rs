//! Balanced spherical k-means: clusters of one size, of rows that point in similar directions.
//!
//! Similarities are computed on the device, in parts of a bounded size; who goes where is decided on the host.

use burn::tensor::{DType, Tensor};

use super::head::{Layout, integers, read, unit_rows};
use super::matching::{Wishes, accept};
use super::{FlashHead, FlashHeadOptions, seeding, validation};
use crate::OpError;
use crate::matmul::matmul;
use crate::topk::{MAX_K, Order, Windows, top_k};

/// Elements of what is computed at a time, at most.
const PART: usize = 1 << 25;
/// Wishes of rows that went away empty-handed, at most, on the host.
const MOST_WISHES: usize = 1 << 24;

/// How [`FlashHead::build`] goes about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildOptions {
    /// Decides which rows the clusters grow from.
    pub seed: u64,
    /// How often the rows are assigned at most, at least once.
    pub iterations: usize,
    /// How many of the most similar clusters a row asks, before those are asked that are not full by then: 1 to
    /// [`MAX_K`]. Fewer take less time, more make better clusters.
    pub proposals: usize,
    /// Ids that are always candidates, in any order.
    pub special_tokens: Vec<u32>,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            iterations: 20,
            proposals: 32,
            special_tokens: Vec::new(),
        }
    }
}

/// What one assignment of the rows has changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BuildProgress {
    /// From 1.
    pub iteration: usize,
    /// Rows that were in another cluster before. The first time, all.
    pub moved: usize,
    /// Mean over the rows of the cosine between a row and the centroid that it was assigned to.
    pub similarity: f64,
}

impl FlashHead {
    /// Divides the rows of a dense head into clusters, by balanced spherical k-means.
    ///
    /// The centroids are first those of rows far from each other. Then, in turns, rows are assigned to clusters by the cosine, and
    /// centroids become the direction of the mean of their rows' directions, until no row moves or there were enough iterations. All
    /// rows ask the clusters that they are most similar to, and a cluster keeps the rows that are most similar to it, no more than its
    /// share; of equally similar rows, the smaller id. Where the number of rows does not divide, the first clusters have one row more.
    /// At last, the centroid of each cluster is set to the direction of the mean of its rows, in which long ones weigh more.
    ///
    /// The same head, options and device give the same clusters. What is computed at a time is bounded; a copy of the head in f32 is
    /// held meanwhile.
    ///
    /// # Shapes and dtypes
    ///
    /// - `lm_head`: `[vocabulary, width]`, f32 / f16 / bf16
    /// - `clusters`: 1 to the size of the vocabulary. With V / 16 of them, a cluster has 16 rows.
    ///
    /// # Errors
    ///
    /// [`OpError`] for a dtype that does not fit, no rows or columns at all, a number of clusters, iterations or proposals out of
    /// range, a special token that is not in the vocabulary, and rows that hold NaN or infinity.
    ///
    /// # Example
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_ds4_ops::flash_head::{BuildOptions, FlashHead, flash_head_argmax};
    ///
    /// # fn main() -> Result<(), burn_ds4_ops::OpError> {
    /// let device = Device::default();
    /// let lm_head = Tensor::<2>::random([256, 32], Distribution::Default, &device);
    /// let head = FlashHead::build(lm_head, 16, &BuildOptions::default(), |progress| {
    ///     eprintln!("{}: {} rows moved", progress.iteration, progress.moved);
    /// })?;
    /// let h = Tensor::<2>::random([1, 32], Distribution::Default, &device);
    /// let token = flash_head_argmax(h, &head, 4)?;
    /// assert_eq!(token.dims(), [1]);
    /// # Ok(())
    /// # }
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
        let seeds = seeding::seeds(&rows, &lengths, clusters, options.seed);
        let mut centroids = rows.clone().select(0, integers(seeds, &rows.device()));
        let mut assignments = Vec::new();
        for iteration in 1..=options.iterations {
            let (assigned, similarity) = assign(&rows, &centroids, options.proposals);
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

/// How many rows of so many elements are computed at a time.
pub(super) fn part(columns: usize) -> usize {
    (PART / columns).max(1)
}

/// The rows of a head as f32 directions, and their lengths.
fn directions(lm_head: &Tensor<2>) -> Result<(Tensor<2>, Vec<f32>), OpError> {
    let [vocabulary, width] = lm_head.dims();
    let mut parts = Vec::new();
    let mut lengths = Vec::new();
    for start in (0..vocabulary).step_by(part(width)) {
        let end = vocabulary.min(start + part(width));
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
    let Layout { capacity, ids, .. } = Layout::new(assignments, clusters);
    let parts = ids.chunks(part(width * capacity) * capacity).map(|ids| {
        let count = ids.len() / capacity;
        let places = ids.iter().map(|&id| id.max(0)).collect();
        let some = rows.clone().select(0, integers(places, &device));
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

/// The cluster of each row, no cluster with more than its share, and the mean of the rows' similarities.
fn assign(rows: &Tensor<2>, centroids: &Tensor<2>, proposals: usize) -> (Vec<u32>, f64) {
    let [vocabulary, _] = rows.dims();
    let [clusters, _] = centroids.dims();
    let (share, more) = (vocabulary / clusters, vocabulary % clusters);
    let mut room: Vec<usize> = (0..clusters)
        .map(|cluster| share + usize::from(cluster < more))
        .collect();
    let mut assignments = vec![0; vocabulary];
    let mut similarity = 0.0;
    let mut left: Vec<u32> = (0..vocabulary as u32).collect();
    let mut each = proposals;
    while !left.is_empty() {
        let open = (0..clusters as u32).filter(|&cluster| room[cluster as usize] > 0);
        let wishes = wishes(rows, left, centroids, open.collect(), each);
        let (matches, turned_away) = accept(&wishes, &room);
        for found in matches {
            room[found.cluster as usize] -= 1;
            assignments[found.row as usize] = found.cluster;
            similarity += f64::from(found.similarity);
        }
        left = turned_away;
        // Rows that are all alike would otherwise fill only so many clusters at a time.
        let most = (MOST_WISHES / left.len().max(1)).max(proposals);
        each = (2 * each).min(most);
    }
    (assignments, similarity / vocabulary as f64)
}

/// Of these rows, for these clusters.
fn wishes(
    rows: &Tensor<2>,
    wanting: Vec<u32>,
    centroids: &Tensor<2>,
    open: Vec<u32>,
    each: usize,
) -> Wishes {
    let device = rows.device();
    let indices = |values: &[u32]| integers(values.iter().map(|&v| v as i32).collect(), &device);
    let centroids = centroids.clone().select(0, indices(&open)).transpose();
    let each = each.min(open.len()).min(MAX_K);
    let (mut clusters, mut similarities) = (Vec::new(), Vec::new());
    let elements = open.len().max(rows.dims()[1]);
    for part in wanting.chunks(part(elements)) {
        let part = rows.clone().select(0, indices(part));
        let all = matmul(part, centroids.clone());
        let (best, places) = top_k(all, Windows::All, each, Order::Column);
        // Zeros of either sign are equal.
        let best = read(best).into_iter().map(|similarity| similarity + 0.0);
        let places = places.into_data();
        let clusters_of = places.iter::<i32>().map(|place| open[place as usize]);
        let mut found: Vec<(f32, u32)> = best.zip(clusters_of).collect();
        // The order of a row's few wishes costs the host less than some devices.
        for wishes in found.chunks_mut(each) {
            wishes.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        }
        similarities.extend(found.iter().map(|wish| wish.0));
        clusters.extend(found.iter().map(|wish| wish.1));
    }
    Wishes {
        rows: wanting,
        clusters,
        similarities,
        each,
    }
}
