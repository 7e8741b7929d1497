//! Checks of the arguments of this family's operators.

use burn::tensor::Tensor;

use super::options::{BuildOptions, FlashHeadOptions};
use crate::OpError;
use crate::topk::{MAX_COLUMNS, MAX_K};
use crate::validation::{
    F32, FLOATS, expect_float, expect_number, expect_positive, expect_tensor, expect_value,
};

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
    let fits = (1..=most).contains(&vocabulary);
    let expected = format_args!("1 to {most}");
    expect_value(fits, "rows of lm_head", vocabulary, expected)?;
    expect_positive([("columns of lm_head", width)])?;
    let most = vocabulary.min(MAX_COLUMNS);
    let fits = (1..=most).contains(&clusters);
    let expected = format_args!("1 to {most} for {vocabulary} rows");
    expect_value(fits, "clusters", clusters, expected)?;
    special_tokens.iter().try_for_each(|&token| {
        let token = token as usize;
        let expected = format_args!("less than {vocabulary}, the size of the vocabulary");
        expect_value(token < vocabulary, "special_tokens", token, expected)
    })
}

/// Checks the options of a build.
pub(super) fn check_build(options: &BuildOptions) -> Result<(), OpError> {
    expect_positive([("iterations", options.iterations)])?;
    let fits = (1..=MAX_K).contains(&options.proposals);
    let expected = format_args!("1 to {MAX_K}");
    expect_value(fits, "proposals", options.proposals, expected)
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
    let like = ("lm_head", &lm_head.device());
    expect_tensor(("centroids", centroids), FLOATS, [clusters, width], like)?;
    if let Some(norms) = &options.norms {
        expect_tensor(("norms", norms), F32, [clusters], like)?;
    }
    let length = assignments.len();
    let expected = format_args!("{vocabulary}, one for each row of lm_head");
    expect_value(
        length == vocabulary,
        "length of assignments",
        length,
        expected,
    )?;
    check_balance(assignments, clusters)
}

fn check_balance(assignments: &[u32], clusters: usize) -> Result<(), OpError> {
    let mut sizes = vec![0; clusters];
    for cluster in assignments.iter().map(|&cluster| cluster as usize) {
        let expected = format_args!("less than {clusters}, the number of clusters");
        expect_value(cluster < clusters, "assignments", cluster, expected)?;
        sizes[cluster] += 1;
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
    lengths.iter().enumerate().try_for_each(|(row, &length)| {
        let actual = format_args!("{length} in row {row}");
        expect_number(fits(length), argument, actual, expected)
    })
}
