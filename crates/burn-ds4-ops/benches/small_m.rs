//! Products of a few rows by dense weights, at the sizes of the released models' projections.

use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use burn_ds4_ops::matmul::{
    MAX_INVARIANT_ROWS, SmallMOptions, small_m_matmul, small_m_matmul_group,
};

use super::{
    super::common::values,
    super::linear::Input,
    super::products::Product,
    harness::{Case, Outputs, Prepared},
};

const F32: FloatDType = FloatDType::F32;
const F16: FloatDType = FloatDType::F16;
const BF16: FloatDType = FloatDType::BF16;
/// Rows of the weights and columns.
const SIZES: [(usize, usize); 3] = [(4096, 4096), (7168, 2048), (129_280, 4096)];
const ROWS: [usize; 6] = [1, 2, 3, 4, 8, 16];
/// Weights that stay f32: hyper-connections, and the router where a table chooses.
const F32_SIZES: [(usize, usize); 2] = [(24, 16_384), (256, 4096)];
const F32_ROWS: [usize; 3] = [1, 2, 8];
/// Rows for which the operator uses the large-M product.
const LARGE_M_ROWS: [usize; 3] = [32, 64, 4096];
/// Projections of compressors and of the indexer, which have so many rows with many sequences.
const PROJECTIONS: [(usize, usize); 3] = [(2048, 4096), (512, 4096), (64, 4096)];
const PROJECTION_ROWS: [usize; 2] = [32, 64];
/// The same where the result is to be row-invariant.
const INVARIANT_CASES: [usize; 2] = [32, 64];
/// Rows of the weights that share a token: query and key/value rows, compressor, the indexer's
/// compressor and head weights.
const GROUP: [usize; 5] = [1024, 512, 2048, 512, 64];
const GROUP_COLUMNS: usize = 4096;
const GROUP_ROWS: [usize; 2] = [1, 2];
/// Rows from which arithmetic may be the bound.
const ARITHMETIC_ROWS: usize = 64;
/// Small, to see whether everything runs.
const SMALL: (usize, usize) = (96, 256);

/// Dtypes of x, of the weights and of the output, and rows that are not to depend on each other.
#[derive(Clone, Copy)]
pub struct Dtypes {
    name: &'static str,
    x: FloatDType,
    weights: FloatDType,
    output: FloatDType,
    invariant_rows: usize,
}

const fn dtypes(
    name: &'static str,
    x: FloatDType,
    weights: FloatDType,
    output: FloatDType,
) -> Dtypes {
    Dtypes {
        name,
        x,
        weights,
        output,
        invariant_rows: burn_ds4_ops::matmul::INVARIANT_ROWS,
    }
}

/// Sums that stay in f32.
pub const BF16_TO_F32: Dtypes = dtypes("bf16_bf16_f32", BF16, BF16, F32);
const ALL_BF16: Dtypes = dtypes("bf16_bf16_bf16", BF16, BF16, BF16);
const INVARIANT: Dtypes = Dtypes {
    name: "invariant_bf16_bf16_bf16",
    invariant_rows: MAX_INVARIANT_ROWS,
    ..ALL_BF16
};
const ALL_F32: Dtypes = dtypes("f32_f32_f32", F32, F32, F32);
const VARIANTS: [Dtypes; 4] = [
    ALL_BF16,
    dtypes("f16_f16_f16", F16, F16, F16),
    dtypes("f32_f16_f32", F32, F16, F32),
    dtypes("f32_bf16_f32", F32, BF16, F32),
];

pub fn cases() -> Vec<Case> {
    let small_m = VARIANTS.into_iter().flat_map(|dtypes| {
        let sizes = SIZES.into_iter();
        sizes.flat_map(move |size| ROWS.map(|rows| case(rows, size, dtypes)))
    });
    let f32 = F32_SIZES.into_iter();
    let f32 = f32.flat_map(|size| F32_ROWS.map(|rows| case(rows, size, ALL_F32)));
    let large_m = [SIZES[0], SIZES[2]].into_iter().flat_map(|size| {
        let handed_over = LARGE_M_ROWS.map(|rows| case(rows, size, ALL_BF16));
        let invariant = INVARIANT_CASES.map(|rows| case(rows, size, INVARIANT));
        handed_over.into_iter().chain(invariant)
    });
    let projections = PROJECTIONS.into_iter();
    let projections =
        projections.flat_map(|size| PROJECTION_ROWS.map(|rows| case(rows, size, ALL_BF16)));
    let groups = GROUP_ROWS.map(|rows| group_case(rows, ALL_BF16));
    let small = case(1, SMALL, ALL_F32);
    std::iter::once(small)
        .chain(small_m)
        .chain(f32)
        .chain(large_m)
        .chain(projections)
        .chain(groups)
        .collect()
}

/// Bytes of x and weights, and of these and the output.
fn bytes(rows: usize, (n, k): (usize, usize), dtypes: Dtypes) -> (usize, usize) {
    let size = |dtype: FloatDType| DType::from(dtype).size();
    let inputs = n * k * size(dtypes.weights) + rows * k * size(dtypes.x);
    (inputs, inputs + rows * n * size(dtypes.output))
}

pub fn options(dtypes: Dtypes) -> SmallMOptions {
    SmallMOptions {
        f32_output: dtypes.output == F32,
        invariant_rows: dtypes.invariant_rows,
    }
}

/// Values in -1..1, drawn on the device: on the host a matrix of half a gigabyte would take longer
/// than everything else.
pub fn drawn(shape: [usize; 2], dtype: FloatDType, device: &Device) -> Tensor<2> {
    let uniform = Distribution::Uniform(-1.0, 1.0);
    Tensor::<2>::random(shape, uniform, (device, DType::F32)).cast(dtype)
}

fn case(rows: usize, (n, k): (usize, usize), dtypes: Dtypes) -> Case {
    let (input_bytes, bytes) = bytes(rows, (n, k), dtypes);
    Case {
        op: "small_m_matmul",
        shape: vec![("M", rows), ("N", n), ("K", k)],
        variant: dtypes.name,
        dtype: dtypes.weights.into(),
        bytes,
        flops: (rows >= ARITHMETIC_ROWS).then_some(2 * (rows * n * k) as u64),
        input_bytes,
        build: Box::new(move |device, seed| {
            device.seed(u64::from(seed));
            let x = drawn([rows, k], dtypes.x, device);
            let weights = drawn([n, k], dtypes.weights, device);
            let (checked, options) = ((x.clone(), weights.clone()), options(dtypes));
            Prepared::new(
                move || {
                    small_m_matmul(x.clone(), weights.clone(), options).expect("arguments that fit")
                },
                move |output| check(&checked.0, &checked.1, &output, dtypes),
            )
        }),
    }
}

fn group_case(rows: usize, dtypes: Dtypes) -> Case {
    let (input_bytes, bytes) = bytes(rows, (GROUP.iter().sum(), GROUP_COLUMNS), dtypes);
    Case {
        op: "small_m_matmul",
        shape: vec![("M", rows), ("N", GROUP.iter().sum()), ("K", GROUP_COLUMNS)],
        variant: "group_bf16_bf16_bf16",
        dtype: dtypes.weights.into(),
        bytes,
        flops: None,
        input_bytes,
        build: Box::new(move |device, seed| {
            device.seed(u64::from(seed));
            let x = drawn([rows, GROUP_COLUMNS], dtypes.x, device);
            let weights = GROUP.map(|n| drawn([n, GROUP_COLUMNS], dtypes.weights, device));
            let (checked, options) = ((x.clone(), weights.clone()), options(dtypes));
            Prepared::new(
                move || {
                    Products(
                        small_m_matmul_group(x.clone(), &weights, options)
                            .expect("arguments that fit"),
                    )
                },
                move |Products(outputs)| {
                    for (weights, output) in checked.1.iter().zip(&outputs) {
                        check(&checked.0, weights, output, dtypes);
                    }
                },
            )
        }),
    }
}

/// What a group gives.
pub struct Products(pub Vec<Tensor<2>>);

impl Outputs for Products {
    fn poison(self) {
        self.0.into_iter().for_each(Outputs::poison);
    }
}

/// Checks the first row and the last, at some columns from the first to the last: the oracle is
/// slow, and so is reading all weights.
pub fn check(x: &Tensor<2>, weights: &Tensor<2>, output: &Tensor<2>, dtypes: Dtypes) {
    /// Neighbouring columns that are checked, and number of such spans.
    const SPAN: usize = 64;
    const SPANS: usize = 16;
    let [rows, _] = x.dims();
    let [n, _] = weights.dims();
    let read = |tensor: &Tensor<2>, rows: std::ops::Range<usize>, dtype| {
        let part = tensor.clone().slice_dim(0, rows);
        Input::new(part.dims(), dtype, &values(part.cast(F32)))
    };
    let mut firsts: Vec<usize> = (0..SPANS)
        .map(|i| n.saturating_sub(SPAN) * i / (SPANS - 1))
        .collect();
    firsts.dedup();
    let mut some = vec![0, rows - 1];
    some.dedup();
    for first in firsts {
        let columns = first..n.min(first + SPAN);
        let weights = read(weights, columns.clone(), dtypes.weights);
        for &row in &some {
            let product = Product {
                x: read(x, row..row + 1, dtypes.x),
                weights: Input::new(weights.shape, weights.dtype, &weights.values),
            };
            let actual = output.clone().slice([row..row + 1, columns.clone()]);
            let what = format!("row {row}, columns {columns:?}");
            product.check(&values(actual.cast(F32)), dtypes.output, &what);
        }
    }
}
