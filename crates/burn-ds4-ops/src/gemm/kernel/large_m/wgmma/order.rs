//! The order of the columns of `x` that is multiplied by FP4 weights: a lane's 32 neighbouring
//! columns of every 128 are where fragments expect that lane's.

use cubecl::prelude::*;

use crate::caps::Target;
use crate::gemm::kernel::input::bf16_pair;
use crate::gemm::kernel::weights::WeightFormat;
use crate::intrinsics::{group_max, pack_e4m3};
use crate::roundtrip::SmallFloat;
use crate::roundtrip::kernel::{power_of_two, scale_of};

/// The column at a position.
///
/// Of a block of 128 columns, lane `q` of four has 32, four words of codes. Pair `i` of a word has
/// codes `i` and `i + 4`.
#[cube]
pub(super) fn column_at(position: u32, #[comptime] format: WeightFormat) -> u32 {
    match comptime!(format) {
        WeightFormat::Fp4(_) => {
            let (word, pair) = (position / 32 % 4, position / 8 % 4);
            let (lane, upper) = (position / 2 % 4, position % 2);
            position / 128 * 128 + lane * 32 + word * 8 + upper * 4 + pair
        }
        _ => position,
    }
}

/// Puts the columns of rows of `bf16` into that order, and zeros behind them up to a multiple of
/// 128.
///
/// - `x`: `[rows, columns]` in vectors of eight, `stride` from one row to the next
/// - `output`: `[rows, columns with padding]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn permute_kernel(
    x: &[Vector<u32, Const<4>>],
    stride: usize,
    vectors: u32,
    rows: u32,
    output: &mut [Vector<u32, Const<4>>],
) {
    // A unit has one word of codes of each lane, 32 columns.
    let row_units = (vectors + 15) / 16 * 4;
    let row = ABSOLUTE_POS / row_units as usize;
    let word = (ABSOLUTE_POS % row_units as usize) as u32;
    if row < rows as usize {
        let first = word / 4 * 16 + word % 4;
        let mut columns = Array::<u32>::new(16usize);
        #[unroll]
        for lane in 0..4u32 {
            let vector = first + 4 * lane;
            let inside = vector < vectors;
            let words = x[row * stride + select(inside, vector, 0u32) as usize];
            #[unroll]
            for w in 0..4usize {
                columns[comptime!(4 * lane as usize + w)] = select(inside, words.extract(w), 0u32);
            }
        }
        #[unroll]
        for pair in 0..4usize {
            let mut vector = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for lane in 0..4usize {
                let low = columns[comptime!(4 * lane + pair / 2)];
                let high = columns[comptime!(4 * lane + 2 + pair / 2)];
                let (low, high) = if comptime!(pair % 2 == 0) {
                    (low << 16, high << 16)
                } else {
                    (low, high)
                };
                vector.insert(lane, bf16_pair(low, high));
            }
            output[row * (row_units * 4) as usize + (word * 4) as usize + pair] = vector;
        }
    }
}

/// Rounds rows of `bf16` to E4M3, with a scale for every 128 columns, as
/// [`fp8_roundtrip`](crate::quant::fp8_roundtrip) does. What is not finite becomes NaN.
///
/// - `x`: `[rows, columns]` in vectors of eight, `stride` from one row to the next
/// - `codes`: `[rows, columns with padding to a multiple of 128]`
/// - `scales`: `[blocks of 128 columns, rows]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn quantize_kernel(
    x: &[Vector<u32, Const<4>>],
    stride: usize,
    vectors: u32,
    rows: u32,
    codes: &mut [Vector<u32, Const<2>>],
    scales: &mut [f32],
    #[comptime] target: Target,
) {
    // 16 units have a block, a vector each.
    let blocks = (vectors + 15) / 16;
    let block = ABSOLUTE_POS / 16;
    let row = block / blocks as usize;
    let block = (block % blocks as usize) as u32;
    let own = UNIT_POS % 16;
    let vector = block * 16 + own;
    let exists = row < rows as usize;
    let inside = exists && vector < vectors;
    let words = x[select(inside, row * stride + vector as usize, 0usize)];
    let mut values = Array::<f32>::new(8usize);
    let mut largest = 0.0f32;
    #[unroll]
    for i in 0..8usize {
        let word = words.extract(comptime!(i / 2));
        let bits = if comptime!(i % 2 == 0) {
            word << 16
        } else {
            word & 0xffff_0000u32
        };
        let bits = select(inside, bits, 0u32);
        let finite = bits & 0x7f80_0000u32 != 0x7f80_0000u32;
        let magnitude = f32::reinterpret(bits & 0x7fff_ffffu32);
        largest = max(largest, select(finite, magnitude, 0.0f32));
        values[i] = f32::reinterpret(select(finite, bits, 0x7fc0_0000u32));
    }
    let scale = scale_of(
        group_max(largest, 16u32, target),
        comptime!(SmallFloat::Fp8.format()),
    );
    let inverse = power_of_two(254 - scale);
    #[unroll]
    for i in 0..8usize {
        values[i] *= inverse;
    }
    if exists {
        let mut words = Vector::<u32, Const<2>>::new(pack_e4m3(&values, 0usize));
        words.insert(1usize, pack_e4m3(&values, 4usize));
        codes[(row * blocks as usize + block as usize) * 16 + own as usize] = words;
        if own == 0 {
            scales[block as usize * rows as usize + row] = power_of_two(scale);
        }
    }
}

// With fusion, tensors are of another backend.
#[cfg(all(test, not(feature = "fusion")))]
mod tests {
    use burn::tensor::{DType, Int, Tensor, TensorData};
    use burn_cubecl::CubeBackend;

    use super::*;
    use crate::device::DeviceSpec;

    const ROWS: usize = 3;
    const COLUMNS: usize = 160;
    const PADDED: usize = 256;

    /// Two numbers of 16 bits in a word.
    fn words(numbers: &[u32]) -> Vec<u32> {
        let pairs = numbers.chunks_exact(2);
        pairs.map(|pair| pair[0] | pair[1] << 16).collect()
    }

    #[test]
    fn a_lane_finds_its_32_neighbouring_columns() {
        let number = |row: usize, column: usize| (row * COLUMNS + column + 1) as u32;
        let mut x = Vec::new();
        let mut expected = vec![0; ROWS * PADDED];
        for row in 0..ROWS {
            for column in 0..COLUMNS {
                x.push(number(row, column));
                let (lane, word, code) = (column % 128 / 32, column / 8 % 4, column % 8);
                let (pair, upper) = (code % 4, code / 4);
                let position = column / 128 * 128 + 32 * word + 8 * pair + 2 * lane + upper;
                expected[row * PADDED + position] = number(row, column);
            }
        }
        for spec in [DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
            let Ok(device) = spec.init() else {
                continue;
            };
            let on_device = |numbers: &[u32]| {
                let words = words(numbers);
                let data = TensorData::new(words.clone(), [words.len()]);
                Tensor::<1, Int>::from_data(data, (&device, DType::U32))
            };
            let primitive = |tensor: Tensor<1, Int>| {
                let tensor = tensor.try_into_primitive::<CubeBackend>();
                tensor.expect("a tensor of this backend")
            };
            let (x, output) = (on_device(&x), on_device(&vec![7; ROWS * PADDED]));
            let (read, written) = (primitive(x), primitive(output.clone()));
            // SAFETY: there is a unit for every 32 columns of a row, and more do nothing.
            unsafe {
                permute_kernel::launch_unchecked(
                    &read.client.clone(),
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(32),
                    AddressType::U32,
                    read.into_buffer_arg(),
                    COLUMNS / 8,
                    (COLUMNS / 8) as u32,
                    ROWS as u32,
                    written.into_buffer_arg(),
                );
            }
            let actual: Vec<u32> = output.into_data().iter::<u32>().collect();
            assert!(actual == words(&expected), "{spec}: {actual:x?}");
        }
    }
}
