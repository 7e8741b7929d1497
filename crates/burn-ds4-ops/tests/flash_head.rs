//! The clustered head against the dense one and an `f64` oracle, over its shapes and dtypes.

use std::cell::RefCell;

use burn::backend::{Backend, Dispatch};
use burn::tensor::{FloatDType, Tensor};
use burn_ds4_ops::flash_head::{
    FlashHead, FlashHeadOptions, MAX_TOKENS, flash_head_argmax, flash_head_candidates,
    flash_head_logits,
};
use burn_ds4_ops::matmul::{SmallMOptions, small_m_matmul};

use super::common::{
    EXACT, assert_close, compiles_slowly, devices, every_dtype, floats, integer_values, noise,
    planes_vary, read, skip, some, values, wide,
};
use super::heads::{Case, Sizes, first_largest, highest, whole};

/// Sizes of a head. On a device that compiles slowly they are the same in all tests that take any:
/// most shapes make kernels of their own of the operations that a head is made with.
fn any_sizes(name: &str, [vocabulary, width, clusters]: [usize; 3]) -> Sizes {
    if compiles_slowly(name) {
        SIZES
    } else {
        Sizes {
            vocabulary,
            width,
            clusters,
        }
    }
}

/// Clusters of 4 rows, some of which are not full.
const SIZES: Sizes = Sizes {
    vocabulary: 61,
    width: 20,
    clusters: 16,
};

fn ids_of_all_clusters_are_those_of_the_dense_head() {
    every_dtype(|what, device, dtype| {
        let sizes = any_sizes(what, [96, 24, 12]);
        let Sizes {
            vocabulary,
            width,
            clusters,
        } = sizes;
        let case = Case::new(&noise(vocabulary * width, 1), sizes, dtype, &[], device);
        for &tokens in some(what, &[1, 2, 5, 16], 3) {
            let h = floats(&noise(tokens * width, 2), [tokens, width], device).cast(dtype);
            let dense = case.dense(&h);
            let ids = flash_head_argmax(h, &case.head, clusters).expect("arguments that fit");
            assert_eq!(ids.dims(), [tokens], "{what}");
            assert_eq!(integer_values(ids), dense, "{what}, {tokens} tokens");
        }
    });
}

fn equal_logits_of_all_clusters_go_to_the_smallest_id() {
    every_dtype(|what, device, dtype| {
        let sizes = Sizes {
            vocabulary: 64,
            width: 4,
            clusters: 16,
        };
        // Few distinct rows, so that the highest logit has many ids.
        let case = Case::new(&whole(64 * 4, 3), sizes, dtype, &[], device);
        let data = whole(16 * 4, 4);
        let h = floats(&data, [16, 4], device).cast(dtype);
        let expected: Vec<i64> = wide(&data)
            .chunks(4)
            .map(|h| first_largest(&case.logits(h)))
            .collect();
        let ids = flash_head_argmax(h, &case.head, 16).expect("arguments that fit");
        assert_eq!(integer_values(ids), expected, "{what}");
    });
}

fn candidates_are_those_of_the_clusters_with_the_highest_scores() {
    every_dtype(|what, device, dtype| {
        // The first has the sizes of other tests.
        let cases = [
            (61, 16, 15),
            (64, 16, 1),
            (64, 16, 5),
            (50, 7, 3),
            (9, 9, 4),
        ];
        let step = if dtype == FloatDType::F32 { 3 } else { 5 };
        for &(vocabulary, clusters, probes) in some(what, &cases, step) {
            let sizes = Sizes {
                vocabulary,
                width: 20,
                clusters,
            };
            let data = noise(vocabulary * 20, 5);
            let case = Case::new(&data, sizes, dtype, &[3, 8, 1], device);
            let h = floats(&noise(3 * 20, 6), [3, 20], device).cast(dtype);
            let chosen: Vec<Vec<usize>> = wide(&read(&h))
                .chunks(20)
                .map(|h| highest(&case.scores(h), probes))
                .collect();
            let what = format!("{what}, {sizes:?}, {probes} probes");
            let result = flash_head_candidates(h.clone(), &case.head, probes);
            let result = result.expect("arguments that fit");
            let winners: Vec<i64> = values(result.logits.clone())
                .chunks(probes * case.head.capacity() + 3)
                .zip(integer_values(result.ids.clone()).chunks(probes * case.head.capacity() + 3))
                .map(|(logits, ids)| ids[first_largest(&wide(logits)) as usize])
                .collect();
            case.check(result.clone(), &h, &chosen, &what);
            let all = flash_head_logits(h.clone(), &case.head, probes);
            case.check_all(all.expect("arguments that fit"), result, &what);
            let ids = flash_head_argmax(h, &case.head, probes).expect("arguments that fit");
            assert_eq!(integer_values(ids), winners, "{what}");
        }
    });
}

/// Two clusters of two rows along two axes, and one that is not full.
fn by_hand(special_tokens: &[u32], device: &burn::tensor::Device) -> FlashHead {
    #[rustfmt::skip]
    let rows = [
        1.0, 0.0,
        0.0, 1.0,
        3.0, 0.0,
        0.0, 5.0,
        -4.0, -4.0,
    ];
    let centroids = [2.0, 0.0, 0.0, 3.0, -4.0, -4.0];
    FlashHead::new(
        floats(&rows, [5, 2], device),
        &[0, 1, 0, 1, 2],
        floats(&centroids, [3, 2], device),
        FlashHeadOptions {
            special_tokens: special_tokens.to_vec(),
            norms: None,
        },
    )
    .expect("parts that fit")
}

fn a_small_head_has_the_tables_made_by_hand() {
    for (name, device) in devices() {
        let head = by_hand(&[3, 0, 3], device);
        assert_eq!(
            (
                head.vocabulary(),
                head.width(),
                head.clusters(),
                head.capacity()
            ),
            (5, 2, 3, 2),
            "{name}"
        );
        assert_eq!(head.special_tokens(), [0, 3], "{name}");
        assert_eq!(head.assignments(), [0, 1, 0, 1, 2], "{name}");
        assert_eq!(integer_values(head.ids()), [0, 2, 1, 3, 4, -1], "{name}");
        #[rustfmt::skip]
        let weight = [
            1.0, 0.0,
            3.0, 0.0,
            0.0, 1.0,
            0.0, 5.0,
            -4.0, -4.0,
            0.0, 0.0,
        ];
        assert_eq!(values(head.weight()), weight, "{name}");
        let half = 0.5_f32.sqrt();
        let centroids = values(head.centroids());
        for (actual, expected) in centroids.iter().zip([1.0, 0.0, 0.0, 1.0, -half, -half]) {
            assert!((actual - expected).abs() < 1e-6, "{name}: {centroids:?}");
        }
        let norms = values(head.norms());
        for (actual, expected) in norms.iter().zip([2.0, 3.0, 32.0_f32.sqrt()]) {
            assert!((actual - expected).abs() < 1e-5, "{name}: {norms:?}");
        }
    }
}

fn candidates_have_the_table_made_by_hand() {
    let none = f32::NEG_INFINITY;
    for (name, device) in devices() {
        let h = || floats(&[2.0, 1.0, -1.0, -2.0], [2, 2], device);
        let head = by_hand(&[3, 0], device);
        // Scores of the first: 2, 1 and -2.1; of the second: -1, -2 and 2.1.
        let one = flash_head_candidates(h(), &head, 1).expect("arguments that fit");
        assert_eq!(
            integer_values(one.ids),
            [0, 2, -1, 3, 4, -1, 0, 3],
            "{name}"
        );
        assert_eq!(
            values(one.logits),
            [2.0, 6.0, none, 5.0, 12.0, none, -1.0, -10.0],
            "{name}"
        );
        let two = flash_head_candidates(h(), &head, 2).expect("arguments that fit");
        assert_eq!(
            integer_values(two.ids),
            [0, 2, 1, 3, -1, -1, 0, 2, 4, -1, -1, 3],
            "{name}"
        );
        assert_eq!(
            values(two.logits),
            [
                2.0, 6.0, 1.0, 5.0, none, none, -1.0, -3.0, 12.0, none, none, -10.0
            ],
            "{name}"
        );
        let ids = flash_head_argmax(h(), &head, 1).expect("arguments that fit");
        assert_eq!(integer_values(ids), [2, 4], "{name}");
    }
}

fn special_tokens_win_from_outside_of_the_chosen_clusters() {
    for (name, device) in devices() {
        // The score of cluster 0 is 3, of cluster 1 it is 2, but id 3 has the logit 10.
        let h = || floats(&[3.0, 2.0], [1, 2], device);
        let with = |special: &[u32]| {
            let head = by_hand(special, device);
            integer_values(flash_head_argmax(h(), &head, 1).expect("arguments that fit"))
        };
        assert_eq!(with(&[]), [2], "{name}");
        assert_eq!(with(&[3]), [3], "{name}");
        assert_eq!(with(&[1]), [2], "{name}");
        assert_eq!(with(&[0, 2]), [2], "{name}");
    }
}

fn logits_of_the_vocabulary_have_the_table_made_by_hand() {
    let none = f32::NEG_INFINITY;
    for (name, device) in devices() {
        let head = by_hand(&[3, 0], device);
        let logits = |h: &[f32], probes| {
            let logits = flash_head_logits(floats(h, [2, 2], device), &head, probes);
            let logits = logits.expect("arguments that fit");
            assert_eq!(logits.dims(), [2, 5], "{name}");
            values(logits)
        };
        #[rustfmt::skip]
        let expected = [
            2.0, none, 6.0, 5.0, none,
            -1.0, none, none, -10.0, 12.0,
        ];
        assert_eq!(logits(&[2.0, 1.0, -1.0, -2.0], 1), expected, "{name}");
        #[rustfmt::skip]
        let expected = [
            2.0, 1.0, 6.0, 5.0, -12.0,
            0.0, 0.0, 0.0, 0.0, 0.0,
        ];
        assert_eq!(logits(&[2.0, 1.0, 0.0, 0.0], 3), expected, "{name}");
        let spoilt = logits(&[2.0, f32::NAN, 2.0, 1.0], 3);
        assert!(spoilt[..5].iter().all(|logit| logit.is_nan()), "{name}");
        assert_eq!(spoilt[5..], expected[..5], "{name}");
    }
}

fn a_hidden_state_has_the_same_bits_alone() {
    every_dtype(|what, device, dtype| {
        let sizes = any_sizes(what, [200, 48, 25]);
        let Sizes {
            vocabulary,
            width,
            clusters,
        } = sizes;
        let data = noise(vocabulary * width, 16);
        let case = Case::new(&data, sizes, dtype, &[7, 60], device);
        let h = floats(&noise(MAX_TOKENS * width, 17), [MAX_TOKENS, width], device).cast(dtype);
        let run = |first, tokens, probes| {
            let h = h.clone().narrow(0, first, tokens);
            let logits = flash_head_logits(h.clone(), &case.head, probes);
            let ids = flash_head_argmax(h, &case.head, probes);
            let ids = integer_values(ids.expect("arguments that fit"));
            (values(logits.expect("arguments that fit")), ids)
        };
        for probes in [4, clusters] {
            let alone = (0..MAX_TOKENS).map(|token| run(token, 1, probes));
            let (logits, ids): (Vec<_>, Vec<_>) = alone.unzip();
            for &tokens in some(what, &[MAX_TOKENS, 5, 2], 3) {
                let together = run(0, tokens, probes);
                let what = format!("{what}, {tokens} tokens, {probes} probes");
                assert_close(&together.0, &logits[..tokens].concat(), EXACT, &what);
                assert_eq!(together.1, ids[..tokens].concat(), "{what}");
            }
        }
    });
}

fn a_recorded_call_reads_the_hidden_states_of_its_replay() {
    if cfg!(feature = "fusion") {
        eprintln!("skipped: fusion does not promise to write in place");
        return;
    }
    // Flex records nothing.
    for (name, device) in devices().iter().filter(|device| device.0 != "flex") {
        if planes_vary() {
            // Then top-k has no kernel, and its reference uploads.
            skip(name, "planes");
            continue;
        }
        let head = by_hand(&[3, 0], device);
        for probes in [1, 3] {
            let place = RefCell::new(Some(floats(&[2.0, 1.0], [1, 2], device)));
            let run = || {
                let h = place.borrow().clone().expect("it is put back");
                let logits = flash_head_logits(h.clone(), &head, probes);
                let ids = flash_head_argmax(h, &head, probes);
                (
                    logits.expect("arguments that fit"),
                    ids.expect("arguments that fit"),
                )
            };
            let dispatch = device.as_dispatch();
            Dispatch::graph_prepare(dispatch).expect("a device that records");
            // So that there is memory for the recording.
            for _ in 0..2 {
                run();
                Dispatch::sync(dispatch).expect("a device that works");
            }
            Dispatch::graph_start_capture(dispatch).expect("a device that records");
            let (logits, ids) = run();
            let graph = Dispatch::graph_stop_capture(dispatch).expect("nothing is uploaded");
            for data in [[2.0, 1.0], [-1.0, -2.0]] {
                let old = place.borrow_mut().take().expect("it is put back");
                let new = old.slice_assign([0..1, 0..2], floats(&data, [1, 2], device));
                *place.borrow_mut() = Some(new.clone());
                // SAFETY: what the graph reads and writes is alive, and of this thread.
                unsafe { Dispatch::graph_replay(dispatch, &graph) }.expect("it replays");
                let expected = flash_head_logits(new.clone(), &head, probes);
                let expected = values(expected.expect("arguments that fit"));
                assert_eq!(values(logits.clone()), expected, "{name}");
                let best = first_largest(&wide(&expected));
                assert_eq!(integer_values(ids.clone()), [best], "{name}");
            }
        }
    }
}

fn equal_scores_choose_the_lower_cluster() {
    for (name, device) in devices() {
        let rows: Vec<f32> = (1..=8).flat_map(|x| [x as f32, 0.0]).collect();
        let head = FlashHead::new(
            floats(&rows, [8, 2], device),
            &[3, 2, 1, 0, 3, 2, 1, 0],
            floats(&[0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0], [4, 2], device),
            FlashHeadOptions::default(),
        )
        .expect("parts that fit");
        let h = floats(&[1.0, 0.0], [1, 2], device);
        let candidates = flash_head_candidates(h, &head, 2).expect("arguments that fit");
        assert_eq!(integer_values(candidates.ids), [2, 6, 1, 5], "{name}");
    }
}

fn one_cluster_and_clusters_of_one_row_are_the_dense_head() {
    for (name, device) in devices() {
        for clusters in [1, 33] {
            let sizes = Sizes {
                vocabulary: 33,
                width: 7,
                clusters,
            };
            let case = Case::new(&noise(33 * 7, 9), sizes, FloatDType::F32, &[32], device);
            let h = floats(&noise(2 * 7, 10), [2, 7], device);
            let ids = flash_head_argmax(h.clone(), &case.head, clusters);
            let ids = integer_values(ids.expect("arguments that fit"));
            assert_eq!(ids, case.dense(&h), "{name}, {clusters} clusters");
        }
    }
}

fn hidden_states_of_another_dtype_and_layout_are_taken_as_they_are() {
    every_dtype(|what, device, dtype| {
        let sizes = Sizes {
            vocabulary: 40,
            width: 6,
            clusters: 10,
        };
        let case = Case::new(&whole(40 * 6, 11), sizes, dtype, &[], device);
        let data = whole(6 * 4, 12);
        let h: Tensor<2> = floats(&data, [6, 4], device).transpose();
        let expected: Vec<i64> = wide(&values(h.clone()))
            .chunks(6)
            .map(|h| first_largest(&case.logits(h)))
            .collect();
        let ids = flash_head_argmax(h, &case.head, 10).expect("arguments that fit");
        assert_eq!(integer_values(ids), expected, "{what}");
    });
}

fn more_probes_than_a_top_k_has_entries_are_taken() {
    for (name, device) in devices() {
        let sizes = Sizes {
            vocabulary: 4300,
            width: 2,
            clusters: 4300,
        };
        // Half a circle, out of order: the scores are all apart.
        let rows: Vec<f32> = (0..4300)
            .map(|id| std::f64::consts::PI * (f64::from(id * 1009 % 4300) + 0.5) / 4300.0)
            .flat_map(|angle| [angle.cos() as f32, angle.sin() as f32])
            .collect();
        let case = Case::new(&rows, sizes, FloatDType::F32, &[], device);
        let data = [1.0, 0.0];
        let h = floats(&data, [1, 2], device);
        // The last of them are all clusters.
        for &probes in some(name, &[4097, 4096, 4250, 4300], 3) {
            let chosen = highest(&case.scores(&wide(&data)), probes);
            let result = flash_head_candidates(h.clone(), &case.head, probes);
            let what = format!("{name}, {probes} probes");
            case.check(result.expect("arguments that fit"), &h, &[chosen], &what);
        }
    }
}

fn logits_of_all_clusters_have_the_bits_of_the_dense_product() {
    every_dtype(|what, device, dtype| {
        // Several planes share the longest rows, and the last are read element by element.
        let shapes = [(130, 1024, 13), (512, 300, 32), (77, 33, 11)];
        let step = if dtype == FloatDType::F32 { 2 } else { 3 };
        for &(vocabulary, width, clusters) in some(what, &shapes, step) {
            let sizes = Sizes {
                vocabulary,
                width,
                clusters,
            };
            let case = Case::new(&noise(vocabulary * width, 14), sizes, dtype, &[], device);
            let h = floats(&noise(3 * width, 15), [3, width], device).cast(dtype);
            let options = SmallMOptions {
                f32_output: true,
                ..SmallMOptions::default()
            };
            let dense = small_m_matmul(h.clone(), case.lm_head.clone(), options);
            let dense = values(dense.expect("arguments that fit"));
            let all = flash_head_candidates(h, &case.head, clusters).expect("arguments that fit");
            let count = clusters * case.head.capacity();
            let (ids, logits) = (integer_values(all.ids), values(all.logits));
            assert_eq!((ids.len(), logits.len()), (3 * count, 3 * count), "{what}");
            let mut compared = 0;
            for (place, (id, logit)) in ids.into_iter().zip(logits).enumerate() {
                if let Ok(id) = usize::try_from(id) {
                    let expected = dense[place / count * vocabulary + id];
                    assert_eq!(logit, expected, "{what}, {sizes:?}, id {id}");
                    compared += 1;
                }
            }
            assert_eq!(compared, 3 * vocabulary, "{what}, {sizes:?}");
        }
    });
}

catalogue![
    ids_of_all_clusters_are_those_of_the_dense_head,
    equal_logits_of_all_clusters_go_to_the_smallest_id,
    candidates_are_those_of_the_clusters_with_the_highest_scores,
    a_small_head_has_the_tables_made_by_hand,
    candidates_have_the_table_made_by_hand,
    logits_of_the_vocabulary_have_the_table_made_by_hand,
    a_hidden_state_has_the_same_bits_alone,
    a_recorded_call_reads_the_hidden_states_of_its_replay,
    special_tokens_win_from_outside_of_the_chosen_clusters,
    equal_scores_choose_the_lower_cluster,
    one_cluster_and_clusters_of_one_row_are_the_dense_head,
    hidden_states_of_another_dtype_and_layout_are_taken_as_they_are,
    more_probes_than_a_top_k_has_entries_are_taken,
    logits_of_all_clusters_have_the_bits_of_the_dense_product,
];
