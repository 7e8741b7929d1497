//! What logits can be: far below zero, zeros of both signs, NaN and infinities.

use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::flash_head::{flash_head_argmax, flash_head_candidates};

use super::common::{devices, every_dtype, floats, integer_values, noise, values, wide};
use super::heads::{Case, Sizes, first_largest};

/// Rows of one element each: with a hidden state of 1, they are the logits.
fn with_logits(logits: &[f32], clusters: usize, special: &[u32], device: &Device) -> Case {
    let sizes = Sizes {
        vocabulary: logits.len(),
        width: 1,
        clusters,
    };
    Case::new(logits, sizes, FloatDType::F32, special, device)
}

fn greedy(case: &Case, h: f32, probes: usize, device: &Device) -> i64 {
    let h = floats(&[h], [1, 1], device);
    let ids = flash_head_argmax(h, &case.head, probes).expect("arguments that fit");
    integer_values(ids)[0]
}

fn logits_that_are_all_far_below_zero_have_a_largest() {
    for (name, device) in devices() {
        for scale in [2.0, 1e10, 1e30, 1e38] {
            let logits: Vec<f32> = noise(30, 1).iter().map(|x| scale * (x - 1.5)).collect();
            // 30 rows in 8 clusters: there is padding, whose row is zero.
            let case = with_logits(&logits, 8, &[], device);
            let best = first_largest(&wide(&logits));
            for probes in 1..=8 {
                let id = greedy(&case, 1.0, probes, device);
                assert!((0..30).contains(&id), "{name}, scale {scale}: {id}");
                let result =
                    flash_head_candidates(floats(&[1.0], [1, 1], device), &case.head, probes)
                        .expect("arguments that fit");
                let place = first_largest(&wide(&values(result.logits)));
                let expected = integer_values(result.ids)[place as usize];
                assert_eq!(id, expected, "{name}, scale {scale}, {probes} probes");
            }
            assert_eq!(greedy(&case, 1.0, 8, device), best, "{name}, {scale}");
        }
    }
}

fn logits_below_zero_of_every_dtype_have_a_largest() {
    every_dtype(|what, device, dtype| {
        let sizes = Sizes {
            vocabulary: 21,
            width: 8,
            clusters: 5,
        };
        let data: Vec<f32> = noise(21 * 8, 2).iter().map(|x| x - 2.0).collect();
        let case = Case::new(&data, sizes, dtype, &[], device);
        let h = floats(&[1.0; 3 * 8], [3, 8], device).cast(dtype);
        let ids = flash_head_argmax(h.clone(), &case.head, 5).expect("arguments that fit");
        assert_eq!(integer_values(ids), case.dense(&h), "{what}");
    });
}

fn nothing_wins_where_no_logit_is_a_number_above_negative_infinity() {
    for (name, device) in devices() {
        // With padding, and with a special token.
        for special in [&[][..], &[2]] {
            let case = with_logits(&[f32::NEG_INFINITY; 7], 3, special, device);
            assert_eq!(greedy(&case, 1.0, 3, device), -1, "{name}");
            let nan = with_logits(&[f32::NAN; 7], 3, special, device);
            assert_eq!(greedy(&nan, 1.0, 3, device), -1, "{name}");
        }
    }
}

fn the_lowest_number_wins_over_negative_infinity_and_nan() {
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    for (name, device) in devices() {
        let logits = [-infinity, nan, f32::MIN, -infinity, f32::MIN, nan];
        let case = with_logits(&logits, 2, &[], device);
        assert_eq!(greedy(&case, 1.0, 2, device), 2, "{name}");
    }
}

fn zeros_of_either_sign_are_a_tie() {
    for (name, device) in devices() {
        let case = with_logits(&[-1.0, -0.0, 0.0, -0.0, 0.0, -2.0], 3, &[], device);
        assert_eq!(greedy(&case, 1.0, 3, device), 1, "{name}");
        assert_eq!(greedy(&case, -0.0, 3, device), 0, "{name}");
    }
}

fn nan_never_wins_and_infinity_does() {
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    for (name, device) in devices() {
        for (logits, expected) in [
            ([nan, 1.0, 3.0, nan, 2.0, 3.0], 2),
            ([nan, -nan, nan, nan, -5.0, nan], 4),
            ([nan, nan, nan, -infinity, nan, -infinity], -1),
            ([0.0, infinity, nan, infinity, 5.0, -infinity], 1),
        ] {
            let case = with_logits(&logits, 2, &[], device);
            let id = greedy(&case, 1.0, 2, device);
            assert_eq!(id, expected, "{name}: {logits:?}");
        }
    }
}

fn a_hidden_state_of_nan_has_no_token_and_leaves_the_others_theirs() {
    for (name, device) in devices() {
        let sizes = Sizes {
            vocabulary: 24,
            width: 2,
            clusters: 6,
        };
        let case = Case::new(&noise(48, 3), sizes, FloatDType::F32, &[5], device);
        let h = floats(&[f32::NAN, 0.0, 0.5, 1.0], [2, 2], device);
        for probes in [1, 3, 6] {
            let ids = flash_head_argmax(h.clone(), &case.head, probes);
            let ids = integer_values(ids.expect("arguments that fit"));
            assert_eq!(ids[0], -1, "{name}, {probes} probes");
            let other = h.clone().slice_dim(0, 1..2);
            let alone = flash_head_argmax(other, &case.head, probes);
            let alone = integer_values(alone.expect("arguments that fit"));
            assert_eq!(ids[1..], alone, "{name}: the other hidden state");
        }
    }
}

fn a_nan_among_the_candidates_stays_one() {
    for (name, device) in devices() {
        let case = with_logits(&[f32::NAN, 1.0, 2.0], 2, &[], device);
        let h = floats(&[1.0], [1, 1], device);
        let result = flash_head_candidates(h, &case.head, 2).expect("arguments that fit");
        let place = integer_values(result.ids).iter().position(|id| *id == 0);
        let logits = values(result.logits);
        let nan = logits.iter().position(|logit| logit.is_nan());
        assert_eq!(nan, place, "{name}: {logits:?}");
    }
}

catalogue![
    logits_that_are_all_far_below_zero_have_a_largest,
    logits_below_zero_of_every_dtype_have_a_largest,
    nothing_wins_where_no_logit_is_a_number_above_negative_infinity,
    the_lowest_number_wins_over_negative_infinity_and_nan,
    zeros_of_either_sign_are_a_tie,
    nan_never_wins_and_infinity_does,
    a_hidden_state_of_nan_has_no_token_and_leaves_the_others_theirs,
    a_nan_among_the_candidates_stays_one,
];
