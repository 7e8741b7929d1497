//! Rotary position embedding against an `f64` oracle and a case worked out by hand.

use burn::tensor::{Device, FloatDType, IntDType, Tensor};
use burn_ds4_ops::attention::{rotate, rotate_at};

use super::common::{
    EXACT, Tolerance, absolute, assert_close, compiles_slowly, devices, every_dtype, floats,
    half_unit, integers, narrow, noise, read, rounded, skip, some_of_half, values,
};

const FITS: &str = "arguments that fit";
/// Sequences, positions, heads, channels and how many of them turn.
type Sizes = [usize; 5];
/// Sizes that vectors of any width divide or do not, all channels or none but the last, and those
/// of the released models.
const SIZES: [Sizes; 8] = [
    [2, 3, 2, 7, 4],
    [2, 3, 2, 10, 4],
    [1, 2, 3, 12, 12],
    [3, 1, 5, 16, 8],
    [2, 2, 1, 8, 2],
    [1, 5, 64, 512, 64],
    [2, 2, 64, 128, 64],
    [1, 300, 1, 72, 64],
];
/// Dtypes of the starts, and whether pairs turn back.
const TURNS: [(IntDType, bool); 6] = [
    (IntDType::I32, false),
    (IntDType::I32, true),
    (IntDType::I64, false),
    (IntDType::I64, true),
    (IntDType::U32, false),
    (IntDType::U32, true),
];

fn a_quarter_turn_maps_each_pair_to_its_perpendicular() {
    for (name, device) in devices() {
        // (x, y) by angle t is (x cos t - y sin t, x sin t + y cos t); the sign of sin sits at the
        // even channel.
        let x = floats(&[3.0, 4.0, 3.0, 4.0], [1, 2, 1, 2], device);
        let cos = floats(&[0.0, 0.0, 0.6, 0.6], [1, 2, 2], device);
        let sin = floats(&[-1.0, 1.0, -0.8, 0.8], [1, 2, 2], device);
        let expected = [-4.0, 3.0, 1.8 - 3.2, 2.4 + 2.4];
        let actual = values(rotate(x, cos, sin).expect(FITS));
        assert_close(&actual, &expected, absolute(1e-6), name);
    }
}

fn angle(pair: usize) -> f64 {
    f64::from(pair as u32 % 1000) * 0.61 - 2.0
}

/// Cosines and sines of `[batch, positions, rotated]` as [`rotate`] wants them.
fn angles([batch, positions, _, _, rotated]: Sizes, device: &Device) -> [Tensor<3>; 2] {
    let count = batch * positions * rotated;
    let sign = |i: usize| if i.is_multiple_of(2) { -1.0 } else { 1.0 };
    let cos: Vec<f64> = (0..count).map(|i| angle(i / 2).cos()).collect();
    let sin: Vec<f64> = (0..count).map(|i| angle(i / 2).sin() * sign(i)).collect();
    [cos, sin].map(|values| floats(&narrow(&values), [batch, positions, rotated], device))
}

fn oracle(x: &[f64], [_, _, heads, width, rotated]: Sizes) -> Vec<f64> {
    let mut turned = x.to_vec();
    for (row, channels) in turned.chunks_mut(width).enumerate() {
        for pair in 0..rotated / 2 {
            let at = width - rotated + 2 * pair;
            let (sin, cos) = angle(row / heads * (rotated / 2) + pair).sin_cos();
            let (a, b) = (channels[at], channels[at + 1]);
            channels[at] = a * cos - b * sin;
            channels[at + 1] = a * sin + b * cos;
        }
    }
    turned
}

/// One rounding, and what angles in f32 are off by.
fn close(dtype: FloatDType) -> Tolerance {
    Tolerance {
        absolute: 1e-6,
        relative: half_unit(dtype),
    }
}

fn the_last_channels_turn_and_every_head_by_its_position() {
    every_dtype(|name, device, dtype| {
        for &sizes in some_of_half(name, dtype, &SIZES, 3) {
            let [batch, positions, heads, width, rotated] = sizes;
            let shape = [batch, positions, heads, width];
            let what = format!("{name} {sizes:?}");
            let data = noise(shape.iter().product(), 1);
            let (x, held) = rounded(&data, shape, dtype, device);
            let [cos, sin] = angles(sizes, device);
            let turned = rotate(x.clone(), cos.clone(), sin.clone()).expect(FITS);
            assert_eq!(turned.dtype(), dtype.into(), "{what}");
            let actual = read(&turned);
            assert_close(&actual, &narrow(&oracle(&held, sizes)), close(dtype), &what);
            let before = read(&x);
            for (turned, x) in actual.chunks(width).zip(before.chunks(width)) {
                assert_eq!(turned[..width - rotated], x[..width - rotated], "{what}");
            }
            if dtype == FloatDType::F32 {
                let restored = values(rotate(turned, cos, sin.neg()).expect(FITS));
                assert_close(&restored, &before, absolute(2e-6), &format!("{what}, back"));
            }
        }
    });
}

fn views_turn_as_their_copies() {
    every_dtype(|name, device, dtype| {
        let sizes @ [batch, positions, heads, width, _] = [2, 3, 4, 16, 8];
        let [cos, sin] = angles(sizes, device);
        let data = noise(2 * batch * positions * heads * width, 3);
        let all = floats(&data, [batch, heads, positions, 2 * width], device).cast(dtype);
        // Heads in front of positions, and every other half of the channels.
        let view = all.slice_dim(3, width..2 * width).swap_dims(1, 2);
        let (copy, _) = rounded(
            &read(&view),
            [batch, positions, heads, width],
            dtype,
            device,
        );
        let [view, copy] = [view, copy].map(|x| rotate(x, cos.clone(), sin.clone()).expect(FITS));
        assert_eq!(read(&view), read(&copy), "{name}");
        let wide =
            |angles: Tensor<3>| Tensor::cat(vec![angles.clone(), angles], 2).slice_dim(2, 0..8);
        let data = noise(batch * positions * heads * width, 4);
        let (x, _) = rounded(&data, [batch, positions, heads, width], dtype, device);
        let cut = rotate(x.clone(), wide(cos.clone()), wide(sin.clone())).expect(FITS);
        assert_eq!(
            read(&cut),
            read(&rotate(x, cos, sin).expect(FITS)),
            "{name}"
        );
    });
}

/// Angles of a table at a position.
fn angle_at(position: usize, pair: usize) -> f64 {
    position as f64 * 0.37 / (pair + 1) as f64
}

/// A table of so many positions, as [`rotate_at`] wants it.
pub fn table(positions: usize, rotated: usize, device: &Device) -> Tensor<2> {
    let mut values = Vec::new();
    for position in 0..positions {
        let angles = (0..rotated / 2).map(|pair| angle_at(position, pair));
        values.extend(angles.clone().map(f64::cos));
        values.extend(angles.map(f64::sin));
    }
    floats(&narrow(&values), [positions, rotated], device)
}

/// Rows of `width` channels turned by the angles of their positions, each for all its heads.
pub fn turned_at(x: &[f64], width: usize, rotated: usize, positions: &[usize]) -> Vec<f64> {
    let mut turned = x.to_vec();
    let heads = x.len() / width / positions.len();
    for (row, channels) in turned.chunks_mut(width).enumerate() {
        for pair in 0..rotated / 2 {
            let at = width - rotated + 2 * pair;
            let (sin, cos) = angle_at(positions[row / heads], pair).sin_cos();
            let (a, b) = (channels[at], channels[at + 1]);
            channels[at] = a * cos - b * sin;
            channels[at + 1] = a * sin + b * cos;
        }
    }
    turned
}

/// Rows turned back, which is what turning does where the channels of each pair change places
/// before and after.
pub fn turned_back_at(x: &[f64], width: usize, rotated: usize, positions: &[usize]) -> Vec<f64> {
    let swapped = |mut rows: Vec<f64>| {
        for row in rows.chunks_mut(width) {
            for pair in row[width - rotated..].chunks_mut(2) {
                pair.swap(0, 1);
            }
        }
        rows
    };
    let rows = swapped(x.to_vec());
    swapped(turned_at(&rows, width, rotated, positions))
}

/// The same rows by [`rotate`], with the angles of every row written out.
fn spelled_out(x: Tensor<4>, positions: &[usize], rotated: usize, inverse: bool) -> Tensor<4> {
    let [batch, count, _, _] = x.dims();
    let sign = if inverse { -1.0 } else { 1.0 };
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    for position in positions {
        for channel in 0..rotated {
            let angle = angle_at(*position, channel / 2);
            let side = if channel.is_multiple_of(2) { -1.0 } else { 1.0 };
            cos.push(angle.cos());
            sin.push(angle.sin() * side * sign);
        }
    }
    let shape = [batch, count, rotated];
    let [cos, sin] = [cos, sin].map(|angles| floats(&narrow(&angles), shape, &x.device()));
    rotate(x, cos, sin).expect(FITS)
}

fn positions_of_a_table_turn_as_by_angles_that_are_given() {
    every_dtype(|name, device, dtype| {
        let chosen = some_of_half(name, dtype, &SIZES, 3);
        for (number, &sizes) in chosen.enumerate() {
            let [batch, count, heads, width, rotated] = sizes;
            let shape = [batch, count, heads, width];
            let starts: Vec<i64> = (0..batch as i64).map(|sequence| 7 * sequence + 2).collect();
            let positions: Vec<usize> = starts
                .iter()
                .flat_map(|start| (0..count).map(|i| *start as usize + i))
                .collect();
            let known = positions.iter().max().map_or(1, |last| last + 1);
            let data = noise(shape.iter().product(), 5);
            let (x, held) = rounded(&data, shape, dtype, device);
            // Each has a kernel of its own: where these compile slowly, they take turns.
            let (first, step) = match compiles_slowly(name) {
                true => (number % TURNS.len(), TURNS.len()),
                false => (0, 1),
            };
            for (integer, inverse) in TURNS.into_iter().skip(first).step_by(step) {
                if !device.supports_dtype(integer) {
                    skip(name, &format!("{integer:?}").to_lowercase());
                    continue;
                }
                let what = format!("{name} {sizes:?} {integer:?} {inverse}");
                let start = integers(&starts, [batch], device).cast(integer);
                // The same table as the first columns of a wider one.
                let angles = table(known, rotated, device);
                let angles = Tensor::cat(vec![angles.clone(), angles], 1);
                let angles = angles.slice_dim(1, 0..rotated);
                let turned = rotate_at(x.clone(), angles, start, inverse).expect(FITS);
                assert_eq!(turned.dtype(), dtype.into(), "{what}");
                let expected = spelled_out(x.clone(), &positions, rotated, inverse);
                assert_close(&read(&turned), &read(&expected), EXACT, &what);
                if !inverse {
                    let expected = turned_at(&held, width, rotated, &positions);
                    assert_close(&read(&turned), &narrow(&expected), close(dtype), &what);
                }
            }
        }
    });
}

fn a_sequence_that_is_not_there_turns_as_from_the_first_position() {
    for (name, device) in devices() {
        let x = floats(&noise(2 * 3 * 8, 6), [2, 3, 1, 8], device);
        let angles = table(9, 4, device);
        let turn = |starts: [i64; 2]| {
            let start = integers(&starts, [2], device);
            values(rotate_at(x.clone(), angles.clone(), start, false).expect(FITS))
        };
        assert_eq!(turn([-5, 6]), turn([0, 6]), "{name}");
    }
}

fn positions_beyond_the_table_turn_as_its_last_where_the_host_cannot_see_them() {
    for (name, device) in devices() {
        let x = floats(&noise(2 * 3 * 8, 7), [2, 3, 1, 8], device);
        let start = integers(&[7, 1 << 30], [2], device);
        let turned = rotate_at(x.clone(), table(9, 4, device), start, false);
        if name == "flex" {
            let message = turned.err().map(|error| error.to_string());
            let expected =
                "`last position` is 1073741826, expected less than 9, the positions of angles";
            assert_eq!(message.as_deref(), Some(expected), "{name}");
        } else {
            let expected = spelled_out(x, &[7, 8, 8, 8, 8, 8], 4, false);
            assert_eq!(values(turned.expect(FITS)), values(expected), "{name}");
        }
    }
}

catalogue![
    a_quarter_turn_maps_each_pair_to_its_perpendicular,
    a_sequence_that_is_not_there_turns_as_from_the_first_position,
    positions_beyond_the_table_turn_as_its_last_where_the_host_cannot_see_them,
    positions_of_a_table_turn_as_by_angles_that_are_given,
    the_last_channels_turn_and_every_head_by_its_position,
    views_turn_as_their_copies,
];
