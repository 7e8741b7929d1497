//! What the clustered head refuses.

use burn::tensor::{DType, Device, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::flash_head::{
    BuildOptions, FlashHead, FlashHeadOptions, flash_head_argmax, flash_head_candidates,
    flash_head_draw, flash_head_logits,
};

use super::common::{devices, floats, second_device};

fn flex() -> &'static Device {
    &devices()[0].1
}

fn zeros<const D: usize>(shape: [usize; D], dtype: DType) -> Tensor<D> {
    Tensor::zeros(shape, (flex(), dtype))
}

/// Six rows of width 4 in three clusters.
struct Parts {
    lm_head: Tensor<2>,
    assignments: Vec<u32>,
    centroids: Tensor<2>,
    options: FlashHeadOptions,
}

impl Parts {
    fn new() -> Self {
        Self {
            lm_head: zeros([6, 4], DType::F32),
            assignments: vec![0, 1, 2, 0, 1, 2],
            centroids: zeros([3, 4], DType::F32),
            options: FlashHeadOptions::default(),
        }
    }

    fn build(self) -> Result<FlashHead, OpError> {
        FlashHead::new(
            self.lm_head,
            &self.assignments,
            self.centroids,
            self.options,
        )
    }
}

/// The error of parts that were changed in one thing.
#[track_caller]
fn refused(change: impl FnOnce(&mut Parts)) -> String {
    let mut parts = Parts::new();
    change(&mut parts);
    parts
        .build()
        .expect_err("parts that do not fit")
        .to_string()
}

fn head() -> FlashHead {
    Parts::new().build().expect("parts that fit")
}

#[test]
fn a_head_without_rows_columns_or_clusters_is_refused() {
    assert_eq!(
        refused(|p| p.lm_head = zeros([0, 4], DType::F32)),
        "`rows of lm_head` is 0, expected 1 to 1073741823"
    );
    assert_eq!(
        refused(|p| p.lm_head = zeros([6, 0], DType::F32)),
        "`columns of lm_head` is 0, expected at least 1"
    );
    assert_eq!(
        refused(|p| p.centroids = zeros([0, 4], DType::F32)),
        "`clusters` is 0, expected 1 to 6 for 6 rows"
    );
    assert_eq!(
        refused(|p| p.centroids = zeros([7, 4], DType::F32)),
        "`clusters` is 7, expected 1 to 6 for 6 rows"
    );
}

#[test]
fn parts_of_another_shape_or_dtype_are_named() {
    assert_eq!(
        refused(|p| p.lm_head = zeros([6, 4], DType::F64)),
        "`lm_head` has dtype F64, expected F32, F16 or BF16"
    );
    assert_eq!(
        refused(|p| p.centroids = zeros([3, 4], DType::F64)),
        "`centroids` has dtype F64, expected F32, F16 or BF16"
    );
    assert_eq!(
        refused(|p| p.centroids = zeros([3, 5], DType::F32)),
        "`centroids` has shape [3, 5], expected [3, 4]"
    );
    assert_eq!(
        refused(|p| p.options.norms = Some(zeros([2], DType::F32))),
        "`norms` has shape [2], expected [3]"
    );
    assert_eq!(
        refused(|p| p.options.norms = Some(zeros([3], DType::F16))),
        "`norms` has dtype F16, expected F32"
    );
    assert_eq!(
        refused(|p| p.assignments.truncate(5)),
        "`length of assignments` is 5, expected 6, one for each row of lm_head"
    );
}

#[test]
fn clusters_of_another_size_are_listed() {
    assert_eq!(
        refused(|p| p.assignments = vec![0, 0, 0, 1, 1, 0]),
        "`assignments` gives 2 clusters a number of rows outside 1 to 2: cluster 0 has 4, \
         cluster 2 has 0"
    );
    assert_eq!(
        refused(|p| p.assignments[4] = 3),
        "`assignments` is 3, expected less than 3, the number of clusters"
    );
    let many = FlashHead::new(
        zeros([40, 1], DType::F32),
        &[0; 40],
        zeros([20, 1], DType::F32),
        FlashHeadOptions::default(),
    );
    let error = many.expect_err("one cluster with all").to_string();
    assert!(error.contains("gives 20 clusters"), "{error}");
    assert!(error.ends_with("cluster 7 has 0"), "{error}");
}

#[test]
fn a_special_token_outside_of_the_vocabulary_is_named() {
    assert_eq!(
        refused(|p| p.options.special_tokens = vec![5, 6, 9]),
        "`special_tokens` is 6, expected less than 6, the size of the vocabulary"
    );
}

#[test]
fn centroids_and_norms_that_are_no_numbers_are_named() {
    let row = |value: f32| {
        let mut data = [0.0; 12];
        data[6] = value;
        floats(&data, [3, 4], flex())
    };
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = refused(|p| p.centroids = row(value));
        assert_eq!(
            error,
            "`centroids` is NaN in row 1, expected rows of finite length"
        );
    }
    let norms = |values: [f32; 3]| Some(floats(&values, [3], flex()));
    assert_eq!(
        refused(|p| p.options.norms = norms([0.0, 1.0, f32::NAN])),
        "`norms` is NaN in row 2, expected finite numbers that are not negative"
    );
    assert_eq!(
        refused(|p| p.options.norms = norms([0.0, -1.0, 1.0])),
        "`norms` is -1 in row 1, expected finite numbers that are not negative"
    );
    assert_eq!(
        refused(|p| {
            p.options.norms = norms([1.0; 3]);
            p.centroids = row(1.5);
        }),
        "`centroids` is 1.5 in row 1, expected rows of length 1 or 0, as `norms` are given"
    );
}

#[test]
fn hidden_states_that_do_not_fit_are_named() {
    let error = |h: Tensor<2>| {
        let error = flash_head_argmax(h.clone(), &head(), 1).expect_err("a bad h");
        let same = flash_head_candidates(h.clone(), &head(), 1).expect_err("a bad h");
        assert_eq!(error, same);
        let same = flash_head_logits(h, &head(), 1).expect_err("a bad h");
        assert_eq!(error, same);
        error.to_string()
    };
    for tokens in [0, 17] {
        assert_eq!(
            error(zeros([tokens, 4], DType::F32)),
            format!("`tokens of h` is {tokens}, expected 1 to 16")
        );
    }
    assert_eq!(
        error(zeros([2, 5], DType::F32)),
        "`h` has shape [2, 5], expected [2, 4]"
    );
    assert_eq!(
        error(zeros([2, 4], DType::F64)),
        "`h` has dtype F64, expected F32, F16 or BF16"
    );
}

#[test]
fn probes_out_of_range_are_named() {
    for probes in [0, 4] {
        let h = zeros([1, 4], DType::F32);
        let error = flash_head_argmax(h, &head(), probes).expect_err("bad probes");
        assert_eq!(
            error.to_string(),
            format!("`probes` is {probes}, expected 1 to 3, the number of clusters")
        );
    }
}

#[test]
fn temperatures_and_noise_that_do_not_fit_are_named() {
    let draw = |temperature: f64, noise: Tensor<2>| {
        let h = zeros([2, 4], DType::F32);
        let result = flash_head_draw(h, &head(), 1, temperature, noise);
        result.expect_err("a bad draw").to_string()
    };
    for temperature in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-60, 1e60] {
        assert_eq!(
            draw(temperature, zeros([2, 3], DType::F32)),
            format!("`temperature` is {temperature}, expected a finite number above 0")
        );
    }
    assert_eq!(
        draw(1.0, zeros([1, 3], DType::F32)),
        "`uniform` has shape [1, 3], expected [2, 3]"
    );
    assert_eq!(
        draw(1.0, zeros([2, 3], DType::F16)),
        "`uniform` has dtype F16, expected F32"
    );
}

#[test]
fn a_build_that_cannot_be_is_refused() {
    let build = |lm_head: Tensor<2>, clusters, options: BuildOptions| {
        let built = FlashHead::build(lm_head, clusters, &options, |_| panic!("a step of it"));
        built.expect_err("a bad build").to_string()
    };
    let rows = || zeros([6, 4], DType::F32);
    let options = BuildOptions::default;
    assert_eq!(
        build(zeros([0, 4], DType::F32), 1, options()),
        "`rows of lm_head` is 0, expected 1 to 1073741823"
    );
    for clusters in [0, 7] {
        assert_eq!(
            build(rows(), clusters, options()),
            format!("`clusters` is {clusters}, expected 1 to 6 for 6 rows")
        );
    }
    let special_tokens = vec![6];
    assert_eq!(
        build(
            rows(),
            2,
            BuildOptions {
                special_tokens,
                ..options()
            }
        ),
        "`special_tokens` is 6, expected less than 6, the size of the vocabulary"
    );
    assert_eq!(
        build(
            rows(),
            2,
            BuildOptions {
                iterations: 0,
                ..options()
            }
        ),
        "`iterations` is 0, expected at least 1"
    );
    for proposals in [0, 4097] {
        assert_eq!(
            build(
                rows(),
                2,
                BuildOptions {
                    proposals,
                    ..options()
                }
            ),
            format!("`proposals` is {proposals}, expected 1 to 4096")
        );
    }
    for value in [f32::NAN, f32::INFINITY] {
        let mut data = [1.0; 24];
        data[13] = value;
        assert_eq!(
            build(floats(&data, [6, 4], flex()), 2, options()),
            "`lm_head` is NaN in row 3, expected rows of finite length"
        );
    }
}

#[test]
fn tensors_on_another_device_are_named() {
    let Some((_, other)) = second_device() else {
        return;
    };
    let elsewhere = |shape: [usize; 2]| Tensor::<2>::zeros(shape, (other, DType::F32));
    let error = refused(|p| p.centroids = elsewhere([3, 4]));
    assert!(error.starts_with("`centroids` is on "), "{error}");
    let error = flash_head_argmax(elsewhere([1, 4]), &head(), 1).expect_err("another device");
    assert!(error.to_string().starts_with("`h` is on "), "{error}");
    let h = zeros([1, 4], DType::F32);
    let error = flash_head_draw(h, &head(), 1, 1.0, elsewhere([1, 3])).expect_err("the same");
    assert!(error.to_string().starts_with("`uniform` is on "), "{error}");
}
