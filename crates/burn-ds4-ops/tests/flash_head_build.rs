//! Balanced k-means: balanced, repeatable, and finding clusters that are there.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::flash_head::{
    BuildOptions, BuildProgress, FlashHead, flash_head_argmax, flash_head_candidates,
};

use super::common::{
    compiles_slowly, devices, every_dtype, floats, integer_values, noise, read, some, values, wide,
};
use super::heads::{dot, first_largest, mean};

/// Rows, elements of a row, and clusters. On a device that compiles slowly they are the same in all
/// tests that take any: most shapes make kernels of their own of the operations of a build.
fn any_shape(name: &str, shape: [usize; 3]) -> [usize; 3] {
    if compiles_slowly(name) { SHAPE } else { shape }
}

/// The elements of a row alone.
fn any_width(name: &str, width: usize) -> usize {
    any_shape(name, [0, width, 0])[1]
}

/// Clusters of 4 rows and of 3.
const SHAPE: [usize; 3] = [61, 8, 16];

fn build(lm_head: &Tensor<2>, clusters: usize, options: &BuildOptions) -> FlashHead {
    FlashHead::build(lm_head.clone(), clusters, options, |_| {}).expect("arguments that fit")
}

fn random(vocabulary: usize, width: usize, device: &Device) -> Tensor<2> {
    let data = noise(vocabulary * width, 1);
    floats(&data, [vocabulary, width], device)
}

fn sizes(head: &FlashHead) -> Vec<usize> {
    let mut sizes = vec![0; head.clusters()];
    for &cluster in head.assignments() {
        sizes[cluster as usize] += 1;
    }
    sizes
}

/// Rows around so many directions, in turns.
fn separated(groups: usize, each: usize, width: usize) -> Vec<f32> {
    let jitter = noise(groups * each * width, 2);
    (0..groups * each * width)
        .map(|index| {
            let (row, column) = (index / width, index % width);
            let direction = if column == row % groups { 5.0 } else { 0.0 };
            // Lengths differ, and do not matter.
            (direction + 0.5 * jitter[index]) * (1 + row % 3) as f32
        })
        .collect()
}

fn clusters_have_one_size_or_differ_by_one_row() {
    every_dtype(|what, device, dtype| {
        let sizes_of = [(61, 16), (64, 16), (33, 1), (12, 12), (13, 12), (90, 7)];
        let step = if dtype == FloatDType::F32 { 3 } else { 6 };
        let width = any_width(what, 6);
        for &(vocabulary, clusters) in some(what, &sizes_of, step) {
            let lm_head = random(vocabulary, width, device).cast(dtype);
            let head = build(&lm_head, clusters, &BuildOptions::default());
            let (share, more) = (vocabulary / clusters, vocabulary % clusters);
            let expected: Vec<usize> = (0..clusters)
                .map(|cluster| share + usize::from(cluster < more))
                .collect();
            assert_eq!(sizes(&head), expected, "{what}, {vocabulary} rows");
            assert_eq!(head.capacity(), vocabulary.div_ceil(clusters), "{what}");
            assert_eq!(head.weight().dtype(), dtype.into(), "{what}");
            let mut ids = integer_values(head.ids());
            ids.retain(|id| *id >= 0);
            ids.sort_unstable();
            let all: Vec<i64> = (0..vocabulary as i64).collect();
            assert_eq!(ids, all, "{what}: every id once");
        }
    });
}

fn a_seed_gives_the_same_clusters_and_another_one_does_not() {
    for (name, device) in devices() {
        let [vocabulary, width, clusters] = any_shape(name, [120, 8, 20]);
        let lm_head = random(vocabulary, width, device);
        let with = |seed| {
            let options = BuildOptions {
                seed,
                iterations: 4,
                ..BuildOptions::default()
            };
            let head = build(&lm_head, clusters, &options);
            (head.assignments().to_vec(), values(head.centroids()))
        };
        let first = with(5);
        assert_eq!(first, with(5), "{name}");
        assert_ne!(first.0, with(6).0, "{name}");
    }
}

fn directions_that_are_apart_become_clusters() {
    for (name, device) in devices() {
        let (groups, each, width) = (6, 5, any_width(name, 9));
        let data = separated(groups, each, width);
        let lm_head = floats(&data, [groups * each, width], device);
        for &seed in some(name, &[0, 1, 2, 3], 2) {
            let options = BuildOptions {
                seed,
                ..BuildOptions::default()
            };
            let head = build(&lm_head, groups, &options);
            for (id, &cluster) in head.assignments().iter().enumerate() {
                let of_group = head.assignments()[id % groups];
                assert_eq!(cluster, of_group, "{name}, seed {seed}, id {id}");
            }
        }
    }
}

fn centroids_are_those_of_the_rows_that_are_in_the_clusters() {
    for (name, device) in devices() {
        let [vocabulary, width, clusters] = any_shape(name, [50, 7, 8]);
        let lm_head = random(vocabulary, width, device);
        let head = build(&lm_head, clusters, &BuildOptions::default());
        let rows = wide(&read(&lm_head));
        let rows: Vec<Vec<f64>> = rows.chunks(width).map(<[_]>::to_vec).collect();
        let (centroids, norms) = (wide(&values(head.centroids())), wide(&values(head.norms())));
        let lengths = (centroids.len(), norms.len());
        assert_eq!(lengths, (clusters * width, clusters), "{name}");
        for (cluster, (centroid, norm)) in centroids.chunks(width).zip(norms).enumerate() {
            for (actual, expected) in centroid
                .iter()
                .zip(mean(&rows, head.assignments(), cluster))
            {
                assert!((actual * norm - expected).abs() < 1e-6, "{name}");
            }
        }
    }
}

fn progress_tells_of_every_iteration_until_nothing_moves() {
    for (name, device) in devices() {
        let width = any_width(name, 5);
        let lm_head = floats(&separated(4, 6, width), [24, width], device);
        let mut seen: Vec<BuildProgress> = Vec::new();
        let options = BuildOptions {
            iterations: 50,
            ..BuildOptions::default()
        };
        let head = FlashHead::build(lm_head.clone(), 4, &options, |step| seen.push(step));
        let head = head.expect("arguments that fit");
        let last = seen.last().expect("an iteration");
        assert!(seen.len() < 50 && last.moved == 0, "{name}: {seen:?}");
        assert_eq!(seen[0].moved, 24, "{name}");
        assert!(seen.iter().map(|step| step.iteration).eq(1..=seen.len()));
        // What the last one says, from the clusters.
        let unit = |row: &[f64]| {
            let length = dot(row, row).sqrt();
            row.iter().map(|x| x / length).collect::<Vec<_>>()
        };
        let rows: Vec<Vec<f64>> = wide(&read(&lm_head)).chunks(width).map(unit).collect();
        let centroids: Vec<Vec<f64>> = (0..4)
            .map(|cluster| unit(&mean(&rows, head.assignments(), cluster)))
            .collect();
        let own = head.assignments().iter().map(|&c| &centroids[c as usize]);
        let sum: f64 = rows.iter().zip(own).map(|(row, c)| dot(row, c)).sum();
        assert!(
            (last.similarity - sum / 24.0).abs() < 1e-5,
            "{name}: {last:?}"
        );

        let mut count = 0;
        let options = BuildOptions {
            iterations: 1,
            ..BuildOptions::default()
        };
        FlashHead::build(lm_head, 4, &options, |_| count += 1).expect("arguments that fit");
        assert_eq!(count, 1, "{name}");
    }
}

fn similarity_grows_with_the_iterations() {
    for (name, device) in devices() {
        let [vocabulary, width, clusters] = any_shape(name, [240, 6, 30]);
        let lm_head = random(vocabulary, width, device);
        let mut seen = Vec::new();
        FlashHead::build(lm_head, clusters, &BuildOptions::default(), |step| {
            seen.push(step.similarity);
        })
        .expect("arguments that fit");
        let (first, last) = (seen[0], seen[seen.len() - 1]);
        assert!(last > first + 0.02, "{name}: {seen:?}");
    }
}

fn few_proposals_place_every_row() {
    for (name, device) in devices() {
        let [vocabulary, width, clusters] = any_shape(name, [61, 5, 16]);
        for proposals in [1, 2, 4096] {
            let options = BuildOptions {
                proposals,
                iterations: 3,
                ..BuildOptions::default()
            };
            let head = build(&random(vocabulary, width, device), clusters, &options);
            let few = sizes(&head).iter().filter(|size| **size == 3).count();
            assert_eq!(few, 3, "{name}, {proposals} proposals");
        }
    }
}

fn rows_that_are_alike_or_zero_give_numbers() {
    for (name, device) in devices() {
        // Alike, zero, and each the opposite of another, so that their mean is zero.
        let alike = [[1.0_f32, 2.0]; 40].concat();
        let zero = vec![0.0; 80];
        let opposite = [[1.0_f32, 0.5], [-1.0, -0.5]].concat().repeat(20);
        let tiny: Vec<f32> = noise(80, 3).iter().map(|x| x * 1e-30).collect();
        let huge: Vec<f32> = noise(80, 3).iter().map(|x| x * 1e30).collect();
        for (what, data) in [
            ("alike", alike),
            ("zero", zero),
            ("opposite", opposite),
            ("tiny", tiny),
            ("huge", huge),
        ] {
            for &clusters in some(name, &[9, 1, 40], 3) {
                let lm_head = floats(&data, [40, 2], device);
                let options = BuildOptions {
                    proposals: 2,
                    ..BuildOptions::default()
                };
                let mut seen = Vec::new();
                let head = FlashHead::build(lm_head, clusters, &options, |s| seen.push(s));
                let head = head.expect("arguments that fit");
                let what = format!("{name}, {what}, {clusters} clusters");
                assert!(seen.iter().all(|s| s.similarity.is_finite()), "{what}");
                assert!(sizes(&head).iter().all(|size| *size > 0), "{what}");
                for tensor in [values(head.centroids()), values(head.norms())] {
                    assert!(tensor.iter().all(|x| x.is_finite()), "{what}");
                }
                let h = floats(&[1.0, -1.0], [1, 2], device);
                let id = flash_head_argmax(h, &head, 1).expect("arguments that fit");
                assert!((0..40).contains(&integer_values(id)[0]), "{what}");
            }
        }
    }
}

fn few_probes_find_most_of_the_greedy_tokens() {
    for (name, device) in devices() {
        let (groups, each, width) = (16, 8, 24);
        let data = separated(groups, each, width);
        let lm_head = floats(&data, [groups * each, width], device);
        let options = BuildOptions {
            special_tokens: vec![7],
            ..BuildOptions::default()
        };
        let head = build(&lm_head, groups, &options);
        assert_eq!(head.special_tokens(), [7], "{name}");
        let h = floats(&noise(16 * width, 4), [16, width], device);
        let ids = flash_head_argmax(h.clone(), &head, 4).expect("arguments that fit");
        let rows: Vec<Vec<f64>> = wide(&data).chunks(width).map(<[_]>::to_vec).collect();
        let hits = wide(&values(h.clone()))
            .chunks(width)
            .zip(integer_values(ids))
            .filter(|(h, id)| {
                let logits: Vec<f64> = rows.iter().map(|row| dot(row, h)).collect();
                first_largest(&logits) == *id
            })
            .count();
        assert!(hits >= 14, "{name}: {hits} of 16");
        let candidates = flash_head_candidates(h, &head, 4).expect("arguments that fit");
        assert_eq!(candidates.ids.dims(), [16, 4 * 8 + 1], "{name}");
    }
}

fn a_head_in_another_layout_is_built_from_its_values() {
    for (name, device) in devices() {
        let [vocabulary, width, clusters] = any_shape(name, [30, 6, 5]);
        let lm_head = random(vocabulary, width, device);
        let turned = values(lm_head.clone().transpose());
        let turned: Tensor<2> = floats(&turned, [width, vocabulary], device).transpose();
        let options = BuildOptions::default();
        let (a, b) = (
            build(&lm_head, clusters, &options),
            build(&turned, clusters, &options),
        );
        assert_eq!(a.assignments(), b.assignments(), "{name}");
        assert_eq!(
            read(&a.weight().cast(FloatDType::F32)),
            values(b.weight()),
            "{name}"
        );
    }
}

catalogue![
    clusters_have_one_size_or_differ_by_one_row,
    a_seed_gives_the_same_clusters_and_another_one_does_not,
    directions_that_are_apart_become_clusters,
    centroids_are_those_of_the_rows_that_are_in_the_clusters,
    progress_tells_of_every_iteration_until_nothing_moves,
    similarity_grows_with_the_iterations,
    few_proposals_place_every_row,
    rows_that_are_alike_or_zero_give_numbers,
    few_probes_find_most_of_the_greedy_tokens,
    a_head_in_another_layout_is_built_from_its_values,
];
