//! Pooling and indexer scores against `f64` oracles and cases worked out by hand.

use super::common::{
    EXACT, absolute, assert_close, devices, every_dtype, floats, integers, narrow, noise, some,
    some_of_half, values,
};
use super::rotation::table;
use burn::tensor::{DType, FloatDType, IntDType, Tensor};
use burn_ds4_ops::attention::{
    MASKED, Positions, VisibleBlocks, index_scores, pool, rotate, rotate_at,
};

const FITS: &str = "arguments that fit";
/// Of scores.
const SCALE: f64 = 0.3;

fn pooling_weighs_the_slots_of_every_channel_apart() {
    let ln3 = 3f32.ln();
    for (name, device) in devices() {
        // Channel 0 weighs its slots 3/4 and 1/4, channel 1 equally.
        let values_of = floats(&[1.0, 10.0, 5.0, 30.0], [1, 1, 2, 2], device);
        let scores = floats(&[ln3, 500.0, 0.0, 500.0], [1, 1, 2, 2], device);
        let actual = values(pool(values_of, scores).expect(FITS));
        assert_close(&actual, &[2.0, 20.0], absolute(1e-5), name);
    }
}

fn masked_slots_add_nothing_to_a_pooled_block() {
    let (blocks, slots, width) = (3, 4, 5);
    let values_of: Vec<f32> = noise(blocks * slots * width, 2);
    let mut scores: Vec<f32> = noise(blocks * slots * width, 3);
    // The first two slots of the first block, as where there is no block before it.
    scores[..2 * width].fill(MASKED);
    let mut expected = vec![0.0; blocks * width];
    for block in 0..blocks {
        for channel in 0..width {
            let at = |slot: usize| (block * slots + slot) * width + channel;
            let seen = (if block == 0 { 2 } else { 0 })..slots;
            let weight = |slot: usize| f64::from(scores[at(slot)]).exp();
            let sum: f64 = seen.clone().map(weight).sum();
            expected[block * width + channel] = seen
                .map(|slot| weight(slot) / sum * f64::from(values_of[at(slot)]))
                .sum();
        }
    }
    for (name, device) in devices() {
        let run = |values_of: &[f32]| {
            let shape = [1, blocks, slots, width];
            let (values_of, scores) = (
                floats(values_of, shape, device),
                floats(&scores, shape, device),
            );
            values(pool(values_of, scores).expect(FITS))
        };
        let actual = run(&values_of);
        assert_close(&actual, &narrow(&expected), absolute(1e-6), name);
        let mut other = values_of.clone();
        other[..2 * width].fill(1e30);
        assert_close(
            &run(&other),
            &actual,
            EXACT,
            &format!("{name}, masked values"),
        );
    }
}

fn index_scores_cut_each_head_at_zero_before_its_weight() {
    for (name, device) in devices() {
        // Head 0 sees the keys as 2 and -2, head 1 as -3 and 5; weights 10 and -1.
        let queries = floats(&[2.0, 0.0, 0.0, 1.0], [1, 1, 2, 2], device);
        let keys = floats(&[1.0, -3.0, -1.0, 5.0], [1, 2, 2], device);
        let weights = floats(&[10.0, -1.0], [1, 1, 2], device);
        let actual = values(index_scores(queries, keys, weights, 1.0, None, None).expect(FITS));
        assert_close(&actual, &[20.0, -5.0], absolute(1e-5), name);
    }
}

/// Scores in `f64`: `[batch, count, rows]`.
fn scores(
    (queries, keys, weights): (&[f32], &[f32], &[f32]),
    [batch, count, heads, width]: [usize; 4],
) -> Vec<f64> {
    let rows = keys.len() / (batch * width);
    let mut expected = Vec::new();
    for query in 0..batch * count {
        for row in 0..rows {
            let key = (query / count * rows + row) * width;
            let score = |head: usize| {
                let from = (query * heads + head) * width;
                let dot: f64 = (0..width)
                    .map(|c| f64::from(queries[from + c]) * f64::from(keys[key + c]))
                    .sum();
                f64::from(weights[query * heads + head]) * dot.max(0.0)
            };
            expected.push((0..heads).map(score).sum());
        }
    }
    expected
}

fn index_scores_agree_with_the_oracle_for_every_dtype_and_width() {
    // One row, fewer rows than a cube has, and more; widths of whole vectors, odd, and beyond the
    // kernel's; few queries and many.
    let sizes = [
        (5, 3, 32, 65),
        (1, 1, 1, 1),
        (20, 2, 16, 70),
        (2, 2, 300, 9),
        (3, 4, 5, 6),
    ];
    let batch = 2;
    every_dtype(|name, device, dtype| {
        for &(count, heads, width, rows) in some_of_half(name, dtype, &sizes, 3) {
            let shape = [batch, count, heads, width];
            let rounded =
                |values: Vec<f32>, shape: [usize; 3]| floats(&values, shape, device).cast(dtype);
            let queries = rounded(
                noise(shape.iter().product(), 4),
                [batch, count * heads, width],
            );
            let keys = rounded(noise(batch * rows * width, 5), [batch, rows, width]);
            let weights = noise(batch * count * heads, 6);
            let read = |tensor: &Tensor<3>| values(tensor.clone().cast(FloatDType::F32));
            let scores = scores((&read(&queries), &read(&keys), &weights), shape);
            let expected: Vec<f64> = scores.iter().map(|score| score * SCALE).collect();
            let actual = index_scores(
                queries.reshape(shape),
                keys,
                floats(&weights, [batch, count, heads], device),
                SCALE,
                None,
                None,
            )
            .expect(FITS);
            assert_eq!(actual.dtype(), DType::F32);
            let what = format!("{name} {count} x {heads} x {width}, {rows} rows");
            assert_close(&values(actual), &narrow(&expected), absolute(2e-5), &what);
        }
    });
}

fn index_scores_of_a_query_have_the_same_bits_alone() {
    let (heads, width, rows) = (4, 32, 70);
    for (name, device) in devices() {
        for count in [1, 2, 3, 4, 5, 16] {
            let queries = floats(
                &noise(count * heads * width, 7),
                [1, count, heads, width],
                device,
            );
            let keys = floats(&noise(rows * width, 8), [1, rows, width], device);
            let weights = floats(&noise(count * heads, 9), [1, count, heads], device);
            let all = index_scores(
                queries.clone(),
                keys.clone(),
                weights.clone(),
                1.0,
                None,
                None,
            )
            .expect(FITS);
            for (query, together) in values(all).chunks(rows).enumerate() {
                let one = queries.clone().narrow(1, query, 1);
                let weights = weights.clone().narrow(1, query, 1);
                let alone =
                    values(index_scores(one, keys.clone(), weights, 1.0, None, None).expect(FITS));
                let what = format!("{name}, query {query} of {count}");
                assert_close(together, &alone, EXACT, &what);
            }
        }
    }
}

fn index_scores_have_the_same_bits_in_any_capacity_and_beside_any_sequences() {
    let (count, heads, width, needed) = (16, 4, 32, 8);
    for (name, device) in devices() {
        // Of the first sequence, which needs so many rows.
        let scores = |others: &[i64], first: usize, count: usize, capacity: usize| {
            let starts = [&[first as i64], others].concat();
            let batch = starts.len();
            let of = |data: &[f32], shape: [usize; 3]| floats(data, shape, device);
            let part = |seed, width| {
                let all = noise(batch * 16 * width, seed);
                of(&all, [batch, 16, width]).narrow(1, first, count)
            };
            let keys = of(&noise(batch * needed * width, 8), [batch, needed, width]);
            let beyond = Tensor::ones([batch, capacity - needed, width], (device, keys.dtype()));
            let seen = VisibleBlocks {
                start: integers(&starts, [batch], device),
                ratio: 2,
            };
            let scores = index_scores(
                part(7, heads * width).reshape([batch, count, heads, width]),
                Tensor::cat(vec![keys, beyond], 1),
                part(9, heads),
                SCALE,
                Some(seen),
                None,
            );
            let scores = scores.expect(FITS).narrow(0, 0, 1).narrow(2, 0, needed);
            values(scores)
        };
        let alone = (0..count).map(|query| scores(&[], query, 1, needed));
        let alone: Vec<f32> = alone.collect::<Vec<_>>().concat();
        for &capacity in some(name, &[64, needed, 1000], 2) {
            for others in [&[][..], &[28], &[3, -1, 17]] {
                for &count in some(name, &[1, 2, 5, count], 3) {
                    let actual = scores(others, 0, count, capacity);
                    let what = format!("{name} {capacity} {others:?} {count}");
                    assert_close(&actual, &alone[..count * needed], EXACT, &what);
                }
            }
        }
    }
}

fn rows_that_are_not_visible_have_the_mask_as_a_score_whatever_they_hold() {
    let (count, heads, width, rows, ratio) = (3, 2, 8, 200, 2);
    // Nothing, a row of the first cube, all of it, rows of a later one, everything, and a sequence
    // that is not there.
    let starts = [0, 2, 127, 150, 900, -5];
    let batch = starts.len();
    for (name, device) in devices() {
        let data = noise(batch * count * heads * width, 1);
        let queries = floats(&data, [batch, count, heads, width], device);
        let mut keys = noise(batch * rows * width, 2);
        let weights = floats(
            &noise(batch * count * heads, 3),
            [batch, count, heads],
            device,
        );
        let of_keys = |keys: &[f32]| floats(keys, [batch, rows, width], device);
        let all = index_scores(
            queries.clone(),
            of_keys(&keys),
            weights.clone(),
            SCALE,
            None,
            None,
        );
        let all = values(all.expect(FITS));
        let visible = |sequence: usize, query: usize| match usize::try_from(starts[sequence]) {
            Ok(start) => ((start + query + 1) / ratio).min(rows),
            Err(_) => 0,
        };
        for (sequence, keys) in keys.chunks_mut(rows * width).enumerate() {
            keys[visible(sequence, count - 1) * width..].fill(f32::NAN);
        }
        let seen = VisibleBlocks {
            start: integers(&starts, [batch], device),
            ratio,
        };
        let actual = index_scores(queries, of_keys(&keys), weights, SCALE, Some(seen), None);
        let actual = values(actual.expect(FITS));
        for (at, (actual, all)) in actual.iter().zip(&all).enumerate() {
            let (row, query) = (at % rows, at / rows % count);
            let sequence = at / rows / count;
            let what = format!("{name}: {sequence} {query} {row}");
            if row < visible(sequence, query) {
                assert_close(&[*actual], &[*all], absolute(1e-6), &what);
            } else {
                assert_eq!(*actual, MASKED, "{what}");
            }
        }
    }
}

fn queries_are_rotated_as_by_an_operator_of_its_own() {
    // Rows, heads, channels and how many of them turn: all channels, none but the last, with
    // vectors that have both kinds and none, and an indexer's.
    let sizes = [
        (65, 4, 128, 64),
        (1, 9, 32, 32),
        (20, 3, 64, 8),
        (40, 2, 64, 6),
        (9, 3, 10, 4),
        (9, 3, 10, 0),
        (70, 64, 128, 64),
    ];
    let starts = [5, 700, -1];
    let batch = starts.len();
    every_dtype(|name, device, dtype| {
        // Few queries, and more of them than are rotated by all cubes.
        for &count in some(name, &[1, 5, 200], 2) {
            for &(rows, heads, width, rotated) in some_of_half(name, dtype, &sizes, 3) {
                let of = |seed, shape: [usize; 3]| {
                    let count = shape.iter().product();
                    floats(&noise(count, seed), shape, device)
                };
                let queries = of(1, [batch * count, heads, width]).cast(dtype);
                let queries = queries.reshape([batch, count, heads, width]);
                let keys = of(2, [batch, rows, width]).cast(dtype);
                let weights = of(3, [batch, count, heads]);
                let angles = table(1000, rotated, device);
                let start = integers(&starts, [batch], device);
                let turned = rotate_at(queries.clone(), angles.clone(), start.clone(), false);
                for (start, seen) in [
                    (start.clone(), None),
                    (start.clone(), Some(start.clone())),
                    (start.clone().cast(IntDType::I64), Some(start)),
                ] {
                    let visible = seen.map(|start| VisibleBlocks { start, ratio: 4 });
                    let score = |queries, rotation| {
                        let (keys, weights) = (keys.clone(), weights.clone());
                        let visible = visible.clone();
                        let scores = index_scores(queries, keys, weights, SCALE, visible, rotation);
                        values(scores.expect(FITS))
                    };
                    let positions = Positions {
                        angles: angles.clone(),
                        start,
                    };
                    let actual = score(queries.clone(), Some(positions));
                    let expected = score(turned.clone().expect(FITS), None);
                    let what = format!("{name} {count} {rows} {heads} {width} {rotated}");
                    assert_close(&actual, &expected, EXACT, &what);
                }
            }
        }
    });
}

fn a_nan_reaches_the_scores_of_its_query_or_key_only() {
    let (count, heads, width, rows) = (3, 2, 8, 5);
    for (name, device) in devices() {
        let run = |queries: &[f32], keys: &[f32]| {
            let scores = index_scores(
                floats(queries, [1, count, heads, width], device),
                floats(keys, [1, rows, width], device),
                Tensor::ones([1, count, heads], (device, DType::F32)),
                1.0,
                None,
                None,
            );
            values(scores.expect(FITS))
        };
        let (mut queries, mut keys) = (noise(count * heads * width, 1), noise(rows * width, 2));
        let expected = run(&queries, &keys);
        queries[heads * width + 3] = f32::NAN;
        keys[2 * width + 1] = f32::NAN;
        for (at, (actual, expected)) in run(&queries, &keys).iter().zip(&expected).enumerate() {
            let (query, row) = (at / rows, at % rows);
            if query != 1 && row != 2 {
                assert_eq!(actual, expected, "{name}: query {query}, row {row}");
            }
        }
    }
}

fn pooling_agrees_with_the_oracle_whatever_the_layout() {
    let (batch, blocks, slots, width) = (2, 3, 5, 70);
    for (name, device) in devices() {
        // Every other channel of a wider tensor, and slots before blocks.
        let shape = [batch, slots, blocks, 2 * width];
        let view = |values: &[f32]| {
            floats(values, shape, device)
                .swap_dims(1, 2)
                .reshape([batch, blocks, slots, width, 2])
                .narrow(4, 1, 1)
                .squeeze_dim::<4>(4)
        };
        let count = shape.iter().product();
        let (values_of, scores) = (noise(count, 12), noise(count, 13));
        let at = |i: usize, slot: usize| {
            let (sequence, block, channel) = (i / width / blocks, i / width % blocks, i % width);
            ((sequence * slots + slot) * blocks + block) * 2 * width + 2 * channel + 1
        };
        let expected: Vec<f64> = (0..batch * blocks * width)
            .map(|i| {
                let weight = |slot| f64::from(scores[at(i, slot)]).exp();
                let sum: f64 = (0..slots).map(weight).sum();
                (0..slots)
                    .map(|slot| weight(slot) / sum * f64::from(values_of[at(i, slot)]))
                    .sum()
            })
            .collect();
        let actual = values(pool(view(&values_of), view(&scores)).expect(FITS));
        assert_close(&actual, &narrow(&expected), absolute(2e-6), name);
    }
}

fn a_block_has_the_same_bits_alone() {
    let (slots, width) = (8, 37);
    for (name, device) in devices() {
        for &blocks in some(name, &[5, 1, 2, 40], 4) {
            let shape = [1, blocks, slots, width];
            let count = shape.iter().product();
            let values_of = floats(&noise(count, 14), shape, device);
            let scores = floats(&noise(count, 15), shape, device);
            let all = values(pool(values_of.clone(), scores.clone()).expect(FITS));
            for (block, together) in all.chunks(width).enumerate() {
                let one = |tensor: &Tensor<4>| tensor.clone().narrow(1, block, 1);
                let alone = values(pool(one(&values_of), one(&scores)).expect(FITS));
                let what = format!("{name}, block {block} of {blocks}");
                assert_close(together, &alone, EXACT, &what);
            }
        }
    }
}

fn nothing_gives_nothing() {
    for (name, device) in devices() {
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, (device, DType::F32));
        let keys = |shape: [usize; 3]| Tensor::<3>::zeros(shape, (device, DType::F32));
        let pooled = pool(zeros([1, 2, 0, 3]), zeros([1, 2, 0, 3])).expect(FITS);
        assert_eq!(values(pooled), [0.0; 6], "{name}");
        let pooled = pool(zeros([1, 0, 4, 3]), zeros([1, 0, 4, 3])).expect(FITS);
        assert_eq!(pooled.dims(), [1, 0, 3], "{name}");
        let scores = index_scores(
            zeros([1, 2, 0, 4]),
            keys([1, 3, 4]),
            keys([1, 2, 0]),
            1.0,
            None,
            None,
        );
        assert_eq!(values(scores.expect(FITS)), [0.0; 6], "{name}");
        let scores = index_scores(
            zeros([1, 2, 3, 4]),
            keys([1, 0, 4]),
            keys([1, 2, 3]),
            1.0,
            None,
            None,
        );
        assert_eq!(scores.expect(FITS).dims(), [1, 2, 0], "{name}");
        let turned = rotate(zeros([1, 2, 0, 4]), keys([1, 2, 2]), keys([1, 2, 2]));
        assert_eq!(turned.expect(FITS).dims(), [1, 2, 0, 4], "{name}");
    }
}

catalogue![
    pooling_weighs_the_slots_of_every_channel_apart,
    masked_slots_add_nothing_to_a_pooled_block,
    pooling_agrees_with_the_oracle_whatever_the_layout,
    a_block_has_the_same_bits_alone,
    index_scores_cut_each_head_at_zero_before_its_weight,
    index_scores_agree_with_the_oracle_for_every_dtype_and_width,
    index_scores_of_a_query_have_the_same_bits_alone,
    index_scores_have_the_same_bits_in_any_capacity_and_beside_any_sequences,
    rows_that_are_not_visible_have_the_mask_as_a_score_whatever_they_hold,
    queries_are_rotated_as_by_an_operator_of_its_own,
    a_nan_reaches_the_scores_of_its_query_or_key_only,
    nothing_gives_nothing,
];
