//! Checks of the arguments of this family's operators.

use burn::tensor::{DType, Tensor};

use super::options::{BuildOptions, FlashHeadOptions};
use crate::OpError;
use crate::topk::{MAX_COLUMNS, MAX_K};
use crate::validation::{expect_device, expect_dtype, expect_float, expect_shape, invalid};

/// The most clusters of a wrong size that an error lists.
const LISTED: usize = 8;
/// The most by which the length of a direction may differ from 1: more than rounding to bf16
/// causes.
const LENGTH_TOLERANCE: f32 = 1.0 / 64.0;

/// Checks a dense head that is to be clustered.
pub(super) fn check_head(
    lm_head: &Tensor<2>,
    clusters: usize,
    special_tokens: &[u32],
) -> Result<(), OpError> {
    expect_float("lm_head", lm_head)?;
    let [vocabulary, width] = lm_head.dims();
    let most = i32::MAX as usize / 2;
    if !(1..=most).contains(&vocabulary) {
        return Err(invalid(
            "rows of lm_head",
            format!("1 to {most}"),
            vocabulary,
        ));
    }
    if width == 0 {
        return Err(invalid("columns of lm_head", "at least 1", width));
    }
    if !(1..=vocabulary.min(MAX_COLUMNS)).contains(&clusters) {
        let expected = format!("1 to {} for {vocabulary} rows", vocabulary.min(MAX_COLUMNS));
        return Err(invalid("clusters", expected, clusters));
    }
    let beyond = |token: &&u32| **token as usize >= vocabulary;
    match special_tokens.iter().find(beyond) {
        None => Ok(()),
        Some(&token) => {
            let expected = format!("less than {vocabulary}, the size of the vocabulary");
            Err(invalid("special_tokens", expected, token as usize))
        }
    }
}

/// Checks the options of a build.
pub(super) fn check_build(options: &BuildOptions) -> Result<(), OpError> {
    if options.iterations == 0 {
        return Err(invalid("iterations", "at least 1", 0));
    }
    if !(1..=MAX_K).contains(&options.proposals) {
        let expected = format!("1 to {MAX_K}");
        return Err(invalid("proposals", expected, options.proposals));
    }
    Ok(())
}

pub(super) fn check_parts(
    lm_head: &Tensor<2>,
    assignments: &[u32],
    centroids: &Tensor<2>,
    options: &FlashHeadOptions,
) -> Result<(), OpError> {
    let [vocabulary, width] = lm_head.dims();
    let [clusters, _] = centroids.dims();
    check_head(lm_head, clusters, &options.special_tokens)?;
    expect_float("centroids", centroids)?;
    expect_shape("centroids", centroids.dims(), [clusters, width])?;
    let device = lm_head.device();
    expect_device("centroids", &centroids.device(), "lm_head", &device)?;
    if let Some(norms) = &options.norms {
        expect_dtype("norms", "F32", norms, &[DType::F32])?;
        expect_shape("norms", norms.dims(), [clusters])?;
        expect_device("norms", &norms.device(), "lm_head", &device)?;
    }
    if assignments.len() != vocabulary {
        let expected = format!("{vocabulary}, one for each row of lm_head");
        return Err(invalid(
            "length of assignments",
            expected,
            assignments.len(),
        ));
    }
    check_balance(assignments, clusters)
}

fn check_balance(assignments: &[u32], clusters: usize) -> Result<(), OpError> {
    let mut sizes = vec![0; clusters];
    for &cluster in assignments {
        match sizes.get_mut(cluster as usize) {
            Some(size) => *size += 1,
            None => {
                let expected = format!("less than {clusters}, the number of clusters");
                return Err(invalid("assignments", expected, cluster as usize));
            }
        }
    }
    let capacity = assignments.len().div_ceil(clusters);
    let wrong = sizes
        .into_iter()
        .enumerate()
        .filter(|(_, size)| !(1..=capacity).contains(size));
    let mut wrong: Vec<_> = wrong.collect();
    if wrong.is_empty() {
        return Ok(());
    }
    let count = wrong.len();
    wrong.truncate(LISTED);
    Err(OpError::UnbalancedClusters {
        argument: "assignments",
        expected: format!("1 to {capacity}"),
        count,
        clusters: wrong,
    })
}

/// Checks the lengths of rows.
pub(super) fn check_lengths(argument: &'static str, lengths: &[f32]) -> Result<(), OpError> {
    check_each(argument, "rows of finite length", lengths, f32::is_finite)
}

pub(super) fn check_norms(norms: &[f32]) -> Result<(), OpError> {
    let fits = |norm: f32| norm.is_finite() && norm >= 0.0;
    check_each("norms", "finite numbers that are not negative", norms, fits)
}

/// Checks the lengths of directions.
pub(super) fn check_unit(lengths: &[f32]) -> Result<(), OpError> {
    let fits = |length: f32| length == 0.0 || (length - 1.0).abs() <= LENGTH_TOLERANCE;
    let expected = "rows of length 1 or 0, as `norms` are given";
    check_each("centroids", expected, lengths, fits)
}

fn check_each(
    argument: &'static str,
    expected: &'static str,
    lengths: &[f32],
    fits: impl Fn(f32) -> bool,
) -> Result<(), OpError> {
    match lengths.iter().position(|&length| !fits(length)) {
        None => Ok(()),
        Some(row) => Err(OpError::InvalidFloat {
            argument,
            expected,
            actual: format!("{} in row {row}", lengths[row]),
        }),
    }
}
