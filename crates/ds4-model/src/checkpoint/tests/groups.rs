//! Rows of one linear weight as matrices of several groups.

use burn::tensor::{DType, TensorData};

use crate::checkpoint::{HostExperts, HostLinear};

fn fp8(shape: [usize; 2], scales: &[f32]) -> HostLinear {
    let [out, inp] = shape;
    HostLinear::Fp8 {
        shape,
        words: (0..(out * inp.div_ceil(4)) as u32).collect(),
        scales: scales.to_vec(),
    }
}

/// Splits an FP8 weight, whose words must not change, into groups, and returns their shape and
/// scales.
#[track_caller]
fn grouped_scales(weight: HostLinear, groups: usize) -> ([usize; 3], Vec<f32>) {
    let HostLinear::Fp8 { words, .. } = weight.clone() else {
        panic!("{weight:?}");
    };
    match weight.into_groups(groups) {
        Ok(HostExperts::Fp8 {
            shape,
            parts: 1,
            words: grouped,
            scales,
        }) => {
            assert!(grouped == words, "other words");
            (shape, scales)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn groups_of_whole_blocks_keep_their_scales() {
    let scales = [1., 2., 3., 4., 5., 6., 7., 8.];
    let grouped = grouped_scales(fp8([512, 130], &scales), 2);
    assert_eq!(grouped, ([2, 256, 130], scales.to_vec()));
}

#[test]
fn groups_that_share_a_row_of_blocks_get_one_each() {
    let weight = fp8([192, 256], &[1., 2., 3., 4.]);
    let expected = vec![1., 2., 1., 2., 3., 4.];
    assert_eq!(grouped_scales(weight, 3), ([3, 64, 256], expected));
}

#[test]
fn one_group_of_any_rank_keeps_its_scales() {
    let grouped = grouped_scales(fp8([200, 4], &[1., 2.]), 1);
    assert_eq!(grouped, ([1, 200, 4], vec![1., 2.]));
}

#[test]
fn blocks_that_reach_into_the_next_group_stay_in_one_linear() {
    for (out, groups) in [(192, 2), (384, 2), (300, 3)] {
        let weight = fp8([out, 4], &vec![1.0; out.div_ceil(128)]);
        assert_eq!(weight.clone().into_groups(groups), Err(weight), "{out}");
    }
}

#[test]
fn floats_and_fp4_are_split_between_any_rows() {
    let data = TensorData::new((0..24).map(|i| i as f32).collect::<Vec<_>>(), [6, 4]);
    let grouped = HostLinear::Dense(data.clone()).into_groups(2);
    let Ok(HostExperts::Dense(dense)) = grouped else {
        panic!("{grouped:?}");
    };
    assert_eq!(dense.dtype(), DType::F32);
    assert_eq!(dense.shape().as_slice(), [2, 3, 4]);
    assert_eq!(dense.as_bytes(), data.as_bytes());

    let (words, scales) = ((0..6).collect::<Vec<u32>>(), vec![0x7f7e_7d7c, 0x7f7f_7b7a]);
    let linear = HostLinear::Fp4 {
        shape: [6, 8],
        words: words.clone(),
        scales: scales.clone(),
    };
    let expected = HostExperts::Fp4 {
        shape: [2, 3, 8],
        words,
        scales,
    };
    assert_eq!(linear.into_groups(2), Ok(expected));
}
