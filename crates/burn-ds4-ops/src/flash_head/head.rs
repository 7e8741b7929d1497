//! The clustered head, built from the parts of a dense one.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::args::{HeadTensors, MAX_TOKENS};
use super::options::FlashHeadOptions;
use super::validation;
use crate::OpError;
use crate::validation::{
    F32, expect_float, expect_number, expect_placed, expect_tensor, expect_value,
};

/// The most elements that are computed at a time.
const MAX_ELEMENTS: usize = 1 << 25;

/// An output head whose rows are in clusters of one size.
///
/// Each cluster has `capacity` rows: the number of rows divided by the number of clusters, rounded
/// up. Clusters with fewer rows are filled up with padding.
#[derive(Clone, Debug)]
pub struct FlashHead {
    weight: Tensor<2>,
    centroids: Tensor<2>,
    norms: Tensor<1>,
    ids: Tensor<2, Int>,
    /// All of them.
    cluster_numbers: Tensor<1, Int>,
    special_rows: Option<Tensor<1, Int>>,
    special_tokens: Vec<u32>,
    assignments: Vec<u32>,
}

impl FlashHead {
    /// Makes a head from its parts.
    ///
    /// # Shapes and dtypes
    ///
    /// - `lm_head`: `[vocabulary, width]`, f32 / f16 / bf16
    /// - `assignments`: the cluster of each row. No cluster is empty, and none has more rows than
    ///   the number of rows divided by the number of clusters, rounded up.
    /// - `centroids`: `[clusters, width]`, f32 / f16 / bf16: the mean of each cluster's rows or,
    ///   with [`FlashHeadOptions::norms`], its direction. It decides which clusters are probed.
    ///   Another vector than the mean is allowed.
    ///
    /// # Errors
    ///
    /// [`OpError`] for a dtype, shape or device that does not fit, no rows, columns or clusters at
    /// all, clusters of another size, a special token that is not in the vocabulary, and centroids
    /// or norms that are no finite numbers, negative norms, or centroids whose length does not
    /// match given norms.
    ///
    /// # Example
    ///
    /// Four rows in two clusters, with the means as centroids. [`build`](Self::build) finds
    /// clusters by itself.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor, TensorData};
    /// use burn_ds4_ops::flash_head::{FlashHead, FlashHeadOptions};
    ///
    /// let device = Device::flex();
    /// let rows = [[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]];
    /// let lm_head = Tensor::<2>::from_data(rows, &device);
    /// let means = Tensor::from_data([[1.5, 0.0], [0.0, 2.0]], &device);
    /// let head = FlashHead::new(lm_head, &[0, 1, 0, 1], means, FlashHeadOptions::default())?;
    /// assert_eq!((head.vocabulary(), head.clusters(), head.capacity()), (4, 2, 2));
    /// head.ids().into_data().assert_eq(&TensorData::from([[0, 2], [1, 3]]), true);
    /// head.norms().into_data().assert_eq(&TensorData::from([1.5_f32, 2.0]), true);
    /// # }
    /// # Ok::<(), burn_ds4_ops::OpError>(())
    /// ```
    pub fn new(
        lm_head: Tensor<2>,
        assignments: &[u32],
        centroids: Tensor<2>,
        options: FlashHeadOptions,
    ) -> Result<Self, OpError> {
        validation::check_parts(&lm_head, assignments, &centroids, &options)?;
        let [vocabulary, width] = lm_head.dims();
        let [clusters, _] = centroids.dims();
        let device = lm_head.device();
        let dtype = lm_head.dtype();

        let (directions, lengths) = unit_rows(centroids.clone().cast(DType::F32));
        let host_lengths = read(lengths.clone());
        let (centroids, norms) = match options.norms {
            None => {
                validation::check_lengths("centroids", &host_lengths)?;
                (directions, lengths)
            }
            Some(norms) => {
                validation::check_unit(&host_lengths)?;
                validation::check_norms(&read(norms.clone()))?;
                (centroids, norms)
            }
        };

        let layout = ClusterLayout::new(assignments, clusters);
        let rows: Vec<i32> = layout.ids.iter().map(|&id| id.max(0)).collect();
        let mut weight = lm_head.select(0, integers(rows, &device));
        let ids = integers(layout.ids, &device);
        if clusters * layout.capacity > vocabulary {
            let padding = ids.clone().lower_elem(0).unsqueeze_dim::<2>(1);
            let padding = padding.expand([clusters * layout.capacity, width]);
            weight = weight.mask_fill(padding, 0.0);
        }
        let mut special_tokens = options.special_tokens;
        special_tokens.sort_unstable();
        special_tokens.dedup();
        let special_rows: Vec<i32> = special_tokens
            .iter()
            .map(|&token| layout.rows[token as usize])
            .collect();
        Ok(Self {
            weight,
            centroids: centroids.cast(dtype),
            norms,
            ids: ids.reshape([clusters, layout.capacity]),
            cluster_numbers: integers((0..clusters as i32).collect(), &device),
            special_rows: (!special_rows.is_empty()).then(|| integers(special_rows, &device)),
            special_tokens,
            assignments: assignments.to_vec(),
        })
    }

    /// The rows of the dense head by cluster, and within a cluster by id, with padding last:
    /// `[clusters · capacity, width]`.
    pub fn weight(&self) -> Tensor<2> {
        self.weight.clone()
    }

    /// The directions of the clusters, of length 1, in the dtype of the weight:
    /// `[clusters, width]`. The direction of a mean of 0 is 0.
    pub fn centroids(&self) -> Tensor<2> {
        self.centroids.clone()
    }

    /// The lengths of the means of the clusters' rows: `[clusters]`, f32.
    pub fn norms(&self) -> Tensor<1> {
        self.norms.clone()
    }

    /// The id of each row of the weight, -1 for padding: `[clusters, capacity]`, i32.
    pub fn ids(&self) -> Tensor<2, Int> {
        self.ids.clone()
    }

    /// The cluster of each id.
    pub fn assignments(&self) -> &[u32] {
        &self.assignments
    }

    /// Ids that are always candidates, ascending.
    pub fn special_tokens(&self) -> &[u32] {
        &self.special_tokens
    }

    /// The number of ids.
    pub fn vocabulary(&self) -> usize {
        self.assignments.len()
    }

    /// Elements of a hidden state.
    pub fn width(&self) -> usize {
        self.weight.dims()[1]
    }

    /// The number of clusters.
    pub fn clusters(&self) -> usize {
        self.ids.dims()[0]
    }

    /// Rows of a cluster, padding included.
    pub fn capacity(&self) -> usize {
        self.ids.dims()[1]
    }

    /// The device of all tensors.
    pub fn device(&self) -> Device {
        self.weight.device()
    }

    /// Checks the arguments of a call.
    pub(super) fn check_call(&self, h: &Tensor<2>, probes: usize) -> Result<(), OpError> {
        expect_float("h", h)?;
        let [tokens, _] = h.dims();
        let fits = (1..=MAX_TOKENS).contains(&tokens);
        let expected = format_args!("1 to {MAX_TOKENS}");
        expect_value(fits, "tokens of h", tokens, expected)?;
        expect_placed(("h", h), [tokens, self.width()], ("head", &self.device()))?;
        let clusters = self.clusters();
        let fits = (1..=clusters).contains(&probes);
        let expected = format_args!("1 to {clusters}, the number of clusters");
        expect_value(fits, "probes", probes, expected)
    }

    /// Checks the further arguments of a draw.
    pub(super) fn check_draw(
        &self,
        h: &Tensor<2>,
        temperature: f64,
        uniform: &Tensor<2>,
    ) -> Result<(), OpError> {
        // Checked in f32, as it is used.
        let fits = (temperature as f32).is_normal() && temperature > 0.0;
        expect_number(fits, "temperature", temperature, "a finite number above 0")?;
        let shape = [h.dims()[0], self.clusters()];
        expect_tensor(("uniform", uniform), F32, shape, ("head", &self.device()))
    }

    /// The rows of the special tokens in the weight.
    pub(super) fn special_rows(&self) -> Option<Tensor<1, Int>> {
        self.special_rows.clone()
    }

    pub(super) fn tensors(&self) -> HeadTensors<Dispatch> {
        HeadTensors {
            weight: self.weight().into_dispatch(),
            centroids: self.centroids().into_dispatch(),
            norms: self.norms().into_dispatch(),
            ids: self.ids().into_dispatch(),
            clusters: self.cluster_numbers.clone().into_dispatch(),
        }
    }
}

/// The row of the weight for each id, and the id of each row.
pub(super) struct ClusterLayout {
    /// Rows of a cluster.
    pub(super) capacity: usize,
    /// Ids by cluster, ascending within a cluster; -1 for padding, which comes last.
    pub(super) ids: Vec<i32>,
    /// The position of each id in `ids`.
    rows: Vec<i32>,
}

impl ClusterLayout {
    /// Makes the layout of clusters that have no more than `capacity` rows each.
    pub(super) fn new(assignments: &[u32], clusters: usize) -> Self {
        let capacity = assignments.len().div_ceil(clusters);
        let mut ids = vec![-1; clusters * capacity];
        let mut counts = vec![0; clusters];
        let rows = assignments.iter().zip(0..).map(|(&cluster, id)| {
            let cluster = cluster as usize;
            let row = cluster * capacity + counts[cluster];
            counts[cluster] += 1;
            ids[row] = id;
            row as i32
        });
        Self {
            capacity,
            rows: rows.collect(),
            ids,
        }
    }
}

/// The directions of f32 rows, and their lengths. The direction of a row of zeros is 0.
pub(super) fn unit_rows(rows: Tensor<2>) -> (Tensor<2>, Tensor<1>) {
    let shape = rows.dims();
    let at_least = f32::MIN_POSITIVE;
    // The squares of a row whose largest element is 1 neither overflow nor vanish.
    let largest = rows.clone().abs().max_dim(1);
    let rows = rows / largest.clone().clamp_min(at_least).expand(shape);
    let norms = (rows.clone() * rows.clone()).sum_dim(1).sqrt();
    let directions = rows / norms.clone().clamp_min(at_least).expand(shape);
    (directions, (norms * largest).reshape([shape[0]]))
}

/// The number of rows of `columns` elements that are computed at a time.
pub(super) fn rows_at_once(columns: usize) -> usize {
    (MAX_ELEMENTS / columns).max(1)
}

/// Copies a tensor to the host.
pub(super) fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Copies integers to the device.
pub(super) fn integers(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let length = values.len();
    Tensor::from_data(TensorData::new(values, [length]), (device, DType::I32))
}
