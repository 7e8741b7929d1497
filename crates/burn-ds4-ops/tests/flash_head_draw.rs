//! Clusters that are drawn: without replacement, as often as their probability says, and from the
//! noise alone.

use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::flash_head::{
    FlashHead, FlashHeadCandidates, FlashHeadOptions, flash_head_candidates, flash_head_draw,
};

use super::common::{
    compiles_slowly, devices, every_dtype, floats, integer_values, noise, read, wide,
};
use super::heads::{Case, Sizes, dot, highest, mean};

/// Uniform in 0..1.
fn uniform(count: usize, seed: u32) -> Vec<f32> {
    noise(count, seed).iter().map(|x| (x + 1.0) / 2.0).collect()
}

fn drawn_clusters_are_those_of_the_oracle() {
    every_dtype(|what, device, dtype| {
        for (row, (probes, temperature)) in [(1, 1.0), (4, 0.3), (7, 2.5), (16, 1.0)]
            .into_iter()
            .enumerate()
        {
            let sizes = Sizes {
                vocabulary: 62,
                width: 10,
                clusters: 16,
            };
            let case = Case::new(&noise(62 * 10, 1), sizes, dtype, &[61, 4], device);
            let tokens = [1, 3, 16, 2][row];
            let h = floats(&noise(tokens * 10, 2), [tokens, 10], device).cast(dtype);
            let numbers = uniform(tokens * 16, 3);
            let noise = floats(&numbers, [tokens, 16], device);
            let norms = wide(&read(&case.head.norms()));
            let chosen: Vec<Vec<usize>> = wide(&read(&h))
                .chunks(10)
                .zip(wide(&numbers).chunks(16))
                .map(|(h, u)| {
                    let scores = case.scores(h).into_iter().zip(&norms).zip(u);
                    let scores: Vec<f64> = scores
                        .map(|((score, norm), u)| score * norm / temperature - (-u.ln()).ln())
                        .collect();
                    highest(&scores, probes)
                })
                .collect();
            let result = flash_head_draw(h.clone(), &case.head, probes, temperature, noise);
            let what = format!("{what}, {probes} probes");
            case.check(result.expect("arguments that fit"), &h, &chosen, &what);
        }
    });
}

fn centroids_times_norms_are_the_means_of_the_rows() {
    for (name, device) in devices() {
        let sizes = Sizes {
            vocabulary: 20,
            width: 5,
            clusters: 4,
        };
        let case = Case::new(&noise(100, 4), sizes, FloatDType::F32, &[], device);
        let (centroids, norms) = (
            wide(&read(&case.head.centroids())),
            wide(&read(&case.head.norms())),
        );
        assert_eq!((centroids.len(), norms.len()), (4 * 5, 4), "{name}");
        for (cluster, (centroid, norm)) in centroids.chunks(5).zip(norms).enumerate() {
            let length = dot(centroid, centroid).sqrt();
            assert!((length - 1.0).abs() < 1e-6, "{name}: length {length}");
            let mean = mean(&case.rows, &case.assignments, cluster);
            for (actual, expected) in centroid.iter().zip(mean) {
                assert!((actual * norm - expected).abs() < 1e-6, "{name}");
            }
        }
    }
}

/// Three clusters of one row, whose probabilities at temperature 1 are 1/2, 1/3 and 1/6 for a
/// hidden state of 1.
fn three(device: &Device) -> FlashHead {
    let rows: Vec<f32> = [3.0_f32, 2.0, 1.0].iter().map(|w| w.ln()).collect();
    let rows = floats(&rows, [3, 1], device);
    FlashHead::new(rows.clone(), &[0, 1, 2], rows, FlashHeadOptions::default())
        .expect("parts that fit")
}

fn pairs(result: FlashHeadCandidates) -> Vec<[i64; 2]> {
    let ids = integer_values(result.ids);
    ids.chunks(2).map(|pair| [pair[0], pair[1]]).collect()
}

fn clusters_are_drawn_without_replacement_and_as_often_as_they_should() {
    for (name, device) in devices() {
        let head = three(device);
        let h = floats(&[1.0; 16], [16, 1], device);
        let (mut alone, mut left_out) = ([0.0; 3], [0.0; 3]);
        // So many small launches take a software driver long, too. The noise is always the same.
        let rounds = if compiles_slowly(name) { 40 } else { 250 };
        for round in 0..rounds {
            let noise = floats(&uniform(16 * 3, 100 + round), [16, 3], device);
            let one = flash_head_draw(h.clone(), &head, 1, 1.0, noise.clone());
            for id in integer_values(one.expect("arguments that fit").ids) {
                alone[id as usize] += 1.0;
            }
            let two = flash_head_draw(h.clone(), &head, 2, 1.0, noise);
            for [a, b] in pairs(two.expect("arguments that fit")) {
                assert!(a < b, "{name}: {a} and {b}");
                left_out[(3 - a - b) as usize] += 1.0;
            }
        }
        let draws = f64::from(16 * rounds);
        // Left out of two draws without replacement: 1/4 + 3/20, and so on.
        let expected = [
            1.0 / 3.0 * 1.0 / 4.0 + 1.0 / 6.0 * 2.0 / 5.0,
            1.0 / 2.0 * 1.0 / 3.0 + 1.0 / 6.0 * 3.0 / 5.0,
            1.0 / 2.0 * 2.0 / 3.0 + 1.0 / 3.0 * 3.0 / 4.0,
        ];
        for cluster in 0..3 {
            let share = alone[cluster] / draws;
            let wanted = [1.0 / 2.0, 1.0 / 3.0, 1.0 / 6.0][cluster];
            assert!((share - wanted).abs() < 0.03, "{name}: {share}, {wanted}");
            let share = left_out[cluster] / draws;
            let wanted: f64 = expected[cluster];
            assert!((share - wanted).abs() < 0.03, "{name}: {share}, {wanted}");
        }
    }
}

fn a_low_temperature_draws_the_clusters_with_the_highest_products() {
    for (name, device) in devices() {
        let head = three(device);
        let h = floats(&[1.0; 16], [16, 1], device);
        let noise = floats(&uniform(16 * 3, 5), [16, 3], device);
        for temperature in [1e-3, 2e-38] {
            let result = flash_head_draw(h.clone(), &head, 2, temperature, noise.clone());
            let result = pairs(result.expect("arguments that fit"));
            assert_eq!(result, [[0, 1]; 16], "{name}, {temperature}");
        }
    }
}

fn noise_at_the_ends_of_its_range_is_a_number() {
    let below_one = 1.0 - f32::EPSILON / 2.0;
    for (name, device) in devices() {
        let head = three(device);
        let h = floats(&[1.0; 4], [4, 1], device);
        // The highest noise wins, the lowest loses; what is out of range is at its end.
        let numbers = [
            [0.0, 0.5, below_one],
            [-1.0, below_one, 0.5],
            [2.0, 0.5, 0.0],
            [0.0, 0.0, 0.0],
        ];
        let noise = floats(numbers.as_flattened(), [4, 3], device);
        let two = flash_head_draw(h.clone(), &head, 2, 1.0, noise.clone());
        let two = pairs(two.expect("arguments that fit"));
        assert_eq!(two, [[1, 2], [1, 2], [0, 1], [0, 1]], "{name}");
        let one = flash_head_draw(h, &head, 1, 1.0, noise).expect("arguments that fit");
        assert_eq!(integer_values(one.ids), [2, 1, 0, 0], "{name}");
    }
}

fn noise_next_to_one_keeps_its_order() {
    for (name, device) in devices() {
        // Rows of zeros: the noise alone decides.
        let rows = floats(&[0.0; 4], [4, 1], device);
        let options = FlashHeadOptions::default();
        let head = FlashHead::new(rows.clone(), &[0, 1, 2, 3], rows, options);
        let head = head.expect("parts that fit");
        let numbers = [3.0, 1.0, 2.0, 4.0].map(|x| 1.0 - x * f32::EPSILON / 2.0);
        for (probes, expected) in [(1, vec![1]), (2, vec![1, 2]), (3, vec![0, 1, 2])] {
            let h = floats(&[1.0], [1, 1], device);
            let noise = floats(&numbers, [1, 4], device);
            let drawn = flash_head_draw(h, &head, probes, 1.0, noise);
            let ids = integer_values(drawn.expect("arguments that fit").ids);
            assert_eq!(ids, expected, "{name}");
        }
    }
}

fn all_clusters_are_drawn_whatever_the_noise() {
    for (name, device) in devices() {
        let head = three(device);
        let h = floats(&[1.0], [1, 1], device);
        let noise = floats(&[f32::NAN, 0.5, 0.2], [1, 3], device);
        let drawn = flash_head_draw(h.clone(), &head, 3, 1.0, noise).expect("arguments that fit");
        let all = flash_head_candidates(h, &head, 3).expect("arguments that fit");
        assert_eq!(integer_values(drawn.ids), integer_values(all.ids), "{name}");
    }
}

catalogue![
    drawn_clusters_are_those_of_the_oracle,
    centroids_times_norms_are_the_means_of_the_rows,
    clusters_are_drawn_without_replacement_and_as_often_as_they_should,
    a_low_temperature_draws_the_clusters_with_the_highest_products,
    noise_at_the_ends_of_its_range_is_a_number,
    noise_next_to_one_keeps_its_order,
    all_clusters_are_drawn_whatever_the_noise,
];
